"""What rewritten graphs call beside the public ops."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fusionrt.ops.attention import attention

Tensor = torch.Tensor


def is_batch_first(x: Tensor) -> bool:
    """Whether of (L, B, E) the batch is the outer dimension in memory."""
    return bool(x.stride(1) > x.stride(0))


def self_attention(x: Tensor, heads: int, in_weight: Tensor, in_bias: Tensor | None, out_weight: Tensor,
                   out_bias: Tensor | None, dropout_p: float = 0.0, as_torch: bool = False) -> Tensor:
    """F.multi_head_attention_forward of x, x and x, (L, B, E), without masks and weights.

    No copies of the projections: the result lies in memory as x does, or `as_torch` has it, (L, B, E) itself.
    """
    batch_first = is_batch_first(x)
    x = x.transpose(0, 1) if batch_first else x
    outer, inner, width = x.shape
    split = F.linear(x, in_weight, in_bias).view(outer, inner, 3, heads, width // heads)
    order, back = ((2, 0, 3, 1, 4), (0, 2, 1, 3)) if batch_first else ((2, 1, 3, 0, 4), (2, 0, 1, 3))
    found = attention(*split.permute(order).unbind(0), dropout_p=dropout_p)
    out = F.linear(found.permute(back).reshape(outer, inner, width), out_weight, out_bias)
    out = out.transpose(0, 1) if batch_first else out
    return out.contiguous() if as_torch else out
