"""What tests of depthwise convolutions share: images with neighbouring channels, and how kernels count."""

import numpy as np
import torch
from checking import F32, F64
from torch.nn import functional as F

from fusionrt.ops.depthwise_forms import Geometry


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
    result = geometry.result(size, kernel)
    torch.testing.assert_close(of_last(convolved(source, taps, result, geometry, False)), y.detach())
    found = weighed(source, up, kernel, geometry)
    torch.testing.assert_close(torch.from_numpy(found).movedim(-1, 0)[:, None], of_weight)
    if geometry.stride == (1, 1):
        moved = [d * (k - 1) - p for k, p, d in zip(kernel, geometry.padding, geometry.dilation, strict=True)]
        geometry, taps = geometry._replace(padding=tuple(moved)), taps[::-1, ::-1]
    found = convolved(up, taps, size, geometry, geometry.stride != (1, 1))
    torch.testing.assert_close(of_last(found), of_x)


GEOMETRIES = [
    ((9, 11), 3, 1, 1, 1), ((5, 6), 3, 2, 1, 1), ((17, 8), (1, 5), 1, (0, 2), 1), ((6, 9), 5, 2, 2, 1),
    ((12, 10), 3, 1, 2, 2), ((7, 9), (2, 3), (1, 2), (1, 0), 1), ((3, 2), 5, 1, 2, 1), ((1, 4), 3, 2, 1, 1),
    ((30, 5), 2, 1, 0, 3)]
