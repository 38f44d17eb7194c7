"""Attention over the packed row by flash-attn. The one file that imports it."""

from __future__ import annotations

import torch
from flash_attn import flash_attn_varlen_func
from torch import Tensor

from asyncrl.train.attention import PackedSegments, Scoring


def attend_flash(query: Tensor, key: Tensor, value: Tensor, *, segments: PackedSegments, scoring: Scoring) -> Tensor:
    """One kernel for all sequences."""
    def ends() -> Tensor:
        lengths = torch.tensor([0, *segments.lengths()], dtype=torch.int32)
        return lengths.cumsum(0, dtype=torch.int32).to(query.device)

    cu_seqlens = segments.once("flash", ends)
    window = (-1, -1) if scoring.window is None else (scoring.window - 1, 0)
    return flash_attn_varlen_func(query, key, value, cu_seqlens, cu_seqlens, segments.longest, segments.longest, causal=True,
                                  softmax_scale=scoring.scaling, window_size=window, softcap=scoring.softcap or 0.0,
                                  deterministic=torch.are_deterministic_algorithms_enabled())
