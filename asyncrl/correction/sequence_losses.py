"""Policy losses whose ratio is one number for a whole sequence: GSPO, GSPO-token, GMPO. Like those of the catalog, without a curve of ours.

Every token holds the loss of its sequence, so `aggregate(mode="seq_mean_token_mean")` gives the papers' objective, value and gradient;
token_mean weighs a sequence by its length. Means are over the tokens of `keep_mask`: a dropped token says nothing about its sequence.
It still counts in the denominator, so a sequence that keeps k of n tokens pulls with k / n of its weight. `weights` multiply token by
token, detached: a sequence is weighed by their mean, and by one number where `Correction.level` is "sequence".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncrl.correction.clip import clip_range
from asyncrl.correction.policy_loss import LossInputs, PolicyLoss, broken, with_gradient
from asyncrl.correction.ratios import importance_ratio, masked_log_ratio
from asyncrl.correction.segments import Segments
from asyncrl.correction.spec import LOG_CLAMP
from asyncrl.errors import ConfigError


def gspo(logprobs: Tensor, *, inputs: LossInputs, clip_low: float = 3e-4, clip_high: float = 4e-4) -> PolicyLoss:
    """GSPO: PPO's clip on the length-normalised ratio of the sequence.

        s_i    = exp(clamp(mean_t(logprobs − proximal_logprobs), ±20))
        loss_t = w_t · max(−A_t · s_i, −A_t · clip(s_i, 1 − clip_low, 1 + clip_high))

    2507.18071, equations 5 to 7; the clip range is that of its section 5.1, a thousandth of PPO's because a mean over hundreds of
    tokens hardly moves. Under seq_mean_token_mean d loss / d logprob_t = −w · A · s_i / |i|. Departures: w, which the paper has not;
    A may differ between tokens; the exponent is clamped, beyond it the gradient is 0. A clipped sequence is `clipped` at all its tokens.

    Args:
        logprobs: [T] float, current, with gradient.
        inputs: whole sequences; detached here.
        clip_low: in [0, 1].
        clip_high: at least 0.

    Raises ShapeError for unequal shapes, ConfigError for a clip range that holds no ratio of 1.
    """
    inputs.require(logprobs)
    log_ratio = masked_log_ratio(logprobs, sampled_logprobs=inputs.proximal_logprobs, mask=inputs.keep_mask)
    ratio = importance_ratio(sequence_mean(log_ratio, inputs=inputs)).to(log_ratio.dtype)
    losses, clipped = clip_sequences(ratio, gain=gain_of(inputs, dtype=ratio.dtype), clip_low=clip_low, clip_high=clip_high)
    return PolicyLoss(losses=losses + broken(logprobs, mask=inputs.keep_mask), log_ratio=log_ratio.detach(), clipped=clipped)


def gspo_token(logprobs: Tensor, *, inputs: LossInputs, clip_low: float = 3e-4, clip_high: float = 4e-4) -> PolicyLoss:
    """GSPO-token: the value of `gspo`, but each token's own advantage pushes that token alone.

        s_i,t  = sg(s_i) · π(t) / sg(π(t))          so d loss_t / d logprob_t = −w_t · A_t · s_i, and 0 for other tokens

    2507.18071, equations 13 to 17. Equal to `gspo`, gradient included, where w · A is one number in a sequence; meant for advantages
    that are not. Arguments, departures and errors as in `gspo`.
    """
    inputs.require(logprobs)
    with torch.no_grad():
        log_ratio = masked_log_ratio(logprobs, sampled_logprobs=inputs.proximal_logprobs, mask=inputs.keep_mask)
        mean, gain = sequence_mean(log_ratio, inputs=inputs), gain_of(inputs, dtype=log_ratio.dtype)
        ratio = importance_ratio(mean).to(log_ratio.dtype)
        losses, clipped = clip_sequences(ratio, gain=gain, clip_low=clip_low, clip_high=clip_high)
        gradient = torch.where(clipped | (mean.abs() > LOG_CLAMP), 0.0, gain * ratio)
    return PolicyLoss(losses=with_gradient(logprobs, losses=losses, gradient=gradient), log_ratio=log_ratio, clipped=clipped)


def gmpo(logprobs: Tensor, *, inputs: LossInputs, log_clip_low: float = 0.4, log_clip_high: float = 0.4) -> PolicyLoss:
    """GMPO: the geometric mean of token ratios, each clipped by itself, in the logarithm, on the side its advantage pushes to.

        ℓ_t    = logprobs − proximal_logprobs
        c_t    = min(ℓ_t, log_clip_high) for A_t > 0, else max(ℓ_t, −log_clip_low)
        loss_t = −w_t · A_t · exp(clamp(mean_t(c_t), ±20))

    2507.20673, with the range (e^−0.4, e^0.4) of its experiments. Under seq_mean_token_mean d loss / d logprob_t is
    −w · A · exp(mean c) / |i|, and 0 for a `clipped` token, whose sequence goes on with the others. Departures as in `gspo`.

    Args:
        logprobs: [T] float, current, with gradient.
        inputs: whole sequences; detached here.
        log_clip_low: at least 0, a distance between logprobs.
        log_clip_high: the same.

    Raises ShapeError, ConfigError.
    """
    if not (0.0 <= log_clip_low < math.inf and 0.0 <= log_clip_high < math.inf):
        raise ConfigError("loss.log_clip_low, loss.log_clip_high", value=(log_clip_low, log_clip_high), allowed="finite numbers ≥ 0",
                          remedy="Both are distances between logprobs; the paper has 0.4 on both sides.")
    inputs.require(logprobs)
    log_ratio = masked_log_ratio(logprobs, sampled_logprobs=inputs.proximal_logprobs, mask=inputs.keep_mask)
    capped = inputs.advantages > 0
    limited = torch.where(capped, log_ratio.clamp(max=log_clip_high), log_ratio.clamp(min=-log_clip_low))
    ratio = importance_ratio(sequence_mean(limited, inputs=inputs)).to(log_ratio.dtype)
    log_ratio = log_ratio.detach()
    clipped = torch.where(capped, log_ratio > log_clip_high, log_ratio < -log_clip_low)
    losses = gain_of(inputs, dtype=ratio.dtype) * ratio + broken(logprobs, mask=inputs.keep_mask)
    return PolicyLoss(losses=losses, log_ratio=log_ratio, clipped=clipped)


def clip_sequences(ratio: Tensor, *, gain: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """[T] max(gain · ratio, gain · clip(ratio)), gradient through the ratio, and [T] bool where the clip holds it. gain = −w · A."""
    low, high, _ = clip_range(clip_low, clip_high)
    unlimited, limited = gain * ratio, gain * ratio.clamp(low, high)
    return torch.maximum(unlimited, limited), limited.detach() > unlimited.detach()


def sequence_mean(values: Tensor, *, inputs: LossInputs) -> Tensor:
    """[T] float64 mean of [T] values over the kept tokens of each token's sequence, gradient flows; 0 where a token was dropped."""
    sequences = Segments.of_sequences(inputs.keep_mask, cu_seqlens=inputs.cu_seqlens)
    # Indexed here, so that a share without sequences has a graph too: every rank calls backward.
    return torch.where(inputs.keep_mask, sequences.mean(values)[sequences.ids], 0.0)


def gain_of(inputs: LossInputs, *, dtype: torch.dtype, weighted: bool = True) -> Tensor:
    """[T] −w · A, or −A, detached; exactly 0 where a token was dropped."""
    gain = inputs.advantages * inputs.weights if weighted else inputs.advantages
    return torch.where(inputs.keep_mask, gain.detach().to(dtype), 0.0).neg()
