"""Outcome advantages against the other rollouts of a group. NumPy only: there is one number a rollout and no gradient.

Common to all: groups are told by id, so any order and any sizes will do. Rows that are not `valid` (error statuses) stay out of
the baseline and get 0. A group of one valid row gets 0: it has nothing to be compared with. Rewards of a group that
differ by no more than `tolerance` are equal, and get exactly 0 instead of rounding noise divided by rounding noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncrl.correction.whitening import EPSILON, TOLERANCE, whiten
from asyncrl.errors import NonFiniteError, ShapeError


def grpo(rewards: ArrayLike, *, group_ids: ArrayLike, valid: ArrayLike | None = None, unbiased_std: bool = True,
         epsilon: float = 1e-6, tolerance: float = TOLERANCE) -> NDArray[np.float64]:
    """[N] A = (r − mean) / (std + epsilon). DeepSeekMath, 2402.03300, section 4.1.2 (outcome supervision).

    The paper does not say which std; `unbiased_std` divides by n − 1 as TRL and verl do, False divides by n.
    """
    groups = _Groups.of(rewards, group_ids=group_ids, valid=valid)
    freedom = np.maximum(groups.sizes - (1 if unbiased_std else 0), 1)
    std = np.sqrt(groups.sums(groups.deviations**2) / freedom)
    return groups.spread(groups.deviations / (std[groups.index] + epsilon), tolerance=tolerance)


def dr_grpo(rewards: ArrayLike, *, group_ids: ArrayLike, valid: ArrayLike | None = None,
            tolerance: float = TOLERANCE) -> NDArray[np.float64]:
    """[N] A = r − mean. Dr. GRPO, 2503.20783, section 3.2: no std, so easy and hard prompts keep their weight.

    The paper's other half, a constant length in place of |o_i|, is `aggregate(mode="dr_grpo")`.
    """
    groups = _Groups.of(rewards, group_ids=group_ids, valid=valid)
    return groups.spread(groups.deviations, tolerance=tolerance)


def rloo(rewards: ArrayLike, *, group_ids: ArrayLike, valid: ArrayLike | None = None,
         tolerance: float = TOLERANCE) -> NDArray[np.float64]:
    """[N] A = r − mean of the others = n / (n − 1) · (r − mean). RLOO, 2402.14740.

    The paper's reward has a KL penalty inside; here rewards are taken as they come.
    """
    groups = _Groups.of(rewards, group_ids=group_ids, valid=valid)
    factor = groups.sizes / np.maximum(groups.sizes - 1, 1)
    return groups.spread(groups.deviations * factor[groups.index], tolerance=tolerance)


def maxrl(rewards: ArrayLike, *, group_ids: ArrayLike, valid: ArrayLike | None = None,
          tolerance: float = TOLERANCE) -> NDArray[np.float64]:
    """[N] A = (r − mean) / mean, 0 in a group whose mean is at most 0. MaxRL, 2602.02710: REINFORCE with likelihood as its limit.

    With k successes among n, each success weighs n / k: rare ones more than under any std. The paper's rewards are 0 and 1; others of
    a positive mean are taken as they come, and rewards that may be negative lose whole groups. No epsilon, unlike TRL: a mean is
    positive or the group is left out.
    """
    groups = _Groups.of(rewards, group_ids=group_ids, valid=valid)
    divisors = np.where(groups.means > 0, groups.means, np.inf)
    return groups.spread(groups.deviations / divisors[groups.index], tolerance=tolerance)


def opo(rewards: ArrayLike, *, group_ids: ArrayLike, lengths: ArrayLike, valid: ArrayLike | None = None,
        tolerance: float = TOLERANCE) -> NDArray[np.float64]:
    """[N] A = r − Σ l r / Σ l. OPO, 2505.23585: the baseline of least variance, if the squared gradient of a rollout grows with its length.

    `lengths` [N]: loss tokens of each rollout. A group of equal rewards, or without a loss token, gets 0; so does a group of one, which
    in verl gets r. The paper trains on-policy only; nothing here asks for it.
    """
    groups = _Groups.of(rewards, group_ids=group_ids, valid=valid)
    weights = groups.weights(lengths)
    written = groups.sums(weights)
    baselines = groups.sums(weights * groups.deviations) / np.where(written > 0, written, 1.0)
    return groups.spread(np.where(written[groups.index] > 0, groups.deviations - baselines[groups.index], 0.0), tolerance=tolerance)


def reinforce_plus_plus_baseline(rewards: ArrayLike, *, group_ids: ArrayLike, lengths: ArrayLike, valid: ArrayLike | None = None,
                                 epsilon: float = EPSILON, tolerance: float = TOLERANCE) -> NDArray[np.float64]:
    """[N] r − mean of the group, whitened over all tokens of the global batch. REINFORCE++ with baseline, 2501.03262.

    One scale for all groups instead of each group's own std, which depends on the very rewards it divides. `lengths` [N]: loss tokens
    of each rollout; each rollout counts that often in mean and variance, which are over tokens in the paper. The variance is unbiased
    with epsilon inside the root, as in verl. Departure: groups of one and groups of equal rewards get exactly 0; whitening alone would
    give them all the same small push. The form without groups is `token_advantages.reinforce_plus_plus`.
    """
    groups = _Groups.of(rewards, group_ids=group_ids, valid=valid)
    whitened = whiten(groups.deviations, counts=groups.weights(lengths), epsilon=epsilon, tolerance=tolerance)
    return groups.spread(whitened, tolerance=tolerance)


def no_signal(rewards: ArrayLike, *, group_ids: ArrayLike, valid: ArrayLike | None = None,
              tolerance: float = TOLERANCE) -> NDArray[np.bool_]:
    """[N] True for every row of a group that gives no gradient: equal rewards, or fewer than two valid rows."""
    groups = _Groups.of(rewards, group_ids=group_ids, valid=valid)
    return ~groups.differs(tolerance)[groups.index]


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Rewards sorted into groups. G groups, numbered 0 … G − 1 by rising id."""

    rewards: NDArray[np.float64]
    """[N], 0 where not valid."""
    valid: NDArray[np.bool_]
    """[N]"""
    index: NDArray[np.intp]
    """[N] number of each row's group."""
    sizes: NDArray[np.float64]
    """[G] valid rows."""
    means: NDArray[np.float64]
    """[G] of the valid rows, 0 where there are none."""
    deviations: NDArray[np.float64]
    """[N] r − mean of its group's valid rows, 0 where not valid."""

    @classmethod
    def of(cls, rewards: ArrayLike, *, group_ids: ArrayLike, valid: ArrayLike | None) -> _Groups:
        """Raises ShapeError for unequal lengths, NonFiniteError for NaN or infinity in a valid row."""
        values, ids = np.asarray(rewards, dtype=np.float64), np.asarray(group_ids)
        used = np.ones(values.shape, np.bool_) if valid is None else np.asarray(valid)
        if not values.shape == ids.shape == used.shape or values.ndim != 1 or used.dtype != np.bool_:
            raise ShapeError(f"rewards, group_ids and valid (bool) must be [N], got {values.shape}, {ids.shape}, {used.shape} {used.dtype}")
        bad = np.flatnonzero(used & ~np.isfinite(values))
        if len(bad):
            raise NonFiniteError(f"rewards[{bad[0]}] = {values[bad[0]]} in group {ids[bad[0]]}: "
                                 "a rollout without a reward must not be valid")
        _, index = np.unique(ids, return_inverse=True)
        groups = int(index.max(initial=-1)) + 1
        kept = np.where(used, values, 0.0)
        sizes = np.bincount(index, weights=used, minlength=groups)
        means = np.bincount(index, weights=kept, minlength=groups) / np.maximum(sizes, 1)
        return cls(rewards=kept, valid=used, index=index, sizes=sizes, means=means, deviations=np.where(used, kept - means[index], 0.0))

    def sums(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """[G] sums of [N] values."""
        return np.bincount(self.index, weights=values, minlength=len(self.sizes))

    def weights(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """[N] lengths, 0 where not valid. Raises ShapeError for another shape, or a length that is negative or not finite."""
        tokens = np.asarray(lengths, np.float64)
        if tokens.shape != self.valid.shape:
            raise ShapeError(f"lengths must be [N] as rewards are, got {tokens.shape} and {self.valid.shape}")
        bad = np.flatnonzero(self.valid & ~((tokens >= 0) & np.isfinite(tokens)))
        if len(bad):
            raise ShapeError(f"lengths[{bad[0]}] = {tokens[bad[0]]}: a valid rollout has at least 0 loss tokens")
        return np.where(self.valid, tokens, 0.0)

    def differs(self, tolerance: float) -> NDArray[np.bool_]:
        """[G] whether max − min of the valid rewards exceeds the tolerance."""
        high, low = np.full(len(self.sizes), -np.inf), np.full(len(self.sizes), np.inf)
        np.maximum.at(high, self.index[self.valid], self.rewards[self.valid])
        np.minimum.at(low, self.index[self.valid], self.rewards[self.valid])
        return high > low + tolerance

    def spread(self, advantages: NDArray[np.float64], *, tolerance: float) -> NDArray[np.float64]:
        """[N] the advantages, exactly 0 for invalid rows and for groups whose rewards do not differ."""
        return np.where(self.valid & self.differs(tolerance)[self.index], advantages, 0.0)
