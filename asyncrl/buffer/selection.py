"""Which ready groups make the next batch. Pure functions over a BufferView."""

from __future__ import annotations

import dataclasses

from asyncrl.buffer.view import BufferView, Missing, SlotState, SlotView


def oldest_ready(view: BufferView, *, groups_per_step: int) -> tuple[int, ...] | Missing:
    """The P ready groups admitted first, or the groups that still generate when fewer than P are ready."""
    ready = [slot.group_id for slot in view.slots if slot.state is SlotState.READY]
    if len(ready) < groups_per_step:
        return Missing(tuple(slot.group_id for slot in view.slots if slot.state is SlotState.GENERATING))
    return tuple(ready[:groups_per_step])


def within_window(view: BufferView, *, groups_per_step: int, window: int) -> tuple[int, ...] | Missing:
    """The P oldest ready groups, unless one that still generates would be overtaken by more than `window` − 1 groups.

    `Missing` then names the groups that must be ready, or gone, first. With a window of 1 batches follow admission exactly.
    """
    chosen = oldest_ready(view, groups_per_step=groups_per_step)
    if isinstance(chosen, Missing):
        return chosen
    late = tuple(slot.group_id for slot in overtake(view.slots, chosen) if slot.overtaken > window - 1)
    return Missing(late) if late else chosen


def overtake(slots: tuple[SlotView, ...], chosen: tuple[int, ...]) -> list[SlotView]:
    """The slots that wait on when `chosen` is taken, in order of admission, each with its new count of groups that overtook it."""
    selected, left, later = set(chosen), [], 0
    for slot in reversed(slots):
        if slot.group_id in selected:
            later += 1
        elif slot.state is not SlotState.TAKEN:
            left.append(dataclasses.replace(slot, overtaken=slot.overtaken + later) if later else slot)
    return left[::-1]
