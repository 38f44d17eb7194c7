"""Policy losses per token. They read the current logprobs and frozen tensors, and leave the reduction to `aggregate`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.correction.batch import Corrected
from asyncrl.correction.presets import LOG_CLAMP
from asyncrl.correction.ratios import importance_ratio, masked_log_ratio
from asyncrl.errors import ConfigError, ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """Losses of a microbatch's tokens, and what the step's metrics are made of. No field waits for the device."""

    losses: Tensor
    """[T] float32 (float64 for float64 input), with gradient; exactly 0, with gradient 0, where a token was dropped."""
    log_ratio: Tensor
    """[T] detached, current − anchor, not clamped; 0 where a token was dropped."""
    clipped: Tensor
    """[T] bool, tokens held by the clip: their gradient is 0."""


def decoupled_ppo(logprobs: Tensor, *, proximal_logprobs: Tensor, advantages: Tensor, corrected: Corrected,
                  clip_low: float = 0.2, clip_high: float = 0.28) -> PolicyLoss:
    """Decoupled PPO: the trust region is around the proximal policy, the weight accounts for the policy that sampled.

        r_t    = exp(clamp(logprobs − proximal_logprobs, ±20))
        loss_t = w_t · max(−A_t · r_t, −A_t · clip(r_t, 1 − clip_low, 1 + clip_high))

    Hilton, Cobbe, Schulman 2021 (2110.00641, section 3) decouple the weight π_prox / π_behaviour from the clipped ratio;
    AReaL 2025 (2505.24298, section 5.2) brings it to language models. Clip-higher and 0.2 / 0.28: DAPO (2503.14476,
    section 3.1). Departures: w is bounded as `Correction` says and carries no gradient; the exponent is clamped, beyond
    it the gradient is 0; no KL term.

    Args:
        logprobs: [T] float, current, with gradient.
        proximal_logprobs: [T] float, detached here.
        advantages: [T] float, detached here.
        corrected: weights and mask of the same tokens; what its mask drops may hold anything.
        clip_low: in [0, 1].
        clip_high: at least 0.

    Raises ShapeError for unequal shapes, ConfigError for a clip range that holds no ratio of 1.
    """
    if not 0.0 <= clip_low <= 1.0 or not clip_high >= 0.0:
        raise ConfigError("loss.clip_low, loss.clip_high", value=(clip_low, clip_high), allowed="clip_low in [0, 1], clip_high ≥ 0",
                          remedy="Both are distances from 1: ratios are clipped to [1 − clip_low, 1 + clip_high].")
    keep_mask = corrected.keep_mask
    if not advantages.shape == corrected.weights.shape == logprobs.shape:
        raise ShapeError(f"logprobs, advantages and weights must be [T], got {tuple(logprobs.shape)}, {tuple(advantages.shape)}, "
                         f"{tuple(corrected.weights.shape)}")
    log_ratio = masked_log_ratio(logprobs, sampled_logprobs=proximal_logprobs, mask=keep_mask)
    ratio = importance_ratio(log_ratio, log_clamp=LOG_CLAMP)
    with torch.no_grad():
        gain = torch.where(keep_mask, -advantages.to(ratio.dtype), 0.0)
        bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
        clipped = gain * bounded > gain * ratio
        weighted_gain = torch.where(keep_mask, corrected.weights, 0.0) * gain
    losses = weighted_gain * torch.where(clipped, bounded, ratio)
    return PolicyLoss(losses=losses, log_ratio=log_ratio.detach(), clipped=clipped)


def ppo(logprobs: Tensor, *, rollout_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor,
        clip_low: float = 0.2, clip_high: float = 0.28) -> PolicyLoss:
    """PPO (1707.06347, equation 7) with one anchor for both roles: the policy that sampled. `decoupled_ppo` with weight 1.

    Arguments and errors as there; `loss_mask` [T] bool.
    """
    weights = loss_mask.to(torch.promote_types(logprobs.dtype, torch.float32))
    return decoupled_ppo(logprobs, proximal_logprobs=rollout_logprobs, advantages=advantages,
                         corrected=Corrected(weights=weights, keep_mask=loss_mask), clip_low=clip_low, clip_high=clip_high)
