"""Activations as modules of torch's, whose numbers may change between calls."""

import pytest
import torch
from torch import nn

from fusionrt import nn as fnn
from fusionrt import ops


@pytest.mark.covering(1)
@pytest.mark.parametrize(("make", "number"), [
    (lambda: nn.LeakyReLU(0.1), "negative_slope"), (lambda: nn.ELU(0.5), "alpha"),
    (lambda: nn.Softplus(2.0), "beta")])
@pytest.mark.parametrize("trained", [False, True])
def test_numbers_of_modules_may_change(device, make, number, trained):
    module, one = make(), torch.eye(8, device=device)
    x = torch.randn(4, 8, device=device, requires_grad=trained)
    zeros = torch.zeros(8, device=device)
    runs = (lambda: ops.linear_activation(x, one, zeros, module),
            lambda: ops.ffn(x, one, zeros, one, zeros, module),
            lambda: ops.conv_activation(x[..., None], one[..., None], zeros, module)[..., 0])
    for value in (0.25, 0.75):
        setattr(module, number, value)
        for run in runs:
            torch.testing.assert_close(run(), module(x), rtol=1e-3, atol=1e-3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", ["linear", "ffn", "conv", "conv_bn"])
def test_numbers_that_change_in_a_compiled_program(device, name, dynamic):
    one, zeros = torch.eye(8, device=device), torch.zeros(8, device=device)
    x = torch.randn((4, 8) if name in ("linear", "ffn") else (2, 8, 5, 5), device=device)
    run = {"linear": lambda x, m: ops.linear_activation(x, one, zeros, m),
           "ffn": lambda x, m: ops.ffn(x, one, zeros, one, zeros, m),
           "conv": lambda x, m: ops.conv_activation(x, one[..., None, None], zeros, m),
           "conv_bn": lambda x, m: ops.conv_bn_act(
               x, one[..., None, None], None, zeros, zeros + 1, None, None, activation=m, eps=0.0)}[name]
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    module = nn.LeakyReLU(0.1)
    for slope in (0.1, 0.7):
        module.negative_slope = slope
        torch.testing.assert_close(compiled(x, module), module(x), rtol=1e-3, atol=1e-3)


def test_numbers_of_a_layer_compiled_for_all_sizes(device):
    layer = fnn.FusedLinear(8, 8, activation=nn.Softplus(2.0, 10.0)).to(device)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (4, 5):
        x = torch.randn(rows, 8, device=device)
        torch.testing.assert_close(compiled(x), layer(x))
