"""Rolling windows along a dimension: sum, mean, extremes, variance, in O(n) whatever the window.

Partial results of neighbouring ranges are joined and nothing is taken away again, so that a NaN or an
infinity touches the windows that contain it and no other, and data far from 0 keep their variance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fusionrt.arguments import as_dim, as_float, as_int, is_int
from fusionrt.array import check_dense, is_foreign, to_torch
from fusionrt.data import window_cpu, window_gpu
from fusionrt.data.window_extreme import scatter
from fusionrt.data.window_rows import Request, Tensor, like, walkable
from fusionrt.dtypes import FLOATS
from fusionrt.rehearsal import device_type
from fusionrt.structured import Gradient, StructuredOp
from fusionrt.watching import transforms_active

OPS = ("sum", "mean", "min", "max", "var", "std")
PADDINGS = ("valid", "same", "causal")
LONGEST = 2**30   # positions are 32-bit numbers


def sliding_window(x: Any, window: int, op: str = "mean", *, dim: int = -1, stride: int = 1,
                   padding: str | tuple[int, int] = "valid", min_periods: int = 1, correction: float = 1
                   ) -> Any:
    """The `op` of every `window` neighbouring elements along `dim`.

    `op`: "sum", "mean", "min", "max", "var" or "std"; the last two divide by the number of elements less
    `correction`, as torch.var. Result i is of `window` elements from i * stride - left on, where
    `padding` is (left, right), each from 0 to window - 1: how far windows may reach over the ends of a row.

        "valid"    (0, 0)                          n - window + 1 results, as Tensor.unfold
        "same"     ((window - 1) // 2, window // 2)    n results, aligned as torch's convolutions
        "causal"   (window - 1, 0)                 n results, from elements up to their own place

    Nothing is filled in beyond the ends: a window there has fewer elements, and with fewer than
    `min_periods` the result is NaN. pandas' rolling(w) is padding="causal", min_periods=w; with center=True
    the padding is (w // 2, (w - 1) // 2). Elements that are NaN do count, and make a result NaN.

    x: any shape and layout; float16, bfloat16 (arithmetic in float32), float32 (sums and moments in float64)
    and float64; the result has x's dtype and order of dimensions. Torch, CuPy and NumPy arrays.
    Gradients of any order; that of an extreme goes to the first of equal elements, as in max_pool, and
    deterministically. Dimensions that do not collapse to (outer, dim, inner) are copied first.
    Raises TypeError for other dtypes, IndexError for a `dim` that x has not, ValueError for other misfits.
    Source: x.unfold(dim, window, stride).mean(-1) ...

        sliding_window(torch.randn(8, 1000), 24, "std", padding="causal", min_periods=2)
    """
    if is_foreign(x):
        tensor, restore = to_torch(x, "sliding_window", "x")
        return restore(sliding_window(tensor, window, op, dim=dim, stride=stride, padding=padding,
                                      min_periods=min_periods, correction=correction))
    dim = _checked(x, window, op, dim, stride, min_periods)
    left, right = _padding(window, padding)
    correction = as_float("sliding_window", "correction", correction)
    if not math.isfinite(correction):
        raise ValueError(f"sliding_window: correction must be finite, got {correction}")
    request = Request(op, window, stride, left, right, min_periods, correction)
    n = x.shape[dim]
    if n and request.dense(n) < 1:
        raise ValueError(f"sliding_window: window must be at most {n + left + right}, dim {dim} with its "
                         f"padding, got {window}")
    # Whether a gradient will be needed is not to be seen from within a transform.
    if op in ("min", "max") and torch.is_grad_enabled() and (x.requires_grad or transforms_active()):
        return _extreme(x, dim, *request)[0]
    return _values(x, dim, *request)


def _checked(x: Any, window: int, op: str, dim: int, stride: int, min_periods: int) -> int:
    if not isinstance(x, Tensor):
        raise TypeError(f"sliding_window: x must be a tensor or an array, got {type(x).__name__}")
    check_dense("sliding_window", "x", x)
    if x.dtype not in FLOATS:
        raise TypeError(f"sliding_window: x must be of a floating dtype ({', '.join(map(str, FLOATS))}), "
                        f"got {x.dtype}: cast it first")
    if op not in OPS:
        raise ValueError(f"sliding_window: op must be one of {', '.join(OPS)}, got {op!r}")
    as_dim("sliding_window", dim, x.dim())
    for name, value in (("window", window), ("stride", stride), ("min_periods", min_periods)):
        least = 0 if name == "min_periods" else 1
        if as_int("sliding_window", name, value) < least:
            raise ValueError(f"sliding_window: {name} must be at least {least}, got {value}")
    if stride >= 2**63:
        raise ValueError(f"sliding_window: stride must be less than 2**63, got {stride}")
    if min_periods > window:
        raise ValueError(f"sliding_window: min_periods must be at most window, {window}, got {min_periods}")
    if x.shape[dim] + 2 * window > LONGEST:
        raise ValueError(f"sliding_window: x.shape[dim] + 2 * window must be at most 2**30, got "
                         f"{x.shape[dim]} and {window}")
    return dim % x.dim()


def _padding(window: int, padding: str | Sequence[int]) -> tuple[int, int]:
    if isinstance(padding, str):
        if padding not in PADDINGS:
            raise ValueError(f"sliding_window: padding must be one of {', '.join(PADDINGS)} or "
                             f"(left, right), got {padding!r}")
        return {"valid": (0, 0), "same": ((window - 1) // 2, window // 2), "causal": (window - 1, 0)}[padding]
    pair: tuple[Any, ...] = tuple(padding) if isinstance(padding, Sequence) else ()
    if len(pair) != 2 or not all(is_int(p) and 0 <= p < window for p in pair):
        raise ValueError(f"sliding_window: padding must be two ints from 0 to window - 1, {window - 1}, "
                         f"got {padding!r}")
    return pair[0], pair[1]


# -- forward ---------------------------------------------------------------------------------------

def _run(x: Tensor, dim: int, request: Request, indexed: bool) -> tuple[Tensor, Tensor | None]:
    x, rows = walkable(x, dim)
    size = request.results(rows.n)
    out = like(x, dim, size)
    index = like(x, dim, size, torch.int32) if indexed else None
    if out.numel():
        roll = window_cpu.roll if device_type(x) == "cpu" else window_gpu.roll
        roll(request, x, rows, out, index)
    return out, index


def _of_one(x: Tensor, dim: int, request: Request) -> Tensor:
    """Windows of one element."""
    picked = x[(slice(None),) * dim + (slice(None, None, request.stride),)]
    if request.op in ("var", "std"):  # 0 / 0 is NaN, and so are infinities
        picked = (picked - picked) / max(0.0, 1 - request.correction)
    return like(walkable(x, dim)[0], dim, picked.shape[dim]).copy_(picked)


def _run_values(x: Tensor, dim: int, *request: Any) -> Tensor:
    wanted = Request(*request)
    return _of_one(x, dim, wanted) if wanted.window == 1 else _run(x, dim, wanted, False)[0]


def _run_extreme(x: Tensor, dim: int, *request: Any) -> tuple[Tensor, Tensor]:
    wanted = Request(*request)
    if wanted.window == 1:
        values = _of_one(x, dim, wanted)
        places = torch.arange(0, x.shape[dim], wanted.stride, dtype=torch.int32, device=x.device)
        shape = [-1 if d == dim else 1 for d in range(x.dim())]
        return values, torch.empty_like(values, dtype=torch.int32).copy_(places.view(shape))
    values, index = _run(x, dim, wanted, True)
    assert index is not None
    return values, index


def _fake(x: Tensor, dim: int, *request: Any) -> Tensor:
    x, rows = walkable(x, dim)
    return like(x, dim, Request(*request).results(rows.n))


def _fake_extreme(x: Tensor, dim: int, *request: Any) -> tuple[Tensor, Tensor]:
    values = _fake(x, dim, *request)
    return values, torch.empty_like(values, dtype=torch.int32)


# -- gradients -------------------------------------------------------------------------------------

def _along(values: Tensor, x: Tensor, dim: int) -> Tensor:
    """One for each result, to be multiplied with results."""
    return values.view([-1 if d == dim else 1 for d in range(x.dim())])


def _spread(grad: Tensor, dim: int, n: int, request: Request) -> Tensor:
    """The gradient of a sum: the rolling sum of the incoming one, with the padding turned round."""
    dense, last = request.dense(n), request.window - 1
    if request.stride != 1:
        shape = [dense if d == dim else s for d, s in enumerate(grad.shape)]
        grad = torch.slice_scatter(grad.new_zeros(shape), grad, dim, 0, None, request.stride)
    turned = Request("sum", request.window, 1, last - request.left, last - request.right, 0, 0.0)
    return _values(grad, dim, *turned)


def _sized(x: Tensor, dim: int) -> Tensor:
    """Nothing, of as many rows as x has elements along dim: a size that is kept."""
    return x.new_empty(x.shape[dim], 0)


def _save(args: Sequence[Any], out: Any) -> Sequence[Tensor | None]:
    x, op = args[0], args[2]
    return x if op in ("var", "std") else None, out if op == "std" else None, _sized(x, args[1])


def _backward(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any], needed: Sequence[bool]
              ) -> Sequence[Any]:
    (x, out, row), dim, request, grad = saved, args[1], Request(*args[2:]), grads[0]
    assert request.op not in ("min", "max"), "theirs is that of `_extreme`"
    n = row.shape[0]
    counts = request.counts(n, grad.device)
    if request.min_periods > 1:
        grad = grad.masked_fill(_along(counts < request.min_periods, grad, dim), 0)
    if request.op in ("var", "std"):
        result = _moments_backward(x, out, grad, counts, dim, request)
    else:
        divisor = _along(counts, grad, dim).to(grad.dtype) if request.op == "mean" else 1
        result = _spread(grad / divisor, dim, n, request)
    return result, *(None,) * (len(args) - 1)


def _moments_backward(x: Tensor, out: Tensor | None, grad: Tensor, counts: Tensor, dim: int, request: Request
                      ) -> Tensor:
    """Sum over windows i of h_i (x_j - mean_i), as x_j sum(h) - sum(h mean), hence in a wider dtype."""
    wide = torch.float64 if x.dtype in (torch.float32, torch.float64) else torch.float32
    x, grad, dtype = x.to(wide), grad.to(wide), x.dtype
    pivot = x.detach().mean(dim, keepdim=True)
    x = x - torch.where(pivot.isfinite(), pivot, 0)
    freedom = (_along(counts, grad, dim).to(wide) - request.correction).clamp(min=0)
    # Of windows that are too short, or of which nobody wants one, there is none.
    none = _along(counts < request.min_periods, grad, dim) | (grad == 0)
    if out is None:
        h = (2 * grad / freedom).masked_fill(none, 0)
    else:  # as torch, no gradient where nothing varies
        h = (grad / (out.to(wide) * freedom)).masked_fill((out == 0) | none, 0)
    # NaN times 0 is NaN.
    mean = _values(x, dim, *request._replace(op="mean", min_periods=0)).masked_fill(none, 0)
    n = x.shape[dim]
    x = x.masked_fill(_spread((~none).to(wide), dim, n, request) == 0, 0)
    return (x * _spread(h, dim, n, request) - _spread(h * mean, dim, n, request)).to(dtype)


def _save_extreme(args: Sequence[Any], out: Any) -> Sequence[Tensor | None]:
    return out[1], _sized(args[0], args[1])


def _extreme_backward(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any], needed: Sequence[bool]
                      ) -> Sequence[Any]:
    index, row = saved
    return scatter(grads[0], index, args[1], row.shape[0]), *(None,) * (len(args) - 1)


_SCHEMA = "int dim, str op, int window, int stride, int left, int right, int min_periods, float correction"
_values = StructuredOp(f"sliding_window(Tensor x, {_SCHEMA}) -> Tensor", _run_values, _fake,
                       Gradient(_save, _backward))
_extreme = StructuredOp(f"sliding_extreme(Tensor x, {_SCHEMA}) -> (Tensor, Tensor)", _run_extreme,
                        _fake_extreme, Gradient(_save_extreme, _extreme_backward))
