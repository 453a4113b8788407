"""fusionrt: fused GPU kernels, compiled at first use, in a pure-Python wheel.

    import fusionrt as frt
    y = frt.bias_gelu(x, b)                    # torch, CuPy or NumPy in, the same out, differentiable

    @frt.fuse                                  # your own: CUDA, CPU and gradient from one definition
    def gate(x, y):
        return frt.sigmoid(x) * y + 0.5 * x

Importing this module imports none of torch, CuPy and Numba; the first name that is used does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_OPS = (
    "add_mul_add", "add_mul_exp", "add_norm", "add_relu", "add_rms_norm", "add_sigmoid",
    "amax", "amin", "argmax", "argmin", "attention_dropout", "batch_norm",
    "batch_norm_relu", "bce_with_logits", "bias_dropout_add", "bias_gelu", "bias_relu",
    "bias_silu", "cross_entropy", "dequantize_int8", "dropout_add",
    "dropout_add_layer_norm", "elu", "geglu", "gelu", "gelu_dropout", "gelu_tanh",
    "group_norm", "hardsigmoid", "hardswish", "huber_loss", "instance_norm", "kl_div",
    "l1_loss", "layer_norm", "layer_norm_gelu", "layer_norm_relu", "leaky_relu",
    "linear_cross_entropy", "log_softmax", "logsumexp", "mean", "mean_abs", "mish",
    "mish_scale", "mse_loss", "mul_tanh", "multiply_relu", "norm", "prelu_bias",
    "quantize_int8", "reglu", "relu", "relu6", "relu_dropout", "relu_squared", "rms_norm",
    "rms_norm_gelu", "row_reduce", "scale_bias_sigmoid", "sigmoid", "silu",
    "smooth_l1_loss", "softmax", "softplus", "std", "sum", "sum_squared", "swish_multiply",
    "tanh", "var",
)
_FUNCTIONS = (
    "cast", "clamp", "cos", "erf", "exp", "exp2", "expm1", "floor", "log", "log1p", "log2",
    "maximum", "minimum", "normcdf", "normpdf", "rsqrt", "sin", "sqrt", "trunc", "where",
)
_HOME = {
    **dict.fromkeys(_OPS, "fusionrt.ops"),
    **dict.fromkeys(_FUNCTIONS, "fusionrt.expr"),
    "abs": "fusionrt.expr:abs_", "pow": "fusionrt.expr:power", "round": "fusionrt.expr:round_",
    "fuse": "fusionrt.fusion:fuse", "kept": "fusionrt.fusion:kept", "TraceError": "fusionrt.expr",
    "CompileError": "fusionrt.errors", "CaptureError": "fusionrt.errors",
    "CacheWarning": "fusionrt.runtime.cache", "MissingKernelError": "fusionrt.runtime.cache",
    "warmup": "fusionrt.precompile:warmup", "doctor": "fusionrt.diagnosis:doctor",
    "CUDA_AVAILABLE": "fusionrt.diagnosis:cuda_available()",
    "EXTENSION_LOADED": "fusionrt.diagnosis:compiler_available()",
}
_SUBMODULES = ("bench", "kernels", "ops", "reference")

__all__ = sorted([*_HOME, *_SUBMODULES, "__version__"])

if TYPE_CHECKING:
    from fusionrt import bench as bench
    from fusionrt import kernels as kernels
    from fusionrt import ops as ops
    from fusionrt import reference as reference
    from fusionrt.diagnosis import doctor as doctor
    from fusionrt.fusion import fuse as fuse
    from fusionrt.fusion import kept as kept
    from fusionrt.ops import *  # noqa: F403
    from fusionrt.precompile import warmup as warmup


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"fusionrt.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'fusionrt' has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    value = getattr(importlib.import_module(module), attribute.removesuffix("()") or name)
    if attribute.endswith("()"):
        return value()  # asked anew each time: a GPU is looked for only when someone asks
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
