"""What autograd does again for a kind of call that was made before, as a Function of its own.

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
from torch.autograd import forward_ad

from fusionrt import forks
from fusionrt.dispatch import compiled
from fusionrt.guards import guard
from fusionrt.problem import unpack
from fusionrt.settling import is_capturing, settled
from fusionrt.watching import dispatch_modes, transforms_active

if TYPE_CHECKING:
    from fusionrt.op import Operator

Run = Callable[..., Any]
NUMBER, UNKNOWN = object(), object()
_KEPT = 8  # backward passes of one kind of call in one thread, as gradients come in several layouts
_KEPT_BY_ALL = 4 * _KEPT
# Guards see other watchers, but no keys of modes and transforms in the thread of a device.
WATCHED = "grad_enabled() or forward_ad._current_level >= 0 or dispatch_modes() or transforms_active()"
_lock = forks.Lock()


class Pass(NamedTuple):
    """What a backward pass does: the operator that computes gradients (None: nothing is computed), its
    inputs (the arguments, some saved outputs, the given gradients), and where each argument's gradient
    comes from: the place of an input, or None."""

    gradient: Operator | None
    inputs: list[Any]
    saved: tuple[int, ...]
    origin: list[int | None]


class Known(NamedTuple):
    """A kind of backward pass: what is done, as lines in which {k} stands for its number among all; in which
    thread, whose plan it is, where this check is true; the arguments that only were described."""

    lines: list[str]
    thread: int
    check: Run
    plan: Run | None
    unread: list[Any]


class Recording:
    """A kind of call that is recorded: of this operator, by this plan (so of one thread), where these
    arguments need gradients. `apply` takes the arguments, and random numbers where the operator draws some.
    `backward(recording, saved, kept, grads)` gives the gradients of a kind of backward pass that was not met
    before, in any thread."""

    def __init__(self, op: Operator, args: Sequence[Any], plan: Run, needed: tuple[bool, ...], backward: Run
                 ) -> None:
        self.op, self.needed, self.plan = op, needed, plan
        reads, self.saved_outputs = op.read_by_backward(needed)
        # What is known of an argument that is not saved; None: it is.
        self.described = [NUMBER if not isinstance(a, torch.Tensor) else None if read else
                          (a.shape, a.dtype, a.device) for a, read in zip(args, reads, strict=True)]
        self.order: Any = UNKNOWN if op.streams or op.masking else None  # of the walk, see `Operator.drawn`
        self.passes: list[Known] = []
        self.is_settled = False
        self.scope: dict[str, Any] = {
            "recording": self, "UNKNOWN": UNKNOWN, "general": backward, "grad_enabled": torch.is_grad_enabled,
            "forward_ad": forward_ad, "thread": threading.get_ident, "dispatch_modes": dispatch_modes,
            "transforms_active": transforms_active}
        self.function: Any = type(op.name, (torch.autograd.Function,), {
            "recording": self, "forward": staticmethod(self._forward()),
            "backward": staticmethod(self._backward())})
        self.apply = straight(self.function)

    def settle(self) -> None:
        """For many calls: its plans in machine code, and those of its backward passes."""
        with _lock():
            self.is_settled, self.plan = True, settled(self.plan)
            self.passes = [known._replace(plan=known.plan and settled(known.plan)) for known in self.passes]
            self._write()

    def see(self, args: Sequence[Any], out: Any) -> None:
        self.order = self.op.drawn(args, unpack(out))

    def keep(self, made: Pass, saved: Sequence[torch.Tensor], grads: Sequence[Any]) -> None:
        """What is done in this backward pass, for others of its kind in this thread."""
        if any(t.is_meta for t in (*saved, *grads) if t is not None):
            return  # each rehearsal is to be heard
        known, here = self._known(made, saved, grads), threading.get_ident()
        with _lock():
            if sum(other.thread == here for other in self.passes) < _KEPT:
                if self.is_settled and not is_capturing():
                    known = known._replace(plan=known.plan and settled(known.plan))
                self.passes = [*self.passes, known][-_KEPT_BY_ALL:]  # threads come and go
                self._write()

    def _write(self) -> None:
        self.function.forward = staticmethod(self._forward())
        self.function.backward = staticmethod(self._backward())
        straight(self.function)

    def _forward(self) -> Run:
        op, n = self.op, len(self.described)
        several = len(op.outputs) - op.masking > 1
        result, args = "out[{}]" if several else "out", [f"a{i}" for i in range(n)]
        given = ", ".join([*args, "rng"] if op.streams else args)
        saved = [name for name, known in zip(args, self.described, strict=True) if known is None]
        saved += [result.format(k) for k in self.saved_outputs] + ["mask"] * op.masking
        kept = ["rng"] * bool(op.streams)
        kept += [name for name, known in zip(args, self.described, strict=True) if known is NUMBER]
        fixed = [result.format(k) for k, graded in enumerate(op.graded(self.needed)) if not graded]
        lines = [f"def forward(ctx, {given}):", "ctx.set_materialize_grads(False)", f"out = plan({given})"]
        lines += ["out, mask = out"] * op.masking
        if self.order is UNKNOWN:
            lines.append(f"if recording.order is UNKNOWN: recording.see(({', '.join(args)},), out)")
        lines.append(f"ctx.save_for_backward({', '.join(saved)})")
        lines += [f"ctx.kept = {', '.join(kept)},"] * bool(kept)
        lines += [f"ctx.mark_non_differentiable({', '.join(fixed)})"] * bool(fixed)
        self.kept = "ctx.kept" if kept else "()"
        return self._function([*lines, "return out"], {"plan": self.plan})

    def _backward(self) -> Run:
        # Saved tensors are asked for once: hooks of checkpoints compute them anew.
        lines = ["def backward(ctx, *grads):", f"saved, kept = ctx.saved_tensors, {self.kept}"]
        lines += [f"here = None if {WATCHED} else thread()"] * bool(self.passes)
        scope: dict[str, Any] = {}
        for k, known in enumerate(self.passes):
            lines += [line.format(k=k) for line in known.lines]
            scope |= {f"check{k}": known.check, f"plan{k}": known.plan, f"unread{k}": known.unread,
                      f"thread{k}": known.thread}
        return self._function([*lines, "return general(recording, saved, kept, grads)"], scope)

    def _function(self, lines: Sequence[str], scope: dict[str, Any]) -> Run:
        """In a scope of its own: another thread may be in the one that it replaces."""
        scope |= self.scope
        exec(compiled("\n    ".join(lines)), scope)
        function: Run = scope[lines[0].removeprefix("def ").partition("(")[0]]
        return function

    def others(self, kept: Sequence[Any]) -> list[Any]:
        """What `autograd.restore` needs beside the saved tensors."""
        left = iter(kept[bool(self.op.streams):])
        return [next(left) if d is NUMBER else d for d in self.described] + [None] * len(self.saved_outputs)

    def _known(self, made: Pass, saved: Sequence[torch.Tensor], grads: Sequence[Any]) -> Known:
        n = len(self.op.params)
        given = [i for i, g in enumerate(grads) if g is not None]
        names = [*self._names(made), *(f"grads[{i}]" for i in given if self.op.differentiable[i])]
        conditions = ["here == thread{k}",
                      f"check{{k}}({', '.join(['*saved', *(f'grads[{i}]' for i in given)])})"]
        conditions += [f"grads[{i}] is None" for i, g in enumerate(grads) if g is None]
        lines = [f"try: fits = {' and '.join(conditions)}", "except TypeError: fits = False", "if fits:"]
        own, plan = [i for i, o in enumerate(made.origin) if i == o], None
        if made.gradient is not None:
            plan = made.gradient.plan(made.inputs)
            drawn = ["(0, 0, saved[-1])" if self.op.masking else "kept[0]"] if made.gradient.streams else []
            lines.append(f"    out = plan{{k}}({', '.join([*names, *drawn])})")
        results = {i: f"out[{at}]" if len(own) > 1 else "out" for at, i in enumerate(own)}
        returned = ["None" if o is None else results[o] if o < n else names[o] if
                    made.inputs[o].shape == made.inputs[i].shape else
                    f"{names[o]}.expand({tuple(made.inputs[i].shape)})" for i, o in enumerate(made.origin)]
        returned += ["None"] * bool(self.op.streams)
        unread = [a for a, d in zip(made.inputs, self.described, strict=False) if isinstance(d, tuple)]
        return Known([*lines, f"    return {', '.join(returned)},"], threading.get_ident(),
                     guard(*saved, *(grads[i] for i in given)), plan, unread)

    def _names(self, made: Pass) -> list[str]:
        """What the arguments and the saved outputs are called."""
        names: list[str] = []
        read, number, unread = 0, int(bool(self.op.streams)), 0
        for known in self.described:
            if known is None:
                names.append(f"saved[{read}]")
                read += 1
            elif known is NUMBER:
                names.append(f"kept[{number}]")
                number += 1
            else:
                names.append(f"unread{{k}}[{unread}]")
                unread += 1
        places = {output: read + at for at, output in enumerate(self.saved_outputs)}
        return names + [f"saved[{places[output]}]" for output in made.saved]


def straight(function: Any) -> Run:
    """`function.apply`, which otherwise first unwraps functorch's dead wrappers in Python, two fifths of its
    cost: for calls outside of functorch's transforms. And a node calls `backward` itself, not what looks for
    that or a `vjp` in each pass."""
    function._backward_cls.apply = function.backward
    apply: Run = super(torch.autograd.function._SingleLevelFunction, function).apply
    return apply
