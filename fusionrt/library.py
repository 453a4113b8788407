"""Operators as torch.library ops: for torch.compile, export, FakeTensor and other tensor subclasses.

The boundary costs 9 us a call more than the direct path, so eager code does not cross it; Dynamo
does (`is_compiling`), and sees one opaque functional op with a fake implementation and a gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from fusionrt import random
from fusionrt.autograd import backward
from fusionrt.op import Operator

_library = torch.library.Library("fusionrt", "FRAGMENT")
_overloads: dict[tuple[Operator, str], Any] = {}
_names: set[str] = set()


@torch.compiler.allow_in_graph
def _call(handle: int, *args: Any) -> Any:
    """Dynamo puts this call into its graph as it stands; AOTAutograd then traces through it."""
    op = _handles[handle]
    rng = None
    if op.streams:
        tensor = next(a for a in args if isinstance(a, torch.Tensor))
        rng = random.draw_tensor(tensor.device)
    return apply(op, args, rng)


_handles: list[Operator] = []


def call(op: Operator, args: Any) -> Any:
    return _call(_handle(op), *args)


@torch.compiler.assume_constant_result
def _handle(op: Operator) -> int:
    if op not in _handles:
        _handles.append(op)
    return _handles.index(op)


def apply(op: Operator, args: Any, rng: torch.Tensor | None) -> Any:
    """Through the dispatcher: one tensor, or a tuple."""
    numbers_as_floats = [a if isinstance(a, torch.Tensor) else float(a) for a in args]
    out = overload(op, args)(*numbers_as_floats, *([rng] if op.streams else []))
    return out[0] if len(op.outputs) == 1 else tuple(out)


def overload(op: Operator, args: Any) -> Any:
    """The torch op for these kinds of arguments (tensor or number), defined when first needed."""
    kinds = "".join("t" if isinstance(a, torch.Tensor) else "s" for a in args)
    found = _overloads.get((op, kinds))
    if found is None:
        found = _overloads[op, kinds] = _define(op, kinds)
    return found


def _define(op: Operator, kinds: str) -> Any:
    name = f"{op.name}_{kinds}"
    if name in _names:  # another operator of this name, with another expression
        name = f"{op.name}_{op.digest}_{kinds}"
    _names.add(name)
    params = ", ".join(f"{'Tensor' if kind == 't' else 'float'} a{i}" for i, kind in enumerate(kinds))
    params += ", Tensor rng" if op.streams else ""
    _library.define(f"{name}({params}) -> Tensor[]")
    n = len(kinds)

    def run(*args: Any) -> list[torch.Tensor]:
        out = op.launch(args[:n], _unpacked(args[n]) if op.streams else None)
        return list(out) if isinstance(out, tuple) else [out]

    def fake(*args: Any) -> list[torch.Tensor]:
        shape = torch.broadcast_shapes(*(a.shape for a in args[:n] if isinstance(a, torch.Tensor)))
        return op.allocate(args[:n], shape)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.numbers = [None if isinstance(a, torch.Tensor) else a for a in inputs]
        ctx.save_for_backward(*(a for a in inputs if isinstance(a, torch.Tensor)))

    def backwards(ctx: Any, grads: Any) -> Any:
        saved = iter(ctx.saved_tensors)
        args = [next(saved) if number is None else number for number in ctx.numbers]
        rng = args.pop() if op.streams else None
        return (*_backward(op, args, grads, ctx.needs_input_grad[:n], rng), *([None] if op.streams else []))

    _library.impl(name, run, "CPU")
    _library.impl(name, run, "CUDA")
    torch.library.register_fake(f"fusionrt::{name}", fake, lib=_library)
    torch.library.register_autograd(f"fusionrt::{name}", backwards, setup_context=setup_context,
                                    lib=_library)
    return getattr(torch.ops.fusionrt, name).default


def _backward(op: Operator, args: list[Any], grads: Any, needed: tuple[bool, ...], rng: Any) -> list[Any]:
    given = tuple(g is not None and d for g, d in zip(grads, op.differentiable, strict=True))
    if not any(given) or not any(needed):
        return [None] * len(args)
    gradient = op.gradient(needed, given)
    out = apply(gradient, [*args, *(g for g, is_given in zip(grads, given, strict=True) if is_given)],
                rng if gradient.streams else None)
    results = iter(out if isinstance(out, tuple) else (out,))
    return [next(results) if n else None for n in needed]


def _unpacked(rng: torch.Tensor) -> random.Rng:
    if rng.is_cuda:
        return 0, 0, rng
    seed, offset = (int(x) & (2**64 - 1) for x in rng.tolist())
    return seed, offset, None


assert backward
