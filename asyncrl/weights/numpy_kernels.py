"""Scanning, packing, placing and hashing of raw bits with NumPy: what `numba_kernels` does faster, and the reference it is held against.

Arrays are flat and contiguous; words are unsigned integers as wide as an element. *Runs* lie back to back in them, `lengths` [r] int64
says how long each is. What changed in runs is, in order, `offsets` [k] uint16 inside each run's blocks of 65,536 elements, `values` and
`olds` [k] words, and `blocks` uint32, how many in each block; `counts` [r] int64, how many in each run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.unsignedinteger[Any]]
Ints = NDArray[np.int64]

_BLOCK = 1 << 16
_CHUNK = 1 << 15
"""Elements at a time: temporaries of 256 KiB stay in the second-level cache."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_DENSE, _BLK16 = 0, 1


def scan(new: Words, old: Words, lengths: Ints, offsets: NDArray[np.uint16], values: Words, olds: Words, blocks: NDArray[np.uint32],
         counts: Ints) -> int:
    """Make `old` equal to `new` and write what differed to the last five, which have room for everything; how many elements that were."""
    indices = _differing(new, old)
    found = len(indices)
    values[:found], olds[:found] = new[indices], old[indices]
    old[indices] = values[:found]
    offsets[:found], blocks[:], counts[:] = located(indices, lengths)
    return found


