"""max_pool2d of images in channels_last memory at inference: torch's kernel also finds out where each largest
value was."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from fusionrt.problem import STORAGE
from fusionrt.rehearsal import device_type
from fusionrt.runtime.kernel import Kernel
from fusionrt.runtime.source import Field, pointer

Tensor = torch.Tensor
Pair = tuple[int, int]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
VECTOR, BLOCK, MOST = 16, 128, 1 << 31
_BITS = {"bfloat16": 8, "float16": 11, "float32": 24}


def max_pool(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """F.max_pool2d(x, kernel, stride, padding, dilation) of x, (N, C, H, W). No gradients."""
    pack = VECTOR // x.itemsize
    if not (device_type(x) == "cuda" and x.is_cuda and x.dtype in DTYPES and x.shape[1] % pack == 0
            and 0 < x.numel() < MOST and x.is_contiguous(memory_format=torch.channels_last)
            and not x.data_ptr() % VECTOR):
        return F.max_pool2d(x, kernel, stride, padding, dilation)
    n, c, h, w = x.shape
    out_h, out_w = (
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip((h, w), kernel, stride, padding, dilation, strict=True))
    out = torch.empty((n, c, out_h, out_w), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    vectors = out.numel() // pack
    _kernel(STORAGE[x.dtype], kernel, stride, padding, dilation)(
        x.device, -(-vectors // BLOCK), x.data_ptr(), out.data_ptr(), vectors, c // pack, h, w, out_h, out_w)
    return out


@functools.cache
def _kernel(dtype: str, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Kernel:
    fields = [pointer("value_t", "x"), pointer("value_t", "out", const=False),
              *(Field(f"unsigned {name}", "I") for name in ("vectors", "packs")),
              *(Field(f"int {name}", "i") for name in ("height", "width", "out_height", "out_width"))]
    sizes = {"KERNEL": kernel, "STRIDE": stride, "PAD": padding, "DILATION": dilation}
    constants = [f"using value_t = {dtype}_t;", f"constexpr int PACK = {VECTOR} / sizeof(value_t);",
                 *(f"constexpr int {name}_H = {h}, {name}_W = {w};" for name, (h, w) in sizes.items())]
    return Kernel("max_pool", "max_pool", fields, constants, significant_bits=_BITS[dtype], block=BLOCK)
