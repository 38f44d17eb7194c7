"""Which elements of a piece changed, in as few bytes as one of three layouts needs. NumPy only, raw bits only.

Values are compared and stored as unsigned integers of the element's width, so 0.0 and −0.0 differ and a NaN equals itself.
They are absolute: applying a payload twice, or a newer one over it, is harmless. All integers are little-endian, nothing is padded,
and the bytes follow from the arguments alone. For n elements of e bytes, k of them changed:

| mode | payload | bytes |
|---|---|---|
| `blk16` | uint32 count of each 65,536-element block · uint16 offsets inside their block, ascending · k values | 4⌈n/65536⌉ + k(2 + e) |
| `bitmap` | one bit an element, lowest bit first, unused bits 0 · k values | ⌈n/8⌉ + k·e |
| `dense` | all n values | n·e |

A sparse payload without a change is empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WeightSyncError
from asyncrl.weights.manifest import Mode

BLOCK_ELEMENTS = 1 << 16
"""What a uint16 offset can address."""

Bits = NDArray[np.unsignedinteger[Any]]
"""Raw bits of elements, one unsigned integer each, flat."""

_WORDS = {"F64": "<u8", "F32": "<u4", "F16": "<u2", "BF16": "<u2",
          "I64": "<u8", "I32": "<u4", "I16": "<u2", "I8": "<u1", "U8": "<u1", "BOOL": "<u1"}


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """A decoded payload: `values` belong at `indices`, or at every element when `indices` is None."""

    indices: NDArray[np.int64] | None
    """[k], ascending, relative to the piece."""
    values: Bits
    """[k], or [n] when `indices` is None."""

    @property
    def selection(self) -> NDArray[np.int64] | slice:
        """What to index the piece with."""
        return slice(None) if self.indices is None else self.indices


EVERYWHERE = Changes(None, np.empty(0, np.uint8))
"""For reading a whole piece: names every element, brings no value."""


def word_dtype(dtype: str) -> np.dtype[Any]:
    """The unsigned integer as wide as an element of the safetensors dtype `dtype`. Raises WeightSyncError."""
    if dtype not in _WORDS:
        raise WeightSyncError(f"dtype {dtype!r} cannot be published; known: {', '.join(_WORDS)}")
    return np.dtype(_WORDS[dtype])


def changed_indices(new: Bits, old: Bits) -> NDArray[np.int64]:
    """[k] ascending indices at which two equally long bit arrays differ."""
    return np.flatnonzero(new != old)


def payload_bytes(mode: Mode, *, length: int, count: int, itemsize: int) -> int:
    """Exact size of a payload. Raises WeightSyncError for an unknown mode or numbers that cannot be."""
    if not 0 <= count <= length:
        raise WeightSyncError(f"a piece of {length} elements cannot have {count} changed ones")
    if mode == "dense":
        return length * itemsize
    if mode == "bitmap":
        return count and -(-length // 8) + count * itemsize
    if mode == "blk16":
        return count and 4 * -(-length // BLOCK_ELEMENTS) + count * (2 + itemsize)
    raise WeightSyncError(f"unknown payload mode {mode!r}")


def smallest_mode(*, length: int, count: int, itemsize: int) -> Mode:
    """The mode of the shortest payload; among equals dense, then blk16, which are quicker to apply."""
    modes: tuple[Mode, ...] = ("dense", "blk16", "bitmap")
    return min(modes, key=lambda mode: payload_bytes(mode, length=length, count=count, itemsize=itemsize))


def encode(new: Bits, indices: NDArray[np.int64], *, mode: Mode) -> bytes:
    """The payload that puts `new` (the whole piece) at the ascending `indices` that changed."""
    if mode == "dense":
        return _little(new).tobytes()
    if not len(indices):
        return b""
    values = _little(new[indices]).tobytes()
    if mode == "bitmap":
        flags = np.zeros(len(new), np.bool_)
        flags[indices] = True
        return np.packbits(flags, bitorder="little").tobytes() + values
    edges = np.arange(-(-len(new) // BLOCK_ELEMENTS) + 1, dtype=np.int64) * BLOCK_ELEMENTS
    counts = np.diff(np.searchsorted(indices, edges)).astype("<u4")
    return counts.tobytes() + (indices & (BLOCK_ELEMENTS - 1)).astype("<u2").tobytes() + values


def decode(payload: NDArray[np.uint8], *, mode: Mode, dtype: str, length: int, count: int) -> Changes:
    """The changes a payload holds, views of it where possible. Writes nothing.

    Raises WeightSyncError unless the payload is exactly what `encode` makes for these numbers: size, counts, ascending offsets
    inside the piece, no stray bit.
    """
    word = word_dtype(dtype)
    expected = payload_bytes(mode, length=length, count=count, itemsize=word.itemsize)
    if len(payload) != expected:
        raise WeightSyncError(f"{mode} payload of {count} changes in {length} elements must have {expected} bytes, has {len(payload)}")
    if mode == "dense":
        return Changes(None, payload.view(word))
    split = len(payload) - count * word.itemsize
    values = payload[split:].view(word)
    if not count:
        return Changes(np.empty(0, np.int64), values)
    indices = _bitmap_indices(payload[:split]) if mode == "bitmap" else _blk16_indices(payload[:split], length=length, count=count)
    if len(indices) != count or indices[-1] >= length or not np.all(indices[1:] > indices[:-1]):
        raise WeightSyncError(f"{mode} payload names {len(indices)} elements where {count} ascending ones below {length} were announced")
    return Changes(indices, values)


def _bitmap_indices(flags: NDArray[np.uint8]) -> NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(flags, bitorder="little").view(np.bool_))


def _blk16_indices(head: NDArray[np.uint8], *, length: int, count: int) -> NDArray[np.int64]:
    blocks = -(-length // BLOCK_ELEMENTS)
    counts = head[: 4 * blocks].view("<u4").astype(np.int64)
    if int(counts.sum()) != count:
        raise WeightSyncError(f"blk16 block counts add up to {int(counts.sum())}, not to {count}")
    return np.repeat(np.arange(blocks, dtype=np.int64) * BLOCK_ELEMENTS, counts) + head[4 * blocks:].view("<u2")


def _little(bits: Bits) -> Bits:
    return bits.astype(bits.dtype.newbyteorder("<"), copy=False)
