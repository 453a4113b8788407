"""Inference of relu(batch_norm(convolution) + residual) by cuDNN's one kernel: a norm folded into the
weights.

What was folded is kept as long as the weight lives, and made anew when the weight, a statistic or a parameter
of the norm has other values: that is what a kernel looks at in each call, as versions of tensors do not tell.
It costs a launch and the reading of the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fusionrt.problem import STORAGE
from fusionrt.rehearsal import device_type
from fusionrt.runtime.kernel import Kernel
from fusionrt.runtime.source import Field, pointer

Tensor = torch.Tensor
OF_NORM = ("bias", "running_mean", "running_var", "bn_weight", "bn_bias")  # the first is the convolution's
Options = tuple[Sequence[int], Sequence[int], Sequence[int], int]


class Folded:
    """Weight and bias, and what they follow from: at first nothing that could be."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight = torch.empty_like(weight, dtype=dtype, memory_format=torch.channels_last)
        self.bias = torch.empty(weight.shape[0], dtype=dtype, device=weight.device)
        self.applied = torch.full((weight.shape[0], 2), -1, dtype=torch.int64, device=weight.device)


_folded: Any = WeakIdKeyDictionary()
_refused: set[tuple[Any, ...]] = set()  # kinds of calls that cuDNN has no kernel for


@functools.cache
def kernel(weight: str, folded: str, of: tuple[str | None, ...], last: bool) -> Kernel:
    """Of these dtypes, None for what there is not; `last`: of a channels_last weight."""
    constants = [f"using weight_t = {weight}_t;", f"using folded_t = {folded}_t;",
                 f"constexpr bool LAST = {str(last).lower()};"]
    for name, dtype in zip(OF_NORM, of, strict=True):
        constants += [f"constexpr bool has_{name} = {str(dtype is not None).lower()};",
                      f"using {name}_t = {dtype or 'float32'}_t;"]
    fields = [pointer("weight_t", "weight"), *(pointer(f"{name}_t", name) for name in OF_NORM),
              *(Field(f"{kind}* {name}", "Q") for kind, name in (
                  ("folded_t", "folded"), ("folded_t", "folded_bias"), ("unsigned long long", "applied"))),
              *(Field(f"int {name}", "i") for name in ("row", "pixels", "inner")), Field("float eps", "f")]
    return Kernel("fold_norm", "fold_norm", fields, constants)


def folded(weight: Tensor, of: Sequence[Tensor | None], eps: float, dtype: torch.dtype
           ) -> tuple[Tensor, Tensor]:
    """Weight and bias of the convolution that is as good as one and its norm, whose tensors `of` are in the
    order of OF_NORM: computed in float32, rounded once to `dtype`; in memory as convolutions of channels_last
    images want them."""
    made: Folded | None = _folded.get(weight)
    if made is None or made.weight.dtype != dtype or made.weight.shape != weight.shape:
        made = _folded[weight] = Folded(weight, dtype)
    last = weight.is_contiguous(memory_format=torch.channels_last)
    weight, of = weight if last else weight.contiguous(), [None if t is None else t.contiguous() for t in of]
    names = (None if t is None else STORAGE[t.dtype] for t in of)
    tensors = weight, *of, made.weight, made.bias, made.applied
    kernel(STORAGE[weight.dtype], STORAGE[dtype], tuple(names), last)(
        weight.device, weight.shape[0], *(0 if t is None else t.data_ptr() for t in tensors),
        weight[0].numel(), weight[0, 0].numel(), weight.shape[1], eps)
    return made.weight, made.bias


def takes(x: Tensor, groups: int) -> bool:
    """Whether cuDNN's fused kernels are asked: for channels_last images, in dtypes that it has them for."""
    return (device_type(x) == "cuda" and x.dim() == 4 and groups == 1 and x.numel() > 0
            and x.dtype in (torch.float16, torch.bfloat16, torch.float32)
            and x.is_contiguous(memory_format=torch.channels_last) and torch.backends.cudnn.enabled)


def relu_by_cudnn(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, options: Options
                  ) -> Tensor | None:
    """relu(convolution + bias + residual); None where cuDNN has no kernel for that."""
    kind = x.device, x.dtype, tuple(weight.shape), residual is None, options
    if kind in _refused:
        return None
    try:
        if residual is None:
            return torch.cudnn_convolution_relu(x, weight, bias, *options)
        residual = residual.to(x.dtype, memory_format=torch.channels_last)
        return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *options)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        _refused.add(kind)
        return None
