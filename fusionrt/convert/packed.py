"""Convolutions at inference on a CPU: norm folded, weights packed once, activation and residual in oneDNN's
kernel."""

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
class _Weight:
    """Makes the packed weight of a convolution, which oneDNN wants for one size of images."""

    geometry: Geometry
    eps: float | None
    size: tuple[int, ...]

    def __call__(self, weight: Tensor, *norm: Tensor) -> Tensor:
        stride, padding, dilation, groups = self.geometry
        folded = weight if self.eps is None else weight * _factor(norm, self.eps).view(-1, 1, 1, 1)
        packed: Tensor = torch.ops.mkldnn._reorder_convolution_weight(
            folded.contiguous(), padding, stride, dilation, groups, self.size)
        return packed


@dataclasses.dataclass(frozen=True)
class _Bias:
    """Makes the bias that a norm and a convolution's bias, which stands first, come to."""

    eps: float
    has_bias: bool

    def __call__(self, *tensors: Tensor) -> Tensor:
        norm = tensors[self.has_bias:]
        moved = (tensors[0] - norm[0] if self.has_bias else -norm[0]) * _factor(norm, self.eps)
        return moved + norm[3] if len(norm) > 3 else moved


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
    """activation(norm(conv(x, weight, bias)) + residual), of float32 images in channels_last memory.

    `norm`: nothing, or mean, variance, weight and bias; `geometry`: stride, padding and dilation in two
    dimensions, and groups.
    """
    shape = Geometry(tuple(geometry[:2]), tuple(geometry[2:4]), tuple(geometry[4:6]), geometry[6])
    w = derived(_Weight(shape, eps, tuple(x.shape)), weight, *norm)
    if eps is not None:
        bias = derived(_Bias(eps, bias is not None), *(() if bias is None else (bias,)), *norm)
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
