"""What autograd does again for a kind of call that was made before, as a Function of its own.

What a call saves is the same for all calls of one kind. What `autograd.backward` finds out (which gradients,
from what, by which plan) is so too, where tensors of the same kind are saved and received: a guard, the plan,
and what goes where. A device's backward passes run in a thread of torch's, on a processor that has nothing
of this interpreter in its caches: there each step of Python takes two to three times as long.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.autograd import forward_ad

from fusionrt.guards import guard
from fusionrt.problem import unpack
from fusionrt.settling import is_capturing, settle, settled, settles
from fusionrt.steps import Steps, Value
from fusionrt.watching import dispatch_modes, transforms_active

if TYPE_CHECKING:
    from fusionrt.op import Operator

Run = Callable[..., Any]
# Where a value of a backward pass comes from: the k-th of what is saved, kept, given, or made by the plan;
# random numbers whose mask is the k-th of what is saved; itself.
Source = tuple[Literal["saved", "kept", "grad", "out", "mask", "this"], Any]
NUMBER, UNKNOWN = object(), object()
_KEPT = 8  # backward passes of one kind of call in one thread, as gradients come in several layouts
_KEPT_BY_ALL = 4 * _KEPT
# Guards see other watchers, but no keys of modes and transforms in the thread of a device.
WATCHERS = ((torch.is_grad_enabled, False), (dispatch_modes, 0), (transforms_active, False))


class Pass(NamedTuple):
    """What a backward pass does: the operator that computes gradients (None: nothing is computed), its
    inputs (the arguments, some saved outputs, the given gradients), and where each argument's gradient
    comes from: the place of an input, or None."""

    gradient: Operator | None
    inputs: list[Any]
    saved: tuple[int, ...]
    origin: list[int | None]


class Known(NamedTuple):
    """A kind of backward pass."""

    thread: int              # whose plan it is
    given: list[bool]        # which outputs' gradients are
    check: Run               # of what is saved, then of the given gradients
    plan: Run | None         # None: nothing is computed
    inputs: list[Source]     # of the plan
    n_made: int              # by it
    results: list[tuple[Source, tuple[int, ...] | None] | None]  # and in which shape, if that is not its own

    def settled(self) -> Known:
        return self._replace(plan=self.plan and settled(self.plan))


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
        self.general = backward
        self.passes: list[Known] = []
        self.is_settled = False
        settles(self, self.settle)
        self.function: Any = type(op.name, (torch.autograd.Function,), {"recording": self})
        self._write()
        self.apply = straight(self.function)

    # No lock: what is done under one may begin a collection, and a finalizer a backward pass, in this thread
    # or in a device's. What is lost where two threads change the same comes again.

    def settle(self) -> None:
        """For many calls: in machine code, as its plans and those of its backward passes."""
        self.plan, self.passes = settled(self.plan), [known.settled() for known in self.passes]
        self.is_settled = True
        self._write()

    def see(self, args: Sequence[Any], out: Any) -> None:
        self.order = self.op.drawn(args, unpack(out))
        self._write()

    def keep(self, made: Pass, saved: Sequence[torch.Tensor], grads: Sequence[Any]) -> None:
        """What is done in this backward pass, for others of its kind in this thread."""
        if any(t.is_meta for t in (*saved, *grads) if t is not None):
            return  # each rehearsal is to be heard
        if sum(other.thread == threading.get_ident() for other in self.passes) >= _KEPT:
            return
        known = self._known(made, saved, grads)
        if self.is_settled and not is_capturing():
            known = known.settled()
        self.passes = [*self.passes, known][-_KEPT_BY_ALL:]  # threads come and go
        self._write()

    def _write(self) -> None:
        """Of several who do so at once the last one, from what is there then."""
        state: tuple[Any, ...] = ()
        while not all(a is b for a, b in itertools.zip_longest(state, self._state())):
            state, is_settled = self._state(), self.is_settled
            forward, backward = self._forward(), self._backward()
            self.function.backward = staticmethod(backward.function())  # compiled autograd reads it
            self.function.forward = staticmethod(forward.settled() if is_settled else forward.function())
            straight(self.function, backward.settled() if is_settled else None)

    def _state(self) -> tuple[Any, ...]:
        return self.plan, self.order, self.passes, self.is_settled

    def _forward(self) -> Steps:
        op, n = self.op, len(self.described)
        steps = Steps(1 + n + bool(op.streams))
        ctx, *given = steps.arguments
        args, rng = given[:n], given[n:]
        steps.set(ctx, "materialize_grads", False)
        out = steps.call(self.plan, *given)
        masks = []
        if op.masking:
            out, masks = steps.item(out, 0), [steps.item(out, 1)]
        several = len(op.outputs) - op.masking > 1
        results = [steps.item(out, k) for k in range(len(op.outputs))] if several else [out]
        if self.order is UNKNOWN:
            steps.call(self.see, steps.tuple(*args), out)
        saved = [a for a, known in zip(args, self.described, strict=True) if known is None]
        saved += [results[k] for k in self.saved_outputs] + masks
        steps.set(ctx, "to_save", steps.tuple(*saved))
        kept = rng + [a for a, known in zip(args, self.described, strict=True) if known is NUMBER]
        if kept:
            steps.set(ctx, "kept", steps.tuple(*kept))
        fixed = [o for o, graded in zip(results, op.graded(self.needed), strict=True) if not graded]
        if fixed:
            steps.set(ctx, "non_differentiable", steps.tuple(*fixed))
        steps.give(out)
        return steps

    def _backward(self) -> Steps:
        steps = Steps(1 + len(self.op.differentiable))
        ctx, *grads = steps.arguments
        # Saved tensors are asked for once: hooks of checkpoints compute them anew.
        saved = steps.get(ctx, "saved_tensors")
        kept: Any = steps.get(ctx, "kept") if self.op.streams or NUMBER in self.described else ()
        if self.passes:
            n_saved = self.described.count(None) + len(self.saved_outputs) + self.op.masking
            tensors = [steps.item(saved, k) for k in range(n_saved)]
            with steps.perhaps():
                steps.equal(steps.get(forward_ad, "_current_level"), -1)
                for watcher, usual in WATCHERS:
                    steps.equal(steps.call(watcher), usual)
                here = steps.call(threading.get_ident)
                for known in self.passes:
                    with steps.perhaps():
                        steps.equal(here, known.thread)
                        self._repeat(steps, known, tensors, kept, grads)
        steps.give(steps.call(self.general, self, saved, kept, steps.tuple(*grads)))
        return steps

    def _repeat(self, steps: Steps, known: Known, saved: Sequence[Value], kept: Any, grads: Sequence[Value]
                ) -> None:
        """The pass, if it is of this kind."""
        for g, is_given in zip(grads, known.given, strict=True):
            (steps.other if is_given else steps.same)(g, None)
        given = [g for g, is_given in zip(grads, known.given, strict=True) if is_given]
        steps.same(steps.call(known.check, *saved, *given), True)
        if not self.is_settled:  # the graph of one call may be kept for many passes
            steps.call(settle, self)
        outs: list[Value] = []

        def value(source: Source) -> Any:
            kind, k = source
            match kind:
                case "saved":
                    return saved[k]
                case "kept":
                    return steps.item(kept, k)
                case "grad":
                    return grads[k]
                case "out":
                    return outs[k]
                case "mask":
                    return steps.tuple(0, 0, saved[k])
                case _:
                    return k

        if known.plan is not None:
            out = steps.call(known.plan, *map(value, known.inputs))
            outs = [steps.item(out, k) for k in range(known.n_made)] if known.n_made > 1 else [out]
        results = []
        for result in known.results:
            of, shape = result or (("this", None), None)
            results.append(value(of) if shape is None else steps.call(steps.get(value(of), "expand"), shape))
        steps.give(steps.tuple(*results))

    def others(self, kept: Sequence[Any]) -> list[Any]:
        """What `autograd.restore` needs beside the saved tensors."""
        left = iter(kept[bool(self.op.streams):])
        return [next(left) if d is NUMBER else d for d in self.described] + [None] * len(self.saved_outputs)

    def _known(self, made: Pass, saved: Sequence[torch.Tensor], grads: Sequence[Any]) -> Known:
        n, given = len(self.op.params), [g is not None for g in grads]
        read = [d and is_given for d, is_given in zip(self.op.differentiable, given, strict=True)]
        inputs = self._sources(made) + [("grad", k) for k, is_read in enumerate(read) if is_read]
        own = [i for i, o in enumerate(made.origin) if i == o]
        plan: Run | None = None
        drawn: list[Source] = []
        if made.gradient is not None:
            plan = made.gradient.plan(made.inputs)
            if made.gradient.streams:
                drawn = [("mask", len(saved) - 1) if self.op.masking else ("kept", 0)]
        results: list[Any] = []
        for i, o in enumerate(made.origin):
            if o is not None and o < n:
                results.append((("out", own.index(o)), None))
            elif o is not None:
                shape, other = made.inputs[i].shape, made.inputs[o].shape
                results.append((inputs[o], None if other == shape else tuple(shape)))
            else:
                results.append(None)
        return Known(threading.get_ident(), given, guard(*saved, *(g for g in grads if g is not None)), plan,
                     inputs + drawn, len(own), results + [None] * bool(self.op.streams))

    def _sources(self, made: Pass) -> list[Source]:
        """Of the arguments and of the saved outputs."""
        sources: list[Source] = []
        read, number = itertools.count(), itertools.count(int(bool(self.op.streams)))
        for known, a in zip(self.described, made.inputs, strict=False):
            sources.append(("saved", next(read)) if known is None else
                           ("kept", next(number)) if known is NUMBER else ("this", a))
        places = dict(zip(self.saved_outputs, read, strict=False))
        return sources + [("saved", places[output]) for output in made.saved]


def straight(function: Any, backward: Run | None = None) -> Run:
    """`function.apply`, which otherwise first unwraps functorch's dead wrappers in Python, two fifths of its
    cost: for calls outside of functorch's transforms. And a node calls `backward` itself, the function's
    unless told, not what looks for that or a `vjp` in each pass."""
    function._backward_cls.apply = _method(backward or function.backward)
    apply: Run = super(torch.autograd.function._SingleLevelFunction, function).apply
    return apply


# Binds to an instance what is machine code, too.
_method = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(("PyInstanceMethod_New", ctypes.pythonapi))
