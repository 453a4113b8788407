"""Ops that are no expression, made known to torch: gradients, torch.compile, FakeTensor, torch.func.

Such an op brings a function that computes it with kernels of its own, and its gradient as a function of what
was saved. Called eagerly it costs no dispatcher; where torch watches each operation, it is one op of torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusionrt.laid import in_memory, is_lazy
from fusionrt.problem import unpack
from fusionrt.recorded_function import straight
from fusionrt.registration import Transformed, registered
from fusionrt.watching import is_batched, is_recorded, is_transformed, is_watched

Results = torch.Tensor | tuple[torch.Tensor, ...]


class Gradient(NamedTuple):
    """`save(args, out)` says which tensors the backward pass reads (None among them is allowed);
    `backward(saved, args, grads, needed)` gives a gradient, or None, for each argument: `args` has None in
    the place of tensors, `grads` None for an output that has no gradient. What it computes by structured or
    fused ops has derivatives again."""

    save: Callable[[Sequence[Any], Any], Sequence[torch.Tensor | None]]
    backward: Callable[[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[bool]], Sequence[Any]]


def no_second_derivatives(op: str) -> Gradient:
    """Of an op's backward pass that has no derivatives."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(f"{op}: no second derivatives; differentiate fusionrt.{op}.reference "
                                  "instead")

    return Gradient(lambda args, out: (), refuse)


class StructuredOp:
    """`schema` is torch.library's; `run` computes the op on CUDA, CPU and meta tensors alike, `fake` only
    allocates its results; arguments are passed by position.

        scale = StructuredOp("scale(Tensor x, float by) -> Tensor", run, fake, Gradient(save, backward))
        scale(x, 2.0)
    """

    def __init__(self, schema: str, run: Callable[..., Results], fake: Callable[..., Results],
                 gradient: Gradient | None = None) -> None:
        self.name = schema.partition("(")[0]
        self.run, self.gradient = run, gradient
        differentiated = None if gradient is None else (self._backward, self._setup_context)
        self._overload = registered(schema, run, fake, differentiated)

    def __call__(self, *args: Any) -> Any:
        if is_transformed():
            return _Transformed.apply(self, *args)
        if is_watched():
            return self._overload(*args)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if any(map(is_lazy, tensors)):
            args = tuple(in_memory(a) if isinstance(a, torch.Tensor) else a for a in args)
        if self.gradient is not None and is_recorded(*tensors):
            return _record(self, *args)
        return self.run(*args)

    def _setup_context(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        assert self.gradient is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*self.gradient.save(inputs, output))
        ctx.others = [None if isinstance(a, torch.Tensor) else a for a in inputs]

    def _backward(self, ctx: Any, *grads: Any) -> Any:
        assert self.gradient is not None
        if all(g is None for g in grads):
            return tuple(None for _ in ctx.others)
        needed = ctx.needs_input_grad[-len(ctx.others):]
        return tuple(self.gradient.backward(ctx.saved_tensors, ctx.others, grads, needed))


class _Recorded(torch.autograd.Function):
    """A structured op on ordinary tensors."""

    @staticmethod
    def forward(ctx: Any, op: StructuredOp, *args: Any) -> Any:
        out = op.run(*args)
        op._setup_context(ctx, args, out)
        integers = [o for o in unpack(out) if not o.is_floating_point()]
        if integers:
            ctx.mark_non_differentiable(*integers)
        ctx.op = op
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if any(g is not None and is_batched(g) for g in grads):  # is_grads_batched=True
            with _Seen():
                return (None, *ctx.op._backward(ctx, *grads))
        return (None, *ctx.op._backward(ctx, *grads))


_record = straight(_Recorded)


class _Seen(TorchDispatchMode):
    """As if someone watched: every op is one of torch's, which falls back to a loop over a batch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Transformed(Transformed):
    @staticmethod
    def forward(op: StructuredOp, *args: Any) -> Any:
        return op._overload(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.op, *args = inputs
        if ctx.op.gradient is not None:
            ctx.op._setup_context(ctx, args, output)
            ctx.set_materialize_grads(True)  # vmap of torch 2.6 takes none that is None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, *ctx.op._backward(ctx, *grads))
