"""From the output of one linear layer to q, k and v of an attention: bias, rotation, layout in a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusionrt.arguments import as_int
from fusionrt.array import check_floating
from fusionrt.catalogue import ROWS, Make, public
from fusionrt.laid import heads_of_rows
from fusionrt.ops.qkv_kernels import Operands, run_on_cpu, run_on_gpu
from fusionrt.ops.rotary import check_angles, checked_dim, checked_positions, checked_tables
from fusionrt.ops.rotary_kernels import Options as Rotary
from fusionrt.rehearsal import device_type
from fusionrt.structured import Gradient, StructuredOp

Tensor = torch.Tensor


# -- the op, and the way back ----------------------------------------------------------------------

def _operands(packed: Tensor, heads: Sequence[Tensor], tables: Sequence[Tensor | None], inverse: bool,
              more: Sequence[Any]) -> Operands:
    cos, sin, positions = tables
    offset, interleaved, rotary_dim, base, scaling = more
    rotary = Rotary(offset, interleaved, rotary_dim, True, base, scaling, inverse)
    return Operands(packed, heads, cos, sin, positions, rotary)


def _launch(operands: Operands, bias: Tensor | None) -> None:
    if operands.packed.numel():
        (run_on_cpu if device_type(operands.packed) == "cpu" else run_on_gpu)(operands, bias)


def _heads(qkv: Tensor, q_heads: int, kv_heads: int) -> list[Tensor]:
    batch, length, width = qkv.shape
    dim = width // (q_heads + 2 * kv_heads)
    return [heads_of_rows(qkv, batch, n, length, dim) for n in (q_heads, kv_heads, kv_heads)]


def _run(qkv: Tensor, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, positions: Tensor | None,
         q_heads: int, kv_heads: int, *more: Any) -> tuple[Tensor, ...]:
    found = _heads(qkv, q_heads, kv_heads)
    # As a gradient of a gradient they are of any layout.
    qkv, bias = qkv if qkv.stride(2) == 1 else qkv.contiguous(), None if bias is None else bias.contiguous()
    _launch(_operands(qkv, found, (cos, sin, positions), False, more), bias)
    return tuple(found)


def _fake(qkv: Tensor, bias: Any, cos: Any, sin: Any, positions: Any, q_heads: int, kv_heads: int, *more: Any
          ) -> tuple[Tensor, ...]:
    return tuple(_heads(qkv, q_heads, kv_heads))


def _packed(q: Tensor, k: Tensor, has_bias: bool) -> tuple[Tensor, Tensor]:
    batch, heads, length, dim = q.shape
    width = (heads + 2 * k.shape[1]) * dim
    return q.new_empty(batch, length, width), q.new_zeros(width if has_bias else 0)


def _run_back(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None,
              positions: Tensor | None, has_bias: bool, *more: Any) -> tuple[Tensor, ...]:
    packed, bias = _packed(q, k, has_bias)
    heads = [t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v)]
    _launch(_operands(packed, heads, (cos, sin, positions), True, more), bias if has_bias else None)
    return packed, bias


def _fake_back(q: Tensor, k: Tensor, v: Tensor, cos: Any, sin: Any, positions: Any, has_bias: bool, *more: Any
               ) -> tuple[Tensor, ...]:
    return _packed(q, k, has_bias)


# Both ways are linear: the gradient of either is the other one.

def _backward(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any], needed: Sequence[bool]
              ) -> Sequence[Any]:
    q_heads, kv_heads, *more = args[5:]
    batch, _, length, dim = next(g.shape for g in grads if g is not None)
    like = next(g for g in grads if g is not None)
    heads = [like.new_zeros(batch, n, length, dim) if g is None else g
             for g, n in zip(grads, (q_heads, kv_heads, kv_heads), strict=True)]
    of_qkv, of_bias = _back(*heads, *saved, needed[1], *more)
    return of_qkv if needed[0] else None, of_bias if needed[1] else None, *(None for _ in args[2:])


def _backward_of_back(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any], needed: Sequence[bool]
                      ) -> Sequence[Any]:
    q, k, *tables = saved
    of_packed, of_bias = grads
    if of_packed is None:
        of_packed = _packed(q, k, False)[0].zero_()
    has_bias, *more = args[6:]
    found = _forth(of_packed, of_bias if has_bias else None, *tables, q.shape[1], k.shape[1], *more)
    return *(g if need else None for g, need in zip(found, needed, strict=False)), *(None for _ in args[3:])


_TABLES = "Tensor? cos, Tensor? sin, Tensor? position_ids"
_ROTARY = "int offset, bool interleaved, int rotary_dim, float base, float scaling"
_forth = StructuredOp(
    f"qkv_heads(Tensor qkv, Tensor? bias, {_TABLES}, int q_heads, int kv_heads, {_ROTARY}) -> "
    "(Tensor, Tensor, Tensor)", _run, _fake, Gradient(lambda args, out: args[2:5], _backward))
_back = StructuredOp(
    f"qkv_heads_backward(Tensor q, Tensor k, Tensor v, {_TABLES}, bool has_bias, {_ROTARY}) -> "
    "(Tensor, Tensor)", _run_back, _fake_back,
    Gradient(lambda args, out: (*args[:2], *args[3:6]), _backward_of_back))


# -- what users call -------------------------------------------------------------------------------

def _example(make: Make) -> tuple[Any, ...]:
    return make(1, ROWS, 48 * 128), 32, 8, make(48 * 128)


@public(example=_example, arrays="qkv bias cos sin position_ids")
def qkv_heads(qkv: Any, num_heads: int, num_kv_heads: int | None = None, bias: Any = None, cos: Any = None,
              sin: Any = None, *, interleaved: bool = False, offset: int = 0, position_ids: Any = None,
              rotary_dim: int | None = None, base: float | None = None, scaling: float = 1.0) -> Any:
    """q (B, num_heads, S, D), k and v (B, num_kv_heads, S, D) of qkv (B, S, W): all heads of q, of k, of v.

    W is (num_heads + 2 num_kv_heads) D; num_kv_heads is num_heads unless given. `bias`: (W,), of a floating
    dtype, added. q and k are rotated where there are tables, cos and sin, or a `base` of computed angles;
    these, `interleaved`, `offset`, `position_ids`, `rotary_dim` and `scaling` are as in `rotary_embedding`.

    One kernel, and one for the gradient with that of the bias (and a small one that adds partial sums: the
    same bits in every run). q, k and v lie in memory as (B, S, heads, D), which `attention` takes as it is
    and answers with: merging the heads of its result is free. Without bias and rotation they are views.
    Gradients of qkv and bias of any order; cos and sin get none. Computed in float32 (float64 for doubles),
    rounded once. Raises TypeError and ValueError for shapes and arguments that do not fit, and IndexError as
    `rotary_embedding`. Source: rotary_embedding of (qkv + bias).split(...).

        q, k, v = qkv_heads(x @ weight.T, 32, 8, bias=bias, base=500000.0)
        y = attention(q, k, v, causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    """
    op = "qkv_heads"
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    dim = _checked_width(op, qkv, num_heads, kv_heads)
    bias = _checked_bias(op, bias, qkv)
    rotates = cos is not None or sin is not None or base is not None
    if not rotates and (position_ids is not None or offset or rotary_dim is not None or interleaved):
        raise ValueError(f"{op}: position_ids, offset, rotary_dim and interleaved need cos and sin, or base")
    if scaling != 1 and base is None:
        raise ValueError(f"{op}: scaling is of angles that are computed, which needs base, got {scaling!r}")
    if base is not None and not (cos is None and sin is None):
        raise ValueError(f"{op}: either cos and sin, or base")
    if not rotates and bias is None:
        parts = qkv.split([num_heads * dim, kv_heads * dim, kv_heads * dim], 2)
        return tuple(t.unflatten(2, (-1, dim)).transpose(1, 2) for t in parts)
    if rotates:
        batch, length = qkv.shape[:2]
        rotary_dim = checked_dim(op, rotary_dim, dim)
        check_angles(op, base, scaling)
        position_ids = checked_positions(op, position_ids, offset, batch, length, qkv.device)
        if cos is not None or sin is not None:
            first = None if position_ids is not None else offset
            cos, sin = checked_tables(op, cos, sin, qkv.device, rotary_dim, interleaved, batch, first,
                                      length)
    qkv = qkv if qkv.stride(2) == 1 else qkv.contiguous()
    rotary = offset, bool(interleaved), rotary_dim or 0, float(base or 10000.0), float(scaling)
    found: tuple[Tensor, ...] = _forth(qkv, bias, cos, sin, position_ids, num_heads, kv_heads, *rotary)
    return found


def _checked_width(op: str, qkv: Any, num_heads: int, kv_heads: int) -> int:
    """Columns of a head."""
    check_floating(op, "qkv", qkv)
    if as_int(op, "num_heads", num_heads) < 1 or as_int(op, "num_kv_heads", kv_heads) < 1:
        raise ValueError(f"{op}: num_heads and num_kv_heads must be at least 1, got {num_heads} and "
                         f"{kv_heads}")
    if qkv.dim() != 3 or not qkv.shape[2] or qkv.shape[2] % (num_heads + 2 * kv_heads):
        raise ValueError(f"{op}: qkv must have the shape (B, S, W), W a multiple of the {num_heads} + 2 * "
                         f"{kv_heads} heads, got {tuple(qkv.shape)}")
    return qkv.shape[2] // (num_heads + 2 * kv_heads)


def _checked_bias(op: str, bias: Any, qkv: Tensor) -> Tensor | None:
    if bias is None:
        return None
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        got = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise TypeError(f"{op}: bias must be a floating-point tensor or array, got {got}")
    if bias.shape != qkv.shape[2:] or bias.device != qkv.device:
        raise ValueError(f"{op}: bias must have the shape {tuple(qkv.shape[2:])} on {qkv.device}, got "
                         f"{tuple(bias.shape)} on {bias.device}")
    return bias.to(qkv.dtype).contiguous()
