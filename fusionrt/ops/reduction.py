"""Reductions: sums, means, maxima and what is built of them, of any function of the elements.

Over any dimensions: the last ones are one kernel over rows; others, and a few long rows, are one pass over
memory in its own order and a small second kernel. float16 and bfloat16 are accumulated in float32 and
rounded once. No atomics: two calls give the same bits. Gradients of any order; that of a plain sum is
its incoming gradient, expanded.

Shapes: any x; `dim` is None (all dimensions), an int or several (one for argmax and argmin), negative ones
counting from the end. The result has x's shape without these, or with 1 in their place (`keepdim`). Dtypes:
float16 and bfloat16 (added up in float32), float32, float64; sum, amax, amin, argmax and argmin leave
integers and truth values to kernels of torch's. Raises TypeError for other dtypes or what is no dimension,
IndexError for a dimension that x has not, ValueError for one named twice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fusionrt.activation import Activation, resolve
from fusionrt.arguments import as_dim, as_float, check_float_dtype, is_int
from fusionrt.catalogue import COLUMNS, ROWS, Make, public
from fusionrt.dtypes import as_torchs, rounds
from fusionrt.expr import Expr, cast, log, maximum, node, pow_, row_mean, row_sum, where
from fusionrt.expr import abs_ as absolute
from fusionrt.rehearsal import device_type
from fusionrt.row_fusion import Run, once, one_value, per_call, row_operator, way_of
from fusionrt.rowwise import row_first, row_max, softmax_terms
from fusionrt.sites import Sites
from fusionrt.watching import is_watched, seen_by_torch

Dim = int | tuple[int, ...] | list[int] | None
Map = Callable[[Any], Any] | None
Dtype = Any  # None, torch's, NumPy's or a name
_OF_INTEGERS: dict[str, Run] = {"sum": torch.sum, "amax": torch.amax, "amin": torch.amin,
                                "argmax": torch.argmax, "argmin": torch.argmin}
INDICES_HELD = 1 << 20  # indices of longer rows are made anew for each call
EXACT_IN_FLOAT = 1 << 24
LONGEST = 1 << 31       # row of which a GPU's kernels find positions
OPS = ("sum", "mean", "max", "min")


# -- what the kernels compute ----------------------------------------------------------------------


def _moments(x: Expr, correction: Any) -> tuple[Expr, Expr]:
    mean = node("moment_mean", x)
    size = node("row_size", "row_size")
    return node("moment_squares", x, mean) / maximum(size - correction, 0), mean


def _deviation(x: Expr, correction: Any) -> tuple[Expr, ...]:
    var, mean = _moments(x, correction)
    deviation = node("norm_sqrt", var)
    return deviation, deviation, mean


def _norm(x: Expr) -> tuple[Expr, ...]:
    norm = node("norm_sqrt", row_sum(x * x))
    return norm, norm


def _norm_of_powers(x: Expr, p: Any) -> tuple[Expr, ...]:
    """Whose derivative is 0 at 0, and where the norm is: powers are of 1 there, as a choice afterwards has
    derivatives of 0 times infinity."""
    is_zero = x == 0
    total = row_sum(where(is_zero, where(p < 0, math.inf, 0), pow_(where(is_zero, 1, absolute(x)), p)))
    nothing = total == 0
    return where(nothing, where(p < 0, math.inf, 0), pow_(where(nothing, 1, total), 1 / p)), total


def _logsumexp(x: Expr) -> tuple[Expr, ...]:
    most, total = softmax_terms(x)
    return where(most == math.inf, most, most + log(total)), most, total


def _first(x: Expr) -> tuple[Expr, ...]:
    """The index of the first NaN, or else of the first maximum."""
    return (cast(row_first(x), "int64"),)


def _first_of(x: Expr, index: Expr) -> tuple[Expr, ...]:
    """The same for a CPU, which finds only values, by means of all indices."""
    # Less than any. Trap: beside -inf LLVM makes the maximum conditional, and does not vectorise it.
    return (cast(-row_max(where((x == row_max(x)) | (x != x), -index, -2.0**53)), "int64"),)


# Each gives its result and, after it, the values that its gradient would have to find again.
_EXPRESSIONS: dict[str, Callable[..., Any]] = {
    "sum": lambda x: (row_sum(x),),
    "mean": lambda x: (row_mean(x),),
    "max": lambda x: (row_max(x), row_max(x)),
    "min": lambda x: (-row_max(-x), row_max(-x)),
    "var": _moments,
    "std": _deviation,
    "norm": _norm,
    "norm of powers": _norm_of_powers,
    "norm of reciprocals": _norm_of_powers,  # the same, of negative powers
    "logsumexp": _logsumexp,
    "argmax": _first,
    "argmin": lambda x: _first(-x),
    "argmax of indices": _first_of,
    "argmin of indices": lambda x, index: _first_of(-x, index),
}
# What some take beside x.
_SECOND = {"var": "correction", "std": "correction", "norm of powers": "p", "norm of reciprocals": "p",
           "argmax of indices": "index", "argmin of indices": "index"}
# Of no elements. Maxima have no such value.
_OF_NOTHING = {
    "sum": 0.0,
    "mean": math.nan,
    "var": math.nan,
    "std": math.nan,
    "norm": 0.0,
    "norm of powers": 0.0,
    "logsumexp": -math.inf,
}


@per_call
def _operator(name: str, kind: str, map: Map, row_dims: int, recorded: bool, dtype: Dtype, rounded: bool
              ) -> Run:
    """`recorded`: with the values that the gradient reads; `rounded`: x is, to the result's dtype."""

    def mapped(x: Expr) -> Any:
        x = cast(x, dtype) if rounded else x
        return x if map is None else one_value(once(map, x, "map"), "map")

    def expression(x: Expr, correction: float = 1.0, p: float = 2.0, index: Any = None) -> tuple[Expr, ...]:
        given = {"correction": correction, "p": p, "index": index}
        found = _EXPRESSIONS[kind](mapped(x), *[given[name] for name in second])
        return tuple(found) if recorded else tuple(found[:1])

    second = (_SECOND[kind],) if kind in _SECOND else ()
    return row_operator(
        expression,
        ("x", *second),
        name=name,
        row_dims=row_dims,
        rounded=frozenset({0}),
        double_on_cpu=kind in ("var", "std"),
        dtype=dtype,
    )


