"""What every policy loss takes and gives, and how a gradient that is known in closed form is handed to autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.correction.batch import Corrected, CorrectionBatch
from asyncrl.errors import ConfigError, ShapeError


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LossInputs:
    """Everything frozen that a loss reads beside the current logprobs. Whole sequences, packed; all [T] on one device.

    What `keep_mask` drops may hold anything in every other field, unless a loss says that it reads `counted` tokens (`prime_rl_*`).
    Raises ShapeError.
    """

    rollout_logprobs: Tensor
    """[T] float, of the distribution sampled from."""
    proximal_logprobs: Tensor
    """[T] float, at the start of the step."""
    advantages: Tensor
    """[T] float."""
    weights: Tensor
    """[T] float, of `Corrected`."""
    keep_mask: Tensor
    """[T] bool, of `Corrected`: these tokens have a loss."""
    counted: Tensor
    """[T] bool, of `Corrected`: these make the length of a sequence, in losses over sequences."""
    cu_seqlens: Tensor
    """[N + 1] integer."""

    def __post_init__(self) -> None:
        for name in ("rollout_logprobs", "proximal_logprobs", "advantages", "weights", "counted"):
            if getattr(self, name).shape != self.keep_mask.shape or self.keep_mask.dim() != 1:
                raise ShapeError(f"{name} has shape {tuple(getattr(self, name).shape)}, needs [T] like keep_mask, "
                                 f"{tuple(self.keep_mask.shape)}")
        if self.keep_mask.dtype != torch.bool or self.counted.dtype != torch.bool:
            raise ShapeError(f"keep_mask and counted must be bool, got {self.keep_mask.dtype}, {self.counted.dtype}")

    @classmethod
    def of(cls, batch: CorrectionBatch, corrected: Corrected) -> LossInputs:
        """Those of a whole batch. Raises ConfigError for log-linear proximal logprobs, which each forward makes anew."""
        if corrected.alpha is not None:
            raise ConfigError("correction.proximal", value="log_linear", allowed="proximal logprobs that were computed",
                              remedy="Make logprobs and weights of every forward by proximal.log_linear, and LossInputs of those.")
        return cls(rollout_logprobs=batch.rollout_logprobs, proximal_logprobs=batch.proximal_logprobs, advantages=batch.advantages,
                   weights=corrected.weights, keep_mask=corrected.keep_mask, counted=corrected.counted, cu_seqlens=batch.cu_seqlens)

    def require(self, logprobs: Tensor) -> None:
        """Raise ShapeError unless the current logprobs are [T] too."""
        if logprobs.shape != self.keep_mask.shape:
            raise ShapeError(f"logprobs have shape {tuple(logprobs.shape)}, needs [T] like keep_mask, {tuple(self.keep_mask.shape)}")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PolicyLoss:
    """Losses of a microbatch's tokens, and what the step's metrics are made of. No field waits for the device."""

    losses: Tensor
    """[T] float32 (float64 for float64 input), with gradient; exactly 0, with gradient 0, where a token was dropped
    (`prime_rl_*` have a term on all counted tokens)."""
    log_ratio: Tensor
    """[T] detached, current − anchor, not clamped; 0 where a token was dropped."""
    clipped: Tensor
    """[T] bool, tokens held by the clip, or outside the loss's trust region. Their gradient is 0, but for losses that cap a weight
    and keep the gradient, which say so."""


def with_gradient(logprobs: Tensor, *, losses: Tensor, gradient: Tensor) -> Tensor:
    """[T] `losses` whose derivative by the logprob of the same token is `gradient` [T]; the graph holds `gradient` and nothing else.

    For losses that are known token by token: a third of the memory and half the time of a recorded graph.
    """
    return _WithGradient.apply(logprobs, losses, gradient)


def broken(logprobs: Tensor, *, mask: Tensor) -> Tensor:
    """[T] zeros whose gradient is NaN at a logprob of `mask` that is not finite, to add to losses whose own gradient there would be 0:
    a clamp has none, and a broken distribution must not pass for one that is merely far away."""
    with torch.no_grad():
        gradient = torch.where(mask & ~torch.isfinite(logprobs), torch.nan, torch.zeros_like(logprobs))
    return with_gradient(logprobs, losses=torch.zeros_like(gradient), gradient=gradient)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logprobs: Tensor, losses: Tensor, gradient: Tensor) -> Tensor:
        context.save_for_backward(gradient)
        context.dtype = logprobs.dtype
        return losses

    @staticmethod
    def backward(context: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = context.saved_tensors
        return (upstream * gradient).to(context.dtype), None, None
