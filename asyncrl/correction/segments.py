"""Sums over the loss tokens of turns and sequences, in float64, and back to the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.correction.rules import Level, Reduce
from asyncrl.errors import ShapeError


def require_offsets(cu_seqlens: Tensor, *, tokens: int) -> None:
    """Raise ShapeError unless the offsets, [N + 1], end at T. On a GPU their values are not looked at: it would wait for them."""
    if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0 or (cu_seqlens.device.type == "cpu" and int(cu_seqlens[-1]) != tokens):
        raise ShapeError(f"cu_seqlens must be [N + 1] and end at T = {tokens}, got {tuple(cu_seqlens.shape)} "
                         f"ending at {cu_seqlens[-1:].tolist()}")


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """S segments that loss tokens fall into. Values where `mask` is False are never read."""

    ids: Tensor
    """[T] int64 number of each token's segment."""
    mask: Tensor
    """[T] bool, the loss tokens."""
    lengths: Tensor
    """[S] float64 loss tokens of each segment."""

    @classmethod
    def of_sequences(cls, mask: Tensor, *, cu_seqlens: Tensor) -> Segments:
        """The N sequences; one without loss tokens has length 0. Raises ShapeError."""
        require_offsets(cu_seqlens, tokens=len(mask))
        lengths = cu_seqlens.diff()
        ids = torch.arange(len(lengths), device=mask.device).repeat_interleave(lengths, output_size=len(mask))
        return cls._of(ids, mask=mask, count=len(lengths))

    @classmethod
    def of_turns(cls, mask: Tensor, *, cu_seqlens: Tensor, turn_ids: Tensor) -> Segments:
        """Loss tokens of one sequence and one turn id; one empty segment where there is none. Waits for the device."""
        ids = cls.of_sequences(mask, cu_seqlens=cu_seqlens).ids
        places = mask.nonzero()[:, 0]
        keys = torch.stack([ids[places], turn_ids[places].long()])
        # Neighbours are nearly always of one turn: what has to be sorted is the few runs of them.
        runs, run_of = torch.unique_consecutive(keys, dim=1, return_inverse=True)
        _, turn_of = torch.unique(runs, dim=1, return_inverse=True)
        numbers = torch.zeros_like(ids)
        numbers[places] = turn_of[run_of]
        return cls._of(numbers, mask=mask, count=int(turn_of.max()) + 1 if len(places) else 1)

    @classmethod
    def of(cls, level: Level, *, mask: Tensor, cu_seqlens: Tensor, turn_ids: Tensor) -> Segments:
        """The segments of a level other than "token"."""
        return (cls.of_sequences(mask, cu_seqlens=cu_seqlens) if level == "sequence"
                else cls.of_turns(mask, cu_seqlens=cu_seqlens, turn_ids=turn_ids))

    @classmethod
    def _of(cls, ids: Tensor, *, mask: Tensor, count: int) -> Segments:
        lengths = torch.zeros(count, dtype=torch.float64, device=mask.device).index_add_(0, ids, mask.double())
        return cls(ids=ids, mask=mask, lengths=lengths)

    def sum(self, values: Tensor) -> Tensor:
        """[S] float64 sums of [T] values; gradient flows."""
        start = values.new_zeros(len(self.lengths), dtype=torch.float64)
        return start.index_add(0, self.ids, torch.where(self.mask, values.double(), 0.0))

    def mean(self, values: Tensor) -> Tensor:
        """[S] float64 means, 0 for a segment without loss tokens; gradient flows."""
        return self.sum(values) / self.lengths.clamp(min=1.0)

    def reduce(self, values: Tensor, *, how: Reduce) -> Tensor:
        """[S] float64; the largest of nothing is −inf, the smallest +inf."""
        if how in ("sum", "mean"):
            return self.sum(values) if how == "sum" else self.mean(values)
        nothing = -torch.inf if how == "max" else torch.inf
        start = values.new_full((len(self.lengths),), nothing, dtype=torch.float64)
        extreme = "amax" if how == "max" else "amin"
        return start.scatter_reduce(0, self.ids, torch.where(self.mask, values.double(), nothing), reduce=extreme)

    def spread(self, values: Tensor) -> Tensor:
        """[T] each token's [S] value; anything where `mask` is False."""
        return values[self.ids]
