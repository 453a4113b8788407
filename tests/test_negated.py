"""Tensors whose memory does not hold their values: those that torch negates lazily, zeros that have none."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fusionrt as frt
from fusionrt import data, optim

TOKENS = torch.tensor([[0, 3, 6], [6, 2, 0]])


def attend(x, **options):
    return frt.attention(x, x * 1, x, **options)  # without an option it is torch's, NaN for such zeros


def convolve(x, weight, **options):
    return frt.conv2d_bn_act(x, weight, x[0, :, 0, 0], x[1, :, 0, 0], x[2, :, 0, 0].exp(), **options)


def classify(x):
    return frt.cross_entropy(x, torch.zeros(4, dtype=torch.long, device=x.device))


CALLS = {
    "add_relu": (lambda x: frt.add_relu(x, x * 2), (4, 6)),
    "add_relu of long rows": (lambda x: frt.add_relu(x, x[:1]), (640, 1024)),  # which keeps a mask on a GPU
    "layer_norm": (lambda x: frt.layer_norm(x, (6,)), (4, 6)),
    "batch_norm": (lambda x: frt.batch_norm(x, training=True, epilogue=frt.relu), (4, 6, 5)),
    "cross_entropy": (classify, (4, 6)),
    "sliding_window": (lambda x: data.sliding_window(x, 8), (4, 50)),
    "rotary": (lambda x: frt.rotary_embedding(x), (2, 4, 2, 8)),
    "qkv_heads": (lambda x: torch.cat(frt.qkv_heads(x, 2, base=1e4), 1), (2, 3, 24)),
    "embedding": (lambda x: frt.embedding_position(TOKENS.to(x.device), x, None), (7, 6)),
    "image": (lambda x: data.image_preprocess(x, size=(4, 4)), (1, 8, 8, 3)),
    "linear": (lambda x: frt.linear_relu(x, x[:64]), (128, 64)),
    "linear of a row": (lambda x: frt.linear_gelu(x[:1], x), (128, 64)),
    "ffn": (lambda x: frt.ffn(x, x, x[0], x.mT, x[0]), (64, 64)),
    "linear_cross_entropy": (lambda x: frt.linear_cross_entropy(
        x[:6], x, torch.zeros(6, dtype=torch.long, device=x.device)), (128, 64)),
    "attention with a window": (lambda x: attend(x, causal=True, window=8), (2, 2, 128, 64)),
    "attention with a softcap": (lambda x: attend(x, softcap=5.0), (2, 2, 128, 64)),
    "convolution": (lambda x: convolve(x, x[:, :, :3, :3]), (4, 4, 8, 8)),
    "depthwise": (lambda x: convolve(x.permute(0, 3, 1, 2), x[:1, :3, :3].permute(3, 0, 1, 2), groups=8),
                  (4, 8, 8, 8)),
}
IN_BF16 = "linear", "linear of a row", "ffn", "linear_cross_entropy", "attention with a softcap", "depthwise"


def negated(x):
    return torch._neg_view(-x)


def zeros(x):
    return torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device)


def check_is_same(call, shape, dtype, device, lazily):
    x = torch.randn(shape, device=device).to(dtype) if lazily is negated else torch.zeros(
        shape, dtype=dtype, device=device)
    expected = call(x)  # on the way of most operands, which lazy ones may not take: it rounds elsewhere
    ulps = 4 * torch.finfo(dtype).eps * expected.abs().max().item()
    assert_close(call(lazily(x)), expected, rtol=0, atol=ulps)


@pytest.mark.parametrize("lazily", [negated, zeros])
@pytest.mark.parametrize("name", CALLS)
def test_operands(name, lazily, device):
    check_is_same(*CALLS[name], torch.float32, device, lazily)


@pytest.mark.gpu
@pytest.mark.parametrize("lazily", [negated, zeros])
@pytest.mark.parametrize("name", IN_BF16)
def test_operands_of_matrix_units(name, lazily):
    check_is_same(*CALLS[name], torch.bfloat16, "cuda", lazily)


@pytest.mark.covering(1)
@pytest.mark.parametrize("lazily", [negated, zeros])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "image"])
def test_gradients(name, lazily, device):
    (call, shape), grads = CALLS[name], []
    for is_lazy in (False, True):
        torch.manual_seed(3)
        x = torch.randn(shape, device=device, requires_grad=True)
        out = call(negated(x) if is_lazy else x)
        grad = torch.randn_like(out) if lazily is negated else torch.zeros_like(out)
        grads += torch.autograd.grad(out, x, lazily(grad) if is_lazy else grad)
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
