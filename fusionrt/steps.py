"""Steps from one call of a C function to the next: a Python function, or machine code (kernels_src/steps.ll).

A call of a kind that was met before is a list of calls of C functions, and a few checks whether to go on.
What Python does between these (frames, names, tuples of arguments) takes as long, and longer in the thread of
a device's backward passes, whose processor has nothing of the interpreter in its caches.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fusionrt.runtime import llvm
from fusionrt.settling import Again, settled_now
from fusionrt.texts import Lines

Run = Callable[..., Any]
KINDS = ("call", "get", "set", "tuple", "item", "same", "other", "equal", "give", "drop")
CONDITIONS = KINDS[5:8]
VALUES, GIVEN = 512, 16  # at most: in all, to one call
_ADDRESS = ctypes.c_void_p
_log = logging.getLogger(__name__)


class Value(NamedTuple):
    """An object that there will be in a call."""

    kind: str    # a: argument, c: constant, t: what a step gives
    number: int

    def __str__(self) -> str:
        return f"{self.kind}{self.number}"


NOTHING = Value("", 0)


class _Step(NamedTuple):
    kind: str
    to: Value | None
    a: Value
    b: Any                     # a value, a name (get, set), a number (item)
    given: tuple[Value, ...]
    depth: int                 # in how many conditions it stands

    @property
    def made(self) -> int:
        """A bit: that of its number."""
        return 1 << self.to.number if self.to else 0

    @property
    def needed(self) -> int:
        """Bits: of what steps before it made."""
        bits = 0
        for value in (self.a, self.b, *self.given):
            if isinstance(value, Value) and value.kind == "t":
                bits |= 1 << value.number
        return bits


_Lowered = tuple[list[tuple[_Step, int]], list[int]]  # each with what may follow elsewhere; where each begins


class Steps:
    """What a function of so many arguments does. Whatever is given to a step is a value of an earlier one, or
    else a constant. What no later step needs is let go of before the next call.

        steps = Steps(2)
        x, y = steps.arguments
        with steps.perhaps():
            steps.same(steps.call(check, x), True)
            steps.give(steps.call(fast, x, y))
        steps.give(steps.call(slow, x, y))
    """

    def __init__(self, n_arguments: int) -> None:
        self.arguments = [Value("a", k) for k in range(n_arguments)]
        self.constants: list[Any] = []
        self._steps: list[_Step] = []
        self._n_made, self._depth = 0, 0
        self._loose: list[int] = []                # conditions outside of parts, for `insert`
        self._open = [self._loose]                 # parts that have begun: their conditions
        self._elsewhere: dict[int, int] = {}       # where it goes on, for a condition that does not hold

    # -- writing ---------------------------------------------------------------------------------

    def constant(self, value: Any) -> Value:
        return self._value(value)

    def call(self, function: Any, *given: Any) -> Value:
        return self._made("call", function, None, given)

    def get(self, of: Any, name: str) -> Value:
        return self._made("get", of, name)

    def set(self, of: Any, name: str, value: Any) -> None:
        self._step("set", None, of, name, (value,))

    def tuple(self, *given: Any) -> Value:
        return self._made("tuple", None, None, given)

    def item(self, of: Value, k: int) -> Value:
        """Of a tuple."""
        return self._made("item", of, k)

    def give(self, value: Any) -> None:
        self._step("give", None, value)

    @contextlib.contextmanager
    def perhaps(self) -> Iterator[None]:
        """A part that is done as long as its conditions hold: the first one that does not ends it. The last
        step is none."""
        depth = self._depth
        self._open.append([])
        yield
        assert self._steps[-1].kind not in CONDITIONS
        self._elsewhere |= dict.fromkeys(self._open.pop(), len(self._steps))
        self._depth = depth

    def insert(self, other: Steps, *given: Any) -> None:
        """The steps of another function, of these arguments, as the last ones of a part. Its conditions that
        are in no part of its own are this one's."""
        values = dict(zip(other.arguments, map(self._value, given), strict=True))
        values |= {Value("c", k): self._value(constant) for k, constant in enumerate(other.constants)}
        values |= {Value("t", k): Value("t", self._n_made + k) for k in range(other._n_made)}
        first, self._n_made = len(self._steps), self._n_made + other._n_made
        if other._loose:
            self._open[-1] += [first + k for k in other._loose]
        self._elsewhere |= {first + k: first + to for k, to in other._elsewhere.items()}
        for step in other._steps:
            self._steps.append(_Step(step.kind, step.to and values[step.to], values.get(step.a, step.a),
                                     values[step.b] if isinstance(step.b, Value) else step.b,
                                     tuple(values[v] for v in step.given), self._depth + step.depth))

    def with_settled(self) -> Steps:
        """The same, but what it calls has settled."""
        made = copy.copy(self)
        called = self.called
        made.constants = [settled_now(constant) if any(constant is c for c in called) else constant
                          for constant in self.constants]
        return made

    @property
    def called(self) -> list[Any]:
        """The constants that are."""
        return [self.constants[step.a.number] for step in self._steps
                if step.kind == "call" and step.a.kind == "c"]

    def same(self, a: Any, b: Any) -> None:
        self._condition("same", a, b)

    def other(self, a: Any, b: Any) -> None:
        """They are not the same object."""
        self._condition("other", a, b)

    def equal(self, a: Any, b: Any) -> None:
        self._condition("equal", a, b)

    def _condition(self, kind: str, a: Any, b: Any) -> None:
        self._open[-1].append(len(self._steps))
        self._step(kind, None, a, self._value(b))
        self._depth += 1

    def _made(self, kind: str, a: Any, b: Any = None, given: Any = ()) -> Value:
        made = Value("t", self._n_made)
        self._n_made += 1
        self._step(kind, made, a, b, given)
        return made

    def _step(self, kind: str, to: Value | None, a: Any, b: Any = None, given: Any = ()) -> None:
        self._steps.append(_Step(kind, to, self._value(a), b, tuple(map(self._value, given)), self._depth))

    def _value(self, given: Any) -> Value:
        if isinstance(given, Value):
            return given
        known = next((k for k, constant in enumerate(self.constants) if constant is given), None)
        if known is None:
            known = len(self.constants)
            self.constants.append(given)
        return Value("c", known)

    # -- what comes of it ------------------------------------------------------------------------

    @property
    def _form(self) -> _Form:
        return _Form(tuple(self._steps), tuple(self._elsewhere.items()))

    def function(self) -> Run:
        """In Python, written as text for the second call: many a kind of call comes once."""
        assert self._steps[-1].kind == "give" and not self._loose
        comes_again, written = Again(), list[Run]()

        def run(*arguments: Any) -> Any:
            if not written:
                if not comes_again() and len(arguments) == len(self.arguments):  # otherwise Python tells
                    return self._walked(*arguments)
                written.append(self.written())
            return written[0](*arguments)

        return run

    def _walked(self, *arguments: Any) -> Any:
        """One step after the other."""
        values = {NOTHING: None, **dict(zip(self.arguments, arguments, strict=True))}
        values |= {Value("c", k): constant for k, constant in enumerate(self.constants)}
        dropped, k = _dropped(self._form), 0
        while (step := self._steps[k]).kind != "give":
            for gone in dropped[k]:
                values.pop(gone, None)
            a, b = values[step.a], values[step.b] if isinstance(step.b, Value) else step.b
            found = _DONE[step.kind](a, b, [values[value] for value in step.given])
            k = self._elsewhere[k] if found is False and step.kind in CONDITIONS else k + 1
            if step.to:
                values[step.to] = found
            del a, b, found
        return values[step.a]

    def written(self) -> Run:
        """As text."""
        known = Lines(**{f"c{k}": constant for k, constant in enumerate(self.constants)})
        known.lines += _lines(self._form)
        return known.function([*map(str, self.arguments)])

    def machine_code(self) -> Run:
        """In machine code, a builtin: unlike a function it is no method as an attribute of a class. In Python
        where that cannot be."""
        function = self.function()
        try:
            return self._builtin(function)
        except Exception as error:  # of LLVM, of a Python that lacks a function: none may fail a call
            _log.debug("steps stay in Python: %s", error)
            return function

    def _builtin(self, general: Run) -> Run:
        constants = [*self.constants, *(sys.intern(s.b) for s in self._steps if s.kind in ("get", "set"))]
        names, places = len(self.constants), dict[Value | None, int]()
        for kind, n in (("a", len(self.arguments)), ("c", len(constants)), ("t", self._n_made)):
            places |= {Value(kind, k): len(places) + k for k in range(n)}
        if len(places) > VALUES or any(len(step.given) > GIVEN for step in self._steps):
            raise ValueError(f"{len(places)} values")
        lowered, firsts = self._with_drops()
        table = (_Native * len(lowered))()
        for native, (step, elsewhere) in zip(table, lowered, strict=True):
            b = step.b
            if step.kind in ("get", "set"):
                b, names = Value("c", names), names + 1
            native.what, native.to = KINDS.index(step.kind), places.get(step.to, 0)
            native.a, native.b = places.get(step.a, 0), b if step.kind == "item" else places.get(b, 0)
            native.elsewhere = firsts[elsewhere]
            native.n_given = len(step.given)
            native.given[:len(step.given)] = [places[value] for value in step.given]
        objects = (_ADDRESS * len(constants))(*map(id, constants))
        made = _Table(general, len(self.arguments), len(constants), len(places), ctypes.addressof(objects),
                      ctypes.addressof(table))
        return llvm.builtin("steps", ctypes.addressof(made), made, table, objects, general, *constants)

    def _with_drops(self) -> _Lowered:
        """The steps, and as steps what they drop."""
        lowered: list[tuple[_Step, int]] = []
        firsts = []
        for k, (step, dropped) in enumerate(zip(self._steps, _dropped(self._form), strict=True)):
            firsts.append(len(lowered))
            lowered += [(_Step("drop", None, NOTHING, None, tuple(dropped[at:at + GIVEN]), 0), 0)
                        for at in range(0, len(dropped), GIVEN)]
            lowered.append((step, self._elsewhere.get(k, 0)))
        return lowered, firsts


