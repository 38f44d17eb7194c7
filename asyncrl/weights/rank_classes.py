"""Which ranks of an engine hold which tensors: what each must know of the others so that their state hashes add up.

A rank may hold a shard of a tensor, all of it, or none. Ranks that hold the same elements are a class, named by their numbers as in
`0,2`: its share of the state hash counts once, and its members must agree (`receiver.joined`). What one rank holds alone has no class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import WeightSyncError
from asyncrl.weights.receiver import ALONE
from asyncrl.weights.routed_target import Layout, overlapping

Block = tuple[tuple[int, ...], Layout]
"""Sizes, and where its elements lie in the flat checkpoint tensor."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What one rank holds of one tensor."""

    dtype: str
    """At runtime; safetensors name."""
    shape: tuple[int, ...]
    """Of the checkpoint tensor."""
    blocks: tuple[Block, ...]

    def to_plain(self) -> list[Any]:
        """As lists and numbers."""
        return [self.dtype, list(self.shape), [[list(sizes), layout.offset, list(layout.strides)] for sizes, layout in self.blocks]]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Placement:
        """What `to_plain` gave."""
        dtype, shape, blocks = plain
        return cls(dtype, tuple(shape), tuple((tuple(sizes), Layout(offset, tuple(strides))) for sizes, offset, strides in blocks))


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """What all ranks of an engine agree on."""

    routed: Mapping[str, tuple[str, tuple[int, ...]]]
    """Runtime dtype and checkpoint shape of every tensor that changes are written to element by element."""
    whole: tuple[str, ...]
    """The tensors that every rank gives to its loader whole: those that have no route on one of them."""
    classes: tuple[Mapping[str, str], ...]
    """By rank, of each routed tensor that it holds elements of."""

    @classmethod
    def of_ranks(cls, placements: Sequence[Mapping[str, Placement]], *, whole: Sequence[Mapping[str, str]]) -> TensorPlan:
        """Raises WeightSyncError as `rank_classes` does.

        Args:
            placements: by rank, by tensor.
            whole: by rank, the tensors without a route.
        """
        reloaded = tuple(dict.fromkeys(name for rank in whole for name in rank))
        left = [{name: held for name, held in rank.items() if name not in reloaded} for rank in placements]
        routed = {name: (held.dtype, held.shape) for rank in left for name, held in rank.items()}
        return cls(routed, reloaded, tuple(rank_classes(left)))

    def to_plain(self) -> list[Any]:
        """As lists, dicts and strings."""
        routed = {name: [dtype, list(shape)] for name, (dtype, shape) in self.routed.items()}
        return [routed, list(self.whole), [dict(rank) for rank in self.classes]]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> TensorPlan:
        """What `to_plain` gave."""
        routed, whole, classes = plain
        return cls({name: (dtype, tuple(shape)) for name, (dtype, shape) in routed.items()}, tuple(whole), tuple(classes))


def rank_classes(placements: Sequence[Mapping[str, Placement]]) -> list[dict[str, str]]:
    """For each rank the class of every tensor it holds elements of.

    Args:
        placements: by rank, by tensor; a rank that holds nothing of a tensor has no entry, or one without blocks.

    Raises WeightSyncError, naming the tensor, unless any two ranks hold the same elements or none in common, and all together hold every
    element, in one dtype.
    """
    classes: list[dict[str, str]] = [{} for _ in placements]
    for name in dict.fromkeys(name for rank in placements for name in rank):
        held = {rank: found[name] for rank, found in enumerate(placements) if name in found and found[name].blocks}
        for members in _alike(name, held):
            for rank in members:
                classes[rank][name] = ",".join(map(str, members)) if len(members) > 1 else ALONE
    return classes


def _alike(name: str, held: Mapping[int, Placement]) -> list[list[int]]:
    """The ranks by what they hold."""
    kinds = {(placement.dtype, placement.shape) for placement in held.values()}
    if len(kinds) != 1:
        raise WeightSyncError(f"{name}: ranks {', '.join(map(str, held))} hold it as {sorted(kinds)}")
    (_, shape), = kinds
    groups: dict[tuple[Block, ...], list[int]] = {}
    for rank, placement in held.items():
        groups.setdefault(_canonical(placement.blocks), []).append(rank)
    blocks = [block for group in groups for block in group]
    if overlapping(blocks) is not None:
        raise WeightSyncError(f"{name}: ranks {', '.join(map(str, held))} share some of its elements but not all")
    placed = sum(math.prod(sizes) for sizes, _ in blocks)
    if placed != math.prod(shape):
        raise WeightSyncError(f"{name}: all ranks together place {placed} of its {math.prod(shape)} elements")
    return list(groups.values())


def _canonical(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """The same blocks, dimensions that are one run in the checkpoint joined, so that equal elements look alike."""
    found = []
    for sizes, layout in blocks:
        joined: list[tuple[int, int]] = []
        for size, stride in zip(sizes, layout.strides, strict=True):
            if joined and joined[-1][1] == size * stride:
                size *= joined.pop()[0]
            joined.append((size, stride))
        found.append((tuple(size for size, _ in joined), Layout(layout.offset, tuple(stride for _, stride in joined))))
    return tuple(sorted(found, key=lambda block: (block[1].offset, *block[0])))
