"""What autograd does again for a kind of call that was made before, written out as functions.

What a call saves is the same for all calls of one kind. What `autograd.backward` finds out (which gradients,
from what, by which plan) is so too, where tensors of the same kind are saved and received: a guard, the plan,
and what goes where. A device's backward passes run in a thread of torch's, on a processor that has nothing
of this interpreter in its caches: there each step of Python takes two to three times as long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fusionrt.dispatch import guard, settled

if TYPE_CHECKING:
    from fusionrt.op import Operator

Run = Callable[..., Any]
NUMBER = object()
_KEPT = 8  # backward passes of one kind of call, as gradients come in several layouts


class Pass(NamedTuple):
    """What a backward pass does: the operator that computes gradients (None: nothing is computed), its
    inputs (the arguments, some saved outputs, the given gradients), and where each argument's gradient
    comes from: the place of an input, or None."""

    gradient: Operator | None
    inputs: list[Any]
    saved: tuple[int, ...]
    origin: list[int | None]


class Recording:
    """A kind of call that is recorded: of this operator, by this plan (so of one thread), where these
    arguments need gradients. `save(ctx, rng, args, out)` keeps what the backward pass reads, and gives what
    the caller gets."""

    def __init__(self, op: Operator, plan: Run, needed: tuple[bool, ...]) -> None:
        self.op, self.plan, self.needed = op, plan, needed
        self.save = self._save_first
        self.order: tuple[int, ...] | None = None  # of the walk, if random numbers were drawn
        self.described: list[Any] = []  # what is known of an argument that is not saved; None: it is
        self.known: dict[int, list[Run]] = {}  # of a thread, whose plans they run
        self.is_settled = False

    def settle(self) -> None:
        """For many calls: its plans in machine code, and those of its backward passes."""
        self.plan, self.is_settled = settled(self.plan), True
        for runs in self.known.values():
            for run in runs:
                _settle(run.__globals__)

    def _save_first(self, ctx: Any, rng: Any, args: Sequence[Any], out: Any) -> Any:
        results = out[0] if self.op.masking else out
        self.order = self.op.drawn(args, results if isinstance(results, tuple) else (results,))
        reads, _ = self.op.read_by_backward(self.needed)
        self.described = [NUMBER if not isinstance(a, torch.Tensor) else None if read else
                          (a.shape, a.dtype, a.device) for a, read in zip(args, reads, strict=True)]
        self.save = self._write_saving(isinstance(results, tuple))
        return self.save(ctx, rng, args, out)

    def _write_saving(self, several: bool) -> Run:
        result = "out[{}]" if several else "out"
        kept = [f"args[{i}]" for i, known in enumerate(self.described) if known is None]
        kept += [result.format(k) for k in self.op.read_by_backward(self.needed)[1]]
        kept += ["mask"] if self.op.masking else []
        fixed = [result.format(k) for k, graded in enumerate(self.op.graded(self.needed)) if not graded]
        numbers = [f"args[{i}]," for i, known in enumerate(self.described) if known is NUMBER]
        lines = ["def save(ctx, rng, args, out):", *(["    out, mask = out"] if self.op.masking else []),
                 f"    ctx.save_for_backward({', '.join(kept)})",
                 f"    ctx.kept = recording, rng, ({' '.join(numbers)})",
                 *([f"    ctx.mark_non_differentiable({', '.join(fixed)})"] if fixed else []),
                 "    return out"]
        scope: dict[str, Any] = {"recording": self}
        exec("\n".join(lines), scope)
        save: Run = scope["save"]
        return save

    def others(self, numbers: Sequence[Any]) -> list[Any]:
        """What `autograd.restore` needs beside the saved tensors."""
        left = iter(numbers)
        saved_outputs = self.op.read_by_backward(self.needed)[1]
        return [next(left) if d is NUMBER else d for d in self.described] + [None] * len(saved_outputs)

    def again(self, saved: Sequence[Any], numbers: Sequence[Any], grads: Sequence[Any], rng: Any) -> Any:
        """What `backward` returns, or None for tensors of kinds that it was not given before."""
        for run in self.known.get(threading.get_ident(), ()):
            found = run(saved, numbers, grads, rng)
            if found is not None:
                return found
        return None

    def keep(self, made: Pass, saved: Sequence[torch.Tensor], grads: Sequence[Any]) -> None:
        known = self.known.setdefault(threading.get_ident(), [])
        rehearsed = any(t.is_meta for t in (*saved, *grads) if t is not None)  # each is to be heard
        if len(known) < _KEPT and not rehearsed:
            known.append(self._write(made, saved, grads))

    def _write(self, made: Pass, saved: Sequence[torch.Tensor], grads: Sequence[Any]) -> Run:
        n, masking = len(self.op.params), self.op.masking
        given = [k for k, g in enumerate(grads) if g is not None]
        names = [*self._names(made), *(f"grads[{k}]" for k in given if self.op.differentiable[k])]
        conditions = [f"check({', '.join(['*saved', *(f'grads[{k}]' for k in given)])})"]
        conditions += [f"grads[{k}] is None" for k, g in enumerate(grads) if g is None]
        scope: dict[str, Any] = {"check": guard(*saved, *(grads[k] for k in given)),
                                 **{f"unread{i}": a for i, a in enumerate(made.inputs[:n])
                                    if isinstance(self.described[i], tuple)}}
        lines = ["def run(saved, numbers, grads, rng):", "    try:",
                 f"        if not ({' and '.join(conditions)}): return None",
                 "    except TypeError:", "        return None"]
        own = [i for i, o in enumerate(made.origin) if i == o]
        if made.gradient is not None:
            scope["plan"] = made.gradient.plan(made.inputs)
            if self.is_settled:
                _settle(scope)
            drawn = ["(0, 0, saved[-1])" if masking else "rng"] if made.gradient.streams else []
            lines.append(f"    out = plan({', '.join([*names, *drawn])})")
        results = {i: f"out[{k}]" if len(own) > 1 else "out" for k, i in enumerate(own)}
        returned = ["None" if o is None else results[o] if o < n else names[o] if
                    made.inputs[o].shape == made.inputs[i].shape else
                    f"{names[o]}.expand({tuple(made.inputs[i].shape)})" for i, o in enumerate(made.origin)]
        lines.append(f"    return None, None, {', '.join(returned)}")
        exec("\n".join(lines), scope)
        run: Run = scope["run"]
        return run

    def _names(self, made: Pass) -> list[str]:
        """What the arguments and the saved outputs are called in `run`."""
        names: list[str] = []
        read = number = 0
        for i, known in enumerate(self.described):
            if known is None:
                names.append(f"saved[{read}]")
                read += 1
            elif known is NUMBER:
                names.append(f"numbers[{number}]")
                number += 1
            else:
                names.append(f"unread{i}")
        places = {k: read + at for at, k in enumerate(self.op.read_by_backward(self.needed)[1])}
        return names + [f"saved[{places[k]}]" for k in made.saved]


def _settle(scope: dict[str, Any]) -> None:
    if "plan" in scope:
        scope["plan"] = settled(scope["plan"])
