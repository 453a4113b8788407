"""What almost is a pattern that a pass knows, and is none: the same results and gradients as without it."""

import math

import pytest
import torch
from convert_checks import check, compiled, of_pass
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fusionrt


class Gated(nn.Module):
    """A norm's result joins a residual, and is used by itself as well."""

    def __init__(self, norm, gate):
        super().__init__()
        self.conv, self.skip = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1)
        self.norm, self.gate = norm, gate

    def forward(self, x):
        return self.gate(self.norm(self.conv(x)), self.skip(x))


@pytest.mark.covering(1)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm2d(8), lambda: nn.GroupNorm(2, 8)])
@pytest.mark.parametrize("gate", [
    lambda y, r: torch.sigmoid(y + r) * y, lambda y, r: torch.relu(y + r) + r,
    lambda y, r: torch.where(y > 0, y + r, y), lambda y, r: torch.sigmoid(y + r) * (y + r)])
def test_norms_whose_result_is_used_beside_the_sum(gate, norm, training):
    model = Gated(norm(), gate).train(training)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    run, _ = compiled(model)
    g = torch.randn(2, 8, 8, 8)
    for found, expected in zip(*(torch.autograd.grad(f(x), [x, model.conv.weight], g) for f in (run, model)),
                               strict=True):
        assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)


def test_conversions_that_copy_or_lie_otherwise():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x), x.to(x.dtype, copy=True), x.to(torch.float32, False, True)

    x = torch.ones(2, 4)
    for kept in fusionrt.auto_convert_model(Kept(), (2, 4))(x)[1:]:
        kept.zero_()
    assert x.sum() == 8
    run, _ = compiled(lambda x: x.to(memory_format=torch.channels_last) * 2)
    x = torch.randn(2, 3, 4, 4)
    assert run(x).stride() == (48, 1, 12, 3)
    of_last = {"dtype": torch.float32, "memory_format": torch.channels_last}
    run, _ = compiled(lambda x: x.to(**of_last).permute(0, 2, 3, 1).view(-1))
    assert_close(run(x), x.permute(0, 2, 3, 1).reshape(-1))


def turned_back(q, c, s):
    halves = torch.cat((-q[..., 4:], q[..., :4]), -1)
    c, s = (torch.cat((t, t), -1).unsqueeze(1) for t in (c, s))
    return torch.add(q * c, halves * s, alpha=-1)


def steeper_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * torch.add(x, 0.044715 * x**3, alpha=3)))


def norm_of_the_rounded(x):
    rounded = x.to(torch.bfloat16).float()
    return x * torch.rsqrt(rounded.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize(("function", "shapes"), [
    (turned_back, [(2, 3, 5, 8), (1, 5, 4), (1, 5, 4)]), (steeper_gelu, [(5, 4)]),
    (norm_of_the_rounded, [(5, 64)])])
def test_other_numbers(function, shapes):
    args = [torch.randn(shape) for shape in shapes]
    run, _ = compiled(function)
    assert_close(run(*args), function(*args), rtol=1e-5, atol=1e-6)


def gelu_of(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


@pytest.mark.parametrize(("function", "args"), [
    (gelu_of, [torch.arange(-4, 4)]), (gelu_of, [torch.tensor([True, False])]),
    (lambda x, b, w: torch.addmm(b, x.view(3, 4), w).view(torch.int32),
     [torch.randn(3, 4), torch.randn(5), torch.randn(4, 5)]),
    (lambda x, b, w: torch.addmm(b, x.view(torch.float32), w).view(3, 5),
     [torch.randint(1, 1 << 30, (3, 4), dtype=torch.int32), torch.randn(5), torch.randn(4, 5)])])
def test_other_dtypes(function, args):
    check(function, *args)


@pytest.mark.parametrize(("function", "shape"), [
    (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), ()),
    (lambda x: torch.cat((-x[None], x[None]), -1) * 2, ()),
    (lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(4, 4, dtype=torch.bool).tril()), (4, 8)),
    (lambda x: F.scaled_dot_product_attention(x, x, x) * 2, (2, 2, 3, 0))])
def test_fewer_dimensions(function, shape):
    check(function, torch.randn(shape, requires_grad=True))


@pytest.mark.parametrize(("weight", "bias"), [((4,), None), ((4, 4), (1,)), ((4, 4), (3, 4))])
def test_linear_layers_of_other_shapes(weight, bias, monkeypatch):
    for name in ("stacked", "biases", "aligned_rows"):
        for place in of_pass(name, DEVICES=("cpu",)):
            monkeypatch.setattr(*place)
    for place in of_pass("aligned_rows", DEEP=4, MANY=1, ALIGNED=4):
        monkeypatch.setattr(*place)
    x, v, w = torch.randn(3, 4), torch.randn(weight), torch.randn(weight)
    b = None if bias is None else torch.randn(bias)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            check(lambda x, v, w: F.gelu(F.linear(x, v, b)) + F.linear(x, w, b), x, v.requires_grad_(grad), w,
                  rtol=1e-4, atol=1e-5)


