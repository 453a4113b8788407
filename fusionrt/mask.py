"""Gradients that ask of a forward pass only whether something held, as relu's does: one bit an element.

The forward pass leaves the bits, four elements to a byte, in the order of its walk; the gradient finds them
by the place in that walk, as it does a dropout's random numbers. Of a relu of 16 bits an eighth of what its
result takes, which the next layer may keep, is written besides, and a third less is read. torch.compile
keeps a byte an element.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from fusionrt import layout
from fusionrt.expr import Expr, argument, node
from fusionrt.graph import leaves, substitute
from fusionrt.laid import is_lazy
from fusionrt.op import Args, Operator, memory_order
from fusionrt.problem import Output
from fusionrt.rehearsal import device_type

MASK = node("mask", "mask")
EACH = 4                # elements of a byte
FROM = 1 << 22          # elements; of fewer what is read again was just written, and allocating takes longer
WHOLE = 4096            # elements: of a multiple all vectors are whole, in all blocks; a byte is one thread's


class Masking(Operator):
    """An operator of one full output, and second the mask in which its gradients need to know `truth`."""

    leaves_mask = True

    def __init__(self, of: Operator, truth: Expr, gradients: Mapping[int, Expr], spared: Collection[int]
                 ) -> None:
        """`gradients`: by argument, of those that need one. `spared`: arguments that they do not read for the
        mask's sake; none, if that is the result."""
        super().__init__(of.name, of.params, [*of.outputs, truth], [*of.targets, None], of.uniform)
        self.differentiable = of.differentiable
        self.gradients, self.spared = gradients, spared

    def gradient(self, needed: tuple[bool, ...], given: tuple[bool, ...],
                 wanted: tuple[bool, ...] | None = None) -> Operator:
        wanted = wanted or needed
        if wanted not in self._gradients:
            places = [i for i, want in enumerate(wanted) if want]
            name = f"{self.name}_backward_{''.join(str(int(want)) for want in wanted)}_by_mask"
            self._gradients[wanted] = Operator(name, [*self.params, "grad_output"],
                                               [self.gradients[i] for i in places], places, self.uniform)
        return self._gradients[wanted]

    def drawn(self, args: Args, outputs: Sequence[torch.Tensor]) -> layout.Ints | None:
        """The walk, in the order of which the bits lie."""
        return tuple(self.walk(args, tuple(outputs[0].shape), outputs))

    def allocate(self, args: Args, shape: Sequence[int]) -> list[torch.Tensor]:
        out, whole = super().allocate(args, shape)
        return [out, whole.new_empty(out.numel() // EACH, dtype=torch.uint8)]

    def output(self, k: int, o: torch.Tensor, args: Args, shape: layout.Ints, order: Sequence[int]) -> Output:
        if k == 0:
            return super().output(k, o, args, shape, order)
        return Output(self.outputs[k], o.dtype, tuple(o.shape), o.stride(),
                      layout.reduced_strides(shape, shape, order), False, is_mask=True)

    def misaligned(self, *args: Any) -> Any:
        """Bits of a byte have one thread: what is read otherwise than in whole vectors is copied first. The
        walk is that of aligned calls, as the backward pass knows one for both."""
        own, rng = args[:len(self.params)], args[len(self.params):]
        shape = layout.broadcast_shapes([a.shape for a in own if isinstance(a, torch.Tensor)])
        assert shape is not None
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in own]
        order = memory_order(own, shape, ())
        return self._variant("order", tuple(order), *order).launch(copies, *rng)


def leaving_mask(op: Operator, args: Args) -> Masking | None:
    """The operator that leaves a mask for the gradients of those arguments that need one, where that is to
    be had and shortens the work."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    shape = layout.broadcast_shapes([t.shape for t in tensors])
    n = 0 if shape is None else math.prod(shape)
    if (type(op) is not Operator or n < max(1, FROM) or n % WHOLE or device_type(tensors[0]) != "cuda"
            or any(t.dtype.itemsize > EACH or is_lazy(t) for t in tensors)):
        return None
    needed = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    if needed not in op.masked:
        op.masked[needed] = _leaving_mask(op, needed)
    made = op.masked[needed]
    if made is None or not made.spared:
        return made
    sizes = [args[i].shape for i in made.spared if isinstance(args[i], torch.Tensor)]
    return made if shape in sizes else None


def _leaving_mask(op: Operator, needed: tuple[bool, ...]) -> Masking | None:
    if len(op.outputs) != 1 or op.targets != (None,) or not op.differentiable[0] or not any(needed):
        return None
    gradient, n = op.gradient(needed, (True,)), len(op.params)
    out, given = argument(f"a{n}"), argument(f"a{n + len(gradient.saved)}")
    truths = _truths(gradient.outputs, given)
    if len(truths) != 1:
        return None
    truth = truths.pop()
    masked = substitute(gradient.outputs, {truth: MASK})
    spared = {*leaves(gradient.outputs, "arg")} - {*leaves(masked, "arg")}
    if not spared or leaves(masked, "random") or (gradient.saved and str(out.args[0]) not in spared):
        return None
    masked = substitute(masked, {given: out})  # the result's place is free
    gradients = dict(zip((i for i, need in enumerate(needed) if need), masked, strict=True))
    return Masking(op, substitute([truth], {out: op.outputs[0]} if gradient.saved else {})[0], gradients,
                   () if gradient.saved else [int(name[1:]) for name in spared])


def _truths(roots: Sequence[Expr], given: Expr) -> set[Expr]:
    """The largest truth values in which the incoming gradient has no part."""
    found: set[Expr] = set()
    seen: set[Expr] = set()
    left = list(roots)
    while left:
        e = left.pop()
        if e in seen:
            continue
        seen.add(e)
        if e.is_truth and str(given.args[0]) not in leaves([e], "arg"):
            found.add(e)
        else:
            left += [a for a in e.args if isinstance(a, Expr)]
    return found