# -- dimensions ------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    reduced: tuple[int, ...]
    order: tuple[int, ...] | None  # of dimensions, that the reduced ones may be the last
    shape: tuple[int, ...]         # of the result
    elements: int                  # of which each value of it is made


def _layout(op: str, shape: tuple[int, ...], dim: Any, keepdim: bool) -> _Layout:
    n_dims = len(shape)
    given = dim if isinstance(dim, tuple) else () if dim is None else (dim,)
    dims = given or tuple(range(n_dims))
    for d in dims:
        if not is_int(d):
            raise TypeError(f"{op}: dim must be None, an int or ints, got {dim!r}")
        as_dim(op, d, n_dims)
    # Found by comparing: numbers of a closure are variables to Dynamo, and these are constants.
    reduced = tuple(d for d in range(n_dims) if any(d == other % n_dims for other in dims))
    if len(reduced) < len(dims):
        raise ValueError(f"{op}: dim names a dimension twice, got {dim}")
    kept = tuple(d for d in range(n_dims) if d not in reduced)
    order = (*kept, *reduced)
    sizes = [1 if d in reduced else shape[d] for d in (range(n_dims) if keepdim else kept)]
    return _Layout(reduced, None if order == tuple(range(n_dims)) else order, tuple(sizes),
                   math.prod([shape[d] for d in reduced]))


sites = Sites()


def _reduce(op: str, kind: str, x: Any, dim: Dim, keepdim: bool, map: Map = None,
            more: tuple[Any, ...] = (), dtype: Dtype = None) -> Any:
    """`more`: the numbers that the kind takes beside x."""
    dtype = as_torchs(dtype)
    if not (compiling := torch.compiler.is_dynamo_compiling()):  # which warns of caches
        run = sites.find(_key(op, kind, dim, keepdim, map, more, dtype), (x,))
        if run is not None:
            return run(x)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: x must be a tensor or an array, got {type(x).__name__}")
    of_integers = op in _OF_INTEGERS and not (x.is_floating_point() or x.is_complex())
    if not of_integers:
        check_float_dtype(op, dtype)
    if not x.dim():
        _layout(op, (1,), dim, False)
        return _reduce(op, kind, x.reshape(1), None, False, map, more, dtype)
    dims: Any = tuple(dim) if isinstance(dim, list) else dim
    layout = _layout(op, x.shape, dims, keepdim)
    if not layout.elements and not (of_integers and op == "sum"):
        return _of_nothing(op, kind, x if dtype is None else x.to(dtype), layout.reduced, keepdim)
    if of_integers:
        run = _of_integers(op, layout.reduced, keepdim, dtype)
    elif kind in ("argmax", "argmin") and layout.elements > LONGEST and device_type(x) != "cpu":
        return _of_parts(op, x, layout.reduced[0], keepdim)
    else:
        run = _run(op, kind, x, layout, map, more, dtype)
    return run(x) if compiling else sites.keep(_key(op, kind, dims, keepdim, map, more, dtype), (x,), run)(x)


