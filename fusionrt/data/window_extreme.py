"""The gradient of a rolling minimum or maximum: of each result to the element that it is."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from fusionrt.cpu import kernel as cpu
from fusionrt.data.window_rows import LOADS, Tensor, like, outermost_first
from fusionrt.dtypes import SIGNIFICANT_BITS, name_of
from fusionrt.rehearsal import device_type
from fusionrt.runtime import kernel as gpu
from fusionrt.runtime.source import definitions, members, pointer
from fusionrt.structured import Gradient, StructuredOp

BLOCK, ITEMS = 256, 16


@functools.cache
def _gpu_kernel(dtype: torch.dtype) -> gpu.Kernel:
    name = name_of(dtype)
    fields = [pointer("scalar_t", "grad"), pointer("int", "index"), pointer("scalar_t", "out", const=False),
              *members("long long", "outer", "results", "n", "inner", "parts")]
    return gpu.Kernel("sliding_window gradient", "window_scatter", fields,
                      definitions(scalar_t=f"{name}_t", ITEMS=ITEMS),
                      acc="float32" if dtype.itemsize == 2 else "float64", block=BLOCK,
                      significant_bits=SIGNIFICANT_BITS[name])


_TEXT = """
    for row in range(start, stop):
        outer, column = row // inner, row % inner
        of, to = outer * results * inner + column, outer * n * inner + column
        i = 0
        while i < results:
            place = index[of + i * inner]
            total = 0.0
            while i < results and index[of + i * inner] == place:
                total += float64_of({load})
                i += 1
            if place >= 0:
                out[to + place * inner] = store_{name}(acc_t(total))
"""


@functools.cache
def _cpu_kernel(dtype: torch.dtype) -> cpu.Kernel:
    name = name_of(dtype)
    text = _TEXT.format(name=name, load=LOADS.get(dtype, "{}").format("grad[of + i * inner]"))
    return cpu.Kernel("sliding_window gradient", text, "float64", integers=("results", "n", "inner"),
                      pointers={"grad": name, "index": "int32", "out": name})


def _run(grad: Tensor, index: Tensor, dim: int, n: int) -> Tensor:
    out, order = like(index, dim, n, grad.dtype).zero_(), outermost_first(index, dim)
    grad, index, dim = grad.permute(order).contiguous(), index.permute(order).contiguous(), order.index(dim)
    outer, results, inner = math.prod(index.shape[:dim]), index.shape[dim], math.prod(index.shape[dim + 1:])
    if grad.numel():
        addresses = [t.data_ptr() for t in (grad, index, out)]
        if device_type(grad) == "cpu":
            on_cpu = _cpu_kernel(grad.dtype)
            on_cpu(grad.device, outer * inner, on_cpu.given(*addresses, results=results, n=n, inner=inner),
                   work=results)
        else:
            on_gpu, parts = _gpu_kernel(grad.dtype), -(-results // ITEMS)
            on_gpu(grad.device, -(-outer * inner * parts // BLOCK), *addresses, *on_gpu.planned(
                outer=outer, results=results, n=n, inner=inner, parts=parts))
    return out


def _fake(grad: Tensor, index: Tensor, dim: int, n: int) -> Tensor:
    return like(index, dim, n, grad.dtype)


def _backward(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any], needed: Sequence[bool]
              ) -> Sequence[Any]:
    (index,), grad = saved, grads[0]
    places = index.long()
    return grad.gather(args[2], places.clamp(min=0)).masked_fill(places < 0, 0), None, None, None


scatter = StructuredOp("sliding_extreme_backward(Tensor grad, Tensor index, int dim, int n) -> Tensor", _run,
                       _fake, Gradient(lambda args, out: (args[1],), _backward))
