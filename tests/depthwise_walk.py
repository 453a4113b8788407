"""What tests of depthwise convolutions share: images with neighbouring channels, and how kernels count."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from checking import F16, F32, F64, assert_same_bits, check_in_norm
from torch.nn import functional as F

import fusionrt as frt
from fusionrt.expr import normcdf
from fusionrt.ops import depthwise_images
from fusionrt.ops import depthwise_kernels as kernels
from fusionrt.ops.depthwise_forms import RESIDUAL, VALUE, Finish, Geometry, channel


@contextlib.contextmanager
def planned_anew(**others: Any):
    """With other thresholds, and without the kernels for small images, which have tests of their own."""
    planned = [getattr(kernels, f"_planned_{what}")
               for what in ("forward", "grad_input", "grad_weight", "backward")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(depthwise_images, "serves", lambda *args: False)
        for name, value in others.items():
            patch.setattr(kernels, name, value)
        for found in planned:
            found.cache_clear()
        yield
    for found in planned:
        found.cache_clear()


def pairs(*values):
    return tuple(v if isinstance(v, tuple) else (v, v) for v in values)


def images(*shape, dtype=F32, device="cpu"):
    return torch.randn(shape, dtype=F64, device=device).to(dtype, memory_format=torch.channels_last)


def digits(task, *bases):
    for base in bases:
        yield task % base
        task //= base
    yield task


def pixels(image, row, columns):
    """Of a row; zeros outside of the image."""
    found = np.zeros((len(columns), image.shape[2]))
    rows, width = image.shape[:2]
    inside = [k for k, column in enumerate(columns) if 0 <= column < width and 0 <= row < rows]
    found[inside] = image[row, [columns[k] for k in inside]] if inside else 0
    return found


def of_last(array):
    return torch.from_numpy(array).movedim(-1, 1)


def check_gradients(convolved, weighed, size, kernel, stride, padding, dilation):
    """The kernels' arithmetic in numpy, convolved(source, taps, result, geometry, transposed) and
    weighed(source, grad, kernel, geometry), against torch's convolution and its gradients."""
    kernel, *options = pairs(kernel, stride, padding, dilation)
    geometry = Geometry(*options)
    x, weight = torch.randn(2, 3, *size, dtype=F64, requires_grad=True), torch.randn(
        3, 1, *kernel, dtype=F64, requires_grad=True)
    y = F.conv2d(x, weight, None, *geometry, groups=3)
    grad = torch.randn_like(y)
    of_x, of_weight = torch.autograd.grad(y, (x, weight), grad)
    source, up = (t.detach().movedim(1, -1).numpy() for t in (x, grad))
    taps = weight.detach()[:, 0].movedim(0, -1).numpy()
    result = geometry.output_size(size, kernel)
    torch.testing.assert_close(of_last(convolved(source, taps, result, geometry, False)), y.detach())
    found = weighed(source, up, kernel, geometry)
    torch.testing.assert_close(torch.from_numpy(found).movedim(-1, 0)[:, None], of_weight)
    if geometry.stride == (1, 1):
        moved = [d * (k - 1) - p for k, p, d in zip(kernel, geometry.padding, geometry.dilation, strict=True)]
        geometry, taps = geometry._replace(padding=tuple(moved)), taps[::-1, ::-1]
    found = convolved(up, taps, size, geometry, geometry.stride != (1, 1))
    torch.testing.assert_close(of_last(found), of_x)


def check_large_images(batch, k, stride, device="cuda", size=112):
    """Against torch, and that two runs give the same bits."""
    x = images(batch, 96, size, size, dtype=F16, device=device)
    weight = torch.randn(96, 1, k, k, device=device).to(F16)
    grad_output = torch.randn(batch, 96, size // stride, size // stride, device=device)
    (y, grads), (again, grads_again) = (
        check_in_norm(frt.depthwise_conv2d, (x, weight), {"padding": k // 2, "stride": stride},
                      grad_output=grad_output) for _ in range(2))
    for a, b in zip((y, *grads), (again, *grads_again), strict=True):
        assert_same_bits(a, b)


def check_epilogues(k, stride, device="cuda", size=(19, 21)):
    """A bias and an activation, and a residual as well."""
    x = images(2, 24, *size, dtype=F16, device=device)
    weight, bias = (torch.randn(shape, device=device).to(F16) for shape in ((24, 1, k, k), (24,)))
    options = {"padding": k // 2, "stride": stride}
    y, _ = check_in_norm(torch.no_grad()(frt.depthwise_conv2d), (x, weight, bias, "silu"), options,
                         torch.no_grad()(frt.depthwise_conv2d.reference))
    residual = torch.randn_like(y)

    def added(x, weight, bias, residual):
        with torch.no_grad():
            return frt.conv_activation(x, weight, bias, "silu", residual=residual, groups=24, **options)

    def expected(x, weight, bias, residual):
        return F.silu(F.conv2d(x, weight, bias, stride, k // 2, 1, 24)) + residual

    check_in_norm(added, (x, weight, bias, residual), {}, torch.no_grad()(expected))


def check_infinities_and_nan(stride, device="cuda", size=(19, 37)):
    """Those of pixels stay with the results that depend on them."""
    x = images(2, 16, *size, dtype=F16, device=device)
    weight = torch.randn(16, 1, 3, 3, device=device).to(F16)
    x[0, 3, 9, 9], x[1, 15, 0, 0], x[1, 15, -1, -1], x[1, 0, 3, -7] = (
        float(v) for v in ("nan", "inf", "-inf", "inf"))
    y = frt.depthwise_conv2d(x, weight, padding=1, stride=stride).cpu()
    expected = F.conv2d(x.cpu().float(), weight.cpu().float(), None, stride, 1, 1, 16).half()
    torch.testing.assert_close(y, expected, rtol=2e-3, atol=1e-2, equal_nan=True)
    assert not y.isfinite().all()


GEOMETRIES = [
    ((9, 11), 3, 1, 1, 1), ((5, 6), 3, 2, 1, 1), ((17, 8), (1, 5), 1, (0, 2), 1), ((6, 9), 5, 2, 2, 1),
    ((12, 10), 3, 1, 2, 2), ((7, 9), (2, 3), (1, 2), (1, 0), 1), ((3, 2), 5, 1, 2, 1), ((1, 4), 3, 2, 1, 1),
    ((30, 5), 2, 1, 0, 3)]
# Three numbers a channel and a residual.
LONG = Finish(normcdf(VALUE * channel(0) + channel(1) + RESIDUAL) * (VALUE + channel(2)),
              ("float16",) * 3, True)
