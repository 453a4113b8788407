"""Activations as modules of torch's, whose numbers may change between calls."""

import pytest
import torch
from torch import nn

from fusionrt import ops


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
