"""Calls of a CPU's kernels in machine code (fusionrt/cpu/settled.py): the bits of calls by Python."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType
from typing import Any

import pytest
import torch
from checking import assert_same_bits, frames

import fusionrt as frt
from fusionrt import settling
from fusionrt.cpu import pages, settled, team
from fusionrt.ops import quantize
from fusionrt.runtime import source

TYPES = {ctypes.c_void_p: "ptr", ctypes.c_int64: "i64", ctypes.c_uint32: "i32"}
LARGE = (512, 1024)  # elements enough for several threads
SMALL = (7, 40)


@pytest.fixture(autouse=True)
def settles_soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(settling, "SETTLED_AFTER", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def last_run(name: str) -> Any:
    """What the thread called last for the op of this name."""
    called = {"quantize_int8": quantize._quantize}.get(name, getattr(frt, name))
    return called.__globals__["_frt_local"].site[-1]


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add_relu": frt.add_relu,
    "leaky_relu": lambda x, y: frt.leaky_relu(x, 0.125),
    "mish_scale": lambda x, y: frt.mish_scale(x, 3),
    "bias_gelu": lambda x, y: frt.bias_gelu(x, y[0]),
    "quantize_int8": lambda x, y: frt.quantize_int8(x, 0.25, 3.0),
}


def test_a_job_in_machine_code_has_python_s_fields() -> None:
    text = source.template("run_cpu.ll")
    fields = [*team.Job._fields_, *settled.Job._fields_]
    declared = re.sub(";.*", "", text[text.index("%Job = type {"):text.index("}")])
    assert re.findall("ptr|i64|i32", declared) == [TYPES[kind] for _, kind in fields]
    places = re.findall(r"%(\w+)\.(?:at|own) = getelementptr %Job, ptr %(?:job|own), i32 0, i32 (\d+)", text)
    assert len(places) == text.count("getelementptr %Job, ptr %")
    assert all(fields[int(place)][0] == name for name, place in places)


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["one thread", "two threads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, y = (torch.randn(shape, dtype=dtype) for _ in range(2))
    first = CALLS[name](x, y)
    for _ in range(4):
        x2, y2 = x.clone(), y.clone()  # elsewhere
        assert_same_bits(CALLS[name](x2, y2), first)
    assert isinstance(last_run(name), BuiltinFunctionType)
    assert "call" not in frames(lambda: CALLS[name](x, y))  # which is what a plan is called in Python


@pytest.mark.parametrize("op", [
    lambda x: frt.softmax(x), lambda x: frt.log_softmax(x), lambda x: frt.rms_norm(x, x.shape[-1:]),
    lambda x: frt.layer_norm(x, x.shape[-1:], return_stats=True), lambda x: frt.sum(x, -1),
    lambda x: frt.sum(x, -1, keepdim=True), lambda x: frt.argmax(x, -1), lambda x: frt.norm(x, 2, -1),
    lambda x: frt.norm(x, 3, -1), lambda x: frt.softmax(x, -1, torch.float64),
    lambda x: frt.sum(x, -1, dtype=torch.float16), lambda x: frt.logsumexp(x, -1)])
def test_ops_over_rows(op: Callable[[torch.Tensor], Any]) -> None:
    for shape in (SMALL, LARGE):
        x = torch.randn(shape)
        first = op(x)
        for _ in range(4):
            for found, expected in zip(*(r if isinstance(r, tuple) else (r,) for r in (op(x.clone()), first)),
                                       strict=True):
                assert_same_bits(found, expected)
        assert "call" not in frames(lambda x=x: op(x))


@pytest.mark.covering(1)
@pytest.mark.parametrize("op", [
    lambda x: frt.dropout_add(x, x, 0.3), lambda x: frt.gelu_dropout(x, 0.5),
    lambda x: frt.relu_dropout(x, 0.1), lambda x: frt.attention_dropout(x, 0.4)])
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["one thread", "two threads"])
def test_random_numbers(op: Callable[[torch.Tensor], Any], shape: tuple[int, int]) -> None:
    """Each call draws anew, the gradient what its call drew, and a seed gives the bits of Python's."""
    x = torch.randn(shape)

    def call() -> tuple[torch.Tensor, ...]:
        out = op(leaf := x.clone().requires_grad_())
        return op(x), out.detach(), *torch.autograd.grad(out, leaf, x)

    torch.manual_seed(3)
    first, *others = (call() for _ in range(5))
    torch.manual_seed(3)
    again = call()
    assert "call" not in frames(lambda: op(x))
    assert len({tuple(plain[plain.isfinite()].tolist()) for plain, *_ in (first, *others)}) == 5
    for found, expected in zip(again, first, strict=True):
        assert_same_bits(found, expected)


def test_another_number_of_threads() -> None:
    x, y = torch.randn(LARGE), torch.randn(LARGE)
    expected = torch.relu(x + y)
    for n in (2, 2, 2, 1, 2, 3, 2):
        torch.set_num_threads(n)
        assert_same_bits(frt.add_relu(x, y), expected)


def test_several_threads_at_once() -> None:
    x, y = torch.randn(LARGE), torch.randn(LARGE)
    expected, wrong = torch.relu(x + y), []

    def work(k: int) -> None:
        for _ in range(50):
            wrong.append(not torch.equal(frt.add_relu(x + k, y - k), torch.relu((x + k) + (y - k))))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 200 and not any(wrong)
    assert_same_bits(frt.add_relu(x, y), expected)


def test_memory_at_odd_addresses_and_large_results(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.randn(41 * 7 + 1)
    x, odd = memory[:-1].view(7, 41), memory[1:].view(7, 41)
    for _ in range(4):
        assert_same_bits(frt.add_relu(x, x), torch.relu(x + x))
        assert_same_bits(frt.add_relu(odd, odd), torch.relu(odd + odd))
    monkeypatch.setattr(pages, "LARGE", 1 << 12)
    large = torch.randn(64, 64, 3)
    for _ in range(4):
        assert_same_bits(frt.add_relu(large, large), torch.relu(large + large))
    assert not isinstance(last_run("add_relu"), BuiltinFunctionType) or not team.usable()


def test_what_is_no_number_is_refused() -> None:
    x = torch.randn(SMALL)
    for _ in range(4):
        frt.leaky_relu(x, 0.5)
    with pytest.raises(TypeError):
        frt.leaky_relu(x, "0.5")
    assert_same_bits(frt.leaky_relu(x, 0.5), torch.nn.functional.leaky_relu(x, 0.5))