def _key(op: str, kind: str, dim: Dim, *more: Any) -> tuple[Any, ...]:
    """With the types of numbers, as 1.0, which is refused, and True equal 1."""
    return op, kind, dim, tuple(map(type, dim)) if isinstance(dim, tuple) else type(dim), *more


def _run(op: str, kind: str, x: torch.Tensor, layout: _Layout, map: Map, more: tuple[Any, ...],
         dtype: Dtype) -> Run:
    # A maximum of the elements themselves is as exact in x's dtype.
    recorded = x.requires_grad and torch.is_grad_enabled() and not (kind == "max" and map is None)
    if kind in ("argmax", "argmin"):
        recorded = False
        if device_type(x) == "cpu":
            kind, more = f"{kind} of indices", (_indices(layout.elements, x.device),)
    dtype = None if dtype == x.dtype else dtype
    operator = _operator(op, kind, map, len(layout.reduced), recorded, dtype,
                         dtype is not None and rounds(x.dtype, dtype))
    order, shape = layout.order, layout.shape
    if order is None and not seen_by_torch(x):
        whole = (*x.shape[:x.dim() - len(layout.reduced)], *(1 for _ in layout.reduced))
        return way_of(operator, (x, *more), ("x",), (True,),
                      1 if len(operator.operator.outputs) > 1 else None, None if whole == shape else shape)

    def run(x: torch.Tensor) -> torch.Tensor:
        out = operator(x if order is None else x.permute(order), *more)
        result: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return result if result.shape == shape else result.view(shape)

    return run


def _of_integers(op: str, reduced: tuple[int, ...], keepdim: bool, dtype: Dtype) -> Run:
    function = _OF_INTEGERS[op]
    if op in ("argmax", "argmin"):  # which torch does not find among truth values
        return lambda x: function(x.view(torch.uint8) if x.dtype == torch.bool else x, reduced[0], keepdim)
    options = {} if dtype is None else {"dtype": dtype}
    return lambda x: function(x, reduced, keepdim, **options)


def _of_parts(op: str, x: torch.Tensor, dim: int, keepdim: bool) -> torch.Tensor:
    """The index of the first maximum or minimum of rows whose positions a kernel does not hold."""
    parts = x.split(LONGEST, dim)
    found = [_reduce(op, op, part, dim, True) for part in parts]
    tops = torch.stack([part.gather(dim, index) for part, index in zip(parts, found, strict=True)])
    best = (tops.argmax if op == "argmax" else tops.argmin)(0, keepdim=True)
    indices = torch.stack([index + k * LONGEST for k, index in enumerate(found)])
    index = indices.gather(0, best)[0]
    return index if keepdim else index.squeeze(dim)