# -- what follows from steps, whatever their constants are: the same for calls that differ in their sizes ---

class _Form(NamedTuple):
    steps: tuple[_Step, ...]
    elsewhere: tuple[tuple[int, int], ...]


@functools.lru_cache(1024)
def _dropped(form: _Form) -> Sequence[Sequence[Value]]:
    """Before each step, if it calls: what there may be of what was made that is needed no more."""
    steps, elsewhere = form.steps, dict(form.elsewhere)
    needed, held = [0] * len(steps), [0] * len(steps)  # bits: numbers of such values
    follow = [() if step.kind == "give" else (k + 1, elsewhere.get(k, k + 1)) for k, step in enumerate(steps)]
    for k, step in reversed([*enumerate(steps)]):
        for later in follow[k]:
            needed[k] |= needed[later]
        needed[k] = needed[k] & ~step.made | step.needed
    dropped = []
    for k, step in enumerate(steps):
        gone = held[k] & ~needed[k] if step.kind == "call" else 0
        for later in follow[k]:
            held[later] |= held[k] & ~gone | step.made
        dropped.append([Value("t", n) for n in range(gone.bit_length()) if gone >> n & 1])
    return dropped


@functools.lru_cache(1024)
def _lines(form: _Form) -> Sequence[str]:
    lines = []
    for step, dropped in zip(form.steps, _dropped(form), strict=True):
        text = "".join(f"{value} = " for value in dropped) + "None; " if dropped else ""
        lines.append(f"{'    ' * step.depth}{text}{_line(step)}")
    return lines


