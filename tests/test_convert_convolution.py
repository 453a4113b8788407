"""Convolutions with what follows them, and the layout of images in memory."""

import sys

import pytest
import torch
from convert_checks import check_module, compiled, randomised
from convert_net import one_thread  # noqa: F401  (a fixture)
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from fusionrt.convert import derived
from fusionrt.convert.capture import Options, backend
from fusionrt.convert.passes import PASSES


@pytest.fixture(autouse=True)
def full_float32(monkeypatch):
    """cuDNN takes TF32 for some kernels and not for others."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


class Bottleneck(nn.Module):
    """Of a ResNet, with a projection beside it; a second time without."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.conv1, self.conv2 = (nn.Conv2d(8, 4, 1, bias=False),
                                  nn.Conv2d(4, 16, 3, padding=1, stride=2, bias=False))
        self.down, self.again = nn.Conv2d(8, 16, 1, stride=2, bias=False), nn.Conv2d(16, 16, 3, padding=1)
        self.bn0, self.bn1, self.bn2, self.bn3, self.bn4 = (nn.BatchNorm2d(n) for n in (8, 4, 16, 16, 16))
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(16, 5)

    def forward(self, x):
        x = self.relu(self.bn0(self.stem(x)))
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.bn3(self.down(x))
        out = self.relu(out)
        out = self.relu(self.bn4(self.again(out)) + out)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(out, 1), 1))


class Inverted(nn.Module):
    """MobileNet-V3's block: depthwise convolution, hardswish, squeeze and excitation."""

    def __init__(self):
        super().__init__()
        self.expand, self.depthwise = (nn.Conv2d(8, 16, 1, bias=False),
                                       nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False))
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.project = nn.Conv2d(16, 8, 1, bias=False)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm2d(16), nn.BatchNorm2d(16), nn.BatchNorm2d(8)

    def forward(self, x):
        y = F.hardswish(self.bn1(self.expand(x)), inplace=True)
        y = F.hardswish(self.bn2(self.depthwise(y)))
        scale = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return x + self.bn3(self.project(scale * y))


# -- convolutions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [True, False])
def test_resnet_block(device, train):
    model = randomised(Bottleneck()).to(device).train(train)
    counts = check_module(model, torch.randn(2, 3, 8, 8, device=device), grad=train, rtol=1e-4, atol=1e-4)
    assert counts == {"conv_bn_relu": 4, "conv_bn": 1}


@pytest.mark.parametrize("train", [True, False])
def test_mobilenet_block(device, train):
    model = randomised(Inverted()).to(device).train(train)
    counts = check_module(model, torch.randn(2, 8, 6, 6, device=device), grad=train, rtol=1e-4, atol=1e-4)
    assert counts.pop("squeeze_excite", 0) == (device == "cuda" and not train)
    assert counts == {"conv_bn": 3, "conv_activation": 2}


def test_convolutions_under_autocast():
    """Weights are float32, results bfloat16; the statistics move as torch's do."""
    model, x = randomised(Bottleneck()), torch.randn(2, 3, 8, 8)
    twin = Bottleneck()
    twin.load_state_dict(model.state_dict())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run, found = compiled(model)
        ours, own = run(x), twin(x)
    assert found[0].counts == {"conv_bn_relu": 4, "conv_bn": 1}
    assert ours.dtype == own.dtype
    assert_close(ours, own, rtol=5e-2, atol=5e-2)
    assert_close(dict(model.named_buffers()), dict(twin.named_buffers()), rtol=2e-2, atol=2e-2)


