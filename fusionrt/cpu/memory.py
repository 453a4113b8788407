"""What generated kernels use beside mathematics: typed memory at an address, sums, masks."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fusionrt.cpu import math16, math32, math64, reductions, storage
from fusionrt.cpu.storage import inline


def _pointer_to(element: Any) -> Any:
    @intrinsic
    def at(typing_context: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), codegen

    return at


def _prefetching(to_write: bool) -> Any:
    """A hint: an address that is nobody's is no error."""
    @intrinsic
    def prefetch(typing_context: Any, pointer: Any, index: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
            function = builder.module.declare_intrinsic(
                "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32]))
            nearest, data = 3, 1
            builder.call(function, [builder.bitcast(builder.gep(args[0], [args[1]]), byte),
                                    *(ir.Constant(i32, n) for n in (int(to_write), nearest, data))])
            return context.get_dummy_value()

        return types.void(pointer, types.int64), codegen

    return prefetch


@inline
def uint64_of(x):
    return np.uint64(x)


@inline
def float64_of(x):
    return np.float64(x)


@inline
def kept(bits, p):
    """16 random bits against p: true with probability 1 - p. Of NaN and what is no probability as on a GPU,
    whose conversion saturates; LLVM's has no result then, and leaves out what follows from it."""
    least = p * type(p)(65536) + type(p)(0.5)
    least = least if least >= type(p)(0) else type(p)(0)
    return np.int32(bits) >= np.int32(least if least <= type(p)(65536) else type(p)(65536))


def _casting(store: Any, acc: Any) -> Any:
    """A cast inside an expression goes through the storage type and back."""

    @inline
    def cast(x):
        return acc(store(acc(x)))

    return cast


def scope(accuracy: str) -> dict[str, Any]:
    """Every name that generated text uses, for arithmetic in float32 or float64; "float16" is
    arithmetic in float32 for 16-bit results."""
    mathematics = {"float64": vars(math64), "float32": vars(math32), "float16": math16.NAMES}[accuracy]
    names = {**vars(storage), **reductions.NAMES, **mathematics}
    integers = ("int8", "uint8", "int16", "int32", "int64", "bool")
    for dtype in integers:
        store = getattr(storage, f"cast_{dtype}")
        names[f"store_{dtype}"] = store
        names[f"cast_{dtype}"] = _casting(store, names["acc_t"])
    for dtype in ("uint8", "uint16", "uint64", "int8", "int16", "int32", "int64", "float32", "float64"):
        names[f"{dtype}_at"] = _pointer_to(getattr(types, dtype))
    return names | {"prefetch": _prefetching(False), "prefetch_to_write": _prefetching(True),
                    "uint64_of": uint64_of, "float64_of": float64_of, "kept": kept}
