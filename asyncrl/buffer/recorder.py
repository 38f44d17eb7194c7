"""The journal of a run: what was admitted, scored, dropped, and which batch each step trains on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal, Protocol

from asyncrl.accounting import RolloutKey
from asyncrl.buffer.view import Slot
from asyncrl.types import Batch, RolloutGroup, Sequence

EventKind = Literal["admitted", "partial", "scored", "dropped", "batch_recorded", "step_done"]


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """What it takes to make a step again: a redo log names the batch before the step begins."""

    version: int
    group_ids: tuple[int, ...]
    seed: int
    learning_rate: float

    @classmethod
    def of(cls, batch: Batch, *, seed: int, learning_rate: float) -> BatchRecord:
        """The record of a batch, its groups in order."""
        return cls(batch.version, tuple(group.group_id for group in batch.groups), seed, learning_rate)


class Recorder(Protocol):
    """The buffer calls admitted, scored and dropped; workers call partial; the loop calls the other two around each step."""

    def admitted(self, slot: Slot) -> None:
        """A group may be generated."""

    def partial(self, key: RolloutKey, sequences: tuple[Sequence, ...]) -> None:
        """A rollout was interrupted; this is what is written so far."""

    def scored(self, group: RolloutGroup) -> None:
        """A group is whole, rewarded and ready."""

    def dropped(self, group_id: int, reason: str) -> None:
        """A group will not be trained on."""

    def batch_recorded(self, record: BatchRecord) -> None:
        """The next step trains on this; called before it begins."""

    def step_done(self, version: int) -> None:
        """The step that trained from `version` is done."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the journal."""

    number: int
    """Counts from 0 without gaps, also over events no longer kept."""
    kind: EventKind
    subject: int | RolloutKey
    """Group id, rollout key, or version of the batch."""
    detail: str = ""
    """The reason of a drop."""


class MemoryRecorder:
    """Keeps the newest events and all batches whose step is not done. Lost with the process."""

    def __init__(self, *, max_events: int = 10_000) -> None:
        # at 100 to 250 bytes an event, 2 MB at most: little beside the controller, and some hundred steps of a small run
        self._events: deque[Event] = deque(maxlen=max_events)
        self._next_number = 0
        self._open: dict[int, BatchRecord] = {}

    @property
    def events(self) -> tuple[Event, ...]:
        """Oldest first; the oldest are gone once there are more than `max_events`."""
        return tuple(self._events)

    @property
    def open_batches(self) -> tuple[BatchRecord, ...]:
        """Recorded, but their step is not done; oldest first."""
        return tuple(self._open.values())

    def admitted(self, slot: Slot) -> None:
        """See `Recorder`."""
        self._note("admitted", slot.group_id)

    def partial(self, key: RolloutKey, sequences: tuple[Sequence, ...]) -> None:
        """See `Recorder`; keeps how many tokens there were."""
        self._note("partial", key, f"{sum(sequence.num_sampled_tokens for sequence in sequences)} tokens")

    def scored(self, group: RolloutGroup) -> None:
        """See `Recorder`."""
        self._note("scored", group.group_id)

    def dropped(self, group_id: int, reason: str) -> None:
        """See `Recorder`."""
        self._note("dropped", group_id, reason)

    def batch_recorded(self, record: BatchRecord) -> None:
        """See `Recorder`."""
        self._open[record.version] = record
        self._note("batch_recorded", record.version)

    def step_done(self, version: int) -> None:
        """See `Recorder`. Raises KeyError when no batch of this version is open."""
        del self._open[version]
        self._note("step_done", version)

    def _note(self, kind: EventKind, subject: int | RolloutKey, detail: str = "") -> None:
        self._events.append(Event(self._next_number, kind, subject, detail))
        self._next_number += 1
