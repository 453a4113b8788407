"""Networks of images at inference: 1 × 1 convolutions as products, squeeze and excitation, concatenations."""

import copy
import sys

import pytest
import torch
from convert_checks import called, check, check_module, compiled, randomised
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from fusionrt import auto_convert_model
from fusionrt.convert import calls
from fusionrt.convert import max_pool as max_pools
from fusionrt.convert.max_pool import Window, max_pool
from fusionrt.ops import folding
from fusionrt.rehearsal import collecting
from fusionrt.runtime import compiler


class Inverted(nn.Module):
    """EfficientNet's block."""

    def __init__(self, width=16, inner=4, act=F.silu, gate=torch.sigmoid):
        super().__init__()
        hidden = 2 * width
        self.expand = nn.Conv2d(width, hidden, 1, bias=False)
        self.depthwise = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False)
        self.squeeze, self.excite = nn.Conv2d(hidden, inner, 1), nn.Conv2d(inner, hidden, 1)
        self.project = nn.Conv2d(hidden, width, 1, bias=False)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm2d(hidden), nn.BatchNorm2d(hidden), nn.BatchNorm2d(width)
        self.act, self.gate = act, gate

    def forward(self, x):
        y = self.act(self.bn1(self.expand(x)))
        y = self.act(self.bn2(self.depthwise(y)))
        y = y * self.gate(self.excite(self.act(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return x + self.bn3(self.project(y))


class Block(nn.Module):
    """DenseNet's, with a pooling behind it that wants its operand dense."""

    def __init__(self, nested=False):
        super().__init__()
        self.nested = nested
        self.norms = nn.ModuleList(nn.BatchNorm2d(8 + 4 * k) for k in range(4))
        self.convs = nn.ModuleList(nn.Conv2d(8 + 4 * k, 4, 3, padding=1) for k in range(3))

    def forward(self, x):
        found = [x]
        for norm, conv in zip(self.norms[:3], self.convs, strict=True):
            whole = torch.cat(found, 1)
            found = [whole if self.nested else x, *([] if self.nested else found[1:]),
                     conv(torch.relu(norm(whole)))]
        return torch.relu(self.norms[3](torch.cat(found, 1)))


def replaced(found, name):
    return [key for f in found for key in f.replacements if key.startswith(f"{name}:")]


def folded(weight, of, eps, dtype):
    """In the place of the kernel."""
    bias, mean, var, scale, shift = of
    factor = torch.rsqrt(var + eps) * (1 if scale is None else scale)
    moved = ((0 if bias is None else bias) - mean) * factor + (0 if shift is None else shift)
    return (weight * factor.view(-1, 1, 1, 1)).to(dtype), moved.to(dtype)


@pytest.fixture
def anywhere(monkeypatch):
    """Passes for a GPU and 16 bits, on a CPU in float32."""
    for name in ("pixels", "squeeze", "biases", "pooling", "concatenations", "patches"):
        monkeypatch.setattr(sys.modules[f"fusionrt.convert.passes.{name}"], "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(sys.modules["fusionrt.convert.passes.pixels"], "HALVES",
                        (torch.float32, torch.float16, torch.bfloat16))
    monkeypatch.setattr(sys.modules["fusionrt.convert.passes.patches"], "HALVES", (torch.float32,))
    monkeypatch.setattr(folding, "folded", folded)


# -- 1 × 1 convolutions, squeeze and excitation ----------------------------------------------------------


@pytest.mark.parametrize(("act", "gate"), [(F.silu, torch.sigmoid), (F.hardswish, F.hardsigmoid),
                                           (F.relu, torch.sigmoid), (F.relu6, torch.sigmoid),
                                           (nn.ReLU6(inplace=True), F.hardsigmoid),
                                           (lambda x: F.hardtanh(x, 0, 6), torch.sigmoid)])
def test_inverted_block(anywhere, act, gate):
    model = randomised(Inverted(act=act, gate=gate)).eval()
    counts = check_module(model, torch.randn(2, 16, 6, 6), grad=False, rtol=1e-4, atol=1e-4)
    assert counts["squeeze_excite"] == 1
    run, found = compiled(model)
    with torch.no_grad():
        run(torch.randn(2, 16, 6, 6))
    assert len(replaced(found, "pixels")) == (1 if act is F.relu else 2)


@pytest.mark.parametrize(("act", "name"), [
    (nn.ReLU6(inplace=True), "relu6"), (F.relu6, "relu6"), (nn.Hardtanh(0, 6), "relu6"),
    (nn.Hardtanh(-0.5, 0.5), None), (lambda x: x * torch.sigmoid(1.702 * x), None)])
def test_whatever_follows_pixels_goes_along(anywhere, act, name, monkeypatch):
    """Activations of the catalogue by their names, others as functions."""
    taken, original = [], calls.linear_activation

    def seen(*args, **more):
        taken.append(args[3])
        return original(*args, **more)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16)

        def forward(self, x):
            return act(self.bn(self.conv(x)))

    monkeypatch.setattr(calls, "linear_activation", seen)
    model, x = randomised(Block()).eval(), torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    run, found = compiled(model)
    with torch.no_grad():
        assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(replaced(found, "pixels")) == 1
    assert taken and all(a == name if name else callable(a) for a in taken)


def test_what_records_gradients_is_left(anywhere):
    counts = check_module(randomised(Inverted()).eval(), torch.randn(2, 16, 6, 6), rtol=1e-4, atol=1e-4)
    assert "squeeze_excite" not in counts


def test_other_convolutions_are_left(anywhere):
    """Of several pixels, with a stride, with groups, whose gate somebody else uses, of another mean."""

    class Others(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(8, 8, 1, stride=2), nn.Conv2d(8, 8, 1, groups=2)
            self.c, self.d = nn.Conv2d(8, 8, 1, padding=1), nn.Conv2d(8, 8, 3)
            self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)

        def gate(self, x):
            return torch.sigmoid(self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))

        def forward(self, x):
            y = F.silu(self.d(F.silu(self.c(F.silu(self.b(F.silu(self.a(x))))))))
            seen = self.gate(y)
            return y * seen, seen, y * self.gate(y + 1)

    model, x = Others(), torch.randn(2, 8, 9, 9)
    run, found = compiled(model)
    with torch.no_grad():
        assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    assert not replaced(found, "squeeze")
    assert {key.split(":")[1] for key in replaced(found, "convolution")} > {
        key.split(":")[1] for key in replaced(found, "pixels")}
    assert len(replaced(found, "pixels")) == 4  # of the gates


def test_a_residual_decides_about_the_layout():
    """A sum of images in different layouts lies as torch's does, and can be viewed as that can."""

    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.bn = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8)

        def forward(self, x):
            y = x[:, :, 1:-1, 1:-1].contiguous() + self.bn(self.b(torch.relu(self.a(x))))
            return y, y.view(x.shape[0], -1)

    model, x = randomised(Viewed()).eval(), torch.randn(2, 8, 6, 6)
    run, _ = compiled(model)
    with torch.no_grad():
        ours, own = run(x), model(x)
    assert_close(ours, own, rtol=1e-4, atol=1e-5)
    assert [t.stride() for t in ours] == [t.stride() for t in own]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_inverted_block_on_a_gpu(dtype, monkeypatch):
    """Replayed; weights that change are seen."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    model = randomised(Inverted(32, 8)).cuda().to(dtype).eval()
    run, found = compiled(model)
    with torch.no_grad():
        for change in (lambda: None, lambda: model.expand.weight.mul_(1.5),
                       lambda: model.bn3.running_mean.add_(1), lambda: model.excite.bias.add_(1)):
            change()
            exact = copy.deepcopy(model).double()
            for _ in range(3):
                x = torch.randn(4, 14, 14, 32, device="cuda", dtype=dtype).permute(0, 3, 1, 2)
                own = (model(x) - exact(x.double())).abs().max()
                assert (run(x) - exact(x.double())).abs().max() <= 2 * own + 1e-5
    assert found[0].counts["squeeze_excite"] == 1
    assert len(replaced(found, "pixels")) == (2 if dtype == torch.float16 else 0)


@pytest.mark.gpu
def test_a_convolution_with_two_norms_on_a_gpu():
    """Their folded weights share a place."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(16, 16, 3, padding=1, bias=False)
            self.first, self.second = nn.BatchNorm2d(16), nn.BatchNorm2d(16)

        def forward(self, x):
            return torch.relu(self.second(self.conv(torch.relu(self.first(self.conv(x))))))

    model = randomised(Shared()).cuda().half().eval()
    run, found = compiled(model)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, 16, 9, 9, device="cuda", dtype=torch.float16)
            assert_close(run(x), model(x), rtol=2e-2, atol=5e-2)
    assert found[0].counts == {"conv_bn_relu": 2}


