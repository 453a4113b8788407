"""Results that a backward pass makes again: the same gradients, and no memory kept."""

import weakref

import pytest
import torch
from checking import BF16, F32, F64, assert_same_bits, make
from torch import nn

import fusionrt as frt
from fusionrt.convert.capture import Options, backend
from fusionrt.convert.passes import PASSES

DTYPES = [F64, F32, BF16]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """cuDNN has gradients that are not, of float64 above all."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def tensors(dtype, device):
    shapes = ((2, 6, 9, 7), (8, 6, 3, 3), (8,), (8,), (5, 8, 3, 3))
    return [make(s, dtype, device).requires_grad_() for s in shapes]


def chain(recompute, x, first, scale, shift, second, dies=None, residual=None):
    statistics = [torch.zeros_like(scale), torch.ones_like(scale)]
    y = frt.conv_bn_act(x, first, None, *statistics, scale, shift, activation="silu", padding=1,
                        training=True, residual=residual, recompute=recompute)
    if dies is not None:
        dies.append(weakref.ref(y))
    return frt.conv_activation(y, second, None, "tanh", padding=1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_have_the_same_bits(dtype, layout, device):
    x, *others = tensors(dtype, device)
    x = x.detach().contiguous(memory_format=layout).requires_grad_()
    residual = torch.randn(2, 8, 9, 7, device=device).to(dtype).requires_grad_()
    leaves = [x, *others, residual]
    found = []
    for recompute in (False, True):
        out = chain(recompute, x, *others, residual=residual)
        found.append(torch.autograd.grad(out.float().square().sum(), leaves))
    for a, b in zip(*found, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("recompute", [False, True])
def test_it_is_not_kept(recompute, device):
    dies = []
    out = chain(recompute, *tensors(F32, device), dies=dies)
    assert (dies[0]() is None) or not recompute
    out.sum().backward()


def test_of_a_norm_of_its_own(device):
    """And a depthwise convolution; the result is read twice."""
    x, scale, shift, weight = (make(s, F32, device).requires_grad_() for s in (
        (2, 16, 8, 8), (16,), (16,), (16, 1, 3, 3)))
    found = []
    for recompute in (False, True):
        y = frt.batch_norm(x, None, None, scale, shift, training=True, epilogue=frt.relu, recompute=recompute)
        out = frt.depthwise_conv2d(y, weight, padding=1) + y
        found.append(torch.autograd.grad(out.square().sum(), (x, scale, shift, weight)))
    for a, b in zip(*found, strict=True):
        assert_same_bits(a, b)


def test_derivatives(device):
    leaves = [t.detach().requires_grad_() for t in tensors(F64, device)]
    function = lambda *args: chain(True, *args)  # noqa: E731
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("changed", ["shift", "second"])
def test_what_changes_meanwhile_is_noticed(changed, device):
    x, first, scale, shift, second = tensors(F32, device)
    out = chain(True, x, first, scale, shift, second)
    with torch.no_grad():
        {"shift": shift, "second": second}[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_result_that_was_changed_is_kept(device):
    """What it was made of would give another one."""
    x, scale, shift, weight = (make(s, F32, device).requires_grad_() for s in (
        (2, 8, 6, 6), (8,), (8,), (5, 8, 3, 3)))
    found = []
    for recompute in (False, True):
        y = frt.batch_norm(x, None, None, scale, shift, training=True, recompute=recompute)
        with torch.no_grad():
            y.mul_(3)
        found.append(torch.autograd.grad(frt.conv_activation(y, weight).square().sum(), weight)[0])
    assert torch.equal(*found)


def test_without_a_gradient_nothing_is_noted(device):
    args = tensors(F32, device)
    with torch.no_grad():
        assert_same_bits(chain(True, *args), chain(False, *args))


class Net(nn.Module):
    """Norms before convolutions, as DenseNet has them, and behind."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.second, self.more, self.third = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)

    def forward(self, x):
        h = self.second(torch.relu(self.norm(self.first(x))))
        return self.third(torch.relu(self.more(h))) + h.mean()


def test_models_in_training(device):
    torch.manual_seed(0)
    net, found = Net().to(device), []
    x = torch.randn(2, 3, 12, 12, device=device)
    for passes in (tuple(PASSES), tuple(p for p in PASSES if p != "recomputation")):
        torch._dynamo.reset()
        seen = []
        options = Options(passes=passes, on_graph=seen.append)
        fast = torch.compile(net, backend=lambda gm, given, o=options: backend(gm, given, options=o))
        for p in net.parameters():
            p.grad = None
        fast(x).square().sum().backward()
        found.append([p.grad for p in net.parameters()])
        noted = [key for key in seen[0].replacements if key.startswith("recomputation")]
        assert len(noted) == (4 if "recomputation" in passes else 0)  # norms, convolutions that become ours
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
