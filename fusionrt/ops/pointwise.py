"""Chains of pointwise operations, each in one kernel.

Arguments broadcast as in torch; a result has torch's promoted dtype and the memory format of the
first argument of full shape. Dtypes: float16, bfloat16 (computed in float32), float32, float64.
All are differentiable, twice. Every op raises ValueError where shapes do not broadcast or devices
differ, TypeError for what is no array, and names the argument.
"""

from __future__ import annotations

import math
from typing import Any

from fusionrt import expr
from fusionrt.array import shape_of
from fusionrt.catalogue import COLUMNS, ELEMENTWISE, ROWS, Make, pointwise, public
from fusionrt.dispatch import Usual
from fusionrt.expr import Expr, exp
from fusionrt.fusion import fused
from fusionrt.layout import broadcast_shapes, is_among
from fusionrt.ops.activations import gelu, gelu_tanh, is_tanh, leaky_relu, mish, relu, silu


def _with_bias(make: Make) -> tuple[Any, ...]:
    return make(ROWS, COLUMNS), make(COLUMNS)


@pointwise
def add_relu(a: Expr, b: Expr) -> Expr:
    """relu(a + b).

    Source: torch.relu(a + b).

        add_relu(x, residual)
    """
    return relu(a + b)


@pointwise
def multiply_relu(a: Expr, b: Expr) -> Expr:
    """relu(a * b).

    Source: torch.relu(a * b).

        multiply_relu(x, mask)
    """
    return relu(a * b)


@pointwise
def add_sigmoid(a: Expr, b: Expr) -> Expr:
    """sigmoid(a + b).

    Source: torch.sigmoid(a + b).

        add_sigmoid(x, bias)
    """
    return expr.sigmoid(a + b)


@pointwise
def mul_tanh(a: Expr, b: Expr) -> Expr:
    """tanh(a * b).

    Source: torch.tanh(a * b).

        mul_tanh(x, scale)
    """
    return expr.tanh(a * b)


@pointwise(example=_with_bias)
def bias_relu(x: Expr, bias: Expr) -> Expr:
    """relu(x + bias); x of shape (..., D), bias (D,) or anything that broadcasts.

    Source: torch.relu(x + bias). The gradient of the bias is summed in the same kernel.

        bias_relu(torch.randn(8, 512), torch.zeros(512))
    """
    return relu(x + bias)


@pointwise(example=_with_bias)
def bias_silu(x: Expr, bias: Expr) -> Expr:
    """silu(x + bias); x of shape (..., D), bias (D,) or anything that broadcasts.

    Source: torch.nn.functional.silu(x + bias).

        bias_silu(torch.randn(8, 512), torch.zeros(512))
    """
    return silu(x + bias)


@fused("bias_gelu")
def _bias_gelu(x: Expr, bias: Expr) -> Expr:
    return gelu(x + bias)


@fused("bias_gelu_tanh")
def _bias_gelu_tanh(x: Expr, bias: Expr) -> Expr:
    return gelu_tanh(x + bias)


@fused("geglu")
def _geglu(x: Expr, gate: Expr) -> Expr:
    return gelu(x) * gate


@fused("geglu_tanh")
def _geglu_tanh(x: Expr, gate: Expr) -> Expr:
    return gelu_tanh(x) * gate


@public(example=_with_bias, more=ELEMENTWISE,
        usual=Usual(_bias_gelu.operator, ("x", "bias"), "approximate == 'none'"))
def bias_gelu(x: Any, bias: Any, *, approximate: str = "none") -> Any:
    """gelu(x + bias); x of shape (..., D), bias (D,) or anything that broadcasts.

    `approximate`: "none" (erf) or "tanh", as in torch. Source: torch.nn.functional.gelu(x + bias).

        bias_gelu(torch.randn(8, 512), torch.zeros(512))
    """
    if approximate == "none":
        return _bias_gelu(x, bias)
    return _bias_gelu_tanh(x, bias) if is_tanh("bias_gelu", approximate) else None


@public(example=lambda make: (make(ROWS, COLUMNS), make(ROWS, COLUMNS)), more=ELEMENTWISE,
        usual=Usual(_geglu.operator, ("x", "gate"), "approximate == 'none'"))
def geglu(x: Any, gate: Any, *, approximate: str = "none") -> Any:
    """gelu(x) * gate.

    `approximate`: "none" (erf) or "tanh". Source: Shazeer 2020, "GLU Variants Improve Transformer".

        geglu(up.chunk(2, dim=-1)[0], up.chunk(2, dim=-1)[1])
    """
    if approximate == "none":
        return _geglu(x, gate)
    return _geglu_tanh(x, gate) if is_tanh("geglu", approximate) else None


