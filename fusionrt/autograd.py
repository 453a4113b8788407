"""Autograd for every operator, of any order: one `torch.autograd.Function`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fusionrt.op import Operator
    from fusionrt.random import Rng


class Recorded(torch.autograd.Function):
    """Saves the inputs that the backward expression reads, and of the others only the shape."""

    @staticmethod
    def forward(ctx: Any, op: Operator, rng: Rng | None, *args: Any) -> Any:
        ctx.op, ctx.rng = op, rng
        ctx.set_materialize_grads(False)
        out = op.launch(args, rng)
        outputs = out if isinstance(out, tuple) else (out,)
        fixed = [o for o in outputs if not o.is_floating_point()]
        if fixed:
            ctx.mark_non_differentiable(*fixed)
        needed = ctx.needs_input_grad[2:]
        reads = op.gradient(needed, op.differentiable).used if any(op.differentiable) else frozenset()
        saved, ctx.others = [], []
        for i, a in enumerate(args):
            if isinstance(a, torch.Tensor) and f"a{i}" in reads:
                saved.append(a)
                ctx.others.append(None)
            elif isinstance(a, torch.Tensor):
                ctx.others.append((a.shape, a.dtype, a.device))
            else:
                ctx.others.append(a)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = iter(ctx.saved_tensors)
        args = [next(saved) if other is None else _stand_in(other) if isinstance(other, tuple) else other
                for other in ctx.others]
        return (None, None, *backward(ctx.op, args, grads, ctx.needs_input_grad[2:], ctx.rng))


def _stand_in(description: tuple[torch.Size, torch.dtype, torch.device]) -> torch.Tensor:
    """A tensor of which only shape and dtype matter, in one element of memory."""
    shape, dtype, device = description
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def backward(op: Operator, args: list[Any], grads: tuple[Any, ...], needed: tuple[bool, ...],
             rng: Rng | None) -> list[Any]:
    """Gradients of the needed arguments, None for the others."""
    given = tuple(g is not None and d for g, d in zip(grads, op.differentiable, strict=True))
    if not any(given) or not any(needed):
        return [None] * len(args)
    gradient = op.gradient(needed, given)
    inputs = [*args, *(g for g, is_given in zip(grads, given, strict=True) if is_given)]
    out = gradient.apply(inputs, rng if gradient.streams else None)
    results = iter(out if isinstance(out, tuple) else (out,))
    return [next(results) if n else None for n in needed]


# `Function.apply` first unwraps functorch's dead wrappers in Python, two fifths of its cost; outside
# of functorch's transforms there is nothing to unwrap, and the C implementation is called directly.
_apply = super(torch.autograd.function._SingleLevelFunction, Recorded).apply


def record(op: Operator, rng: Rng | None, *args: Any) -> Any:
    if torch._C._are_functorch_transforms_active():
        return Recorded.apply(op, rng, *args)
    return _apply(op, rng, *args)
