"""Policy losses of others, without a training curve of ours: held to their formulas and reference numbers, and to nothing more.

Same shape as `losses.py`: the current logprobs and `LossInputs` in, [T] losses out. Two families, by what the ratio is taken against:

    proximal logprobs   cispo, cispo_absolute, sapo, aspo: `weights` multiply, detached, as in `decoupled_ppo`
    rollout logprobs    dppo_tv, dppo_kl, prime_rl_dppo, prime_rl_ipo, m2po, vespo, gepo, dro: the ratio already holds the whole way
                        from the policy that sampled, so `weights` are not read; `keep_mask` is

Exponents are clamped to ±20 throughout; where the gradient goes through a ratio it is 0 beyond.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncrl.correction.clip import clip_range
from asyncrl.correction.losses import clipped_surrogate, weighted_score
from asyncrl.correction.policy_loss import LossInputs, PolicyLoss, broken, with_gradient
from asyncrl.correction.ratios import binary_kl, importance_ratio, masked_log_ratio
from asyncrl.correction.segments import Segments
from asyncrl.correction.sequence_losses import clip_sequences, gain_of, sequence_mean
from asyncrl.correction.spec import LOG_CLAMP
from asyncrl.errors import ConfigError

M2PO_MINIMUM_CLIP = (0.3, 0.5)
"""How far below and above 1 the clip range of M2PO's authors reaches at least, whatever τ is."""


@torch.no_grad()
def cispo(logprobs: Tensor, *, inputs: LossInputs, clip_high: float = 0.28, clip_low: float | None = None) -> PolicyLoss:
    """CISPO, the cap relative to 1: every token keeps its gradient, its weight is clipped instead.

        r_t    = exp(clamp(logprobs − proximal_logprobs, ±20))
        loss_t = −w_t · sg(clip(r_t, 1 − clip_low, 1 + clip_high)) · A_t · logprobs_t

    MiniMax-M1, 2506.13585, section 3.1, which sets no floor and does not print its cap. verl, AReaL, slime and SkyRL read their
    setting as this distance from 1; 0.28 is the clip-higher of `decoupled_ppo`. Departure: w. `clipped` tells where the weight is
    held; the gradient stays.

    Args:
        logprobs: [T] float, current, with gradient.
        inputs: of the same tokens; detached here.
        clip_high: at least 0, a distance from 1.
        clip_low: in [0, 1], a distance from 1. None: no floor.

    Raises ShapeError, ConfigError.
    """
    low, high, _ = clip_range(1.0 if clip_low is None else clip_low, clip_high)
    return _capped_score(logprobs, inputs=inputs, low=low, high=high)


@torch.no_grad()
def cispo_absolute(logprobs: Tensor, *, inputs: LossInputs, cap: float = 5.0) -> PolicyLoss:
    """CISPO with min(r_t, cap) for a weight, the cap being a ratio: `cispo` with clip_high = cap − 1.

    TRL and tinker read their setting so. 5: TRL's for ScaleRL, 2510.13786, which finds little difference between caps of 4 and 8.
    `cap` is above 1. The rest as in `cispo`.
    """
    _require_above("loss.cap", cap, least=1.0, remedy="It is a ratio, not a distance from 1: 5 lets a token weigh up to five times.")
    return _capped_score(logprobs, inputs=inputs, low=0.0, high=cap)


