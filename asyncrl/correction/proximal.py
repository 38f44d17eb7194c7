"""Where the proximal logprobs come from: the anchor of the trust region, the trainer's weights at the start of a step.

    recompute   a forward pass over the batch before its first update. Exact, one forward more.
    reuse       the forward of the first update, detached: exact where a step has one update, and free.
    bypass      the rollout logprobs, `losses.ppo`: one anchor for both roles, right only where no version lies between them. The
                trainer still makes the pass where a step has several updates: what measures and rejects looks at true ones.
    log-linear  between rollout and current logprobs by version: this file. A guess, and free.

A log-linear value depends on the current logprobs, so it is another at every forward. It is fit for the weight and the clip of the
loss that makes it, and for nothing that judges tokens: mismatch metrics and rejection refuse it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.correction.ratios import importance_ratio, masked_log_ratio
from asyncrl.correction.spec import Correction
from asyncrl.errors import ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class LogLinear:
    """Proximal logprobs that were guessed. Not a tensor, so that nothing which needs true ones takes them by mistake."""

    logprobs: Tensor
    """[T] detached; 0 where not a loss token."""
    weights: Tensor
    """[T] detached; exp(logprobs − rollout logprobs), truncated, 0 where not a loss token."""


def log_linear_alpha(policy_versions: Tensor, *, proximal_version: float, current_version: float) -> Tensor:
    """[T] float32 α = clip((v_proximal − v) / (v_current − v), 0, 1), of tokens sampled by version v. A-3PO, 2512.06547.

    Where a step starts from version s and makes s + 1, the proximal version is s, and update u of U runs on current version
    s + u / U: α of stale tokens is 1 in the first update, where proximal and current weights are the same. (AReaL takes
    v_current − 1 for the proximal version and a whole step for every update.) 0 for tokens nobody sampled (v < 0) and for
    v ≥ v_current.
    """
    behind = current_version - policy_versions.float()
    alpha = ((proximal_version - policy_versions.float()) / torch.where(behind > 0, behind, 1.0)).clamp(0.0, 1.0)
    return torch.where((policy_versions >= 0) & (behind > 0), alpha, 0.0)


@torch.no_grad()
def log_linear(logprobs: Tensor, *, rollout_logprobs: Tensor, alpha: Tensor, loss_mask: Tensor, correction: Correction) -> LogLinear:
    """Proximal = rollout + α · (current − rollout), and the weight it implies. All [T]; everything is detached.

    With advantage 1, unclipped and not truncated, the gradient of the decoupled loss is then −e^(current − rollout), whatever α.
    Raises ShapeError.
    """
    if not alpha.shape == logprobs.shape:
        raise ShapeError(f"alpha and logprobs must be [T], got {tuple(alpha.shape)}, {tuple(logprobs.shape)}")
    moved = masked_log_ratio(logprobs, sampled_logprobs=rollout_logprobs, mask=loss_mask) * alpha
    ratio = importance_ratio(moved, log_clamp=correction.log_clamp)
    if correction.level == "none":
        ratio = torch.ones_like(ratio)
    if correction.truncate_low is not None or correction.truncate_high is not None:
        ratio = ratio.clamp(correction.truncate_low, correction.truncate_high)
    return LogLinear(logprobs=torch.where(loss_mask, rollout_logprobs.to(moved.dtype) + moved, 0.0),
                     weights=torch.where(loss_mask, ratio, 0.0))


@torch.no_grad()
def linear_in_probability(logprobs: Tensor, *, rollout_logprobs: Tensor, alpha: Tensor) -> Tensor:
    """[T] log((1 − α) p_rollout + α p_current), detached: A-3PO's other interpolation. Departure: nothing is added inside the log."""
    dtype = torch.promote_types(torch.promote_types(logprobs.dtype, rollout_logprobs.dtype), torch.float32)
    current, rollout, share = logprobs.to(dtype), rollout_logprobs.to(dtype), alpha.to(dtype)
    return torch.logaddexp(torch.log1p(-share) + rollout, share.log() + current)
