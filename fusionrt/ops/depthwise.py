"""Depthwise convolution of channels_last images and the gradients of its operands, as ops of torch's.

Each of the three is linear in two tensors, and its gradients are the other two: derivatives of any order are
there. A fourth finds both gradients at a time. On a CPU torch computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from fusionrt.ops import depthwise_kernels as kernels
from fusionrt.ops.depthwise_forms import PLAIN, Finish, Geometry
from fusionrt.rehearsal import device_type
from fusionrt.structured import Gradient, StructuredOp

Tensor = torch.Tensor


def serves(x: Tensor, weight: Tensor, geometry: Geometry, groups: int) -> bool:
    """Whether the kernels of this module compute the convolution: of images with neighbouring channels, on a
    GPU, a kernel for each; what ours do not have (strides above 2, a stride with a dilation, very large
    kernels) is torch's."""
    if x.dim() != 4 or weight.dim() != 4 or device_type(x) != "cuda" or 0 in x.shape[2:]:
        return False
    channels, taps = x.shape[1], weight.shape[2] * weight.shape[3]
    return (groups == channels == weight.shape[0] and channels > 1 and weight.shape[1] == 1
            and x.dtype.is_floating_point and x.stride(1) == 1 and not x.is_contiguous()
            and taps <= (kernels.MOST_DOUBLE_TAPS if x.dtype == torch.float64 else kernels.MOST_TAPS)
            and (1, 1) in (geometry.stride, geometry.dilation)
            and all(s in kernels.STRIDES and 0 <= p <= d * (k - 1)
                    for k, s, p, d in zip(weight.shape[2:], *geometry, strict=True)))


def finished(x: Tensor, weight: Tensor, geometry: Geometry, finish: Finish, channels: Sequence[Tensor],
             residual: Tensor | None) -> Tensor:
    """The convolution with its epilogue, in one kernel; without a gradient."""
    if residual is not None:
        residual = residual.to(x.dtype).contiguous(memory_format=torch.channels_last)
    return kernels.convolve(x, weight.contiguous(), geometry, finish, [c.contiguous() for c in channels],
                            residual)


