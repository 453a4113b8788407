"""Squeeze and excitation at inference: mean, two small linear layers and the product in one kernel."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.nn import functional as F

from fusionrt.activation import activated
from fusionrt.expr import argument, emit
from fusionrt.ops.convolution import conv_activation
from fusionrt.problem import STORAGE
from fusionrt.rehearsal import device_type
from fusionrt.runtime import device as cuda
from fusionrt.runtime.kernel import Kernel
from fusionrt.runtime.source import Field, pointer

Tensor = torch.Tensor
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BLOCK, VECTOR = 512, 16
CLUSTER, LARGE_CLUSTER = 8, 16  # blocks of an image
HAVE_LARGE = ((9, 0), (10, 0), (10, 3))
_BITS = {"bfloat16": 8, "float16": 11, "float32": 24}


def squeeze_excite(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, *, inner: Any = "relu",
                   outer: Any = "sigmoid") -> Tensor:
    """x * outer(w2 inner(w1 mean + b1) + b2), the mean over the pixels of x, (N, C, H, W) in channels_last
    memory; w1: (R, C, 1, 1), w2: (C, R, 1, 1). No gradients."""
    if not _serves(x, w1, b1, w2, b2):
        hidden = conv_activation(F.adaptive_avg_pool2d(x, 1), w1, b1, inner)
        return x * conv_activation(hidden, w2, b2, outer)
    out = torch.empty_like(x)
    (n, channels), hidden, cluster = x.shape[:2], len(w1), _cluster(x.get_device(), len(x))
    pointers = (t.data_ptr() for t in (x, w1.contiguous(), b1, w2.contiguous(), b2, out))
    _kernel(STORAGE[x.dtype], inner, outer, cluster)(
        x.device, n * cluster, *pointers, math.prod(x.shape[2:]), channels, hidden,
        shared=4 * (2 * channels + (1 + cluster) * hidden + BLOCK * (VECTOR // x.itemsize)))
    return out


def _serves(x: Tensor, *weights: Tensor) -> bool:
    pack = VECTOR // x.itemsize
    return (device_type(x) == "cuda" and x.is_cuda and cuda.has_clusters(x.get_device()) and x.dtype in DTYPES
            and x.numel() > 0 and x.is_contiguous(memory_format=torch.channels_last)
            and x.shape[1] % pack == 0 and x.shape[1] <= BLOCK * pack
            and all(w.dtype == x.dtype and w.numel() > 0 for w in weights)
            and not any(t.data_ptr() % VECTOR for t in (x, weights[0])))


@functools.cache
def _cluster(device: int, images: int) -> int:
    """The large one where each block has a multiprocessor for itself."""
    large = (torch.cuda.get_device_capability(device) in HAVE_LARGE
             and images * LARGE_CLUSTER <= cuda.multiprocessors(device))
    return LARGE_CLUSTER if large else CLUSTER


@functools.cache
def _kernel(dtype: str, inner: Any, outer: Any, cluster: int) -> Kernel:
    fields = [*(pointer("value_t", name) for name in ("x", "w1", "b1", "w2", "b2")),
              pointer("value_t", "out", const=False),
              *(Field(f"int {name}", "i") for name in ("pixels", "channels", "hidden"))]
    constants = [f"using value_t = {dtype}_t;", f"constexpr int CLUSTER = {cluster};",
                 f"constexpr bool FEW = {str(cluster == LARGE_CLUSTER).lower()};",
                 f"constexpr int PACK = {VECTOR} / sizeof(value_t);",
                 *_function("inner", inner), *_function("outer", outer)]
    return Kernel("squeeze_excite", "squeeze_excite", fields, constants, significant_bits=_BITS[dtype],
                  block=BLOCK, cluster=cluster)


def _function(name: str, activation: Any) -> list[str]:
    x = argument("a0")
    lines, (result,) = emit([activated("squeeze_excite", x, activation)], "const auto {} = {};", {x: "x"})
    return [f"__device__ __forceinline__ acc_t {name}(acc_t x) {{", *("    " + line for line in lines),
            f"    return {result};", "}"]
