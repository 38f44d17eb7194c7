"""The bits published last, in one flat memory of the host, which a scan moves on to those that are published next. NumPy only."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import ModuleType
from typing import Protocol

import numpy as np

from asyncrl.weights import numpy_kernels
from asyncrl.weights.codec import Bits
from asyncrl.weights.encoder import Encoder, Found, Scratch, Undo
from asyncrl.weights.piece_bits import PieceBits, Stretch


class Snapshot(Protocol):
    """Where the bits published last are kept, on the host or on a device."""

    most_elements: int
    """Of a stretch."""
    at_once: int
    """Stretches that `move` works on side by side."""

    @property
    def nbytes(self) -> int:
        """Memory of the snapshot itself."""

    def move(self, bits: PieceBits, stretches: Sequence[Stretch]) -> list[Found]:
        """Make the snapshot of at most `at_once` stretches equal to the current bits; what changed. If it raises, some may have moved."""

    def undo(self, stretch: Stretch, undo: Undo) -> None:
        """Put back what `move` replaced."""

    def fill(self, bits: PieceBits, stretch: Stretch) -> Bits:
        """Take the current bits, whatever was held, and return them; they stay as they are until the snapshot moves."""

    def read(self, stretch: Stretch) -> Bits:
        """The bits held; they stay as they are until the snapshot moves."""


class HostSnapshot:
    """In the memory of the host, scanned by `threads` threads."""

    most_elements = 1 << 23
    """16 MB of bfloat16: what scanning needs beside it stays small, and it is some milliseconds' work."""

    def __init__(self, nbytes: int, *, kernels: ModuleType = numpy_kernels, threads: int = 1) -> None:
        self.at_once = threads
        self._memory = np.zeros(nbytes, np.uint8)
        self._kernels = kernels
        self._encoders = [Encoder(kernels) for _ in range(threads)]
        self._rooms = [Scratch() for _ in range(threads)]

    @property
    def nbytes(self) -> int:
        """See `Snapshot.nbytes`."""
        return self._memory.nbytes

    def move(self, bits: PieceBits, stretches: Sequence[Stretch]) -> list[Found]:
        """See `Snapshot.move`."""
        if len(stretches) == 1:
            return [self._move(bits, stretches[0], 0)]
        moving = [self._pool.submit(self._move, bits, stretch, number) for number, stretch in enumerate(stretches)]
        wait(moving)  # when one fails, no other goes on behind the back of what is done about it
        return [one.result() for one in moving]

    def undo(self, stretch: Stretch, undo: Undo) -> None:
        """See `Snapshot.undo`."""
        undo.apply(self.read(stretch), stretch, self._kernels)

    def fill(self, bits: PieceBits, stretch: Stretch) -> Bits:
        """See `Snapshot.fill`."""
        memory = self.read(stretch)
        bits.stage(stretch.spans, memory)
        return memory

    def read(self, stretch: Stretch) -> Bits:
        """See `Snapshot.read`."""
        assert stretch.place is not None
        return self._memory[stretch.place:stretch.place + stretch.elements * stretch.word.itemsize].view(stretch.word)

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.at_once, thread_name_prefix="publish")

    def _move(self, bits: PieceBits, stretch: Stretch, number: int) -> Found:
        new = staged(bits, stretch, self._rooms[number])
        return self._encoders[number].move(stretch, new=new, old=self.read(stretch), finite=bits.finite)


def staged(bits: PieceBits, stretch: Stretch, room: Scratch) -> Bits:
    """The current bits of a stretch: in the trainer's memory where they lie there as published, else in `room`."""
    view = bits.view(stretch.spans[0]) if len(stretch.spans) == 1 else None
    if view is not None:
        return view
    out = room.words(stretch.elements, stretch.word)
    bits.stage(stretch.spans, out)
    return out