def test_batch_norms_of_a_shared_module():
    """One norm at two places moves its statistics twice, in order."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

        def forward(self, x):
            x = torch.relu(self.bn(self.conv(x)))
            return torch.relu(self.bn(self.conv(x)) + x)

    counts = check_module(randomised(Shared()), torch.randn(2, 4, 6, 6), rtol=1e-4, atol=1e-4)
    assert counts == {"conv_bn_relu": 2}


def test_batch_norm_before_a_convolution_and_group_norm():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.conv, self.gn = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 8)

        def forward(self, x):
            x = torch.cat([x, self.conv(F.relu(self.bn(x), inplace=True))], 1)
            return F.silu(self.gn(x)) * 2

    for train in (True, False):
        counts = check_module(randomised(Dense()).train(train), torch.randn(2, 4, 6, 6), grad=train)
        assert counts == {"norm": 2}


def test_convolution_with_activation():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.GELU(), nn.Conv2d(4, 4, 3),
                          nn.ReLU(inplace=True), nn.Flatten(2),
                          nn.Conv1d(4, 2, 3), nn.LeakyReLU(0.3))
    for grad in (True, False):
        counts = check_module(model, torch.randn(2, 3, 8, 8), grad=grad, rtol=1e-4, atol=1e-5)
        assert counts == {"conv_activation": 3}


def test_weights_that_change_between_calls_are_seen():
    """Folded and packed ones too: by an optimiser, by load_state_dict, under no_grad."""
    model = randomised(Bottleneck()).eval()
    run, _ = compiled(model)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
        for change in (lambda: model.conv2.weight.mul_(2), lambda: model.bn2.running_var.add_(1),
                       lambda: model.load_state_dict(randomised(Bottleneck()).state_dict())):
            change()
            assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", [False, True])
@torch.no_grad()
def test_contiguous_images_have_fused_convolutions_too(norm):
    """Where the layout was left or undone: the same weights, with a norm folded into them, not packed."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8) if norm else nn.Identity()

        def forward(self, x):
            return F.relu(self.norm(self.conv(x)))

    model, x, graphs = randomised(Net()).eval(), torch.randn(2, 3, 9, 9), []
    options = Options(passes=tuple(p for p in PASSES if p != "layout"))
    torch._dynamo.reset()
    run = torch.compile(model, backend=lambda gm, given: graphs.append(gm) or backend(
        gm, given, options=options))
    for change in (lambda: None, lambda: model.conv.weight.mul_(2), lambda: model.conv.bias.add_(1),
                   lambda: model.load_state_dict(randomised(Net()).state_dict())):
        change()
        assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
        assert run(x).is_contiguous()
    graph, = graphs
    assert [n.target.__name__ for n in graph.graph.nodes if n.op == "call_function"] == ["packed_conv"]
    assert bool(derived.kept.get(model.conv.weight)) == norm


# -- layout ----------------------------------------------------------------------------------------------


def test_images_are_converted_once():
    """Before the first convolution; what leaves the graph lies as torch's does."""

    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.MaxPool2d(2))

        def forward(self, x):
            h = self.body(x)
            return h, h.mean((2, 3)), torch.flatten(h, 1) + 1

    model, graphs = Features(), []
    torch._dynamo.reset()
    run = torch.compile(model, backend=lambda gm, inputs: graphs.append(gm) or backend(gm, inputs))
    x = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        ours, expected = run(x), model(x)
    assert_close(ours, expected)
    assert [t.stride() for t in ours] == [t.stride() for t in expected]
    calls = [n for n in graphs[0].graph.nodes if n.target == "contiguous"]
    assert [n.kwargs.get("memory_format") for n in calls] == [torch.channels_last, None]


def test_views_that_need_the_usual_layout_keep_it():
    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

        def forward(self, x):
            return self.second(self.first(x)).view(x.shape[0], -1)

    model, x = Viewed(), torch.randn(2, 3, 8, 8)
    run, _ = compiled(model)
    with torch.no_grad():
        assert_close(run(x), model(x))


def test_weights_in_another_layout(monkeypatch):
    monkeypatch.setattr(sys.modules["fusionrt.convert.passes.layout"], "DEVICES", ("cpu",))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 3))
    run, found = compiled(model, passes=tuple(p for p in PASSES if p != "packed"))
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert_close(run(x), model(x))
        model[0].weight.mul_(2)
        assert_close(run(x), model(x))
        assert derived.kept.get(model[2].weight)
    assert [key for key in found[0].replacements if key.startswith("weights:")]
