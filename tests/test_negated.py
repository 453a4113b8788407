"""Tensors that torch negates lazily: their memory holds the opposite, which no kernel may take for them."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fusionrt as frt
from fusionrt import data, optim

TOKENS = torch.tensor([[0, 3, 6], [6, 2, 0]])
CALLS = {
    "add_relu": (lambda x: frt.add_relu(x, x * 2), (4, 6)),
    "layer_norm": (lambda x: frt.layer_norm(x, (6,)), (4, 6)),
    "sliding_window": (lambda x: data.sliding_window(x, 8), (4, 50)),
    "rotary": (lambda x: frt.rotary_embedding(x), (2, 4, 2, 8)),
    "qkv_heads": (lambda x: torch.cat(frt.qkv_heads(x, 2, base=1e4), 1), (2, 3, 24)),
    "embedding": (lambda x: frt.embedding_position(TOKENS, x, None), (7, 6)),
    "image": (lambda x: data.image_preprocess(x, size=(4, 4)), (1, 8, 8, 3)),
}


@pytest.mark.parametrize("call, shape", CALLS.values(), ids=CALLS)
def test_operands(call, shape):
    x = torch.randn(shape, dtype=torch.float32)
    found = call(torch._neg_view(-x))
    assert_close(found, call(x))


@pytest.mark.parametrize("name", [name for name in CALLS if name != "image"])
def test_gradients(name):
    (call, shape), grads = CALLS[name], []
    for negate in (lambda t: t, lambda t: torch._neg_view(-t)):
        torch.manual_seed(3)
        x = torch.randn(shape, requires_grad=True)
        out = call(negate(x))
        grads += torch.autograd.grad(out, x, negate(torch.randn_like(out)))
    assert_close(*grads)


class Imaginary(nn.Module):
    """Whose gradient of b arrives negated."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.tensor(v)) for v in (1.0, 2.0))

    def forward(self, x):
        return (torch.complex(self.a, self.b).conj() * x).imag


@pytest.mark.parametrize("name, options", [("SGD", {"momentum": 0.9}), ("SGD", {}), ("AdamW", {})], ids=str)
def test_steps(name, options):
    made = []
    for of in (torch.optim, optim):
        model = Imaginary()
        optimizer = getattr(of, name)(model.parameters(), lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor(1 + 0j)).backward()
            assert model.b.grad.is_neg()
            optimizer.step()
        model.b.grad = torch.tensor(1.0)
        optimizer.step()
        model.b.grad = torch._neg_view(torch.tensor(1.0))  # after a usual one, which is what guards know
        optimizer.step()
        made.append([p.detach() for p in model.parameters()])
    assert_close(*made)


def test_averages():
    value = torch.randn(5)
    for given in (value, torch._neg_view(-value)):
        average = torch.zeros(5)
        optim.ema_update_([average], [given], 0.5)
        assert_close(average, 0.5 * value)
