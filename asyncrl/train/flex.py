"""Attention over the packed row by torch's flex_attention, compiled on a GPU; blocks that no sequence crosses are never computed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from asyncrl.train.attention import PackedSegments, Scoring

BLOCK = 128
"""Rows of a block, the kernel's own; the packed row is padded to whole ones."""


def attend_flex(query: Tensor, key: Tensor, value: Tensor, *, segments: PackedSegments, scoring: Scoring) -> Tensor:
    """One kernel for all sequences."""
    rows = len(query)
    blocks = segments.once(("flex", scoring.window), lambda: block_mask(segments.lengths(), window=scoring.window, device=query.device))
    q, k, v = (pad(x, (0, 0, 0, 0, 0, -rows % BLOCK)).transpose(0, 1)[None] for x in (query, key, value))
    mixed = _flex(query.device)(q, k, v, score_mod=_cap(scoring.softcap), block_mask=blocks, scale=scoring.scaling,
                                enable_gqa=q.shape[1] != k.shape[1])
    return mixed[0].transpose(0, 1)[:rows]


def block_mask(lengths: list[int], *, window: int | None, device: torch.device) -> BlockMask:
    """Which keys each row sees, and which blocks hold any: those from its sequence's start, or the window's, to itself.

    Rows of padding see themselves. Without the [E, E] mask that torch's own constructor goes through.
    """
    sizes = torch.tensor(lengths)
    starts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    places = torch.arange(len(starts) + -len(starts) % BLOCK)
    first = torch.cat([starts, places[len(starts):]])
    if window is not None:
        first = torch.maximum(first, places - window + 1)
    number = torch.arange(len(places) // BLOCK)
    # `first` never falls, so the first row of a block reaches furthest back, and the last row says from where all see all.
    any_from, all_from = first[::BLOCK] // BLOCK, -(-first[BLOCK - 1::BLOCK] // BLOCK)
    some = (number >= any_from[:, None]) & (number <= number[:, None])
    whole = (number >= all_from[:, None]) & (number < number[:, None])
    first = first.to(device)

    def sees(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (column >= first[row]) & (column <= row)

    return BlockMask.from_kv_blocks(*_listed(some & ~whole, device), *_listed(whole, device), BLOCK_SIZE=BLOCK, mask_mod=sees)


def _listed(chosen: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """[1, 1, B] how many of each row are chosen, and [1, 1, B, B] which, those first."""
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None].to(device), order.to(torch.int32)[None, None].to(device)


def _cap(softcap: float | None) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None

    def capped(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


_COMPILED: list[Callable[..., Tensor]] = []


def _flex(device: torch.device) -> Callable[..., Tensor]:
    """On a CPU as it is, for comparison: it has no gradient there. Compiled it raises, where it would be compiled anew too often, rather
    than go on uncompiled with whole [E, E] scores."""
    if device.type == "cpu":
        return flex_attention
    if not _COMPILED:
        _COMPILED.append(torch.compile(flex_attention, fullgraph=True))
    return _COMPILED[0]
