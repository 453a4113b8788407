"""While a converted model is traced nothing is collected and no guards are timed, and both are afterwards."""

import gc
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo import config, guards
from torch.autograd import forward_ad
from torch.nn import functional as F

import fusionrt as frt
from fusionrt.convert import tracing


def state():
    return gc.isenabled(), getattr(config, "run_gc_after_compile", None), guards.profile_guard_manager


def test_the_collector_waits():
    before = state()
    assert before[0]
    with tracing.quickly():
        inside = state()
        assert inside[:2] == (False, None if before[1] is None else False)
        assert inside[2] is not before[2] and inside[2](None, {}, 1) == 0
        with tracing.quickly():
            assert state() == inside
        assert state() == inside
    assert state() == before
    with pytest.raises(KeyError), tracing.quickly():
        raise KeyError
    assert state() == before


def test_whoever_reads_the_log_of_guards_finds_their_time(monkeypatch):
    monkeypatch.setattr(guards.guards_log, "isEnabledFor", lambda level: True)
    before = state()
    with tracing.quickly():
        assert state()[2] is before[2]


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


def test_networkx_waits_for_whoever_plans_with_it():
    """In a process of its own: here others may have imported it."""
    code = """
import sys, torch, fusionrt
from torch._functorch import _activation_checkpointing
fast = fusionrt.auto_convert_model(torch.nn.Linear(4, 4), example_inputs=torch.randn(2, 4), device="cpu")
fast(torch.randn(2, 4))
assert "networkx" not in sys.modules
planner = sys.modules[_activation_checkpointing.__name__ + ".graph_info_provider"]
graph = planner.nx.DiGraph([(1, 2)])
import networkx
assert type(graph) is networkx.DiGraph is planner.nx.DiGraph and sys.modules["networkx"] is networkx
loss = torch.compile(lambda x: (x.sin() * x.cos()).sum(), backend="aot_eager_decomp_partition")
x = torch.ones(3, requires_grad=True)
loss(x).backward()
torch.testing.assert_close(x.grad, torch.full((3,), 2.0).cos())
"""
    pytest.importorskip("torch._functorch._activation_checkpointing.graph_info_provider")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_forward_mode_differentiation():
    """By torch's own calls, as in torch.func."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU())
    x, tangent = torch.randn(2, 2, 8)
    ours = frt.auto_convert_model(model, example_inputs=(x,))
    found = []
    for each in (model, ours):
        with forward_ad.dual_level():
            found.append(forward_ad.unpack_dual(each(forward_ad.make_dual(x, tangent))))
    torch.testing.assert_close(*found)
    torch.testing.assert_close(ours(x), model(x))


def test_gradients_within_a_forward_pass_compile_once():
    """As of force fields: Dynamo traces what our ops do backward, and asks for nothing that changes."""
    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            with torch.enable_grad():
                at = x.detach().requires_grad_()
                force, = torch.autograd.grad(F.softplus(self.linear(at)).sum(), at, create_graph=True)
            return force + x

    model = Field()
    ours = frt.auto_convert_model(model, example_inputs=(torch.randn(4, 8),))
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for _ in range(12):
            x = torch.randn(4, 8)
            torch.testing.assert_close(ours(x), model(x))
            ours(x).sum().backward()
