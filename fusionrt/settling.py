"""What is called often settles: on machine code, or on what looks at less, made after so many calls.
What is called once, as a batch may have sizes that no other has, is not worth a text of its own: `Again`.

A plan has an attribute, `make_settled` (`prepare_settling`); whoever keeps the plan asks at each call
(`settle_when_due`), or has the calls counted (`counted`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

if TYPE_CHECKING:
    from fusionrt.op import Operator

Run = Callable[..., Any]
Called = TypeVar("Called")
# Calls of one kind. The first machine code of a process waits for LLVM, 30 ms; later pieces cost what some
# fifteen calls then save.
SETTLED_AFTER, SETTLED_LATER = 100, 16
_has_settled: list[bool] = []


class Again:
    """Whether it was asked before."""

    def __init__(self) -> None:
        self._was_asked = False

    def __call__(self) -> bool:
        was_asked, self._was_asked = self._was_asked, True
        return was_asked


def prepare_settling(run: Called, make: Run) -> Called:
    """`run`, of which `make` makes what costs less a call: for many, as the first one takes LLVM's import."""
    vars(run).update(make_settled=make, calls=0)
    return run


def settled_now(run: Any) -> Run:
    make = getattr(run, "make_settled", None)
    return run if make is None else cast(Run, make())


def settle_when_due(run: Any) -> Run | None:
    """What to call from now on, for whoever asks at each call; None: to be asked again. Not during a capture,
    whose memory is the graph's."""
    kept = getattr(run, "__dict__", {})
    if "calls" not in kept:
        return settled_now(run)
    enough = min(SETTLED_AFTER, SETTLED_LATER) if _has_settled else SETTLED_AFTER
    if kept["calls"] < enough or is_capturing():
        kept["calls"] += 1
        return None
    if not _has_settled:
        _has_settled.append(True)
    return settled_now(run)


def until_settled(run: Run, use: Callable[[Run], None]) -> Run:
    """`run`, to be called until `use` is told what costs less."""
    if not hasattr(run, "make_settled"):
        return run

    def counting(*args: Any) -> Any:
        made = settle_when_due(run)
        if made is None:
            return run(*args)
        use(made)
        return made(*args)

    return counting


def is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def with_draws(plan: Run, draw: Callable[[], Any], counters: int) -> Run:
    """`plan`, given the random numbers of each call."""
    def drawn(*args: Any) -> Any:
        return plan(*args, draw())

    def drawn_apart() -> Run:
        run = settled_now(plan)
        return lambda *args: run(*args, draw())

    make = getattr(plan, "make_settled_drawing", None)
    return prepare_settling(drawn, drawn_apart if make is None else lambda: make(drawn, counters))


def prepare_settling_drawing(run: Run, make: Callable[[Run, int], Run]) -> None:
    """`make` makes what costs less of `run`, together with what draws its random numbers."""
    vars(run)["make_settled_drawing"] = make


def planned_once(operator: Operator) -> Run:
    """`operator.launch` for arguments (and random numbers) of one kind in one thread, of which whoever calls
    has made sure: nothing is looked at again."""
    plans: list[Run] = []

    def run(*args: Any) -> Any:
        if len(plans) < 2:
            made = settle_when_due(plans[0]) if plans else operator.plan(args[:len(operator.params)])
            plans.extend([] if made is None else [made])
        return plans[-1](*args)

    return prepare_settling(run, lambda: settled_now(plans[0]) if plans else run)