def test_norms_of_no_channels():
    """Torch does not look at what there is no number for."""
    check(lambda x, mean, variance: F.relu(F.batch_norm(x, mean, variance, training=True)) * 2,
          torch.randn(3, 0, 4), torch.zeros(4), torch.ones(4))


@pytest.mark.parametrize("function", [
    lambda x: torch.cat(tensors=(-x[..., 4:], x[..., :4]), dim=-1) * 2,
    lambda x: x * torch.rsqrt(torch.square(input=x).mean(dim=-1, keepdim=True) + 1e-6),
    lambda x: 0.5 * x * (1 + torch.erf(input=x / math.sqrt(2))),
    lambda x: F.layer_norm(weight=x[0], input=x * 2, normalized_shape=(8,)).relu(),
    lambda x: torch.softmax(torch.matmul(x, torch.transpose(input=x, dim0=-2, dim1=-1)), -1) @ x,
    lambda x: torch.where(condition=x > 0, other=x, input=x * 2).exp() + torch.arange(start=1, end=9)])
def test_operands_by_name(function):
    check(function, torch.randn(3, 8, requires_grad=True), rtol=1e-4, atol=1e-5)


def test_norms_that_only_widen_are_known():
    def norm(x):
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)

    run, found = compiled(norm)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    assert_close(run(x), F.rms_norm(x.float(), (64,), None, 1e-6), rtol=1e-2, atol=1e-2)
    assert found[0].graph_after == 1


@pytest.mark.parametrize(("layer", "shape"), [(nn.Conv2d(3, 4, 3), (3, 8, 8)), (nn.Conv1d(3, 4, 3), (3, 9))])
def test_an_image_without_a_batch(layer, shape):
    net = nn.Sequential(layer, nn.ReLU())
    x = torch.randn(shape)
    run, _ = compiled(net)
    assert_close(run(x), net(x))
    assert_close(run(x[None]), net(x[None]))


def attended(x):
    q = x.view(2, 5, 2, 4).transpose(1, 2)
    return torch.softmax(q @ q.transpose(2, 3) * 0.5, -1) @ q


def attended_to_a_part(x):
    q = x.view(2, 5, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q[..., :2])


NORM = nn.GroupNorm(2, 8)


@pytest.mark.parametrize("function", [
    lambda x: attended(x).view(2, 2, 20), lambda x: (attended(x) * 2).view(2, 2, 20),
    lambda x: attended(x).as_strided((2, 20), (40, 1)), lambda x: F.relu(NORM(x.transpose(1, 2))).view(2, -1),
    lambda x: NORM(x.transpose(1, 2)).view(2, -1), lambda x: NORM(x.transpose(1, 2)), attended_to_a_part,
    lambda x: attended_to_a_part(x) * 2, lambda x: torch.tanh(attended_to_a_part(x) + 1) * 2])
def test_views_of_what_lies_otherwise_than_torchs(function):
    x = torch.randn(2, 5, 8, requires_grad=True)
    run, _ = compiled(function)
    y, expected = run(x), function(x)
    assert y.stride() == expected.stride()
    assert_close(y, expected, rtol=1e-4, atol=1e-5)
    g = torch.randn_like(y)
    assert_close(*(torch.autograd.grad(a, x, g)[0] for a in (y, expected)), rtol=1e-4, atol=1e-5)


def test_parameters_behind_other_results_have_no_gradient():
    """Zeros would let decay and momentum move them."""
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Linear(8, 8)
            self.a, self.b = (nn.Parameter(torch.ones(8)) for _ in range(2))

        def forward(self, x):
            h = F.gelu(self.trunk(x))
            return h * self.a + 1, h * self.b + 1

    model = Heads()
    fast = fusionrt.auto_convert_model(model, (4, 8))
    fast(torch.randn(4, 8))[0].sum().backward()
    assert fast.a.grad is not None
    assert fast.trunk.weight.grad is not None
    assert fast.b.grad is None


@pytest.mark.parametrize("norm", [True, False])
def test_norms_in_checkpoints(norm):
    middle = nn.BatchNorm2d(4) if norm else nn.Identity()
    body = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), middle, nn.ReLU())
    run, _ = compiled(lambda x: checkpoint(body, x, use_reentrant=False) * 2)
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    for _ in range(2):
        found, expected = (torch.autograd.grad((body(x) * 2 if f is body else f(x)).square().sum(),
                                               [x, body[0].weight]) for f in (run, body))
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_first_call_leaves_its_arguments_alone():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, seen):
            seen.append(x)
            x += 1
            return F.gelu(self.linear(x))

    head, body = Head(), nn.Linear(8, 8)
    fast = fusionrt.auto_convert_model(head)
    x, seen = torch.randn(4, 8), []
    assert_close(fast(body(x), seen), head(body(x), []))
    assert len(seen) == 1


def test_what_happens_before_the_first_call_counts():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    fast = fusionrt.auto_convert_model(model).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    assert_close(fast(x), model.double()(x))
    assert "Validation: accepted" in "".join(fusionrt.convert.conversion_report(fast).summary)
