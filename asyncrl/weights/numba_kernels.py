"""What `numpy_kernels` gives, bit for bit, compiled: at the speed of memory where little changed.

A scan compares 64 elements at a time, as one vector of the compiler's, whose result is a word of 64 flags; weights that are float32 and go
out as bfloat16 are rounded on the way, in registers. The flags of a block are found first, then where they are set, then what lies there:
each pass has few branches, none of them on what is found, and works on what the second-level cache still holds. All functions release the
GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
from numba import njit

from asyncrl.weights.numba_intrinsics import differing, eight_bytes, lowest_bit, put_eight_bytes, set_bits, will_use, word_at

_BLOCK = 1 << 16
_AHEAD = 32
"""Changes whose memory is asked for before its turn: it takes as long to come as some ten others take to be written."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_U0, _U1, _U8, _U27, _U30, _U31 = (np.uint64(number) for number in (0, 1, 8, 27, 30, 31))


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled at the first call for each width, and kept on disk for other processes where a disk will have it."""
    try:
        kernel = njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba found no folder that it could write to
        kernel = njit(nogil=True)(function)

    @wraps(function)
    def call(*given: Any) -> Any:
        arguments = [_plain(argument) for argument in given]
        try:
            return kernel(*arguments)
        except OSError:  # compiled, and then the cache could not be written: the code is there, nothing was computed yet
            return kernel(*arguments)

    return call


def _plain(argument: Any) -> Any:
    """Payloads are read-only and may begin at an odd address: a copy, so that the same code does for them and no other is compiled."""
    if isinstance(argument, np.ndarray) and not (argument.flags.writeable and argument.flags.aligned):
        return argument.copy()
    return argument


@njit(nogil=True, inline="always")
def _factor(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> _U30)) * _FIRST_FACTOR
    x = (x ^ (x >> _U27)) * _SECOND_FACTOR
    return (x ^ (x >> _U31)) | _U1


@njit(nogil=True)
def _name_bits(flags, first, out, found):  # type: ignore[no-untyped-def]
    """Write the places of the bits set in 64 flags, the first of which stands for `first`, to `out` from `found` on; where they end.

    Up to four are written whatever is set, as far as `out` reaches: that costs less than a branch which nobody can foresee.
    """
    if flags == _U0:
        return found
    count = set_bits(flags)
    if count == 64:
        for bit in range(64):
            out[found + bit] = first + bit
    elif count <= 4 and found + 4 <= out.size:
        for at in range(4):
            out[found + at] = first + lowest_bit(flags)
            flags &= flags - _U1
    else:
        for at in range(count):
            out[found + at] = first + lowest_bit(flags)
            flags &= flags - _U1
    return found + count


@njit(nogil=True)
def _scan_block(address, like, old, flags, offsets, values, olds):  # type: ignore[no-untyped-def]
    words, found = old.size // 64, 0
    for word in range(words):
        flags[word] = differing(address, like, old, 64 * word)
    for word in range(words):
        found = _name_bits(flags[word], 64 * word, offsets, found)
    for at in range(64 * words, old.size):
        if word_at(address, like, old, at) != old[at]:
            offsets[found] = at
            found += 1
    if found == old.size:
        for at in range(found):
            values[at], olds[at] = word_at(address, like, old, at), old[at]
        old[:] = values[:found]
    else:
        for change in range(found):
            at = np.int64(offsets[change])
            values[change], olds[change] = word_at(address, like, old, at), old[at]
            old[at] = values[change]
    return found


@_compiled
def _scan(addresses, like, old, lengths, offsets, values, olds, blocks):  # type: ignore[no-untyped-def]
    flags = np.empty(_BLOCK // 64, np.uint64)
    start, block, found = 0, 0, 0
    for run in range(lengths.size):
        for low in range(0, lengths[run], _BLOCK):
            high = min(low + _BLOCK, lengths[run])
            room = found + high - low
            blocks[block] = _scan_block(addresses[run] + np.uint64(low * like.itemsize), like, old[start + low:start + high], flags,
                                        offsets[found:room], values[found:room], olds[found:room])
            found += np.int64(blocks[block])
            block += 1
        start += lengths[run]
    return found


def scan(new: Any, old: Any, lengths: Any, offsets: Any, values: Any, olds: Any, blocks: Any, counts: Any) -> int:
    """See `numpy_kernels.scan`."""
    return scan_sources([new], old, lengths, offsets, values, olds, blocks, counts)


def scan_sources(sources: Sequence[Any], old: Any, lengths: Any, offsets: Any, values: Any, olds: Any, blocks: Any, counts: Any) -> int:
    """As `scan`, of bits that lie in several contiguous arrays, each of one or more whole runs.

    Where `old` holds bfloat16 the arrays may hold the bits of float32: they are rounded to nearest even, a NaN to 0x7FC0.
    """
    sizes = np.array([source.size for source in sources])
    ends, starts = np.cumsum(sizes), np.cumsum(lengths) - lengths
    assert all(source.flags.c_contiguous and source.dtype == sources[0].dtype for source in sources)
    assert (old.itemsize, sources[0].itemsize) == (2, 4) or old.dtype == sources[0].dtype, "float32 becomes bfloat16, nothing else"
    assert ends[-1] == starts[-1] + lengths[-1] == old.size, "compiled code checks no bounds"
    of = np.searchsorted(ends, starts, side="right")
    begins = np.array([source.__array_interface__["data"][0] for source in sources], np.uint64)
    addresses = begins[of] + ((starts - (ends - sizes)[of]) * sources[0].itemsize).astype(np.uint64)
    found = int(_scan(addresses, np.empty(0, sources[0].dtype), old, lengths, offsets, values, olds, blocks))
    run_blocks = -(-lengths // _BLOCK)
    counts[:] = np.add.reduceat(blocks, np.cumsum(run_blocks) - run_blocks, dtype=np.int64)
    return found


@njit(nogil=True)
def _put_flags(flags, word, bits):  # type: ignore[no-untyped-def]
    if 8 * word + 8 <= flags.size:
        put_eight_bytes(flags, 8 * word, bits)
    else:
        for byte in range(8 * word, flags.size):
            flags[byte] = np.uint8(bits & np.uint64(0xFF))
            bits >>= _U8


@njit(nogil=True)
def _flag(blocks, offsets, flags):  # type: ignore[no-untyped-def]
    """Set the bits of changes; 64 are gathered in a register."""
    at, word, bits = 0, 0, _U0
    for block in range(blocks.size // 4):
        changed = np.int64(blocks[4 * block]) + (np.int64(blocks[4 * block + 1]) << 8) + (np.int64(blocks[4 * block + 2]) << 16)
        for change in range(at, at + changed):
            element = block * _BLOCK + np.int64(offsets[2 * change]) + (np.int64(offsets[2 * change + 1]) << 8)
            if element >> 6 != word:
                _put_flags(flags, word, bits)
                word, bits = element >> 6, _U0
            bits |= _U1 << np.uint64(element & 63)
        at += changed
    _put_flags(flags, word, bits)


@_compiled
def pack(lengths, counts, modes, new, offsets, values, blocks, out):  # type: ignore[no-untyped-def]
    """See `numpy_kernels.pack`; the arrays of words come as bytes."""
    width, start, block, found, place = values.size // max(counts.sum(), 1), 0, 0, 0, 0
    for run in range(lengths.size):
        length, count = lengths[run], counts[run]
        run_blocks = (length + _BLOCK - 1) // _BLOCK
        if modes[run] == 0:
            out[place:place + length * width] = new[start * width:(start + length) * width]
            place += length * width
        elif count > 0:
            if modes[run] == 1:
                out[place:place + 4 * run_blocks] = blocks[4 * block:4 * (block + run_blocks)]
                place += 4 * run_blocks
                out[place:place + 2 * count] = offsets[2 * found:2 * (found + count)]
                place += 2 * count
            else:
                flags = out[place:place + (length + 7) // 8]
                flags[:] = 0
                _flag(blocks[4 * block:4 * (block + run_blocks)], offsets[2 * found:2 * (found + count)], flags)
                place += flags.size
            out[place:place + count * width] = values[found * width:(found + count) * width]
            place += count * width
        start, block, found = start + length, block + run_blocks, found + count
    return place


@_compiled
def put_blocks(memory, lengths, blocks, offsets, values):  # type: ignore[no-untyped-def]
    """See `numpy_kernels.put_blocks`."""
    start, block, found = 0, 0, 0
    for run in range(lengths.size):
        for low in range(start, start + lengths[run], _BLOCK):
            for _ in range(blocks[block]):
                memory[low + offsets[found]] = values[found]
                found += 1
            block += 1
        start += lengths[run]


@njit(nogil=True)
def _hash_block(origin, offsets, values, olds):  # type: ignore[no-untyped-def]
    total = _U0
    for at in range(offsets.size):  # from 0 on: the compiler sees that no index is negative, and makes vectors of it
        total += _factor(origin + np.uint64(offsets[at]) * _GOLDEN) * (np.uint64(values[at]) - np.uint64(olds[at]))
    return total


@_compiled
def hash_blocks(lengths, origins, blocks, offsets, values, olds):  # type: ignore[no-untyped-def]
    """See `numpy_kernels.hash_blocks`."""
    total, block, found = _U0, 0, 0
    for run in range(lengths.size):
        for low in range(0, lengths[run], _BLOCK):
            origin = origins[run] + np.uint64(low) * _GOLDEN
            end = found + np.int64(blocks[block])
            total += _hash_block(origin, offsets[found:end], values[found:end], olds[found:end])
            found = end
            block += 1
    return total


@_compiled
def hash_runs(lengths, origins, bits):  # type: ignore[no-untyped-def]
    """See `numpy_kernels.hash_runs`."""
    total, start = _U0, 0
    for run in range(lengths.size):
        part = bits[start:start + lengths[run]]
        for at in range(part.size):
            total += _factor(origins[run] + np.uint64(at) * _GOLDEN) * (np.uint64(part[at]) + _U1)
        start += lengths[run]
    return total


@_compiled
def hash_change(origin, indices, old, new):  # type: ignore[no-untyped-def]
    """See `numpy_kernels.hash_change`."""
    total = _U0
    for at in range(indices.size):
        total += _factor(origin + np.uint64(indices[at]) * _GOLDEN) * (np.uint64(new[at]) - np.uint64(old[at]))
    return total


@_compiled
def hash_places(origin, indices, bits):  # type: ignore[no-untyped-def]
    """See `numpy_kernels.hash_places`."""
    total = _U0
    for at in range(indices.size):
        total += _factor(origin + np.uint64(indices[at]) * _GOLDEN) * (np.uint64(bits[at]) + _U1)
    return total


@_compiled
def block_indices(blocks, offsets, length, out):  # type: ignore[no-untyped-def]
    """See `numpy_kernels.block_indices`."""
    found = 0
    for block in range(blocks.size):
        low, before = block * _BLOCK, np.int64(-1)
        for _ in range(blocks[block]):
            offset = np.int64(offsets[found])
            if offset <= before or low + offset >= length:
                return False
            out[found] = low + offset
            before = offset
            found += 1
    return True


@_compiled
def flag_indices(flags, length, out):  # type: ignore[no-untyped-def]
    """See `numpy_kernels.flag_indices`."""
    found, words = 0, flags.size // 8
    for word in range(words):
        bits = eight_bytes(flags, 8 * word)
        if found + set_bits(bits) > out.size:
            return False
        found = _name_bits(bits, 64 * word, out, found)
    for byte in range(8 * words, flags.size):
        bits = np.uint64(flags[byte])
        if found + set_bits(bits) > out.size:
            return False
        found = _name_bits(bits, 8 * byte, out, found)
    return found == out.size and (found == 0 or out[found - 1] < length)


@_compiled
def take(memory, indices, out):  # type: ignore[no-untyped-def]
    """See `numpy_kernels.take`."""
    for at in range(indices.size):
        will_use(memory, indices[min(at + _AHEAD, indices.size - 1)])
        out[at] = memory[indices[at]]


@_compiled
def put(memory, indices, values):  # type: ignore[no-untyped-def]
    """See `numpy_kernels.put`."""
    for at in range(indices.size):
        will_use(memory, indices[min(at + _AHEAD, indices.size - 1)])
        memory[indices[at]] = values[at]


@_compiled
def holds(memory, indices, values):  # type: ignore[no-untyped-def]
    """See `numpy_kernels.holds`."""
    same = True
    for at in range(indices.size):
        same &= memory[indices[at]] == values[at]
    return same


@_compiled
def first_not_finite(values, exponent):  # type: ignore[no-untyped-def]
    """See `numpy_kernels.first_not_finite`."""
    found = False
    for at in range(values.size):
        found |= (values[at] & exponent) == exponent
    if found:
        for at in range(values.size):
            if (values[at] & exponent) == exponent:
                return at
    return -1