def _of_nothing(op: str, kind: str, x: torch.Tensor, reduced: tuple[int, ...], keepdim: bool) -> torch.Tensor:
    if kind not in _OF_NOTHING:
        raise IndexError(
            f"{op}: a dimension that is reduced must not be empty, got x of shape {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise TypeError(f"{op}: x must be a floating-point tensor, got one of {x.dtype}")
    return x.sum(reduced, keepdim) + _OF_NOTHING[kind]


def _indices(n: int, device: torch.device) -> torch.Tensor:
    held = n <= INDICES_HELD and not is_watched()  # who watches has tensors of its own made
    return (_held_indices if held else _new_indices)(n, device)


def _new_indices(n: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(n, dtype=torch.int32 if n <= EXACT_IN_FLOAT else torch.float64, device=device)


_held_indices = functools.lru_cache(64)(_new_indices)


# -- ops -------------------------------------------------------------------------------------------


def _matrix(make: Make) -> tuple[Any, ...]:
    return make(ROWS, COLUMNS), -1


@public(example=_matrix, asks=(sites, "x"), arrays="x")
def row_reduce(x: Any, dim: Dim = None, map: Activation = None, op: str = "sum", keepdim: bool = False
               ) -> Any:
    """`op` of map(x) over `dim`: "sum", "mean", "max" or "min" of any function of the elements, in one pass.

    `map`: a function of one traced value, as `fuse` takes them, or a fused function; define it once, outside
    of a loop. Or a name such as "relu", or a module or function of torch's, as for an `epilogue`. The result
    has x's dtype. Elements that share a maximum share its gradient. Of no elements a sum is 0, a mean NaN,
    and a maximum an IndexError. Source: torch.sum(map(x), dim, keepdim), torch.amax.

        row_reduce(x, (0, 2), fusionrt.relu, "max")
        def cubed(v): return abs(v) ** 3
        row_reduce(x, -1, cubed)                                # the sum of |x|^3 along rows
    """
    if op not in OPS:
        raise ValueError(f"row_reduce: op must be one of {', '.join(OPS)}, got {op!r}")
    function = None if map is None else resolve("row_reduce", map, "map")
    return _reduce("row_reduce", op, x, dim, keepdim, function)


def _square(x: Expr) -> Expr:
    return x * x


@public(example=_matrix, asks=(sites, "x"), arrays="x")
def sum_squared(x: Any, dim: Dim = None, keepdim: bool = False) -> Any:
    """The sum of x^2 over `dim`.

    Source: x.square().sum(dim, keepdim).

        sum_squared(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), -1)  # [5., 25.]
    """
    return _reduce("sum_squared", "sum", x, dim, keepdim, _square)


@public(example=_matrix, asks=(sites, "x"), arrays="x")
def mean_abs(x: Any, dim: Dim = None, keepdim: bool = False) -> Any:
    """The mean of |x| over `dim`; the derivative at 0 is 0. Of no elements it is NaN.

    Source: x.abs().mean(dim, keepdim).

        mean_abs(torch.tensor([[1.0, -2.0], [3.0, -4.0]]), -1)  # [1.5, 3.5]
    """
    return _reduce("mean_abs", "mean", x, dim, keepdim, absolute)


@public(example=_matrix, asks=(sites, "x"), arrays="x")
def sum(x: Any, dim: Dim = None, keepdim: bool = False, *, dtype: Dtype = None) -> Any:
    """The sum of x over `dim`.

    `dtype`: x is taken as of that dtype, without a copy, and the result has it; None: x's, and int64 of
    integers and truth values. Source: torch.sum.

        sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 0)  # [4., 6.]
    """
    return _reduce("sum", "sum", x, dim, keepdim, None, (), dtype)


@public(example=_matrix, asks=(sites, "x"), arrays="x")
def mean(x: Any, dim: Dim = None, keepdim: bool = False, *, dtype: Dtype = None) -> Any:
    """The mean of x over `dim`; NaN of no elements.

    `dtype`: as in `sum`. Source: torch.mean.

        mean(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 0)  # [2., 3.]
    """
    return _reduce("mean", "mean", x, dim, keepdim, None, (), dtype)


@public(example=_matrix, asks=(sites, "x"), arrays="x")
def amax(x: Any, dim: Dim = None, keepdim: bool = False) -> Any:
    """The maximum of x over `dim`; NaN where there is one. Equal maxima share the gradient evenly.

    Of no elements it is an IndexError. Source: torch.amax.

        amax(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 0)  # [3., 4.]
    """
    return _reduce("amax", "max", x, dim, keepdim)


@public(example=_matrix, asks=(sites, "x"), arrays="x")
def amin(x: Any, dim: Dim = None, keepdim: bool = False) -> Any:
    """The minimum of x over `dim`; NaN where there is one. Equal minima share the gradient evenly.

    Of no elements it is an IndexError. Source: torch.amin.

        amin(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 0)  # [1., 2.]
    """
    return _reduce("amin", "min", x, dim, keepdim)


def _index_of(op: str, x: Any, dim: int | None, keepdim: bool) -> Any:
    if dim is not None and not is_int(dim):
        raise TypeError(f"{op}: dim must be None or an int, got {dim!r}")
    if dim is not None or not isinstance(x, torch.Tensor):
        return _reduce(op, op, x, dim, keepdim)
    found = _reduce(op, op, x.reshape(-1), None, False)
    return found.view([1] * x.dim()) if keepdim else found


@public(example=_matrix, arrays="x")
def argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """The index, int64, of the first maximum along `dim`, or among all elements (None).

    A NaN counts as the maximum. Of no elements it is an IndexError. Source: torch.argmax.

        argmax(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), 1)  # [1, 0]
    """
    return _index_of("argmax", x, dim, keepdim)


@public(example=_matrix, arrays="x")
def argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """The index, int64, of the first minimum along `dim`, or among all elements (None).

    A NaN counts as the minimum. Of no elements it is an IndexError. Source: torch.argmin.

        argmin(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), 1)  # [0, 1]
    """
    return _index_of("argmin", x, dim, keepdim)


def _correction(op: str, correction: float | None) -> float:
    return as_float(op, "correction", 1 if correction is None else correction)


@public(example=_matrix, asks=(sites, "x"), arrays="x")
def var(x: Any, dim: Dim = None, correction: float | None = 1, keepdim: bool = False) -> Any:
    """The variance over `dim`: the sum of (x - mean)^2 divided by (n - correction).

    `correction`: a number; None is 1, and so is True, as torch's older `unbiased` may be given in this place.
    Found in one pass, without the cancellation of a difference of sums; 0 for equal elements.
    Source: torch.var. As there, NaN or infinite where n <= correction.

        var(torch.tensor([[1.0, 3.0], [3.0, 3.0]]), -1)  # [2., 0.]
    """
    return _reduce("var", "var", x, dim, keepdim, None, (_correction("var", correction),))


@public(example=_matrix, asks=(sites, "x"), arrays="x")
def std(x: Any, dim: Dim = None, correction: float | None = 1, keepdim: bool = False) -> Any:
    """The square root of `var`; its derivative is 0 where it is 0.

    Source: torch.std.

        std(torch.tensor([[1.0, 3.0], [3.0, 3.0]]), -1)  # [1.4142, 0.]
    """
    return _reduce("std", "std", x, dim, keepdim, None, (_correction("std", correction),))


def _is_nonzero(x: Expr) -> Expr:
    return x**0 * (x != 0)  # as the other factor has a derivative, 0


_NORMS: dict[float, tuple[str, Map]] = {
    2: ("norm", None),
    1: ("sum", absolute),
    math.inf: ("max", absolute),
    -math.inf: ("min", absolute),
    0: ("sum", _is_nonzero),
}


@public(example=lambda make: (make(ROWS, COLUMNS), 2, -1), asks=(sites, "x"), arrays="x")
def norm(x: Any, p: float = 2, dim: Dim = None, keepdim: bool = False, *, dtype: Dtype = None) -> Any:
    """The vector norm over `dim`: (sum of |x|^p)^(1/p), of any real p.

    With p = inf it is the maximum of |x|, with -inf the minimum, with 0 the number of elements other than 0.
    These, 1 and 2 have kernels of their own; one serves all other numbers. The derivative is 0 where x or the
    norm is. The arguments stand as in torch.norm; `dtype`: as in `sum`. Of no elements a norm of p < 0 or
    p = inf is an IndexError. Source: torch.linalg.vector_norm.

        norm(torch.tensor([[3.0, 4.0], [6.0, 8.0]]), dim=-1)  # [5., 10.]
        norm(x, 3, -1)
    """
    if isinstance(p, bool):
        raise TypeError(f"norm: p must be a number, got {p}")
    p = as_float("norm", "p", p)
    if p != p:
        raise ValueError("norm: p must be a number, got nan")
    if p in _NORMS:
        kind, map = _NORMS[p]
        return _reduce("norm", kind, x, dim, keepdim, map, (), dtype)
    kind = "norm of reciprocals" if p < 0 else "norm of powers"
    return _reduce("norm", kind, x, dim, keepdim, None, (p,), dtype)


@public(example=_matrix, asks=(sites, "x"), arrays="x")
def logsumexp(x: Any, dim: Dim = None, keepdim: bool = False) -> Any:
    """log of the sum of e^x over `dim`, relative to the maximum; -inf of no elements.

    Source: torch.logsumexp.

        logsumexp(torch.tensor([[0.0, 0.0], [1000.0, 0.0]]), -1)  # [0.6931, 1000.]
    """
    return _reduce("logsumexp", "logsumexp", x, dim, keepdim)
