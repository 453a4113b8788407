"""Sums and maxima over a loop in any order, so that LLVM vectorises it: several lanes, joined at the end."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fusionrt.cpu.storage import inline, where


@intrinsic
def plus(typing_context: Any, total: Any, x: Any) -> Any:
    """total + x, where the order of a loop's additions is free."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(*args, flags=("reassoc", "nsz"))

    return (total(total, x), codegen) if total == x else None


@intrinsic
def larger(typing_context: Any, top: Any, x: Any) -> Any:
    """The larger one; anything at all if either is NaN, which `largest_bits` tells.

    Trap: LLVM vectorises a floating maximum only where it need not care for NaN.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        free = ("nnan", "nsz")
        return builder.select(builder.fcmp_ordered(">", *args, flags=free), *args, flags=free)

    return (top(top, x), codegen) if top == x else None


# As integers, numbers without their sign are in order, and NaN are beyond infinity.
_BITS = {types.float32: (types.int32, ir.IntType(32), 0x7f800000),
         types.float64: (types.int64, ir.IntType(64), 0x7ff0000000000000)}


@intrinsic
def largest_bits(typing_context: Any, bits: Any, x: Any) -> Any:
    """The largest bits that were met so far, `no_bits` at first. (To note in a loop whether a comparison was
    true costs more than the maximum: LLVM narrows vectors of them.)"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        integer = args[0].type
        without_sign = ir.Constant(integer, 2**(integer.width - 1) - 1)
        here = builder.and_(builder.bitcast(args[1], integer), without_sign)
        return builder.select(builder.icmp_signed(">", args[0], here), args[0], here)

    return (bits(bits, x), codegen) if x in _BITS and bits == _BITS[x][0] else None


@intrinsic
def no_bits(typing_context: Any, x: Any) -> Any:
    """Of a number of x's type."""
    return (_BITS[x][0](x), lambda context, *_: ir.Constant(_BITS[x][1], 0)) if x in _BITS else None


@intrinsic
def maximum_found(typing_context: Any, top: Any, bits: Any) -> Any:
    """The maximum of a loop that kept `larger` and `largest_bits`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        is_nan = builder.icmp_signed(">", args[1], ir.Constant(args[1].type, _BITS[top][2]))
        return builder.select(is_nan, ir.Constant(args[0].type, float("nan")), args[0])

    return (top(top, bits), codegen) if top in _BITS and bits == _BITS[top][0] else None


@inline
def larger_or_nan(top: Any, x: Any) -> Any:
    return where((x > top) | (x != x), x, top)


@inline
def finite_top(top: Any) -> Any:
    """What exponentials are taken relative to: a row of -inf alone has the sum 0."""
    return where(top == -type(top)(np.inf), type(top)(0), top)


@inline
def int64_of(x: Any) -> Any:
    return np.int64(x)


NAMES = {f.__name__: f for f in (larger_or_nan, finite_top, int64_of)} | {
    "plus": plus, "larger": larger, "largest_bits": largest_bits, "no_bits": no_bits,
    "maximum_found": maximum_found}
