"""Operators as torch.library ops: for torch.compile, export, FakeTensor, torch.func, tensor subclasses.

The boundary costs 9 us a call more than the direct path, so eager code does not cross it; Dynamo
does (`is_compiling`), and sees one opaque functional op with a fake implementation and a gradient.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch

from fusionrt import forks, random
from fusionrt.autograd import Dispatched, backward, restore, save
from fusionrt.definition import SCALAR
from fusionrt.op import OPERATORS, Operator
from fusionrt.problem import pack
from fusionrt.registration import Transformed, registered
from fusionrt.watching import is_transformed

_overloads: dict[str, Any] = {}
_lock = forks.Lock()


def call(handle: int, *args: Any) -> Any:
    """Dynamo puts this call into its graph as it stands (`allow`); AOTAutograd then traces through it."""
    op = OPERATORS[handle]
    rng = None
    if op.streams:
        tensor = next(a for a in args if isinstance(a, torch.Tensor))
        rng = random.draw_tensor(tensor.device)
    return seen(op, args, rng)


def seen(op: Operator, args: Any, rng: torch.Tensor | None) -> Any:
    """With derivatives for whoever watches."""
    if is_transformed():
        return _Transformed.apply(op, rng, *args)
    return apply(op, args, rng)


def allow() -> bool:
    """Dynamo runs this while it traces, as if it were a constant. A decorator of `call` would import Dynamo,
    which takes a second."""
    torch.compiler.allow_in_graph(call)
    return True


allow._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Transformed(Transformed):
    @staticmethod
    def forward(op: Operator, rng: torch.Tensor | None, *args: Any) -> Any:
        return apply(op, args, rng)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.op, rng, *args = inputs
        save(ctx, ctx.op, args, output, ctx.needs_input_grad[2:], *([] if rng is None else [rng]))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        args = restore(ctx.saved_tensors, ctx.others)
        rng = args.pop() if ctx.op.streams else None
        return (None, None, *backward(ctx.op, args, grads, ctx.needs_input_grad[2:], rng,
                                      lambda op, args, rng: _Transformed.apply(op, rng, *args), ctx.order))


def apply(op: Operator, args: Any, rng: torch.Tensor | None) -> Any:
    """Through the dispatcher: one tensor, or a tuple."""
    return overload(op, args)(*args, *([rng] if op.streams else []))


def overload(op: Operator, args: Any) -> Any:
    """The torch op for these kinds of arguments (tensor or number), defined when first needed."""
    kinds = "".join("t" if isinstance(a, torch.Tensor) else "s" for a in args)
    # With the digest, as graphs of Inductor's cache and saved programs know their ops by name only.
    # Operators of one name and digest compute the same: a notebook's cell that is run again.
    name = f"{re.sub(r'[^a-zA-Z0-9_]', '_', op.name)}_{op.digest}_{kinds}"  # a schema's are ASCII
    found = _overloads.get(name)
    if found is None:
        with _lock():
            found = _overloads.get(name) or _overloads.setdefault(name, _define(op, name, kinds))
    return found


def _define(op: Operator, name: str, kinds: str) -> Any:
    params = ", ".join(f"{'Tensor' if kind == 't' else 'Scalar'} a{i}" for i, kind in enumerate(kinds))
    params += ", Tensor rng" if op.streams else ""
    returns = ", ".join(["Tensor"] * len(op.outputs))
    n = len(kinds)

    def run(*args: Any) -> Any:
        return op.launch(args[:n], random.unpacked(args[n]) if op.streams else None)

    def fake(*args: Any) -> Any:
        try:
            shape = torch.broadcast_shapes(*(a.shape for a in args[:n] if isinstance(a, torch.Tensor)))
        except RuntimeError:
            op.check(args[:n])  # says it in its own words
            raise
        out = op.allocate(args[:n], shape)
        return pack(out)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        save(ctx, op, inputs[:n], output, ctx.needs_input_grad[:n], *inputs[n:])

    def backwards(ctx: Any, *grads: Any) -> Any:
        args = restore(ctx.saved_tensors, ctx.others)
        rng = args.pop() if op.streams else None
        found = backward(op, args, grads, ctx.needs_input_grad[:n], rng, apply, ctx.order)
        return (*found, *([None] if op.streams else []))

    return registered(f"{name}({params}) -> {f'({returns})' if len(op.outputs) > 1 else returns}", run, fake,
                      (backwards, setup_context), functools.partial(_vmapped, op))


def _vmapped(op: Operator, info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
    """torch.vmap's rule: one call on tensors that have the batch in front, where that means the same."""
    n = len(op.params)
    args = tuple(a if dim is None else a.movedim(dim, 0) for a, dim in zip(args, in_dims, strict=True))
    of_one = [a.new_empty(a.shape if dim is None else a.shape[1:], device="meta")
              if isinstance(a, torch.Tensor) else a for a, dim in zip(args, in_dims, strict=True)][:n]
    try:
        shape = torch.broadcast_shapes(*(a.shape for a in of_one if isinstance(a, torch.Tensor)))
    except RuntimeError:
        op.check(of_one)
        raise

    def widened(a: torch.Tensor, dim: int | None) -> torch.Tensor:
        a = a.expand(info.batch_size, *a.shape) if dim is None else a
        return a.reshape(info.batch_size, *[1] * (len(shape) + 1 - a.dim()), *a.shape[1:])

    wide = [widened(a, dim) if isinstance(a, torch.Tensor) else a
            for a, dim in zip(args[:n], in_dims, strict=False)]
    elementwise = type(op) is Operator and SCALAR not in op.targets and not op.streams
    if elementwise and op.output_dtypes(wide) == op.output_dtypes(of_one):
        out = apply(op, wide, None)
        shapes = op.output_shapes(of_one, shape)
        if isinstance(out, tuple):
            out = tuple(o.reshape(info.batch_size, *s) for o, s in zip(out, shapes, strict=True))
            return out, (0,) * len(out)
        return out.reshape(info.batch_size, *shapes[0]), 0
    each = [overload(op, of_one)(*(a if dim is None else a[i] for a, dim in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)]
    if isinstance(each[0], tuple):
        return tuple(map(_stacked, zip(*each, strict=True))), (0,) * len(each[0])
    return _stacked(each), 0


def _stacked(each: Sequence[torch.Tensor]) -> torch.Tensor:
    """With the order of dimensions that each one has: its random numbers lie in that."""
    order = sorted(range(each[0].dim()), key=each[0].stride, reverse=True)
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.stack([t.permute(order) for t in each]).permute(0, *(d + 1 for d in back))


Dispatched.call, Dispatched.apply, Dispatched.allow = call, seen, allow
