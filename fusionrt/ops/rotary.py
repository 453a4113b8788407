"""Rotary position embedding (Su et al. 2021) of queries and keys, in one kernel.

A head's columns are rotary_dim / 2 pairs; at the position m the pair i is turned by the angle m base^(-2i /
rotary_dim). Pairs are columns i and i + rotary_dim / 2 (NeoX, LLaMA), or 2i and 2i + 1 where `interleaved`
(GPT-J). Computed in float32 (float64 for doubles), rounded once. The backward pass is the rotation by the
negative angle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fusionrt import indices
from fusionrt.arguments import as_float, as_int
from fusionrt.array import check_floating, check_writeable
from fusionrt.catalogue import ROWS, Make, public
from fusionrt.dtypes import FLOATS
from fusionrt.layout import is_among, lie_apart
from fusionrt.ops.rotary_kernels import Options, rotate_on_cpu, rotate_on_gpu
from fusionrt.rehearsal import device_type
from fusionrt.structured import Gradient, StructuredOp
from fusionrt.watching import is_watched

Tensor = torch.Tensor


# -- the op ----------------------------------------------------------------------------------------

def _rotate(tensors: Sequence[Tensor], outs: Sequence[Tensor], cos: Tensor | None, sin: Tensor | None,
            positions: Tensor | None, *more: Any) -> tuple[Tensor, ...]:
    options = Options(*more)
    if any(t.numel() for t in tensors):
        run = rotate_on_cpu if device_type(tensors[0]) == "cpu" else rotate_on_gpu
        x, y = ([t.transpose(1, 2) if options.heads_first else t for t in ts] for ts in (tensors, outs))
        run(x, y, cos, sin, positions, options)
    return tuple(outs)


def _run_one(q: Tensor, *more: Any) -> Tensor:
    return _rotate([q], [torch.empty_like(q)], *more)[0]


def _run_two(q: Tensor, k: Tensor, *more: Any) -> tuple[Tensor, ...]:
    return _rotate([q, k], [torch.empty_like(q), torch.empty_like(k)], *more)


def _save(args: Sequence[Any], out: Any) -> Sequence[Tensor | None]:
    return args[-_MORE:-_MORE + 3]


def _backward(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any], needed: Sequence[bool]
              ) -> Sequence[Any]:
    options = Options(*args[-len(Options._fields):])
    found = _rotated([g if need else None for g, need in zip(grads, needed, strict=False)],
                     *saved, *options.inverted)
    return *found, *(None for _ in range(_MORE))


def _rotated(tensors: Sequence[Tensor | None], *more: Any) -> list[Tensor | None]:
    """None stays None."""
    there = [t for t in tensors if t is not None]
    if not there:
        return list(tensors)
    if len(there) == 2 and torch.is_grad_enabled() and there[0].requires_grad != there[1].requires_grad:
        return [_one(t, *more) for t in there]  # what requires no gradient does not come to
    results = iter(_both(*there, *more) if len(there) == 2 else (_one(*there, *more),))
    return [None if t is None else next(results) for t in tensors]


_MORE = 3 + len(Options._fields)  # arguments after q and k
_ARGUMENTS = ("Tensor? cos, Tensor? sin, Tensor? position_ids, int offset, bool interleaved, int rotary_dim, "
              "bool heads_first, float base, float scaling, bool inverse")
_one = StructuredOp(f"rotary_embedding_of_one(Tensor q, {_ARGUMENTS}) -> Tensor", _run_one,
                    lambda q, *more: torch.empty_like(q), Gradient(_save, _backward))
_both = StructuredOp(f"rotary_embedding(Tensor q, Tensor k, {_ARGUMENTS}) -> (Tensor, Tensor)", _run_two,
                     lambda q, k, *more: (torch.empty_like(q), torch.empty_like(k)),
                     Gradient(_save, _backward))


class _InPlace(torch.autograd.Function):
    """Records a rotation that is yet to be done: what may not be written to torch refuses only when this has
    run."""

    @staticmethod
    def forward(ctx: Any, more: Sequence[Any], *tensors: Tensor) -> Any:
        ctx.options = Options(*more[3:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*more[:3])
        ctx.mark_dirty(*tensors)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *_rotated(grads, *ctx.saved_tensors, *ctx.options.inverted)


def _may_not_be_changed(t: Tensor) -> bool:
    base = t._base
    if base is None:
        return t.is_leaf
    meta = torch._C._autograd
    return (base.is_leaf and base.requires_grad) or meta._get_creation_meta(t) != meta.CreationMeta.DEFAULT


def _in_place(tensors: Sequence[Tensor], more: Sequence[Any]) -> None:
    """What requires no gradient, as keys that are kept, does not come to because the other one does."""
    graded = [t for t in tensors if t.requires_grad] if torch.is_grad_enabled() else []
    if not is_watched():
        for t in graded:
            if _may_not_be_changed(t):
                t.mul_(1)  # torch says why, before anything is written or recorded
    if 0 < len(graded) < len(tensors):
        for t in tensors:
            _in_place([t], more)
    elif is_watched():
        for t, rotated in zip(tensors, _rotated(tensors, *more), strict=True):
            t.copy_(rotated)  # type: ignore[arg-type]
    elif not graded:
        _rotate(tensors, tensors, *more)
        torch.autograd.graph.increment_version(tensors)
    elif len(tensors) > 1 and any(t._is_view() for t in tensors):
        for t in tensors:  # of a Function with two results torch takes no views
            _in_place([t], more)
    else:
        _InPlace.apply(more, *tensors)
        with torch.no_grad():
            _rotate(tensors, tensors, *more)


# -- what users call -------------------------------------------------------------------------------

_LAYOUTS = ("bshd", "bhsd")


def _example(make: Make) -> tuple[Any, ...]:
    return make(1, ROWS, 32, 128), make(1, ROWS, 8, 128)


@public(example=_example, arrays="q k cos sin position_ids")
def rotary_embedding(q: Any, k: Any = None, cos: Any = None, sin: Any = None, *, interleaved: bool = False,
                     offset: int = 0, position_ids: Any = None, rotary_dim: int | None = None,
                     layout: str = "bshd", inplace: bool = False, base: float = 10000.0, scaling: float = 1.0
                     ) -> Any:
    """q and k, the first `rotary_dim` columns of each head turned by angles of their positions.

    Without k the result is q alone.

    q: (B, S, H, D), k: (B, S, H_k, D) with heads of its own number (GQA), of the same floating dtype; with
    layout="bhsd" (B, H, S, D); without B as well. Strides are free; neighbouring columns, and sizes
    that are multiples of 16 bytes, are fast. Results have the dtype and the memory layout of their operands.

    Pairs: columns i and i + rotary_dim / 2 (NeoX, LLaMA); `interleaved`: 2i and 2i + 1 (GPT-J). `rotary_dim`:
    even, D unless given; further columns are passed on.
    cos, sin: tables of shape (positions, R) or, without position_ids, (B, positions, R), of any floating
    dtype; R is rotary_dim / 2, or rotary_dim, of which one value a pair is read (the first half;
    `interleaved`: every second one). Row `offset` + s belongs to position s, or row position_ids[b, s].
    Without tables angles are position base^(-2i / rotary_dim) / `scaling`, to float32's precision for
    positions up to 10^9; the position is `offset` + s or position_ids[b, s]. position_ids: int32 or int64,
    (S,) or (B, S).

    Gradients of q and k of any order; cos and sin get none and must not require one. `inplace`: writes into
    q and k and returns them (torch's rules for in-place operations apply).
    A position id that is no row of the tables: NaN, and IndexError, on a CPU at once, on a GPU, which is not
    waited for, by a later call (or by `fusionrt.deferred.examine(wait=True)`). Raises TypeError and
    ValueError for arguments that do not fit. Source: q * cos + rotate_half(q) * sin.

        q, k = rotary_embedding(q, k, cos, sin)
        q, k = rotary_embedding(q, k, layout="bhsd", base=500000.0, offset=cached)
    """
    op = "rotary_embedding"
    if layout not in _LAYOUTS:
        raise ValueError(f"{op}: layout must be 'bshd' or 'bhsd', got {layout!r}")
    _check_tensors(op, q, k, layout)
    rotary_dim = checked_dim(op, rotary_dim, q.shape[-1])
    check_angles(op, as_float(op, "base", base), scaling)
    length = q.shape[-2 if layout == "bhsd" else -3]
    batch = q.shape[0] if q.dim() == 4 else 1
    position_ids = checked_positions(op, position_ids, offset, batch, length, q.device)
    if cos is not None or sin is not None:
        first = None if position_ids is not None else offset
        cos, sin = checked_tables(op, cos, sin, q.device, rotary_dim, interleaved, batch, first, length)
    more = cos, sin, position_ids, *Options(offset, bool(interleaved), rotary_dim, layout == "bhsd",
                                            float(base), float(scaling), False)
    tensors = [t if t.dim() == 4 else t.unsqueeze(0) for t in (q, k) if t is not None]
    if inplace:
        check_writeable(op, q=q, k=k)
        _check_in_place(op, q, k)
        _in_place(tensors, more)
        return q if k is None else (q, k)
    results = _rotated(tensors, *more)
    whole = results if q.dim() == 4 else [t.squeeze(0) for t in results]  # type: ignore[union-attr]
    return whole[0] if k is None else tuple(whole)


def _check_tensors(op: str, q: Any, k: Any, layout: str) -> None:
    for name, t in {"q": q, "k": k}.items():
        if t is None and name == "k":
            continue
        check_floating(op, name, t)
    shape = "(B, S, H, D)" if layout == "bshd" else "(B, H, S, D)"
    if q.dim() not in (3, 4):
        raise ValueError(f"{op}: q must have the shape {shape}, with or without B, got {tuple(q.shape)}")
    if k is None:
        return
    if k.dtype != q.dtype or k.device != q.device:
        raise TypeError(f"{op}: k must have q's dtype and device, {q.dtype} on {q.device}, got {k.dtype} on "
                        f"{k.device}")
    heads = -2 if layout == "bshd" else -3
    expected = list(q.shape)
    if k.dim() == q.dim():
        expected[heads] = k.shape[heads]
    if list(k.shape) != expected:
        raise ValueError(f"{op}: k must have q's shape {tuple(q.shape)} but for the number of heads (layout "
                         f"{layout}), got {tuple(k.shape)}")


def check_angles(op: str, base: float | None, scaling: float) -> None:
    """`base`: None where angles are not computed."""
    given = {"base": 1.0 if base is None else base, "scaling": scaling}
    if not all(0 < as_float(op, name, n) < math.inf for name, n in given.items()):
        raise ValueError(f"{op}: base and scaling must be positive numbers, got {base!r} and {scaling!r}")


def checked_dim(op: str, rotary_dim: int | None, head_dim: int) -> int:
    found = head_dim if rotary_dim is None else rotary_dim
    if as_int(op, "rotary_dim", found) % 2 or not 0 < found <= head_dim:
        raise ValueError(f"{op}: rotary_dim must be even and in [2, {head_dim}], the columns of a head, got "
                         f"{found}")
    return found


def checked_positions(op: str, positions: Any, offset: int, batch: int, length: int, device: torch.device
                      ) -> Tensor | None:
    """Of shape (B or 1, S)."""
    as_int(op, "offset", offset)
    if isinstance(offset, int) and not -2**63 <= offset < 2**63 - length:
        raise ValueError(f"{op}: offset must be in [-2**63, 2**63 - {length}), got {offset}")
    if positions is None:
        return None
    if not isinstance(positions, Tensor):
        raise TypeError(f"{op}: position_ids must be a tensor or an array, got {type(positions).__name__}")
    if offset:
        raise ValueError(f"{op}: offset and position_ids exclude each other, got offset {offset} and "
                         "position_ids")
    indices.check_dtype(op, "position_ids", positions)
    if not is_among(tuple(positions.shape), (length,), (1, length), (batch, length)):
        raise ValueError(f"{op}: position_ids must have the shape {(length,)} or {(batch, length)}, got "
                         f"{tuple(positions.shape)}")
    if positions.device != device:
        raise ValueError(f"{op}: position_ids must be on q's device, {device}, got {positions.device}")
    return positions if positions.dim() == 2 else positions.unsqueeze(0)


def checked_tables(op: str, cos: Any, sin: Any, device: torch.device, rotary_dim: int, interleaved: bool,
                   batch: int, first: int | None, length: int) -> tuple[Tensor, Tensor]:
    """Of shape (B or 1, positions, rotary_dim / 2). `first`: of `length` positions, None with their ids."""
    if first is not None and first < 0:
        raise ValueError(f"{op}: offset must not be negative where cos and sin are tables, got {first}")
    for name, t in {"cos": cos, "sin": sin}.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: cos and sin must both be tensors or arrays, or both None, got {name} "
                            f"{'None' if t is None else 'a ' + type(t).__name__}")
        if t.dtype not in FLOATS:
            raise TypeError(f"{op}: {name} must have a floating dtype, got {t.dtype}")
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{op}: {name} gets no gradient here: detach it")
    if cos.shape != sin.shape or cos.dtype != sin.dtype or not cos.device == sin.device == device:
        came = " and ".join(f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (cos, sin))
        raise ValueError(f"{op}: cos and sin must have one shape, dtype and device, q's ({device}), got "
                         f"{came}")
    batches = (1,) if first is None else (1, batch)
    if cos.dim() not in (2, 3) or not is_among(cos.shape[-1], rotary_dim, rotary_dim // 2) or (
            cos.dim() == 3 and not is_among(cos.shape[0], *batches)):
        raise ValueError(f"{op}: cos and sin must have the shape (positions, R) or ({batches[-1]}, "
                         f"positions, R){' with position_ids' if first is None else ''}, with R = "
                         f"{rotary_dim // 2} or {rotary_dim}, got {tuple(cos.shape)}")
    if first is not None and cos.shape[-2] - length < first:  # NumPy's integers would overflow in a sum
        raise ValueError(f"{op}: cos and sin must have a row for each of the {first} + {length} positions "
                         f"(offset + S), got {cos.shape[-2]}")
    tables = [t if t.dim() == 3 else t.unsqueeze(0) for t in (cos.detach(), sin.detach())]
    if cos.shape[-1] == rotary_dim:
        tables = [t[..., ::2] if interleaved else t[..., :rotary_dim // 2] for t in tables]
    if tables[0].stride() != tables[1].stride():
        tables = [t.contiguous() for t in tables]
    return tables[0], tables[1]


def _check_in_place(op: str, q: Tensor, k: Tensor | None) -> None:
    for name, t in {"q": q, "k": k}.items():
        if t is not None and t.numel() and not lie_apart(t.shape, t.stride()):
            raise ValueError(f"{op}: inplace needs a {name} whose elements lie apart in memory, got strides "
                             f"{t.stride()} of shape {tuple(t.shape)}")
    # Where torch watches, both are computed before either is written, and memory has no address.
    same = k is not None and q.numel() and not (is_watched() or q.is_meta) and q.data_ptr() == k.data_ptr()
    if same:
        raise ValueError(f"{op}: inplace needs q and k in memory of their own: it would be turned twice")