@pointwise
def reglu(x: Expr, gate: Expr) -> Expr:
    """relu(x) * gate.

    Source: Shazeer 2020, "GLU Variants Improve Transformer".

        reglu(x, gate)
    """
    return relu(x) * gate


@fused("swish_multiply")
def _swish_multiply(x: Expr, gate: Expr) -> Expr:
    return silu(x) * gate


@fused("swish_multiply")
def _multiply_swish(x: Expr, gate: Expr) -> Expr:
    return x * silu(gate)


@public(example=lambda make: (make(ROWS, COLUMNS), make(ROWS, COLUMNS)), more=ELEMENTWISE,
        usual=Usual(_swish_multiply.operator, ("x", "gate"), "activate == 'x'"))
def swish_multiply(x: Any, gate: Any, *, activate: str = "x") -> Any:
    """silu(x) * gate: the gated activation of LLaMA-style MLPs (SwiGLU).

    `activate`: which of the two is activated, "x" or "gate". Source: torch.nn.functional.silu(x) * gate;
    Shazeer 2020.

        swish_multiply(x, gate)
    """
    if activate not in ("x", "gate"):
        raise ValueError(f"swish_multiply: activate must be 'x' or 'gate', got {activate!r}")
    return (_swish_multiply if activate == "x" else _multiply_swish)(x, gate)


@pointwise(example=lambda make: (make(ROWS, COLUMNS), make()))
def mish_scale(x: Expr, scale: Expr) -> Expr:
    """scale * mish(x); scale is a number (no recompilation) or a tensor that broadcasts.

    Source: scale * torch.nn.functional.mish(x).

        mish_scale(x, 0.5)
    """
    return scale * mish(x)


@fused("prelu_bias")
def _prelu_bias(x: Expr, alpha: Expr, bias: Expr) -> Expr:
    return leaky_relu(x + bias, alpha)


@fused("prelu_then_bias")
def _prelu_then_bias(x: Expr, alpha: Expr, bias: Expr) -> Expr:
    return leaky_relu(x, alpha) + bias


@public(example=lambda make: (make(ROWS, COLUMNS), make(COLUMNS), make(COLUMNS)), more=ELEMENTWISE)
def prelu_bias(x: Any, alpha: Any, bias: Any, *, bias_first: bool = True) -> Any:
    """prelu(x + bias), or prelu(x) + bias with `bias_first=False`; prelu(y) = y if y > 0 else alpha y.

    `alpha`: a number, one element, or one value per channel (dimension 1 of x), as in torch.prelu.
    `bias`: broadcasts against x: (D,) over the last dimension, (C, 1, 1) over channels of images.
    Source: torch.nn.functional.prelu.

        prelu_bias(torch.randn(8, 16), torch.full((16,), 0.25), torch.zeros(16))
    """
    shape, whole, more = shape_of(alpha) or (), shape_of(x), shape_of(bias)
    # What is no array is refused by name below, before alpha is measured by it.
    if shape and whole is not None and (more is not None or isinstance(bias, (int, float))):
        if bias_first and more is not None and more != whole:  # of the sum, which bias may make larger
            whole = broadcast_shapes([whole, more]) or whole
        channels = whole[1] if len(whole) > 1 else 1
        if not is_among(math.prod(shape), 1, channels):
            raise ValueError(f"prelu_bias: alpha must have 1 element or one for each of the {channels} "
                             f"channels (dimension 1 of x), got {tuple(shape)}")
        if math.prod(shape) == 1:
            alpha = alpha.reshape(()) if len(shape) > len(whole) else alpha
        elif len(shape) > 1 or len(whole) != 2:
            alpha = alpha.reshape((-1,) + (1,) * (len(whole) - 2))
    return (_prelu_bias if bias_first else _prelu_then_bias)(x, alpha, bias)


@pointwise
def add_mul_exp(x: Expr, y: Expr) -> Expr:
    """exp((x + y) * 2).

    Source: torch.exp((x + y) * 2).

        add_mul_exp(x, y)
    """
    return exp((x + y) * 2)


@pointwise(example=lambda make: (make(ROWS, COLUMNS), make(COLUMNS), make(COLUMNS)))
def scale_bias_sigmoid(x: Expr, w: Expr, b: Expr) -> Expr:
    """sigmoid(x * w + b).

    Source: torch.sigmoid(x * w + b).

        scale_bias_sigmoid(torch.randn(8, 512), torch.ones(512), torch.zeros(512))
    """
    return expr.sigmoid(x * w + b)


@pointwise
def add_mul_add(x: Expr, y: Expr, z: Expr, w: Expr) -> Expr:
    """(x + y) * z + w.

    Source: (x + y) * z + w.

        add_mul_add(x, y, z, w)
    """
    return (x + y) * z + w
