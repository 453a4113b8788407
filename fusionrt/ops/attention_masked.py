"""Attention with a mask by torch's kernels that take what is added to the scores: cuDNN's, memory-efficient.

A boolean mask becomes zeros and -inf in its own shape, in one pass that also finds the first key that each of
its rows lets pass. Queries without any would come out of the kernel as NaN: another kernel, which reads that
number and no more, writes zeros there and makes their gradients zeros. The host is not asked. A mask that is
added stays finite where it is: rows of the least numbers, as models fill them, would be -inf in 16 bits, or
in a kernel that multiplies them by log2(e), and the greatest would be NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from fusionrt.dtypes import name_of
from fusionrt.expr import Expr, clamp, where
from fusionrt.row_fusion import per_call, row_operator
from fusionrt.rowwise import LOWEST_PASSED, row_max
from fusionrt.runtime.kernel import Kernel
from fusionrt.runtime.source import definitions, members, pointer
from fusionrt.structured import Gradient, StructuredOp, no_second_derivatives
from fusionrt.watching import is_watched

Tensor = torch.Tensor
ALIGNED = 16  # elements: of rows of what is added


def regular(t: Tensor) -> Tensor:
    """With rows that can be read by 16 bytes, as torch's kernels do unasked. (Odd widths are padded, or go
    to chunks.)"""
    step = 16 // t.element_size()
    batch, head, row, column = t.stride()
    if column != 1 or (t.shape[3] % step == 0 and (batch % step or head % step or row % step)):
        return t.contiguous()
    if is_watched() or t.data_ptr() % 16 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def laid_out(grad: Tensor, strides: Sequence[int]) -> Tensor:
    """A gradient that lies as its output does. torch keeps cuDNN's plans by the layouts of q, k and v alone
    (ATen/native/cudnn/MHA.cpp, with cuDNN 9.5.1 and later), and would read one that lies otherwise than that
    of an earlier call as if it lay like that: wrong gradients, silently."""
    is_same = all(size == 1 or n == m for size, n, m in zip(grad.shape, grad.stride(), strides, strict=True))
    if is_same and (is_watched() or grad.data_ptr() % 16 == 0):
        return grad
    return torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)


# -- the mask --------------------------------------------------------------------------------------

@per_call
def _prepare(boolean: bool) -> Any:
    """The operator of a mask: what is added, in the dtype of `like`, and the first column of each row that
    passes, as a number, beyond them all if none does."""

    def expression(mask: Expr, columns: Expr, like: Expr, lowest: float) -> Any:
        passed = mask != (0 if boolean else -math.inf)
        first = -row_max(where(passed, -columns, -math.inf))
        added = where(passed, 0, -math.inf) if boolean else where(
            abs(mask) < math.inf, clamp(mask, lowest, -lowest), mask)
        return added, first

    return row_operator(expression, ("mask", "columns", "like", "lowest"), name="attention_mask", like="like")


def prepared(mask: Tensor, q: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """What is added to the scores, and the first key of each of its rows; in the mask's own shape."""
    if mask.shape[3] != keys:
        mask = mask.expand(-1, -1, -1, keys)
    boolean = mask.dtype == torch.bool
    if keys % ALIGNED:
        mask = F.pad(mask, (0, -keys % ALIGNED), value=False if boolean else -math.inf)
    if mask.stride(3) != 1:  # what is made has the mask's layout
        mask = mask.contiguous()
    columns = torch.arange(mask.shape[3], dtype=torch.float32, device=q.device)
    like = q.detach().as_strided((1,) * 4, (0,) * 4)
    lowest = max(LOWEST_PASSED, torch.finfo(q.dtype).min)
    added, first = _prepare(boolean)(mask.detach(), columns, like, lowest)
    return added.narrow(3, 0, keys), first


# -- queries without a key -------------------------------------------------------------------------

_DIMS = ("batch", "head", "row")


@functools.cache
def _kernel(dtype: str, causal: bool, logarithms: bool) -> Kernel:
    fields = [pointer("float32_t", "first"), pointer("scalar_t", "out", const=False),
              pointer("float32_t", "logarithms", const=False)]
    fields += members("int64_t", *(f"{name}_{dim}" for name in ("first", "out", "log") for dim in _DIMS))
    fields += members("unsigned", "count", "rows", "heads", "columns", "last_key")
    constants = definitions(scalar_t=f"{dtype}_t", CAUSAL=causal, LOGARITHMS=logarithms)
    return Kernel("attention", "masked_rows", fields, constants)