# -- convolutions of patches -----------------------------------------------------------------------------


class Tokens(nn.Module):
    """Images to tokens, as a vision transformer has them, or as they are."""

    def __init__(self, window=(4, 2), bias=True, flat=True, **options):
        super().__init__()
        self.patches, self.flat = nn.Conv2d(8, 24, window, window, bias=bias, **options), flat

    def forward(self, x):
        y = self.patches(x)
        return y.reshape(len(x), 24, -1).permute(0, 2, 1) + 1 if self.flat else y


@pytest.mark.covering(1)
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_patches(anywhere, flat, bias, last):
    model, x = Tokens(bias=bias, flat=flat).eval(), torch.randn(3, 8, 12, 6)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    run, found = compiled(model)
    with torch.no_grad():
        ours, own = run(x), model(x)
    assert_close(ours, own, rtol=1e-5, atol=1e-5)
    assert ours.stride() == own.stride()
    assert len(replaced(found, "patches")) == (not last)  # whose result lies as the images do
    assert not replaced(compiled_and_trained(model, x), "patches")


def compiled_and_trained(model, x):
    run, found = compiled(model)
    run(x).sum().backward()
    return found


@pytest.mark.parametrize("model", [Tokens(padding=(2, 1)), Tokens(groups=2), Tokens(dilation=2),
                                   Tokens((5, 2)), Tokens((1, 1))])
