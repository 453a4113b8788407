"""Functions that become steps: what they do with tensors is written down as it is done.

Such a function is given `do`, through which it calls whatever takes or gives tensors; all else is decided
once for tensors of one kind, of which whoever calls makes sure. The first call of a kind, which may be the
only one, does all that plainly; the second one is written down.

    def forward(do, x, weight):
        z = do(F.linear, x, weight)
        return do.launch(operator if z.dim() == 2 else other, [z])
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fusionrt import autocast, rehearsal
from fusionrt.recorded_function import RecordedFunction
from fusionrt.settling import Again, is_capturing, prepare_settling
from fusionrt.steps import Steps, Value
from fusionrt.watching import is_batched, is_watched

if TYPE_CHECKING:
    from fusionrt.op import Operator

Run = Callable[..., Any]
Tensor = torch.Tensor
_keeps_graph: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_hooks: Callable[[bool], object] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignored: True)
_without_hooks = operator.attrgetter("is_without_hooks")
_FORGET = "maybe_clear_saved_tensors"
_CAN_FORGET = hasattr(torch._C._FunctionBase, _FORGET)


class Doing:
    """Does what it is told, and keeps nothing of it."""

    def __call__(self, function: Run, *given: Any) -> Any:
        return function(*given)

    def launch(self, op: Operator, args: Sequence[Any], rng: Any = None) -> Any:
        return op.launch(args, rng)

    def get(self, of: Any, name: str) -> Any:
        return getattr(of, name)

    def set(self, of: Any, name: str, value: Any) -> None:
        setattr(of, name, value)

    def save(self, ctx: Any, *tensors: Tensor | None) -> None:
        """For a backward pass."""
        ctx.save_for_backward(*tensors)

    def note(self, ctx: Any, name: str, function: Run, *given: Any) -> None:
        """What the function gives, whatever it is: None and numbers, which are one object for all, are
        constants to a tape where they are passed on."""
        setattr(ctx, name, function(*given))

    def tells(self, function: Run, *given: Any) -> bool:
        """Whether the function gives True. In a backward pass that is asked first of all: what follows is of
        passes with the same answers."""
        return function(*given) is True

    def fixed(self, tensor: Tensor) -> Tensor:
        """The same one for all calls."""
        return tensor


PLAINLY = Doing()


class Tape(Doing):
    """Keeps it as `steps` of the arguments."""

    def __init__(self, *arguments: Any) -> None:
        self.steps = Steps(len(arguments))
        # By their ids; what has died has none any more.
        self._values: dict[int, tuple[Callable[[], Any], Value]] = {}
        for argument, value in zip(arguments, self.steps.arguments, strict=True):
            self._made(value, argument)

    def __call__(self, function: Run, *given: Any) -> Any:
        value, result = self.steps.call(self._value(function), *map(self._value, given)), function(*given)
        assert not isinstance(result, list), "a step's items are those of a tuple"
        return self._made(value, result)

    def launch(self, op: Operator, args: Sequence[Any], rng: Any = None) -> Any:
        return self(op.plan(args), *args, *([rng] if op.streams else []))

    def get(self, of: Any, name: str) -> Any:
        return self._made(self.steps.get(self._value(of), name), getattr(of, name))

    def set(self, of: Any, name: str, value: Any) -> None:
        self.steps.set(self._value(of), name, self._value(value))
        setattr(of, name, value)

    def save(self, ctx: Any, *tensors: Tensor | None) -> None:
        self.steps.set(self._value(ctx), "to_save", self.steps.tuple(*map(self._value, tensors)))
        ctx.save_for_backward(*tensors)

    def note(self, ctx: Any, name: str, function: Run, *given: Any) -> None:
        self.steps.set(self._value(ctx), name, self.steps.call(function, *map(self._value, given)))
        super().note(ctx, name, function, *given)

    def tells(self, function: Run, *given: Any) -> bool:
        told = super().tells(function, *given)
        value = self.steps.call(function, *map(self._value, given))
        (self.steps.same if told else self.steps.other)(value, True)
        return told

    def fixed(self, tensor: Tensor) -> Tensor:
        return self._made(self.steps.constant(tensor), tensor)

    def gives(self, result: Any) -> Steps:
        self.steps.give(self.steps.tuple(*map(self._value, result)) if isinstance(result, tuple) else
                        self._value(result))
        return self.steps

    def _made(self, value: Value, result: Any) -> Any:
        if isinstance(result, (tuple, list)) and any(isinstance(item, Tensor) for item in result):
            for k, item in enumerate(result):
                if isinstance(item, Tensor):
                    self._made(self.steps.item(value, k), item)
        elif result is not None:
            assert not isinstance(result, (bool, int, float, str)), "for `note` or `tells`"
            known = weakref.ref(result) if isinstance(result, Tensor) else lambda: result
            self._values[id(result)] = known, value
        return result

    def _value(self, found: Any) -> Any:
        """Of what was made; else the constant itself."""
        known, value = self._values.get(id(found), (None, None))
        if known is not None and known() is found:
            return value
        within = found if isinstance(found, (tuple, list)) else ()
        assert not any(isinstance(one, Tensor) for one in (found, *within)), "a tensor that no step made"
        assert all(self._value(one) is one for one in within), "of a tuple that no step made"
        return found


def _can_be_kept(*values: Any) -> bool:
    """What is done for these: in a rehearsal each call is to be heard, a graph's memory is its own."""
    is_meta = any(isinstance(value, Tensor) and value.is_meta for value in values)
    return not (is_meta or rehearsal.is_on() or is_capturing())