@torch.no_grad()
def sapo(logprobs: Tensor, *, inputs: LossInputs, temperature_positive: float = 1.0, temperature_negative: float = 1.05) -> PolicyLoss:
    """SAPO: a sigmoid gate in place of the clip, steeper where the advantage is negative.

        gate_t = 4 / τ · σ(τ (r_t − 1)), r_t as in `cispo`, τ = temperature_positive for A_t > 0, else temperature_negative
        loss_t = −w_t · A_t · gate_t              so d loss_t / d logprob_t = −w_t · A_t · 4 σ (1 − σ) · r_t, −w · A at r = 1

    2511.20347, whose objective is seq_mean_token_mean; 1 and 1.05 are its temperatures. Departure: w. Nothing is `clipped`.
    Both temperatures are above 0. Raises ShapeError, ConfigError.
    """
    for name, value in (("positive", temperature_positive), ("negative", temperature_negative)):
        _require_above(f"loss.temperature_{name}", value, least=0.0, remedy="The gate narrows as it grows; the paper has 1 and 1.05.")
    inputs.require(logprobs)
    log_ratio = masked_log_ratio(logprobs, sampled_logprobs=inputs.proximal_logprobs, mask=inputs.keep_mask)
    ratio, inside = importance_ratio(log_ratio), ~(log_ratio.abs() > LOG_CLAMP)
    gain = gain_of(inputs, dtype=ratio.dtype)
    positive = inputs.keep_mask & (inputs.advantages > 0)
    temperature = torch.full_like(ratio, temperature_negative).masked_fill_(positive, temperature_positive)
    exponent = temperature * (ratio - 1.0)
    gate = exponent.sigmoid()
    gradient = gain * (4.0 * gate * (-exponent).sigmoid() * ratio * inside)
    return _known(logprobs, losses=gain * gate * (4.0 / temperature), gradient=gradient, log_ratio=log_ratio,
                  clipped=torch.zeros_like(inputs.keep_mask))


@torch.no_grad()
def aspo(logprobs: Tensor, *, inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.28, cap_positive: float = 3.0,
         cap_negative: float = 3.0) -> PolicyLoss:
    """ASPO: tokens of positive advantage weigh 1 / r in place of r, so that the least likely of them are pushed up most.

        A_t > 0:  weight = min(1 / r_t, cap_positive), and no gradient for r_t > 1 + clip_high
        A_t < 0:  weight = min(r_t, cap_negative),     and no gradient for r_t < 1 − clip_low
        d loss_t / d logprob_t = −w_t · A_t · weight,  r_t as in `cispo`

    2510.06062; a cap leaves the gradient, unlike a dual clip. The caps of 3 are those of the authors' code, whose clips depend on
    the entropy of a token; ours are DAPO's. The value is −w · A · weight, with r held at its clip: the authors' has logprobs in it
    where a cap holds. Departure: w. `clipped` are the tokens without gradient.

    Args:
        logprobs: [T] float, current, with gradient.
        inputs: of the same tokens; detached here.
        clip_low: in [0, 1].
        clip_high: at least 0.
        cap_positive: above 1.
        cap_negative: above 1.

    Raises ShapeError, ConfigError.
    """
    low, high, _ = clip_range(clip_low, clip_high)
    for name, value in (("positive", cap_positive), ("negative", cap_negative)):
        _require_above(f"loss.cap_{name}", value, least=1.0, remedy="It is the largest weight of a token; the authors have 3.")
    inputs.require(logprobs)
    log_ratio = masked_log_ratio(logprobs, sampled_logprobs=inputs.proximal_logprobs, mask=inputs.keep_mask)
    ratio = importance_ratio(log_ratio)
    gain = gain_of(inputs, dtype=ratio.dtype)
    # The sign of w · A is that of A, and 0 where either is.
    positive = gain < 0
    clipped = (positive & (ratio > high)) | ((gain > 0) & (ratio < low))
    weight = torch.where(positive, (1.0 / ratio.clamp(max=high)).clamp(max=cap_positive), ratio.clamp(low, cap_negative))
    losses = gain * weight
    return _known(logprobs, losses=losses, gradient=losses.masked_fill(clipped, 0.0), log_ratio=log_ratio, clipped=clipped)


@torch.no_grad()
def dppo_tv(logprobs: Tensor, *, inputs: LossInputs, low: float = 0.15, high: float = 0.15, cap: float = 20.0) -> PolicyLoss:
    """DPPO with binary total variation: a token stops where its probability has moved too far the way its advantage pushes.

        p, q   = exp(logprobs), exp(rollout_logprobs);  r_t = p / q, its logarithm clamped
        loss_t = −sg(min(r_t, cap)) · A_t · logprobs_t, and 0 where A_t > 0 and p − q > high, or A_t ≤ 0 and p − q < −low

    2602.04879, with its threshold of 0.15; the cap of 20 is verl's. The trust region is around the policy that sampled, as the paper
    insists. A token it stops still counts in the denominator; it is `clipped`.

    Args:
        logprobs: [T] float, current, with gradient.
        inputs: of the same tokens; detached here.
        low: at least 0, a difference of probabilities.
        high: the same.
        cap: above 1, a ratio.

    Raises ShapeError, ConfigError.
    """
    moved = _moved(logprobs, inputs=inputs)
    return _trusted_score(logprobs, inputs=inputs, outside=_pushed_out(moved, inputs=inputs, low=low, high=high), cap=cap)


