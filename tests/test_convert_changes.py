"""Converted modules whose class, attributes or surroundings change between calls."""

import copy
import functools

import pytest
import torch
from convert_net import assert_same, one_thread  # noqa: F401  (a fixture)
from torch import nn
from torch.func import jacrev, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fusionrt as frt
from fusionrt.convert.model import record_of

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.layer(x))


class Derived(Base):
    def forward(self, x):
        return torch.relu(self.layer(x)) + 1


def test_another_class(monkeypatch):
    model = Base()
    fast = frt.auto_convert_model(model, example_inputs=X)
    assert_same(fast(X), model(X))
    fast.__class__ = Derived
    assert_same(fast(X), model(X) + 1)
    fast.__class__ = Base
    assert_same(fast(X), model(X))
    monkeypatch.setattr(Base, "forward", lambda self, x: self.layer(x) * 3)
    assert_same(fast(X), model(X))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = 1.5

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x) * self.scale)

    def change(self, value):
        self.scale = value


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.drop = nn.Linear(8, 24), nn.Dropout(0.0)

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 2, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return self.drop(F.softmax(q @ k.transpose(-1, -2) / 2.0, -1)) @ v

    def change(self, value):
        self.drop.p = value


@pytest.mark.parametrize("make", [Gated, Attention])
def test_numbers_that_change(make):
    """Dynamo makes them symbols, which passes must not take for numbers."""
    model = make()
    fast = frt.auto_convert_model(model, validate_accuracy=False)
    for value in (0.0, 0.3, 0.7):
        for module in (model, fast):
            module.train().change(value)
        torch.manual_seed(5)
        found = torch.autograd.grad(fast(X).sum(), list(fast.parameters()))
        if value == 0.0 or make is Gated:
            expected = torch.autograd.grad(model(X).sum(), list(model.parameters()))
            assert_same(found, expected, rtol=1e-4, atol=1e-5)


CALLS = {
    "vmap": lambda fast: vmap(fast)(X),
    "jacrev": lambda fast: jacrev(fast)(X),
    "meta": lambda fast: fast.to("meta")(X.to("meta")),
}


@pytest.mark.parametrize("name", CALLS)
def test_first_calls_that_cannot_be_compared(name):
    """The first one that can is."""
    fast = frt.auto_convert_model(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)))
    assert CALLS[name](fast).shape[0] == 4
    assert record_of(fast).verdict is None
    if name != "meta":
        fast(X)
        assert record_of(fast).verdict.accepted


def test_the_proof_is_not_counted():
    fast = frt.auto_convert_model(nn.Linear(8, 8))
    with FlopCounterMode(display=False) as counter:
        fast(X)
    assert counter.get_total_flops() == 2 * 4 * 8 * 8


def test_torchscript_is_of_the_uncompiled_module():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    fast = frt.auto_convert_model(model, example_inputs=X)
    scripted = torch.jit.script(fast)
    assert_same(scripted(X), model(X))
    assert scripted[0].weight.data_ptr() == model[0].weight.data_ptr()


class Partial(Base):
    def run(self, x, scale):
        return super().forward(x) * scale

    forward = functools.partialmethod(run, scale=2.0)


def test_a_forward_that_is_a_descriptor_is_compiled_once():
    model = Partial()
    fast = frt.auto_convert_model(model, example_inputs=X)
    assert_same(fast(X), model(X))
    run = fast.forward._run
    for _ in range(3):
        assert_same(fast(X), model(X))
    assert fast.forward._run is run


class Weight(nn.Parameter):
    pass


def test_parameters_of_other_types_are_proven_too():
    model = Base()
    model.layer.weight = Weight(model.layer.weight.detach())
    fast = frt.auto_convert_model(model)
    fast(X)
    assert record_of(fast).verdict.accepted


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_of_a_norm_that_ends_a_checkpoint(momentum):
    """The second run moves them and counts, as torch's does."""
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(8, momentum=momentum)

        def forward(self, x):
            return checkpoint(self.bn, x * 1.0, use_reentrant=False)

    model = Checkpointed()
    fast = frt.auto_convert_model(copy.deepcopy(model))
    for _ in range(3):
        x = torch.randn(5, 8)
        for each in (model, fast):
            each(x.clone().requires_grad_()).sum().backward()
    for ours, theirs in zip(fast.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
