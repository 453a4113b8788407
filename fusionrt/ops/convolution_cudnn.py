"""Inference of relu(norm(convolution) + residual) by cuDNN's one kernel, where it has one for that.

The kernels are those of channels_last images; planes (contiguous images) go through them between two
transpositions of ours where that is faster, and where it rounds alike.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from fusionrt import autocast
from fusionrt.ops import transposition
from fusionrt.ops.depthwise_forms import Geometry
from fusionrt.ops.folding import folded
from fusionrt.rehearsal import device_type

Tensor = torch.Tensor
Options = tuple[Sequence[int], Sequence[int], Sequence[int], int]  # stride, padding, dilation, groups
_refused: set[tuple[Any, ...]] = set()  # kinds of calls that cuDNN has no kernel for
_alike: dict[tuple[Any, ...], bool | None] = {}  # None: not tried
KINDS_KEPT = 4096


def relu(x: Tensor, weight: Tensor, of: Sequence[Tensor | None], residual: Tensor | None,
         geometry: Geometry | None, groups: int, eps: float | None = None) -> Tensor | None:
    """`of`: the convolution's bias and, with an eps, mean, variance, weight and bias of a norm."""
    if geometry is None or not _takes(x, groups):
        return None
    last, options = _is_last(x), (*geometry, groups)
    if not last and (eps is None or not _turns(x, weight, residual)):
        return None
    x, = autocast.cast(x)
    if not last and not _rounds_alike(x, weight, options):
        return None
    if eps is not None:
        weight, bias = folded(weight, of, eps, x.dtype)
    else:
        weight, bias = autocast.cast(weight, of[0])
    return _run(x, weight, bias, residual, options)


def _takes(x: Tensor, groups: int) -> bool:
    """Whether cuDNN's fused kernels are asked: in dtypes that it has them for."""
    return (device_type(x) == "cuda" and x.dim() == 4 and groups == 1 and x.numel() > 0
            and x.dtype in (torch.float16, torch.bfloat16, torch.float32) and torch.backends.cudnn.enabled)


def _is_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last)


def _turns(x: Tensor, weight: Tensor, residual: Tensor | None) -> bool:
    """Whether planes are to go through cuDNN's fused kernel of channels_last images: its others for matrix
    units turn image and result, too, unless filters are single pixels."""
    return x.is_contiguous() and residual is None and weight.shape[2:].numel() > 1


def _rounds_alike(x: Tensor, weight: Tensor, options: Options) -> bool:
    """Whether cuDNN convolves these planes as it does channels_last images: where TF32 is allowed it decides
    by their shapes, and errors are 3e-4 or 3e-7. No rule was found: what comes a second time is tried."""
    if x.dtype != torch.float32 or not convolves_in_tf32() or x.is_meta:
        return x.dtype != torch.float32 or x.is_meta
    kind = x.device, x.shape, weight.shape, options
    if kind not in _alike:
        _bound(_alike)
        _alike[kind] = None
    elif _alike.get(kind, False) is None and not torch.cuda.is_current_stream_capturing():
        with contextlib.suppress(torch.OutOfMemoryError):  # the call itself needs less
            _alike[kind] = _difference(x, weight, options) <= 3e-5
    return bool(_alike.get(kind))


def _difference(x: Tensor, weight: Tensor, options: Options) -> float:
    """Between both ways, of random images like x."""
    generator = torch.Generator(x.device).manual_seed(0)
    image, filters = (torch.randn(t.shape, device=x.device, generator=generator) for t in (x, weight))
    planes = torch.conv2d(image, filters, None, *options).relu_()
    last = _run(image.contiguous(memory_format=torch.channels_last), filters, None, None, options)
    return math.inf if last is None else float((planes - last).norm() / planes.norm())


def convolves_in_tf32() -> bool:
    convolutions = getattr(torch.backends.cudnn, "conv", None)  # where it is said since torch 2.9
    if convolutions is None:
        return torch.backends.cudnn.allow_tf32
    return bool(convolutions.fp32_precision == "tf32")


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, options: Options
         ) -> Tensor | None:
    """relu(convolution + bias + residual), in memory as x; None where cuDNN has no kernel for that."""
    kind = x.device, x.dtype, tuple(weight.shape), residual is None, options
    if kind in _refused:
        return None
    image = x if _is_last(x) else transposition.channels_last(x)
    try:
        if residual is None:
            y = torch.cudnn_convolution_relu(image, weight, bias, *options)
        else:
            residual = residual.to(x.dtype, memory_format=torch.channels_last)
            y = torch.cudnn_convolution_add_relu(image, weight, residual, 1.0, bias, *options)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        _bound(_refused)
        _refused.add(kind)
        return None
    return y if image is x else transposition.contiguous(y)


def _bound(kinds: set[tuple[Any, ...]] | dict[tuple[Any, ...], Any]) -> None:
    if len(kinds) >= KINDS_KEPT:
        kinds.clear()
