"""Which tokens a rule keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.correction.batch import CorrectionBatch
from asyncrl.correction.ratios import binary_kl, importance_ratio, kl_k1, kl_k2, kl_k3, pushes_away
from asyncrl.correction.rules import Bound, Bounds, Level, Rule
from asyncrl.correction.second_moment import second_moment_mask, second_moment_tau
from asyncrl.correction.segments import Segments


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """What weights and rules look at: a batch, its log-ratios, and its segments, found once each."""

    batch: CorrectionBatch
    log_ratio: Tensor
    """[T] ℓ = proximal − rollout, 0 where not a loss token."""
    _segments: dict[Level, Segments] = field(default_factory=dict)

    def segments(self, level: Level) -> Segments:
        """Of "turn" or "sequence"."""
        if level not in self._segments:
            batch = self.batch
            self._segments[level] = Segments.of(level, mask=batch.loss_mask, cu_seqlens=batch.cu_seqlens, turn_ids=batch.turn_ids)
        return self._segments[level]


def bound_at(bound: Bound | None, batch: CorrectionBatch) -> float | Tensor | None:
    """The number, or [T] float64 that of each token's staleness."""
    if not isinstance(bound, tuple):
        return bound
    staleness = (batch.version - batch.policy_versions.long()).clamp(0, len(bound) - 1)
    return torch.tensor(bound, dtype=torch.float64, device=staleness.device)[staleness]


@torch.no_grad()
def kept(rule: Rule, evidence: Evidence) -> Tensor:
    """[T] bool, what the rule leaves of the loss mask."""
    batch, log_ratio, mask = evidence.batch, evidence.log_ratio, evidence.batch.loss_mask
    if isinstance(rule, Bounds):
        return mask & ~_dropped(rule, evidence)
    if rule.form == "mask":
        return second_moment_mask(log_ratio, mask=mask, limit=rule.limit)
    tau = second_moment_tau(log_ratio, advantages=batch.advantages, mask=mask, limit=rule.limit)
    return mask & ~(pushes_away(log_ratio, advantages=batch.advantages, mask=mask) & (log_ratio.abs() > tau))


def outside_ratios(log_ratio: Tensor, *, low: Bound | None, high: Bound | None, batch: CorrectionBatch) -> Tensor:
    """Bool, where e^ℓ leaves [low, high]; [T], unless both bounds are one number.

    Compared as logarithms, in the dtype of ℓ: a product of thousands of ratios is out of range, its logarithm is not, and a ratio
    that is exactly a bound is inside it wherever the bound is written.
    """
    lowest, highest = (bound.log().to(log_ratio.dtype) if isinstance(bound, Tensor) else None if bound is None else math.log(bound)
                       for bound in (bound_at(low, batch), bound_at(high, batch)))
    return _outside(log_ratio, low=lowest, high=highest)


def _outside(values: Tensor, *, low: float | Tensor | None, high: float | Tensor | None) -> Tensor:
    """Bool, where a value is below `low` or above `high`; never where it is NaN."""
    beyond = torch.zeros_like(values, dtype=torch.bool)
    if low is not None:
        beyond |= values < low
    if high is not None:
        beyond |= values > high
    return beyond


def _dropped(rule: Bounds, evidence: Evidence) -> Tensor:
    """[T] bool; anything where the mask is off."""
    values, batch = _statistic(rule, evidence), evidence.batch
    segments = None if rule.level == "token" else evidence.segments(rule.level)
    if segments is not None:
        values = segments.reduce(values, how=rule.reduce)
    if rule.statistic == "ratio":
        beyond = outside_ratios(values.to(evidence.log_ratio.dtype), low=rule.low, high=rule.high, batch=batch)
    else:
        beyond = _outside(values, low=bound_at(rule.low, batch), high=bound_at(rule.high, batch))
    if segments is not None:
        beyond = segments.spread(beyond & (segments.lengths > 0))
    if rule.drop == "away":
        beyond = beyond & pushes_away(evidence.log_ratio, advantages=batch.advantages, mask=batch.loss_mask)
    return beyond & (batch.advantages < 0) if rule.drop == "negative" else beyond


def _statistic(rule: Bounds, evidence: Evidence) -> Tensor:
    """[T] float64: statistics are compared with bounds, and a rounding must not decide."""
    log_ratio, batch = evidence.log_ratio.double(), evidence.batch
    if rule.statistic in ("binary_kl", "binary_kl_rollout", "prob_difference"):
        rollout, proximal = (torch.where(batch.loss_mask, logprobs.double(), 0.0)
                             for logprobs in (batch.rollout_logprobs, batch.proximal_logprobs))
        if rule.statistic == "prob_difference":
            return proximal.exp() - rollout.exp()
        forward = binary_kl(rollout, other=proximal)
        return forward if rule.statistic == "binary_kl_rollout" else torch.maximum(forward, binary_kl(proximal, other=rollout))
    return {"ratio": lambda: log_ratio, "k1": lambda: kl_k1(log_ratio), "k2": lambda: kl_k2(log_ratio), "k3": lambda: kl_k3(log_ratio),
            "k3_reverse": lambda: kl_k3(-log_ratio), "ratio_gap": lambda: (importance_ratio(log_ratio) - 1.0).abs()}[rule.statistic]()
