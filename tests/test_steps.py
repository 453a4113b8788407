"""Steps (fusionrt/steps.py): the same in Python and in machine code."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

import fusionrt as frt
from fusionrt import settling, steps
from fusionrt.op import OPERATORS
from fusionrt.recording import recording_of
from fusionrt.steps import Steps

MAKES: list[Callable[[Steps], Any]] = [Steps.function, Steps.written, Steps.machine_code]


@pytest.fixture(params=MAKES, ids=["one by one", "text", "machine code"])
def make(request: pytest.FixtureRequest) -> Callable[[Steps], Any]:
    def made(written: Steps) -> Any:
        function = request.param(written)
        assert isinstance(function, BuiltinFunctionType) == (request.param is Steps.machine_code)
        return function

    return made


def test_every_step(make: Any) -> None:
    written = Steps(2)
    x, y = written.arguments
    sums = written.call(lambda a, b: a + b, x, y)
    pair = written.tuple(sums, "told", written.tuple())
    written.set(x, "seen", written.item(pair, 1))
    written.give(written.tuple(pair, written.get(x, "seen")))

    class Number(int):
        seen = ""

    assert make(written)(Number(3), 4) == ((7, "told", ()), "told")


def conditional() -> Steps:
    written = Steps(2)
    x, y = written.arguments
    with written.perhaps():
        written.other(x, None)
        with written.perhaps():
            written.same(x, y)
            written.give("same")
        with written.perhaps():
            written.equal(x, y)
            with written.perhaps():
                written.equal(x, 5)
                written.give("five")
            written.give("equal")
        written.equal(written.call(len, y), 2)
        written.give("of two")
    written.give("none")
    return written


def test_text_is_written_for_the_second_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = [], Steps.written
    monkeypatch.setattr(Steps, "written", lambda steps: asked.append(steps) or real(steps))
    function = conditional().function()
    assert function(7, 7) == "same" and not asked
    assert [function(7, 7), function(5, 5.0)] == ["same", "five"] and len(asked) == 1


@pytest.mark.parametrize(("x", "y", "expected"), [
    (7, 7, "same"), (1000.5, float("1000.5"), "equal"), (5, 5.0, "five"), ([1], [1, 2], "of two"),
    ([], [1], "none"), (None, None, "none"), (None, [1, 2], "none")])
def test_conditions(make: Any, x: Any, y: Any, expected: str) -> None:
    assert make(conditional())(x, y) == expected


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["call", "get", "set", "item", "equal"])
def test_errors_are_those_of_the_step(make: Any, kind: str, only_new_objects: None) -> None:
    class Odd:
        __slots__ = ("__weakref__",)

        def __eq__(self, other: object) -> bool:
            raise ArithmeticError

        __hash__ = None  # type: ignore[assignment]

    def write(argument: Any, written: Steps) -> None:
        if kind == "call":
            written.call(lambda a: 1 // 0, argument)
        elif kind == "get":
            written.get(argument, "none")
        elif kind == "set":
            written.set(argument, "none", 1)
        elif kind == "item":
            written.item(written.tuple(argument), 1)
        else:
            with written.perhaps():
                written.equal(argument, 1)
                written.give(argument)

    class Held:
        pass

    def holding() -> Held:
        made = Held()
        kept.append(weakref.ref(made))
        return made

    written, kept = Steps(1), list[Any]()
    held = written.call(holding)
    write(written.arguments[0], written)
    written.give(held)
    with pytest.raises((ArithmeticError, AttributeError, IndexError)):
        make(written)(Odd())
    gc.collect()
    assert kept[0]() is None


def test_nothing_leaks(make: Any) -> None:
    function, x, y = make(conditional()), [1.5], [2.5, 3.5]
    given = Steps(2)
    given.give(given.tuple(*given.arguments, "a constant"))
    pair = make(given)
    before = [sys.getrefcount(o) for o in (x, y)]
    for _ in range(100):
        assert function(x, y) == "of two" and pair(x, y)[0] is x
    assert [sys.getrefcount(o) for o in (x, y)] == before


def test_owns_what_it_names(make: Any) -> None:
    def written() -> Steps:
        one = Steps(0)
        one.give(one.call("{}".format, one.tuple(object(), [1])))
        return one

    functions = [make(written()) for _ in range(50)]
    gc.collect()
    junk = [bytes(k) for k in range(2000)]
    assert all(function().endswith(" [1])") for function in functions) and len(junk) == 2000


def test_the_number_of_arguments_is_checked(make: Any) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        make(conditional())(1)


@pytest.mark.parametrize("n", [steps.GIVEN + 1, steps.VALUES + 1])
def test_what_is_too_long_stays_in_python(n: int) -> None:
    written = Steps(1)
    values = [written.tuple(written.arguments[0]) for _ in range(n)]
    for value in values[steps.GIVEN + 1:]:
        written.get(value, "__class__")
    written.give(written.tuple(*values[:steps.GIVEN + 1]))
    function = written.machine_code()
    assert not isinstance(function, BuiltinFunctionType) and function(3) == ((3,),) * (steps.GIVEN + 1)


def test_where_there_is_no_llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("this process does not export Py_DecRef")

    monkeypatch.setattr(steps.llvm, "builtin", fails)
    assert conditional().machine_code()(7, 7) == "same"


def test_threads_that_settle_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each makes the machine code, one of them what the others find."""
    method = steps.llvm._method.__wrapped__
    monkeypatch.setattr(steps.llvm, "_method", functools.cache(method))
    together, made = threading.Barrier(8), list[Any]()

    def work() -> None:
        written = Steps(1)
        written.give(written.arguments[0])
        together.wait()
        made.append(written.machine_code())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    junk = [bytes(40) for _ in range(10_000)]
    assert [function(k) for k, function in enumerate(made)] == list(range(8)) and len(junk) == 10_000
    assert {function.__name__ for function in made} == {"fusionrt_steps"}


