"""From log-ratios to importance weights: the batch-level work, done once and frozen."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from asyncrl.correction.batch import Corrected, CorrectionBatch, Weighed
from asyncrl.correction.diagnostics import diagnose
from asyncrl.correction.proximal import log_linear_alpha
from asyncrl.correction.ratios import importance_ratio, masked_log_ratio
from asyncrl.correction.rejection import Evidence, bound_at, kept, outside_ratios
from asyncrl.correction.spec import Correction


def correct(batch: CorrectionBatch, correction: Correction) -> Corrected:
    """Check the batch, weigh its tokens, measure how far off-policy they are. Call it once a step, on the whole batch.

    Everything returned is detached. Raises ShapeError, NonFiniteError or StalenessError (see `CorrectionBatch.check`).
    """
    batch.check()
    weighed = apply(batch, correction)
    metrics = diagnose(batch, correction=correction, weighed=weighed)
    return dataclasses.replace(weighed.corrected, metrics=metrics)


def weigh(batch: CorrectionBatch, correction: Correction) -> Corrected:
    """Weights and masks alone, without metrics; the formula is `Correction`'s. At level "token" it does not wait for the device.

    A `correction` that `is_token_local` gives the same numbers on any slice, so this may run per microbatch; any other needs the
    whole batch. Values are not checked: NaN at a loss token is kept and reaches the loss, where the gradient guard sees it; it is
    never dropped.
    """
    return apply(batch, correction).corrected


@torch.no_grad()
def apply(batch: CorrectionBatch, correction: Correction) -> Weighed:
    """`weigh`, and what it saw on the way."""
    if correction.proximal == "log_linear":
        return _log_linear(batch)
    log_ratio = masked_log_ratio(batch.proximal_logprobs, sampled_logprobs=batch.rollout_logprobs, mask=batch.loss_mask)
    evidence = Evidence(batch, log_ratio)
    level_log_ratio = _reduced(evidence, correction)
    keep_mask = batch.loss_mask
    if correction.mask_low is not None or correction.mask_high is not None:
        keep_mask = keep_mask & ~outside_ratios(level_log_ratio, low=correction.mask_low, high=correction.mask_high, batch=batch)
    weights = _weights(level_log_ratio, batch=batch, correction=correction, keep_mask=keep_mask)
    normalizer = None
    if correction.normalize is not None:
        normalizer = _mean_weight(weights, evidence=evidence, over=correction.normalize)
        weights = weights / normalizer
    rejected = {}
    for rule in correction.reject:
        stays = kept(rule, evidence)
        rejected[rule.name] = batch.loss_mask & ~stays
        keep_mask = keep_mask & stays
    if rejected:
        weights = weights.masked_fill_(~keep_mask, 0.0)
    counted = keep_mask if correction.denominator == "kept" else batch.loss_mask
    return Weighed(Corrected(weights=weights, keep_mask=keep_mask, counted=counted), level_log_ratio, rejected, normalizer)


def _reduced(evidence: Evidence, correction: Correction) -> Tensor:
    """[T] ℓ over each token's level, in the dtype of ℓ."""
    if correction.level in ("none", "token"):
        return evidence.log_ratio
    segments = evidence.segments(correction.level)
    reduced = segments.spread(segments.reduce(evidence.log_ratio, how=correction.reduce))
    return torch.where(evidence.batch.loss_mask, reduced.to(evidence.log_ratio.dtype), 0.0)


def _weights(level_log_ratio: Tensor, *, batch: CorrectionBatch, correction: Correction, keep_mask: Tensor) -> Tensor:
    if correction.level == "none":
        return keep_mask.to(level_log_ratio.dtype)
    weights = importance_ratio(level_log_ratio, log_clamp=correction.log_clamp)
    low, high = bound_at(correction.truncate_low, batch), bound_at(correction.truncate_high, batch)
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        low, high = (None if bound is None else torch.as_tensor(bound, device=weights.device).to(weights.dtype) for bound in (low, high))
    if low is not None or high is not None:
        weights.clamp_(low, high)
    return weights.masked_fill_(~keep_mask, 0.0)


def _mean_weight(weights: Tensor, *, evidence: Evidence, over: str) -> Tensor:
    """Scalar: the mean over loss tokens, or over sequences that have some; 1 where all weights are 0."""
    if over == "token":
        mean = weights.double().sum() / evidence.batch.loss_mask.sum()
    else:
        segments = evidence.segments("sequence")
        mean = segments.mean(weights).sum() / (segments.lengths > 0).sum()
    return torch.where(mean > 0, mean, 1.0).to(weights.dtype)


def _log_linear(batch: CorrectionBatch) -> Weighed:
    """No ratio is known before the forward: the loss forms weights from alpha and its own logprobs, `proximal.log_linear`."""
    mask = batch.loss_mask
    ones = mask.to(torch.promote_types(batch.rollout_logprobs.dtype, torch.float32))
    alpha = log_linear_alpha(batch.policy_versions, proximal_version=batch.version, current_version=batch.version + 1)
    return Weighed(Corrected(weights=ones, keep_mask=mask, counted=mask, alpha=torch.where(mask, alpha, 0.0)),
                   torch.zeros_like(ones), {})
