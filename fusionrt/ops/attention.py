"""Attention: softmax(q k^T scale) v and what models add to it, by whichever kernel is fastest for the call.

Dense, causal and masked attention goes to torch's fused kernels (`attention_path` says to which); windows,
ALiBi and softcap of 16-bit types to kernels of our own on Hopper; gradients of masks and what torch would
compute with all scores in memory to chunks. Memory is O(S) beside the operands, or a chunk of scores.
Queries that may attend to no key have a result of zeros, and gradients of zeros, on every way.

Shapes: q (B, H, S, D), k (B, H, T, D), v (B, H, T, E), the result (B, H, S, E), where an op names no others.
Dtypes: float16, bfloat16, float32, float64, the same for q, k and v. Raises TypeError or ValueError, with the
name of the argument, for what does not fit.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fusionrt import autocast
from fusionrt.arguments import as_count, as_float, as_int, is_int
from fusionrt.array import check_floating
from fusionrt.catalogue import COLUMNS, ROWS, Make, public
from fusionrt.dtypes import FLOATS
from fusionrt.layout import broadcast_shapes, is_among
from fusionrt.ops.attention_chunks import Options, attention_in_chunks
from fusionrt.ops.attention_path import Run, attend, nothing_attended, sites
from fusionrt.ops.dropout import scale_of_kept
from fusionrt.ops.softmax import softmax

Tensor = torch.Tensor
# Types of options of which each object stays what it is. (No set: Dynamo of torch 2.6 finds no types in one.)
FIXED = (bool, int, float, type(None))
Window = int | tuple[int | None, int | None] | None


# -- checks ----------------------------------------------------------------------------------------

def _check_operands(op: str, q: Any, k: Any, v: Any, shapes: str) -> None:
    """Types, dtypes, devices and ranks."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_floating(op, name, t)
        if t.dim() != q.dim() or t.dim() != shapes.count(",") + 1:
            raise ValueError(f"{op}: {name} must have the shape {shapes}, got {tuple(t.shape)}")
        if t.dtype != q.dtype or t.device != q.device:
            raise TypeError(f"{op}: {name} must have q's dtype and device, {q.dtype} on {q.device}, got "
                            f"{t.dtype} on {t.device}")
    if q.device.type not in ("cuda", "cpu", "meta"):
        raise ValueError(f"{op}: q must be on a CUDA device or the CPU, got {q.device}")


def _check_shapes(op: str, q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool | None) -> None:
    """`enable_gqa`: None of ops that have no such argument."""
    batch, heads, _, dim = q.shape
    if k.shape[0] != batch or k.shape[3] != dim or v.shape[:3] != k.shape[:3] or dim == 0:
        raise ValueError(f"{op}: q, k and v must have shapes (B, H, S, D), (B, heads, T, D) and (B, heads, "
                         f"T, any), got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}")
    if k.shape[1] == heads:
        return
    if not enable_gqa:
        unless = "" if enable_gqa is None else "unless enable_gqa, "
        raise ValueError(f"{op}: k and v must have as many heads as q, {heads}, {unless}got {k.shape[1]}")
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(f"{op}: the heads of q must be a multiple of those of k and v, got {heads} and "
                         f"{k.shape[1]}")


def _checked_mask(op: str, mask: Any, q: Tensor, keys: int) -> Tensor | None:
    """Of four dimensions."""
    if mask is None:
        return None
    _check_mask(op, mask, q, keys)
    found: Tensor = mask if mask.dim() == 4 else mask[(None,) * (4 - mask.dim())]
    return found


