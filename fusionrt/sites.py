"""What a thread has chosen for the kinds of calls that it made, for ops that choose between ways."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusionrt.guards import Check, both, guard, guard_all
from fusionrt.settling import until_settled
from fusionrt.watching import unguarded

Run = Callable[..., Any]
KEPT = 4096  # kinds of calls that a thread remembers
SAME = 4     # of those that are alike, or differ in numbers alone
NUMBERS = frozenset({int, float, bool})
EQUAL = frozenset({*NUMBERS, str, type(None)})  # of which one that equals another is as good

_NOTHING_YET: Any = object()

# Of a tensor: by which the kinds of calls of a model that differ in their first one are told apart.
alike = operator.attrgetter("shape", "dtype", "requires_grad")


def all_alike(first: Any, *others: Any) -> tuple[Any, ...]:
    """The same of calls that differ in the others as well; each may be None."""
    return (*alike(first), *[None if t is None else (t.shape, t.requires_grad) for t in others])


def keep(known: dict[Any, Any], kind: Any, value: Any) -> None:
    """What is known of a kind of call, while there are not too many of them."""
    if len(known) >= KEPT:
        known.clear()
    known[kind] = value


class Sites(threading.local):
    """For ops that check, then choose between ways: what a thread has chosen for the kinds of calls that it
    made. A kind is a `key` of whatever is no tensor, whether gradients are recorded, which the guard does not
    look at, what the tensors are like, and the guard of the tensors.

        run = sites.find(key, tensors) or sites.keep(key, tensors, choose(*tensors))
        return run(*tensors)
    """

    def __init__(self) -> None:
        self.known: dict[Any, dict[Any, tuple[Way, ...]]] = {}
        self.numbers: dict[Any, tuple[Any, ...]] = {}
        self._heard: Any = None

    def find(self, key: tuple[Any, ...], tensors: Sequence[Any]) -> Run | None:
        try:
            ways = self.known[key, torch.is_grad_enabled()][all_alike(*tensors)]
            way = None if unguarded() else next((way for way in ways if way.check(*tensors)), None)
        except (KeyError, TypeError, AttributeError, RuntimeError):  # also of what is no tensor, or nested
            return None
        if way is None:
            return None
        self._tell(way, tensors)
        return way.run

    def listen(self) -> Any:
        """Hear the first way that is asked for, and for which tensors: hooks and finalizers that a call runs
        may ask again. Gives what `heard` takes, as whoever runs the call may listen too."""
        outer, self._heard = self._heard, _NOTHING_YET
        return outer

    def heard(self, outer: Any) -> tuple[Way, list[int]] | None:
        """What was heard since."""
        found, self._heard = self._heard, outer
        return None if found is _NOTHING_YET else found

    def _tell(self, way: Way, tensors: Sequence[Any]) -> None:
        if self._heard is _NOTHING_YET:
            self._heard = way, list(map(id, tensors))

    def keep(self, key: tuple[Any, ...], tensors: Sequence[Any], run: Run, also: Check | None = None) -> Run:
        """`also`: what else must be so, of the tensors and of torch, of which guards know nothing."""
        # Of meta tensors each rehearsal is to be heard; symbolic sizes, of a tracer's, are no key.
        if tensors[0].device.type != "meta" and not unguarded():
            check = guard_all(guard(*[t for t in tensors if t is not None]), tensors)
            way = Way(check if also is None else both(check, also), run).counting()
            kind, kinds = (key, torch.is_grad_enabled()), all_alike(*tensors)
            if kind not in self.known:
                keep(self.known, kind, {})
            before = self.known[kind].get(kinds, ())  # for other strides, say, or in another mode of torch's
            keep(self.known[kind], kinds, (way, *before[:SAME - 1]))
            self._tell(way, tensors)
        return run

    def are_as_before(self, kind: tuple[Any, ...], *numbers: Any) -> bool:
        """Whether one of the last calls of this kind had the same numbers: those that change each time (an
        annealed temperature) are not worth a way of their own. Tensors in the place of numbers never are."""
        if not all(type(n) in EQUAL for n in numbers):
            return False
        try:
            before = self.numbers.get(kind, ())
        except TypeError:  # an option that cannot be a key
            return False
        if numbers in before:
            return True
        keep(self.numbers, kind, (numbers, *before[:SAME - 1]))
        return False


class Way:
    """What to run for tensors that pass a check."""

    __slots__ = "check", "run"

    def __init__(self, check: Check, run: Run) -> None:
        self.check, self.run = check, run

    def counting(self) -> Way:
        """Itself, whose calls are counted until what is run settles."""
        self.use(until_settled(self.run, self.use))
        return self

    def use(self, run: Run) -> None:
        self.run = run
