"""The hand-written Triton kernel that launches are compared with; imported only where Triton is."""

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(a, b, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(a + at, inside) + tl.load(b + at, inside)
    tl.store(out + at, tl.maximum(value, 0.0), inside)


def add_relu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(a)
    n = a.numel()
    kernel[(triton.cdiv(n, 1024),)](a, b, out, n, BLOCK=1024)
    return out