def _check_mask(op: str, mask: Any, q: Tensor, keys: int) -> None:
    """Of scores (..., S, T)."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{op}: mask must be a tensor or an array, got {type(mask).__name__}")
    if mask.dtype != torch.bool and mask.dtype not in FLOATS:
        raise TypeError(f"{op}: mask must be boolean (True lets a score pass) or floating-point (added to "
                        f"the scores), got {mask.dtype}")
    full = (*q.shape[:-1], keys)
    if mask.dim() > len(full) or any(not is_among(n, 1, size) for n, size in zip(
            mask.shape, full[len(full) - mask.dim():], strict=True)):
        raise ValueError(f"{op}: mask must broadcast to the shape of scores, {full}, got {tuple(mask.shape)}")
    if mask.device != q.device:
        raise ValueError(f"{op}: mask must be on q's device, {q.device}, got {mask.device}")


def _checked_slopes(op: str, slopes: Any, q: Tensor) -> Tensor | None:
    """Of shape (B or 1, H)."""
    if slopes is None:
        return None
    if not isinstance(slopes, Tensor) or not slopes.is_floating_point():
        got = slopes.dtype if isinstance(slopes, Tensor) else type(slopes).__name__
        raise TypeError(f"{op}: alibi_slopes must be a floating-point tensor or array, got {got}")
    batch, heads = q.shape[:2]
    if not is_among(tuple(slopes.shape), (heads,), (1, heads), (batch, heads)):
        raise ValueError(f"{op}: alibi_slopes must have the shape {(heads,)} or {(batch, heads)}, got "
                         f"{tuple(slopes.shape)}")
    if slopes.device != q.device:
        raise ValueError(f"{op}: alibi_slopes must be on q's device, {q.device}, got {slopes.device}")
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: alibi_slopes gets no gradient here: detach it")
    return slopes if slopes.dim() == 2 else slopes.unsqueeze(0)


def _sides(op: str, window: Window, causal: bool) -> tuple[int, int]:
    """Keys on the left and on the right of a query; -1: all."""
    if window is None:
        left, right = None, None
    elif is_int(window) and window > 0:
        left = right = window - 1
    elif isinstance(window, tuple) and len(window) == 2 and all(
            side is None or (is_int(side) and side >= 0) for side in window):
        left, right = window
    else:
        raise ValueError(f"{op}: window must be a positive number of keys or two numbers of keys, on the "
                         f"left and on the right, or None for all, got {window!r}")
    right = 0 if causal else right
    return -1 if left is None else left, -1 if right is None else right


def options_of(op: str, q: Tensor, keys: int, causal: bool, scale: float | None, dropout_p: float,
               training: bool, window: Window, has_slopes: bool, softcap: float | None) -> Options:
    if softcap is not None and not 0 < (softcap := _number(op, "softcap", softcap)) < math.inf:
        raise ValueError(f"{op}: softcap must be positive and finite, or None, got {softcap!r}")
    dropped = scale_of_kept(op, dropout_p, training, "dropout_p") is not None
    left, right = _sides(op, window, causal)
    rows = q.shape[2]
    offset = keys - rows if window is not None or has_slopes else 0
    if left >= rows + offset - 1:  # the last query sees the first key
        left = -1
    if right >= keys - offset - 1:
        right = -1
    return Options(_scale(op, q, scale), left, right, offset, float(softcap or 0.0),
                   float(dropout_p) if dropped else 0.0, 0)


def _scale(op: str, q: Tensor, scale: float | None) -> float:
    return max(1, q.shape[-1]) ** -0.5 if scale is None else _number(op, "scale", scale)


def _number(op: str, name: str, value: Any) -> float:
    learns = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
    if learns or (isinstance(value, Tensor) and value.numel() != 1):
        raise TypeError(f"{op}: {name} must be a number or a tensor of one that requires no gradient, got a "
                        f"tensor of shape {tuple(value.shape)}{' that does' if value.requires_grad else ''}")
    return as_float(op, name, value)


def _is_fixed(asked: tuple[Any, ...]) -> bool:
    """Whether options say the same in the next call: what a tensor or an array holds may be another number
    then."""
    return all(type(option) in FIXED or isinstance(option, float)  # NumPy's as well
               or (type(option) is tuple and all(type(o) in FIXED for o in option)) for option in asked)


# -- attention -------------------------------------------------------------------------------------

def _example(make: Make) -> tuple[Any, ...]:
    return make(1, 8, ROWS, 64), make(1, 8, ROWS, 64), make(1, 8, ROWS, 64)


@public(example=_example, asks=(sites, "q k v"), arrays="q k v mask alibi_slopes")
def attention(q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None, scale: float | None = None,
              dropout_p: float = 0.0, training: bool = True, enable_gqa: bool = False, window: Window = None,
              alibi_slopes: Any = None, softcap: float | None = None) -> Any:
    """dropout(softmax(softcap(q k^T scale) + mask + alibi)) v, of shape (B, H, S, E), E the width of v.

    q: (B, H, S, D); k: (B, H, T, D), v: (B, H, T, E), of q's floating dtype, with any strides; of one head
    all may be without H. `enable_gqa`: k and v may have fewer heads, of which H is a multiple: consecutive
    query heads share one. scale: 1 / sqrt(D) unless given. mask: boolean, True where a score passes, or
    floating-point, added to the scores; it broadcasts to (B, H, S, T). Where it is False or -inf a key is as
    if it were not there, unless it or its value is NaN or infinite: what is multiplied by 0 then shows.
    `dropout_p`: in [0, 1], of no effect without `training`.

    causal: query i attends to keys up to i, as in torch, also where S is not T (`softmax` aligns the last
    ones). window: an int, so many keys
    nearest to the query on either side, itself among them (with `causal`: on the left); or a tuple of numbers
    of keys to the left and to the right, besides itself, None for all. alibi_slopes: (H,) or (B, H): adds
    -slope |i - j|. With either of these two the last query stands at the last key, that is query i at the
    position i + T - S, for causality too. softcap: c tanh(x / c) in the place of scores x, before all that.

    A query without a key that it may attend to gives zeros, and gradients of zeros; so does one of NaN where
    torch's kernel for a CPU is used, that is without mask, window, ALiBi and softcap. Gradients of q, k, v
    and of a floating-point mask; none of alibi_slopes, no second ones. Under autocast operands are cast as
    torch casts those of its own. Where torch's kernel is used, its random numbers are, and its backward pass
    may add in another order each time; `torch.use_deterministic_algorithms` is heeded.
    Source: F.scaled_dot_product_attention.

        attention(q, k, v, causal=True)
        attention(q, k, v, causal=True, window=4096, enable_gqa=True)
    """
    op, asked = "attention", (causal, scale, dropout_p, training, enable_gqa, window, softcap)
    run = _known(q, k, v, mask, alibi_slopes, asked)
    if run is not None:
        return run(q, k, v)
    if all(isinstance(t, Tensor) and t.dim() == 3 for t in (q, k, v)):  # of one head
        mask = mask.unsqueeze(1) if isinstance(mask, Tensor) and mask.dim() == 3 else mask
        return attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), causal=causal, mask=mask,
                         scale=scale, dropout_p=dropout_p, training=training, window=window,
                         alibi_slopes=alibi_slopes, softcap=softcap).squeeze(1)
    _check_operands(op, q, k, v, "(B, H, S, D)")
    return _attention(op, q, k, v, mask, alibi_slopes, asked)


def _known(q: Any, k: Any, v: Any, mask: Any, alibi_slopes: Any, asked: tuple[Any, ...]) -> Run | None:
    """The way of calls like this one, if there were any."""
    if torch.compiler.is_dynamo_compiling() or mask is not None or alibi_slopes is not None:
        return None
    return sites.find(asked, (q, k, v)) if _is_fixed(asked) else None


def _attention(op: str, q: Tensor, k: Tensor, v: Tensor, mask: Any, alibi_slopes: Any, asked: tuple[Any, ...]
               ) -> Tensor:
    """Of four dimensions; `asked`: the other options of `attention`, in its order."""
    causal, scale, dropout_p, training, enable_gqa, window, softcap = asked
    _check_shapes(op, q, k, v, enable_gqa)
    keys = k.shape[2]
    mask, slopes = _checked_mask(op, mask, q, keys), _checked_slopes(op, alibi_slopes, q)
    options = options_of(op, q, keys, causal, scale, dropout_p, training, window, slopes is not None, softcap)
    cast, k, v, mask = autocast.cast(q, k, v, mask)
    return attend(cast, k, v, mask, slopes, options, asked if cast is q and _is_fixed(asked) else None)


def _example_of_rows(make: Make) -> tuple[Any, ...]:
    return make(1, ROWS, 512), make(1, ROWS, 512), make(1, ROWS, 512), 8


@public(example=_example_of_rows, arrays="q k v mask alibi_slopes")
def multihead_attention(q: Any, k: Any, v: Any, num_heads: int, *, causal: bool = False, mask: Any = None,
                        scale: float | None = None, dropout_p: float = 0.0, training: bool = True,
                        enable_gqa: bool = False, window: Window = None, alibi_slopes: Any = None,
                        softcap: float | None = None) -> Any:
    """`attention` of heads that lie side by side: q (B, S, E) is `num_heads` of them.

    k: (B, T, E), v: (B, T, F), of as many heads; the result: (B, S, F). With `enable_gqa` k and v may have
    fewer heads of the same widths, and the result has num_heads of v's. The heads are views, and merged
    without a copy as a rule. Everything else as in `attention`, which has no second derivatives either.

        multihead_attention(x @ wq, x @ wk, x @ wv, 16, causal=True)
    """
    op = "multihead_attention"
    _check_operands(op, q, k, v, "(B, S, E)")
    dim = _dim_of_heads(op, q, k, v, num_heads)
    kv_heads = k.shape[2] // dim
    q, k, v = (t.unflatten(2, (n, -1)).transpose(1, 2)
               for t, n in ((q, num_heads), (k, kv_heads), (v, kv_heads)))
    asked = causal, scale, dropout_p, training, enable_gqa, window, softcap
    run = _known(q, k, v, mask, alibi_slopes, asked)
    out = _attention(op, q, k, v, mask, alibi_slopes, asked) if run is None else run(q, k, v)
    return out.transpose(1, 2).flatten(2)


def _dim_of_heads(op: str, q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> int:
    width = q.shape[2]
    if as_int(op, "num_heads", num_heads) < 1 or width % num_heads or not width:
        raise ValueError(f"{op}: num_heads must divide the width of q, {width}, got {num_heads}")
    dim = width // num_heads
    if k.shape[:2] != v.shape[:2] or k.shape[0] != q.shape[0]:
        raise ValueError(f"{op}: q, k and v must have shapes (B, S, E), (B, T, E) and (B, T, F), got "
                         f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}")
    if not k.shape[2] or k.shape[2] % dim or v.shape[2] % (k.shape[2] // dim):
        raise ValueError(f"{op}: k must be whole heads of {dim} columns, and v as many heads, got widths "
                         f"{k.shape[2]} and {v.shape[2]}")
    return dim


# -- its parts -------------------------------------------------------------------------------------

def _product_example(make: Make) -> tuple[Any, ...]:
    return make(8, ROWS, 64), make(8, COLUMNS, 64)


@public(example=_product_example, arrays="q k")
def attention_score(q: Any, k: Any, scale: float | None = None) -> Any:
    """q k^T scale: (..., S, D) and (..., T, D) to (..., S, T); scale is 1 / sqrt(D) unless given.

    One matrix product, torch's, that scales as it writes. Source: q @ k.mT * scale.

        attention_score(torch.randn(2, 8, 128, 64), torch.randn(2, 8, 256, 64))
    """
    op = "attention_score"
    _check_products(op, q, k)
    return _scores(q, k, _scale(op, q, scale))


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    q, k = autocast.cast(q, k)
    rows = [t.flatten(0, -3) if t.dim() > 2 else t.unsqueeze(0) for t in (q, k)]
    nothing = q.new_empty(1, 1, 1)
    found = torch.baddbmm(nothing, rows[0], rows[1].mT, beta=0, alpha=scale)
    return found.view(*q.shape[:-1], k.shape[-2])


def _check_products(op: str, q: Any, k: Any) -> None:
    _check_factors(op, ("q", q), ("k", k))
    if q.dim() < 2 or k.dim() != q.dim() or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{op}: q and k must have shapes (..., S, D) and (..., T, D), got {tuple(q.shape)} "
                         f"and {tuple(k.shape)}")


def _check_factors(op: str, *named: tuple[str, Any]) -> None:
    """Of a matrix product."""
    (of_first, first), *_ = named
    for name, t in named:
        check_floating(op, name, t)
        if t.device != first.device or (t.dtype != first.dtype and not autocast.is_on(t.device)):
            raise TypeError(f"{op}: {name} must have the dtype and device of {of_first}, {first.dtype} on "
                            f"{first.device}, got {t.dtype} on {t.device}")


@public(example=_product_example, arrays="q k mask")
def attention_score_softmax(q: Any, k: Any, scale: float | None = None, mask: Any = None) -> Any:
    """softmax(q k^T scale + mask): a matrix product and one kernel. Arguments as in `attention_score`.

    mask: as in `softmax`; rows that a boolean one lets nothing pass of are zeros.

        attention_score_softmax(torch.randn(2, 8, 128, 64), torch.randn(2, 8, 256, 64))
    """
    op = "attention_score_softmax"
    _check_products(op, q, k)
    if mask is not None:
        _check_mask(op, mask, q, k.shape[-2])
    return softmax(_scores(q, k, _scale(op, q, scale)), mask=mask)


@public(example=lambda make: (make(8, ROWS, COLUMNS), make(8, COLUMNS, 64)), arrays="weights v")
def attention_apply(weights: Any, v: Any) -> Any:
    """weights v: (..., S, T) and (..., T, D) to (..., S, D): one matrix product, torch's.

    Source: weights @ v.

        attention_apply(attention_score_softmax(q, k), v)
    """
    op = "attention_apply"
    _check_factors(op, ("weights", weights), ("v", v))
    if weights.dim() < 2 or v.dim() < 2 or weights.shape[-1] != v.shape[-2] or (
            broadcast_shapes([weights.shape[:-2], v.shape[:-2]]) is None):
        raise ValueError(f"{op}: weights and v must have shapes (..., S, T) and (..., T, D), got "
                         f"{tuple(weights.shape)} and {tuple(v.shape)}")
    return weights @ v


# -- on a CPU --------------------------------------------------------------------------------------

@public(example=_example, arrays="q k v mask")
def cpu_fused_attention(q: Any, k: Any, v: Any, mask: Any = None, scale: float | None = None) -> Any:
    """softmax(q k^T scale) v on a CPU, keys of which mask == 0 left out: two products and one kernel.

    q, k, v: (B, H, S, D), (B, H, T, D), (B, H, T, E). mask: of any dtype, broadcasts to (B, H, S, T). All
    scores are in memory at once; see `optimized_cpu_attention`. Queries without a key are zeros. No second
    derivatives.

        cpu_fused_attention(q, k, v, mask)
    """
    return _on_cpu("cpu_fused_attention", q, k, v, mask, scale, None)


@public(example=_example, arrays="q k v mask")
def optimized_cpu_attention(q: Any, k: Any, v: Any, chunk_size: int = 64, mask: Any = None,
                            scale: float | None = None) -> Any:
    """cpu_fused_attention with the scores of `chunk_size` queries in memory at a time, also for gradients.

    No second derivatives either.

        optimized_cpu_attention(q, k, v, chunk_size=128)
    """
    op = "optimized_cpu_attention"
    return _on_cpu(op, q, k, v, mask, scale, as_count(op, "chunk_size", chunk_size, 1))


def _on_cpu(op: str, q: Any, k: Any, v: Any, mask: Any, scale: float | None, chunk_size: int | None) -> Any:
    _check_operands(op, q, k, v, "(B, H, S, D)")
    if q.device.type == "cuda":
        raise TypeError(f"{op}: q must be a CPU tensor, got one on {q.device}; see fusionrt.attention")
    _check_shapes(op, q, k, v, None)
    passed = mask if not isinstance(mask, Tensor) or mask.dtype == torch.bool else mask != 0
    passed = _checked_mask(op, passed, q, k.shape[2])
    if not q.numel() or not v.numel():
        return nothing_attended(q, k, v)
    chunk = q.shape[2] if chunk_size is None else chunk_size
    options = Options(_scale(op, q, scale), -1, -1, 0, 0.0, 0.0, chunk)
    return attention_in_chunks(q, k, v, passed, None, options)
