"""A pull towards a reference policy: KL(current ‖ reference) as a term of the loss, or as a penalty in the reward.

With d = logprobs − ref_logprobs of a sampled token and r = exp(logprobs − rollout_logprobs). What a term does is its gradient, and
need not be the gradient of the KL(current ‖ reference) that its value estimates:

    estimator        value            d / d logprob        mean gradient over sampled tokens
    k3_importance    r · (e^−d − 1 + d)   r · d            KL(current ‖ reference), whatever policy sampled        default
    k2               d² / 2           d                    KL(current ‖ reference), where the current policy sampled
    k3_forward       e^−d − 1 + d     1 − e^−d             KL(reference ‖ current), where the current policy sampled
    k1               d                1                    0: refused. In the reward it is right: `penalty`

KL(reference ‖ current) is what GRPO (2402.03300, equation 4) and most implementations minimise; it is offered under that name.
k3_importance is DeepSeek-V3.2's unbiased estimate (2512.02556), whose ratio carries gradient. Both directions have their minimum
where current and reference are equal, and there value and gradient are exactly 0.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from asyncrl.correction.policy_loss import LossInputs, with_gradient
from asyncrl.correction.ratios import importance_ratio, kl_k2, kl_k3, masked_log_ratio
from asyncrl.correction.spec import LOG_CLAMP
from asyncrl.errors import ConfigError, ShapeError

Estimator = Literal["k3_importance", "k2", "k3_forward"]


@torch.no_grad()
def reference_kl(logprobs: Tensor, *, ref_logprobs: Tensor, inputs: LossInputs, coefficient: float,
                 estimator: Estimator = "k3_importance", exclude: Tensor | None = None) -> Tensor:
    """[T] coefficient · the estimator's value, with its gradient, to add to a policy loss; exactly 0 where a token was dropped.

    Departures: r and e^−d are clamped to e^±20, and beyond that the gradient is 0, but for r · d, which needs no e^−d.

    Args:
        logprobs: [T] float, current, with gradient.
        ref_logprobs: [T] float, of the reference; detached here.
        inputs: of the same tokens; `rollout_logprobs` and `keep_mask` are read. `weights` are not: k3_importance has its own ratio,
            the others are for tokens that need none.
        coefficient: at least 0; GRPO has 0.04, many later recipes 0.
        estimator: see above.
        exclude: [T] bool, kept tokens without the term. Groups without signal (`advantages.no_signal`) have no advantage, and are
            pulled to the reference all the same unless they are named here. None: every kept token is pulled, as in GRPO.

    Raises ShapeError for unequal shapes, ConfigError for an estimator without the gradient of a divergence, or a coefficient below 0.
    """
    _require(estimator, coefficient)
    inputs.require(logprobs)
    mask = inputs.keep_mask
    if exclude is not None:
        if exclude.shape != mask.shape or exclude.dtype != torch.bool:
            raise ShapeError(f"exclude must be [T] bool like keep_mask, got {exclude.dtype} {tuple(exclude.shape)}, {tuple(mask.shape)}")
        mask = mask & ~exclude
    distance = masked_log_ratio(logprobs, sampled_logprobs=ref_logprobs, mask=mask)
    if estimator == "k2":
        losses, gradient = kl_k2(distance), distance
    elif estimator == "k3_forward":
        slope = -torch.expm1(-distance.clamp(min=-LOG_CLAMP))
        losses, gradient = kl_k3(-distance), slope * ~(distance < -LOG_CLAMP)
    else:
        log_ratio = masked_log_ratio(logprobs, sampled_logprobs=inputs.rollout_logprobs, mask=mask)
        ratio = importance_ratio(log_ratio)
        losses, gradient = ratio * kl_k3(-distance), ratio * distance * ~(log_ratio.abs() > LOG_CLAMP)
    with torch.enable_grad():
        return with_gradient(logprobs, losses=coefficient * losses, gradient=coefficient * gradient)


@torch.no_grad()
def penalty(logprobs: Tensor, *, ref_logprobs: Tensor, mask: Tensor, coefficient: float) -> Tensor:
    """[T] −coefficient · d, detached, to add to the rewards of tokens: k1 in the reward. 0 where the mask is off.

    Ziegler et al. 2019 (1909.08593, equation 2). Through a policy gradient its mean pull is that of coefficient · KL(current ‖
    reference), if the logprobs are those of the policy whose gradient is taken: proximal ones, and importance weights where another
    policy sampled. It reaches a token through its advantage: as its own reward (`token_advantages`), or in the sum that a whole
    rollout is rewarded with. Raises ShapeError, ConfigError.
    """
    _require_coefficient(coefficient)
    return -coefficient * masked_log_ratio(logprobs.detach(), sampled_logprobs=ref_logprobs, mask=mask)


def _require(estimator: str, coefficient: float) -> None:
    if estimator not in get_args(Estimator):
        why = {"k1": "The gradient of k1 in a loss has mean 0: it adds noise and no pull. Put it into the reward, reference_kl.penalty.",
               "k3": "k3 in a loss pulls by the other direction, KL(reference ‖ current): name it k3_forward, or take k3_importance."}
        raise ConfigError("loss.reference_kl.estimator", value=estimator, allowed=f"one of {', '.join(get_args(Estimator))}",
                          remedy=why.get(estimator, "Choose one of them."))
    _require_coefficient(coefficient)


def _require_coefficient(coefficient: float) -> None:
    if not 0.0 <= coefficient < math.inf:
        raise ConfigError("loss.reference_kl.coefficient", value=coefficient, allowed="a finite number ≥ 0",
                          remedy="The term is added to a loss that is minimised.")
