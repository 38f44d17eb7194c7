"""What `numpy_kernels` gives, bit for bit, compiled: at the speed of memory where little changed. The one file that imports numba.

A scan compares 64 elements at a time, as one vector of the compiler's, whose result is a word of 64 flags: equal stretches cost a load and
a branch, and of others only what changed is visited, from set bit to set bit. All functions release the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_BLOCK = 1 << 16
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_U0, _U1, _U27, _U30, _U31 = (np.uint64(number) for number in (0, 1, 27, 30, 31))


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


@intrinsic
def _differing(_context: Any, new: Any, old: Any, place: Any) -> Any:
    """uint64 whose bit j is set where element `place` + j of two arrays differs, of 64 elements that must be there."""
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.IntType(signature.args[0].dtype.bitwidth), 64)
        loaded = []
        for kind, value in zip(signature.args[:2], arguments[:2], strict=True):
            data = context.make_array(kind)(context, builder, value).data
            address = builder.bitcast(builder.gep(data, [arguments[2]]), vector.as_pointer())
            loaded.append(builder.load(address, align=1))
        return builder.bitcast(builder.icmp_unsigned("!=", *loaded), ir.IntType(64))

    return types.uint64(new, old, place), generate


@intrinsic
def _lowest_bit(_context: Any, flags: Any) -> Any:
    """Place of the lowest set bit of a uint64 that is not 0."""
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@njit(nogil=True, inline="always")
def _factor(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> _U30)) * _FIRST_FACTOR
    x = (x ^ (x >> _U27)) * _SECOND_FACTOR
    return (x ^ (x >> _U31)) | _U1


@_compiled
def scan(new, old, lengths, offsets, values, olds, blocks, counts):  # type: ignore[no-untyped-def]
    """See `numpy_kernels.scan`."""
    start, block, found = 0, 0, 0
    for run in range(lengths.size):
        end, before_run = start + lengths[run], found
        for low in range(start, end, _BLOCK):
            high, before = min(low + _BLOCK, end), found
            place = low
            while place + 64 <= high:
                flags = _differing(new, old, place)
                while flags != _U0:
                    at = place + _lowest_bit(flags)
                    offsets[found], values[found], olds[found] = at - low, new[at], old[at]
                    old[at] = new[at]
                    found += 1
                    flags &= flags - _U1
                place += 64
            for at in range(place, high):
                if new[at] != old[at]:
                    offsets[found], values[found], olds[found] = at - low, new[at], old[at]
                    old[at] = new[at]
                    found += 1
            blocks[block] = found - before
            block += 1
        counts[run] = found - before_run
        start = end
    return found


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
                at = found
                for number in range(run_blocks):
                    base = 4 * (block + number)
                    changed = blocks[base] + (blocks[base + 1] << 8) + (blocks[base + 2] << 16)
                    for _ in range(changed):
                        element = number * _BLOCK + offsets[2 * at] + (offsets[2 * at + 1] << 8)
                        flags[element >> 3] |= np.uint8(1 << (element & 7))
                        at += 1
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
    found = 0
    for place in range(flags.size):
        byte = np.uint64(flags[place])
        while byte != _U0:
            if found == out.size or 8 * place + _lowest_bit(byte) >= length:
                return False
            out[found] = 8 * place + _lowest_bit(byte)
            found += 1
            byte &= byte - _U1
    return found == out.size


@_compiled
def take(memory, indices, out):  # type: ignore[no-untyped-def]
    """See `numpy_kernels.take`."""
    for at in range(indices.size):
        out[at] = memory[indices[at]]


@_compiled
def put(memory, indices, values):  # type: ignore[no-untyped-def]
    """See `numpy_kernels.put`."""
    for at in range(indices.size):
        memory[indices[at]] = values[at]


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
