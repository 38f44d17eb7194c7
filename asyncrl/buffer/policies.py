"""The rules of admission and selection. Pure and synchronous: a view in, numbers and ids out.

All admit while fewer slots are held than they have, and a slot is held from admission until every serving engine has
weights that contain its batch. They differ in how many slots there are, in what a batch may consist of, and in what they
promise about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from asyncrl.buffer.admission import capacity_groups, default_window
from asyncrl.buffer.selection import oldest_ready, within_window
from asyncrl.buffer.staleness import check_staleness
from asyncrl.buffer.view import BufferView, Missing, SlotState, SlotView
from asyncrl.errors import ConfigError
from asyncrl.types import Batch


class Policy(Protocol):
    """Decides who starts and what is trained."""

    @property
    def groups_per_step(self) -> int:
        """P, groups of a batch."""

    @property
    def capacity_groups(self) -> int:
        """B, slots that may be held at once."""

    def admit(self, view: BufferView) -> int:
        """How many groups may start now."""

    def select(self, view: BufferView) -> tuple[int, ...] | Missing:
        """Group ids of the next batch in order of admission, or what it waits for."""

    def is_expired(self, slot: SlotView, version: int) -> bool:
        """Whether a whole group may not be trained on from `version`: it is dropped before `select`, its prompt begun anew."""

    def oldest_trained(self, version: int) -> int:
        """The oldest version whose tokens have a gradient in the step from `version`."""

    def check(self, batch: Batch, version: int) -> None:
        """Raise StalenessError unless the batch, older tokens masked, keeps the promise when it trains from `version`."""


class TakesAll:
    """Of a policy that trains on every token of every group it admits."""

    __slots__ = ()

    def is_expired(self, slot: SlotView, version: int) -> bool:
        """Never."""
        return False

    def oldest_trained(self, version: int) -> int:
        """The first: no token is masked for its age."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease(TakesAll):
    """No token is ever staler than `max_staleness`; the proof is in `asyncrl.buffer.admission`.

    Raises ConfigError when window, staleness and publish interval cannot go together.
    """

    groups_per_step: int
    max_staleness: int
    window: int | None = None
    """W: a group may be overtaken by W − 1 others; None takes `default_window`."""
    publish_every_steps: int = 1

    def __post_init__(self) -> None:
        self._capacity()

    @property
    def capacity_groups(self) -> int:
        """(K + 1) · P − (W − 1)."""
        return self._capacity()

    @property
    def effective_window(self) -> int:
        """W with the default filled in."""
        if self.window is not None:
            return self.window
        return default_window(self.groups_per_step, max_staleness=self.max_staleness, publish_every_steps=self.publish_every_steps)

    def admit(self, view: BufferView) -> int:
        """Free slots within capacity and depth."""
        return _free_slots(view, self.capacity_groups)

    def select(self, view: BufferView) -> tuple[int, ...] | Missing:
        """Oldest ready first, inside the window."""
        return within_window(view, groups_per_step=self.groups_per_step, window=self.effective_window)

    def check(self, batch: Batch, version: int) -> None:
        """Every token in [0, K]."""
        check_staleness(batch, version, least=0, most=self.max_staleness)

    def _capacity(self) -> int:
        return capacity_groups(self.groups_per_step, max_staleness=self.max_staleness, window=self.effective_window,
                               publish_every_steps=self.publish_every_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Soft(TakesAll):
    """AReaL's rule (arXiv 2505.24298): bounds the mean staleness, not the largest.

    The paper counts: accepted ≤ (K + version + 1) · P, over the whole run. What was accepted is `version` batches the engines
    have, plus the slots held, so the rule reads (K + 1) · P − held. Nothing is counted since the start, so nothing
    is off after a resume. Groups are taken as they become ready: a slow one may be overtaken without end.
    """

    groups_per_step: int
    max_staleness: int
    publish_every_steps: int = 1

    def __post_init__(self) -> None:
        self._capacity()

    @property
    def capacity_groups(self) -> int:
        """(K + 1) · P."""
        return self._capacity()

    def admit(self, view: BufferView) -> int:
        """Free slots within capacity and depth."""
        return _free_slots(view, self.capacity_groups)

    def select(self, view: BufferView) -> tuple[int, ...] | Missing:
        """Oldest ready first."""
        return oldest_ready(view, groups_per_step=self.groups_per_step)

    def check(self, batch: Batch, version: int) -> None:
        """No token from the future; how old they are is reported, not bounded."""
        check_staleness(batch, version, least=0, most=None)

    def _capacity(self) -> int:
        return capacity_groups(self.groups_per_step, max_staleness=self.max_staleness, window=1,
                               publish_every_steps=self.publish_every_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(Soft):
    """Admits as `Soft` does, and drops whole groups that hold a token staler than `cut_staleness`: no such token is trained on.

    A group is judged when it is whole. One that took long is stale, so the long answers are those that are lost.
    """

    cut_staleness: int

    def __post_init__(self) -> None:
        Soft.__post_init__(self)
        require_reachable_cut(self.cut_staleness, publish_every_steps=self.publish_every_steps)

    def is_expired(self, slot: SlotView, version: int) -> bool:
        """Whether its oldest token is staler than the cut."""
        return slot.oldest_version is not None and version - slot.oldest_version > self.cut_staleness

    def check(self, batch: Batch, version: int) -> None:
        """Every token in [0, cut]."""
        check_staleness(batch, version, least=0, most=self.cut_staleness)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMask(Soft):
    """Admits and selects as `Soft` does, and takes the gradient from tokens staler than `cut_staleness`.

    The rest of a rollout, and its reward in the baseline of its group, stay.
    """

    cut_staleness: int

    def __post_init__(self) -> None:
        Soft.__post_init__(self)
        require_reachable_cut(self.cut_staleness, publish_every_steps=self.publish_every_steps)

    def oldest_trained(self, version: int) -> int:
        """`version` − cut."""
        return version - self.cut_staleness

    def check(self, batch: Batch, version: int) -> None:
        """Every token that has a gradient in [0, cut]; none from the future."""
        check_staleness(batch, version, least=0, most=None)
        check_staleness(batch, version, least=0, most=self.cut_staleness, masked=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLag(TakesAll):
    """Every token of every batch exactly `lag_steps` old, once the run is that old: for experiments.

    The batch of version t holds the P groups admitted while the engines held version max(start, t − n). The first version
    admits n + 1 batches, each later one a single batch. A batch is selected only when the engines hold this version, nothing
    generates and nothing can be admitted, so no rollout ever sees two versions; engines rest while the trainer steps.
    """

    groups_per_step: int
    lag_steps: int
    start_version: int = 0
    """Version the run began or resumed at, with an empty buffer."""

    @property
    def capacity_groups(self) -> int:
        """(n + 1) · P."""
        return (self.lag_steps + 1) * self.groups_per_step

    def admit(self, view: BufferView) -> int:
        """Free slots; depth is part of the rule and cannot be set."""
        return max(0, self.capacity_groups - len(view.slots))

    def select(self, view: BufferView) -> tuple[int, ...] | Missing:
        """The oldest P, once every slot is filled and ready, or the data have ended.

        A slot of the batch before is not free yet: the engines have not acknowledged what it made. What they still have to write
        would be written, or replaced after a drop, one version later than the batch needs it.
        """
        generating = tuple(slot.group_id for slot in view.slots if slot.state is SlotState.GENERATING)
        is_acknowledged = all(slot.state is not SlotState.TAKEN for slot in view.slots)
        if generating or not is_acknowledged or (self.admit(view) and not view.ended):
            return Missing(generating)
        return oldest_ready(view, groups_per_step=self.groups_per_step)

    def check(self, batch: Batch, version: int) -> None:
        """Every token min(n, steps since the start) old."""
        staleness = min(self.lag_steps, version - self.start_version)
        check_staleness(batch, version, least=staleness, most=staleness)


def _free_slots(view: BufferView, capacity_groups: int) -> int:
    return max(0, min(capacity_groups, view.depth_groups) - len(view.slots))


def require_publish_every_step(publish_every_steps: int) -> None:
    """Raise ConfigError unless engines get every version, which an exact lag needs."""
    if publish_every_steps != 1:
        raise ConfigError("buffer.policy.kind, weights.publish_every_steps", value=("fixed_lag", publish_every_steps),
                          allowed="publish_every_steps = 1 with fixed_lag",
                          remedy="Publish every step, or choose the policy lease.")


def require_reachable_cut(cut_staleness: int, *, publish_every_steps: int) -> None:
    """Raise ConfigError unless what engines write just before they get a version is young enough to be trained on."""
    if cut_staleness < publish_every_steps - 1:
        raise ConfigError("buffer.policy.cut_staleness, weights.publish_every_steps", value=(cut_staleness, publish_every_steps),
                          allowed="cut_staleness >= publish_every_steps - 1",
                          remedy="The last batches before a publish are so old when they are begun: raise the cut, or publish more often.")