@torch.no_grad()
def dppo_kl(logprobs: Tensor, *, inputs: LossInputs, limit: float = 0.05, cap: float = 20.0) -> PolicyLoss:
    """DPPO with binary KL: as `dppo_tv`, but a token stops where KL(q ‖ p) of "this token or another" exceeds `limit`.

    Only where the advantage pushes further out: A_t > 0 and p > q, or A_t ≤ 0 and p < q. 2602.04879, with its threshold of 0.05;
    `limit` is at least 0. The rest as in `dppo_tv`.
    """
    _require_above("loss.limit", limit, least=0.0, remedy="It is a KL divergence in nats; the paper has 0.05.", inclusive=True)
    outward = _pushed_out(_moved(logprobs, inputs=inputs), inputs=inputs, low=0.0, high=0.0)
    current, rollout = (torch.where(inputs.keep_mask, values, 0.0) for values in (logprobs, inputs.rollout_logprobs))
    return _trusted_score(logprobs, inputs=inputs, outside=outward & (binary_kl(rollout, other=current) > limit), cap=cap)


@torch.no_grad()
def prime_rl_dppo(logprobs: Tensor, *, inputs: LossInputs, low: float = 0.2, high: float = 0.2, kl_tau: float = 1e-3) -> PolicyLoss:
    """prime-rl's DPPO loss: the mask of `dppo_tv` on the plain surrogate, and a squared log-ratio that draws back every token.

        loss_t = −A_t · r_t  where the mask of `dppo_tv` keeps the token,  + kl_tau · (log r_t)²,  r_t = exp(logprobs − rollout_logprobs)

    prime-rl's default loss until `prime_rl_ipo`, with its settings; gradient through r, which nothing truncates. The second term is
    on all tokens of `counted`, also those that the mask stops, so the loss of a token that a correction dropped is not 0 here: such a
    token must have logprobs, as every loss token of a batch has. prime-rl divides by the tokens of the batch, ours is `aggregate`'s.
    Departure: the exponent of r is clamped.

    Args:
        logprobs: [T] float, current, with gradient.
        inputs: of the same tokens; detached here.
        low: at least 0, a difference of probabilities.
        high: the same.
        kl_tau: at least 0.

    Raises ShapeError, ConfigError.
    """
    outside = _pushed_out(_moved(logprobs, inputs=inputs), inputs=inputs, low=low, high=high)
    return _drawn_back(logprobs, inputs=inputs, outside=outside, kl_tau=kl_tau)


@torch.no_grad()
def prime_rl_ipo(logprobs: Tensor, *, inputs: LossInputs, threshold: float = 0.1, kl_tau: float = 1e-3) -> PolicyLoss:
    """prime-rl's IPO loss: as `prime_rl_dppo`, but a token stops where |p − q| > threshold, whatever its advantage.

    Not the preference loss of that name. 0.1 and 1e-3 are the settings it came with; later prime-rl has 0.3, no second term
    (kl_tau = 0) and a cap of 10,000 on r. `threshold` is at least 0. The rest as in `prime_rl_dppo`.
    """
    _require_above("loss.threshold", threshold, least=0.0, remedy="It is a difference of probabilities.", inclusive=True)
    return _drawn_back(logprobs, inputs=inputs, outside=_moved(logprobs, inputs=inputs).abs() > threshold, kl_tau=kl_tau)


