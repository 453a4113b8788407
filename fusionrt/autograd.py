"""Autograd for every operator, of any order: one `torch.autograd.Function`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from fusionrt.op import Operator
    from fusionrt.random import Rng


dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


class Recorded(torch.autograd.Function):
    """An operator on ordinary tensors; intercepted calls are recorded by `library`."""

    @staticmethod
    def forward(ctx: Any, op: Operator, plan: Callable[..., Any], rng: Rng | None, *args: Any) -> Any:
        ctx.op, ctx.rng = op, rng
        ctx.set_materialize_grads(False)
        out = plan(*args, rng) if op.streams else plan(*args)
        if not all(op.differentiable):
            outputs = out if isinstance(out, tuple) else (out,)
            fixed = (o for o, d in zip(outputs, op.differentiable, strict=True) if not d)
            ctx.mark_non_differentiable(*fixed)
        save(ctx, op, args, out, ctx.needs_input_grad[3:])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call, rng = type(ctx.op).apply, ctx.rng
        if is_watched() or any(g is not None and is_batched(g) for g in grads):  # is_grads_batched=True
            from fusionrt import library
            device = next((g.device for g in grads if g is not None), None)
            call, rng = library.apply, rng and library.packed(rng, device)
        return (None, None, None,
                *backward(ctx.op, restore(ctx), grads, ctx.needs_input_grad[3:], rng, call))


def is_watched() -> bool:
    """Whether torch must see each operation: Dynamo, a dispatch mode (FakeTensorMode, make_fx, selective
    checkpointing), a torch.func transform, forward-mode differentiation."""
    return bool(torch.compiler.is_compiling() or dispatch_modes() or transforms_active()
                or forward_ad._current_level >= 0)


def save(ctx: Any, op: Operator, args: Sequence[Any], out: Any, needed: Sequence[bool], *more: torch.Tensor
         ) -> None:
    """Keep the arguments that the backward expression reads, of other tensors a description; the
    outputs that it reads; and `more`."""
    reads, saved = op.read_by_backward(tuple(needed))
    more = (*(out[k] if isinstance(out, tuple) else out for k in saved), *more)
    ctx.save_for_backward(*[a for a, read in zip(args, reads, strict=True)
                            if read and isinstance(a, torch.Tensor)], *more)
    ctx.others = [a if not isinstance(a, torch.Tensor) else None if read else (a.shape, a.dtype, a.device)
                  for a, read in zip(args, reads, strict=True)] + [None] * len(more)


def restore(ctx: Any) -> list[Any]:
    """What `save` was given; a tensor of which only the description matters has one element of memory."""
    saved = iter(ctx.saved_tensors)
    return [next(saved) if other is None else other if not isinstance(other, tuple) else
            torch.empty((), dtype=other[1], device=other[2]).expand(other[0]) for other in ctx.others]


def backward(op: Operator, args: list[Any], grads: Sequence[Any], needed: Sequence[bool], rng: Any,
             call: Callable[[Operator, list[Any], Any], Any]) -> list[Any]:
    """Gradients of the needed arguments, None for the others."""
    given = tuple(g is not None and d for g, d in zip(grads, op.differentiable, strict=True))
    if not any(given) or not any(needed):
        return [None] * len(op.params)
    n = len(op.params)
    whole = op.gradient(tuple(needed), given)
    saved = dict(zip(op.read_by_backward(tuple(needed))[1], args[n:], strict=True))
    inputs = [*args[:n], *(saved[k] for k in whole.saved),
              *(g for g, is_given in zip(grads, given, strict=True) if is_given)]
    origin = _origins(whole, inputs, needed)
    own = tuple(i == o for i, o in enumerate(origin))
    if any(own):
        gradient = op.gradient(tuple(needed), given, own)
        out = call(gradient, inputs, rng if gradient.streams else None)
        results = iter(out if isinstance(out, tuple) else (out,))
        computed = [next(results) if is_own else None for is_own in own]
    else:
        computed = [None] * n
    return [None if o is None else inputs[o].expand(inputs[i].shape) if o >= n else computed[o]
            for i, o in enumerate(origin)]


def _expands(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether that of a sum's gradient is its incoming gradient, seen in every element."""
    return len(shape) == len(to) and all(a in (1, b) for a, b in zip(shape, to, strict=True))


def _origins(gradient: Operator, inputs: list[Any], needed: Sequence[bool]) -> list[int | None]:
    """Where each argument's gradient comes from: itself, an equal one, or an incoming gradient as it
    is (of a residual, of a sum). What is not computed twice is not written twice either."""
    n = len(needed)
    origin: list[int | None] = [i if need else None for i, need in enumerate(needed)]
    for i, candidates in gradient.shared:
        for j in candidates:
            own, its = inputs[i].shape, inputs[j].shape
            alike = its == own or (j >= n and _expands(its, own))
            if alike and inputs[j].dtype == inputs[i].dtype and (j >= n or origin[j] == j):
                origin[i] = j
                break
    return origin


# `Function.apply` first unwraps functorch's dead wrappers in Python, two fifths of its cost. Calls in
# functorch's transforms do not come here, so there is nothing to unwrap.
record = super(torch.autograd.function._SingleLevelFunction, Recorded).apply
