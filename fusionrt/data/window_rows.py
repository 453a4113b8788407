"""What a rolling window asks for, and the rows in memory that it rolls over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fusionrt import layout

Tensor = torch.Tensor
LOADS = {torch.float16: "half_to_float({})", torch.bfloat16: "bfloat16_to_float({})"}  # on a CPU


class Request(NamedTuple):
    """Window i covers the elements i * stride - left ... + window - 1, as far as the row has them."""

    op: str
    window: int
    stride: int
    left: int
    right: int
    min_periods: int
    correction: float

    def dense(self, n: int) -> int:
        """Windows of a row of n at stride 1."""
        return n + self.left + self.right - self.window + 1 if n else 0

    def results(self, n: int) -> int:
        return -(-self.dense(n) // self.stride)

    def counts(self, n: int, device: torch.device) -> Tensor:
        """Elements that each window has."""
        first = torch.arange(self.results(n), device=device) * self.stride - self.left
        return (first + self.window).clamp(max=n) - first.clamp(min=0)


class Rows(NamedTuple):
    """(outer, n, inner) elements of which inner ones are neighbours; steps count elements, of one row 0."""

    outer: int
    n: int
    inner: int
    outer_step: int
    step: int


def outermost_first(x: Tensor, dim: int) -> list[int]:
    """All dimensions, outermost first; those of one element do not matter."""
    return sorted(range(x.dim()), key=lambda d: (-x.stride()[d], d != dim and bool(x.shape[d] == 1), d))


def rows_of(x: Tensor, dim: int) -> Rows | None:
    """None where the other dimensions do not lie in memory as two."""
    order = outermost_first(x, dim)
    at = order.index(dim)
    outer, inner = _merged(x, order[:at]), _merged(x, order[at + 1:])
    if outer is None or inner is None or inner[1] != 1 or (inner[0] == 1 and x.stride(dim) != 1):
        return None
    return Rows(outer[0], x.shape[dim], inner[0], outer[1] if outer[0] > 1 else 0, x.stride(dim))


def _merged(x: Tensor, dims: Sequence[int]) -> tuple[int, int] | None:
    """Size and step of dimensions, outermost first, as one."""
    size, step = 1, 1
    for d in reversed([d for d in dims if x.shape[d] != 1]):
        if size == 1:
            step = x.stride(d)
        elif x.stride(d) != size * step:
            return None
        size *= x.shape[d]
    return size, step


def like(x: Tensor, dim: int, size: int, dtype: torch.dtype | None = None) -> Tensor:
    """New memory of x's shape but for `size` along dim, in x's order of dimensions. No view: of an
    autograd.Function it could not be changed in place."""
    shape = [size if d == dim else n for d, n in enumerate(x.shape)]
    strides = layout.ordered(shape, outermost_first(x, dim)[::-1])
    return torch.empty_strided(shape, strides, dtype=dtype or x.dtype, device=x.device)


def walkable(x: Tensor, dim: int) -> tuple[Tensor, Rows]:
    """x as it is, or a contiguous copy, and its rows."""
    rows = rows_of(x, dim)
    if rows is None:
        x = x.contiguous()
        step = math.prod(x.shape[dim + 1:])
        rows = Rows(math.prod(x.shape[:dim]), x.shape[dim], step, x.shape[dim] * step, step)
    return x, rows