_DONE: dict[str, Callable[[Any, Any, list[Any]], Any]] = {
    "call": lambda a, b, given: a(*given), "get": lambda a, b, given: getattr(a, b),
    "set": lambda a, b, given: setattr(a, b, given[0]), "tuple": lambda a, b, given: tuple(given),
    "item": lambda a, b, given: a[b], "same": lambda a, b, given: a is b,
    "other": lambda a, b, given: a is not b, "equal": lambda a, b, given: bool(a == b)}


def _line(step: _Step) -> str:
    given = ", ".join(map(str, step.given))
    items = f"({given},)" if given else "()"
    texts = {"call": f"{step.to} = {step.a}({given})", "get": f"{step.to} = {step.a}.{step.b}",
             "set": f"{step.a}.{step.b} = {given}", "tuple": f"{step.to} = {items}",
             "item": f"{step.to} = {step.a}[{step.b}]", "same": f"if {step.a} is {step.b}:",
             "other": f"if {step.a} is not {step.b}:", "equal": f"if {step.a} == {step.b}:",
             "give": f"return {step.a}"}
    return texts[step.kind]


class _Native(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_uint32) for name in ("what", "to", "a", "b", "elsewhere", "n_given")),
                ("given", ctypes.c_uint32 * GIVEN))


class _Table(ctypes.Structure):
    _fields_ = (("general", ctypes.py_object),
                *((name, ctypes.c_int64) for name in ("n_arguments", "n_constants", "n_values")),
                ("constants", _ADDRESS), ("steps", _ADDRESS))