def m2po(logprobs: Tensor, *, inputs: LossInputs, tau: float, min_clip_low: float = 0.0, min_clip_high: float = 0.0) -> PolicyLoss:
    """M2PO: PPO against the policy that sampled, clipped to [e^−τ, e^τ], τ found on the whole batch by `second_moment_tau`.

    2510.01161. Departure: the authors find τ anew in every microbatch, on the current policy; one that is found once, on the proximal
    policy, is the same for every split of the batch. Their code has a range of at least [1 − 0.3, 1 + 0.5]: `M2PO_MINIMUM_CLIP`, to be
    given as `min_clip_low`, `min_clip_high`, and its τ is that of `second_moment_tau(exact=False)`.

    Args:
        logprobs: [T] float, current, with gradient.
        inputs: of the same tokens; detached here.
        tau: at least 0; infinity does not clip.
        min_clip_low: in [0, 1], how far below 1 the range reaches at least.
        min_clip_high: at least 0, the same above 1.

    Raises ShapeError, ConfigError.
    """
    if not tau >= 0.0:
        raise ConfigError("loss.tau", value=tau, allowed="a number ≥ 0, infinity included", remedy="Take it from second_moment_tau.")
    if not 0.0 <= min_clip_low <= 1.0 or not 0.0 <= min_clip_high < math.inf:
        raise ConfigError("loss.min_clip_low, loss.min_clip_high", value=(min_clip_low, min_clip_high),
                          allowed="min_clip_low in [0, 1], min_clip_high ≥ 0", remedy="Distances from 1; the authors have 0.3, 0.5.")
    bound = math.exp(tau) if tau < LOG_CLAMP else math.inf
    return clipped_surrogate(logprobs, inputs=inputs, anchor=inputs.rollout_logprobs, weights=None,
                             clip=(min(1.0 - min_clip_low, 1.0 / bound), max(1.0 + min_clip_high, bound), None))


@torch.no_grad()
def vespo(logprobs: Tensor, *, inputs: LossInputs, power_positive: float = 2.0, decay_positive: float = 3.0, power_negative: float = 3.0,
          decay_negative: float = 2.0) -> PolicyLoss:
    """VESPO: the ratio of the whole sequence, a product and not a mean, reshaped by a gamma kernel instead of a clip.

        W      = exp(clamp(Σ_t (logprobs − rollout_logprobs), ±20)), over the kept tokens of the sequence
        φ(W)   = W^k · e^(λ (1 − W)), which is 1 at W = 1 and falls to 0 on both sides
        loss_t = −sg(φ(W)) · A_t · logprobs_t

    2602.10693, with its powers k and decays λ: (2, 3) for A_t ≥ 0, (3, 2) for A_t < 0. TRL clamps log W to [log 1e-8, 20], where φ is
    less than 1e-14. Nothing is `clipped`. All four settings are above 0. Raises ShapeError, ConfigError.
    """
    for name, value in (("power_positive", power_positive), ("decay_positive", decay_positive), ("power_negative", power_negative),
                        ("decay_negative", decay_negative)):
        _require_above(f"loss.{name}", value, least=0.0, remedy="The kernel vanishes at both ends for positive numbers alone.")
    inputs.require(logprobs)
    log_ratio = masked_log_ratio(logprobs, sampled_logprobs=inputs.rollout_logprobs, mask=inputs.keep_mask)
    sequences = Segments.of_sequences(inputs.keep_mask, cu_seqlens=inputs.cu_seqlens)
    whole = sequences.spread(sequences.sum(log_ratio)).clamp(-LOG_CLAMP, LOG_CLAMP)
    negative = inputs.advantages < 0
    power = torch.full_like(whole, power_positive).masked_fill_(negative, power_negative)
    decay = torch.full_like(whole, decay_positive).masked_fill_(negative, decay_negative)
    return weighted_score(logprobs, inputs=inputs, factor=(power * whole - decay * torch.expm1(whole)).exp(), log_ratio=log_ratio,
                          clipped=torch.zeros_like(inputs.keep_mask))


