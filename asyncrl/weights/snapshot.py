"""The bits published last, in one flat memory of the host, which a scan moves on to those that are published next. NumPy only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue
from types import ModuleType
from typing import Protocol

import numpy as np

from asyncrl.weights import numpy_kernels
from asyncrl.weights.codec import Bits
from asyncrl.weights.encoder import Encoder, Found, Scratch, Undo
from asyncrl.weights.piece_bits import PieceBits, Stretch

FEW_ELEMENTS = 1 << 14
"""Pieces that are shorter on average are gathered before a scan: each that is read where it lies costs some microseconds by itself."""


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

    most_elements = 1 << 22
    """8 MB of bfloat16: what scanning needs beside it stays small, and it is a millisecond's work."""

    def __init__(self, nbytes: int, *, kernels: ModuleType = numpy_kernels, threads: int = 1) -> None:
        self.at_once = 1 if threads == 1 else 2 * threads  # a thread that is done early finds another one
        self._threads = threads
        self._memory = np.zeros(nbytes, np.uint8)
        self._kernels = kernels
        self._free: SimpleQueue[tuple[Encoder, Scratch]] = SimpleQueue()
        for _ in range(threads):
            self._free.put((Encoder(kernels), Scratch()))

    @property
    def nbytes(self) -> int:
        """See `Snapshot.nbytes`."""
        return self._memory.nbytes

    def move(self, bits: PieceBits, stretches: Sequence[Stretch]) -> list[Found]:
        """See `Snapshot.move`."""
        if len(stretches) == 1:
            return [self._move(bits, stretches[0])]
        moving = [self._pool.submit(self._move, bits, stretch) for stretch in stretches]
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
        return ThreadPoolExecutor(self._threads, thread_name_prefix="publish")

    def _move(self, bits: PieceBits, stretch: Stretch) -> Found:
        own = encoder, room = self._free.get()
        try:
            return encoder.move(stretch, scan=self._scan(bits, stretch, room), old=self.read(stretch), finite=bits.finite)
        finally:
            self._free.put(own)

    def _scan(self, bits: PieceBits, stretch: Stretch, room: Scratch) -> Callable[..., int]:
        """A kernel's `scan` of the current bits of a stretch: where they lie, if it can read them there, else gathered in `room`."""
        scan_sources = getattr(self._kernels, "scan_sources", None)
        if scan_sources is not None and len(stretch.spans) * FEW_ELEMENTS <= stretch.elements:
            sources = bits.sources(stretch.spans)
            if sources is not None:
                return functools.partial(scan_sources, sources)
        return functools.partial(self._kernels.scan, staged(bits, stretch, room))


def staged(bits: PieceBits, stretch: Stretch, room: Scratch) -> Bits:
    """The current bits of a stretch: in the trainer's memory where they lie there as published, else in `room`."""
    sources = bits.sources(stretch.spans) if len(stretch.spans) == 1 else None
    if sources is not None and sources[0].dtype == stretch.word:
        return sources[0]
    out = room.words(stretch.elements, stretch.word)
    bits.stage(stretch.spans, out)
    return out
