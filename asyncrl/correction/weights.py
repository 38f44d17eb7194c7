"""From log-ratios to importance weights: the batch-level work, done once and frozen."""

from __future__ import annotations

import dataclasses

import torch

from asyncrl.correction.batch import Corrected, CorrectionBatch
from asyncrl.correction.diagnostics import diagnose
from asyncrl.correction.presets import Correction
from asyncrl.correction.ratios import importance_ratio, masked_log_ratio


def correct(batch: CorrectionBatch, correction: Correction) -> Corrected:
    """Check the batch, weigh its tokens, measure how far off-policy they are. Call it once a step, on the whole batch.

    Everything returned is detached. Raises ShapeError, NonFiniteError or StalenessError (see `CorrectionBatch.check`).
    """
    batch.check()
    corrected = weigh(batch, correction)
    return dataclasses.replace(corrected, metrics=diagnose(batch, correction=correction, corrected=corrected))


@torch.no_grad()
def weigh(batch: CorrectionBatch, correction: Correction) -> Corrected:
    """Weights and mask alone, without metrics and without waiting for the device; the formula is `Correction`'s.

    A `correction` that `is_token_local` gives the same numbers on any slice, so this may run per microbatch. Values are
    not checked: NaN at a loss token is kept and reaches the loss, where the gradient guard sees it; it is never dropped.
    """
    log_ratio = masked_log_ratio(batch.proximal_logprobs, sampled_logprobs=batch.rollout_logprobs, mask=batch.loss_mask)
    ratio = importance_ratio(log_ratio, log_clamp=correction.log_clamp)
    keep_mask = batch.loss_mask
    if correction.mask_low is not None:
        keep_mask = keep_mask & ~(ratio < correction.mask_low)
    if correction.mask_high is not None:
        keep_mask = keep_mask & ~(ratio > correction.mask_high)
    if correction.level == "none":
        return Corrected(weights=keep_mask.to(ratio.dtype), keep_mask=keep_mask)
    if correction.truncate_high is not None:
        ratio = ratio.clamp(max=correction.truncate_high)
    return Corrected(weights=torch.where(keep_mask, ratio, 0.0), keep_mask=keep_mask)