@torch.no_grad()
def log_group_expectation(rollout_logprobs: Tensor, *, mask: Tensor, cu_seqlens: Tensor, group_ids: Tensor) -> Tensor:
    """[T] float64 log of GEPO's denominator of each token's group: Σ q² / Σ q over its sequences, q = exp(mean of rollout_logprobs).

    2508.17850: q, normalised over the group, takes its own expectation. Of the whole batch, once: a group may lie on several ranks.
    A sequence without tokens in `mask` is no part of its group.

    Args:
        rollout_logprobs: [T] float.
        mask: [T] bool, what the mean is over: the `keep_mask` that the loss will have.
        cu_seqlens: [N + 1] integer.
        group_ids: [N] integer.
    """
    sequences = Segments.of_sequences(mask, cu_seqlens=cu_seqlens)
    _, group_of = torch.unique(group_ids, return_inverse=True)
    means = torch.where(sequences.lengths > 0, sequences.mean(rollout_logprobs), -torch.inf)
    floor = means.new_full((len(group_ids),), -torch.inf)
    largest = floor.scatter_reduce(0, group_of, means, reduce="amax")
    shares = torch.where(sequences.lengths > 0, (means - largest[group_of]).exp(), 0.0)
    sums, squares = (torch.zeros_like(means).index_add_(0, group_of, values) for values in (shares, shares.square()))
    expectation = largest + squares.log() - sums.log()
    return torch.where(mask, sequences.spread(expectation[group_of]), 0.0)


def gepo(logprobs: Tensor, *, inputs: LossInputs, group_expectation: Tensor, clip_low: float = 0.2, clip_high: float = 0.2) -> PolicyLoss:
    """GEPO: a sequence is weighed against what its group was expected to have, not against what it had itself.

        s_i    = exp(clamp(mean_t(logprobs) − group_expectation, ±20))
        loss_t = max(−A_t · s_i, −A_t · clip(s_i, 1 − clip_low, 1 + clip_high)), gradient through s_i

    2508.17850; the clip and its 0.2 are those of the authors' code. A denominator that is shared has less variance than one of each
    sequence's own, and is biased: s_i is not 1 on-policy. As in `sequence_losses`, means are over kept tokens and
    seq_mean_token_mean gives the objective. `log_ratio` is current − rollout.

    Args:
        logprobs: [T] float, current, with gradient.
        inputs: whole sequences; detached here.
        group_expectation: [T] float, of these tokens, of `log_group_expectation` over the whole batch.
        clip_low: in [0, 1].
        clip_high: at least 0.

    Raises ShapeError, ConfigError.
    """
    inputs.require(logprobs)
    expected = group_expectation.to(torch.promote_types(logprobs.dtype, torch.float32))
    above = masked_log_ratio(logprobs, sampled_logprobs=expected, mask=inputs.keep_mask)
    ratio = importance_ratio(sequence_mean(above, inputs=inputs)).to(above.dtype)
    losses, clipped = clip_sequences(ratio, gain=gain_of(inputs, dtype=ratio.dtype, weighted=False), clip_low=clip_low, clip_high=clip_high)
    log_ratio = masked_log_ratio(logprobs.detach(), sampled_logprobs=inputs.rollout_logprobs, mask=inputs.keep_mask)
    return PolicyLoss(losses=losses + broken(logprobs, mask=inputs.keep_mask), log_ratio=log_ratio, clipped=clipped)


@torch.no_grad()
def dro(logprobs: Tensor, *, inputs: LossInputs, beta: float = 0.05) -> PolicyLoss:
    """DRO: no ratio at all, and a square that holds the policy to the one that sampled.

        loss_t = −A_t · logprobs_t + β / 2 · (logprobs_t − rollout_logprobs_t)²

    2405.19107 and Kimi k1.5, 2501.12599, whose A is the reward less a soft value and whose square is over the sequence; this is
    tinker's form per token, which sums (`token_sum`), with its β. Sound off-policy without a weight, where advantages are made so.
    Nothing is `clipped`. `beta` is at least 0. Raises ShapeError, ConfigError.
    """
    _require_above("loss.beta", beta, least=0.0, remedy="tinker has 0.05.", inclusive=True)
    inputs.require(logprobs)
    log_ratio = masked_log_ratio(logprobs, sampled_logprobs=inputs.rollout_logprobs, mask=inputs.keep_mask)
    gain = gain_of(inputs, dtype=log_ratio.dtype, weighted=False)
    losses = gain * torch.where(inputs.keep_mask, logprobs.to(gain.dtype), 0.0) + 0.5 * beta * log_ratio.square()
    return _known(logprobs, losses=losses, gradient=gain + beta * log_ratio, log_ratio=log_ratio,
                  clipped=torch.zeros_like(inputs.keep_mask))


