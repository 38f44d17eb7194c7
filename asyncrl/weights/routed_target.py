"""A checkpoint tensor whose elements lie in strided blocks of a runtime model's memory, read and written where they lie.

A fused projection, a shard of rows or columns and a padded vocabulary are all boxes: n-dimensional blocks that are strided both in the flat
checkpoint tensor and in a runtime storage. Values move as integers of the element's width, so a NaN keeps its payload and −0.0 its sign,
on whatever device the memory is. The cost is that of the elements named; one contiguous run of both is a slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.weights.codec import Bits, Changes
from asyncrl.weights.manifest import TensorEntry
from asyncrl.weights.targets import fits, never_published, not_held

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BF16_BITS = 16
_LOW_HALF = 0xFFFF


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the elements of a block lie in flat memory."""

    offset: int
    strides: tuple[int, ...]

    def end(self, sizes: tuple[int, ...]) -> int:
        """One past the last element."""
        return self.offset + 1 + sum((size - 1) * stride for size, stride in zip(sizes, self.strides, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """A block of a checkpoint tensor and the block of runtime memory that holds it."""

    sizes: tuple[int, ...]
    """Both blocks', the checkpoint's largest stride first; dimensions that are one run in both are joined."""
    checkpoint: Layout
    runtime: Layout
    memory: Tensor
    """The runtime storage, whole and flat, as integers as wide as an element."""

    @property
    def elements(self) -> int:
        """Of either block."""
        return math.prod(self.sizes)

    @property
    def is_run(self) -> bool:
        """Whether both blocks are one contiguous run."""
        return len(self.sizes) == 1 and self.checkpoint.strides == self.runtime.strides == (1,)

    def places(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """For flat checkpoint indices [k]: which the box holds [k] bool, and where in `memory` [k] int64 (meaningless for the others)."""
        rest = indices - self.checkpoint.offset
        held = rest >= 0
        positions = torch.full_like(indices, self.runtime.offset)
        for size, source, destination in zip(self.sizes, self.checkpoint.strides, self.runtime.strides, strict=True):
            coordinate = rest.div(source, rounding_mode="floor")
            rest = rest - coordinate * source
            positions += coordinate * destination
            held &= coordinate < size
        return held & (rest == 0), positions


def box_between(source: Tensor, destination: Tensor) -> Box:
    """The box of `destination.copy_(source)`; `source` is a view of a whole, contiguous checkpoint tensor.

    Raises WeightSyncError, without a name, when one element would have two places on either side.
    """
    if destination.element_size() not in _WORDS:
        raise WeightSyncError(f"elements of {destination.dtype} cannot be addressed")
    source = source.expand(destination.shape)
    dimensions = [dimension for dimension in zip(destination.shape, source.stride(), destination.stride(), strict=True) if dimension[0] > 1]
    dimensions.sort(key=lambda dimension: -dimension[1])
    if not _nested([(s, size) for size, s, _ in dimensions]) or not _nested([(d, size) for size, _, d in dimensions]):
        raise WeightSyncError("one element is copied to several places, or several to one")
    joined: list[tuple[int, int, int]] = []
    for size, s, d in dimensions:
        if joined and joined[-1][1:] == (s * size, d * size):
            size *= joined.pop()[0]
        joined.append((size, s, d))
    sizes, strides, runtime_strides = zip(*joined or [(1, 1, 1)], strict=True)
    word = _WORDS[destination.element_size()]
    memory = torch.empty(0, dtype=word, device=destination.device).set_(destination.untyped_storage())
    return Box(sizes=sizes, checkpoint=Layout(source.storage_offset(), strides),
               runtime=Layout(destination.storage_offset(), runtime_strides), memory=memory)


def overlapping(blocks: list[tuple[tuple[int, ...], Layout]]) -> int | None:
    """Index of a block that shares an element with another one; None when all are disjoint."""
    order = sorted(range(len(blocks)), key=lambda index: blocks[index][1].offset)
    ends = [layout.end(sizes) for sizes, layout in blocks]
    if all(ends[one] <= blocks[other][1].offset for one, other in pairwise(order)):
        return None
    taken = torch.zeros(max(ends), dtype=torch.bool)  # their extents interleave: only counting elements tells
    for index in order:
        sizes, layout = blocks[index]
        view = taken.as_strided(sizes, layout.strides, layout.offset)
        if view.any():
            return index
        view.fill_(True)
    return None


@dataclass(frozen=True, slots=True, eq=False)
class RoutedTarget:
    """A target whose elements lie in the boxes' memories; together they hold each element once. See `Target`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]

    def accepts(self, dtype: str) -> bool:
        """See `Target.accepts`."""
        return fits(dtype, self.dtype)

    def here(self, entry: TensorEntry, changes: Changes) -> Iterable[tuple[TensorEntry, Changes]]:
        """See `Target.here`."""
        return ((entry, changes),)

    def words(self, start: int, length: int) -> Tensor:
        """[length] raw bits, as signed integers, of the elements from flat index `start` on."""
        return self._gather(start, length, None)

    def read(self, entry: TensorEntry, changes: Changes) -> Bits:
        """See `Target.read`."""
        words = self._gather(entry.start, entry.length, changes.indices)
        if entry.dtype != self.dtype:
            if (words & _LOW_HALF).any():
                raise never_published(self.name, entry.dtype)
            words = (words >> _BF16_BITS).to(torch.int16)
        found = words.cpu().numpy()
        return found.view(f"<u{found.itemsize}")

    def write(self, entry: TensorEntry, changes: Changes) -> None:
        """See `Target.write`."""
        values = np.array(changes.values)  # a payload may be read-only and unaligned
        words = torch.from_numpy(values.view(f"<i{values.itemsize}")).to(self._memory.device)
        if entry.dtype != self.dtype:
            words = words.to(torch.int32) << _BF16_BITS
        run = self._run(entry.start, entry.length)
        if run is not None and changes.indices is None:
            run.copy_(words)
        elif run is not None:
            run.index_copy_(0, self._indices(entry.start, entry.length, changes.indices) - entry.start, words)
        else:
            indices = self._indices(entry.start, entry.length, changes.indices)
            for box in self.boxes:
                held, positions = box.places(indices)
                box.memory.index_copy_(0, positions[held], words[held])
        if not torch.equal(self._gather(entry.start, entry.length, changes.indices), words):
            raise not_held(self.name)

    @property
    def _memory(self) -> Tensor:
        return self.boxes[0].memory

    def _gather(self, start: int, length: int, relative: np.ndarray | None) -> Tensor:
        run = self._run(start, length)
        if run is not None and relative is None:
            return run
        indices = self._indices(start, length, relative)
        if run is not None:
            return run.index_select(0, indices - start)
        words = torch.empty(len(indices), dtype=self._memory.dtype, device=self._memory.device)
        for box in self.boxes:
            held, positions = box.places(indices)
            words[held] = box.memory.index_select(0, positions[held])
        return words

    def _run(self, start: int, length: int) -> Tensor | None:
        """The elements as a slice of memory, where they are one."""
        for box in self.boxes:
            first = start - box.checkpoint.offset
            if box.is_run and first >= 0 and first + length <= box.elements:
                return box.memory[box.runtime.offset + first:][:length]
        return None

    def _indices(self, start: int, length: int, relative: np.ndarray | None) -> Tensor:
        device = self._memory.device
        if relative is None:
            return torch.arange(start, start + length, device=device)
        return torch.from_numpy(np.ascontiguousarray(relative)).to(device) + start


def _nested(dimensions: list[tuple[int, int]]) -> bool:
    """Whether (stride, size) reach each element once, each stride going beyond all smaller ones together."""
    reach = 1
    for stride, size in sorted(dimensions):
        if stride < reach:
            return False
        reach += (size - 1) * stride
    return True
