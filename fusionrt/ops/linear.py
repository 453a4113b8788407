"""Linear layers with what follows them: bias, activation, dropout, residual.

Product and bias are torch's (cuBLAS, oneDNN), in the precision that torch is set to. What follows is one
kernel of ours, which writes over the product where nobody needs that, or cuBLASLt's own epilogue; or all of
it is one kernel of ours (`linear_path`).

Shapes: x (..., K), weight (N, K), bias (N,), results (..., N). Dtypes: float16, bfloat16, float32, float64,
the same for all three; a residual may have another one, and the result then has the wider. Under autocast
they are cast as torch.nn.functional.linear casts its own. All tensors have first and second derivatives.
Raises TypeError or ValueError, with the name of the argument, for what does not fit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from fusionrt import autocast
from fusionrt.activation import by_value, finishing, resolve
from fusionrt.catalogue import COLUMNS, ROWS, Make, public
from fusionrt.dispatch import Run
from fusionrt.op import Operator
from fusionrt.ops.activations import is_tanh
from fusionrt.ops.dropout import scale_of_kept
from fusionrt.ops.linear_path import LinearActivation, Numbers, check, inferring
from fusionrt.sites import Sites
from fusionrt.watching import is_recorded, seen_by_torch

Tensor = torch.Tensor
ARRAYS = "x weight bias residual"
sites = Sites()


def _linear(op: str, x: Any, weight: Any, bias: Any, activation: Any, dropout_p: float = 0.0,
            residual: Any = None, training: bool = True) -> Any:
    tensors, key = (x, weight, bias, residual), None
    if not torch.compiler.is_dynamo_compiling():
        activation = by_value(op, activation)
        key = (op, activation, dropout_p, training)
        run = sites.find(key, tensors)
        if run is not None:
            return run(*tensors)
    check(op, ("x", x), ("weight", weight), ("bias", bias))
    if residual is not None:
        _check_residual(op, x, weight, residual)
    scale = scale_of_kept(op, dropout_p, training, "dropout_p")
    numbers = () if scale is None else (float(dropout_p), scale)
    given = (*autocast.cast(x, weight, bias), residual)
    if key is not None and not seen_by_torch(*given):
        return autocast.chosen(sites, key, given, lambda: _chosen(op, activation, numbers, *given))(*given)
    x, weight, bias, _ = given
    if activation is None and scale is None and residual is None:
        return F.linear(x, weight, bias)
    finish = finishing(op, activation, False, residual is not None, scale is not None)
    return finish(F.linear(x, weight, bias), *(() if residual is None else (residual,)), *numbers)


def _chosen(op: str, activation: Any, numbers: Numbers, x: Tensor, weight: Tensor, bias: Tensor | None,
            residual: Tensor | None) -> Run:
    """For tensors like these: a function of them."""
    if activation is None and not numbers and residual is None:
        return lambda x, weight, bias, residual: F.linear(x, weight, bias)
    resolve(op, activation)  # what cannot be a key of `finishing` has an error of its own
    finish = finishing(op, activation, False, residual is not None, bool(numbers))
    operator: Operator = finish.operator
    if not is_recorded(x, weight, bias, residual):
        return inferring(operator, numbers, x, weight, bias)
    # A sum's gradient needs no kernel, and an activation that gives integers has none.
    if (activation is not None or numbers) and operator.differentiable[0]:
        run: Run = LinearActivation(operator, numbers, x, weight, bias, residual).apply
        return run

    def composed(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Any:
        return finish(F.linear(x, weight, bias), *(() if residual is None else (residual,)), *numbers)

    return composed


def _check_residual(op: str, x: Tensor, weight: Tensor, residual: Any) -> None:
    shape = (*x.shape[:-1], weight.shape[0])
    if not isinstance(residual, Tensor):
        raise TypeError(f"{op}: residual must be a tensor or an array, got {type(residual).__name__}")
    if tuple(residual.shape) != shape:
        raise ValueError(f"{op}: residual must have the shape {shape}, got {tuple(residual.shape)}")


# -- ops -------------------------------------------------------------------------------------------

def _example(make: Make) -> tuple[Any, ...]:
    return make(ROWS, 1024), make(COLUMNS, 1024), make(COLUMNS)


@public(example=lambda make: (*_example(make), "gelu"), asks=(sites, ARRAYS), arrays=ARRAYS)
def linear_activation(x: Any, weight: Any, bias: Any = None, activation: Any = None, *,
                      dropout_p: float = 0.0, residual: Any = None, training: bool = True) -> Any:
    """residual + dropout(activation(x W^T + b), dropout_p).

    x: (..., K), weight: (N, K), bias: (N,), of one dtype; residual: (..., N). `activation`: None, the name of
    one of the catalogue ("relu", "gelu", "gelu_tanh", "silu", ...), or a function of one traced value, as
    `fuse` takes them; define it once, outside of a loop. The dropout mask is drawn from torch's
    generator, and computed anew in the backward pass.
    Source: residual + F.dropout(activation(F.linear(x, weight, bias)), dropout_p, training).

        linear_activation(x, weight, bias, "silu")
        def half_relu(y): return fusionrt.relu(y) * 0.5
        linear_activation(x, weight, bias, half_relu, dropout_p=0.1, residual=residual)
    """
    return _linear("linear_activation", x, weight, bias, activation, dropout_p, residual, training)


@public(example=_example, asks=(sites, "x weight bias None"), arrays="x weight bias")
def linear_relu(x: Any, weight: Any, bias: Any = None) -> Any:
    """relu(x W^T + b). Arguments as in `linear_activation`.

    Source: torch.relu(F.linear(x, weight, bias)). Only the result is kept for the backward pass.

        linear_relu(torch.randn(8, 64), torch.randn(32, 64), torch.zeros(32))
    """
    return _linear("linear_relu", x, weight, bias, "relu")


@public(example=_example, asks=(sites, "x weight bias None"), arrays="x weight bias")
def linear_gelu(x: Any, weight: Any, bias: Any = None, *, approximate: str = "none") -> Any:
    """gelu(x W^T + b). Arguments as in `linear_activation`.

    `approximate`: "none" (erf) or "tanh".
    Source: F.gelu(F.linear(x, weight, bias), approximate=approximate).

        linear_gelu(torch.randn(8, 64), torch.randn(32, 64), torch.zeros(32), approximate="tanh")
    """
    activation = "gelu_tanh" if is_tanh("linear_gelu", approximate) else "gelu"
    return _linear("linear_gelu", x, weight, bias, activation)


@public(example=_example, asks=(sites, "x weight bias None"), arrays="x weight bias")
def linear_relu_dropout(x: Any, weight: Any, bias: Any = None, p: float = 0.5, training: bool = True) -> Any:
    """dropout(relu(x W^T + b), p). Arguments as in `linear_activation`.

    Source: F.dropout(torch.relu(F.linear(x, weight, bias)), p, training). Only the result is kept for the
    backward pass. `p`: from 0 to 1.

        linear_relu_dropout(torch.randn(8, 64), torch.randn(32, 64), torch.zeros(32), 0.1)
    """
    scale_of_kept("linear_relu_dropout", p, training)
    return _linear("linear_relu_dropout", x, weight, bias, "relu", p, None, training)


@public(example=_example, asks=(sites, "x weight bias None"), arrays="x weight bias")
def linear_gelu_dropout(x: Any, weight: Any, bias: Any = None, p: float = 0.5, training: bool = True, *,
                        approximate: str = "none") -> Any:
    """dropout(gelu(x W^T + b), p). Arguments as in `linear_activation`.

    `approximate`: "none" (erf) or "tanh". `p`: from 0 to 1.
    Source: F.dropout(F.gelu(F.linear(x, weight, bias), approximate=approximate), p, training).

        linear_gelu_dropout(torch.randn(8, 64), torch.randn(32, 64), torch.zeros(32), 0.1)
    """
    activation = "gelu_tanh" if is_tanh("linear_gelu_dropout", approximate) else "gelu"
    scale_of_kept("linear_gelu_dropout", p, training)
    return _linear("linear_gelu_dropout", x, weight, bias, activation, p, None, training)
