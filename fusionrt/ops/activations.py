"""Activations: ops of their own, parts of a user's fused functions, epilogues of other kernels.

Shapes: any. Dtypes: float16, bfloat16 (computed in float32), float32, float64. Every one has first
and second derivatives. NaN and infinities pass as in torch, and so do the derivatives at kinks.
"""

from __future__ import annotations

import math
from typing import Any

from fusionrt import expr
from fusionrt.catalogue import COLUMNS, ELEMENTWISE, ROWS, pointwise, public
from fusionrt.dispatch import Usual
from fusionrt.expr import Expr, node, normcdf, reciprocal, tanh_softplus, where
from fusionrt.fusion import fused


@pointwise
def relu(x: Expr) -> Expr:
    """max(x, 0); NaN passes, the derivative at 0 is 0.

    Source: torch.nn.functional.relu.

        relu(torch.tensor([-1.0, 2.0]))  # [0., 2.]
    """
    return expr.relu(x)


@pointwise
def leaky_relu(x: Expr, negative_slope: float = 0.01) -> Expr:
    """x if x > 0 else negative_slope * x.

    Source: torch.nn.functional.leaky_relu. `negative_slope`: a number (no recompilation) or a tensor.

        leaky_relu(torch.tensor([-1.0, 2.0]), 0.1)  # [-0.1, 2.]
    """
    return where(x > 0, x, negative_slope * where(x > 0, 0, x))  # else infinity times 0 is in the slope's


@pointwise
def elu(x: Expr, alpha: float = 1.0) -> Expr:
    """x if x > 0 else alpha * (e^x - 1).

    Source: torch.nn.functional.elu (Clevert et al. 2015).

        elu(torch.tensor([-1.0, 2.0]))  # [-0.6321, 2.]
    """
    return node("elu", x, alpha)


@fused("gelu")
def _gelu(x: Expr) -> Expr:
    return x * normcdf(x)


@public(example=lambda make: (make(ROWS, COLUMNS),), more=ELEMENTWISE,
        usual=Usual(_gelu.operator, ("x",), "approximate == 'none'"))
def gelu(x: Any, *, approximate: str = "none") -> Any:
    """x * Phi(x), with the distribution function of the standard normal: the exact (erf) form.

    `approximate`: "none", or "tanh", which is `gelu_tanh`.
    Source: torch.nn.functional.gelu (Hendrycks & Gimpel 2016).

        gelu(torch.tensor([-1.0, 2.0]))  # [-0.1587, 1.9545]
    """
    return gelu_tanh(x) if is_tanh("gelu", approximate) else _gelu(x)


@pointwise
def gelu_tanh(x: Expr) -> Expr:
    """0.5 x (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3), computed as x * sigmoid(2 u).

    Source: torch.nn.functional.gelu(approximate="tanh"). At most 4.8e-4 from `gelu`.

        gelu_tanh(torch.tensor([-1.0, 2.0]))  # [-0.1588, 1.9546]
    """
    slope = 2 * math.sqrt(2 / math.pi)
    return x * expr.sigmoid(x * (slope + 0.044715 * slope * (x * x)))


@pointwise
def silu(x: Expr) -> Expr:
    """x * sigmoid(x), also called swish.

    Source: torch.nn.functional.silu.

        silu(torch.tensor([-1.0, 2.0]))  # [-0.2689, 1.7616]
    """
    return x * expr.sigmoid(x)


@pointwise
def sigmoid(x: Expr) -> Expr:
    """1 / (1 + e^-x).

    Source: torch.sigmoid.

        sigmoid(torch.tensor([0.0]))  # [0.5]
    """
    return expr.sigmoid(x)


@pointwise
def tanh(x: Expr) -> Expr:
    """The hyperbolic tangent.

    Source: torch.tanh.

        tanh(torch.tensor([0.0]))  # [0.]
    """
    return expr.tanh(x)


@pointwise
def mish(x: Expr) -> Expr:
    """x * tanh(log(1 + e^x)).

    Source: torch.nn.functional.mish (Misra 2019).

        mish(torch.tensor([-1.0, 2.0]))  # [-0.3034, 1.9440]
    """
    return x * tanh_softplus(x)


@pointwise
def softplus(x: Expr, beta: float = 1.0, threshold: float = 20.0) -> Expr:
    """log(1 + e^(beta x)) / beta, and x itself where beta x > threshold.

    Source: torch.nn.functional.softplus.

        softplus(torch.tensor([0.0]))  # [0.6931]
    """
    return where(x * beta > threshold, x, expr.softplus(x * beta) * reciprocal(beta))


@pointwise
def hardswish(x: Expr) -> Expr:
    """x * min(max(x + 3, 0), 6) / 6; the derivative is 0 at -3 and 1 at 3, as in torch 2.8 and later.

    Source: torch.nn.functional.hardswish (Howard et al. 2019).

        hardswish(torch.tensor([-1.0, 2.0]))  # [-0.3333, 1.6667]
    """
    return x * where(x <= -3, 0, where(x >= 3, 1, (x + 3) * (1 / 6)))


@pointwise
def hardsigmoid(x: Expr) -> Expr:
    """min(max(x + 3, 0), 6) / 6; the derivative at -3, 3 and NaN is 0.

    Source: torch.nn.functional.hardsigmoid.

        hardsigmoid(torch.tensor([-1.0, 2.0]))  # [0.3333, 0.8333]
    """
    return (node("hardtanh", x, -3, 3) + 3) * (1 / 6)


@pointwise
def relu6(x: Expr) -> Expr:
    """min(max(x, 0), 6); the derivative at 0, 6 and NaN is 0.

    Source: torch.nn.functional.relu6.

        relu6(torch.tensor([-1.0, 7.0]))  # [0., 6.]
    """
    return node("hardtanh", x, 0, 6)


@pointwise
def relu_squared(x: Expr) -> Expr:
    """max(x, 0)^2.

    Source: Primer (So et al. 2021); torch.relu(x).square().

        relu_squared(torch.tensor([-1.0, 3.0]))  # [0., 9.]
    """
    positive = expr.relu(x)
    return positive * positive


def is_tanh(op: str, approximate: str) -> bool:
    """Which form of GELU: torch's two names for them, and an error for any other."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"{op}: approximate must be 'none' or 'tanh', got {approximate!r}")
    return approximate == "tanh"
