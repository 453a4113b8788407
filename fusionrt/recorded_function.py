"""What autograd does again for a kind of call that was made before, as a Function of its own.

What a call saves is the same for all calls of one kind. What its backward pass finds out (which gradients,
from what, by which plans) is so too, where tensors of the same kind are saved and received: a guard, and
steps. A device's backward passes run in a thread of torch's, on a processor that has nothing of this
interpreter in its caches: there each step of Python takes two to three times as long.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from fusionrt.guards import guard
from fusionrt.settling import Again, is_capturing, prepare_settling, settle_when_due
from fusionrt.steps import Steps, Value
from fusionrt.watching import OF_BACKWARD

Run = Callable[..., Any]
_KEPT = 8  # backward passes of one kind of call in one thread, as gradients come in several layouts
_KEPT_BY_ALL = 4 * _KEPT

NONE = Steps(0)


class Known(NamedTuple):
    """A kind of backward pass."""

    thread: int              # whose plans its steps call
    given: tuple[bool, ...]  # which outputs' gradients are
    places: tuple[int, ...]  # of what is saved: tensors
    check: Run               # of what is saved, then of the given gradients
    steps: Steps = NONE      # of the context, what is saved, the gradients of outputs: those of arguments

    def with_settled(self) -> Known:
        return self._replace(steps=self.steps.with_settled())


class RecordedFunction:
    """A kind of call that is recorded, as a Function of its own: `apply`. `forward` is of the context and the
    arguments. `unknown_pass(recorded, ctx, saved, grads)`, of which `saved` is a list, gives the gradients of
    a kind of backward pass that was not met before, in any thread, and may `keep` it for others of its kind.
    """

    def __init__(self, name: str, n_results: int, forward: Steps, unknown_pass: Run) -> None:
        self.n_results, self.forward, self.unknown_pass = n_results, forward, unknown_pass
        self.passes: list[Known] = []
        self.is_settled, self.passes_again = False, Again()
        prepare_settling(self, self.settle)
        self._unknown: Run = lambda ctx, *grads: unknown_pass(self, ctx, list(ctx.saved_tensors), grads)
        self.function: Any = type(name, (torch.autograd.Function,), {
            "recorded": self, "backward": staticmethod(self._unknown)})  # compiled autograd's
        self.apply = straight(self.function)
        self._written: dict[str, tuple[tuple[Any, ...], Run]] = {}
        self._write()

    # No lock: what is done under one may begin a collection, and a finalizer a backward pass, in this thread
    # or in a device's. What is lost where two threads change the same comes again.

    def settle(self) -> None:
        """For many calls: in machine code, as the plans and those of its backward passes."""
        self.passes = [known.with_settled() for known in self.passes]
        self.is_settled = True
        self.become(self.forward.with_settled())

    def settled_apply(self) -> Run:
        self.settle()
        return self.apply

    def become(self, forward: Steps) -> None:
        self.forward = forward.with_settled() if self.is_settled else forward
        self._write()

    def kind(self, saved: Sequence[Any], grads: Sequence[Any]) -> Known | None:
        """Of a backward pass of these tensors, for `keep`; None: one more is not worth it, nor is the first
        one."""
        if not self.passes_again() or any(t is not None and t.is_meta for t in (*saved, *grads)):
            return None  # each rehearsal is to be heard
        here = threading.get_ident()
        if sum(other.thread == here for other in self.passes) >= _KEPT:
            return None
        return Known(here, tuple(g is not None for g in grads),
                     tuple(k for k, t in enumerate(saved) if t is not None),
                     guard(*(t for t in (*saved, *grads) if t is not None)))

    def keep(self, known: Known) -> None:
        """What is done in a backward pass, for others of its kind in this thread."""
        if self.is_settled and not is_capturing():
            known = known.with_settled()
        self.passes = [*self.passes, known][-_KEPT_BY_ALL:]  # threads come and go
        self._write()

    def _write(self) -> None:
        """Of several who do so at once the last one, from what is there then."""
        state: tuple[Any, ...] = ()
        while state != (now := (self.is_settled, self.forward, self.passes)):
            state, (is_settled, forward, passes) = now, now
            self.function.forward = staticmethod(self._made("forward", is_settled, forward))
            straight(self.function, self._made("backward", is_settled, passes))

    def _made(self, half: str, is_settled: bool, of: Any) -> Run:
        """The forward pass of steps, the backward one of known passes; not again for what is the same."""
        known = self._written.get(half)
        if known is None or known[0] != (is_settled, of):
            steps = of if half == "forward" else self._backward(of) if of else None
            run = self._unknown if steps is None else steps.machine_code() if is_settled else steps.function()
            known = self._written[half] = (is_settled, of), run
        return known[1]

    def _backward(self, passes: Sequence[Known]) -> Steps:
        steps = Steps(1 + self.n_results)
        ctx, *grads = steps.arguments
        # Saved tensors are asked for once: hooks of checkpoints compute them anew.
        saved = steps.get(ctx, "saved_tensors")
        if passes:
            with steps.perhaps():
                steps.equal(steps.get(forward_ad, "_current_level"), -1)
                for watcher, usual in OF_BACKWARD:
                    steps.equal(steps.call(watcher), usual)
                here = steps.call(threading.get_ident)
                for known in passes:
                    with steps.perhaps():
                        steps.equal(here, known.thread)
                        self._repeat(steps, known, ctx, saved, grads)
        # A list is emptied by whoever wants what is in it to be let go of.
        steps.give(steps.call(self.unknown_pass, self, ctx, steps.call(list, saved), steps.tuple(*grads)))
        return steps

    def _repeat(self, steps: Steps, known: Known, ctx: Value, saved: Value, grads: Sequence[Value]) -> None:
        """The pass, if it is of this kind."""
        for g, is_given in zip(grads, known.given, strict=True):
            (steps.other if is_given else steps.same)(g, None)
        given = [g for g, is_given in zip(grads, known.given, strict=True) if is_given]
        tensors = [steps.item(saved, k) for k in known.places]
        steps.same(steps.call(known.check, *tensors, *given), True)
        if not self.is_settled:  # the graph of one call may be kept for many passes
            steps.call(settle_when_due, self)
        steps.insert(known.steps, ctx, saved, *grads)


def straight(function: Any, backward: Run | None = None) -> Run:
    """`function.apply`, which otherwise first unwraps functorch's dead wrappers in Python, two fifths of its
    cost: for calls outside of functorch's transforms. And a node calls `backward` itself, the function's
    unless told, not what looks for that or a `vjp` in each pass."""
    function._backward_cls.apply = _method(backward or function.backward)
    apply: Run = super(torch.autograd.function._SingleLevelFunction, function).apply
    return apply


# Binds to an instance what is machine code, too.
_method = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(("PyInstanceMethod_New", ctypes.pythonapi))
