"""The message of a buffer that has stood still for too long."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.buffer.groups import StoredGroup
from asyncrl.buffer.view import BufferView, SlotState

_MOST_LINES = 12
"""Groups listed one by one; the rest are counted."""


def starved_message(view: BufferView, stored: Mapping[int, StoredGroup], *, waits_for: str, missing: tuple[int, ...], now_s: float,
                    stalled_s: float) -> str:
    """Who waits for what: each missing group with its state, then slots, versions and engines."""
    lines = [f"{waits_for}, and nothing has happened for {stalled_s:.6g} s."]
    lines += [f"  {_group_line(stored[group_id], now_s=now_s)}" for group_id in missing[:_MOST_LINES]]
    if len(missing) > _MOST_LINES:
        lines.append(f"  and {len(missing) - _MOST_LINES} more")
    states = {state: sum(slot.state is state for slot in view.slots) for state in SlotState}
    lines.append(f"  slots held: {len(view.slots)} ({', '.join(f'{count} {state.value}' for state, count in states.items())}), "
                 f"depth {view.depth_groups}; trainer at version {view.version}, engines serve {view.served_version}")
    engines = [f"{engine.name} at {engine.version}{'' if engine.serving else ' (fenced)'}" for engine in view.engines]
    lines.append(f"  engines: {', '.join(engines) or 'none was added'}")
    return "\n".join(lines)


def _group_line(group: StoredGroup, *, now_s: float) -> str:
    missing = group.missing
    some = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
    return (f"group {group.slot.group_id} (prompt {group.slot.prompt.prompt_id!r}): generating for {now_s - group.since_s:.6g} s, "
            f"{len(group.rollouts)} of {group.group_size} rollouts complete, missing {some}")
