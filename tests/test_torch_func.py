"""Transforms of torch.func: gradients, vmap, and forward mode, which is refused."""

import functools

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.testing import assert_close

import fusionrt as frt
from fusionrt import reference
from fusionrt.op import Operator


def test_func_transforms(device):
    x, bias = (torch.randn(s, device=device) for s in ((5, 8), 8))

    def loss(op):
        return lambda bias, x: op(x, bias).square().sum()

    def both(transform):
        return transform(loss(frt.bias_gelu)), transform(loss(reference.bias_gelu))

    func = torch.func
    for transform in (func.grad, func.grad_and_value, func.jacrev,
                      lambda f: func.jacrev(func.grad(f))):
        ours, theirs = both(transform)
        assert_close(ours(bias, x), theirs(bias, x))
    for transform, data in (
            (lambda f: func.vmap(f, (None, 0)), x),
            (lambda f: func.vmap(func.grad(f), (None, 0)), x),  # per-sample gradients
            (lambda f: func.vmap(func.grad(f, (0, 1)), (None, 1)), x.t()),
            (lambda f: func.vmap(func.vmap(func.grad(f), (None, 0)), (None, 0)), x[None])):
        ours, theirs = both(transform)
        assert_close(ours(bias, data), theirs(bias, data))


def test_vmap_is_one_call(device, monkeypatch):
    x, bias = torch.randn(6, 5, 8, device=device), torch.randn(8, device=device)
    calls, launch = [], Operator.launch
    monkeypatch.setattr(Operator, "launch", lambda op, *args: calls.append(op.name) or launch(op, *args))

    def a_row(op):
        return torch.func.grad(lambda bias, x: op(x, bias).square().sum())

    assert_close(torch.func.vmap(a_row(frt.bias_gelu), (None, 0))(bias, x),
                 torch.stack([a_row(reference.bias_gelu)(bias, row) for row in x]))
    assert len(calls) == 2
    assert_close(torch.vmap(frt.add_relu, (2, None), 1)(x, bias[:5]),
                 torch.vmap(reference.add_relu, (2, None), 1)(x, bias[:5]))
    assert len(calls) == 3


def test_vmap_promotes_as_each_call_does(device):
    x, scale = torch.randn(6, 5, 8, device=device).half(), torch.randn(6, device=device)
    for op in (frt.mish_scale, reference.mish_scale):  # a tensor without dimensions does not widen another
        each = torch.vmap(op)(x, scale)
        assert each.dtype == torch.float16
        assert torch.equal(each, torch.stack([op(a, b) for a, b in zip(x, scale, strict=True)]))


def test_vmap_of_dropout(device):
    x = torch.randn(3, 64, device=device)
    for randomness in ("same", "different"):
        def act(row):
            return frt.gelu_dropout(row, 0.5)
        y = torch.vmap(act, randomness=randomness)(x)
        masks = y != 0
        assert torch.equal(masks[0], masks[1]) == (randomness == "same")
        assert_close(y, torch.where(masks, 2 * F.gelu(x), 0))
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda row: frt.gelu_dropout(row, 0.5))(x)


def test_forward_mode_is_refused(device):
    x = torch.randn(4, device=device)
    frt.gelu(x)
    message = "gelu: forward-mode differentiation .* is not implemented; use reverse mode"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(frt.gelu, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        frt.gelu(forward_ad.make_dual(x, torch.ones_like(x)))
    with forward_ad.dual_level():
        assert_close(frt.gelu(x), F.gelu(x))


def test_transforms_of_the_backward_pass_of_an_earlier_graph(device):
    """Gradients by the incoming gradient are found, and no tangent is lost."""
    x = torch.randn(4, 6, dtype=torch.float64, device=device, requires_grad=True)
    g = torch.randn(4, 6, dtype=torch.float64, device=device)
    ours, theirs = (functools.partial(torch.autograd.grad, f(x), x, retain_graph=True)
                    for f in (frt.gelu, F.gelu))
    assert_close(*(torch.func.grad(lambda g, f=f: f(g, create_graph=True)[0].square().sum())(g)
                   for f in (ours, theirs)))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode differentiation"):
        ours(forward_ad.make_dual(g, g))


STRUCTURED = {
    "rotary_embedding": lambda x: frt.rotary_embedding(x),
    "qkv_heads": lambda x: frt.qkv_heads(x.flatten(2), 1, base=1e4)[0],
    "sliding_window": lambda x: frt.data.sliding_window(x, 2),
    "embedding_position": lambda x: frt.embedding_position(
        torch.zeros(2, 3, dtype=torch.int64, device=x.device), x[0, :, 0], None),
    "attention": lambda x: frt.attention(x, x, x, softcap=2.0),
}


@pytest.mark.parametrize("name", STRUCTURED)
def test_forward_mode_of_structured_ops_is_refused(name, device):
    """And no tangent is lost."""
    function, x = STRUCTURED[name], torch.randn(2, 4, 3, 8, device=device)
    with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
        torch.func.jvp(function, (x,), (x,))
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
            function(forward_ad.make_dual(x, x))
        plain = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(function(plain).square().sum(), plain)
    (expected,) = torch.autograd.grad(function(plain).square().sum(), plain)
    assert_close(grad, expected)
