"""max_pool2d of images in channels_last memory, and its gradient.

torch's kernel writes where each largest value was as eight bytes an element, and keeps the images for the
backward pass as well; inference has no use for either. Here a gradient keeps one byte: the place in the
window.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from fusionrt.dtypes import SIGNIFICANT_BITS, STORAGE
from fusionrt.laid import address
from fusionrt.rehearsal import device_type
from fusionrt.runtime.kernel import Kernel
from fusionrt.runtime.source import ITEMSIZE, definitions, members, pointer
from fusionrt.watching import is_watched

Tensor = torch.Tensor
Pair = tuple[int, int]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
VECTOR, BLOCK, MOST = 16, 128, 1 << 31


class Window(NamedTuple):
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    def results(self, height: int, width: int) -> list[int]:
        return [(size + 2 * p - d * (k - 1) - 1) // s + 1
                for size, k, s, p, d in zip((height, width), *self, strict=True)]


def max_pool(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """F.max_pool2d(x, kernel, stride, padding, dilation) of x, (N, C, H, W)."""
    window = Window(kernel, stride, padding, dilation)
    if is_watched() or not _fits(x):
        return F.max_pool2d(x, *window)
    if x.requires_grad and torch.is_grad_enabled():
        found: Tensor = _Pooled.apply(x, window)
        return found
    return _found(x, window)[0]


def _fits(x: Tensor) -> bool:
    return (device_type(x) == "cuda" and x.dtype in DTYPES and x.shape[1] % (VECTOR // x.itemsize) == 0
            and 0 < x.numel() < MOST and x.is_contiguous(memory_format=torch.channels_last)
            and not x.data_ptr() % VECTOR)


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window) -> Tensor:
        out, places = _found(x, window, kept=True)
        ctx.save_for_backward(places)
        ctx.window, ctx.shape = window, x.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        places, = ctx.saved_tensors
        if torch.is_grad_enabled():  # it is differentiated itself
            like = grad.new_zeros(1).expand(ctx.shape)  # asked for its shape
            return torch.ops.aten.max_pool2d_with_indices_backward(
                grad, like, *ctx.window, False, _indices(places, ctx.window, ctx.shape)), None
        grad = grad.contiguous(memory_format=torch.channels_last)
        if grad.data_ptr() % VECTOR:
            grad = grad.clone()
        out = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device,
                          memory_format=torch.channels_last)
        _launch(_BACKWARD, out, ctx.window, [grad, places, out], x=out, out=grad)
        return out, None


def _found(x: Tensor, window: Window, kept: bool = False) -> tuple[Tensor, Tensor | None]:
    """The result and, where they are `kept`, the places."""
    shape = *x.shape[:2], *window.results(*x.shape[2:])
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    places = torch.empty_like(out, dtype=torch.uint8) if kept else None
    _launch(_FORWARD, out, window, [x, out, places], x, out)
    return out, places


class Template(NamedTuple):
    """A kernel of tensors, the last ones of which it writes to."""

    stem: str
    tensors: tuple[str, ...]
    written: int


_FORWARD = Template("max_pool", ("x", "out", "places"), 2)
_BACKWARD = Template("max_pool_backward", ("grad", "places", "out"), 1)


def _launch(which: Template, walked: Tensor, window: Window, tensors: Sequence[Tensor | None], x: Tensor,
            out: Tensor) -> None:
    """A thread for each 16 bytes of `walked`; x and out: images of the sizes of these."""
    pack = VECTOR // walked.itemsize
    vectors = walked.numel() // pack
    kernel = _kernel(which, STORAGE[walked.dtype], window, tensors[-1] is not None)
    kernel(walked.device, -(-vectors // BLOCK), *map(address, tensors), *kernel.planned(
        vectors=vectors, packs=walked.shape[1] // pack, height=x.shape[2], width=x.shape[3],
        out_height=out.shape[2], out_width=out.shape[3]))


@functools.cache
def _kernel(which: Template, dtype: str, window: Window, places: bool) -> Kernel:
    read = len(which.tensors) - which.written
    fields = [*(pointer("unsigned char" if name == "places" else "value_t", name, const=k < read)
                for k, name in enumerate(which.tensors)),
              *members("unsigned", "vectors", "packs"),
              *members("int", "height", "width", "out_height", "out_width")]
    sizes = zip(("KERNEL", "STRIDE", "PAD", "DILATION"), window, strict=True)
    constants = definitions(
        value_t=f"{dtype}_t", PACK=VECTOR // ITEMSIZE[dtype], PLACES=places,
        **{f"{name}_{side}": n for name, pair in sizes for side, n in zip("HW", pair, strict=True)})
    return Kernel("max_pool", which.stem, fields, constants, significant_bits=SIGNIFICANT_BITS[dtype],
                  block=BLOCK)


def _indices(places: Tensor, window: Window, shape: Sequence[int]) -> Tensor:
    """As torch has them: of an image's pixels, one after the other."""
    k = places.long()
    rows, columns = (torch.arange(n, device=k.device) * s - p
                     for n, s, p in zip(places.shape[2:], window.stride, window.padding, strict=True))
    width = window.kernel[1]
    row = rows[:, None] + k.div(width, rounding_mode="floor") * window.dilation[0]
    return (row * shape[3] + columns + k % width * window.dilation[1]).contiguous()
