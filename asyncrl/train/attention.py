"""Causal attention per sequence inside a packed micro-batch, as a transformers attention function.

Whatever computes it, the same three steps: rows that sequences share are repeated, each sequence attends to itself, and of what was
computed several times one row is kept. `attention_choice` says which backend a model gets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.errors import ConfigError

PACKED = "asyncrl_packed"
"""The name transformers knows SDPA per sequence by. No mask function has it, so transformers builds no [T, T] mask."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedSegments:
    """`microbatch.Segments` on the device of the model."""

    runs: tuple[tuple[int, int], ...]
    expand: Tensor | None
    """[E] int64"""
    collapse: Tensor | None
    """[U] int64"""
    _derived: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(length for _, length in self.runs)

    def lengths(self) -> list[int]:
        """[N] tokens of each sequence, in order."""
        return [length for count, length in self.runs for _ in range(count)]

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made by the first layer that asks for `key`."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]

    def forget(self) -> None:
        """Drop what `once` keeps: masks are [L, L], and a step has many micro-batches."""
        self._derived.clear()


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a query scores the keys before it."""

    scaling: float
    """Factor on the products."""
    window: int | None
    """Keys a query sees, itself among them; None: all before it."""
    softcap: float | None
    """Scores s become softcap · tanh(s / softcap)."""


class Attend(Protocol):
    """A backend: [E, H, D] queries, [E, H_kv, D] keys and values of whole sequences to [E, H, D]."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, segments: PackedSegments, scoring: Scoring) -> Tensor: ...


def packed(attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    """An attention function for transformers: queries [1, H, U, D], keys and values [1, H_kv, U, D] to [1, U, H, D] and no weights.

    It needs no mask: causality follows from `segments`. torch.compile leaves it alone, since every micro-batch has other lengths.
    """
    @torch.compiler.disable
    def attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
                  scaling: float, segments: PackedSegments | None = None, **settings: Any) -> tuple[Tensor, None]:
        if segments is None:
            raise ConfigError("model", value=type(module).__name__, allowed="layers that hand on what they are given to their attention",
                              remedy="transformers' code of this model does not: choose another.")
        window = settings.get("sliding_window")
        scoring = Scoring(scaling, window if window is not None and window < segments.longest else None, settings.get("softcap"))
        rows = (_expand(x[0].transpose(0, 1), segments.expand) for x in (query, key, value))
        return _expand(attend(*rows, segments=segments, scoring=scoring), segments.collapse)[None], None

    return attention


def attend_by_sequence(query: Tensor, key: Tensor, value: Tensor, *, segments: PackedSegments, scoring: Scoring) -> Tensor:
    """SDPA; a run of equally long sequences is one call. Longer than the window: with a mask; capped scores: written out."""
    outputs = []
    # split, for the gradient of a slice is as long as what it was cut from
    pieces = zip(*(x.split([count * length for count, length in segments.runs]) for x in (query, key, value)), strict=True)
    for (count, length), piece in zip(segments.runs, pieces, strict=True):
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in piece)
        mask, window = None, min(scoring.window or length, length)
        if window < length or scoring.softcap is not None:
            mask = segments.once((length, window), lambda length=length, window=window: _band(length, window, device=query.device))
        if scoring.softcap is not None:
            assert mask is not None
            mixed = _capped(q, k, v, mask=mask, scoring=scoring)
        else:
            mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scoring.scaling,
                                                 enable_gqa=q.shape[1] != k.shape[1])
        outputs.append(mixed.transpose(1, 2).flatten(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _capped(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor, scoring: Scoring) -> Tensor:
    """[n, H, L, D], as transformers' eager attention has it."""
    assert scoring.softcap is not None
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2) * (scoring.scaling / scoring.softcap)).tanh() * scoring.softcap
    # where, for its gradient keeps this very mask
    seen = torch.where(mask, scores, -torch.inf)
    return seen.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def _band(length: int, window: int, *, device: torch.device) -> Tensor:
    """[L, L] which keys each query sees."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    return seen.triu_(1 - window)


def _expand(rows: Tensor, index: Tensor | None) -> Tensor:
    return rows if index is None else rows.index_select(0, index)
