"""Sums and maxima over a loop in any order, so that LLVM vectorises it: several lanes, joined at the end."""

from typing import Any

import numpy as np
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
    """The larger one; anything at all if either is NaN, which `met_nan` looks after.

    Trap: LLVM vectorises a floating maximum only where it need not care for NaN.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        free = ("nnan", "nsz")
        return builder.select(builder.fcmp_ordered(">", *args, flags=free), *args, flags=free)

    return (top(top, x), codegen) if top == x else None


@intrinsic
def met_nan(typing_context: Any, met: Any, x: Any) -> Any:
    """Whether a NaN was met so far, or x is one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.or_(args[0], builder.fcmp_unordered("uno", args[1], args[1]))

    return (types.boolean(types.boolean, x), codegen) if met == types.boolean else None


@inline
def maximum_found(top: Any, met: Any) -> Any:
    """The maximum of a loop that kept `top` and `met`."""
    return where(met, type(top)(np.nan), top)


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


NAMES = {f.__name__: f for f in (maximum_found, larger_or_nan, finite_top, int64_of)} | {
    "plus": plus, "larger": larger, "met_nan": met_nan}
