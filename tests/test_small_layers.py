"""Layers of one element, and of none."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

import fusionrt as frt


def of_leaves(function, *shapes):
    """What it returns, and its gradients."""
    torch.manual_seed(1)
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    out = function(*leaves)
    return out, torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)


def linear(x, weight, bias):
    return F.gelu(F.linear(x, weight, bias))


def swiglu(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def ffn(x, first, bias, second, other):
    return F.linear(F.gelu(F.linear(x, first, bias)), second, other)


CASES = [  # results of one element, then features, rows or hidden units that there are none of
    (frt.linear_gelu, linear, (1, 8), (1, 8), (1,)),
    (frt.linear_gelu, linear, (8,), (1, 8), (1,)),
    (frt.swiglu_mlp, swiglu, (1, 3), (1, 3), (1, 3), (4, 1)),
    (frt.ffn, ffn, (1, 3), (1, 3), (1,), (1, 1), (1,)),
    (lambda q, k, v: frt.attention(q, k, v, softcap=2.0), lambda q, k, v: v + 0 * (q + k).sum(),
     *[(1, 1, 1, 4)] * 3),
    (frt.cpu_fused_attention, lambda q, k, v: v + 0 * (q + k).sum(), *[(1, 1, 1, 4)] * 3),
    (frt.linear_gelu, linear, (2, 0), (4, 0), (4,)),
    (frt.linear_gelu, linear, (2, 5, 0), (4, 0), (4,)),
    (frt.linear_gelu, linear, (2, 3), (0, 3), (0,)),
    (frt.linear_gelu, linear, (0, 3), (4, 3), (4,)),
    (frt.ffn, ffn, (2, 3), (0, 3), (0,), (3, 0), (3,)),
    (frt.ffn, ffn, (2, 0), (4, 0), (4,), (0, 4), (0,)),
    (frt.swiglu_mlp, swiglu, (2, 3), (0, 3), (0, 3), (3, 0)),
    (frt.swiglu_mlp, swiglu, (2, 0), (4, 0), (4, 0), (0, 4)),
    (lambda x, w, b, r: frt.linear_activation(x, w, b, "gelu", residual=r),
     lambda x, w, b, r: linear(x, w, b) + r, (2, 3), (0, 3), (0,), (2, 0)),
    (lambda h, w: frt.linear_cross_entropy(h, w, torch.tensor([0, 1])),
     lambda h, w: F.cross_entropy(F.linear(h, w), torch.tensor([0, 1])), (2, 0), (4, 0)),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_results_and_gradients(case):
    ours, theirs, *shapes = CASES[case]
    assert_close(of_leaves(ours, *shapes), of_leaves(theirs, *shapes), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        tensors = [torch.randn(shape) for shape in shapes]
        assert_close(ours(*tensors), theirs(*tensors), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("residual", [False, True])
def test_a_head_of_one_output(activation, residual):
    layer = frt.nn.FusedLinear(8, 1, activation=activation)
    x, r = torch.randn(1, 8), torch.randn(1, 1)
    expected = F.linear(x, layer.weight, layer.bias)
    expected = expected if activation is None else getattr(F, activation)(expected)
    found = frt.linear_activation(x, layer.weight, layer.bias, activation, residual=r if residual else None)
    assert_close(found, expected + r if residual else expected)
    with torch.no_grad():
        assert_close(layer(x), expected)


def test_a_convolution_of_one_output():
    x, weight = torch.randn(1, 3, 2, 2), torch.randn(1, 3, 2, 2)
    mean, var = torch.zeros(1), torch.ones(1)
    with torch.no_grad():
        found = frt.conv_bn_act(x, weight, None, mean, var)
    assert_close(found, F.relu(F.batch_norm(F.conv2d(x, weight), mean, var)))
