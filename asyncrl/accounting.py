"""The ledger: every sampled token and every rollout is somewhere, and two independent counts agree on it.

One side is counted as things happen: tokens when an engine's chunk arrives, then what was trained, masked and dropped. The
other side is counted anew at each check by those who hold the rest: the buffer counts the rollouts it stores, the workers
count what their running sessions have written. generated = trained + masked + dropped + buffered + in flight fails as soon
as one rollout is lost, counted twice, or changes its length on the way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncrl.errors import LedgerError
from asyncrl.types import Batch, Rollout

RolloutKey = tuple[int, int, int]
"""(group_id, index, attempt)"""


def rollout_key(rollout: Rollout) -> RolloutKey:
    """The key a rollout is accounted under while it is written."""
    return rollout.group_id, rollout.index, rollout.attempt


class Count(NamedTuple):
    """An amount of sampled tokens and of rollouts."""

    tokens: int = 0
    rollouts: int = 0

    def plus(self, tokens: int, rollouts: int) -> Count:
        """The two amounts together."""
        return Count(self.tokens + tokens, self.rollouts + rollouts)


def total(counts: list[Count]) -> Count:
    """The sum of all."""
    return Count(sum(count.tokens for count in counts), sum(count.rollouts for count in counts))


@dataclass(frozen=True, slots=True)
class Account:
    """Both sides of the ledger at one moment."""

    generated: Count
    trained: Count
    masked: Count
    """Tokens of trained batches that carried no gradient; rollouts that ended with an error status."""
    dropped: Mapping[str, Count]
    """By reason."""
    buffered: Count
    in_flight: Count

    @property
    def placed(self) -> Count:
        """Everything but `generated`, together."""
        return total([self.trained, self.masked, *self.dropped.values(), self.buffered, self.in_flight])

    @property
    def is_closed(self) -> bool:
        """Whether both sides are equal, in tokens and in rollouts."""
        return self.generated == self.placed

    def given_up(self, reason: str) -> Account:
        """What is left of it when everything buffered and in flight is dropped for `reason`."""
        dropped = dict(self.dropped)
        dropped[reason] = total([dropped.get(reason, Count()), self.buffered, self.in_flight])
        return Account(self.generated, self.trained, self.masked, dropped, buffered=Count(), in_flight=Count())

    def to_wire(self) -> dict[str, Any]:
        """A form msgpack can carry; `from_wire` gives the account back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Account:
        """The account that `to_wire` described."""
        dropped = {reason: Count(*count) for reason, count in wire["dropped"].items()}
        return cls(**{name: Count(*count) for name, count in wire.items() if name != "dropped"}, dropped=dropped)

    def __str__(self) -> str:
        return "; ".join(self._side(unit) for unit in Count._fields)

    def _side(self, unit: str) -> str:
        parts = [f"{name} {getattr(getattr(self, name), unit)}" for name in ("trained", "masked", "buffered", "in_flight")]
        parts += [f"dropped for {reason} {getattr(count, unit)}" for reason, count in sorted(self.dropped.items())]
        generated, placed = getattr(self.generated, unit), getattr(self.placed, unit)
        return f"{unit}: generated {generated}, placed {placed} ({', '.join(parts)}), difference {generated - placed:+d}"


class Ledger:
    """Counts what happens to rollouts; `check` compares it with what is there.

    Per rollout: `generated` for each chunk, then exactly one of `completed` (the buffer, when it gets the rollout) or
    `abandoned` (the worker, when there will be none). Per rollout in the buffer: `dropped` or, in a batch, `trained`.
    """

    def __init__(self, account: Account | None = None) -> None:
        """Empty, or going on from an account that has nothing buffered and nothing in flight."""
        start = account or Account(Count(), Count(), Count(), {}, Count(), Count())
        assert start.buffered == start.in_flight == Count(), "what is buffered or in flight must be given up first"
        self._generated, self._trained, self._masked = start.generated, start.trained, start.masked
        self._dropped = dict(start.dropped)
        self._open: dict[RolloutKey, int] = {}

    @property
    def open_rollouts(self) -> Mapping[RolloutKey, int]:
        """Tokens so far of each rollout that was begun and neither completed nor abandoned."""
        return dict(self._open)

    def generated(self, key: RolloutKey, num_tokens: int) -> None:
        """An engine's chunk has arrived. The first one opens the rollout; 0 tokens may open it before there are any."""
        if num_tokens < 0:
            raise LedgerError(f"a chunk of rollout {key} has {num_tokens} tokens")
        self._generated = self._generated.plus(num_tokens, 0 if key in self._open else 1)
        self._open[key] = self._open.get(key, 0) + num_tokens

    def completed(self, rollout: Rollout) -> None:
        """The rollout has left the worker. Raises LedgerError unless it has as many tokens as its chunks had.

        One that failed before its first token was never opened; it is opened and closed here.
        """
        key = rollout_key(rollout)
        if key not in self._open and rollout.num_tokens == 0:
            self.generated(key, 0)
        if key not in self._open:
            raise LedgerError(f"rollout {key} was completed with {rollout.num_tokens} tokens; it was completed before, or never begun")
        if self._open[key] != rollout.num_tokens:
            raise LedgerError(f"rollout {key} was completed with {rollout.num_tokens} sampled tokens; its chunks had {self._open[key]}")
        del self._open[key]

    def abandoned(self, key: RolloutKey, reason: str) -> None:
        """The worker gave the rollout up, its tokens are lost for `reason`. Of one that was never begun there is nothing to count."""
        if key in self._open:
            self.dropped(reason, tokens=self._open.pop(key), rollouts=1)

    def dropped(self, reason: str, *, tokens: int, rollouts: int) -> None:
        """Completed rollouts that will not be trained on."""
        self._dropped[reason] = self._dropped.get(reason, Count()).plus(tokens, rollouts)

    def trained(self, batch: Batch, *, trained_tokens: int, masked_tokens: int) -> None:
        """A step is done, and the trainer says how many sampled tokens of the batch had a gradient and how many had none.

        Raises LedgerError unless that is all of them.
        """
        held = sum(rollout.num_tokens for rollout in batch.rollouts)
        if trained_tokens + masked_tokens != held:
            raise LedgerError(f"the batch of version {batch.version} holds {held} sampled tokens; the trainer accounts for "
                              f"{trained_tokens} trained + {masked_tokens} masked")
        errors = sum(rollout.status.is_error for rollout in batch.rollouts)
        self._trained = self._trained.plus(trained_tokens, len(batch.rollouts) - errors)
        self._masked = self._masked.plus(masked_tokens, errors)

    def account(self, *, buffered: tuple[int, int], in_flight: tuple[int, int]) -> Account:
        """Both sides, given a fresh count (tokens, rollouts) of what the buffer holds and of what the workers are writing."""
        return Account(self._generated, self._trained, self._masked, dict(self._dropped), Count(*buffered), Count(*in_flight))

    def check(self, *, buffered: tuple[int, int], in_flight: tuple[int, int]) -> Account:
        """The account, if it closes. Raises LedgerError with both sides and the rollouts that were begun and not finished."""
        account = self.account(buffered=buffered, in_flight=in_flight)
        begun = Count(sum(self._open.values()), len(self._open))
        if not account.is_closed or account.in_flight != begun:
            some = ", ".join(f"{key}: {tokens}" for key, tokens in list(self._open.items())[:8])
            raise LedgerError(f"the ledger does not close. {account}. By their chunks {begun.rollouts} rollouts with {begun.tokens} tokens "
                              f"are in flight{f' ({some})' if some else ''}.")
        return account
