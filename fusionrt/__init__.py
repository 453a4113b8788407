"""fusionrt: fused GPU kernels, compiled at first use, in a pure-Python wheel.

    import fusionrt as frt
    y = frt.bias_gelu(x, b)                    # torch, CuPy or NumPy in, the same out, differentiable

    @frt.fuse                                  # your own: CUDA, CPU and gradient from one definition
    def gate(x, y):
        return frt.sigmoid(x) * y + 0.5 * x

Importing this module imports none of torch, CuPy and Numba; the first name that is used does.

The source has one file an idea (CONTRIBUTING.md says how they join). Packages: `ops` (the public functions),
`runtime` (kernels on a GPU), `cpu` (without one), `nn`, `optim`, `data`, `convert` (whole models), `bench`,
`kernels` (the ops, of CUDA tensors only). What ops are declared with: `op_names`, `catalogue`, `fusion`
(`fuse`), `activation`, `arguments`, `reference` (torch's formulas). Formulas: `expr` (of scalars) with
`primitives`, `derivatives` and `graph`, `functions` and `torch_calls` (torch's, of traced values), `rowwise`
and `row_fusion` (of rows), `definition` (an operator's), `stages` (rows across memory). Calls: `dispatch`,
`op` and `row_op`, `random`, `mask` (a bit an element for the backward pass), `counted`; with gradients
`autograd`, `recording`, `recorded_function`; as torch's own `library`, `structured` (of ops that are no
expression), `registration`, `watching`, `autocast`. A kernel to be built: `problem`, `layout`, `laid`,
`dtypes`. Kinds of calls that were made before: `guards`, `sites`, `settling`, `tape`, `steps`, `texts`.
Arguments and errors: `array` (DLPack), `indices`, `deferred`, `errors`. The command line: `cli`,
`__main__`, `terminal`, `new_op`, `diagnosis` (`doctor`), `precompile` (`warmup`) with `rehearsal` and
`inventory`. Of Python itself: `lazy` (imports), `collector` (of cycles), `forks`, `files`, `properties`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusionrt import lazy, op_names

__version__ = "0.1.0"

_FUNCTIONS = (
    "cast", "clamp", "cos", "erf", "exp", "exp2", "expm1", "floor", "log", "log1p", "log2",
    "maximum", "minimum", "normcdf", "normpdf", "rsqrt", "sin", "sqrt", "trunc", "where",
)
_HOME = {
    **{op: f"fusionrt.ops.{module}" for op, module in op_names.MODULE.items()},
    **dict.fromkeys(_FUNCTIONS, "fusionrt.expr"),
    "abs": "fusionrt.expr:abs_", "pow": "fusionrt.expr:power", "round": "fusionrt.expr:round_",
    "fuse": "fusionrt.fusion:fuse", "kept": "fusionrt.fusion:kept", "TraceError": "fusionrt.expr",
    "CompileError": "fusionrt.errors", "CaptureError": "fusionrt.errors",
    "CacheWarning": "fusionrt.errors", "MissingKernelError": "fusionrt.errors",
    "warmup": "fusionrt.precompile:warmup", "doctor": "fusionrt.diagnosis:doctor",
    "auto_convert_model": "fusionrt.convert.model", "validate_optimization": "fusionrt.convert.validate",
    # A GPU is looked for only when someone asks.
    "CUDA_AVAILABLE": "fusionrt.diagnosis:cuda_available()",
    "EXTENSION_LOADED": "fusionrt.diagnosis:compiler_available()",
}
_SUBMODULES = ("bench", "convert", "data", "deferred", "kernels", "nn", "ops", "optim", "reference")

__all__ = sorted([*_HOME, *_SUBMODULES, "__version__"])

if TYPE_CHECKING:
    from collections.abc import Callable

    from fusionrt import bench as bench
    from fusionrt import convert as convert
    from fusionrt import data as data
    from fusionrt import deferred as deferred
    from fusionrt import kernels as kernels
    from fusionrt import nn as nn
    from fusionrt import ops as ops
    from fusionrt import optim as optim
    from fusionrt import reference as reference
    from fusionrt.convert.model import auto_convert_model as auto_convert_model
    from fusionrt.convert.validate import validate_optimization as validate_optimization
    from fusionrt.diagnosis import doctor as doctor
    from fusionrt.errors import CacheWarning as CacheWarning
    from fusionrt.errors import CaptureError as CaptureError
    from fusionrt.errors import CompileError as CompileError
    from fusionrt.errors import MissingKernelError as MissingKernelError
    from fusionrt.expr import TraceError as TraceError
    from fusionrt.expr import cast as cast
    from fusionrt.expr import clamp as clamp
    from fusionrt.expr import cos as cos
    from fusionrt.expr import erf as erf
    from fusionrt.expr import exp as exp
    from fusionrt.expr import exp2 as exp2
    from fusionrt.expr import expm1 as expm1
    from fusionrt.expr import floor as floor
    from fusionrt.expr import log as log
    from fusionrt.expr import log1p as log1p
    from fusionrt.expr import log2 as log2
    from fusionrt.expr import maximum as maximum
    from fusionrt.expr import minimum as minimum
    from fusionrt.expr import normcdf as normcdf
    from fusionrt.expr import normpdf as normpdf
    from fusionrt.expr import rsqrt as rsqrt
    from fusionrt.expr import sin as sin
    from fusionrt.expr import sqrt as sqrt
    from fusionrt.expr import trunc as trunc
    from fusionrt.expr import where as where
    from fusionrt.fusion import fuse as fuse
    from fusionrt.fusion import kept as kept
    from fusionrt.ops import *  # noqa: F403  (type checkers follow it)
    from fusionrt.precompile import warmup as warmup

    # An import by another name is private to type checkers.
    abs: Callable[[Any], Any]
    pow: Callable[[Any, Any], Any]
    round: Callable[[Any], Any]
    CUDA_AVAILABLE: bool
    EXTENSION_LOADED: bool


def __getattr__(name: str) -> Any:
    return lazy.find(__name__, name, _HOME, _SUBMODULES)


def __dir__() -> list[str]:
    return __all__
