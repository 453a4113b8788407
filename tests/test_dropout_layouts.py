"""Dropout's mask is found again, however what comes back lies in memory: an incoming gradient need not lie
as the output did (a transpose after the op, a sum, channels_last before it)."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import fusionrt
from fusionrt import fuse, kept, where

SHAPES = [(24, 32), (3, 16, 32), (2, 4, 6, 32)]
WIDTH = 32


def lying(t, layout):
    """The same values, other strides."""
    if layout == "expanded":
        return t.mean().expand(t.shape)
    if layout == "channels_last":
        return t.contiguous(memory_format=torch.channels_last)
    if layout == "contiguous":
        return t.contiguous()
    dims = {"transposed": (-1, -2), "turned": (0, -1)}[layout]
    return t.transpose(*dims).contiguous().transpose(*dims)


def layouts(shape):
    yield from ("contiguous", "transposed", "turned")
    if len(shape) == 4:
        yield "channels_last"


@fuse
def first_unread(a, b):
    return where(kept(0.5), (a + b * b) * 2, 0)


def bias(x):
    return torch.linspace(-1, 1, WIDTH, device=x.device, dtype=x.dtype)


def weight(x):
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(2)).to(x)


OPS = {
    "dropout_add": lambda x: fusionrt.dropout_add(x, torch.ones_like(x).contiguous(), 0.5),
    "bias_dropout_add": lambda x: fusionrt.bias_dropout_add(x, bias(x), torch.ones_like(x), 0.5),
    "relu_dropout": lambda x: fusionrt.relu_dropout(x, 0.5),
    "gelu_dropout": lambda x: fusionrt.gelu_dropout(x, 0.5),
    "fused": lambda x: first_unread(torch.ones_like(x).contiguous(), x),
    "fused, the read one first": lambda x: first_unread(x, torch.ones_like(x).contiguous()),
    "attention_dropout": lambda x: fusionrt.ops.attention_dropout(x, 0.5),
    "layer_norm": lambda x: fusionrt.ops.layer_norm(x, (WIDTH,), bias(x), bias(x), dropout_p=0.5),
    "rms_norm": lambda x: fusionrt.ops.rms_norm(x, (WIDTH,), bias(x), dropout_p=0.5),
    "dropout_add_layer_norm": lambda x: fusionrt.ops.dropout_add_layer_norm(
        x, torch.ones_like(x).contiguous(), bias(x), bias(x), 0.5),
    "linear": lambda x: fusionrt.ops.linear_activation(x, weight(x), None, None, dropout_p=0.5),
    "linear_gelu": lambda x: fusionrt.ops.linear_gelu_dropout(x, weight(x), bias(x), 0.5),
    "linear with residual": lambda x: fusionrt.ops.linear_activation(
        x, weight(x), bias(x), "relu", dropout_p=0.5, residual=lying(torch.ones_like(x), "transposed")),
    "ffn": lambda x: fusionrt.ops.ffn(x, weight(x), None, weight(x), None, dropout_p=0.5),
}


def gradient(op, x, g, create_graph=False):
    x = x.detach().requires_grad_()
    torch.manual_seed(5)
    y = op(x)
    return y, x, torch.autograd.grad(y, x, g, create_graph=create_graph)[0]


@pytest.mark.covering(1)
@pytest.mark.parametrize("lies, comes", [
    ("contiguous", "transposed"), ("contiguous", "turned"), ("transposed", "contiguous"),
    ("transposed", "expanded"), ("turned", "transposed")])
@pytest.mark.parametrize("name", OPS)
def test_gradients_lie_otherwise_than_outputs(device, name, lies, comes):
    op, shape = OPS[name], (3, 16, WIDTH)
    x = lying(torch.randn(shape, device=device), lies)
    g = lying(torch.randn(shape, device=device), comes)
    y, _, found = gradient(op, x, g)
    _, _, expected = gradient(op, x, torch.empty_like(y).copy_(g))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_mask_is_that_of_the_output(device, shape):
    base = torch.randn(shape, device=device) + 9
    pairs = itertools.product(layouts(shape), [*layouts(shape), "expanded"])
    for lies, comes in pairs if len(shape) != 3 else [("contiguous", "turned"), ("turned", "contiguous")]:
        g = lying(torch.randn(shape, device=device), comes)
        for op in (lambda x: fusionrt.dropout_add(x, torch.zeros_like(x), 0.5),
                   lambda x: fusionrt.bias_dropout_add(x, torch.zeros(WIDTH, device=x.device),
                                                       torch.zeros_like(x).contiguous(), 0.5)):
            y, _, found = gradient(op, lying(base, lies), g)
            torch.testing.assert_close(found, torch.where(y != 0, 2 * g, 0), rtol=0, atol=0)


def test_gradients_of_a_bias_and_of_gradients(device):
    """Of a bias alone no gradient has the full shape; of gradients the incoming one lies otherwise again."""
    b = torch.randn(WIDTH, device=device, requires_grad=True)
    x, zero = torch.randn(3, 16, WIDTH, device=device), torch.zeros(3, 16, WIDTH, device=device)
    g = lying(torch.randn(3, 16, WIDTH, device=device), "transposed")
    torch.manual_seed(5)
    y = fusionrt.bias_dropout_add(x, b, zero, 0.5)
    found, = torch.autograd.grad(y, b, g)
    torch.testing.assert_close(found, torch.where(y != 0, 2 * g, 0).sum((0, 1)), rtol=1e-5, atol=1e-4)

    for name in ("dropout_add", "gelu_dropout", "fused"):
        twice = []
        for comes in ("contiguous", "turned"):
            g = lying(torch.linspace(-1, 1, x.numel(), device=device).view(x.shape), comes).requires_grad_()
            _, source, first = gradient(OPS[name], x, g, create_graph=True)
            again = lying(torch.linspace(2, 3, x.numel(), device=device).view(x.shape), comes)
            twice.append(torch.autograd.grad(first, [g, source], again, allow_unused=True))
        for a, b in zip(*twice, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("comes", ["contiguous", "transposed", "channels_last", "expanded"])
@pytest.mark.parametrize("lies", ["contiguous", "channels_last"])
def test_compiled_and_transformed(device, lies, comes):
    """What torch's tracer and torch.func see walks alike."""
    x = lying(torch.randn(2, 4, 6, WIDTH, device=device) + 9, lies)
    g = lying(torch.randn(2, 4, 6, WIDTH, device=device), comes)

    def op(x):
        return fusionrt.dropout_add(x, torch.zeros_like(x), 0.5)

    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    for run in (op, compiled):
        y, _, found = gradient(run, x, g)
        torch.testing.assert_close(found, torch.where(y != 0, 2 * g, 0), rtol=0, atol=0)
    y, pullback = torch.func.vjp(op, x)
    torch.testing.assert_close(pullback(g)[0], torch.where(y != 0, 2 * g, 0), rtol=0, atol=0)


