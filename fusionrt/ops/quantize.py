"""Affine int8 quantisation and back, per tensor or per channel."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import torch

from fusionrt.arguments import as_dim
from fusionrt.array import shape_of
from fusionrt.catalogue import COLUMNS, ROWS, public
from fusionrt.dispatch import Usual
from fusionrt.dtypes import name_of
from fusionrt.expr import Expr, cast, clamp, node
from fusionrt.fusion import Fused, fused
from fusionrt.rehearsal import device_type


def _to_int8(x: Expr) -> Expr:
    return cast(node("round_near", clamp(x, -128, 127)), "int8")


@fused("quantize_int8")
def _quantize(x: Expr, scale: Expr, zero_point: Expr) -> Expr:
    return _to_int8(x / scale + zero_point)


@fused("quantize_int8_by_inverse")
def _quantize_by_inverse(x: Expr, inverse: float, zero_point: float) -> Expr:
    # torch's CUDA kernel divides by a number as a multiplication with its reciprocal, and rounds
    # before it adds: an FMA would differ in one of 10^6 elements.
    return _to_int8(node("mul_rn", x, inverse) + zero_point)


def _dequantize_to(dtype: str) -> Fused:
    def dequantize_int8(q: Expr, scale: float, zero_point: float) -> Expr:
        return cast((q - zero_point) * scale, dtype)

    return fused(f"dequantize_int8_{dtype}")(dequantize_int8)


_DEQUANTIZE = {dtype: _dequantize_to(dtype) for dtype in ("float16", "bfloat16", "float32")}


def _per_channel(op: str, name: str, value: Any, x: Any, dim: int | None) -> Any:
    """A vector of one value a channel, shaped to broadcast along `dim`."""
    sizes, own = shape_of(x), shape_of(value)
    if dim is None or sizes is None:
        return value  # what x must be is said where it is read
    rank = len(sizes)
    as_dim(op, dim, rank)
    if own is None or len(own) != 1:
        return value
    if own[0] != sizes[dim]:
        raise ValueError(f"{op}: {name} must have one value for each of the {sizes[dim]} channels along "
                         f"dim {dim}, got {tuple(own)}")
    return value.reshape((-1,) + (1,) * (rank - 1 - dim % rank))


def _checked(op: str, name: str, value: Any, above: float) -> Any:
    """The value; one of NumPy's numbers as one of Python's, as which it is meant."""
    if isinstance(value, (float, int, np.number)) and not above < value < inf:
        raise ValueError(f"{op}: {name} must be a finite{' positive' if above == 0 else ''} number, "
                         f"got {value!r}")
    return value.item() if isinstance(value, np.number) else value


# Of what `_checked` lets pass, as the entry asks for it.
_IN_RANGE = "0 < scale < inf and -inf < zero_point < inf and dim is None"


@public(example=lambda make: (make(ROWS, COLUMNS), 0.05, 3.0), usual=Usual(
    _quantize_by_inverse.operator, ("x", "1 / scale", "zero_point"), _IN_RANGE))
def quantize_int8(x: Any, scale: Any, zero_point: Any = 0.0, *, dim: int | None = None) -> Any:
    """clamp(round_half_even(x / scale + zero_point), -128, 127) as int8; NaN becomes 0.

    x: any shape; float16, bfloat16, float32, float64. `scale`, `zero_point`: numbers, or tensors that
    broadcast; with `dim`, vectors of one value per channel along it. float32 results equal torch's on the
    same device bit for bit: on CUDA a number divides as a multiplication with its float32 reciprocal.
    16-bit inputs are computed in float32.
    No gradient: the result is an integer.
    Raises ValueError for a scale that is a number and not finite and positive, for vectors of another length
    than `dim`, IndexError for a `dim` that x has not.

        quantize_int8(torch.randn(8, 512), 0.05, 3)
    """
    scale = _checked("quantize_int8", "scale", scale, 0.0)
    zero_point = _checked("quantize_int8", "zero_point", zero_point, -inf)
    if dim is not None:
        scale = _per_channel("quantize_int8", "scale", scale, x, dim)
        zero_point = _per_channel("quantize_int8", "zero_point", zero_point, x, dim)
    if not isinstance(scale, (float, int)) or not _on_cuda(x):
        return _quantize(x, scale, zero_point)
    inverse = 1 / scale  # the kernel takes it as float32
    if not isinstance(zero_point, (float, int)) and not str(x.dtype).endswith("float64"):
        inverse = float(np.float32(inverse))  # it may compute in float64
    return _quantize_by_inverse(x, inverse, zero_point)


def _on_cuda(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return x.is_cuda or (x.is_meta and device_type(x) == "cuda")
    return hasattr(x, "__cuda_array_interface__")


@public(example=lambda make: (make(ROWS, COLUMNS, dtype=torch.int8), 0.05, 3.0), usual=Usual(
    _DEQUANTIZE["float32"].operator, ("q", "scale", "zero_point"), f"{_IN_RANGE} and dtype is torch.float32"))
def dequantize_int8(q: Any, scale: Any, zero_point: Any = 0.0, *, dim: int | None = None,
                    dtype: Any = torch.float32) -> Any:
    """(q - zero_point) * scale, for an int8 tensor q of any shape; the result has `dtype` (float32).

    `scale`, `zero_point`, `dim`: as in `quantize_int8`. `dtype`: float16, bfloat16 or float32, of
    torch or NumPy or by name. Differentiable with respect to tensor scales and zero points.
    Raises TypeError if q is not int8, ValueError for another dtype or an invalid number.

        dequantize_int8(quantize_int8(x, 0.05), 0.05)
    """
    if not isinstance(q, Expr) and name_of(getattr(q, "dtype", "")) != "int8":
        raise TypeError(f"dequantize_int8: q must be an int8 tensor, got {getattr(q, 'dtype', type(q))}")
    scale = _checked("dequantize_int8", "scale", scale, 0.0)
    zero_point = _checked("dequantize_int8", "zero_point", zero_point, -inf)
    name = name_of(dtype)
    if name not in _DEQUANTIZE:
        raise ValueError(f"dequantize_int8: dtype must be one of {', '.join(_DEQUANTIZE)}, got {name}")
    scale = _per_channel("dequantize_int8", "scale", scale, q, dim)
    zero_point = _per_channel("dequantize_int8", "zero_point", zero_point, q, dim)
    return _DEQUANTIZE[name](q, scale, zero_point)
