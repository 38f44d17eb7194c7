"""What goes into a correction and what comes out of it, as packed tensors. Shapes are checked when they are built."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.errors import NonFiniteError, ShapeError, StalenessError
from asyncrl.metrics import Metrics

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
"""Signed: a difference of unsigned offsets is never negative, whatever they are."""
_DTYPES = {**dict.fromkeys(("rollout_logprobs", "proximal_logprobs", "advantages"), _FLOATS), "loss_mask": (torch.bool,)}
_TENSORS = ("rollout_logprobs", "proximal_logprobs", "advantages", "loss_mask", "turn_ids", "policy_versions", "cu_seqlens", "group_ids")
_GUESSED = {"proximal_logprobs": " of computed logprobs: log-linear ones are a guess, so no mismatch is measured on them and nothing is "
                                 "rejected by them; use Correction(proximal='log_linear')"}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CorrectionBatch:
    """All sequences of one optimizer batch, one after another. Where `loss_mask` is False any value may stand, NaN included.

    Raises ShapeError when lengths, dtypes or devices disagree. `check` looks at the values.
    """

    rollout_logprobs: Tensor
    """[T] float, of the distribution sampled from."""
    proximal_logprobs: Tensor
    """[T] float, under the trainer's weights at the start of the step."""
    advantages: Tensor
    """[T] float."""
    loss_mask: Tensor
    """[T] bool, sampled by the policy and trainable."""
    turn_ids: Tensor
    """[T] integer, −1 for the prompt."""
    policy_versions: Tensor
    """[T] integer, version that sampled the token, −1 where not sampled."""
    cu_seqlens: Tensor
    """[N + 1] integer offsets: sequence n is [cu_seqlens[n], cu_seqlens[n + 1])."""
    group_ids: Tensor
    """[N] integer."""
    version: int
    """Policy version the step trains from."""

    def __post_init__(self) -> None:
        for name in _TENSORS:
            if not isinstance(value := getattr(self, name), Tensor):
                raise ShapeError(f"{name} is a {type(value).__name__}, needs a tensor" + _GUESSED.get(name, ""))
        tokens, sequences = self.loss_mask.numel(), self.group_ids.numel()
        lengths = dict.fromkeys(_TENSORS, tokens) | {"group_ids": sequences, "cu_seqlens": sequences + 1}
        for name, length in lengths.items():
            tensor = getattr(self, name)
            if tuple(tensor.shape) != (length,):
                raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, needs ({length},): [T] like loss_mask, or [N] like group_ids")
            if tensor.device != self.loss_mask.device:
                raise ShapeError(f"{name} is on {tensor.device}, loss_mask on {self.loss_mask.device}")
            allowed = _DTYPES.get(name, _INTEGERS)
            if tensor.dtype not in allowed:
                raise ShapeError(f"{name} is {tensor.dtype}, needs one of {', '.join(map(str, allowed))}")
        if isinstance(self.version, bool) or not isinstance(self.version, int) or not 0 <= self.version < 2**31:
            raise ShapeError(f"version is {self.version!r}, needs an integer from 0 on: steps behind the trainer's weights")

    def check(self) -> None:
        """Raise unless the values are usable. Waits for the device, so call it once a step.

        ShapeError: offsets that do not cover [0, T) in order, or a loss token nobody sampled. NonFiniteError: NaN or
        infinity at a loss token. StalenessError: a loss token from a version the trainer has not reached.
        """
        self._check_offsets()
        values, versions = (self.rollout_logprobs, self.proximal_logprobs, self.advantages), self.policy_versions
        # One sum is finite where all is well; which value is at fault, if any, is looked for only where it is not.
        total = (values[0] + values[1]).add_(values[2]).masked_fill_(~self.loss_mask, 0.0).sum()
        lowest, highest = torch.where(self.loss_mask, versions, 0).aminmax() if len(versions) else (0, 0)
        if bool(torch.isfinite(total)) and int(lowest) >= 0 and int(highest) <= self.version:
            return
        for name, tensor in zip(("rollout_logprobs", "proximal_logprobs", "advantages"), values, strict=True):
            self._refuse(~torch.isfinite(tensor), NonFiniteError, f"{name} must be finite at every loss token", tensor)
        self._refuse(versions < 0, ShapeError, "loss_mask is set at a token that no policy version sampled", versions)
        self._refuse(versions > self.version, StalenessError, f"a token is newer than version {self.version} of the trainer", versions)

    def _check_offsets(self) -> None:
        offsets, tokens = self.cu_seqlens, self.loss_mask.numel()
        if int(offsets[0]) != 0 or int(offsets[-1]) != tokens or bool((offsets.diff() < 0).any()):
            raise ShapeError(f"cu_seqlens must rise from 0 to T = {tokens}, got {offsets.tolist()}")

    def _refuse(self, bad: Tensor, error: type[Exception], rule: str, values: Tensor) -> None:
        bad = bad & self.loss_mask
        if not bool(bad.any()):
            return
        index = int(bad.nonzero()[0])
        sequence = int(torch.searchsorted(self.cu_seqlens, index, right=True)) - 1
        place = f"index {index}, which is token {index - int(self.cu_seqlens[sequence])} of sequence {sequence}"
        raise error(f"{rule}; got {values[index].item()} at {place} ({int(bad.sum())} such tokens)")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Corrected:
    """Frozen result of a correction: no gradient flows into it, and the loss reads nothing else of the rollout policy."""

    weights: Tensor
    """[T] float32 (float64 for float64 input), bounded importance weights, 0 where `keep_mask` is False. With `alpha`: 1, not
    yet known."""
    keep_mask: Tensor
    """[T] bool, loss tokens that survived."""
    counted: Tensor
    """[T] bool, tokens that the denominator counts: the loss mask, or `keep_mask` with denominator "kept". What `count` and
    `aggregate` take for their loss mask."""
    alpha: Tensor | None = None
    """[T] interpolation towards the current logprobs where the proximal ones are log-linear, None where they are computed."""
    metrics: Metrics = field(default_factory=Metrics)


@dataclass(frozen=True, slots=True, eq=False)
class Weighed:
    """A result with what led to it, for diagnosis."""

    corrected: Corrected
    level_log_ratio: Tensor
    """[T] logarithm of the ratio a weight is made of, neither clamped, truncated nor masked; 0 where not a loss token."""
    rejected: dict[str, Tensor]
    """[T] bool, what each rule dropped, by its name."""
    normalizer: Tensor | None = None
    """Scalar, what the weights were divided by."""