def test_windows_that_are_no_patches_are_left(anywhere, model):
    x = torch.randn(3, 8, 12, 6)
    run, found = compiled(model.eval())
    with torch.no_grad():
        assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
    assert not replaced(found, "patches")


def test_results_that_share_memory_do_so_still(anywhere):
    """Each by a copy of its own they would not."""
    model = Tokens(flat=False).eval()

    def function(x):
        y = model(x)
        return y, y.view(3, 24, 9)

    run, found = compiled(function)
    with torch.no_grad():
        y, flat = run(torch.randn(3, 8, 12, 6))
        y.zero_()
    assert replaced(found, "patches") and not flat.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_patches_on_a_gpu(dtype):
    model, x = Tokens().cuda().to(dtype).eval(), torch.randn(3, 8, 12, 6, device="cuda").to(dtype)
    run, found = compiled(model)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        own = (model(x) - exact).abs().max()
        for _ in range(4):
            assert (run(x) - exact).abs().max() <= 2 * own
    assert len(replaced(found, "patches")) == 1


# -- max pooling -----------------------------------------------------------------------------------------


def test_max_pooling(anywhere):
    """The pass; on a CPU torch's own is what it calls."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3), nn.MaxPool2d(2),
                          nn.MaxPool2d(2, ceil_mode=True))
    run, found = compiled(model)
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert_close(run(x), model(x))
    assert len(replaced(found, "pooling")) == 2
    run(x).square().sum().backward()
    assert len(replaced(found[1:], "pooling")) == 2
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    assert_close(grads, [p.grad for p in model.parameters()])


WINDOWS = [Window((3, 3), (2, 2), (1, 1), (1, 1)), Window((2, 2), (2, 2), (0, 0), (1, 1)),
           Window((3, 2), (1, 2), (1, 0), (2, 1)), Window((7, 7), (3, 3), (3, 3), (1, 1))]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", WINDOWS)
def test_max_pooling_on_a_gpu(dtype, window):
    x = torch.randn(3, 13, 17, 24, device="cuda").to(dtype).permute(0, 3, 1, 2)
    x[0, 3, 5, 7], x[1, 5], x[2, :, 3, 3] = float("nan"), -float("inf"), float("inf")
    x[2, :4] = x[2, :4].round()  # equal values
    ours, own = max_pool(x, *window), F.max_pool2d(x, *window)
    assert_close(ours, own, rtol=0, atol=0, equal_nan=True)
    assert ours.stride() == own.stride()

    grad, found = torch.randn_like(ours), []
    for function, double in ((max_pool, False), (F.max_pool2d, True)):
        # In channels_last memory torch takes an image's first pixel where all values are -inf.
        leaf = (x.double().contiguous() if double else
                x.clone(memory_format=torch.channels_last)).requires_grad_()
        found += torch.autograd.grad(function(leaf, *window), leaf, grad.to(leaf.dtype))
    eps = torch.finfo(dtype).eps
    assert_close(found[0].double(), found[1], rtol=eps, atol=10 * torch.finfo(torch.float32).eps)


@pytest.mark.gpu
@pytest.mark.parametrize("window", WINDOWS)
def test_gradients_of_max_pooling_have_gradients(window):
    x = torch.randn(2, 8, 11, 9, device="cuda").contiguous(memory_format=torch.channels_last)
    found = []
    for function in (max_pool, F.max_pool2d):
        leaf = x.clone(memory_format=torch.channels_last).requires_grad_()
        first, = torch.autograd.grad(function(leaf, *window).pow(3).sum(), leaf, create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), leaf)))
    assert_close(*found)


@pytest.mark.parametrize("window", WINDOWS)
def test_places_of_largest_values(window):
    x = torch.randn(2, 3, 11, 9)
    _, indices = F.max_pool2d(x, *window, return_indices=True)
    row, column = indices.div(9, rounding_mode="floor"), indices % 9
    rows, columns = (torch.arange(n) * s - p for n, s, p in
                     zip(indices.shape[2:], window.stride, window.padding, strict=True))
    k, j = (row - rows[:, None]) // window.dilation[0], (column - columns) // window.dilation[1]
    places = (k * window.kernel[1] + j).to(torch.uint8)
    assert torch.equal(max_pools._indices(places, window, x.shape), indices)


def test_a_rehearsal_lists_both_passes_of_max_pooling():
    x = torch.empty(2, 16, 8, 8, device="meta", requires_grad=True)
    with collecting("cuda") as listed:
        y = max_pool(x.contiguous(memory_format=torch.channels_last), *WINDOWS[0])
        y.backward(torch.empty_like(y))
    assert [kernel.entry for kernel in listed] == ["max_pool", "max_pool_backward"]
    assert y.shape == (2, 16, 4, 4)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
@pytest.mark.parametrize("which, places", [(max_pools._FORWARD, False), (max_pools._FORWARD, True),
                                           (max_pools._BACKWARD, True)])
def test_max_pooling_compiles(arch, which, places):
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    for dtype in ("float16", "float32"):
        kernel = max_pools._kernel(which, dtype, WINDOWS[0], places)
        entry, _ = compiler.cubin(kernel.text, kernel.stem, arch, kernel.stem)
        assert not any(entry.metadata[key] for key in ("stack", "spills", "warnings"))


# -- concatenations --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
def test_concatenations_that_begin_alike(anywhere, device, nested, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = randomised(Block(nested)).to(device).eval()
    x = torch.randn(2, 8, 6, 6, device=device)
    counts = check_module(model, x, grad=False, rtol=1e-4, atol=1e-4)
    assert counts["concatenation"] == 4
    assert "concatenation" not in check_module(model, x, rtol=1e-4, atol=1e-4)
    run, _ = compiled(model)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, 8, 6, 6, device=device)
            ours, own = run(x), model(x)
            assert_close(ours, own, rtol=1e-4, atol=1e-4)
            assert ours.stride() == own.stride()


def test_concatenations_that_are_left(anywhere):
    """Whose results leave the graph, are written to, or go where a part of a wider tensor would not do; of
    parts that are written to in between; of which each begins otherwise."""

    def returned(x, y):
        a = torch.cat([x, y], 1)
        return a, torch.cat([x, y, y], 1) * 2 + 1

    def written(x, y):
        a = torch.cat([x, y], 1)
        a[0] = 1
        return a * 2 + 1, torch.cat([x, y, y], 1) * 2 + 1

    def viewed(x, y):
        a = torch.cat([x, y], 1)
        return a.view(-1) * 2 + 1, torch.cat([x, y, y], 1) * 2 + 1

    def between(x, y):
        z = x * 3
        a = torch.cat([y, z], 1) * 2 + 1
        z[0] = 1
        return a, torch.cat([y, z, z], 1) * 2 + 1

    def otherwise(x, y):
        return torch.cat([x, y], 1) * 2 + 1, torch.cat([y, x, y], 1) * 2 + 1, torch.cat([x, y, y], 0) * 2 + 1

    for function in (returned, written, viewed, between, otherwise):
        run, found = compiled(function)
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        with torch.no_grad():
            assert_close(run(x, y), function(x, y))
        assert not replaced(found, "concatenations"), function.__name__


def test_excluded_concatenations(anywhere):
    model, x = randomised(Block()).eval(), torch.randn(2, 8, 6, 6)
    run, found = compiled(model)
    with torch.no_grad():
        run(x)
        key = replaced(found, "concatenations")[1]
        run, found = compiled(model, excluded=frozenset([key]))
        assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    assert not replaced(found, "concatenations")


# -- biases of linear layers -----------------------------------------------------------------------------


def test_biases_become_part_of_what_follows(anywhere):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.norm(x + self.down(F.gelu(self.up(x)))))

    model, x = Layer(), torch.randn(4, 8)
    run, found = compiled(model)
    with torch.no_grad():
        assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
    assert len(replaced(found, "biases")) == 3
    assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
    assert not replaced(found[1:], "biases")


def test_biases_of_an_image_without_a_batch(anywhere):
    """Its channels come first: as many as rows here, and elsewhere not."""
    layer = nn.Conv2d(3, 6, 3)
    run, _ = compiled(lambda x: torch.tanh(layer(x)) * 2)
    with torch.no_grad():
        for shape in ((3, 8, 8), (3, 3, 8), (2, 3, 8, 8)):
            x = torch.randn(shape)
            assert_close(run(x), torch.tanh(layer(x)) * 2)


@pytest.mark.parametrize("moves", [lambda y: y.permute(0, 3, 1, 2), lambda y: torch.transpose(y, 1, -1),
                                   lambda y: y.permute([3, 0, 1, 2]), lambda y: y.transpose(1, 2)])
def test_biases_of_moved_dimensions(anywhere, moves):
    """Of ConvNeXt's layers, whose results become images again before anything else is done with them."""
    w, b, scale = torch.randn(6, 8), torch.randn(6), torch.randn(())
    x = torch.randn(2, 3, 4, 8)

    def function(x, w, b):
        return moves(F.linear(x, w, b)) * scale + 1

    with torch.no_grad():
        check(function, x, w, b, rtol=1e-5, atol=1e-5)
        assert "add" not in called(function, x, w, b)  # the cluster has it
        run, found = compiled(function)
        run(x, w, b)
        assert len(replaced(found, "biases")) == 1
        both = lambda x, w, b: (y := F.linear(x, w, b), moves(y) * scale)  # noqa: E731  (somebody else reads it)
        check(both, x, w, b, rtol=1e-5, atol=1e-5)


