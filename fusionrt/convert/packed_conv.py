"""Convolutions at inference on a CPU: norm folded, activation and residual in oneDNN's kernel.

Weights are packed once, of channels_last images. (For others a packed weight means the kernels of those,
which are slower there, and of long sums less accurate.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fusionrt.convert.derived import derived

Tensor = torch.Tensor
Ints = Sequence[int]
# What oneDNN calls an activation of ours, its parameters and its variant.
ACTIVATIONS: dict[str | None, tuple[str, list[float], str]] = {
    None: ("none", [], ""),
    "relu": ("relu", [], ""),
    "silu": ("swish", [], ""),
    "sigmoid": ("sigmoid", [], ""),
    "tanh": ("tanh", [], ""),
    "hardswish": ("hardswish", [], ""),
    "hardsigmoid": ("hardsigmoid", [], ""),
    "relu6": ("hardtanh", [0.0, 6.0], ""),
    "gelu": ("gelu", [], "none"),
    "gelu_tanh": ("gelu", [], "tanh"),
}
AFTER_RESIDUAL = (None, "relu")


class Geometry(NamedTuple):
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclasses.dataclass(frozen=True)
class _Packed:
    """Makes the weight of a convolution, packed as oneDNN wants it for one size of channels_last images, and
    the bias; with a norm folded into both."""

    geometry: Geometry
    eps: float | None
    size: tuple[int, ...]
    has_bias: bool
    is_packed: bool

    def __call__(self, weight: Tensor, *more: Tensor) -> tuple[Tensor, Tensor | None]:
        bias, norm = (more[0], more[1:]) if self.has_bias else (None, more)
        if self.eps is not None:
            factor = _factor(norm, self.eps)
            weight = weight * factor.view(-1, 1, 1, 1)
            moved = (-norm[0] if bias is None else bias - norm[0]) * factor
            bias = moved + norm[3] if len(norm) > 3 else moved
        if not self.is_packed:
            return weight, bias
        stride, padding, dilation, groups = self.geometry
        return torch.ops.mkldnn._reorder_convolution_weight(
            weight.contiguous(), padding, stride, dilation, groups, self.size), bias


def _factor(norm: Sequence[Tensor], eps: float) -> Tensor:
    """`norm`: mean, variance and, if it has them, weight and bias."""
    factor = torch.rsqrt(norm[1] + eps)
    return factor * norm[2] if len(norm) > 2 else factor


def is_possible() -> bool:
    """Whether this build of torch has oneDNN's fused convolutions."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_convolution_pointwise", "_reorder_convolution_weight"))


def packed_conv(x: Tensor, weight: Tensor, bias: Tensor | None, *norm: Tensor, geometry: Ints,
                eps: float | None, activation: str | None, residual: Tensor | None = None) -> Tensor:
    """activation(norm(conv(x, weight, bias)) + residual), of float32 images, contiguous or channels_last.

    `norm`: nothing, or mean, variance, weight and bias; `geometry`: stride, padding and dilation in two
    dimensions, and groups.
    """
    shape = Geometry(tuple(geometry[:2]), tuple(geometry[2:4]), tuple(geometry[4:6]), geometry[6])
    w, is_packed = weight, x.is_contiguous(memory_format=torch.channels_last)
    if is_packed or norm:
        w, bias = derived(_Packed(shape, eps, tuple(x.shape), bias is not None, is_packed), weight,
                          *(() if bias is None else (bias,)), *norm)
    name, numbers, variant = ACTIVATIONS[activation]
    stride, padding, dilation, groups = shape
    made: Tensor
    if residual is None:
        made = torch.ops.mkldnn._convolution_pointwise(
            x, w, bias, padding, stride, dilation, groups, name, numbers, variant)
    else:
        after = None if activation is None else name
        made = torch.ops.mkldnn._convolution_pointwise.binary(
            x, residual, w, bias, padding, stride, dilation, groups, "add", None, after, numbers, variant)
    return made
