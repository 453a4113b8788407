"""Zeros, denormals, kinks, infinities and NaN: results and gradients are torch's."""

import itertools
import math

import pytest
import torch
from checking import BF16, F16, F32, F64, evaluate
from pointwise_ops import DIFFERENTIABLE, FINITE, SPECIALS, exact, example
from torch.nn import functional as F
from torch.testing import assert_close

import fusionrt as frt
from fusionrt.catalogue import OPS


def specials(name, values, dtype, device):
    """Every pair of the values, whatever the number of tensors."""
    pairs = torch.tensor(values, dtype=F64).to(dtype).to(device)
    a, b = (t.flatten().contiguous() for t in torch.meshgrid(pairs, pairs, indexing="ij"))
    args, kwargs = example(name, a.shape, dtype, device)
    order = itertools.cycle([a, b, b.flip(0), a.flip(0)])
    return [next(order) if torch.is_tensor(t) and t.shape == a.shape else t for t in args], kwargs


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=str)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_special_values(name, dtype, device):
    args, kwargs = specials(name, SPECIALS, dtype, device)
    out, theirs = OPS[name](*args, **kwargs), OPS[name].reference(*args, **kwargs)
    wide = exact(name, kwargs)(
        *(a.double() if torch.is_tensor(a) else a for a in args), **kwargs
    ).to(dtype)
    for mask in (torch.isnan, torch.isposinf, torch.isneginf):
        wrong = (mask(out) != mask(theirs)) & (mask(out) != mask(wide))
        assert not wrong.any(), [
            a[wrong] for a in (*args, out, theirs, wide) if torch.is_tensor(a) and a.dim()
        ]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_at_kinks_and_far_out(name, device):
    args, kwargs = specials(name, FINITE, F32, device)
    grads, theirs = (evaluate(f, args, kwargs)[1] for f in (OPS[name], OPS[name].reference))
    wide = [a.double() if torch.is_tensor(a) else a for a in args]
    for a, b, c in zip(grads, theirs, evaluate(exact(name, kwargs), wide, kwargs)[1], strict=True):
        wrong = ~torch.isclose(a, b, rtol=1e-4, atol=1e-37, equal_nan=True) & ~torch.isclose(
            a, c.float(), rtol=1e-4, atol=1e-37, equal_nan=True
        )
        assert not wrong.any(), [
            t[wrong] for t in (*args, a, b, c) if torch.is_tensor(t) and t.dim()
        ]


def derivatives(function, x):
    """The first and the second."""
    x = x.clone().requires_grad_()
    first, = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    if not first.requires_grad:
        return first, torch.zeros_like(first)
    return first.detach(), *torch.autograd.grad(first.sum(), x)


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "elu", "silu", "sigmoid", "tanh", "mish", "relu6",
                                  "relu_squared"])
def test_two_derivatives_at_kinks_and_nan_are_torchs(name, device):
    values = [0.0, -0.0, 6.0, 19.5, 1.0, -1.0, -math.inf]
    # At NaN torch's slope of elu is NaN in a CPU's vectors, 1 after them; relu6's 0 on a CPU, 1 on a GPU.
    if name not in ("elu", "relu6"):
        values.append(math.nan)
    x = torch.tensor(values, dtype=F64, device=device)
    for ours, theirs in zip(derivatives(OPS[name], x), derivatives(OPS[name].reference, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, equal_nan=True)


def test_the_slope_of_relu6_at_nan(device):
    first, second = derivatives(OPS["relu6"], torch.tensor([math.nan], dtype=F64, device=device))
    assert first.item() == second.item() == 0


def test_the_slope_of_hardsigmoid_is_torchs(device):
    """Whose own has no second derivative."""
    x = torch.tensor([math.nan, 3.0, -3.0, 0.0, math.inf, -math.inf], dtype=F64, device=device)
    first, second = derivatives(OPS["hardsigmoid"], x)
    torch.testing.assert_close(first.tolist(), [0.0, 0.0, 0.0, 1 / 6, 0.0, 0.0])
    assert not second.any()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 2.0, -3.0])
def test_slopes_that_are_learnt(value, device):
    """As torch's, whose gradient of a slope is 0 where the slope was not used."""
    x = torch.tensor([[1.0, value], [-1.0, 1.0]], device=device)
    for ours, theirs, slope in (
            (lambda x, a: frt.prelu_bias(x, a, 0.0), F.prelu, torch.full((2,), 0.25, device=device)),
            (lambda x, a: frt.prelu_bias(x, a, 1.0, bias_first=False), lambda x, a: F.prelu(x, a) + 1,
             torch.full((2,), 0.25, device=device)),
            (frt.leaky_relu, lambda x, a: F.prelu(x, a.reshape(1)), torch.tensor(0.1, device=device))):
        found, expected = [], []
        for run, into in ((ours, found), (theirs, expected)):
            leaves = [t.clone().requires_grad_() for t in (x, slope)]
            y = run(*leaves)
            into += [y, *torch.autograd.grad(y.sum(), leaves)]
        for ours_, theirs_ in zip(found, expected, strict=True):
            assert_close(ours_, theirs_, equal_nan=True)


def test_gradients_of_quotients_do_not_overflow(device):
    divide = frt.fuse(lambda a, b: a / b)
    for a, b, g in ((1e-20, 1e-15, 1e25), (0.0, 1e-30, 1e10), (3.0, 7.0, 1.0)):
        numerator, divisor, grad = (torch.tensor([v], device=device) for v in (a, b, g))
        leaves = [t.requires_grad_() for t in (numerator, divisor)]
        assert_close(torch.autograd.grad(divide(*leaves), leaves, grad),
                     torch.autograd.grad(numerator / divisor, leaves, grad))


def test_targets_of_infinite_logits(device):
    x, y = (torch.tensor(v, device=device) for v in ([math.inf, -math.inf, 1.0], [0.0, 1.0, 1.0]))
    found = y.clone().requires_grad_()
    expected = y.clone().requires_grad_()
    frt.bce_with_logits(x, found, reduction="none").sum().backward()
    F.binary_cross_entropy_with_logits(x, expected, reduction="none").sum().backward()
    assert_close(found.grad, expected.grad)


@pytest.mark.parametrize(("x", "alpha", "bias"), [
    ((3, 3), (3, 1), ()), ((3, 3), (1, 3), ()), ((2, 3, 3), (1, 3), ()), ((2, 3, 3, 3), (1, 1, 1, 3), ()),
    ((4, 4, 4, 4), (4, 1, 1, 1), ()), ((2, 3, 5), (3, 1), (5,)), ((2, 1), (3,), (3,)), ((), (1,), ()),
    ((3,), (1, 1), (3,))])
def test_slopes_are_of_dimension_one(x, alpha, bias):
    """However alpha lies: as many as there are channels."""
    x, alpha, bias = -torch.rand(x), torch.rand(alpha), torch.rand(bias)
    for first in (True, False):
        y = x + bias if first else x
        if alpha.numel() > 1 and (y.dim() < 2 or y.shape[1] != alpha.numel()):
            continue
        slope = alpha.reshape((-1,) + (1,) * (y.dim() - 2)) if alpha.numel() > 1 else alpha.reshape(())
        expected = torch.where(y > 0, y, slope * y) + (0 if first else bias)
        assert_close(frt.prelu_bias(x, alpha, bias, bias_first=first), expected)
