"""Recorded calls of operators: a plan forward, and a plan for each kind of backward pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fusionrt.autograd import BackwardPass, recorded_backward
from fusionrt.mask import leaving_mask
from fusionrt.problem import unpack
from fusionrt.recorded_function import RecordedFunction
from fusionrt.settling import planned_once, prepare_settling, settled_now
from fusionrt.sites import keep
from fusionrt.steps import Steps, Value

if TYPE_CHECKING:
    from fusionrt.op import Operator

Run = Callable[..., Any]
NUMBER, UNKNOWN = object(), object()


class Recording(RecordedFunction):
    """A recorded kind of call: of this operator, by this plan (so of one thread), where these arguments need
    gradients. `apply` takes the arguments, and random numbers where the operator draws some."""

    def __init__(self, op: Operator, args: Sequence[Any], plan: Run, needed: tuple[bool, ...]) -> None:
        self.op, self.needed, self.plan = op, needed, plan
        reads, self.saved_outputs = op.read_by_backward(needed)
        # What is known of an argument that is not saved; None: it is.
        self.described = [NUMBER if not isinstance(a, torch.Tensor) else None if read else
                          (a.shape, a.dtype, a.device) for a, read in zip(args, reads, strict=True)]
        # Of the walk: see `Operator.drawn`.
        self.order: Any = UNKNOWN if op.streams or op.leaves_mask else None
        super().__init__(op.name, len(op.differentiable), self._forward(), recorded_backward)

    def settle(self) -> None:
        self.plan = settled_now(self.plan)
        self.forward = self._forward()
        super().settle()

    def see(self, args: Sequence[Any], out: Any) -> None:
        self.order = self.op.drawn(args, unpack(out))
        self.become(self._forward())

    def _forward(self) -> Steps:
        op, n = self.op, len(self.described)
        steps = Steps(1 + n + bool(op.streams))
        ctx, *given = steps.arguments
        args, rng = given[:n], given[n:]
        steps.set(ctx, "materialize_grads", False)
        out = steps.call(self.plan, *given)
        masks = []
        if op.leaves_mask:
            out, masks = steps.item(out, 0), [steps.item(out, 1)]
        several = len(op.outputs) - op.leaves_mask > 1
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

    def others(self, kept: Sequence[Any]) -> list[Any]:
        """What `autograd.restore` needs beside the saved tensors."""
        left = iter(kept[bool(self.op.streams):])
        return [next(left) if d is NUMBER else d for d in self.described] + [None] * len(self.saved_outputs)

    def learn(self, made: BackwardPass, saved: Sequence[torch.Tensor], grads: Sequence[Any]) -> None:
        """What is done in this backward pass, for others of its kind in this thread."""
        known = self.kind(saved, grads)
        if known is not None:
            self.keep(known._replace(steps=self._steps(made, saved, grads)))

    def _steps(self, made: BackwardPass, saved: Sequence[torch.Tensor], grads: Sequence[Any]) -> Steps:
        op, n = self.op, len(self.op.params)
        steps = Steps(2 + len(grads))
        ctx, of_saved, *of_grads = steps.arguments
        kept: Any = steps.get(ctx, "kept") if op.streams or NUMBER in self.described else None
        inputs = self._inputs(steps, made, of_saved, kept)
        inputs += [of_grad for of_grad, is_differentiable, g in zip(
            of_grads, op.differentiable, grads, strict=True) if is_differentiable and g is not None]
        own = [i for i, o in enumerate(made.origin) if i == o]
        outs: dict[int, Value] = {}
        if made.gradient is not None:
            if made.gradient.streams:
                mask = steps.item(of_saved, len(saved) - 1) if op.leaves_mask else None
                inputs.append(steps.item(kept, 0) if mask is None else steps.tuple(0, 0, mask))
            out = steps.call(made.gradient.plan(made.inputs), *inputs)
            outs = {i: steps.item(out, k) for k, i in enumerate(own)} if len(own) > 1 else {own[0]: out}
        results: list[Any] = []
        for i, o in enumerate(made.origin):
            if o is None or o < n:
                results.append(None if o is None else outs[o])
            elif made.inputs[i].shape == made.inputs[o].shape:
                results.append(inputs[o])
            else:
                results.append(steps.call(steps.get(inputs[o], "expand"), tuple(made.inputs[i].shape)))
        steps.give(steps.tuple(*results, *([None] if op.streams else [])))
        return steps

    def _inputs(self, steps: Steps, made: BackwardPass, saved: Value, kept: Any) -> list[Any]:
        """The arguments and the saved outputs."""
        read, number = itertools.count(), itertools.count(int(bool(self.op.streams)))
        inputs: list[Any] = [
            steps.item(saved, next(read)) if known is None else
            steps.item(kept, next(number)) if known is NUMBER else a
            for known, a in zip(self.described, made.inputs, strict=False)]
        places = dict(zip(self.saved_outputs, read, strict=False))
        return inputs + [steps.item(saved, places[output]) for output in made.saved]


def recording_of(op: Operator, args: Sequence[Any]) -> Recording:
    """That of calls of this kind, by this thread."""
    plan, known = op.plan(args), op.local.recordings
    needed = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    made = known.get((plan, needed))
    if made is None:
        made = Recording(op, args, plan, needed)
        keep(known, (plan, needed), made)
    return made


def _to_be_recorded(op: Operator, args: Sequence[Any]) -> Recording:
    """Of this operator, or of one that leaves a mask as well."""
    return recording_of(leaving_mask(op, args) or op, args)


def recorded(op: Operator, args: Sequence[Any]) -> Run:
    """Calls of this kind where gradients are recorded."""
    recording = _to_be_recorded(op, args)
    return prepare_settling(lambda *args: recording.apply(*args), recording.settled_apply)


class _Recorded:
    """`apply` of the recording of a kind of call, which is made when it is asked for: under `torch.no_grad`
    there may never be one."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self.recording: Recording | None = None
        self.apply: Run = self._first

    def _first(self, *args: Any) -> Any:
        self.recording = _to_be_recorded(self.operator, args[:len(self.operator.params)])
        self.apply = self.recording.apply
        return self.apply(*args)

    def settle(self) -> None:
        if self.recording is not None:
            self.recording.settle()


def in_either_mode(operator: Operator, draw: Callable[[], Any] | None) -> Run:
    """Calls that are recorded where gradients are, of arguments of one kind in one thread."""
    recorded, steps = _Recorded(operator), Steps(len(operator.params))
    drawn = [steps.call(draw)] if draw else []
    with steps.perhaps():
        steps.same(steps.call(torch.is_grad_enabled), True)
        steps.give(steps.call(steps.get(recorded, "apply"), *steps.arguments, *drawn))
    steps.give(steps.call(planned_once(operator), *steps.arguments, *drawn))

    def apart() -> Run:
        recorded.settle()
        return steps.with_settled().machine_code()

    return prepare_settling(steps.function(), apart)
