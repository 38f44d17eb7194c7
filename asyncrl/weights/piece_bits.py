"""The bits a rank publishes, and how they are cut: into runs, each an entry of the manifest, and stretches of runs scanned together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WeightSyncError
from asyncrl.weights.codec import BLOCK_ELEMENTS, Bits, word_dtype
from asyncrl.weights.manifest import Piece
from asyncrl.weights.state_hash import origin, tensor_seed

ENTRY_ELEMENTS = 64 * BLOCK_ELEMENTS
"""Longest run under one mode: lets a large tensor be sparse here and dense there."""

ALONE_ELEMENTS = 1 << 20
"""A piece as long as this is scanned by itself, in the trainer's own memory where that is as published; shorter ones are gathered first,
since each call costs as much as some ten thousand elements."""


@dataclass(frozen=True, slots=True)
class Span:
    """Elements `low` … `high` of a rank's piece number `piece`."""

    piece: int
    low: int
    high: int


class PieceBits(Protocol):
    """The current bits, as published, of the pieces a rank has. They do not change while they are read."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """In the order of publication."""

    @property
    def finite(self) -> bool:
        """Whether a value that is not finite must stop the publication."""

    def sources(self, spans: Sequence[Span]) -> Sequence[Bits] | None:
        """Memory that holds the bits of `spans`, which are of one dtype, an array each; None where they must be staged.

        Where BF16 is published it may be the bits of float32, uint32, yet to be rounded to nearest even.
        """

    def stage(self, spans: Sequence[Span], out: Bits) -> None:
        """Write the bits of `spans`, which are of one dtype, to `out`, one after another."""


class ArrayBits:
    """Bits that lie in arrays, of any values."""

    finite = False

    def __init__(self, arrays: Sequence[tuple[Piece, Bits]]) -> None:
        for piece, bits in arrays:
            if bits.shape != (piece.length,) or bits.dtype != word_dtype(piece.dtype):
                raise WeightSyncError(f"expected {piece} as flat {word_dtype(piece.dtype)}, got {bits.shape} {bits.dtype}")
        self.pieces = tuple(piece for piece, _ in arrays)
        self._arrays = [np.ascontiguousarray(bits) for _, bits in arrays]

    def sources(self, spans: Sequence[Span]) -> Sequence[Bits] | None:
        """See `PieceBits.sources`."""
        return [self._arrays[span.piece][span.low:span.high] for span in spans]

    def stage(self, spans: Sequence[Span], out: Bits) -> None:
        """See `PieceBits.stage`."""
        np.concatenate([self._arrays[span.piece][span.low:span.high] for span in spans], out=out)


@dataclass(frozen=True, slots=True)
class Run:
    """What gets an entry of its own in the manifest."""

    piece: Piece
    low: int
    """First element, in the piece."""
    length: int

    @property
    def start(self) -> int:
        """First element, in the tensor."""
        return self.piece.start + self.low


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Runs of one dtype that are scanned together, back to back."""

    dtype: str
    runs: tuple[Run, ...]
    spans: tuple[Span, ...]
    """The same elements, one of each piece."""
    place: int | None
    """First byte in the snapshot; None where no copy is kept."""
    lengths: NDArray[np.int64]
    """[r], of the runs."""
    origins: NDArray[np.uint64]
    """[r], of their first elements (`state_hash.origin`)."""

    @property
    def word(self) -> np.dtype[Any]:
        """Unsigned integer as wide as an element."""
        return word_dtype(self.dtype)

    @property
    def elements(self) -> int:
        """Of all runs."""
        return sum(span.high - span.low for span in self.spans)

    @property
    def blocks(self) -> int:
        """Blocks of 65,536 elements, each run beginning a new one."""
        return int(np.sum(-(-self.lengths // BLOCK_ELEMENTS)))


def snapshot_places(pieces: Sequence[Piece]) -> tuple[dict[str, int], int]:
    """First byte of each piece in one flat memory, and its size: back to back, aligned where the width of elements changes."""
    places: dict[str, int] = {}
    end, before = 0, 1
    for piece in pieces:
        width = word_dtype(piece.dtype).itemsize
        end = end if width == before else -(-end // 8) * 8
        places[piece.name], before = end, width
        end += piece.length * width
    return places, end


def stretches_of(pieces: Sequence[Piece], *, places: Mapping[str, int], most_elements: int) -> tuple[Stretch, ...]:
    """All pieces, in order, in stretches of at most `most_elements` that are contiguous in the snapshot, or in none of it."""
    seeds = [tensor_seed(piece.name, piece.dtype) for piece in pieces]
    groups = _groups(pieces, places=places, most_elements=most_elements)
    return tuple(_stretch(pieces, group, seeds=seeds, places=places) for group in groups)


def _groups(pieces: Sequence[Piece], *, places: Mapping[str, int], most_elements: int) -> Iterator[list[Span]]:
    """Runs that make a stretch."""
    group: list[Span] = []
    elements = 0
    kind: tuple[object, ...] = ()
    for number, piece in enumerate(pieces):
        here = (piece.dtype, piece.name in places, number if piece.length >= ALONE_ELEMENTS else None)
        for low in range(0, piece.length, ENTRY_ELEMENTS):
            run = Span(number, low, min(low + ENTRY_ELEMENTS, piece.length))
            if group and (here != kind or elements + run.high - run.low > most_elements):
                yield group
                group, elements = [], 0
            group.append(run)
            elements, kind = elements + run.high - run.low, here
    if group:
        yield group


def _stretch(pieces: Sequence[Piece], group: Sequence[Span], *, seeds: Sequence[int], places: Mapping[str, int]) -> Stretch:
    spans: list[Span] = []
    for run in group:
        if spans and spans[-1].piece == run.piece:
            run = Span(run.piece, spans.pop().low, run.high)
        spans.append(run)
    runs = tuple(Run(pieces[run.piece], run.low, run.high - run.low) for run in group)
    first = runs[0].piece
    place = places[first.name] + runs[0].low * word_dtype(first.dtype).itemsize if first.name in places else None
    return Stretch(first.dtype, runs, tuple(spans), place, np.array([run.length for run in runs], np.int64),
                   np.array([origin(seeds[span.piece], run.start) for span, run in zip(group, runs, strict=True)], np.uint64))
