"""How old data is when it is trained on, and what interrupting engines costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from asyncrl.plan.checks import at_least, whole
from asyncrl.plan.lengths import Lengths


def staleness(generation_s: float, *, wait_s: float = 0.0, interval_s: float) -> int:
    """⌊(generation + wait)/interval⌋: versions that appear between a rollout's first token and its training, begun on a fresh one."""
    at_least(0, generation_s=generation_s, wait_s=wait_s)
    at_least(0, strictly=True, interval_s=interval_s)
    return math.floor((generation_s + wait_s) / interval_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessShares:
    """By versions behind: shares that add up to 1, at the index of the staleness."""

    rollouts: tuple[float, ...]
    tokens: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Of rollouts."""
        return sum(age * share for age, share in enumerate(self.rollouts))

    @property
    def max(self) -> int:
        """The oldest."""
        return len(self.rollouts) - 1


def staleness_shares(lengths: Lengths, *, step_s: float, wait_s: float = 0.0, interval_s: float) -> StalenessShares:
    """Of rollouts that begin at any moment of an interval.

    A life of x = (L·t + wait)/interval intervals crosses ⌊x⌋ updates, and one more with chance x − ⌊x⌋.
    """
    at_least(0, step_s=step_s, wait_s=wait_s)
    at_least(0, strictly=True, interval_s=interval_s)
    tokens = lengths.quantiles()
    crossed = (tokens * step_s + wait_s) / interval_s
    low = np.floor(crossed).astype(np.int64)
    chance = crossed - low
    ages = np.concatenate([low, low + 1])

    def shares(weights: np.ndarray) -> tuple[float, ...]:
        counted = np.bincount(ages, weights=np.concatenate([weights * (1.0 - chance), weights * chance]))
        last = int(np.flatnonzero(counted)[-1]) + 1
        return tuple(float(share) for share in counted[:last] / counted.sum())

    return StalenessShares(rollouts=shares(np.ones_like(tokens)), tokens=shares(tokens))


def update_interval_s(train_s: float, *, gpus: int, train_gpus: int, minibatches: int) -> float:
    """Between two updates: T_t·n/n_t over the minibatches of a step, a weight update after each."""
    at_least(0, train_s=train_s)
    whole(1, gpus=gpus, train_gpus=train_gpus, minibatches=minibatches)
    return train_s * gpus / train_gpus / minibatches


def reprefill_flop(active_params: float, *, in_flight: float, context_tokens: float, syncs: int = 1) -> float:
    """2N for every token in flight, at each weight update: interrupted sequences compute their KV cache again under the new weights."""
    at_least(0, strictly=True, active_params=active_params)
    at_least(0, in_flight=in_flight, context_tokens=context_tokens, syncs=syncs)
    return 2.0 * active_params * in_flight * context_tokens * syncs
