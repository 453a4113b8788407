"""Tapes (fusionrt/tape.py): functions of tensors that become steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

import fusionrt as frt
from fusionrt import settling
from fusionrt.ops import linear_path
from fusionrt.tape import PLAINLY, Doing, Tape, Taped, forget, lets_go, note_hooks, taken, taped

Tensor = torch.Tensor
MAKES: list[Callable[[Tape, Any], Any]] = [
    lambda tape, result: tape.gives(result).function(),
    lambda tape, result: tape.gives(result).machine_code()]


def halves(do: Doing, x: Tensor) -> tuple[Tensor, ...]:
    first, second = do(torch.chunk, x, 2, 1)
    total = do(Tensor.add_, do(torch.mul, first, 2.0), do.fixed(torch.ones(2)))
    return do(Tensor.sum, second), total, x


@pytest.mark.parametrize("make", MAKES)
def test_a_tape_does_the_same(make: Any) -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    tape = Tape(x)
    again = make(tape, halves(tape, x))
    for found, expected in zip(again(y), halves(PLAINLY, y), strict=True):
        assert_close(found, expected)
    assert again(y)[2] is y


def test_what_no_step_made_is_refused() -> None:
    x = torch.randn(4)
    tape = Tape(x)
    with pytest.raises(AssertionError, match="a tensor that no step made"):
        tape(torch.add, x, torch.ones(4))
    with pytest.raises(AssertionError, match="for `note` or `tells`"):
        tape(torch.is_floating_point, x)
    made = tape(object)
    with pytest.raises(AssertionError, match="of a tuple that no step made"):
        tape(len, (made, 1))


def test_a_tensor_in_the_place_of_one_that_died_is_another_one() -> None:
    """Ids come again."""
    x = torch.randn(4)
    tape = Tape(x)
    for k in range(50):
        made = tape(torch.mul, x, k)
        del made
    last = tape(torch.add, x, 1)
    assert_close(tape.gives(last).function()(-x), 1 - x)


@pytest.mark.parametrize("make", MAKES)
def test_what_is_needed_no_more_is_let_go_of_before_the_next_call(make: Any) -> None:
    kept, dead = list[weakref.ref[Tensor]](), list[bool]()

    def large(x: Tensor) -> Tensor:
        kept.append(weakref.ref(made := x + 1))
        return made

    def small(x: Tensor) -> Tensor:
        dead.append(kept[-1]() is None)
        return x[:1]

    x = torch.randn(8)
    tape = Tape(x)

    def function(do: Doing) -> Tensor:
        first = do(large, x)
        part = do(torch.neg, first)
        del first
        found: Tensor = do(small, part)
        return found

    again = make(tape, function(tape))
    assert_close(again(2 * x), -(2 * x[:1] + 1))
    assert dead == [True, True]


def test_of_a_kind_of_call() -> None:
    x, calls = torch.randn(3, 4), []

    def function(do: Doing, x: Tensor) -> Any:
        calls.append(1)
        return do(torch.relu, do(torch.sub, x, 1))

    run = taped(function)
    for k in range(3):
        assert_close(run(x + k), torch.relu(x + k - 1))
    settled = settling.settled_now(run)
    assert isinstance(settled, BuiltinFunctionType)
    assert calls == [1, 1]  # plainly, then written down
    assert_close(settled(x), torch.relu(x - 1))


class Scaled:
    """x * w, whose gradient tells what it was asked."""

    def __init__(self) -> None:
        self.written: list[bool] = []
        self.taped = Taped(self, 2)
        self.apply = self.taped.apply

    def forward(self, do: Doing, ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        note_hooks(do, ctx)
        do.save(ctx, x, None, w)
        made: Tensor = do(torch.mul, x, w)
        return made

    def backward(self, do: Doing, ctx: Any, saved: list[Any], grad: Tensor) -> tuple[Tensor, Tensor]:
        owned = lets_go(do, ctx)
        x, _, w = taken(saved)
        self.written.append(owned)
        if owned:
            forget(do, ctx)
        return do(torch.mul, grad, w), do(torch.mul, grad, x)

    def again(self, ctx: Any, saved: list[Any], grad: Tensor) -> tuple[Tensor, Tensor]:
        x, _, w = saved
        return grad * w, grad * x


def test_passes_are_told_apart_by_what_they_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    for soon in (1, 100):
        monkeypatch.setattr(settling, "SETTLED_AFTER", soon)
        scaled = Scaled()
        x, w = (torch.randn(5, requires_grad=True) for _ in range(2))
        g = torch.randn(5)
        for _ in range(3):
            out = scaled.apply(x, w)
            for keeps in (True, True, False):
                assert_close(torch.autograd.grad(out, (x, w), g, retain_graph=keeps), (g * w, g * x))
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                out = scaled.apply(x, w)
            assert_close(torch.autograd.grad(out, (x, w), g), (g * w, g * x))
        # The first one plainly; then one that lets go, one for a graph that is kept, one of hooks.
        assert sorted(scaled.written) == [False, False, False, True] and len(scaled.taped.passes) == 3
        first, = torch.autograd.grad(scaled.apply(x, w), x, g, create_graph=True)
        assert_close(torch.autograd.grad(first, w, g), (g * g,))


def test_whoever_was_let_go_of_is_asked_for_in_vain() -> None:
    scaled = Scaled()
    x, w = (torch.randn(5, requires_grad=True) for _ in range(2))
    for _ in range(3):
        out = scaled.apply(x, w)
        torch.autograd.grad(out.sum(), x)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out.sum(), x)


def test_the_graph_holds_nothing_after_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what `forget` let go, while steps go on."""
    monkeypatch.setattr(settling, "SETTLED_AFTER", 1)
    scaled = Scaled()
    w = torch.randn(5, requires_grad=True)
    for _ in range(4):
        x = torch.randn(5, requires_grad=True)
        out = scaled.apply(x.clone(), w)
        alive = weakref.ref(x)
        torch.autograd.grad(out.sum(), w)
        del x
        gc.collect()
    del out
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("op", ["linear_gelu", "ffn"])
def test_autocast_chooses_once(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = torch.randn(3, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True), torch.zeros(8)
    asked = []
    real = linear_path.way_of
    monkeypatch.setattr(linear_path, "way_of", lambda *args: asked.append(args) or real(*args))

    def call() -> Tensor:
        made: Tensor = frt.linear_gelu(x, w, b) if op == "linear_gelu" else frt.ffn(x, w, b, w, b)
        return made

    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            out = call()
            assert out.dtype == torch.bfloat16
            torch.autograd.grad(out.sum(), (x, w))
        expected = F.gelu(F.linear(x, w, b))
        expected = expected if op == "linear_gelu" else F.linear(expected, w, b)
        assert_close(out, expected, rtol=0.05, atol=0.05)
    assert len(asked) == 1
    assert call().dtype == torch.float32 and len(asked) == 2


@pytest.mark.parametrize("soon", [1, 100])
@pytest.mark.parametrize("op", ["linear_gelu", "ffn"])
def test_autocast_to_another_dtype(op: str, soon: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which no guard knows: of tensors that have the first one already, in turns, forward and backward."""
    monkeypatch.setattr(settling, "SETTLED_AFTER", soon)

    def call(ours: bool, x: Tensor, w: Tensor) -> Tensor:
        if op == "linear_gelu":
            return frt.linear_gelu(x, w) if ours else F.gelu(F.linear(x, w))
        return frt.ffn(x, w, None, w, None) if ours else F.linear(F.gelu(F.linear(x, w)), w)

    for dtype in (torch.bfloat16, torch.float32):
        x, w = torch.randn(4, 8).to(dtype), torch.randn(8, 8).to(dtype).requires_grad_()
        for to in (torch.bfloat16, torch.float16) * 3:
            with torch.autocast("cpu", to):
                for recorded in (True, False):
                    with torch.set_grad_enabled(recorded):
                        found, expected = call(True, x, w), call(False, x, w)
                    assert found.dtype == to
                    assert_close(found, expected, rtol=0.05, atol=0.05)
                found, expected = call(True, x, w), call(False, x, w)
            grads = [torch.autograd.grad(out.float().sum(), w)[0] for out in (found, expected)]
            assert_close(*grads, rtol=0.05, atol=0.2)


@pytest.mark.parametrize("soon", [1, 100])
@pytest.mark.parametrize("op", [
    lambda x, w, b: frt.ffn(x, w, b, w, None), lambda x, w, b: frt.linear_gelu(x, w, b),
    lambda x, w, b: frt.swiglu_mlp(x, w, w, w, gate_bias=b)])
def test_a_backward_pass_under_autocast(op: Any, soon: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was saved has its dtype."""
    monkeypatch.setattr(settling, "SETTLED_AFTER", soon)
    x, w, b = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    expected = torch.autograd.grad(op(x, w, b).sum(), (w, b))
    for to in (torch.bfloat16, torch.float16) * 3:
        out = op(x, w, b)
        with torch.autocast("cpu", to):
            assert_close(torch.autograd.grad(out.sum(), (w, b)), expected)
        assert_close(torch.autograd.grad(op(x, w, b).sum(), (w, b)), expected)


@pytest.mark.parametrize("how", ["create_graph", "is_grads_batched"])
def test_only_the_residual_needs_a_gradient(how: str) -> None:
    x, w, b = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6)
    residual, g = torch.randn(4, 6, requires_grad=True), torch.randn(3, 4, 6)
    out = frt.linear_activation(x, w, b, "gelu", residual=residual)
    options: Any = {how: True}
    g = g if how == "is_grads_batched" else g[0]
    assert_close(torch.autograd.grad(out, residual, g, **options)[0], g)
