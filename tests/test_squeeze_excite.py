"""Squeeze and excitation: how a cluster shares an image, the kernel's text, its results on a GPU."""

import itertools

import pytest
import torch
from checking import BF16, F16, F32, assert_same_bits, needs_nvrtc
from torch.nn import functional as F

from fusionrt.convert import squeeze_excite as module
from fusionrt.convert.squeeze_excite import CLUSTER, LARGE_CLUSTER, VECTOR, squeeze_excite
from fusionrt.runtime import compiler

# Channels, side, hidden values: of MobileNet-V3 and EfficientNet, and extremes.
LAYERS = [(72, 28, 24), (120, 28, 32), (480, 14, 120), (672, 7, 168), (960, 7, 240), (32, 112, 8),
          (96, 56, 4), (144, 56, 6), (240, 14, 10), (1152, 7, 48), (8, 1, 1), (24, 5, 3), (24, 31, 4),
          (2048, 3, 1000)]


@pytest.mark.parametrize("cluster", [CLUSTER, LARGE_CLUSTER])
def test_blocks_have_all_channels_and_pixels(cluster):
    for (channels, side, hidden), itemsize in itertools.product(LAYERS, (2, 4)):
        packs = channels * itemsize // VECTOR
        cut = module._cut(packs, side * side, hidden, cluster)
        parts = 1 << cut.part_bits
        assert parts * cut.packs >= packs > (parts - 1) // 2 * cut.packs
        assert (cluster // parts) * cut.pixels >= side * side
        assert cut.packs <= module.MOST_PACKS and (cut.packs >= min(packs, module.NEIGHBOURS) or parts == 1)


def test_large_weights_are_cut_into_many_parts():
    """A block of MobileNet-V3's last layer read all 0.9 MB of the first matrix."""
    assert module._cut(240, 49, 240, LARGE_CLUSTER) == (4, 15, 49)
    assert module._cut(8, 112 * 112, 8, LARGE_CLUSTER) == (0, 8, 112 * 112 // 16)
    assert module._cut(513, 8000, 1, CLUSTER).packs < 513 == module.MOST_PACKS + 1


@needs_nvrtc
@pytest.mark.parametrize("arch", [pytest.param(a, marks=[] if a == "sm_90" else pytest.mark.slow)
                                  for a in compiler.ARCHITECTURES])
@pytest.mark.parametrize("cluster", [CLUSTER, LARGE_CLUSTER])
@pytest.mark.parametrize("dtype, hidden_pack", [
    ("float32", 4), ("float32", 2), ("float16", 8), ("bfloat16", 1)], ids=str)
def test_kernels_compile_without_spills(dtype, hidden_pack, cluster, arch):
    if cluster == CLUSTER or arch in [f"sm_{major}{minor}" for major, minor in module.HAVE_LARGE]:
        kernel = module._kernel(dtype, "silu", "sigmoid", cluster, hidden_pack)
        found = compiler.cubin(kernel.text, kernel.stem, arch, kernel.name)[0].metadata
        assert (found["spills"], found["stack"], found["warnings"]) == (0, 0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("images, inner, outer", [(1, "relu", "hardsigmoid"), (3, "silu", "sigmoid"),
                                                  (17, "relu", "hardsigmoid")])
def test_as_accurate_as_torch(dtype, images, inner, outer, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    for channels, side, hidden in LAYERS:
        x = torch.randn(images, side, side, channels, device="cuda").to(dtype).permute(0, 3, 1, 2)
        weights = [torch.randn(*size, device="cuda").to(dtype) for size in (
            (hidden, channels, 1, 1), (hidden,), (channels, hidden, 1, 1), (channels,))]
        weights[2] /= hidden ** 0.5

        def reference(x, w1, b1, w2, b2):
            mean = x.mean((2, 3), keepdim=True)
            return x * getattr(F, outer)(F.conv2d(getattr(F, inner)(F.conv2d(mean, w1, b1)), w2, b2))

        exact = reference(*(t.double() for t in (x, *weights)))
        own = (reference(x, *weights) - exact).abs().max()
        ours = squeeze_excite(x, *weights, inner=inner, outer=outer)
        assert ours.stride() == x.stride()
        assert (ours - exact).abs().max() <= 2 * own + 1e-6, (channels, side, hidden)
        again = squeeze_excite(x, *weights, inner=inner, outer=outer)
        assert_same_bits(ours.permute(0, 2, 3, 1), again.permute(0, 2, 3, 1))


@pytest.mark.gpu
def test_what_the_kernel_does_not_take_is_torch_s():
    """Channels that are no whole vectors, memory of another order, weights that begin anywhere; and biases of
    any strides, which it does take."""
    x = torch.randn(2, 6, 6, 24, device="cuda").permute(0, 3, 1, 2)
    w1, b1, w2, b2 = (torch.randn(*s, device="cuda") for s in ((5, 24, 1, 1), (5,), (24, 5, 1, 1), (24,)))
    shifted = torch.randn(24 * 5 + 1, device="cuda")[1:].view(24, 5, 1, 1)
    apart, one = torch.randn(10, device="cuda")[::2], torch.randn(1, device="cuda").expand(24)
    for given in ((x[:, :22], w1[:, :22], b1, w2[:22], b2[:22]), (x.contiguous(), w1, b1, w2, b2),
                  (x, w1, b1, shifted, b2), (x, w1, apart, w2, one)):
        ours = squeeze_excite(*given, inner="relu", outer="sigmoid")
        y, first, second, third, fourth = (t.double() for t in given)
        exact = y * torch.sigmoid(F.conv2d(F.relu(F.conv2d(y.mean((2, 3), keepdim=True), first, second)),
                                           third, fourth))
        torch.testing.assert_close(ours.double(), exact, rtol=1e-3, atol=1e-3)