# --- recorded calls -------------------------------------------------------------------------------

@frt.fuse
def of_a_number(x, y, by: float):  # type: ignore[no-untyped-def]
    return x * y * by, x > y


@pytest.mark.parametrize("keeps", [False, True])
def test_recorded_calls_settle(device: str, monkeypatch: pytest.MonkeyPatch, keeps: bool) -> None:
    monkeypatch.setattr(settling, "SETTLED_AFTER", 1)
    x, y = (torch.randn(6, 8, device=device, requires_grad=True) for _ in range(2))
    g = torch.randn(6, 8, device=device)
    for by in (2.0, 3.0, 4, 5.0):
        product, truth = of_a_number(x, y, by)
        assert product.requires_grad and not truth.requires_grad and torch.equal(truth, x > y)
        for _ in range(2):
            assert_close(torch.autograd.grad(product, (x, y), g, retain_graph=True), (y * g * by, x * g * by))
        if keeps:
            product.backward(g.t().contiguous().t())  # of another kind
            with torch.no_grad():
                assert not of_a_number(x, y, by)[0].requires_grad
    recording = recording_of(of_a_number.operator, (x, y, 2.0))
    assert recording.is_settled and isinstance(of_a_number.operator.local.site[-1], BuiltinFunctionType)
    backward = vars(recording.function._backward_cls)["apply"].__func__
    assert all(isinstance(f, BuiltinFunctionType) for f in (recording.function.forward, backward))


