"""Log-ratios, ratios and per-token divergence estimates.

One convention everywhere: ℓ = log π_target − log π_sampled, tokens drawn from π_sampled. Computed in float32, or in float64
where an input is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.correction.spec import LOG_CLAMP
from asyncrl.errors import ShapeError

_PROB_MARGIN = 1e-8
"""A logprob of 0 would make the other outcome's logarithm infinite."""


def masked_log_ratio(logprobs: Tensor, *, sampled_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[T] ℓ = logprobs − sampled_logprobs where `mask`, exactly 0 elsewhere; neither value nor gradient sees what the mask hides.

    Not clamped: this is what divergences are measured on. Gradient flows through `logprobs` alone. Raises ShapeError.
    """
    if not logprobs.shape == sampled_logprobs.shape == mask.shape or logprobs.dim() != 1:
        raise ShapeError(f"logprobs, sampled_logprobs and mask must be [T], got {tuple(logprobs.shape)}, "
                         f"{tuple(sampled_logprobs.shape)}, {tuple(mask.shape)}")
    if mask.dtype != torch.bool:
        raise ShapeError(f"mask is {mask.dtype}, needs torch.bool")
    dtype = torch.promote_types(torch.promote_types(logprobs.dtype, sampled_logprobs.dtype), torch.float32)
    return (logprobs.to(dtype) - sampled_logprobs.detach().to(dtype)).masked_fill_(~mask, 0.0)


def importance_ratio(log_ratio: Tensor, *, log_clamp: float = LOG_CLAMP) -> Tensor:
    """exp(clamp(ℓ, ±log_clamp)): finite for every finite or infinite ℓ, NaN for NaN. The gradient is 0 beyond the clamp."""
    return log_ratio.clamp(-log_clamp, log_clamp).exp_()


def kl_k1(log_ratio: Tensor) -> Tensor:
    """−ℓ: unbiased for KL(π_sampled ‖ π_target), of either sign. J. Schulman 2020, "Approximating KL divergence"."""
    return -log_ratio


def kl_k2(log_ratio: Tensor) -> Tensor:
    """ℓ² / 2: biased, low variance, never negative. J. Schulman 2020."""
    return 0.5 * log_ratio.square()


def kl_k3(log_ratio: Tensor, *, log_clamp: float = LOG_CLAMP) -> Tensor:
    """e^ℓ − 1 − ℓ: unbiased for KL(π_sampled ‖ π_target), never negative. J. Schulman 2020.

    ℓ is held to `log_clamp` from above, where e^ℓ would overflow; far below, the estimate is −ℓ − 1 and needs no clamp.
    """
    held = log_ratio.clamp(max=log_clamp)
    return torch.expm1(held) - held


def pushes_away(log_ratio: Tensor, *, advantages: Tensor, mask: Tensor) -> Tensor:
    """[T] bool, tokens of `mask` whose gradient moves the policy further from the one that sampled: ℓ · A > 0."""
    return mask & (((log_ratio > 0) & (advantages > 0)) | ((log_ratio < 0) & (advantages < 0)))


def binary_kl(logprobs: Tensor, *, other: Tensor) -> Tensor:
    """KL of the two-way choice "this token or another": p log(p/q) + (1 − p) log((1 − p)/(1 − q)), p = e^logprobs, q = e^other.

    A lower bound on the KL over the whole vocabulary (data processing). p and q are held to [1e-8, 1 − 1e-8].
    """
    p, q = (values.exp().clamp(_PROB_MARGIN, 1.0 - _PROB_MARGIN) for values in (logprobs.double(), other.double()))
    return p * (p / q).log() + (1.0 - p) * ((1.0 - p) / (1.0 - q)).log()
