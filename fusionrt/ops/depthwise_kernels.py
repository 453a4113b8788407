"""Depthwise convolutions and their gradients on a GPU. What is launched is decided once a kind of call."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

import torch

from fusionrt.dtypes import name_of
from fusionrt.laid import address
from fusionrt.ops import (
    depthwise_images,
    depthwise_mma,
    depthwise_mma_weights,
    depthwise_strips,
    depthwise_tiles,
)
from fusionrt.ops.depthwise_forms import (
    PLAIN,
    Finish,
    Form,
    Geometry,
    Images,
    Line,
    Pair,
    alignment,
    dense_strides,
    line_of,
    strides_of,
)
from fusionrt.runtime.kernel import Launch
from fusionrt.runtime.partial_sums import add_up

Tensor = torch.Tensor
STRIDES = (1, 2)
MOST_TAPS, MOST_DOUBLE_TAPS = 121, 49  # of a kernel whose taps are written out, by the registers there are
# Elements of both images from which on kernels of matrix units, or those whose rows come by way of shared
# memory, are the faster way, by the least number of taps: their blocks take longer to begin.
UNITS_OF_RESULTS, UNITS_OF_STRIDED = {25: 8 << 20, 49: 4 << 20}, {49: 4 << 20}
UNITS_OF_WEIGHTS, UNITS_OF_STRIDED_WEIGHTS = {25: 6 << 20}, {49: 6 << 20}
TILES_OF_RESULTS, TILES_OF_STRIDED = {1: 8 << 20}, {1: 4 << 20, 25: 8 << 20}
TILES_OF_WEIGHTS, TILES_OF_BOTH = {1: 4 << 20}, {1: 4 << 20}


class Kind(NamedTuple):
    """What decides about a launch: the shape of the image that is read first, strides of all that are read;
    `has_units` is None where it is rehearsed for any GPU."""

    shape: Sequence[int]
    strides: tuple[Sequence[int], ...]
    kernel: Sequence[int]
    dtype: torch.dtype
    alignment: int
    has_units: bool | None


class Plan(NamedTuple):
    size: Pair                    # of the image that is written
    launches: tuple[Launch, ...]  # one of them is enough


def _kind_of(images: Sequence[Tensor], kernel: Sequence[int], *others: Tensor | None) -> Kind:
    x = images[0]
    return Kind(x.shape, tuple(t.stride() for t in images), kernel, x.dtype, alignment(*images, *others),
                None if x.is_meta else _has_units(x.device))


@functools.cache
def _has_units(device: torch.device) -> bool:
    """Whether there are matrix units for what we do with them."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _form(kind: Kind, geometry: Geometry) -> Form:
    kernel = kind.kernel[0], kind.kernel[1]
    return Form(name_of(kind.dtype), kernel, geometry.stride, 1, 0)


def image_like(like: Tensor, size: Sequence[int]) -> Tensor:
    return torch.empty((*like.shape[:2], *size), dtype=like.dtype, device=like.device,
                       memory_format=torch.channels_last)


def _images(kind: Kind, size: Pair) -> Images:
    """That of the call and a dense one."""
    batch, channels = kind.shape[:2]
    return Images(name_of(kind.dtype), batch, channels, strides_of(kind.strides[0]),
                  dense_strides(channels, size), kind.alignment)


# -- convolution, and the gradient of its input ------------------------------------------------------

def convolve(x: Tensor, weight: Tensor, geometry: Geometry, finish: Finish = PLAIN,
             channels: Sequence[Tensor] = (), residual: Tensor | None = None) -> Tensor:
    """The result, finished; `residual` has its shape and layout."""
    plan = _planned_forward(_kind_of((x,), weight.shape[2:], residual), geometry, finish)
    out = image_like(x, plan.size)
    for launch in plan.launches:
        launch(x.device, *map(address, (x, weight, out, residual, *channels)))
    return out


@functools.lru_cache(4096)
def _planned_forward(kind: Kind, geometry: Geometry, finish: Finish) -> Plan:
    size = geometry.output_size(kind.shape[2:], kind.kernel)
    return Plan(size, _launches(kind, _form(kind, geometry), geometry, size, finish))


def grad_input(grad_output: Tensor, weight: Tensor, geometry: Geometry, input_size: Sequence[int]) -> Tensor:
    kind = _kind_of((grad_output,), weight.shape[2:])
    plan = _planned_grad_input(kind, geometry, (input_size[0], input_size[1]))
    out = image_like(grad_output, plan.size)
    if not grad_output.numel():
        return out.zero_()
    for launch in plan.launches:
        launch(grad_output.device, *map(address, (grad_output, weight, out, None)))
    return out


@functools.lru_cache(4096)
def _planned_grad_input(kind: Kind, geometry: Geometry, size: Pair) -> Plan:
    strided = geometry.stride != (1, 1)
    form = _form(kind, geometry)._replace(transposed=strided, flipped=not strided)
    return Plan(size, _launches(kind, form, geometry if strided else _flipped(kind, geometry), size, PLAIN))


def _flipped(kind: Kind, geometry: Geometry) -> Geometry:
    """Of the convolution that the gradient of the input is, where there is no stride."""
    top, left = (d * (k - 1) - p for k, p, d in zip(kind.kernel, *geometry[1:], strict=True))
    return geometry._replace(padding=(top, left))


