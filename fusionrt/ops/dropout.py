"""Dropout, fused with what stands before and after it.

An element is dropped with probability p and kept ones are scaled by 1 / (1 - p). The mask is
recomputed in the backward pass from torch's generator's state and never stored; the same
`torch.manual_seed` gives the same mask on a GPU and on a CPU. p is taken to the nearest 2^-16, the scale
of p as it is given, as torch's: the mean of what is kept is off by 2^-17 / (1 - p) at most, which is little
until p is within a thousandth of 1.
With `training=False` or p = 0 nothing is dropped; p = 1 gives zeros. What is dropped is 0 whatever it was:
torch multiplies with 0, which leaves NaN of NaN and of infinities. Under torch.compile the numbers are drawn
by an op of torch's own: the same seed gives other masks there, the same ones in each run.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from fusionrt.catalogue import COLUMNS, ELEMENTWISE, ROWS, public
from fusionrt.dispatch import Usual
from fusionrt.expr import Expr, where
from fusionrt.fusion import Fused, dropped, fused
from fusionrt.ops.activations import gelu, gelu_tanh, is_tanh, relu


@fused("gelu_dropout")
def _gelu_dropout(x: Expr, p: float, scale: float) -> Expr:
    return dropped(gelu(x), p, scale)


@fused("gelu_tanh_dropout")
def _gelu_tanh_dropout(x: Expr, p: float, scale: float) -> Expr:
    return dropped(gelu_tanh(x), p, scale)


@fused("relu_dropout")
def _relu_dropout(x: Expr, p: float, scale: float) -> Expr:
    return dropped(relu(x), p, scale)


@fused("dropout_add")
def _dropout_add(x: Expr, residual: Expr, p: float, scale: float) -> Expr:
    return dropped(x, p, scale) + residual


@fused("add")
def _add(x: Expr, residual: Expr) -> Expr:
    return x + residual


@fused("bias_dropout_add")
def _bias_dropout_add(x: Expr, bias: Expr, residual: Expr, p: float, scale: float) -> Expr:
    return dropped(x + bias, p, scale) + residual


@fused("bias_add_add")
def _bias_add_add(x: Expr, bias: Expr, residual: Expr) -> Expr:
    return x + bias + residual


def scale_of_kept(op: str, p: Any, training: bool, argument: str = "p") -> Any:
    """1 / (1 - p), or None when nothing is dropped. Of a traced value in a fused function too."""
    if not isinstance(training, (bool, np.bool_)):  # the text "False" is true
        raise TypeError(f"{op}: training must be True or False, got {training!r}")
    if isinstance(p, Expr):
        return where(p < 1, 1 / (1 - where(p < 1, p, 0)), 0) if training else None
    if not isinstance(p, (int, float)):
        if not isinstance(p, numbers.Real):
            raise TypeError(f"{op}: {argument} must be a number, got {type(p).__name__}")
        p = float(p)
    if not 0 <= p <= 1:
        raise ValueError(f"{op}: {argument} must be a probability in [0, 1], got {p!r}")
    if not training or p == 0:
        return None
    return 0.0 if p == 1 else 1 / (1 - p)


def _usual(fused: Fused, *tensors: str, condition: str = "training is True") -> Usual:
    return Usual(fused.operator, (*tensors, "p", "1 / (1 - p)"), f"0 < p < 1 and {condition}")


@public(example=lambda make: (make(ROWS, COLUMNS),),
        usual=_usual(_gelu_dropout, "x", condition="training is True and approximate == 'none'"),
        more=ELEMENTWISE)
def gelu_dropout(x: Any, p: float = 0.5, training: bool = True, *, approximate: str = "none") -> Any:
    """dropout(gelu(x), p).

    `approximate`: "none" (erf) or "tanh". Source: F.dropout(F.gelu(x), p, training).
    `p`: from 0 to 1.

        gelu_dropout(torch.randn(8, 512), 0.1)
    """
    tanh = is_tanh("gelu_dropout", approximate)
    scale = scale_of_kept("gelu_dropout", p, training)
    if scale is None:
        return gelu_tanh(x) if tanh else gelu(x)
    return (_gelu_tanh_dropout if tanh else _gelu_dropout)(x, p, scale)


@public(example=lambda make: (make(ROWS, COLUMNS),), usual=_usual(_relu_dropout, "x"), more=ELEMENTWISE)
def relu_dropout(x: Any, p: float = 0.5, training: bool = True) -> Any:
    """dropout(relu(x), p).

    Source: F.dropout(F.relu(x), p, training). `p`: from 0 to 1.

        relu_dropout(torch.randn(8, 512), 0.1)
    """
    scale = scale_of_kept("relu_dropout", p, training)
    return relu(x) if scale is None else _relu_dropout(x, p, scale)


@public(example=lambda make: (make(ROWS, COLUMNS), make(ROWS, COLUMNS)),
        usual=_usual(_dropout_add, "x", "residual"), more=ELEMENTWISE)
def dropout_add(x: Any, residual: Any, p: float = 0.5, training: bool = True) -> Any:
    """dropout(x, p) + residual.

    Source: F.dropout(x, p, training) + residual. `p`: from 0 to 1.

        dropout_add(torch.randn(8, 512), torch.randn(8, 512), 0.1)
    """
    scale = scale_of_kept("dropout_add", p, training)
    return _add(x, residual) if scale is None else _dropout_add(x, residual, p, scale)


@public(example=lambda make: (make(ROWS, COLUMNS), make(COLUMNS), make(ROWS, COLUMNS)),
        usual=_usual(_bias_dropout_add, "x", "bias", "residual"), more=ELEMENTWISE)
def bias_dropout_add(x: Any, bias: Any, residual: Any, p: float = 0.5, training: bool = True) -> Any:
    """dropout(x + bias, p) + residual; x and residual of shape (..., D), bias (D,).

    Source: F.dropout(x + bias, p, training) + residual. `p`: from 0 to 1.

        bias_dropout_add(torch.randn(8, 512), torch.zeros(512), torch.randn(8, 512), 0.1)
    """
    scale = scale_of_kept("bias_dropout_add", p, training)
    if scale is None:
        return _bias_add_add(x, bias, residual)
    return _bias_dropout_add(x, bias, residual, p, scale)
