"""Causal attention per sequence inside a packed micro-batch, as a transformers attention function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from asyncrl.errors import ConfigError

PACKED = "asyncrl_packed"
"""The name transformers knows the function by. No mask function has it, so transformers builds no [T, T] mask."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedSegments:
    """`microbatch.Segments` on the device of the model."""

    runs: tuple[tuple[int, int], ...]
    expand: Tensor | None
    """[E] int64"""
    collapse: Tensor | None
    """[U] int64"""


def register() -> None:
    """Make `PACKED` known to transformers; safe to call again."""
    ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)


def packed_attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
                     segments: PackedSegments, scaling: float, sliding_window: int | None = None,
                     **_: Any) -> tuple[Tensor, None]:
    """Attention of each sequence over itself; a run of equally long sequences is one call.

    Args:
        module: the attention layer; unused.
        query: [1, H, U, D]; key and value [1, H_kv, U, D].
        attention_mask: None; causality follows from the segments.
        segments: where the sequences are.
        scaling: factor on the scores.
        sliding_window: tokens a query may look back; longer sequences are refused.

    Returns:
        [1, U, H, D] and no weights.
    """
    longest = max(length for _, length in segments.runs)
    if sliding_window is not None and longest > sliding_window:
        raise ConfigError("model", value=f"sliding_window={sliding_window}",
                          allowed=f"a window of at least the longest sequence, {longest}",
                          remedy="Train on shorter sequences or choose a model with full attention.")
    grouped = query.shape[1] != key.shape[1]
    query, key, value = (_expand(x[0].transpose(0, 1), segments.expand) for x in (query, key, value))
    outputs, start = [], 0
    for count, length in segments.runs:
        q, k, v = (x[start:start + count * length].unflatten(0, (count, length)).transpose(1, 2) for x in (query, key, value))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        outputs.append(mixed.transpose(1, 2).flatten(0, 1))
        start += count * length
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _expand(output, segments.collapse)[None], None


def _expand(rows: Tensor, index: Tensor | None) -> Tensor:
    return rows if index is None else rows.index_select(0, index)
