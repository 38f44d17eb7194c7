"""How far off-policy a batch is, and what a correction did about it. Measured in float64 over loss tokens, once a step.

Three causes show in three places: the gap at staleness 0 is the mismatch between engine and trainer, its growth over the
staleness buckets is policy lag, and `kept` and `truncated` say what the correction cut away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.correction.batch import CorrectionBatch, Weighed
from asyncrl.correction.ratios import importance_ratio, kl_k1, kl_k3
from asyncrl.correction.rejection import bound_at, outside
from asyncrl.correction.spec import LOG_CLAMP, Correction
from asyncrl.metrics import Metrics

EXACT_BUCKETS = 8
"""Staleness up to here has a bucket of its own, older tokens share one: runs allow 0 to 8 steps, and names stay few."""


@torch.no_grad()
def diagnose(batch: CorrectionBatch, *, correction: Correction, weighed: Weighed) -> Metrics:
    """Metrics of one batch, absent where there is nothing to measure; docs/correction.md lists them.

    `correction/QUANTITY/STAT` over all loss tokens; `correction/QUANTITY_staleness_S/STAT` over those S steps old (9_plus:
    older than 8). Quantities of whole sequences have no buckets, a sequence may hold several versions. Every mean, fraction
    and quantile is of the whole batch: merge over sources or steps, not over pieces of one batch.
    """
    metrics, corrected = Metrics(), weighed.corrected
    mask = batch.loss_mask
    if not bool(mask.any()) or corrected.alpha is not None:
        return metrics
    truncated = outside(weighed.ratio, low=bound_at(correction.truncate_low, batch), high=bound_at(correction.truncate_high, batch))
    tokens = _Tokens(rollout=batch.rollout_logprobs[mask].double(), proximal=batch.proximal_logprobs[mask].double(),
                     weights=corrected.weights[mask].double(), kept=corrected.keep_mask[mask],
                     truncated=(truncated & corrected.keep_mask)[mask])
    _record_tokens(metrics, tokens, correction=correction, suffix="")
    _record_sequences(metrics, batch, tokens=tokens, log_clamp=correction.log_clamp)
    staleness = (batch.version - batch.policy_versions[mask]).clamp(max=EXACT_BUCKETS + 1)
    for bucket in staleness.unique().tolist():
        label = f"{bucket}" if bucket <= EXACT_BUCKETS else f"{bucket}_plus"
        _record_tokens(metrics, tokens.where(staleness == bucket), correction=correction, suffix=f"_staleness_{label}")
    return metrics


@torch.no_grad()
def diagnose_update(log_ratio: Tensor, *, clipped: Tensor, loss_mask: Tensor) -> Metrics:
    """Metrics of an update from the fields of its `PolicyLoss`es, concatenated: [T] each, the mask before correction.

    `update_ratio` is current / proximal: exactly 1 in the first update of a step. Waits for the device.
    """
    metrics = Metrics()
    if not bool(loss_mask.any()):
        return metrics
    values = log_ratio[loss_mask].double()
    ratio = importance_ratio(values)
    sums = {"clipped/frac": clipped[loss_mask].double(), "update_kl_k1/mean": kl_k1(values), "update_kl_k3/mean": kl_k3(values),
            "update_log_ratio_clamped/frac": (values.abs() > LOG_CLAMP).double()}
    _record_means(metrics, sums, suffix="")
    low, high = torch.stack([ratio.min(), ratio.max()]).tolist()
    metrics.min("correction/update_ratio/min", low)
    metrics.max("correction/update_ratio/max", high)
    return metrics


def ess_frac(weights: Tensor) -> Tensor:
    """Effective sample size over sample size, (Σw)² / (n Σw²), of [n] weights; NaN when all are 0. Kong 1992."""
    return weights.sum().square() / (len(weights) * weights.square().sum())


def pearson(x: Tensor, *, y: Tensor) -> Tensor:
    """Correlation of two [n] series; NaN when one of them is constant or n < 2."""
    dx, dy = x - x.mean(), y - y.mean()
    constant = (x.amin() == x.amax()) | (y.amin() == y.amax())
    return torch.where(constant, torch.nan, (dx * dy).sum() / (dx.square().sum() * dy.square().sum()).sqrt())


def quantiles(values: Tensor, *, levels: tuple[float, ...]) -> Tensor:
    """Quantiles of [n] values with linear interpolation, for any n (torch.quantile stops at 16M)."""
    ordered = values.sort().values
    place = torch.tensor(levels, dtype=torch.float64, device=values.device) * (len(values) - 1)
    low = place.floor().long()
    return torch.lerp(ordered[low], ordered[place.ceil().long()], (place - low).to(values.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """Loss tokens alone, [n] each."""

    rollout: Tensor
    proximal: Tensor
    weights: Tensor
    kept: Tensor
    truncated: Tensor

    @property
    def log_ratio(self) -> Tensor:
        return self.proximal - self.rollout

    def where(self, chosen: Tensor) -> _Tokens:
        return _Tokens(rollout=self.rollout[chosen], proximal=self.proximal[chosen], weights=self.weights[chosen], kept=self.kept[chosen],
                       truncated=self.truncated[chosen])


def _record_tokens(metrics: Metrics, tokens: _Tokens, *, correction: Correction, suffix: str) -> None:
    log_ratio, clamp = tokens.log_ratio, correction.log_clamp
    ratio, gap = importance_ratio(log_ratio, log_clamp=clamp), log_ratio.abs()
    rollout_prob, proximal_prob = tokens.rollout.exp(), tokens.proximal.exp()
    prob_gap = (proximal_prob - rollout_prob).abs()
    means = {"kl_k1/mean": kl_k1(log_ratio), "kl_k3/mean": kl_k3(log_ratio, log_clamp=clamp), "chi2/mean": ratio.square() - 1.0,
             "ratio/mean": ratio, "weight/mean": tokens.weights, "logprob_gap/mean": gap, "prob_gap/mean": prob_gap,
             "mult_prob_error/mean": importance_ratio(gap, log_clamp=clamp), "log_ratio_clamped/frac": (gap > clamp).double(),
             "kept/frac": tokens.kept.double()}
    if correction.truncate_high is not None:
        means["truncated/frac"] = tokens.truncated.double()
    _record_means(metrics, means, suffix=suffix)
    largest = {"ratio/max": ratio.max(), "logprob_gap/max": gap.max(), "prob_gap/max": prob_gap.max()}
    for name, value in _numbers(largest).items():
        metrics.max(_name(name, suffix), value)
    p01, p50, p99 = quantiles(ratio, levels=(0.01, 0.5, 0.99)).unbind()
    whole = {"ratio/p01": p01, "ratio/p50": p50, "ratio/p99": p99, "ess/frac": ess_frac(tokens.weights), "ess_raw/frac": ess_frac(ratio),
             "prob_pearson/value": pearson(proximal_prob, y=rollout_prob)}
    if len(gap) > 1:
        whole["prob_gap/std"] = prob_gap.std()
    for name, value in _numbers(whole).items():
        if not math.isnan(value):
            metrics.last(_name(name, suffix), value)


def _record_sequences(metrics: Metrics, batch: CorrectionBatch, *, tokens: _Tokens, log_clamp: float) -> None:
    rows = torch.arange(len(batch.group_ids), device=batch.cu_seqlens.device)
    rows = rows.repeat_interleave(batch.cu_seqlens.diff(), output_size=len(batch.loss_mask))[batch.loss_mask]
    sums = tokens.rollout.new_zeros(3, len(batch.group_ids))
    sums.index_add_(1, rows, torch.stack([tokens.rollout, tokens.proximal, torch.ones_like(tokens.rollout)]))
    rollout, proximal, lengths = sums[:, sums[2] > 0]
    ratio = importance_ratio(proximal - rollout, log_clamp=log_clamp)
    means = {"chi2_sequence/mean": ratio.square() - 1.0, "rollout_log_ppl/mean": -rollout / lengths,
             "proximal_log_ppl/mean": -proximal / lengths, "log_ppl_gap/mean": (rollout - proximal) / lengths}
    _record_means(metrics, means, suffix="")


def _record_means(metrics: Metrics, values: dict[str, Tensor], *, suffix: str) -> None:
    for name, total in _numbers({name: value.sum() for name, value in values.items()}).items():
        metrics.mean(_name(name, suffix), total, count=len(values[name]))


def _name(name: str, suffix: str) -> str:
    quantity, stat = name.split("/")
    return f"correction/{quantity}{suffix}/{stat}"


def _numbers(scalars: dict[str, Tensor]) -> dict[str, float]:
    """One transfer for all of them."""
    return dict(zip(scalars, torch.stack(tuple(scalars.values())).tolist(), strict=True))
