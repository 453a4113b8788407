"""Depthwise convolutions and their gradients on a GPU. What is launched is decided once a kind of call."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from fusionrt.ops import depthwise_mma, depthwise_mma_weights, depthwise_strips
from fusionrt.ops.depthwise_forms import (
    PLAIN,
    Finish,
    Form,
    Geometry,
    Images,
    Launch,
    Pair,
    alignment,
    arithmetic,
    dense_steps,
    line_of,
    steps,
)
from fusionrt.runtime import accumulators
from fusionrt.runtime.kernel import Kernel

Tensor = torch.Tensor
STRIDES = (1, 2)
MOST_TAPS, MOST_DOUBLE_TAPS = 121, 49  # of a kernel whose taps are written out, by the registers there are
# Elements of both images from which on matrix units are the faster way, by taps: their blocks take longer to
# begin, but their work hardly grows with the taps. At (32, 96, 112, 112) 67, 69 and 78 us for 3 x 3, 5 x 5
# and 7 x 7, the other kernels 58, 76, 166; at (32, 576, 14, 14) 12, 14 and 20, the others 9, 13, 20. Of the
# weights' gradient 52, 65 and 69, the others 60, 105, 170; at (32, 576, 14, 14) 11, 16 and 18, the others 11,
# 20 and 35. With a stride the others have less to do: for 3 x 3, and for 5 x 5 in the source's gradient.
LEAST_OF_RESULTS, LEAST_OF_SOURCE = {25: 32 << 20, 49: 4 << 20}, {49: 4 << 20}
LEAST_OF_WEIGHTS, LEAST_OF_STRIDED_WEIGHTS = {9: 32 << 20, 25: 6 << 20}, {25: 6 << 20}


class Call(NamedTuple):
    """What decides about a launch: the shape of the image that is read first, strides of all that are read;
    `has_units` is None where it is rehearsed for any GPU."""

    shape: Sequence[int]
    strides: tuple[Sequence[int], ...]
    kernel: Sequence[int]
    dtype: torch.dtype
    alignment: int
    has_units: bool | None


class Plan(NamedTuple):
    size: Pair                    # of the result
    launches: tuple[Launch, ...]  # one of them is enough


def _call(images: Sequence[Tensor], kernel: Sequence[int], *others: Tensor | None) -> Call:
    x = images[0]
    return Call(x.shape, tuple(t.stride() for t in images), kernel, x.dtype, alignment(*images, *others),
                None if x.is_meta else _has_units(x.device))


@functools.cache
def _has_units(device: torch.device) -> bool:
    """Whether there are matrix units for what we do with them."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _form(call: Call, geometry: Geometry) -> Form:
    kernel = call.kernel[0], call.kernel[1]
    return Form(str(call.dtype).removeprefix("torch."), kernel, geometry.stride, 1, 0)


def _image(like: Tensor, size: Pair) -> Tensor:
    return torch.empty((*like.shape[:2], *size), dtype=like.dtype, device=like.device,
                       memory_format=torch.channels_last)


def _images(call: Call, size: Pair) -> Images:
    """That of the call and a dense one."""
    batch, channels = call.shape[:2]
    return Images(str(call.dtype).removeprefix("torch."), batch, channels,
                  (steps(call.strides[0]), dense_steps(channels, size)), call.alignment)


# -- convolution, and the gradient of its source -----------------------------------------------------

def convolve(x: Tensor, weight: Tensor, geometry: Geometry, finish: Finish = PLAIN,
             channels: Sequence[Tensor] = (), residual: Tensor | None = None) -> Tensor:
    """The result, finished; `residual` has its shape and layout."""
    plan = _convolution(_call((x,), weight.shape[2:], residual), geometry, finish)
    out = _image(x, plan.size)
    for launch in plan.launches:
        launch(x.device, x, weight, out, residual, *channels)
    return out


@functools.lru_cache(4096)
def _convolution(call: Call, geometry: Geometry, finish: Finish) -> Plan:
    size = geometry.result(call.shape[2:], call.kernel)
    return Plan(size, _launches(call, _form(call, geometry), geometry, size, finish))


def source_gradient(grad: Tensor, weight: Tensor, geometry: Geometry, size: Sequence[int]) -> Tensor:
    """That of an x of `size` rows and columns, of the result's."""
    plan = _of_source(_call((grad,), weight.shape[2:]), geometry, (size[0], size[1]))
    out = _image(grad, plan.size)
    if not grad.numel():
        return out.zero_()
    for launch in plan.launches:
        launch(grad.device, grad, weight, out, None)
    return out


@functools.lru_cache(4096)
def _of_source(call: Call, geometry: Geometry, size: Pair) -> Plan:
    strided = geometry.stride != (1, 1)
    if not strided:
        top, left = (d * (k - 1) - p for k, p, d in zip(call.kernel, *geometry[1:], strict=True))
        geometry = geometry._replace(padding=(top, left))
    form = _form(call, geometry)._replace(transposed=strided, flipped=not strided)
    return Plan(size, _launches(call, form, geometry, size, PLAIN))


def _launches(call: Call, form: Form, geometry: Geometry, size: Pair, finish: Finish) -> tuple[Launch, ...]:
    if not min(*call.shape, *size):
        return ()
    rows, columns = (line_of(n, m, k, s, p, d, form.transposed) for n, m, k, s, p, d in zip(
        call.shape[2:], size, form.kernel, *geometry, strict=True))
    images, found = _images(call, size), []
    least = LEAST_OF_SOURCE if form.transposed else LEAST_OF_RESULTS
    if _by_units(call, size, least) and depthwise_mma.serves(form, images):
        found.append(depthwise_mma.convolution(form, images, rows, columns, finish))
    if not found or call.has_units is None:
        found.append(depthwise_strips.convolution(form, images, rows, columns, finish))
    return tuple(found)


def _by_units(call: Call, size: Sequence[int], least: Mapping[int, int]) -> bool:
    """Whether matrix units, if there are any, are to do it; a rehearsal is for images of any size."""
    elements = math.prod(call.shape) + math.prod((*call.shape[:2], *size))
    found = [n for taps, n in least.items() if math.prod(call.kernel) >= taps]
    return bool(found) and (call.has_units is None or (call.has_units and elements >= min(found)))


# -- the gradient of the weights ---------------------------------------------------------------------

class Sums(NamedTuple):
    """A launch that makes rows of partial sums, how many, and the one that adds them."""

    partial: Launch
    groups: int
    total: Launch


def weight_gradient(grad: Tensor, x: Tensor, geometry: Geometry, kernel: Sequence[int]) -> Tensor:
    out = torch.empty((x.shape[1], 1, *kernel), dtype=x.dtype, device=x.device)
    if not grad.numel() or not out.numel():
        return out.zero_()
    for sums in _of_weight(_call((x, grad), tuple(kernel)), geometry, grad.shape[2:]):
        acc = torch.promote_types(x.dtype, torch.float32)
        partials = torch.empty(sums.groups * out.numel(), dtype=acc, device=x.device)
        sums.partial(x.device, x, grad, partials)
        sums.total(x.device, partials, out, *(None,) * (accumulators.SUMS - 1))
    return out


@functools.lru_cache(4096)
def _of_weight(call: Call, geometry: Geometry, size: Sequence[int]) -> tuple[Sums, ...]:
    rows, columns = (line_of(n, m, k, s, p, d, False) for n, m, k, s, p, d in zip(
        call.shape[2:], size, call.kernel, *geometry, strict=True))
    form, found = _form(call, geometry), []
    images = _images(call, (1, 1))._replace(steps=(steps(call.strides[0]), steps(call.strides[1])))
    kept = call.shape[1] * call.kernel[0] * call.kernel[1]
    least = LEAST_OF_WEIGHTS if geometry.stride == (1, 1) else LEAST_OF_STRIDED_WEIGHTS
    if _by_units(call, size, least) and depthwise_mma_weights.serves(form, images):
        found.append(depthwise_mma_weights.weight_sums(form, images, rows, columns))
    if not found or call.has_units is None:
        found.append(depthwise_strips.weight_sums(form, images, rows, columns))
    return tuple(Sums(launch, groups, Launch(
        adding(form.dtype), accumulators.blocks(kept, groups),
        (groups, kept, accumulators.side(kept, groups)))) for launch, groups in found)


@functools.cache
def adding(dtype: str) -> Kernel:
    return Kernel("depthwise_conv2d_backward", "sum_partials", accumulators.sum_fields("acc_t", "out_t"),
                  ["using index_t = unsigned long long;", f"using out_t = {dtype}_t;"],
                  block=accumulators.BLOCK, **arithmetic(dtype))