def _capped_score(logprobs: Tensor, *, inputs: LossInputs, low: float, high: float) -> PolicyLoss:
    """The score weighed by w · clip(r, low, high), r against the proximal policy."""
    inputs.require(logprobs)
    log_ratio = masked_log_ratio(logprobs, sampled_logprobs=inputs.proximal_logprobs, mask=inputs.keep_mask)
    ratio = importance_ratio(log_ratio)
    return weighted_score(logprobs, inputs=inputs, factor=inputs.weights * ratio.clamp(low, high), log_ratio=log_ratio,
                          clipped=inputs.keep_mask & ((ratio < low) | (ratio > high)))


def _trusted_score(logprobs: Tensor, *, inputs: LossInputs, outside: Tensor, cap: float) -> PolicyLoss:
    """The score weighed by min(r, cap), r against the rollout policy, and by 0 where `outside`."""
    _require_above("loss.cap", cap, least=1.0, remedy="It is the largest ratio that counts; verl has 20.")
    log_ratio = masked_log_ratio(logprobs, sampled_logprobs=inputs.rollout_logprobs, mask=inputs.keep_mask)
    factor = importance_ratio(log_ratio).clamp(max=cap).masked_fill(outside, 0.0)
    return weighted_score(logprobs, inputs=inputs, factor=factor, log_ratio=log_ratio, clipped=outside & inputs.keep_mask)


def _drawn_back(logprobs: Tensor, *, inputs: LossInputs, outside: Tensor, kl_tau: float) -> PolicyLoss:
    """−A · r but where `outside`, on kept tokens, and kl_tau · ℓ² on those that count."""
    _require_above("loss.kl_tau", kl_tau, least=0.0, remedy="prime-rl has 1e-3.", inclusive=True)
    log_ratio = masked_log_ratio(logprobs, sampled_logprobs=inputs.rollout_logprobs, mask=inputs.counted)
    # A product, not a fill: the NaN advantage of a token outside is still an error to be seen.
    surrogate = gain_of(inputs, dtype=log_ratio.dtype, weighted=False) * ~outside * importance_ratio(log_ratio)
    gradient = surrogate * ~(log_ratio.abs() > LOG_CLAMP) + 2.0 * kl_tau * log_ratio
    return _known(logprobs, losses=surrogate + kl_tau * log_ratio.square(), gradient=gradient,
                  log_ratio=torch.where(inputs.keep_mask, log_ratio, 0.0), clipped=outside & inputs.keep_mask)


def _moved(logprobs: Tensor, *, inputs: LossInputs) -> Tensor:
    """[T] float64 p − q of the kept tokens, current less rollout, 0 elsewhere: compared with bounds, where a rounding must not decide."""
    inputs.require(logprobs)
    return torch.where(inputs.keep_mask, logprobs.double().exp() - inputs.rollout_logprobs.double().exp(), 0.0)


def _pushed_out(moved: Tensor, *, inputs: LossInputs, low: float, high: float) -> Tensor:
    """[T] bool, where the probability has moved beyond its bound the way the advantage pushes."""
    for name, bound in (("low", low), ("high", high)):
        _require_above(f"loss.{name}", bound, least=0.0, remedy="It is a difference of probabilities.", inclusive=True)
    return ((inputs.advantages > 0) & (moved > high)) | ((inputs.advantages <= 0) & (moved < -low))


def _known(logprobs: Tensor, *, losses: Tensor, gradient: Tensor, log_ratio: Tensor, clipped: Tensor) -> PolicyLoss:
    with torch.enable_grad():
        return PolicyLoss(losses=with_gradient(logprobs, losses=losses, gradient=gradient), log_ratio=log_ratio, clipped=clipped)


def _require_above(field: str, value: float, *, least: float, remedy: str, inclusive: bool = False) -> None:
    if not (value >= least if inclusive else value > least) or value == math.inf:
        raise ConfigError(field, value=value, allowed=f"a finite number {'≥' if inclusive else '>'} {least:g}", remedy=remedy)
