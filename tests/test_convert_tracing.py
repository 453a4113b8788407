"""No garbage is collected while a converted model is traced, and is again afterwards."""

import gc

import pytest
import torch
from torch import nn
from torch._dynamo import config

import fusionrt as frt
from fusionrt.convert import tracing


def state():
    return gc.isenabled(), getattr(config, "run_gc_after_compile", None)


def test_the_collector_waits():
    before = state()
    assert before[0]
    with tracing.without_collecting():
        assert state() == (False, None if before[1] is None else False)
    assert state() == before
    with pytest.raises(KeyError), tracing.without_collecting():
        raise KeyError
    assert state() == before


def test_the_first_call_is_made_so_and_later_ones_are_not():
    seen = []

    class Net(nn.Module):
        def forward(self, x):
            seen.append(gc.isenabled())
            return torch.relu(x) * 2

    Net.forward = torch.compiler.disable(Net.forward)
    fast, x = frt.auto_convert_model(Net().eval(), validate_accuracy=False), torch.randn(4, 8)
    for _ in range(2):
        assert torch.equal(fast(x), torch.relu(x) * 2)
    assert seen == [False, True] and gc.isenabled()