def clear_empty(out: Tensor, logarithms: Tensor, first: Tensor, keys: int, causal: bool) -> None:
    """Of (B, H, S, D), (B, H, S or more, ...) or without elements, and (B, H, S, 1)."""
    batch, heads, rows, columns = out.shape
    count, some = batch * heads * rows, logarithms.numel() > 0
    kernel = _kernel(name_of(out.dtype), causal, some)
    laid = {"first": first.stride(), "out": out.stride(), "log": logarithms.stride() if some else (0, 0, 0)}
    steps = {f"{name}_{dim}": strides[k] for name, strides in laid.items() for k, dim in enumerate(_DIMS)}
    kernel(out.device, -(-count // kernel.block), first.data_ptr(), out.data_ptr(), logarithms.data_ptr(),
           *kernel.planned(**steps, count=count, rows=rows, heads=heads, columns=columns, last_key=keys - 1))


# -- the op ----------------------------------------------------------------------------------------

def _attend(q: Tensor, k: Tensor, v: Tensor, added: Tensor, first: Tensor, way: str, causal: bool,
            dropout_p: float, scale: float, recorded: bool) -> tuple[Tensor, ...]:
    """The result, logarithms of the sums of exponentials, if `recorded`, and random numbers."""
    found: tuple[Any, ...]
    if way == "cudnn":
        found = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, added, recorded, dropout_p, causal, False, scale=scale)
        found = *found[:2], *found[6:8]
    else:
        added = added.expand(*q.shape[:3], added.shape[3])
        found = torch.ops.aten._scaled_dot_product_efficient_attention.default(
            q, k, v, added, recorded, dropout_p, causal, scale=scale)
    return found if recorded else (found[0], q.new_empty(0, dtype=torch.float32), *found[2:])


def _run(q: Tensor, k: Tensor, v: Tensor, added: Tensor, first: Tensor, way: str, causal: bool, *more: Any
         ) -> tuple[Tensor, ...]:
    out, logarithms, *random = _attend(q, k, v, added, first, way, causal, *more)
    clear_empty(out, logarithms, first.expand(*q.shape[:3], 1), k.shape[2], causal)
    return out, logarithms, *random


def _run_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, added: Tensor, out: Tensor,
                  logarithms: Tensor, seed: Tensor, offset: Tensor, way: str, causal: bool, dropout_p: float,
                  scale: float) -> tuple[Tensor, ...]:
    saved = laid_out(grad, out.stride()) if way == "cudnn" else regular(grad), q, k, v
    found: tuple[Tensor, ...]
    if way == "cudnn":
        found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
            *saved, out, logarithms, seed, offset, added, None, None, q.shape[2], k.shape[2], dropout_p,
            causal, scale=scale)
    else:
        added = added.expand(*q.shape[:3], added.shape[3])
        found = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
            *saved, added, out, logarithms, seed, offset, dropout_p, [True, True, True, False], causal,
            scale=scale)
    return tuple(found[:3])


def _save(args: Sequence[Any], out: Any) -> Sequence[Tensor | None]:
    return *args[:4], *out


def _backward(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any], needed: Sequence[bool]
              ) -> Sequence[Any]:
    return *_backward_op(grads[0], *saved, *args[5:9]), *(None for _ in args[3:])


_OPTIONS = "str way, bool causal, float dropout_p, float scale"
_backward_op = StructuredOp(
    "masked_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor added, Tensor out, "
    f"Tensor logarithms, Tensor seed, Tensor offset, {_OPTIONS}) -> (Tensor, Tensor, Tensor)", _run_backward,
    _run_backward, no_second_derivatives("attention"))
_op = StructuredOp(
    f"masked_attention(Tensor q, Tensor k, Tensor v, Tensor added, Tensor first, {_OPTIONS}, bool recorded) "
    "-> (Tensor, Tensor, Tensor, Tensor)", _run, _attend, Gradient(_save, _backward))


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, way: str, causal: bool, dropout_p: float,
                     scale: float, recorded: bool) -> Tensor:
    """Of (B, H, S, D) and (B, heads, T, D), on a GPU, with a mask that needs no gradient, by the `way`
    "cudnn" or "efficient"; for this as many heads of keys as of queries."""
    found: Tensor = _op(q, k, v, *prepared(mask, q, k.shape[2]), way, causal, dropout_p, scale, recorded)[0]
    return found


def attention_of_prepared(q: Tensor, k: Tensor, v: Tensor, added: Tensor, first: Tensor | None, way: str,
                          scale: float) -> Tensor:
    """The same with what `prepared` gives, without gradients. `first`: None where every query has a key."""
    if first is None:  # which `_attend` does not read
        return _attend(q, k, v, added, added, way, False, 0.0, scale, False)[0]
    found: Tensor = _op(q, k, v, added, first, way, False, 0.0, scale, False)[0]
    return found
