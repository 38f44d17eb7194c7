"""What compiled kernels say to the compiler in its own words: loads of many elements at once, rounding on the way, counting of bits.

This file and `numba_kernels` alone import numba.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_AHEAD_BYTES = 4096
"""What the processor fetches by itself ends with a page of memory."""
_LINE_BYTES = 64


def _prefetch(builder: Any, address: Any, *, write: bool) -> None:
    """Code that asks for the line of memory at `address`; one that is not there is no error."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    function = builder.module.declare_intrinsic("llvm.prefetch", (byte,), ir.FunctionType(ir.VoidType(), [byte, number, number, number]))
    builder.call(function, [builder.inttoptr(address, byte), *(ir.Constant(number, value) for value in (int(write), 3, 1))])


def _loaded(builder: Any, address: Any, place: Any, *, held: int, wanted: int, lanes: int) -> Any:
    """Code that loads words of `held` bits, the first at `place` in the memory at `address`: `wanted` wide, rounded where they differ."""
    def kind(bits: int) -> Any:
        return ir.VectorType(ir.IntType(bits), lanes) if lanes > 1 else ir.IntType(bits)

    def constant(value: int) -> Any:
        return ir.Constant(kind(held), [value] * lanes if lanes > 1 else value)

    first = builder.add(address, builder.mul(place, ir.Constant(place.type, held // 8)))
    words = builder.load(builder.inttoptr(first, kind(held).as_pointer()), align=1)
    if lanes > 1:
        for line in range(0, lanes * held // 8, _LINE_BYTES):
            _prefetch(builder, builder.add(first, ir.Constant(first.type, _AHEAD_BYTES + line)), write=False)
    if held == wanted:
        return words
    odd = builder.and_(builder.lshr(words, constant(16)), constant(1))
    nearest = builder.lshr(builder.add(words, builder.add(odd, constant(0x7FFF))), constant(16))
    no_number = builder.icmp_unsigned(">", builder.and_(words, constant(0x7FFF_FFFF)), constant(0x7F80_0000))
    return builder.trunc(builder.select(no_number, constant(0x7FC0), nearest), kind(wanted))


@intrinsic
def differing(_context: Any, address: Any, like: Any, old: Any, place: Any) -> Any:
    """uint64 whose bit j is set where element `place` + j of the memory at `address` differs from that of `old`, of 64 that must be there.

    The memory holds words as those of `like`: of the width of `old`, or float32 where `old` holds what that is as bfloat16.
    """
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        held, wanted = (signature.args[number].dtype.bitwidth for number in (1, 2))
        new = _loaded(builder, arguments[0], arguments[3], held=held, wanted=wanted, lanes=64)
        data = builder.ptrtoint(context.make_array(signature.args[2])(context, builder, arguments[2]).data, ir.IntType(64))
        before = _loaded(builder, data, arguments[3], held=wanted, wanted=wanted, lanes=64)
        return builder.bitcast(builder.icmp_unsigned("!=", new, before), ir.IntType(64))

    return types.uint64(types.uint64, like, old, types.int64), generate


@intrinsic
def word_at(_context: Any, address: Any, like: Any, old: Any, place: Any) -> Any:
    """Element `place` of the memory at `address`, as `differing` compares it."""
    def generate(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        held, wanted = (signature.args[number].dtype.bitwidth for number in (1, 2))
        return _loaded(builder, arguments[0], arguments[3], held=held, wanted=wanted, lanes=1)

    return old.dtype(types.uint64, like, old, types.int64), generate


@intrinsic
def eight_bytes(_context: Any, data: Any, place: Any) -> Any:
    """Bytes `place` … `place` + 8 as a uint64, little-endian."""
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = builder.ptrtoint(context.make_array(signature.args[0])(context, builder, arguments[0]).data, ir.IntType(64))
        return builder.load(builder.inttoptr(builder.add(start, arguments[1]), ir.IntType(64).as_pointer()), align=1)

    return types.uint64(data, types.int64), generate


@intrinsic
def put_eight_bytes(_context: Any, data: Any, place: Any, word: Any) -> Any:
    """The other way round."""
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = builder.ptrtoint(context.make_array(signature.args[0])(context, builder, arguments[0]).data, ir.IntType(64))
        builder.store(arguments[2], builder.inttoptr(builder.add(start, arguments[1]), ir.IntType(64).as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(data, types.int64, types.uint64), generate


@intrinsic
def will_use(_context: Any, memory: Any, place: Any) -> Any:
    """Ask for element `place` of `memory` ahead of its use; one that is not there is no error."""
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = builder.ptrtoint(context.make_array(signature.args[0])(context, builder, arguments[0]).data, ir.IntType(64))
        width = ir.Constant(ir.IntType(64), signature.args[0].dtype.bitwidth // 8)
        _prefetch(builder, builder.add(start, builder.mul(arguments[1], width)), write=True)
        return context.get_dummy_value()

    return types.void(memory, types.int64), generate


@intrinsic
def lowest_bit(_context: Any, flags: Any) -> Any:
    """Place of the lowest set bit of a uint64; 64 when it is 0."""
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@intrinsic
def set_bits(_context: Any, flags: Any) -> Any:
    """How many bits of a uint64 are set."""
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate
