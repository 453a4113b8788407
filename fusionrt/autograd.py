"""Autograd for every operator, of any order; `recording` makes a torch.autograd.Function of what is here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fusionrt import layout, random, rehearsal
from fusionrt.array import check_dense
from fusionrt.problem import unpack
from fusionrt.watching import is_batched, is_watched

if TYPE_CHECKING:
    from fusionrt.op import Operator
    from fusionrt.recording import Recording


Call = Callable[["Operator", list[Any], Any], Any]


class BackwardPass(NamedTuple):
    """What a backward pass does: the operator that computes gradients (None: nothing is computed), its
    inputs (the arguments, some saved outputs, the given gradients), and where each argument's gradient
    comes from: the place of an input, or None."""

    gradient: Operator | None
    inputs: list[Any]
    saved: tuple[int, ...]
    origin: list[int | None]


class Dispatched:
    """The way of calls that torch must see, operation by operation. `library`, which stands above operators,
    fills it when it is imported; whatever makes operators imports `library`."""

    call: Callable[..., Any]    # (number of an operator, *arguments)
    apply: Callable[..., Any]   # (operator, arguments, random numbers as a tensor)
    allow: Callable[[], bool]   # before `call` where Dynamo traces


def recorded_backward(recording: Recording, ctx: Any, saved: Sequence[Any], grads: Sequence[Any]) -> Any:
    """The gradients of a recorded call's arguments, in a backward pass of a kind that the recording does not
    know. It keeps what is done, if nobody watches."""
    op, call, needed = recording.op, type(recording.op).apply, recording.needed
    kept: Sequence[Any] = getattr(ctx, "kept", ())
    rng = kept[0] if op.streams else None
    watched = is_watched()
    plain = not (watched or torch.is_grad_enabled() or rehearsal.is_on())
    own = saved
    if op.leaves_mask:
        *own, mask = saved
        rng = 0, 0, mask
    if watched or any(g is not None and is_batched(g) for g in grads):  # is_grads_batched=True
        device = next((g.device for g in grads if g is not None), None)
        call, rng = Dispatched.apply, rng and random.packed(rng, device)
        plain = False
    for g in grads:
        if g is not None:
            check_dense(op.name, "grad_output", g)
    made = backward_pass(op, restore(own, recording.others(kept)), grads, needed, recording.order)
    found = [None] * len(op.params)
    if made is not None:
        if plain:
            recording.learn(made, saved, grads)
        found = run_pass(made, rng, call)
    return (*found, None) if op.streams else tuple(found)


def save(ctx: Any, op: Operator, args: Sequence[Any], out: Any, needed: Sequence[bool], *more: torch.Tensor
         ) -> None:
    """Keep the arguments that the backward expression reads, of other tensors a description; the
    outputs that it reads; `more`; and the order of the walk, if random numbers were drawn."""
    reads, saved = op.read_by_backward(tuple(needed))
    results = unpack(out)
    ctx.order = op.drawn(args, results)
    fixed = [o for o, graded in zip(results, op.graded(tuple(needed)), strict=True) if not graded]
    if fixed:
        ctx.mark_non_differentiable(*fixed)
    more = (*(results[k] for k in saved), *more)
    ctx.save_for_backward(*[a for a, read in zip(args, reads, strict=True)
                            if read and isinstance(a, torch.Tensor)], *more)
    ctx.others = [a if not isinstance(a, torch.Tensor) else None if read else (a.shape, a.dtype, a.device)
                  for a, read in zip(args, reads, strict=True)] + [None] * len(more)


def restore(saved: Sequence[torch.Tensor], others: Sequence[Any]) -> list[Any]:
    """What `save` was given; a tensor of which only the description matters has one element of memory."""
    read = iter(saved)
    return [next(read) if other is None else other if not isinstance(other, tuple) else
            torch.empty((), dtype=other[1], device=other[2]).expand(other[0]) for other in others]


def backward(op: Operator, args: list[Any], grads: Sequence[Any], needed: Sequence[bool], rng: Any,
             call: Call, order: layout.Ints | None) -> list[Any]:
    """Gradients of the needed arguments, None for the others and where no given gradient is of one (zeros
    would make an optimizer move them). `order`: what `Operator.drawn` gave."""
    made = backward_pass(op, args, grads, needed, order)
    return [None] * len(op.params) if made is None else run_pass(made, rng, call)


def backward_pass(op: Operator, args: list[Any], grads: Sequence[Any], needed: Sequence[bool],
                  order: layout.Ints | None) -> BackwardPass | None:
    """What is to do; None: nothing."""
    given = tuple(g is not None and d for g, d in zip(grads, op.differentiable, strict=True))
    if not any(given) or not any(needed):
        return None
    n = len(op.params)
    whole = op.gradient(tuple(needed), given)
    saved = dict(zip(op.read_by_backward(tuple(needed))[1], args[n:], strict=True))
    inputs = [*args[:n], *(saved[k] for k in whole.saved),
              *(g for g, is_given in zip(grads, given, strict=True) if is_given)]
    behind = op.behind(given)
    origin = _origins(whole, inputs, [need and k in behind for k, need in enumerate(needed)])
    own = tuple(i == o for i, o in enumerate(origin))
    gradient = op.gradient(tuple(needed), given, own).walking(order) if any(own) else None
    return BackwardPass(gradient, inputs, whole.saved, origin)


def run_pass(made: BackwardPass, rng: Any, call: Call) -> list[Any]:
    gradient, inputs, _, origin = made
    computed: dict[int, Any] = {}
    if gradient is not None:
        out = call(gradient, inputs, rng if gradient.streams else None)
        own = (i for i, o in enumerate(origin) if i == o)
        computed = dict(zip(own, unpack(out), strict=True))
    return [None if o is None else computed[o] if o in computed else _seen_as(inputs[o], inputs[i].shape)
            for i, o in enumerate(origin)]


def _seen_as(grad: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The very tensor where it has the shape: a view of its own autograd takes for memory that it may keep
    and add to."""
    return grad if grad.shape == shape else grad.expand(shape)


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
