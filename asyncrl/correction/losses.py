"""Policy losses per token; `aggregate` makes one number of them. Decoupled PPO and PPO have curves of ours (docs/ablations.md).

REINFORCE and importance sampling have none: they stand here as the two forms that the losses of `sequence_losses.py` and `catalog.py`
are made of too, `weighted_score` and `clipped_surrogate`. Each reads the current logprobs and what is frozen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncrl.correction.clip import clip_range
from asyncrl.correction.policy_loss import LossInputs, PolicyLoss, with_gradient
from asyncrl.correction.ratios import masked_log_ratio
from asyncrl.correction.spec import LOG_CLAMP
from asyncrl.errors import ConfigError, ShapeError


def decoupled_ppo(logprobs: Tensor, *, inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.28,
                  dual_clip: float | None = None) -> PolicyLoss:
    """Decoupled PPO: the trust region is around the proximal policy, the weight accounts for the policy that sampled.

        r_t    = exp(clamp(logprobs − proximal_logprobs, ±20))
        loss_t = w_t · max(−A_t · r_t, −A_t · clip(r_t, 1 − clip_low, 1 + clip_high))
        loss_t = w_t · min(that, −A_t · dual_clip)                       for A_t < 0, with a dual clip

    Hilton, Cobbe, Schulman 2021 (2110.00641, section 3) decouple the weight π_prox / π_behaviour from the clipped ratio;
    AReaL 2025 (2505.24298, section 5.2) brings it to language models. Clip-higher and 0.2 / 0.28: DAPO (2503.14476,
    section 3.1). Dual clip: 1912.09729, equation 5, which uses 3. Departures: w is bounded as `Correction` says and carries no
    gradient; the exponent is clamped, beyond it the gradient is 0; no KL term.

    Args:
        logprobs: [T] float, current, with gradient.
        inputs: of the same tokens; detached here.
        clip_low: in [0, 1].
        clip_high: at least 0.
        dual_clip: above 1; the largest ratio that counts under a negative advantage. None: no bound.

    Raises ShapeError for unequal shapes, ConfigError for a clip range that holds no ratio of 1.
    """
    return clipped_surrogate(logprobs, inputs=inputs, anchor=inputs.proximal_logprobs, weights=inputs.weights,
                             clip=clip_range(clip_low, clip_high, dual_clip))


def ppo(logprobs: Tensor, *, inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.28,
        dual_clip: float | None = None) -> PolicyLoss:
    """PPO (1707.06347, equation 7) with one anchor for both roles: the policy that sampled. Reads no weights.

    Arguments and errors as in `decoupled_ppo`.
    """
    return clipped_surrogate(logprobs, inputs=inputs, anchor=inputs.rollout_logprobs, weights=None,
                             clip=clip_range(clip_low, clip_high, dual_clip))


def reinforce(logprobs: Tensor, *, inputs: LossInputs) -> PolicyLoss:
    """loss_t = −w_t · A_t · logprobs_t, the weight detached: the policy gradient with (truncated) importance sampling.

    Williams 1992, with the weight of Ionides 2008. Unbiased for a weight that is not bounded; no trust region, so several updates
    a batch are the caller's risk. `log_ratio` is current − proximal. Arguments and errors as in `decoupled_ppo`.
    """
    inputs.require(logprobs)
    log_ratio = masked_log_ratio(logprobs.detach(), sampled_logprobs=inputs.proximal_logprobs, mask=inputs.keep_mask)
    return weighted_score(logprobs, inputs=inputs, factor=inputs.weights, log_ratio=log_ratio, clipped=torch.zeros_like(inputs.keep_mask))


def importance_sampling(logprobs: Tensor, *, inputs: LossInputs) -> PolicyLoss:
    """loss_t = −A_t · r_t with r = exp(clamp(current − rollout, ±20)), gradient through r: the surrogate whose value is the gain itself.

    Same gradient as `reinforce` under the raw ratio. Schulman et al. 2015 (1502.05477, equation 14); tinker's `importance_sampling`,
    which sums. Reads no weights. Departure: the exponent is clamped, beyond it the gradient is 0.
    """
    return clipped_surrogate(logprobs, inputs=inputs, anchor=inputs.rollout_logprobs, weights=None, clip=None)


def entropy_bonus(entropy: Tensor, *, keep_mask: Tensor, coefficient: float) -> Tensor:
    """[T] −coefficient · entropy of a token's distribution, with gradient, to add to its loss; 0 where the mask is off.

    Williams & Peng 1991. `entropy` [T] float, of the same temperature as the logprobs; `coefficient` at least 0. Raises ShapeError,
    ConfigError.
    """
    if entropy.shape != keep_mask.shape or keep_mask.dtype != torch.bool:
        raise ShapeError(f"entropy and keep_mask (bool) must be [T], got {tuple(entropy.shape)}, "
                         f"{keep_mask.dtype} {tuple(keep_mask.shape)}")
    if not 0.0 <= coefficient < math.inf:
        raise ConfigError("loss.entropy_coefficient", value=coefficient, allowed="a finite number ≥ 0",
                          remedy="The bonus is taken off a loss that is minimised: a positive number raises the entropy.")
    return torch.where(keep_mask, -coefficient * torch.where(keep_mask, entropy, 0.0), 0.0)


@torch.no_grad()
def weighted_score(logprobs: Tensor, *, inputs: LossInputs, factor: Tensor, log_ratio: Tensor, clipped: Tensor) -> PolicyLoss:
    """loss_t = −factor_t · A_t · logprobs_t: the score, weighed by `factor` [T], which carries no gradient. In the dtype of `log_ratio`."""
    keep_mask, dtype = inputs.keep_mask, log_ratio.dtype
    gain = torch.where(keep_mask, (factor * inputs.advantages).to(dtype), 0.0).neg_()
    score = torch.where(keep_mask, logprobs.to(dtype), 0.0)
    # NaN where the logprob is not finite: the score of a broken distribution is none, and must not move a weight.
    gradient = torch.add(gain, score * 0.0)
    with torch.enable_grad():
        return PolicyLoss(losses=with_gradient(logprobs, losses=gain * score, gradient=gradient), log_ratio=log_ratio, clipped=clipped)


@torch.no_grad()
def clipped_surrogate(logprobs: Tensor, *, inputs: LossInputs, anchor: Tensor, weights: Tensor | None,
                      clip: tuple[float, float, float | None] | None) -> PolicyLoss:
    """loss_t = w_t · max(−A_t · r_t, −A_t · clip(r_t, low, high)) with r = exp(clamp(current − anchor, ±20)), gradient through r.

    `clip` holds ratios (low, high, dual clip) as `clip_range` gives them; None does not clip. `weights` None weighs all tokens 1.
    """
    # Every operation here is one pass over [T] numbers, so it works in place wherever a tensor is its own, and holds what is true as
    # 1.0: torch compares and multiplies floats several times faster than it makes and reads booleans.
    inputs.require(logprobs)
    keep_mask = inputs.keep_mask
    log_ratio = masked_log_ratio(logprobs, sampled_logprobs=anchor, mask=keep_mask)
    ratio = log_ratio.clamp(-LOG_CLAMP, LOG_CLAMP)
    gradient = torch.eq(ratio, log_ratio, out=torch.empty_like(ratio))
    ratio.exp_()
    # A weight is never negative, so it may multiply before the maximum as well as after it.
    gain = -inputs.advantages if weights is None else (inputs.advantages * weights).neg_()
    gain = gain.to(ratio.dtype).masked_fill_(~keep_mask, 0.0)
    losses = gain * ratio
    gradient.mul_(losses)
    clipped = torch.zeros_like(keep_mask)
    if clip is not None:
        low, high, dual = clip
        unclipped, losses = losses, torch.maximum(losses, ratio.clamp_(low, high).mul_(gain), out=ratio)
        if dual is not None:
            losses = torch.where(gain > 0, torch.minimum(losses, gain * dual), losses)
        is_unclipped = unclipped.eq_(losses)
        gradient.mul_(is_unclipped)
        clipped = is_unclipped.bool().logical_not_()
    with torch.enable_grad():
        return PolicyLoss(losses=with_gradient(logprobs, losses=losses, gradient=gradient), log_ratio=log_ratio, clipped=clipped)