def test_passes_of_one_call_settle(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the graph is kept."""
    monkeypatch.setattr(settling, "SETTLED_AFTER", 2)
    x = torch.randn(6, 9, device=device, requires_grad=True)
    g = torch.randn(6, 9, device=device)
    out, expected = frt.softplus(x), torch.sigmoid(x.detach()) * g
    recording = recording_of(frt.softplus.operator, (x, 1.0, 20.0))
    for _ in range(5):
        assert_close(torch.autograd.grad(out, x, g, retain_graph=True), (expected,))
    backward = vars(recording.function._backward_cls)["apply"].__func__
    assert recording.is_settled and isinstance(backward, BuiltinFunctionType)


def test_recorded_calls_leak_nothing(monkeypatch: pytest.MonkeyPatch, only_new_objects: None) -> None:
    monkeypatch.setattr(settling, "SETTLED_AFTER", 1)
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def step() -> tuple[torch.Tensor, ...]:
        out = F.silu(frt.bias_gelu(x, w)) + frt.leaky_relu(x, 0.125)
        return torch.autograd.grad(out, (x, w), torch.ones_like(out))

    def counts() -> list[int]:
        gc.collect()
        return [*map(sys.getrefcount, (x, w, None)), sum(type(o) is torch.Tensor for o in gc.get_objects())]

    for _ in range(6):
        step()
    before = counts()
    for _ in range(100):
        step()
    assert all(after <= count + (20 if k == 2 else 0) for k, (after, count) in enumerate(
        zip(counts(), before, strict=True)))


@pytest.mark.parametrize("settles", [False, True])
def test_a_backward_pass_while_another_one_is_kept(monkeypatch: pytest.MonkeyPatch, settles: bool) -> None:
    """By a finalizer, which a collection may run anywhere; a GPU's is in a thread of its own."""
    monkeypatch.setattr(settling, "SETTLED_AFTER", 1 if settles else 100)
    real, within = Steps.function, list[int]()

    def function(self: Steps) -> Any:
        if not within:
            within.append(1)
            thread = threading.Thread(target=lambda: within.append(int(train(3, 50 + settles))), daemon=True)
            thread.start()
            thread.join(60)
        return real(self)

    monkeypatch.setattr(Steps, "function", function)
    assert train(3, 60 + settles) and within == [1, 1]


def train(rows: int, columns: int) -> bool:
    x = torch.randn(rows, columns, requires_grad=True)
    grads = [torch.autograd.grad(frt.silu(x).sum(), x)[0] for _ in range(4)]
    expected, = torch.autograd.grad(F.silu(x).sum(), x)
    return all(torch.allclose(grad, expected, atol=1e-6) for grad in grads)


def test_compiled_autograd_after_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the functions' Python."""
    from torch._dynamo import compiled_autograd
    monkeypatch.setattr(settling, "SETTLED_AFTER", 1)
    x, w = torch.randn(4, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    for _ in range(4):
        frt.bias_gelu(x, w).sum().backward()
    x.grad = w.grad = None
    loss = frt.bias_gelu(x, w).sum()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    assert_close((x.grad, w.grad), torch.autograd.grad(F.gelu(x + w).sum(), (x, w)))


def test_watchers_are_seen_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of the known kind, but with derivatives, or under is_grads_batched."""
    monkeypatch.setattr(settling, "SETTLED_AFTER", 1)
    x = torch.randn(5, 4, device=device, dtype=torch.float64, requires_grad=True)
    for _ in range(4):
        torch.autograd.grad(frt.gelu(x).sum(), x)
    out, expected = frt.gelu(x), F.gelu(x)
    first, = torch.autograd.grad(out.sum(), x, create_graph=True)
    theirs, = torch.autograd.grad(expected.sum(), x, create_graph=True)
    assert_close(torch.autograd.grad(first.sum(), x), torch.autograd.grad(theirs.sum(), x))
    g = torch.randn(3, 5, 4, device=device, dtype=torch.float64)
    assert_close(torch.autograd.grad(out, x, g, is_grads_batched=True),
                 torch.autograd.grad(expected, x, g, is_grads_batched=True))
    found = [o for o in OPERATORS.values() if o.name == "gelu"]
    assert any(r.is_settled for o in found for r in o.local.recordings.values())
