"""Softmax and its logarithm along any dimension, with what attention puts before it and after it.

Before: a scale, a mask, causality; after: dropout, or any function of a traced value. One kernel, and one
for the gradient, which reads the result and not x where nothing comes after it.

Shapes: any x, and results as x. Dtypes: float16, bfloat16 (computed in float32), float32, float64; results
have x's. Every float argument has first and second derivatives. Raises TypeError or ValueError, with the name
of the argument, for what does not fit, IndexError for a dimension that x has not.

A row without any column that a boolean mask or causality lets pass is
zeros (-inf for the logarithm): such a query attends to nothing; so is one of which only scores of -inf pass.
Rows of -inf of which all may pass are NaN, as in torch.
"""

from __future__ import annotations

from typing import Any

import torch

from fusionrt import rowwise
from fusionrt.activation import Activation, resolve
from fusionrt.arguments import as_dim, check_float_dtype
from fusionrt.catalogue import COLUMNS, ROWS, public
from fusionrt.counted import integers
from fusionrt.dtypes import as_torchs, rounds
from fusionrt.expr import Expr, cast, node
from fusionrt.fusion import dropped, fused
from fusionrt.layout import is_among
from fusionrt.ops.dropout import scale_of_kept
from fusionrt.row_fusion import Epilogue, Run, finished, per_call, row_operator, way_of
from fusionrt.sites import Sites
from fusionrt.watching import is_recorded, seen_by_torch

# -- what the kernels compute ----------------------------------------------------------------------

@per_call
def _operator(op: str, scaled: str | None, masked: str | None, causal: bool, epilogue: Epilogue,
              dropout: bool, with_terms: bool, dtype: torch.dtype | None, rounded: bool) -> Run:
    """The kernel of an op. `scaled`: by a "factor" or a "number"; `masked`: by a mask that is "added" or
    says what is "passed"; `with_terms`: two values a row that spare the backward pass two reductions;
    `rounded`: x is, to the result's dtype."""

    def expression(x: Expr, factor: Any = 1, mask: Any = None, last: Any = None, number: float = 1,
                   p: float = 0, scale: float = 1) -> tuple[Any, ...]:
        x = cast(x, dtype) if rounded else x
        # Not contracted with the subtraction of the maximum, which would be of another product.
        z = node("mul_rn", x, factor if scaled == "factor" else number) if scaled else x
        z = z + mask if masked == "added" else z
        passed = mask != 0 if masked == "passed" else None
        if causal:
            up_to_last = rowwise.up_to_column(last)
            passed = up_to_last if passed is None else passed & up_to_last
        if op == "log_softmax":
            y, *terms = rowwise.log_softmax(z, passed)
        else:
            y, *terms = rowwise.softmax(z if passed is None else rowwise.above_masked(z), passed)
        y = dropped(y, p, scale) if dropout else y
        return finished(y, epilogue), *(terms if with_terms else [])

    there = {"factor": scaled == "factor", "mask": masked is not None, "last": causal,
             "number": scaled == "number", "p": dropout, "scale": dropout}
    params = ("x", *(name for name, is_there in there.items() if is_there))
    return row_operator(expression, params, name=op, uniform=("last",), dtype=dtype)


@fused("attention_dropout")
def _dropout(x: Expr, p: float, scale: float) -> Expr:
    return dropped(x, p, scale)


# -- arguments -------------------------------------------------------------------------------------

TENSORS = "x", "factor", "mask"
sites = Sites()


def _along(op: str, x: Any, dim: int, scale: Any, mask: Any, causal: bool, epilogue: Activation = None,
           p: float = 0.0, kept_scale: float | None = None, dtype: torch.dtype | None = None) -> Any:
    """The op along a dimension, which becomes the last one: strides are followed, nothing is copied."""
    epilogue, dtype = None if epilogue is None else resolve(op, epilogue, "epilogue"), as_torchs(dtype)
    key = None
    factor, number = (None, scale) if scale is None or isinstance(scale, (int, float)) else (scale, None)
    if not torch.compiler.is_dynamo_compiling():  # which warns of caches
        kind = (op, dim, type(dim), causal, epilogue, dtype)  # 1.0, which is refused, and True equal 1
        key = (*kind, number, p, kept_scale) if sites.are_as_before(kind, number, p, kept_scale) else None
        run = key and sites.find(key, (x, factor, mask))
        if run is not None:
            return run(x, factor, mask)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {_called(op)} must be a tensor or an array, got {type(x).__name__}")
    rank = x.dim()
    if rank == 0:
        return _along(op, x.view(1), dim, scale, mask, causal, epilogue, p, kept_scale, dtype).view(())
    check_float_dtype(op, dtype)
    as_dim(op, dim, rank)
    others = [_fitting(op, name, t, x) for name, t in (("scale", factor), ("mask", mask)) if t is not None]
    tensors, numbers = [x, *others], [number] if number is not None else []
    is_last = is_among(dim, -1, rank - 1)
    if not is_last:
        tensors = [_movable(t, rank).movedim(dim, -1) for t in tensors]
    tensors += [_last_columns(op, x, is_last)] if causal else []
    numbers += [] if kept_scale is None else [p, kept_scale]
    behind = epilogue is not None or kept_scale is not None
    recorded = behind and is_recorded(*tensors)
    scaled = "number" if number is not None else "factor" if factor is not None else None
    dtype = None if dtype == x.dtype else dtype
    run = _operator(op, scaled, _kind(op, mask), causal, epilogue, kept_scale is not None,
                    recorded, dtype, dtype is not None and rounds(x.dtype, dtype))
    if key is not None and is_last and not causal and not seen_by_torch(x, factor, mask):
        given, told = (True, factor is not None, mask is not None), 1 if recorded else None
        made = way_of(run, (*tensors, *numbers), TENSORS, given, told)
        return sites.keep(key, (x, factor, mask), made)(x, factor, mask)
    out = run(*tensors, *numbers)
    out = out[0] if recorded else out
    return out if is_last else out.movedim(-1, dim)


