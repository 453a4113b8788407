"""A small model, passes over it, and fixtures, for the tests of conversion."""

import threading

import pytest
import torch
from torch import nn

from fusionrt.convert import passes


class Net(nn.Module):
    """Relus by name, a tied weight, a buffer, dropout."""

    def __init__(self, width=8):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.1)
        self.register_buffer("scale", torch.full((width,), 0.5))
        self.layers, self.lock = [self.first], threading.Lock()

    def forward(self, x, *, bias=0.0):
        x = torch.relu(self.layers[0](x)) * self.scale
        return self.drop(torch.relu(self.second(self.norm(x)))) + bias


X = torch.randn(16, 8, generator=torch.Generator().manual_seed(7))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Nothing here is large, and other workers want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(name="net")
def small_net():
    return Net().eval()


def assert_same(a, b, **tolerances):
    torch.testing.assert_close(a, b, **tolerances)


def relus(edits):
    return [n for n in list(edits.graph.nodes) if n.target is torch.relu and edits.allows(n)]


def replaced_by(function, which=lambda k: True):
    """A pass that replaces relus, counted as a norm."""
    def run(edits):
        for k, n in enumerate(relus(edits)):
            if which(k):
                edits.replace([n], n, function, n.args, "norm")
    return run


@pytest.fixture(name="with_passes")
def installed_passes(monkeypatch):
    def install(**functions):
        for name, function in functions.items():
            monkeypatch.setitem(passes.PASSES, name, function)
        return tuple(functions)
    return install