def test_embedding(device):
    tokens = torch.randint(0, 50, (4, 16), device=device)
    for norm in (None, (bias(torch.zeros(1, device=device)), bias(torch.zeros(1, device=device)))):
        found = []
        for comes in ("contiguous", "transposed", "turned", "expanded"):
            table = torch.linspace(-1, 1, 50 * WIDTH, device=device).view(50, WIDTH).sin().requires_grad_()
            torch.manual_seed(5)
            y = fusionrt.ops.embedding_position(tokens, table, layer_norm=norm, dropout_p=0.5)
            g = torch.randn(y.shape, device=device, generator=torch.Generator(device).manual_seed(1))
            g = lying(g.mean().expand(g.shape).contiguous() if comes == "expanded" else g, comes)
            same = torch.autograd.grad(y, table, g.contiguous(), retain_graph=True)[0]
            found.append((torch.autograd.grad(y, table, g)[0], same))
        for a, b in found:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["dropout_add", "gelu_dropout", "fused", "attention_dropout"])
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_samples_of_vmap_lie_otherwise(device, name, randomness):
    def both(x):
        y, pullback = torch.func.vjp(OPS[name], x)
        return y, pullback(torch.ones_like(x))[0]

    x = (torch.rand(3, WIDTH, 6, device=device) + 1).transpose(1, 2)  # positive: 0 is what was dropped
    y, found = torch.vmap(both, randomness=randomness)(x)
    if name == "attention_dropout":  # a softmax of what is kept of a row
        return
    dropped = y == (1 if name == "dropout_add" else 0)
    assert torch.equal(found == 0, dropped) and dropped.any() and not dropped.all()
    x = x.clone().requires_grad_()
    y = torch.vmap(OPS[name], randomness="same")(x)
    found, = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(found == 0, y == (1 if name == "dropout_add" else 0))


@pytest.mark.parametrize("training", [False, True])
def test_images_whose_rows_lie_between_channels(device, training):
    """Forward element by element, backward by rows: one walk."""
    def dropped(y):
        return where(kept(0.5), y * 2, 0)

    weight, shift = torch.rand(5, device=device) + 1, torch.rand(5, device=device)
    mean, var = torch.zeros(5, device=device), torch.ones(5, device=device)
    g = torch.randn(3, 5, 4, 6, device=device)
    for lies in ("contiguous", "channels_last"):
        x = lying(torch.randn(3, 5, 4, 6, device=device), lies)
        args = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, weight, shift)]
        torch.manual_seed(5)
        y = fusionrt.ops.batch_norm(args[0], mean.clone(), var.clone(), *args[1:], training=training,
                                    epilogue=dropped)
        grads = torch.autograd.grad(y, args, g)
        keeps = 2 * (y != 0)
        expected = F.batch_norm(args[0], mean.clone(), var.clone(), *args[1:], training=training)
        torch.testing.assert_close(y, expected * keeps, rtol=1e-4, atol=1e-4)
        for a, b in zip(grads, torch.autograd.grad(expected * keeps, args, g), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_sizes_that_follow_from_values(device):
    def op(x, chosen):
        return fusionrt.gelu_dropout(x[torch.nonzero(chosen).squeeze(-1)], 0.5)

    x = (torch.randn(8, WIDTH, device=device) + 9).requires_grad_()
    chosen = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0], device=device)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        y = torch.compile(op, backend="aot_eager", fullgraph=True)(x, chosen)
    found, = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(found[chosen == 1] != 0, y != 0)
