"""From token losses to one number, the same for every split of the batch over ranks and microbatches.

The denominator is counted once per update, over all ranks, from the mask that the numerator has. With the denominator "original" that
is the loss mask before any correction: a token that a correction drops still counts, so dropping shrinks the step instead of boosting
the tokens that stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl.correction.segments import require_offsets
from asyncrl.errors import ConfigError, ShapeError

Mode = Literal["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "dr_grpo"]


@dataclass(frozen=True, slots=True)
class Denominators:
    """What one share of an update holds. Add the shares of all ranks before the first backward pass."""

    num_loss_tokens: int
    num_loss_sequences: int
    """Sequences with at least one loss token; a fully masked one adds nothing."""

    def __add__(self, other: Denominators) -> Denominators:
        return Denominators(self.num_loss_tokens + other.num_loss_tokens, self.num_loss_sequences + other.num_loss_sequences)


def count(loss_mask: Tensor, *, cu_seqlens: Tensor) -> Denominators:
    """Denominators of packed sequences, `loss_mask` [T] bool, `cu_seqlens` [N + 1]. Waits for the device."""
    lengths = _loss_lengths(loss_mask, cu_seqlens=cu_seqlens)
    return Denominators(num_loss_tokens=int(lengths.sum()), num_loss_sequences=int((lengths > 0).sum()))


def scale(denominators: Denominators, *, mode: Mode = "token_mean", max_tokens: int | None = None, averaging_ranks: int = 1,
          averaging_microbatches: int = 1) -> float:
    """Factor of every microbatch's summed token losses (for seq_mean_token_mean: of its summed sequence means).

    An engine that adds up gradients takes it as it is. One that averages them over ranks (DDP, FSDP) or over the microbatches of an
    update (Megatron, DeepSpeed) gets it times that number, which undoes the mean; the number of microbatches is each rank's own.
    An update without loss tokens gets a finite factor, and its loss is 0. Raises ConfigError.

    Two ranks with 2 tokens of loss 1 and 8 tokens of loss 0; the mean over tokens is 0.2, a mean of the ranks' means would be 0.5:

    >>> whole = Denominators(num_loss_tokens=2, num_loss_sequences=1) + Denominators(num_loss_tokens=8, num_loss_sequences=1)
    >>> [loss_sum * scale(whole) for loss_sum in (2.0, 0.0)]  # an engine that sums
    [0.2, 0.0]
    >>> [loss_sum * scale(whole, averaging_ranks=2) for loss_sum in (2.0, 0.0)]  # one that will halve their sum
    [0.4, 0.0]
    """
    if (mode == "dr_grpo") != (max_tokens is not None) or (max_tokens is not None and max_tokens < 1):
        raise ConfigError("loss.aggregation, loss.max_tokens", value=(mode, max_tokens),
                          allowed="max_tokens ≥ 1 with dr_grpo, and only there",
                          remedy="dr_grpo divides by a constant length: the token budget of a completion.")
    if averaging_ranks < 1 or averaging_microbatches < 1:
        raise ConfigError("averaging_ranks, averaging_microbatches", value=(averaging_ranks, averaging_microbatches),
                          allowed="at least 1 each", remedy="They are how many gradients the engine takes a mean of; 1 where it adds them.")
    tokens, sequences = max(denominators.num_loss_tokens, 1), max(denominators.num_loss_sequences, 1)
    divisors = {"token_mean": tokens, "token_sum": 1, "seq_mean_token_sum": sequences, "seq_mean_token_mean": sequences,
                "dr_grpo": sequences * (max_tokens or 1)}
    if mode not in divisors:
        raise ConfigError("loss.aggregation", value=mode, allowed=f"one of {', '.join(divisors)}", remedy="Choose one of them.")
    return averaging_ranks * averaging_microbatches / divisors[mode]


def aggregate(losses: Tensor, *, loss_mask: Tensor, cu_seqlens: Tensor, denominators: Denominators,
              mode: Mode = "token_mean", max_tokens: int | None = None) -> Tensor:
    """This share's part of the global loss, a scalar; the parts of all shares add up to it.

        token_mean           Σ l / num_loss_tokens                  DAPO, 2503.14476, section 3.3
        token_sum            Σ l
        seq_mean_token_sum   Σ l / num_loss_sequences
        seq_mean_token_mean  Σ_n (Σ_t l / |n|) / num_loss_sequences GRPO, 2402.03300, section 4.1
        dr_grpo              Σ l / (num_loss_sequences · max_tokens) Dr. GRPO, 2503.20783, section 3.2

    Args:
        losses: [T] float; what `loss_mask` hides is ignored, with gradient 0.
        loss_mask: [T] bool, `Corrected.counted`: the loss mask before correction, or what is kept where the denominator counts that.
        cu_seqlens: [N + 1] integer; a share holds whole sequences.
        denominators: of the whole update.
        mode: see above.
        max_tokens: the constant of dr_grpo, None with every other mode.
    """
    if losses.shape != loss_mask.shape:
        raise ShapeError(f"losses and loss_mask must be [T], got {tuple(losses.shape)}, {tuple(loss_mask.shape)}")
    losses = torch.where(loss_mask, losses, 0.0)
    if mode == "seq_mean_token_mean":
        lengths = _loss_lengths(loss_mask, cu_seqlens=cu_seqlens)
        losses = losses / lengths.clamp(min=1).repeat_interleave(cu_seqlens.diff(), output_size=len(losses))
    return losses.sum() * scale(denominators, mode=mode, max_tokens=max_tokens)


def _loss_lengths(loss_mask: Tensor, *, cu_seqlens: Tensor) -> Tensor:
    """[N] loss tokens of each sequence."""
    if loss_mask.dtype != torch.bool or loss_mask.dim() != 1:
        raise ShapeError(f"loss_mask must be [T] bool, got {loss_mask.dtype} {tuple(loss_mask.shape)}")
    require_offsets(cu_seqlens, tokens=len(loss_mask))
    ends = torch.zeros(len(loss_mask) + 1, dtype=torch.int32, device=loss_mask.device)
    torch.cumsum(loss_mask, 0, dtype=torch.int32, out=ends[1:])
    return ends[cu_seqlens.long()].diff()
