"""Which elements of a piece changed, in as few bytes as one of three layouts needs: the layouts and their reading. `encoder` writes them.

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
from asyncrl.weights.kernels import kernels_for
from asyncrl.weights.manifest import Mode

MODES: tuple[Mode, ...] = ("dense", "blk16", "bitmap")
"""In the order of preference among payloads of one length: the first are quicker to apply."""

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


def smallest_modes(*, lengths: NDArray[np.int64], counts: NDArray[np.int64], itemsize: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Of each piece the place in `MODES` of its shortest payload, the first among equals, and the bytes of that."""
    blk16 = 4 * -(-lengths // BLOCK_ELEMENTS) + counts * (2 + itemsize)
    bitmap = -(-lengths // 8) + counts * itemsize
    sizes = np.stack([lengths * itemsize, np.where(counts, blk16, 0), np.where(counts, bitmap, 0)])
    return sizes.argmin(axis=0).astype(np.uint8), sizes.min(axis=0)


def decode(payload: NDArray[np.uint8], *, mode: Mode, dtype: str, length: int, count: int) -> Changes:
    """The changes a payload holds, views of it where possible. Writes nothing.

    Raises WeightSyncError unless the payload is exactly what an encoder makes for these numbers: size, counts, ascending offsets
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
    indices = _indices(payload[:split], mode=mode, length=length, count=count)
    if indices is None:
        raise WeightSyncError(f"{mode} payload does not name the {count} ascending elements below {length} that were announced")
    return Changes(indices, values)


def take(memory: Bits, changes: Changes) -> Bits:
    """The bits of a whole piece in `memory`, flat, at the places `changes` names; a view where these are all."""
    if changes.indices is None:
        return memory
    out = np.empty(len(changes.indices), memory.dtype)
    if len(out):
        assert 0 <= changes.indices[0] <= changes.indices[-1] < len(memory), "compiled code checks no bounds; indices ascend"
        kernels_for(len(out)).take(memory, changes.indices, out)
    return out


def put(memory: Bits, changes: Changes) -> None:
    """Write `changes` to a whole piece in `memory`, flat."""
    if changes.indices is None:
        memory[:] = changes.values
    elif len(changes.indices):
        assert 0 <= changes.indices[0] <= changes.indices[-1] < len(memory), "compiled code checks no bounds; indices ascend"
        kernels_for(len(changes.indices)).put(memory, changes.indices, changes.values)


def holds(memory: Bits, changes: Changes) -> bool:
    """Whether a whole piece in `memory`, flat, has the bits of `changes` where they belong."""
    if changes.indices is None:
        return bool(np.array_equal(memory, changes.values))
    if not len(changes.indices):
        return True
    assert 0 <= changes.indices[0] <= changes.indices[-1] < len(memory), "compiled code checks no bounds; indices ascend"
    return bool(kernels_for(len(changes.indices)).holds(memory, changes.indices, changes.values))


def _indices(head: NDArray[np.uint8], *, mode: Mode, length: int, count: int) -> NDArray[np.int64] | None:
    """Of a payload without its values; None when they are not `count` ascending ones below `length`."""
    out, kernels = np.empty(count, np.int64), kernels_for(length)
    if mode == "bitmap":
        return out if kernels.flag_indices(head, length, out) else None
    blocks = head[:4 * -(-length // BLOCK_ELEMENTS)].view("<u4")
    if int(blocks.sum(dtype=np.int64)) != count:
        raise WeightSyncError(f"blk16 block counts add up to {int(blocks.sum(dtype=np.int64))}, not to {count}")
    return out if kernels.block_indices(blocks, head[blocks.nbytes:].view("<u2"), length, out) else None
