"""What changed in a stretch, as the payloads of its runs, and what undoes it. Scratch is reused from one stretch to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.weights.codec import MODES, Bits, smallest_modes
from asyncrl.weights.manifest import Mode
from asyncrl.weights.piece_bits import Stretch

_EXPONENTS = {"F64": 0x7FF0_0000_0000_0000, "F32": 0x7F80_0000, "F16": 0x7C00, "BF16": 0x7F80}
"""Bits that are all set in an infinity or a NaN, and in nothing else."""


@dataclass(frozen=True, slots=True, eq=False)
class Undo:
    """The bits a stretch had, where they changed."""

    blocks: NDArray[np.uint32]
    """Changes in each block of each run."""
    offsets: NDArray[np.uint16]
    """[k], in their block."""
    olds: Bits
    """[k]"""

    @property
    def bytes(self) -> int:
        """Memory this takes."""
        return self.blocks.nbytes + self.offsets.nbytes + self.olds.nbytes

    def apply(self, memory: Bits, stretch: Stretch, kernels: ModuleType) -> None:
        """Put the old bits back in the `memory` of the stretch."""
        kernels.put_blocks(memory, stretch.lengths, self.blocks, self.offsets, self.olds)


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a scan found, encoded; the snapshot holds the new bits by now."""

    counts: NDArray[np.int64]
    """[r] elements that changed in each run."""
    modes: tuple[Mode, ...]
    sizes: tuple[int, ...]
    """Bytes of each payload."""
    payloads: NDArray[np.uint8]
    """All of them, back to back."""
    hash_change: int
    """What to add to the state hash."""
    not_finite: int | None
    """A run that was given a NaN or an infinity, if one was."""
    undo: Undo


class Encoder:
    """Scans one stretch at a time."""

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels
        self._offsets, self._values, self._olds = Scratch(), Scratch(), Scratch()

    def move(self, stretch: Stretch, *, scan: Callable[..., int], old: Bits, finite: bool) -> Found:
        """Make `old`, flat and all of the stretch, equal to the new bits, and say what that changed.

        Args:
            scan: a kernel's `scan`, given the new bits.
        """
        blocks, counts = np.empty(stretch.blocks, np.uint32), np.empty(len(stretch.runs), np.int64)
        offsets = self._offsets.words(len(old), np.dtype(np.uint16))
        values, olds = self._values.words(len(old), old.dtype), self._olds.words(len(old), old.dtype)
        found = scan(old, stretch.lengths, offsets, values, olds, blocks, counts)
        undo = Undo(blocks, offsets[:found].copy(), olds[:found].copy())
        return encoded(stretch, new=lambda: old, counts=counts, values=values[:found], undo=undo, finite=finite, kernels=self._kernels)


class Scratch:
    """Memory that is used again and grows to the most that was asked for."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def words(self, count: int, dtype: np.dtype[Any]) -> Bits:
        """Room for `count` words; what was in it may be gone."""
        if self._memory.nbytes < count * dtype.itemsize:
            self._memory = np.empty(0, np.uint8)
            self._memory = np.empty(count * dtype.itemsize, np.uint8)
        return self._memory[:count * dtype.itemsize].view(dtype)


def encoded(stretch: Stretch, *, new: Callable[[], Bits], counts: NDArray[np.int64], values: Bits, undo: Undo, finite: bool,
            kernels: ModuleType) -> Found:
    """Payloads and hash of the changes of a stretch: `values` now, `undo.olds` before. All of `new` is asked for if a run is dense."""
    codes, sizes = smallest_modes(lengths=stretch.lengths, counts=counts, itemsize=values.itemsize)
    payloads = np.empty(int(sizes.sum()), np.uint8)
    change, bad = 0, None
    if len(payloads):
        whole = values[:0] if codes.all() else new()
        kernels.pack(stretch.lengths, counts, codes, whole.view(np.uint8), undo.offsets.view(np.uint8), values.view(np.uint8),
                     undo.blocks.view(np.uint8), payloads)
        change = int(kernels.hash_blocks(stretch.lengths, stretch.origins, undo.blocks, undo.offsets, values, undo.olds))
    if finite and (place := not_finite_place(values, stretch.dtype, kernels)) is not None:
        bad = int(np.searchsorted(np.cumsum(counts), place, side="right"))
    return Found(counts, tuple(MODES[code] for code in codes.tolist()), tuple(sizes.tolist()), payloads, change, bad, undo)


def not_finite_place(values: Bits, dtype: str, kernels: ModuleType) -> int | None:
    """Place of the first NaN or infinity among the bits of a safetensors dtype, if there is one."""
    if dtype not in _EXPONENTS:
        return None
    place = int(kernels.first_not_finite(values, values.dtype.type(_EXPONENTS[dtype])))
    return None if place < 0 else place
