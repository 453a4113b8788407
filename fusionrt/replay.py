"""What autograd does again for a kind of call that was made before, written out as one function.

What a call saves is the same for all calls of one plan. What `autograd.backward` finds out (which gradients,
from what, by which plan) is so too, where tensors of the same kind are saved and received. Each thread keeps
the last such function of an operator: for a backward pass a guard, the plan, and what goes where. That
spares 15 of 28 us of Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fusionrt.dispatch import guard

if TYPE_CHECKING:
    from fusionrt.op import Operator

Run = Callable[..., Any]


class Pass(NamedTuple):
    """What a backward pass does: the operator that computes gradients (None: nothing is computed), its
    inputs (the arguments, some saved outputs, the given gradients), and where each argument's gradient
    comes from: the place of an input, or None."""

    gradient: Operator | None
    inputs: list[Any]
    saved: tuple[int, ...]
    origin: list[int | None]


class Saving(NamedTuple):
    """`run(ctx, args, out, mask)` does what `autograd.save` does, and marks outputs without a gradient."""

    plan: Run
    needed: tuple[bool, ...]
    run: Run


def saving(op: Operator, plan: Run, needed: tuple[bool, ...], args: Sequence[Any], out: Any) -> Run:
    last: Saving | None = op.local.__dict__.get("saving")
    if last is None or last.plan is not plan or last.needed != needed:
        last = op.local.saving = Saving(plan, needed, _write_saving(op, needed, args, out))
    return last.run


def _write_saving(op: Operator, needed: tuple[bool, ...], args: Sequence[Any], out: Any) -> Run:
    reads, saved = op.read_by_backward(needed)
    result = "out[{}]" if isinstance(out, tuple) else "out"
    kept = [f"args[{i}]" for i, read in enumerate(reads) if read and isinstance(args[i], torch.Tensor)]
    kept += [result.format(k) for k in saved]
    fixed = [result.format(k) for k, graded in enumerate(op.differentiable) if not graded]
    unread: dict[str, Any] = {f"unread{i}": (a.shape, a.dtype, a.device) for i, a in enumerate(args)
                              if isinstance(a, torch.Tensor) and not reads[i]}
    others = [f"args[{i}]" if not isinstance(a, torch.Tensor) else "None" if reads[i] else f"unread{i}"
              for i, a in enumerate(args)] + ["None"] * len(saved)
    order = op.drawn(args, out if isinstance(out, tuple) else (out,))
    kept += ["mask"] if op.masking else []
    lines = ["def run(ctx, args, out, mask):", f"    ctx.order = {order}",
             f"    ctx.save_for_backward({', '.join(kept)})",
             f"    ctx.others = [{', '.join(others)}]",
             *([f"    ctx.mark_non_differentiable({', '.join(fixed)})"] if fixed else [])]
    exec("\n".join(lines), unread)
    run: Run = unread["run"]
    return run


class Known(NamedTuple):
    """`run(saved, others, grads, rng)` gives None for tensors that it was not made for."""

    plan: Run                     # of the forward pass: it decides the kinds of the arguments
    needed: tuple[bool, ...]
    run: Run


def find(op: Operator, plan: Run, needed: tuple[bool, ...]) -> Run | None:
    known: Known | None = op.local.__dict__.get("known_backward")
    return known.run if known is not None and known.plan is plan and known.needed == needed else None


def keep(op: Operator, plan: Run, needed: tuple[bool, ...], made: Pass, saved: Sequence[torch.Tensor],
         others: Sequence[Any], grads: Sequence[Any]) -> None:
    """For the next calls: what `saved` and `others` are is said by `autograd.save`."""
    op.local.known_backward = Known(plan, needed, _write(op, needed, made, saved, others, grads))


def _write(op: Operator, needed: tuple[bool, ...], made: Pass, saved: Sequence[torch.Tensor],
           others: Sequence[Any], grads: Sequence[Any]) -> Run:
    n = len(op.params)
    given = [k for k, g in enumerate(grads) if g is not None]
    names = [*_saved(op, needed, made, others), *(f"grads[{k}]" for k in given if op.differentiable[k])]
    conditions = [f"check({', '.join(['*saved', *(f'grads[{k}]' for k in given)])})"]
    conditions += [f"grads[{k}] is None" for k, g in enumerate(grads) if g is None]
    scope: dict[str, Any] = {"check": guard(*saved, *(grads[k] for k in given)),
                             **{f"unread{i}": a for i, a in enumerate(made.inputs[:n])
                                if isinstance(others[i], tuple)}}
    lines = ["def run(saved, others, grads, rng):", "    try:",
             f"        if not ({' and '.join(conditions)}): return None",
             "    except TypeError:", "        return None"]
    own = [i for i, o in enumerate(made.origin) if i == o]
    if made.gradient is not None:
        scope["plan"] = made.gradient.plan(made.inputs)
        lines.append(f"    out = plan({', '.join([*names, *(['rng'] if made.gradient.streams else [])])})")
    results = {i: f"out[{k}]" if len(own) > 1 else "out" for k, i in enumerate(own)}
    returned = ["None" if o is None else results[o] if o < n else names[o] if
                made.inputs[o].shape == made.inputs[i].shape else
                f"{names[o]}.expand({tuple(made.inputs[i].shape)})" for i, o in enumerate(made.origin)]
    lines.append(f"    return None, None, None, {', '.join(returned)}")
    exec("\n".join(lines), scope)
    run: Run = scope["run"]
    return run


def _saved(op: Operator, needed: tuple[bool, ...], made: Pass, others: Sequence[Any]) -> list[str]:
    """What the arguments and the saved outputs are called in `run`."""
    names: list[str] = []
    read = 0
    for i, other in enumerate(others[:len(op.params)]):
        if other is None:
            names.append(f"saved[{read}]")
            read += 1
        else:
            names.append(f"unread{i}" if isinstance(other, tuple) else f"others[{i}]")
    places = {k: read + at for at, k in enumerate(op.read_by_backward(needed)[1])}
    return names + [f"saved[{places[k]}]" for k in made.saved]
