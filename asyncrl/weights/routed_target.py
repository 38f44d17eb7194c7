"""A checkpoint tensor whose elements lie in strided blocks of a runtime model's memory, read and written where they lie.

A fused projection, a shard of rows or columns and a padded vocabulary are all boxes: n-dimensional blocks that are strided both in the flat
checkpoint tensor and in a runtime storage. Values move as integers of the element's width, so a NaN keeps its payload and −0.0 its sign,
on whatever device the memory is. The cost is that of the elements named; what is one contiguous run at runtime is a slice.

Elements of a box are counted in the order of the checkpoint, so that "those of a run" is an interval of that count.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.weights.codec import EVERYWHERE, Bits, Changes, holds, put, take, word_dtype
from asyncrl.weights.manifest import TensorEntry
from asyncrl.weights.merge import within
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
        """Whether the checkpoint's block is one contiguous run."""
        return _contiguous(self.sizes, self.checkpoint.strides)

    @property
    def is_packed(self) -> bool:
        """Whether the elements, in the checkpoint's order, are one contiguous run at runtime."""
        return _contiguous(self.sizes, self.runtime.strides)

    def before(self, index: int) -> int:
        """How many elements have a flat checkpoint index below `index`."""
        rest, count = index - self.checkpoint.offset, 0
        if rest <= 0:
            return 0
        inner = self.elements
        for size, stride in zip(self.sizes, self.checkpoint.strides, strict=True):
            inner //= size
            whole = min(rest // stride, size)
            count, rest = count + whole * inner, rest - whole * stride
            if whole == size:
                return count
        return count + (rest > 0)

    def indices(self, first: int, last: int) -> NDArray[np.int64]:
        """[last − first] flat checkpoint indices of the elements counted `first` … `last`."""
        inner, step = self.sizes[-1], self.checkpoint.strides[-1]
        rows = np.arange(first // inner, -(-last // inner))
        starts = np.full(len(rows), self.checkpoint.offset)
        for size, stride in zip(self.sizes[-2::-1], self.checkpoint.strides[-2::-1], strict=True):
            rows, coordinates = np.divmod(rows, size)
            starts += coordinates * stride
        found = (starts[:, None] + np.arange(inner) * step).reshape(-1)
        return found[first % inner:][:last - first]

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
    """A target whose elements, or this rank's share of them, lie in the boxes' memories, each in one place. See `Target`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]
    _runs: dict[tuple[int, int], Bits | None] = field(default_factory=dict, init=False, repr=False)
    """What `_held` found, by first element and length: ranks cut a tensor in the same places in every version."""

    def accepts(self, dtype: str) -> bool:
        """See `Target.accepts`."""
        return fits(dtype, self.dtype)

    def here(self, entry: TensorEntry, changes: Changes) -> Iterator[tuple[TensorEntry, Changes]]:
        """See `Target.here`; box by box. A shard of rows is a shorter run, one of columns has indices."""
        for box in self.boxes:
            first, last = box.before(entry.start), box.before(entry.start + entry.length)
            if first == last:
                continue
            if box.is_run and last - first == entry.length:
                run, found = entry, changes
            elif box.is_run:
                run = dataclasses.replace(entry, start=box.checkpoint.offset + first, length=last - first)
                found = within(changes, run.start - entry.start, run.length)
            else:
                run, found = entry, _chosen(changes, box, first, last, start=entry.start)
            if found.indices is None or len(found.indices):
                yield run, found

    def words(self, entry: TensorEntry, changes: Changes) -> Tensor:
        """[k] raw bits at runtime, as signed integers, of what `here` gave."""
        return self._gather(entry.start, entry.length, changes.indices)

    def read(self, entry: TensorEntry, changes: Changes) -> Bits:
        """See `Target.read`."""
        memory = self._held(entry)
        if memory is not None:
            return take(memory, changes)
        words = self.words(entry, changes)
        if entry.dtype != self.dtype:
            if (words & _LOW_HALF).any():
                raise never_published(self.name, entry.dtype)
            words = (words >> _BF16_BITS).to(torch.int16)
        found = words.cpu().numpy()
        return found.view(f"<u{found.itemsize}")

    def write(self, entry: TensorEntry, changes: Changes) -> None:
        """See `Target.write`."""
        memory = self._held(entry)
        if memory is not None:
            put(memory, changes)
            if not holds(memory, changes):
                raise not_held(self.name)
            return
        values = np.array(changes.values)  # a payload may be read-only and unaligned
        words = torch.from_numpy(values.view(f"<i{values.itemsize}")).to(self._memory.device)
        if entry.dtype != self.dtype:
            words = words.to(torch.int32) << _BF16_BITS
        run, chosen = self._slice(entry.start, entry.length, changes.indices)
        if run is not None and chosen is None:
            run.copy_(words)
        elif run is not None:
            run.index_copy_(0, chosen, words)
        else:
            indices = self._indices(entry.start, entry.length, changes.indices)
            for box in self.boxes:
                held, positions = box.places(indices)
                box.memory.index_copy_(0, positions[held], words[held])
        if not torch.equal(self._gather(entry.start, entry.length, changes.indices), words):
            raise not_held(self.name)

    def _held(self, entry: TensorEntry) -> Bits | None:
        """Memory of the host that holds just the elements of a run, as published, one after another; None where there is none."""
        place = entry.start, entry.length
        if entry.dtype != self.dtype or self._memory.device.type != "cpu":
            return None
        if place not in self._runs:
            run = next((box.memory[box.runtime.offset + first:][:entry.length] for box in self.boxes if box.is_packed and
                        box.before(entry.start + entry.length) - (first := box.before(entry.start)) == entry.length), None)
            self._runs[place] = None if run is None else run.numpy().view(word_dtype(self.dtype))
        return self._runs[place]

    @property
    def _memory(self) -> Tensor:
        return self.boxes[0].memory

    def _gather(self, start: int, length: int, relative: NDArray[np.int64] | None) -> Tensor:
        run, chosen = self._slice(start, length, relative)
        if run is not None:
            return run if chosen is None else run.index_select(0, chosen)
        indices = self._indices(start, length, relative)
        words = torch.empty(len(indices), dtype=self._memory.dtype, device=self._memory.device)
        for box in self.boxes:
            held, positions = box.places(indices)
            words[held] = box.memory.index_select(0, positions[held])
        return words

    def _slice(self, start: int, length: int, relative: NDArray[np.int64] | None) -> tuple[Tensor | None, Tensor | None]:
        """A slice of memory that holds the elements, where one does, and which of it they are; None: all."""
        for box in self.boxes:
            first, last = box.before(start), box.before(start + length)
            run = box.memory[box.runtime.offset + first:][:last - first] if box.is_packed else None
            if run is not None and last - first == length:
                return run, None if relative is None else self._indices(0, length, relative)
            if run is not None and relative is not None and len(relative) == last - first and np.array_equal(
                    relative + start, box.indices(first, last)):
                return run, None
        return None, None

    def _indices(self, start: int, length: int, relative: NDArray[np.int64] | None) -> Tensor:
        device = self._memory.device
        if relative is None:
            return torch.arange(start, start + length, device=device)
        return torch.from_numpy(np.ascontiguousarray(relative)).to(device) + start


def _chosen(changes: Changes, box: Box, first: int, last: int, *, start: int) -> Changes:
    """Those of the changes of a run from flat index `start` on that are elements `first` … `last` of the box."""
    if changes is EVERYWHERE:
        return Changes(box.indices(first, last) - start, changes.values)
    if changes.indices is None:
        indices = box.indices(first, last) - start
        return Changes(indices, changes.values[indices])
    held = box.places(torch.from_numpy(changes.indices + start))[0].numpy()
    return Changes(changes.indices[held], changes.values[held])


def _contiguous(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a block in row-major order is one run."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if stride != expected:
            return False
        expected *= size
    return True


def _nested(dimensions: list[tuple[int, int]]) -> bool:
    """Whether (stride, size) reach each element once, each stride going beyond all smaller ones together."""
    reach = 1
    for stride, size in sorted(dimensions):
        if stride < reach:
            return False
        reach += (size - 1) * stride
    return True
