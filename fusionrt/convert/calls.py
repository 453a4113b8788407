"""What rewritten graphs call beside the public ops."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from fusionrt.fusion import fused
from fusionrt.ops import folding
from fusionrt.ops.attention import attention
from fusionrt.ops.linear import linear_activation
from fusionrt.ops.linear_path import UNAVAILABLE

Tensor = torch.Tensor
Linear = Callable[..., Tensor]  # of x, weight and bias
FEW_ROWS = 1024  # of which one more pass over a product costs less than its bias within it: passes/biases.py

ALIGNED = 8  # 16-bit numbers in what a kernel stores at a time


def is_batch_first(x: Tensor) -> bool:
    """Whether of (L, B, E) the batch is the outer dimension in memory."""
    return bool(x.stride(1) > x.stride(0))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, in two calls where that is faster."""
    apart = x.is_cuda and x.dtype == torch.float32 and x.shape[-1] < x.numel() <= FEW_ROWS * x.shape[-1]
    if bias is None or not apart or torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"):
        return F.linear(x, weight, bias)
    return F.linear(x, weight).add_(bias)


def self_attention(x: Tensor, heads: int, in_weight: Tensor, in_bias: Tensor | None, out_weight: Tensor,
                   out_bias: Tensor | None, dropout_p: float = 0.0, as_torch: bool = False,
                   layers: tuple[Linear, Linear] = (linear, linear)) -> Tensor:
    """F.multi_head_attention_forward of x, x and x, (L, B, E), without masks and weights.

    No copies of the projections: the result lies in memory as x does, or `as_torch` has it, (L, B, E) itself.
    `layers`: that before and that behind.
    """
    weights = in_weight, in_bias, out_weight, out_bias
    if is_batch_first(x):
        out = _attended(x.transpose(0, 1), heads, weights, dropout_p, layers, _OF_BATCHES).transpose(0, 1)
    else:
        out = _attended(x, heads, weights, dropout_p, layers, _OF_PLACES)
    return out.contiguous() if as_torch else out


def batch_first_attention(x: Tensor, heads: int, *weights: Tensor | None,
                          layers: tuple[Linear, Linear] = (linear, linear)) -> Tensor:
    """`self_attention` of a batch of sequences, (B, L, E), and its result so as well."""
    return _attended(x.contiguous(), heads, weights, 0.0, layers, _OF_BATCHES)


# Dimensions of what comes of an outer and an inner one, as (3, B, heads, L, D); and of (B, heads, L, D) back.
_OF_BATCHES, _OF_PLACES = ((2, 0, 3, 1, 4), (0, 2, 1, 3)), ((2, 1, 3, 0, 4), (2, 0, 1, 3))


def _attended(x: Tensor, heads: int, weights: Sequence[Tensor | None], dropout_p: float,
              layers: tuple[Linear, Linear], orders: tuple[tuple[int, ...], tuple[int, ...]]) -> Tensor:
    outer, inner, width = x.shape
    in_weight, in_bias, out_weight, out_bias = weights
    split = layers[0](x, in_weight, in_bias).view(outer, inner, 3, heads, width // heads)
    attend: Any = F.scaled_dot_product_attention if x.is_cpu and x.numel() else attention  # as ours has it
    found = attend(*split.permute(orders[0]).unbind(0), dropout_p=dropout_p)
    out: Tensor = layers[1](found.permute(orders[1]).reshape(outer, inner, width), out_weight, out_bias)
    return out


def aligned_product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """x W (+ b), of a weight as F.linear has it if it is `transposed`, in rows that begin at multiples of 16
    bytes: first the columns that are whole vectors. No gradients."""
    weight = weight.t() if transposed else weight
    rows, width = x.reshape(-1, x.shape[-1]), weight.shape[1]
    out = x.new_empty((len(rows), -(-width // ALIGNED) * ALIGNED))
    whole = width - width % ALIGNED
    for part in (slice(whole), slice(whole, width)):
        if bias is None:
            torch.mm(rows, weight[:, part], out=out[:, part])
        else:
            torch.addmm(bias[part], rows, weight[:, part], out=out[:, part])
    return out[:, :width].view(*x.shape[:-1], width)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def pixel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *norm: Tensor | None,
                 eps: float | None = None, activation: Any = None, residual: Tensor | None = None) -> Tensor:
    """residual + activation(norm(conv2d(x, weight, bias))) of 1 × 1 weights, channels_last images: a linear
    layer of pixels. No gradients.

    `norm`: nothing, or mean, variance, weight and bias, which are folded into the weight; `residual`: only
    without an activation, or without a norm.
    """
    if norm:
        weight, bias = folding.folded(weight, (bias, *norm), eps or 0.0, x.dtype)
    n, c, h, w = x.shape
    of_pixels = None if residual is None else residual.permute(0, 2, 3, 1).reshape(n * h * w, len(weight))
    out = linear_activation(x.permute(0, 2, 3, 1).reshape(n * h * w, c), weight.flatten(1), bias, activation,
                            residual=of_pixels)
    return out.view(n, h, w, len(weight)).permute(0, 3, 1, 2)


def patch_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """conv2d(x, weight, bias, stride=weight.shape[2:]) as a linear layer of the patches, the result in
    channels_last memory. No gradients."""
    (n, c, h, w), (channels, _, rows, columns) = x.shape, weight.shape
    apart = x.view(n, c, h // rows, rows, w // columns, columns).permute(0, 2, 4, 1, 3, 5)
    out = F.linear(apart.reshape(-1, c * rows * columns), weight.flatten(1), bias)
    return out.view(n, h // rows, w // columns, channels).permute(0, 3, 1, 2)


def with_strides(t: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy with these strides, if it has others."""
    return t if t.stride() == tuple(strides) else copied(t, strides)


def copied(t: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy with these strides. Where rows begin at no multiple of 16 bytes torch's own takes longer."""
    if _is_made_dense(t, strides):
        with contextlib.suppress(*UNAVAILABLE):
            return _same(t)
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def _is_made_dense(t: Tensor, strides: Sequence[int]) -> bool:
    """Whether all that changes is that gaps between rows go, on a GPU."""
    in_order = all(before >= after for before, after in itertools.pairwise(t.stride()))
    return (t.is_cuda and t.dtype.is_floating_point and in_order and not t.is_contiguous()
            and torch.empty(t.shape, device="meta").stride() == tuple(strides))


@fused("copied")
def _same(x: Any) -> Any:
    return x


def appended(whole: Tensor, dim: int, start: int, *parts: Tensor) -> Tensor:
    """The parts copied into `whole` from `start` on; what lies there up to their end."""
    for part in parts:
        size = part.shape[dim]
        whole.narrow(dim, start, size).copy_(part)
        start += size
    return whole.narrow(dim, 0, start)