def taped(function: Run) -> Run:
    """function(do, *tensors), for tensors of one kind in one thread, without autograd."""
    kept: list[tuple[Steps, Run]] = []
    comes_again = Again()

    def run(*tensors: Any) -> Any:
        if kept:
            return kept[0][1](*tensors)
        if not comes_again() or not _can_be_kept(*tensors):
            return function(PLAINLY, *tensors)
        tape = Tape(*tensors)
        result = function(tape, *tensors)
        steps = tape.gives(result)
        kept.append((steps, steps.function()))
        return result

    return prepare_settling(run, lambda: kept[0][0].with_settled().machine_code() if kept else run)


class Written(Protocol):
    """A forward and a backward pass, of tensors of one kind. `saved` is a list to be emptied (`taken`)."""

    def forward(self, do: Doing, ctx: Any, *tensors: Any) -> Any: ...

    def backward(self, do: Doing, ctx: Any, saved: list[Any], grad_output: Tensor) -> tuple[Any, ...]: ...

    def again(self, ctx: Any, saved: list[Any], grad_output: Tensor) -> tuple[Any, ...]:
        """A backward pass of which torch sees each operation."""


class Taped(RecordedFunction):
    """A kind of call that is recorded, in one thread, of so many tensors."""

    def __init__(self, written: Written, n_tensors: int) -> None:
        self.written, self.comes_again = written, Again()
        first = Steps(1 + n_tensors)
        first.give(first.call(self._first, *first.arguments))
        super().__init__(type(written).__name__, 1, first, Taped._unknown_pass)

    def _first(self, ctx: Any, *arguments: Any) -> Any:
        if not self.comes_again() or not _can_be_kept(*arguments):
            return self.written.forward(PLAINLY, ctx, *arguments)
        tape = Tape(ctx, *arguments)
        result = self.written.forward(tape, ctx, *arguments)
        self.become(tape.gives(result))
        return result

    def _unknown_pass(self, ctx: Any, saved: list[Any], grads: Sequence[Any]) -> Any:
        device = grads[0].device
        if autocast.is_on(device):  # to a dtype that guards do not know; what is saved was cast
            with autocast.off(device):
                return self._unknown_pass(ctx, saved, grads)
        if torch.is_grad_enabled() or is_watched() or is_batched(*grads):
            return self.written.again(ctx, saved, *grads)
        known = self.kind(saved, grads) if _can_be_kept() else None
        if known is None:
            return self.written.backward(PLAINLY, ctx, saved, *grads)
        tape = Tape(ctx, saved, *grads)
        result = self.written.backward(tape, ctx, saved, *grads)
        self.keep(known._replace(steps=tape.gives(result)))
        return result


def taken(saved: list[Any]) -> list[Any]:
    """What is in a list that others hold, which is empty then."""
    kept, saved[:] = list(saved), []
    return kept


# -- what is saved, let go of early ------------------------------------------------------------------

def no_hooks() -> bool:
    """Whoever keeps saved tensors by hooks of his own may need them as they are."""
    return _hooks(True) is None


def note_hooks(do: Doing, ctx: Any) -> None:
    do.note(ctx, "is_without_hooks", no_hooks)


def lets_go(do: Doing, ctx: Any) -> bool:
    """Whether what was saved is nobody else's, as the graph is not kept and there were no hooks."""
    return _CAN_FORGET and not do.tells(_keeps_graph) and do.tells(_without_hooks, ctx)


def forget(do: Doing, ctx: Any) -> None:
    do(do.get(ctx, _FORGET))
