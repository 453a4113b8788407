"""Depthwise convolution of channels_last images and the gradients of its operands, as ops of torch's.

Each of the three is linear in two tensors, and its gradients are the other two: derivatives of any order are
there. A fourth finds both gradients at a time. On a CPU torch computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from fusionrt.laid import in_memory
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
        residual = in_memory(residual).to(x.dtype).contiguous(memory_format=torch.channels_last)
    x, weight, *channels = map(in_memory, (x, weight, *channels))
    return kernels.convolve(x, weight.contiguous(), geometry, finish, [c.contiguous() for c in channels],
                            residual)


def depthwise(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The convolution, with its gradients."""
    found: Tensor = _forward(x, weight, *map(list, geometry))
    return found


# -- the ops ---------------------------------------------------------------------------------------

def _geometry(stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> Geometry:
    return Geometry(*((n[0], n[1]) for n in (stride, padding, dilation)))


def _image(x: Tensor) -> Tensor:
    """With neighbouring channels."""
    return x if x.stride(1) == 1 else x.contiguous(memory_format=torch.channels_last)


def _run_forward(x: Tensor, weight: Tensor, *geometry: Sequence[int]) -> Tensor:
    if device_type(x) == "cpu":
        y = F.conv2d(x, weight, None, geometry[0], geometry[1], geometry[2], x.shape[1])
        return y.contiguous(memory_format=torch.channels_last)
    return kernels.convolve(_image(x), weight.contiguous(), _geometry(*geometry), PLAIN)


def _run_grad_input(grad_output: Tensor, weight: Tensor, input_size: Sequence[int], *geometry: Sequence[int]
                    ) -> Tensor:
    if device_type(grad_output) == "cpu":
        x = grad_output.new_empty((*grad_output.shape[:2], *input_size))
        found = _backward_on_cpu(grad_output, x, weight, geometry, [True, False, False])[0]
        return found.contiguous(memory_format=torch.channels_last)
    return kernels.grad_input(_image(grad_output), weight.contiguous(), _geometry(*geometry), input_size)


def _run_grad_weight(grad_output: Tensor, x: Tensor, kernel_size: Sequence[int], *geometry: Sequence[int]
                     ) -> Tensor:
    if device_type(x) == "cpu":
        weight = x.new_empty((x.shape[1], 1, *kernel_size))
        return _backward_on_cpu(grad_output, x, weight, geometry, [False, True, False])[1]
    return kernels.grad_weight(_image(grad_output), _image(x), _geometry(*geometry), kernel_size)


def _run_backward(grad_output: Tensor, x: Tensor, weight: Tensor, *geometry: Sequence[int]
                  ) -> tuple[Tensor, Tensor]:
    if device_type(x) == "cpu":
        return (_run_grad_input(grad_output, weight, x.shape[2:], *geometry),
                _run_grad_weight(grad_output, x, weight.shape[2:], *geometry))
    return kernels.backward(_image(grad_output), _image(x), weight.contiguous(), _geometry(*geometry))


def _backward_on_cpu(grad_output: Tensor, x: Tensor, weight: Tensor, geometry: Sequence[Sequence[int]],
                     output_mask: list[bool]) -> Sequence[Tensor]:
    found: Sequence[Tensor] = torch.ops.aten.convolution_backward(
        grad_output, x, weight, None, *geometry, False, [0, 0], x.shape[1], output_mask)
    return found


def _fake_forward(x: Tensor, weight: Tensor, *geometry: Sequence[int]) -> Tensor:
    return kernels.image_like(x, _geometry(*geometry).output_size(x.shape[2:], weight.shape[2:]))


def _grads_of_forward(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any], needed: Sequence[bool]
                      ) -> Sequence[Any]:
    (x, weight), geometry, grad = saved, args[2:], grads[0]
    if needed[0] and needed[1]:
        return *_backward(grad, x, weight, *geometry), *[None] * 3
    return (_grad_input(grad, weight, x.shape[2:], *geometry) if needed[0] else None,
            _grad_weight(grad, x, weight.shape[2:], *geometry) if needed[1] else None, *[None] * 3)


def _grads_of_grad_input(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any],
                         needed: Sequence[bool]) -> Sequence[Any]:
    (grad_output, weight), geometry, grad = saved, args[3:], grads[0]
    return (_forward(grad, weight, *geometry) if needed[0] else None,
            _grad_weight(grad_output, grad, weight.shape[2:], *geometry) if needed[1] else None, *[None] * 4)


def _grads_of_grad_weight(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any],
                          needed: Sequence[bool]) -> Sequence[Any]:
    (grad_output, x), geometry, grad = saved, args[3:], grads[0]
    return (_forward(x, grad, *geometry) if needed[0] else None,
            _grad_input(grad_output, grad, x.shape[2:], *geometry) if needed[1] else None, *[None] * 4)


def _grads_of_backward(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any],
                       needed: Sequence[bool]) -> Sequence[Any]:
    """The sum of what the gradients of either give."""
    grad_output, x, weight = saved
    found: list[Tensor | None] = [None] * 3
    if grads[0] is not None:
        found[0], found[2], *_ = _grads_of_grad_input(
            (grad_output, weight), args, grads[:1], (needed[0], needed[2]))
    if grads[1] is not None:
        of_grad, found[1], *_ = _grads_of_grad_weight((grad_output, x), args, grads[1:], needed[:2])
        found[0] = of_grad if found[0] is None or of_grad is None else found[0] + of_grad
    return *found, *[None] * 3


_OPTIONS = "int[2] stride, int[2] padding, int[2] dilation"
_forward = StructuredOp(f"depthwise_conv2d_forward(Tensor x, Tensor weight, {_OPTIONS}) -> Tensor",
                        _run_forward, _fake_forward, Gradient(lambda args, out: args[:2], _grads_of_forward))
_grad_input = StructuredOp(
    "depthwise_conv2d_grad_input(Tensor grad_output, Tensor weight, SymInt[] input_size, "
    f"{_OPTIONS}) -> Tensor",
    _run_grad_input, lambda grad_output, weight, size, *geometry: kernels.image_like(grad_output, size),
    Gradient(lambda args, out: args[:2], _grads_of_grad_input))
_grad_weight = StructuredOp(
    f"depthwise_conv2d_grad_weight(Tensor grad_output, Tensor x, SymInt[] kernel_size, {_OPTIONS}) -> Tensor",
    _run_grad_weight, lambda grad_output, x, size, *geometry: x.new_empty((x.shape[1], 1, *size)),
    Gradient(lambda args, out: args[:2], _grads_of_grad_weight))
_backward = StructuredOp(
    f"depthwise_conv2d_backward(Tensor grad_output, Tensor x, Tensor weight, {_OPTIONS}) -> (Tensor, Tensor)",
    _run_backward,
    lambda grad_output, x, weight, *geometry: (
        kernels.image_like(grad_output, x.shape[2:]), weight.new_empty(weight.shape)),
    Gradient(lambda args, out: args[:3], _grads_of_backward))