def depthwise(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The convolution, with its gradients."""
    found: Tensor = _result(x, weight, *map(list, geometry))
    return found


# -- the ops ---------------------------------------------------------------------------------------

def _geometry(stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> Geometry:
    return Geometry(*((n[0], n[1]) for n in (stride, padding, dilation)))


def _image(x: Tensor) -> Tensor:
    """With neighbouring channels."""
    return x if x.stride(1) == 1 else x.contiguous(memory_format=torch.channels_last)


def _run_result(x: Tensor, weight: Tensor, *geometry: Sequence[int]) -> Tensor:
    if device_type(x) == "cpu":
        y = F.conv2d(x, weight, None, geometry[0], geometry[1], geometry[2], x.shape[1])
        return y.contiguous(memory_format=torch.channels_last)
    return kernels.convolve(_image(x), weight.contiguous(), _geometry(*geometry), PLAIN)


def _run_of_source(grad: Tensor, weight: Tensor, size: Sequence[int], *geometry: Sequence[int]) -> Tensor:
    if device_type(grad) == "cpu":
        x = grad.new_empty((*grad.shape[:2], *size))
        return _gradient_on_cpu(grad, x, weight, geometry, 0).contiguous(memory_format=torch.channels_last)
    return kernels.source_gradient(_image(grad), weight.contiguous(), _geometry(*geometry), size)


def _run_of_weight(grad: Tensor, x: Tensor, kernel: Sequence[int], *geometry: Sequence[int]) -> Tensor:
    if device_type(x) == "cpu":
        return _gradient_on_cpu(grad, x, x.new_empty((x.shape[1], 1, *kernel)), geometry, 1)
    return kernels.weight_gradient(_image(grad), _image(x), _geometry(*geometry), kernel)


def _run_of_both(grad: Tensor, x: Tensor, weight: Tensor, *geometry: Sequence[int]) -> tuple[Tensor, Tensor]:
    if device_type(x) == "cpu":
        return (_run_of_source(grad, weight, x.shape[2:], *geometry),
                _run_of_weight(grad, x, weight.shape[2:], *geometry))
    return kernels.gradients(_image(grad), _image(x), weight.contiguous(), _geometry(*geometry))


def _gradient_on_cpu(grad: Tensor, x: Tensor, weight: Tensor, geometry: Sequence[Sequence[int]], which: int
                     ) -> Tensor:
    wanted = [which == 0, which == 1, False]
    found = torch.ops.aten.convolution_backward(grad, x, weight, None, *geometry, False, [0, 0], x.shape[1],
                                                wanted)
    made: Tensor = found[which]
    return made


def _fake_result(x: Tensor, weight: Tensor, *geometry: Sequence[int]) -> Tensor:
    return kernels.image_like(x, _geometry(*geometry).result(x.shape[2:], weight.shape[2:]))


def _of_result(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any], needed: Sequence[bool]
               ) -> Sequence[Any]:
    (x, weight), geometry, grad = saved, args[2:], grads[0]
    if needed[0] and needed[1]:
        return *_of_both(grad, x, weight, *geometry), *[None] * 3
    return (_of_source(grad, weight, x.shape[2:], *geometry) if needed[0] else None,
            _of_weight(grad, x, weight.shape[2:], *geometry) if needed[1] else None, *[None] * 3)


def _of_of_source(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any], needed: Sequence[bool]
                  ) -> Sequence[Any]:
    (grad, weight), geometry, seed = saved, args[3:], grads[0]
    return (_result(seed, weight, *geometry) if needed[0] else None,
            _of_weight(grad, seed, weight.shape[2:], *geometry) if needed[1] else None, *[None] * 4)


def _of_of_weight(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any], needed: Sequence[bool]
                  ) -> Sequence[Any]:
    (grad, x), geometry, seed = saved, args[3:], grads[0]
    return (_result(x, seed, *geometry) if needed[0] else None,
            _of_source(grad, seed, x.shape[2:], *geometry) if needed[1] else None, *[None] * 4)


def _of_of_both(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any], needed: Sequence[bool]
                ) -> Sequence[Any]:
    """The sum of what the gradients of either give."""
    grad, x, weight = saved
    found: list[Tensor | None] = [None] * 3
    if grads[0] is not None:
        found[0], found[2], *_ = _of_of_source((grad, weight), args, grads[:1], (needed[0], needed[2]))
    if grads[1] is not None:
        of_grad, found[1], *_ = _of_of_weight((grad, x), args, grads[1:], needed[:2])
        found[0] = of_grad if found[0] is None or of_grad is None else found[0] + of_grad
    return *found, *[None] * 3


_OPTIONS = "int[2] stride, int[2] padding, int[2] dilation"
_result = StructuredOp(f"depthwise_conv2d_result(Tensor x, Tensor weight, {_OPTIONS}) -> Tensor", _run_result,
                       _fake_result, Gradient(lambda args, out: args[:2], _of_result))
_of_source = StructuredOp(
    f"depthwise_conv2d_of_source(Tensor grad, Tensor weight, SymInt[] size, {_OPTIONS}) -> Tensor",
    _run_of_source, lambda grad, weight, size, *geometry: kernels.image_like(grad, size),
    Gradient(lambda args, out: args[:2], _of_of_source))
_of_weight = StructuredOp(
    f"depthwise_conv2d_of_weight(Tensor grad, Tensor x, SymInt[] kernel, {_OPTIONS}) -> Tensor",
    _run_of_weight, lambda grad, x, kernel, *geometry: x.new_empty((x.shape[1], 1, *kernel)),
    Gradient(lambda args, out: args[:2], _of_of_weight))
_of_both = StructuredOp(
    f"depthwise_conv2d_of_both(Tensor grad, Tensor x, Tensor weight, {_OPTIONS}) -> (Tensor, Tensor)",
    _run_of_both,
    lambda grad, x, weight, *geometry: (
        kernels.image_like(grad, x.shape[2:]), weight.new_empty(weight.shape)),
    Gradient(lambda args, out: args[:3], _of_of_both))