def _launches(kind: Kind, form: Form, geometry: Geometry, size: Pair, finish: Finish) -> tuple[Launch, ...]:
    if not min(*kind.shape, *size):
        return ()
    rows, columns = _lines(kind, form, geometry, size)
    images = _images(kind, size)
    plain = form.stride == (1, 1)
    by_units, by_tiles = (UNITS_OF_RESULTS if plain else UNITS_OF_STRIDED,
                          TILES_OF_RESULTS if plain else TILES_OF_STRIDED)
    return tuple(way.convolution(form, images, rows, columns, finish) for way in _ways(
        kind, form, images, (rows, columns), size, (depthwise_mma, by_units), (depthwise_tiles, by_tiles)))


def _lines(kind: Kind, form: Form, geometry: Geometry, size: Sequence[int]) -> tuple[Line, Line]:
    rows, columns = (line_of(n, m, k, s, p, d, form.transposed) for n, m, k, s, p, d in zip(
        kind.shape[2:], size, form.kernel, *geometry, strict=True))
    return rows, columns


def _ways(kind: Kind, form: Form, images: Images, lines: tuple[Line, Line], size: Sequence[int],
          *larger: tuple[ModuleType, Mapping[int, float]], sums: bool = False) -> list[ModuleType]:
    """Whose kernels do it: those for few columns, the first of the larger ones that serves images of this
    size (the least number of elements, by taps, is beside it), or the strips'. A rehearsal is for any number
    of images, and takes all. `sums`: of the gradient of the weights."""
    found = [way for way, least in larger if _large(kind, size, least) and way.serves(form, images)]
    if kind.has_units is not False and depthwise_images.serves(form, images, *lines):
        first = _elements(kind, size) <= depthwise_images.most_elements(form, lines[0], sums)
        found.insert(0 if first else len(found), depthwise_images)
    found.append(depthwise_strips)
    return found if kind.has_units is None else found[:1]


def _elements(kind: Kind, size: Sequence[int]) -> int:
    """Of both images."""
    return math.prod(kind.shape) + math.prod((*kind.shape[:2], *size))


def _large(kind: Kind, size: Sequence[int], least: Mapping[int, float]) -> bool:
    steps = [taps for taps in least if taps <= math.prod(kind.kernel)]
    enough = least[max(steps)] if steps else math.inf
    return enough < math.inf if kind.has_units is None else kind.has_units and _elements(kind, size) >= enough


# -- the gradient of the weights ---------------------------------------------------------------------

class Sums(NamedTuple):
    """A launch that makes rows of partial sums, and how many."""

    partial: Launch
    groups: int

    def __call__(self, out: Tensor, *operands: Tensor | None) -> None:
        acc = torch.promote_types(out.dtype, torch.float32)
        partials = torch.empty((self.groups, out.numel()), dtype=acc, device=out.device)
        self.partial(out.device, *map(address, (*operands, partials)))
        add_up("depthwise_conv2d_backward", partials, out)


def grad_weight(grad_output: Tensor, x: Tensor, geometry: Geometry, kernel_size: Sequence[int]) -> Tensor:
    out = torch.empty((x.shape[1], 1, *kernel_size), dtype=x.dtype, device=x.device)
    if not grad_output.numel() or not out.numel():
        return out.zero_()
    kind = _kind_of((x, grad_output), tuple(kernel_size))
    for sums in _planned_grad_weight(kind, geometry, grad_output.shape[2:]):
        sums(out, x, grad_output)
    return out


@functools.lru_cache(4096)
def _planned_grad_weight(kind: Kind, geometry: Geometry, size: Sequence[int]) -> tuple[Sums, ...]:
    form = _form(kind, geometry)
    rows, columns = _lines(kind, form, geometry, size)
    images = _images(kind, (1, 1))._replace(result=strides_of(kind.strides[1]))
    by_units = UNITS_OF_WEIGHTS if geometry.stride == (1, 1) else UNITS_OF_STRIDED_WEIGHTS
    # Of a dilation each residue would be a row of partial sums.
    by_tiles = TILES_OF_WEIGHTS if geometry.dilation == (1, 1) else {}
    larger = (depthwise_mma_weights, by_units), (depthwise_tiles, by_tiles)
    found = [way.grad_weight(form, images, rows, columns)
             for way in _ways(kind, form, images, (rows, columns), size, *larger, sums=True)]
    return tuple(Sums(*launched) for launched in found)


# -- both gradients ----------------------------------------------------------------------------------

def backward(grad_output: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Gradients of input and weight: in one pass where that is the faster way."""
    size = x.shape[2], x.shape[3]
    found = _planned_backward(_kind_of((grad_output, x), weight.shape[2:], weight), geometry, size)
    if found is None or x.is_meta:
        alone = (grad_input(grad_output, weight, geometry, size),
                 grad_weight(grad_output, x, geometry, weight.shape[2:]))
    if found is None:
        return alone
    of_input, of_weight = image_like(grad_output, size), weight.new_empty(weight.shape)
    found(of_weight, grad_output, weight, x, None, of_input)
    return of_input, of_weight


@functools.lru_cache(4096)
def _planned_backward(kind: Kind, geometry: Geometry, size: Pair) -> Sums | None:
    form, images = _form(kind, geometry)._replace(flipped=True), _images(kind, size)
    of_x = images._replace(source=strides_of(kind.strides[1]))
    if not (min(*kind.shape, *size) and geometry.dilation == (1, 1) and _large(kind, size, TILES_OF_BOTH)
            and all(depthwise_tiles.serves_both(form, each) for each in (images, of_x))):
        return None
    rows, columns = _lines(kind, form, _flipped(kind, geometry), size)
    return Sums(*depthwise_tiles.backward(form, images, rows, columns, of_x.source))
