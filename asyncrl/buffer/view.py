"""What a policy sees of the buffer: ints and tuples, frozen, nothing of asyncio or time."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from asyncrl.types import Prompt


class SlotState(enum.Enum):
    """Where a group stands; a dropped or released group has no slot any more."""

    GENERATING = "generating"
    """At least one rollout is not complete."""
    READY = "ready"
    """All rollouts are complete and the group may be taken."""
    TAKEN = "taken"
    """In a batch; the slot is held until every serving engine has weights that contain the batch."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """The right to generate one group."""

    group_id: int
    prompt: Prompt
    policy_version: int
    """Every token of the group is written by this version or a newer one."""


@dataclass(frozen=True, slots=True)
class SlotView:
    """One held slot."""

    group_id: int
    policy_version: int
    """At admission, as in `Slot`."""
    state: SlotState = SlotState.GENERATING
    batch_version: int | None = None
    """Version of the batch that took the group."""
    overtaken: int = 0
    """Groups admitted later that were taken earlier."""
    oldest_version: int | None = None
    """The version that wrote the oldest token of a group that is whole; None before, and without a token."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """What one engine is known to hold."""

    name: str
    version: int
    """Acknowledged last."""
    serving: bool
    """False: fenced; it gets no request and holds no slot back."""


@dataclass(frozen=True, slots=True)
class BufferView:
    """The whole state a policy decides on."""

    version: int
    """Steps trained so far: the version the next batch trains from."""
    served_version: int
    """Newest version that every serving engine is known to hold; never falls."""
    depth_groups: int
    """Slots the run wants to hold at once."""
    slots: tuple[SlotView, ...]
    """Held slots in order of admission."""
    engines: tuple[EngineView, ...] = ()
    ended: bool = False
    """No prompt is left: nothing more will be admitted."""


@dataclass(frozen=True, slots=True)
class Missing:
    """No batch can be selected until these groups are ready or gone; empty when more must be admitted first."""

    group_ids: tuple[int, ...]
