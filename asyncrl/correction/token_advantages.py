"""Advantages that differ from token to token. NumPy only.

Sequences are packed: [T] arrays and `cu_seqlens` [N + 1]. Tokens outside `loss_mask` (prompts, what tools and environments wrote) are
transparent: discounting and bootstrapping pass over them as if they were not there, and anything may stand at them, NaN included.
A reward for what an environment answered therefore belongs to the last sampled token before it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncrl.correction.whitening import EPSILON, TOLERANCE, whiten
from asyncrl.errors import ConfigError, NonFiniteError, ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class GAE:
    """What `gae` gives."""

    advantages: NDArray[np.float64]
    """[T]"""
    returns: NDArray[np.float64]
    """[T] advantages + values: what the critic should have said."""


def gae(rewards: ArrayLike, *, values: ArrayLike, loss_mask: ArrayLike, cu_seqlens: ArrayLike, gamma: float = 1.0, lam: float = 0.95,
        skip_masked: bool = True) -> GAE:
    """A_t = δ_t + γλ A_t+1, δ_t = r_t + γ V_t+1 − V_t. Generalized advantage estimation, 1506.02438, equation 16.

    After the last token V and A are 0: a sequence ends there, and one that was cut is not bootstrapped. Not whitened; verl's
    advantages are `whiten` of these. The defaults are those of TRL's PPO.

    Args:
        rewards: [T], KL penalties included where there are any.
        values: [T] of the critic, for what each token is sampled from.
        loss_mask: [T] bool.
        cu_seqlens: [N + 1] integer.
        gamma: discount a token, in (0, 1].
        lam: in [0, 1]; 1 gives returns minus values, 0 the one-step error.
        skip_masked: masked tokens are transparent and get 0 (verl, AReaL). False: they are steps in time like any other, with a value,
            a reward and an advantage of their own (slime, SkyRL), and must be finite; `loss_mask` is then not read.

    Raises ShapeError, ConfigError, and NonFiniteError with index and sequence.
    """
    _require(0.0 < gamma <= 1.0, name="gamma", value=gamma, allowed="more than 0, at most 1")
    _require(0.0 <= lam <= 1.0, name="lam", value=lam, allowed="0 to 1")
    mask = np.asarray(loss_mask)
    steps = _Steps.of(mask if skip_masked else np.ones_like(mask), cu_seqlens)
    earned, expected = steps.take(rewards, name="rewards"), steps.take(values, name="values")
    coming = np.where(steps.is_last, 0.0, np.append(expected[1:], 0.0))
    advantages = steps.discounted(earned + gamma * coming - expected, decay=gamma * lam)
    return GAE(advantages=steps.put(advantages), returns=steps.put(advantages + expected))


def returns_to_go(rewards: ArrayLike, *, loss_mask: ArrayLike, cu_seqlens: ArrayLike, gamma: float = 1.0) -> NDArray[np.float64]:
    """[T] G_t = r_t + γ G_t+1 over the loss tokens of each sequence, 0 elsewhere.

    `rewards` [T], `loss_mask` [T] bool, `cu_seqlens` [N + 1]. Raises ShapeError, ConfigError, NonFiniteError with index and sequence.
    """
    _require(0.0 < gamma <= 1.0, name="gamma", value=gamma, allowed="more than 0, at most 1")
    steps = _Steps.of(np.asarray(loss_mask), cu_seqlens)
    return steps.put(steps.discounted(steps.take(rewards, name="rewards"), decay=gamma))


def reinforce_plus_plus(rewards: ArrayLike, *, loss_mask: ArrayLike, cu_seqlens: ArrayLike, gamma: float = 1.0,
                        epsilon: float = EPSILON, tolerance: float = TOLERANCE) -> NDArray[np.float64]:
    """[T] returns to go, whitened over all loss tokens of the global batch. REINFORCE++, 2501.03262.

    The batch takes the place of the group: a prompt needs one rollout only, and a group of equal rewards still has advantages where
    other groups differ from it. A batch of equal returns gives exactly 0. The paper's KL penalty belongs into `rewards`. The variance
    is unbiased with epsilon inside the root, as in verl; the paper says neither. Where no rank holds the whole batch, call
    `returns_to_go`, add the ranks' `Moments` and `whiten`. Arguments and errors as `returns_to_go`.
    """
    returns = returns_to_go(rewards, loss_mask=loss_mask, cu_seqlens=cu_seqlens, gamma=gamma)
    return whiten(returns, counts=loss_mask, epsilon=epsilon, tolerance=tolerance)


def at_the_end(rewards: ArrayLike, *, loss_mask: ArrayLike, cu_seqlens: ArrayLike) -> NDArray[np.float64]:
    """[T] each sequence's reward at its last loss token, 0 elsewhere; the reward of one without loss tokens is nowhere.

    `rewards` [N], `loss_mask` [T] bool, `cu_seqlens` [N + 1]. Raises ShapeError.
    """
    earned, steps = np.asarray(rewards, np.float64), _Steps.of(np.asarray(loss_mask), cu_seqlens)
    if earned.shape != (len(np.asarray(cu_seqlens)) - 1,):
        raise ShapeError(f"rewards must be [N] beside cu_seqlens [N + 1], got {earned.shape} and {len(np.asarray(cu_seqlens))}")
    return steps.put(np.where(steps.is_last, earned[steps.sequences], 0.0))


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """The K tokens that are steps in time, in order; the others are not there."""

    places: NDArray[np.intp]
    """[K] index of each among the T."""
    sequences: NDArray[np.intp]
    """[K]"""
    is_last: NDArray[np.bool_]
    """[K] no further step in its sequence."""
    total: int
    """T"""

    @classmethod
    def of(cls, mask: NDArray[np.bool_], cu_seqlens: ArrayLike) -> _Steps:
        bounds = np.asarray(cu_seqlens)
        if mask.dtype != np.bool_ or mask.ndim != 1 or bounds.ndim != 1 or not len(bounds):
            raise ShapeError(f"loss_mask must be [T] bool and cu_seqlens [N + 1], got {mask.dtype} {mask.shape}, {bounds.shape}")
        if bounds[0] != 0 or bounds[-1] != len(mask) or (np.diff(bounds) < 0).any():
            raise ShapeError(f"cu_seqlens must rise from 0 to {len(mask)}, the number of tokens, got {bounds.tolist()[:8]}")
        places = np.flatnonzero(mask)
        sequences = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))[places]
        return cls(places=places, sequences=sequences, is_last=np.append(sequences[1:] != sequences[:-1], [True] * bool(len(places))),
                   total=len(mask))

    def take(self, values: ArrayLike, *, name: str) -> NDArray[np.float64]:
        """[K] of [T]. Raises ShapeError, NonFiniteError."""
        numbers = np.asarray(values, np.float64)
        if numbers.shape != (self.total,):
            raise ShapeError(f"{name} must be [{self.total}] as loss_mask is, got {numbers.shape}")
        taken = numbers[self.places]
        bad = np.flatnonzero(~np.isfinite(taken))
        if len(bad):
            raise NonFiniteError(f"{name}[{self.places[bad[0]]}] = {taken[bad[0]]} in sequence {self.sequences[bad[0]]}: "
                                 "only what no step reads may be NaN or infinite")
        return taken

    def put(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """[T] of [K], 0 elsewhere."""
        whole = np.zeros(self.total)
        whole[self.places] = values
        return whole

    def discounted(self, values: NDArray[np.float64], *, decay: float) -> NDArray[np.float64]:
        """[K] y_k = values_k + decay · y_k+1 within each sequence."""
        factors = np.where(self.is_last, 0.0, decay)
        backward = zip(values[::-1].tolist(), factors[::-1].tolist(), strict=True)
        running = itertools.accumulate(backward, lambda later, step: step[0] + step[1] * later, initial=0.0)
        return np.fromiter(itertools.islice(running, 1, None), np.float64, count=len(values))[::-1]


def _require(holds: bool, *, name: str, value: float, allowed: str) -> None:
    if not holds:
        raise ConfigError(name, value=value, allowed=allowed, remedy="Choose a value in that range.")