def _fitting(op: str, name: str, value: Any, x: torch.Tensor) -> torch.Tensor:
    """A tensor that broadcasts to x."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor{' or a number' if name == 'scale' else ''}, got "
                        f"{type(value).__name__}")
    if value.dim() > x.dim() or any(not is_among(n, 1, size) for n, size in zip(
            value.shape, x.shape[x.dim() - value.dim():], strict=True)):
        raise ValueError(f"{op}: {name} must broadcast to the shape of {_called(op)}, {tuple(x.shape)}, got "
                         f"{tuple(value.shape)}")
    return value


def _called(op: str) -> str:
    """What the op calls its first argument."""
    return "scores" if op == "attention_dropout" else "x"


def _movable(value: torch.Tensor, rank: int) -> torch.Tensor:
    return value[(None,) * (rank - value.dim())]


def _kind(op: str, mask: Any) -> str | None:
    if mask is None:
        return None
    dtype = str(mask.dtype)
    if dtype.endswith("bool"):
        return "passed"
    if "float" not in dtype:
        raise TypeError(f"{op}: mask must be boolean (True lets a score pass) or floating-point (added to "
                        f"the scores), got {dtype}")
    return "added"


def _last_columns(op: str, x: torch.Tensor, is_last: bool) -> torch.Tensor:
    """Of each row of the last two dimensions, the last column that causality lets pass."""
    if not is_last or x.dim() < 2:
        name = _called(op)
        raise ValueError(f"{op}: causal needs {name} of at least two dimensions and the last one as dim, got "
                         f"{name} of shape {tuple(x.shape)}" + ("" if is_last else " and another dim"))
    rows, columns = x.shape[-2:]
    return integers(columns - rows, columns, x)[:, None]


# -- ops -------------------------------------------------------------------------------------------

@public(example=lambda make: (make(ROWS, COLUMNS),), asks=(sites, "x None mask"),
        arrays="x scale mask", numbers={"scale"})
def softmax(x: Any, dim: int = -1, dtype: torch.dtype | None = None, *, scale: Any = None, mask: Any = None,
            causal: bool = False, epilogue: Activation = None) -> Any:
    """epilogue(e^z / sum(e^z)) along dim, of z = x * scale + mask.

    `scale`: a number (no recompilation) or a tensor; `mask`: floating-point, added; or boolean, True where
    a score passes; both broadcast to x. `causal`: in the last two dimensions, of R rows and C columns,
    column j of row i passes if j <= i + C - R: the last row sees all (`attention` without a window aligns the
    first row and column, as torch). `epilogue`: as in `layer_norm`. `dtype`: x is taken as of that dtype,
    without a copy, and the result has it. Source: torch.softmax.

        softmax(scores, scale=0.125, causal=True)
    """
    return _along("softmax", x, dim, scale, mask, causal, epilogue, dtype=dtype)


@public(example=lambda make: (make(ROWS, COLUMNS),), asks=(sites, "x None mask"),
        arrays="x scale mask", numbers={"scale"})
def log_softmax(x: Any, dim: int = -1, dtype: torch.dtype | None = None, *, scale: Any = None,
                mask: Any = None, causal: bool = False, epilogue: Activation = None) -> Any:
    """epilogue(z - log(sum(e^z))) along dim, of z = x * scale + mask.

    Arguments as in `softmax`; -inf where a boolean mask lets nothing pass. Source: torch.log_softmax.

        log_softmax(torch.randn(8, 512))
    """
    return _along("log_softmax", x, dim, scale, mask, causal, epilogue, dtype=dtype)


@public(example=lambda make: (make(ROWS, COLUMNS),), asks=(sites, "scores None mask"),
        arrays="scores scale mask", numbers={"scale"})
def attention_dropout(scores: Any, p: float = 0.5, training: bool = True, *, softmax: bool = True,
                      scale: Any = None, mask: Any = None, causal: bool = False) -> Any:
    """dropout(softmax(scores * scale + mask), p), over the last dimension; `softmax=False`: dropout alone.

    `scale`, `mask`, `causal`: as in `softmax`. The dropout mask is computed anew in the backward pass.
    Source: F.dropout(torch.softmax(scores, -1), p, training). `p`: from 0 to 1.

        attention_dropout(scores, 0.1, causal=True)
    """
    kept_scale = scale_of_kept("attention_dropout", p, training)
    if softmax:
        return _along("attention_dropout", scores, -1, scale, mask, causal, None, p, kept_scale)
    if scale is not None or mask is not None or causal:
        raise ValueError("attention_dropout: scale, mask and causal need softmax=True")
    if kept_scale is not None:
        return _dropout(scores, p, kept_scale)
    if not isinstance(scores, torch.Tensor):
        raise TypeError("attention_dropout: scores must be a tensor or an array, got "
                        f"{type(scores).__name__}")
    return scores
