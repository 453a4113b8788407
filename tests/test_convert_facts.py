"""What is known of a graph's calls is found anew for those alone that changed."""

import sys

import pytest
import torch
from convert_checks import compiled
from torch import nn
from torch.testing import assert_close

from fusionrt.convert.effects import Facts
from fusionrt.convert.graph import Edits
from fusionrt.convert.passes import PASSES


class Block(nn.Module):
    """Something for many passes: products of one input, a norm, calls in place, constants."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        q, k, v = (layer(x).view(2, 6, 4, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / 2 + torch.ones(6, 6).triu(1) * -1e4
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))).mul_(2))


@pytest.mark.parametrize("training", [False, True])
def test_facts_that_are_taken_over_are_those_found_anew(monkeypatch, training):
    """Of what a pass left alone the facts of the pass before it hold."""
    monkeypatch.setattr(sys.modules["fusionrt.convert.passes.stacked"], "DEVICES", ("cpu",))
    ran, run = [], Edits.run

    def checked(edits, name, function):
        run(edits, name, function)
        taken, new = Facts(edits.graph, edits._before), Facts(edits.graph)
        for fact in ("nodes", "position", "effects", "region", "classes", "written", "members", "readers"):
            assert getattr(taken, fact) == getattr(new, fact), (name, fact)
        ran.append(name)

    monkeypatch.setattr(Edits, "run", checked)
    model, x = Block(), torch.randn(2, 6, 16)
    with torch.set_grad_enabled(training):
        assert_close(compiled(model)[0](x), model(x), rtol=1e-4, atol=1e-5)
    assert set(PASSES) == set(ran)