def test_biases_of_convolutions(anywhere):
    """Go to the norm over channels behind, or to other calls on their result."""
    x, w, b = torch.randn(2, 4, 5, 6), torch.randn(8, 2, 3, 3), torch.randn(8)
    weight, scale = torch.randn(8), torch.randn(8, 1, 1)

    def normalised(x, w, b):
        return F.layer_norm(F.conv2d(x, w, b, groups=2, padding=1).permute(0, 2, 3, 1), (8,), weight)

    def scaled(x, w, b):
        return F.conv2d(x, w, b, (1, 2), groups=2) * scale - 1

    with torch.no_grad():
        for function in (normalised, scaled):
            check(function, x, w, b, rtol=1e-4, atol=1e-4)
            assert "add" not in called(function, x, w, b)
            run, found = compiled(function)
            run(x, w, b)
            assert len(replaced(found, "biases")) == 1
        check(lambda x, w, b: F.conv2d(x, w, b, groups=2), x, w, b)


@pytest.mark.parametrize("blocks", [2, 5])
def test_results_lie_as_they_would(anywhere, blocks):
    """Though values of norms in the graph do not tell that the images between are channels_last."""
    class Pyramid(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = self.stack(), nn.ConvTranspose2d(8, 8, 2, 2)
            self.last = nn.Conv2d(16, 3, 1)

        def stack(self):
            made = [nn.Conv2d(3, 8, 3, padding=1)]
            for _ in range(blocks):
                made += [nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3)]
            return nn.Sequential(*made)

        def forward(self, x):
            y = self.down(x)
            z = nn.functional.interpolate(nn.functional.max_pool2d(y, 2), y.shape[2:])
            return (self.last(torch.cat([y, z], 1)), nn.functional.pad(z, (1, 1)), self.up(z),
                    nn.functional.pixel_shuffle(y, 2), nn.functional.adaptive_avg_pool2d(y, 3))

    model, x = Pyramid().eval(), torch.randn(2, 3, 18, 18)
    fast = auto_convert_model(model, example_inputs=x)
    with torch.no_grad():
        for ours, theirs in zip(fast(x), model(x), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("moves", [(0, 2, 1), (0, 2, 1, 3), (0, 3, 1, 2)])
def test_batch_norms_in_training_lie_as_they_would(anywhere, moves):
    """Of images that lie neither contiguous nor in channels_last torch's are contiguous."""
    class Moved(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = (nn.BatchNorm1d if len(moves) == 3 else nn.BatchNorm2d)(6)

        def forward(self, x):
            return self.norm(x.permute(moves))

    model = Moved()
    x = torch.randn([6] * len(moves), requires_grad=True)
    fast = auto_convert_model(model, example_inputs=x)
    theirs, ours = model(x), fast(x)
    assert ours.stride() == theirs.stride()
    assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
