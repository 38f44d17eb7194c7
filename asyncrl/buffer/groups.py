"""Groups while they fill, and what is still owed of groups that were dropped."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from asyncrl.accounting import Count
from asyncrl.buffer.view import Slot
from asyncrl.errors import LedgerError, NonFiniteError, ShapeError
from asyncrl.types import Rollout, RolloutGroup


@dataclass(slots=True)
class StoredGroup:
    """One held group and the rollouts it has so far, by index."""

    slot: Slot
    group_size: int
    since_s: float
    """When it was admitted."""
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    bytes: int = 0
    """Of the arrays stored."""

    @property
    def missing(self) -> list[int]:
        """Indices whose rollout has not come."""
        return [index for index in range(self.group_size) if index not in self.rollouts]

    @property
    def count(self) -> Count:
        """Tokens and rollouts stored, counted from the rollouts themselves."""
        return Count(sum(rollout.num_tokens for rollout in self.rollouts.values()), len(self.rollouts))

    def check(self, rollout: Rollout) -> None:
        """Raise ShapeError, LedgerError or NonFiniteError unless the rollout fits into the group."""
        name = f"rollout {rollout.index} of group {rollout.group_id}"
        if not 0 <= rollout.index < self.group_size:
            raise ShapeError(f"{name}: the index must be in [0, {self.group_size})")
        if rollout.prompt_id != self.slot.prompt.prompt_id:
            raise ShapeError(f"{name} answers prompt {rollout.prompt_id!r}; the group was admitted for {self.slot.prompt.prompt_id!r}")
        if rollout.index in self.rollouts:
            raise LedgerError(f"{name} was completed twice")
        if not rollout.status.is_error and not abs(rollout.reward) < float("inf"):
            raise NonFiniteError(f"{name} has reward {rollout.reward}; a reward that failed is a status, not a number")

    def add(self, rollout: Rollout) -> None:
        """Store a checked rollout; one that ended with an error gets no gradient."""
        if rollout.status.is_error:
            rollout = replace(rollout, sequences=tuple(sequence.masked() for sequence in rollout.sequences))
        self.rollouts[rollout.index] = rollout
        self.bytes += rollout_bytes(rollout)

    def build(self) -> RolloutGroup:
        """The whole group, rollouts in order of index."""
        rollouts = tuple(self.rollouts[index] for index in range(self.group_size))
        return RolloutGroup(self.slot.group_id, self.slot.prompt, rollouts)


class LateRollouts:
    """Rollouts that may still come in although their group was dropped."""

    def __init__(self) -> None:
        self._owed: dict[int, tuple[str, set[int]]] = {}

    def expect(self, group: StoredGroup, reason: str) -> None:
        """The group was dropped; those it misses may still be on their way."""
        if group.missing:
            self._owed[group.slot.group_id] = reason, set(group.missing)

    def settle(self, rollout: Rollout) -> str | None:
        """Why the rollout's group was dropped, or None when none is owed under this group and index."""
        reason, indices = self._owed.get(rollout.group_id, (None, set()))
        if rollout.index not in indices:
            return None
        indices.discard(rollout.index)
        if not indices:
            del self._owed[rollout.group_id]
        return reason


def rollout_bytes(rollout: Rollout) -> int:
    """Bytes of all arrays of a rollout."""
    return sum(part.nbytes for sequence in rollout.sequences
               for part in (sequence.tokens, sequence.loss_mask, sequence.rollout_logprobs, sequence.turn_ids, sequence.records))