def located(indices: Ints, lengths: Ints) -> tuple[NDArray[np.uint16], NDArray[np.uint32], Ints]:
    """Offsets, blocks and counts of changes at ascending `indices` in runs."""
    starts = np.cumsum(lengths) - lengths
    run_blocks = -(-lengths // _BLOCK)
    runs = np.searchsorted(starts + lengths, indices, side="right")
    inside = indices - starts[runs]
    blocks = (np.cumsum(run_blocks) - run_blocks)[runs] + inside // _BLOCK
    return ((inside % _BLOCK).astype(np.uint16), np.bincount(blocks, minlength=int(run_blocks.sum())).astype(np.uint32),
            np.bincount(runs, minlength=len(lengths)).astype(np.int64))


def places(lengths: Ints, blocks: NDArray[np.uint32], offsets: NDArray[np.uint16]) -> Ints:
    """What `located` was given."""
    return np.repeat(_block_starts(lengths), blocks) + offsets


def pack(lengths: Ints, counts: Ints, modes: NDArray[np.uint8], new: NDArray[np.uint8], offsets: NDArray[np.uint8],
         values: NDArray[np.uint8], blocks: NDArray[np.uint8], out: NDArray[np.uint8]) -> int:
    """Write the payload of every run, one after another, to `out`; bytes written.

    Arrays come as bytes, `modes` as 0 dense, 1 blk16, 2 bitmap. `new` may be empty where no run is dense.
    """
    width = len(values) // max(int(counts.sum()), 1)
    start = block = found = 0
    pieces: list[NDArray[np.uint8]] = []
    for length, count, mode in zip(lengths.tolist(), counts.tolist(), modes.tolist(), strict=True):
        run_blocks = -(-length // _BLOCK)
        if mode == _DENSE:
            pieces.append(new[start * width:(start + length) * width])
        elif count:
            head, inside = blocks[4 * block:4 * (block + run_blocks)], offsets[2 * found:2 * (found + count)]
            pieces += (head, inside) if mode == _BLK16 else (_flags(head, inside, length=length),)
            pieces.append(values[found * width:(found + count) * width])
        start, block, found = start + length, block + run_blocks, found + count
    return len(np.concatenate(pieces, out=out)) if pieces else 0


def put_blocks(memory: Words, lengths: Ints, blocks: NDArray[np.uint32], offsets: NDArray[np.uint16], values: Words) -> None:
    """Put `values` at their places in the runs of `memory`."""
    memory[places(lengths, blocks, offsets)] = values


def hash_blocks(lengths: Ints, origins: NDArray[np.uint64], blocks: NDArray[np.uint32], offsets: NDArray[np.uint16], values: Words,
                olds: Words) -> int:
    """Σ m(origin of the run + place in the run · golden) · (value − old), modulo 2^64; m as `state_hash` says."""
    run_blocks = -(-lengths // _BLOCK)
    inside = _block_starts(lengths) - np.repeat(np.cumsum(lengths) - lengths, run_blocks)
    block_origins = np.repeat(origins, run_blocks) + inside.astype(np.uint64) * _GOLDEN
    ends = np.cumsum(blocks, dtype=np.int64)
    total = 0
    for low in range(0, len(offsets), _CHUNK):
        part = slice(low, low + _CHUNK)
        of = np.searchsorted(ends, np.arange(low, low + len(offsets[part])), side="right")
        change = values[part].astype(np.uint64) - olds[part].astype(np.uint64)
        total += int(np.sum(_factors(offsets[part].astype(np.uint64) * _GOLDEN + block_origins[of]) * change))
    return total % (1 << 64)


def hash_runs(lengths: Ints, origins: NDArray[np.uint64], bits: Words) -> int:
    """Σ m(origin of the run + place in the run · golden) · (bits + 1), modulo 2^64."""
    total = start = 0
    steps = np.arange(min(_CHUNK, int(lengths.max(initial=0))), dtype=np.uint64) * _GOLDEN
    for length, origin in zip(lengths.tolist(), origins, strict=True):
        for low in range(0, length, _CHUNK):
            raised = bits[start + low:start + min(low + _CHUNK, length)].astype(np.uint64) + np.uint64(1)
            first = np.array([low], np.uint64) * _GOLDEN + origin
            total += int(np.sum(_factors(steps[:len(raised)] + first) * raised))
        start += length
    return total % (1 << 64)


def hash_change(origin: np.uint64, indices: Ints, old: Words, new: Words) -> int:
    """Σ m(origin + index · golden) · (new − old), modulo 2^64."""
    total = 0
    for low in range(0, len(indices), _CHUNK):
        part = slice(low, low + _CHUNK)
        change = new[part].astype(np.uint64) - old[part].astype(np.uint64)
        total += int(np.sum(_factors(indices[part].astype(np.uint64) * _GOLDEN + origin) * change))
    return total % (1 << 64)


def hash_places(origin: np.uint64, indices: Ints, bits: Words) -> int:
    """Σ m(origin + index · golden) · (bits + 1), modulo 2^64."""
    total = 0
    for low in range(0, len(indices), _CHUNK):
        part = slice(low, low + _CHUNK)
        raised = bits[part].astype(np.uint64) + np.uint64(1)
        total += int(np.sum(_factors(indices[part].astype(np.uint64) * _GOLDEN + origin) * raised))
    return total % (1 << 64)


def block_indices(blocks: NDArray[np.uint32], offsets: NDArray[np.uint16], length: int, out: Ints) -> bool:
    """Write the places of one run's changes to `out`; whether they ascend and lie below `length`. Counts add up to len(offsets)."""
    out[:] = np.repeat(np.arange(len(blocks), dtype=np.int64) * _BLOCK, blocks) + offsets
    return bool(out[-1] < length and np.all(out[1:] > out[:-1]))


def flag_indices(flags: NDArray[np.uint8], length: int, out: Ints) -> bool:
    """Write the places of set bits to `out`; whether they fill it and lie below `length`."""
    indices = np.flatnonzero(np.unpackbits(flags, bitorder="little").view(np.bool_))
    if len(indices) != len(out) or indices[-1] >= length:
        return False
    out[:] = indices
    return True


def take(memory: Words, indices: Ints, out: Words) -> None:
    """Read `memory` at `indices`, which must lie in it."""
    out[:] = memory[indices]


def put(memory: Words, indices: Ints, values: Words) -> None:
    """Write `values` to `memory` at `indices`, which must lie in it."""
    memory[indices] = values


def holds(memory: Words, indices: Ints, values: Words) -> bool:
    """Whether `memory` has `values` at `indices`, which must lie in it."""
    return bool(np.array_equal(memory[indices], values))


def first_not_finite(values: Words, exponent: np.unsignedinteger[Any]) -> int:
    """Place of the first float whose exponent bits, those of the mask, are all set; −1 without one."""
    for low in range(0, len(values), _CHUNK):
        found = (values[low:low + _CHUNK] & exponent) == exponent
        if found.any():
            return low + int(np.argmax(found))
    return -1


def _differing(new: Words, old: Words) -> Ints:
    found = []
    for low in range(0, len(new), _CHUNK):
        part = np.flatnonzero(new[low:low + _CHUNK] != old[low:low + _CHUNK])
        part += low
        found.append(part)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _flags(head: NDArray[np.uint8], inside: NDArray[np.uint8], *, length: int) -> NDArray[np.uint8]:
    blocks, offsets = head.view(np.uint32), inside.view(np.uint16)
    flags = np.zeros(length, np.bool_)
    flags[np.repeat(np.arange(len(blocks), dtype=np.int64) * _BLOCK, blocks) + offsets] = True
    return np.packbits(flags, bitorder="little")


def _block_starts(lengths: Ints) -> Ints:
    """First element of every block of every run."""
    run_blocks = -(-lengths // _BLOCK)
    inside = np.arange(run_blocks.sum()) - np.repeat(np.cumsum(run_blocks) - run_blocks, run_blocks)
    return np.repeat(np.cumsum(lengths) - lengths, run_blocks) + inside * _BLOCK


def _factors(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser in place, made odd."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    x |= np.uint64(1)
    return x
