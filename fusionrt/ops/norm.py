"""Layer norm and RMS norm over the last dimensions, with what stands before and after them.

Before: dropout and a residual, whose sum is what is normalised; it is computed in float32 (float64 for
doubles), and where it is asked for rounded to the results' dtype first, as torch does. After: weight, bias,
and an epilogue: an activation's name, or any function of a traced value.
Everything is one kernel, and another one for the gradients.

Shapes: any x whose last dimensions are `normalized_shape`, or weight's, and results as x. Dtypes: float16,
bfloat16 (computed in float32), float32, float64; results have x's, or that of a wider residual, whatever that
of the weight. Raises TypeError or ValueError, with the name of the argument, for what does not fit.

Mean and rstd (1 / sqrt(variance + eps)) are float32, float64 for doubles, with size 1 in place
of the normalised dimensions. Every tensor has first and second derivatives; dropout's mask is computed
anew in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch

from fusionrt.activation import Activation, resolve
from fusionrt.arguments import as_int, is_int
from fusionrt.catalogue import COLUMNS, ROWS, Make, public
from fusionrt.expr import Expr
from fusionrt.fusion import dropped
from fusionrt.ops.activations import gelu, gelu_tanh, is_tanh, relu
from fusionrt.ops.dropout import scale_of_kept
from fusionrt.row_fusion import Epilogue, Run, finished, like_sum, per_call, row_operator, way_of
from fusionrt.rowwise import rms_scale, standardize
from fusionrt.sites import Sites
from fusionrt.watching import is_recorded, seen_by_torch

EPS = {True: torch.finfo(torch.float64).eps, False: torch.finfo(torch.float32).eps}


# -- what the kernels compute ----------------------------------------------------------------------

@per_call
def _operator(op: str, present: tuple[bool, ...], row_dims: int, norm: str, epilogue: Epilogue,
              with_sum: bool, with_stats: bool, like: str) -> Run:
    """The kernel of an op; `present`: which of weight, bias, residual and dropout there are; `norm`: "layer",
    "rms", or "rms of 1 +", with weights that are their difference from 1; `like`: whose dtype results
    have."""
    *tensors, dropout = present

    def expression(x: Expr, eps: float, weight: Any = None, bias: Any = None, residual: Any = None,
                   p: float = 0, scale: float = 1) -> tuple[Any, ...]:
        total = dropped(x, p, scale) if dropout else x
        total = total if residual is None else total + residual
        y, *stats = standardize(total, eps) if norm == "layer" else rms_scale(total, eps)
        y = y if weight is None else y * (weight + 1 if norm == "rms of 1 +" else weight)
        y = y if bias is None else y + bias
        return finished(y, epilogue), *([total] if with_sum else []), *(stats if with_stats else [])

    names = [name for name, there in zip(("weight", "bias", "residual"), tensors, strict=True) if there]
    params = ("x", *names, "eps", *(("p", "scale") if dropout else ()))
    return row_operator(expression, params, name=op, row_dims=row_dims, like=like)


TENSORS = "x", "weight", "bias", "residual"
sites = Sites()


def _norm(op: str, x: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float,
          norm: str = "layer", residual: Any = None, dropout_p: float = 0.0, training: bool = True,
          epilogue: Activation = None, return_sum: bool = False, return_stats: bool = False) -> Any:
    epilogue = None if epilogue is None else resolve(op, epilogue, "epilogue")
    if hasattr(normalized_shape, "shape") and not is_int(normalized_shape):
        if weight is not None:
            raise ValueError(f"{op}: normalized_shape must be numbers where a weight is given, got a tensor")
        normalized_shape, weight = normalized_shape.shape, normalized_shape
    is_one = not isinstance(normalized_shape, (tuple, list))
    shape = (normalized_shape,) if is_one else tuple(normalized_shape)
    tensors, key = (x, weight, bias, residual), None
    if not torch.compiler.is_dynamo_compiling():  # which warns of caches
        types = tuple(map(type, shape))  # a number equal to a size is not enough
        kind = (op, shape, types, norm, training, epilogue, return_sum, return_stats)
        key = (*kind, eps, dropout_p) if sites.are_as_before(kind, eps, dropout_p) else None
        run = key and sites.find(key, tensors)
        if run is not None:
            return run(*tensors)
    for size in shape:
        if type(size) is not int:
            as_int(op, "normalized_shape", size)
    if not _fit(x, shape, weight, bias, residual) or (return_sum and residual is None):
        raise _misfit(op, x, shape, weight, bias, residual)
    scale = scale_of_kept(op, dropout_p, training, "dropout_p") if dropout_p else None
    numbers = (eps,) if scale is None else (eps, dropout_p, scale)
    recorded = is_recorded(*tensors)
    present = weight is not None, bias is not None, residual is not None, scale is not None
    run = _operator(op, present, len(shape), norm, epilogue, return_sum, return_stats or recorded,
                    like_sum(x, residual))
    args = (*[t for t in tensors if t is not None], *numbers)
    if key is not None and not seen_by_torch(*tensors):
        told = None if return_stats or not recorded else 2 if return_sum else 1
        return sites.keep(key, tensors, way_of(run, args, TENSORS, (True, *present[:3]), told))(*tensors)
    out = run(*args)
    if return_stats or not recorded:
        return out
    return out[:2] if return_sum else out[0]


def _fit(x: Any, shape: tuple[int, ...], weight: Any, bias: Any, residual: Any) -> bool:
    whole = getattr(x, "shape", ())
    return (len(shape) > 0 and whole[-len(shape):] == shape
            and (weight is None or getattr(weight, "shape", None) == shape)
            and (bias is None or getattr(bias, "shape", None) == shape)
            and (residual is None or getattr(residual, "shape", None) == whole))


def _misfit(op: str, x: Any, shape: tuple[int, ...], weight: Any, bias: Any, residual: Any) -> Exception:
    whole = getattr(x, "shape", None)
    if whole is None:
        return TypeError(f"{op}: x must be a tensor or an array, got {type(x).__name__}")
    if not shape or tuple(whole[-len(shape):]) != shape:
        return ValueError(f"{op}: normalized_shape must be the last dimensions of x, got {shape} for x of "
                          f"shape {tuple(whole)}")
    for name, value, wanted in (("weight", weight, shape), ("bias", bias, shape),
                                ("residual", residual, whole)):
        needed = value is not None or (name == "residual" and op in ("add_norm", "add_rms_norm"))
        if needed and getattr(value, "shape", None) != wanted:
            came = f"shape {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__
            return ValueError(f"{op}: {name} must be a tensor of shape {tuple(wanted)}, got {came}")
    return ValueError(f"{op}: return_sum needs a residual")


def _eps(x: Any, eps: float | None) -> float:
    """As torch's rms_norm takes it: of the arithmetic's type."""
    return EPS[str(getattr(x, "dtype", "")).endswith("float64")] if eps is None else eps


def _rms(op: str, weight_offset: int) -> str:
    if weight_offset not in (0, 1):
        raise ValueError(f"{op}: weight_offset must be 0 or 1, got {weight_offset!r}")
    return "rms of 1 +" if weight_offset else "rms"


# -- norms -----------------------------------------------------------------------------------------

def _typical(make: Make) -> tuple[Any, ...]:
    weight = make(COLUMNS)
    return make(ROWS, COLUMNS), tuple(weight.shape), weight, make(COLUMNS)


@public(example=_typical, asks=(sites, "x weight bias residual"))
def layer_norm(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *,
               residual: Any = None, dropout_p: float = 0.0, training: bool = True,
               epilogue: Activation = None, return_sum: bool = False, return_stats: bool = False) -> Any:
    """epilogue((s - mean(s)) / sqrt(var(s) + eps) * weight + bias) of s = dropout(x, dropout_p) + residual.

    x: (..., *normalized_shape); `normalized_shape`: an int, ints, or the weight itself; weight, bias: that
    shape; residual: x's. The variance is biased. Source: torch.nn.functional.layer_norm (Ba et al. 2016).
    With `return_sum` the result is (y, s), y of s as it is rounded; with `return_stats` mean and rstd follow.
    `epilogue`: the name of an activation of the catalogue, a module or a function of torch's that it has, or
    a function of one traced value, as `fuse` takes them. Define that once, outside of a loop: it is called
    once, and numbers that it captures are what they were then.
    `dropout_p`: from 0 to 1, of no effect without `training`.

        layer_norm(x, (512,), weight, bias, epilogue=fusionrt.relu)
        y, hidden = layer_norm(x, 512, weight, bias, residual=hidden, return_sum=True)
    """
    return _norm("layer_norm", x, normalized_shape, weight, bias, eps, "layer", residual, dropout_p, training,
                 epilogue, return_sum, return_stats)


@public(example=lambda make: _typical(make)[:3], asks=(sites, "x weight None residual"))
def rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None, *,
             weight_offset: int = 0, residual: Any = None, dropout_p: float = 0.0, training: bool = True,
             epilogue: Activation = None, return_sum: bool = False, return_stats: bool = False) -> Any:
    """epilogue(s / sqrt(mean(s^2) + eps) * (weight_offset + weight)) of s = dropout(x, dropout_p) + residual.

    Arguments as in `layer_norm`. `eps`: None is that of float32 (float64 for doubles), which torch takes.
    `weight_offset`: 1 for weights that are stored as their difference from 1 (Gemma). With `return_stats`
    rstd follows. Source: torch.nn.functional.rms_norm (Zhang & Sennrich 2019).

        rms_norm(x, weight, eps=1e-6)
        y, hidden = rms_norm(x, (512,), weight, 1e-6, residual=hidden, return_sum=True)
    """
    return _norm("rms_norm", x, normalized_shape, weight, None, _eps(x, eps), _rms("rms_norm", weight_offset),
                 residual, dropout_p, training, epilogue, return_sum, return_stats)


# -- with an activation ----------------------------------------------------------------------------

@public(example=_typical, asks=(sites, "x weight bias None"))
def layer_norm_relu(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
                    ) -> Any:
    """relu(layer_norm(x, normalized_shape, weight, bias, eps)).

    Source: torch.relu(torch.nn.functional.layer_norm(x, normalized_shape, weight, bias, eps)).

        layer_norm_relu(x, (512,), weight, bias)
    """
    return _norm("layer_norm_relu", x, normalized_shape, weight, bias, eps, epilogue=relu)


@public(example=_typical, asks=(sites, "x weight bias None"))
def layer_norm_gelu(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *,
                    approximate: str = "none") -> Any:
    """gelu(layer_norm(x, normalized_shape, weight, bias, eps)).

    `approximate`: "none" (erf) or "tanh", as in torch.
    Source: F.gelu(F.layer_norm(x, normalized_shape, weight, bias, eps), approximate=approximate).

        layer_norm_gelu(x, (512,), weight, bias)
    """
    activation = gelu_tanh if is_tanh("layer_norm_gelu", approximate) else gelu
    return _norm("layer_norm_gelu", x, normalized_shape, weight, bias, eps, epilogue=activation)


@public(example=lambda make: (make(ROWS, COLUMNS), make(COLUMNS)), asks=(sites, "x weight None None"))
def rms_norm_gelu(x: Any, weight: Any, eps: float | None = None, *, weight_offset: int = 0,
                  approximate: str = "none") -> Any:
    """gelu(rms_norm(x, weight, eps=eps)): over the last dimensions, those that the weight has.

    `approximate`: "none" (erf) or "tanh".
    Source: F.gelu(F.rms_norm(x, weight.shape, weight, eps), approximate=approximate).

        rms_norm_gelu(x, weight, 1e-6)
    """
    activation = gelu_tanh if is_tanh("rms_norm_gelu", approximate) else gelu
    if not hasattr(weight, "shape"):
        raise TypeError(f"rms_norm_gelu: weight must be a tensor or an array, got {type(weight).__name__}")
    return _norm("rms_norm_gelu", x, weight, None, None, _eps(x, eps), _rms("rms_norm_gelu", weight_offset),
                 epilogue=activation)


# -- with a residual -------------------------------------------------------------------------------

def _with_residual(make: Make) -> tuple[Any, ...]:
    return make(ROWS, COLUMNS), make(ROWS, COLUMNS), make(COLUMNS), make(COLUMNS)


def _shape(x: Any, weight: Any) -> Any:
    """The weight's, or the last dimension's."""
    return getattr(weight, "shape", getattr(x, "shape", (0,))[-1:])


@public(example=_with_residual, asks=(sites, "x weight bias residual"))
def add_norm(x: Any, residual: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *,
             epilogue: Activation = None) -> Any:
    """(layer_norm(s, weight.shape, weight, bias, eps), s) of s = x + residual: a pre-norm block's step.

    Arguments as in `layer_norm`; over the last dimensions, those that the weight has, or the last one.
    `add_rms_norm` is the other norm.
    Source: s = x + residual; torch.nn.functional.layer_norm(s, weight.shape, weight, bias, eps), s.

        y, hidden = add_norm(x, hidden, weight, bias)
    """
    return _norm("add_norm", x, _shape(x, weight), weight, bias, eps, "layer", residual, epilogue=epilogue,
                 return_sum=True)


@public(example=lambda make: _with_residual(make)[:3], asks=(sites, "x weight None residual"))
def add_rms_norm(x: Any, residual: Any, weight: Any = None, eps: float | None = None, *,
                 weight_offset: int = 0, epilogue: Activation = None) -> Any:
    """(rms_norm(s, weight.shape, weight, eps), s) of s = x + residual: a pre-norm block's step.

    Arguments as in `rms_norm`; over the last dimensions, those that the weight has, or the last one.
    Source: s = x + residual; torch.nn.functional.rms_norm(s, weight.shape, weight, eps), s.

        y, hidden = add_rms_norm(x, hidden, weight, 1e-6)
    """
    return _norm("add_rms_norm", x, _shape(x, weight), weight, None, _eps(x, eps),
                 _rms("add_rms_norm", weight_offset), residual, epilogue=epilogue, return_sum=True)


@public(example=_with_residual, asks=(sites, "x weight bias residual"))
def dropout_add_layer_norm(x: Any, residual: Any, weight: Any = None, bias: Any = None, p: float = 0.5,
                           training: bool = True, *, eps: float = 1e-5, return_sum: bool = False) -> Any:
    """layer_norm(s, weight.shape, weight, bias, eps) of s = dropout(x, p, training) + residual.

    With `return_sum` the result is (y, s). The dropout mask is drawn from torch's generator,
    and computed anew in the backward pass. `p`: from 0 to 1.
    Source: F.layer_norm(F.dropout(x, p, training) + residual, weight.shape, weight, bias, eps).

        dropout_add_layer_norm(x, residual, weight, bias, 0.1)
    """
    scale_of_kept("dropout_add_layer_norm", p, training)
    return _norm("dropout_add_layer_norm", x, _shape(x, weight), weight, bias, eps, "layer", residual, p,
                 training, return_sum=return_sum)
