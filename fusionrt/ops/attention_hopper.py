"""Attention by Hopper kernels of our own: softcap, ALiBi and windows at the rate of torch's plain ones.

The result and the logarithms of its rows' sums are all that the backward kernels need: no scores in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from fusionrt.ops import attention_kernels as kernels
from fusionrt.ops.attention_chunks import Options, totals_of
from fusionrt.ops.attention_kernels import Scoring
from fusionrt.structured import Gradient, StructuredOp, no_second_derivatives

Tensor = torch.Tensor


def _readable(t: Tensor) -> Tensor:
    """A copy where the copy engine does not take its memory."""
    return t if kernels.supports(t) else t.clone(memory_format=torch.contiguous_format)


def _run(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, *scoring: Any) -> tuple[Tensor, Tensor]:
    return kernels.forward(_readable(q), _readable(k), _readable(v), _numbers(slopes), Scoring(*scoring))


def _numbers(slopes: Tensor | None) -> Tensor | None:
    return slopes if slopes is None else slopes.to(torch.float32).contiguous()


def _fake(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    return kernels.allocate(q)


def _run_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, out: Tensor,
                  logarithms: Tensor, *scoring: Any) -> tuple[Tensor, ...]:
    totals = totals_of(grad, out).reshape(q.shape[:3])
    totals = F.pad(totals, (0, logarithms.shape[2] - q.shape[2])).contiguous()
    given, read = (q, k, v), [_readable(t) for t in (q, k, v)]
    made = kernels.backward(_readable(grad), read[0], read[1], read[2], _numbers(slopes), totals, logarithms,
                            Scoring(*scoring))
    return tuple(gradient if t is r else torch.empty_like(t).copy_(gradient)  # where the fake ones lie
                 for t, r, gradient in zip(given, read, made, strict=True))


def _fake_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t) for t in (q, k, v))


def _save(args: Sequence[Any], out: Any) -> Sequence[Tensor | None]:
    return *args[:4], *out


def _backward(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any], needed: Sequence[bool]
              ) -> Sequence[Any]:
    return *_backward_op(grads[0], *saved, *args[4:]), *(None for _ in args[3:])


_SCORING = "float scale, int left, int right, SymInt offset, float softcap"
_backward_op = StructuredOp(
    "attention_hopper_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? slopes, Tensor out, "
    f"Tensor logarithms, {_SCORING}) -> (Tensor, Tensor, Tensor)", _run_backward, _fake_backward,
    no_second_derivatives("attention"))
_op = StructuredOp(f"attention_hopper(Tensor q, Tensor k, Tensor v, Tensor? slopes, {_SCORING}) "
                   "-> (Tensor, Tensor)", _run, _fake, Gradient(_save, _backward))


def hopper_attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, options: Options) -> Tensor:
    """Of q (B, H, S, D), k and v (B, heads, T, D) on a Hopper GPU, 16-bit, D 64 or 128, a positive scale,
    without dropout and masks; `slopes`: (B or 1, H)."""
    found: Tensor = _op(q, k, v, slopes, options.scale, options.left, options.right, options.offset,
                        options.softcap)[0]
    return found
