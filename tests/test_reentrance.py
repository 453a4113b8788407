"""A call within a call, as a finalizer, a handler of signals or a hook of torch's makes it."""

import sys
import threading

import pytest
import torch
from torch.testing import assert_close

import fusionrt as frt
from fusionrt import settling
from fusionrt.fusion import fused

OPS = {
    "add_relu": lambda x: frt.add_relu(x, x), "gelu_dropout": lambda x: frt.gelu_dropout(x, 0.5),
    "layer_norm": lambda x: frt.layer_norm(x, x.shape[-1:]), "softmax": lambda x: frt.softmax(x, 0),
    "sum": lambda x: frt.sum(x, 0), "var": lambda x: frt.var(x, 0),
    "linear_relu": lambda x: frt.linear_relu(x, x),
    "batch_norm": lambda x: frt.batch_norm(x, None, None, training=True)}


def call_interrupted(function, after):
    """function(), and after each of its calls of a builtin of this name another function."""
    made = []

    def profile(frame, event, called):
        if event == "c_return" and called.__name__ == after:
            made.append(None)
            inner()

    def inner():
        sys.setprofile(None)
        function.other()
        sys.setprofile(profile)

    sys.setprofile(profile)
    try:
        return function(), len(made)
    finally:
        sys.setprofile(None)


class Call:
    def __init__(self, op, x, other):
        self.op, self.x, self.other = op, x, lambda: op(other)

    def __call__(self):
        torch.manual_seed(0)
        return self.op(self.x)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_call_between_what_a_kernel_is_told_and_its_launch(op, device, monkeypatch):
    """Each has memory of its own for that."""
    monkeypatch.setattr(settling, "SETTLED_AFTER", 10**9)
    x, other = torch.randn(2, 64, 64, device=device)
    call = Call(op, x, other)
    expected = call()
    for _ in range(3):
        found, times = call_interrupted(call, "pack_into")
        assert times
        assert_close(found, expected, rtol=0, atol=0)
    assert_close(call(), expected, rtol=0, atol=0)


PAIRS = {
    "reductions": (lambda x: frt.var(x, -1), lambda x: frt.amax(x, -1)),
    "softmax": (frt.softmax, frt.log_softmax),
    "norms": (lambda x: frt.layer_norm(x, 8), lambda x: frt.layer_norm(x, 8, eps=1.0))}


@pytest.mark.parametrize(("op", "other"), PAIRS.values(), ids=PAIRS)
def test_a_hook_that_asks_for_another_op(op, other, device, monkeypatch):
    """What it was told is not what the op's next calls do."""
    monkeypatch.setattr(settling, "SETTLED_AFTER", 3)
    x = torch.randn(6, 8, device=device, requires_grad=True)
    expected = op(x)

    def pack(saved):
        with torch.no_grad():
            other(x)
        return saved

    for _ in range(12):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            assert_close(op(x), expected, rtol=0, atol=0)
    for _ in range(3):
        found = op(x)
        assert found.requires_grad
        assert_close(found, expected, rtol=0, atol=0)


def test_threads_that_trace_wait_for_none():
    """As for one that a collection begins while another function is traced."""
    def inner(x):
        return x * 2

    def outer(x):
        thread = threading.Thread(target=lambda: other(torch.ones(3)), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        return x + 1

    other = fused("inner")(inner)
    x = torch.randn(5)
    assert_close(frt.fuse(outer)(x), x + 1)
