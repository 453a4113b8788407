"""Every op, under its name and under the names that older fusion libraries gave it."""

from typing import Any

from fusionrt.ops.activations import (
    elu,
    gelu,
    gelu_tanh,
    hardsigmoid,
    hardswish,
    leaky_relu,
    mish,
    relu,
    relu6,
    relu_squared,
    sigmoid,
    silu,
    softplus,
    tanh,
)
from fusionrt.ops.dropout import bias_dropout_add, dropout_add, gelu_dropout, relu_dropout
from fusionrt.ops.pointwise import (
    add_mul_add,
    add_mul_exp,
    add_relu,
    add_sigmoid,
    bias_gelu,
    bias_relu,
    bias_silu,
    geglu,
    mish_scale,
    mul_tanh,
    multiply_relu,
    prelu_bias,
    reglu,
    scale_bias_sigmoid,
    swish_multiply,
)
from fusionrt.ops.quantize import dequantize_int8, quantize_int8

# Other name -> op. `fusionrt.kernels` reads the same table.
ALIASES = {
    "elementwise_add_relu": "add_relu", "fused_add_relu": "add_relu",
    "elementwise_mul_tanh": "mul_tanh", "multiply_tanh": "mul_tanh", "fused_mul_tanh": "mul_tanh",
    "fused_multiply_relu": "multiply_relu", "fused_add_sigmoid": "add_sigmoid",
    "fused_bias_gelu": "bias_gelu", "fused_bias_relu": "bias_relu", "fused_bias_silu": "bias_silu",
    "fused_gelu_dropout": "gelu_dropout", "fused_relu_dropout": "relu_dropout",
    "fused_dropout_add": "dropout_add", "fused_swish_multiply": "swish_multiply",
    "swiglu": "swish_multiply", "fused_mish_scale": "mish_scale",
    "fused_prelu_bias": "prelu_bias", "fused_add_mul_exp": "add_mul_exp",
    "fused_quantize_int8": "quantize_int8", "swish": "silu",
}

__all__ = [
    "add_mul_add", "add_mul_exp", "add_relu", "add_sigmoid", "bias_dropout_add", "bias_gelu",
    "bias_relu", "bias_silu", "dequantize_int8", "dropout_add", "elu", "geglu", "gelu",
    "gelu_dropout", "gelu_tanh", "hardsigmoid", "hardswish", "leaky_relu", "mish", "mish_scale",
    "mul_tanh", "multiply_relu", "prelu_bias", "quantize_int8", "reglu", "relu", "relu6",
    "relu_dropout", "relu_squared", "scale_bias_sigmoid", "sigmoid", "silu", "softplus",
    "swish_multiply", "tanh",
]


def __getattr__(name: str) -> Any:
    """Aliases, and for `op_cuda`, `op_cpu` and `op_pytorch` the three ways to run an op."""
    op = ALIASES.get(name, name)
    if op in globals() and name in ALIASES:
        return globals()[op]
    for suffix, attribute in (("_cuda", "cuda"), ("_cpu", "cpu"), ("_pytorch", "reference")):
        stem = name.removesuffix(suffix)
        stem = ALIASES.get(stem, stem)
        if name.endswith(suffix) and stem in __all__:
            return getattr(globals()[stem], attribute)
    raise AttributeError(f"module 'fusionrt.ops' has no op {name!r}")
