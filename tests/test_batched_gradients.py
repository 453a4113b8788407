"""Gradients of several incoming ones at a time (`is_grads_batched`), and transforms around each other, of ops
that are no expression."""

import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.testing import assert_close

from fusionrt import data, ops

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def of(values, x):
    return torch.linspace(-1, 1, values, device=x.device)


OPS = {
    "rolling std": ((4, 10), lambda x: data.sliding_window(x, 3, "std")),
    "rolling maximum": ((4, 10), lambda x: data.sliding_window(x, 3, "max")),
    "embedding": ((20, 8), lambda w: ops.embedding_position(TOKENS.to(w.device), w)),
    "embedding with a norm": ((20, 8), lambda w: ops.embedding_position(
        TOKENS.to(w.device), w, layer_norm=(of(8, w), of(8, w)))),
    "windows of attention": ((1, 2, 16, 8), lambda q: ops.attention(q, q, q, window=(3, 0))),
    "rotary": ((1, 2, 16, 8), lambda q: ops.rotary_embedding(
        q, q, of(64, q).view(16, 4).cos(), of(64, q).view(16, 4).sin())[0]),
    "depthwise": ((2, 3, 8, 8), lambda x: ops.depthwise_conv2d(x, of(27, x).view(3, 1, 3, 3), padding=1)),
}


@pytest.mark.parametrize("name", OPS)
def test_incoming_gradients_at_a_time(device, name):
    shape, op = OPS[name]
    x = torch.randn(shape, device=device, requires_grad=True)
    y = op(x)
    many = torch.randn(3, *y.shape, device=device)
    found, = torch.autograd.grad(y, x, many, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in many]
    assert_close(found, torch.stack(each), rtol=1e-4, atol=1e-5)


def ours(weight, scale, shift, tokens):
    return ops.embedding_position(tokens, weight, layer_norm=(scale, shift)).sin().sum()


def theirs(weight, scale, shift, tokens):
    return F.layer_norm(F.embedding(tokens, weight), scale.shape, scale, shift).sin().sum()


@pytest.mark.covering(1)
@pytest.mark.parametrize("wrt", [0, 1, 2])
@pytest.mark.parametrize("transform", [
    lambda f, tokens, k: grad(lambda *a: f(*a, tokens), k),
    lambda f, tokens, k: grad(lambda *a: vmap(lambda t: f(*a, t))(tokens).sum(), k),
    lambda f, tokens, k: lambda *a: vmap(lambda t: grad(lambda *a: f(*a, t), k)(*a))(tokens),
    lambda f, tokens, k: grad(lambda *a: grad(lambda *a: f(*a, tokens), k)(*a).square().sum(), k),
], ids=["grad", "grad of vmap", "vmap of grad", "grad of grad"])
def test_transforms_of_an_embedding_with_a_norm(device, transform, wrt):
    weight, scale, shift = (torch.rand(shape, device=device) for shape in ((20, 8), 8, 8))
    args = weight, scale + 0.5, shift
    found, expected = (transform(f, TOKENS.to(device), wrt)(*args) for f in (ours, theirs))
    assert_close(found, expected, rtol=1e-3, atol=1e-4)
