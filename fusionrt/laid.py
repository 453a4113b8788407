"""How a tensor lies in memory: what a launch is planned by, once for all tensors that lie so."""

from __future__ import annotations

import math
from typing import NamedTuple, overload

import torch

WIDEST = 16  # bytes of a load


class Laid(NamedTuple):
    """`residue`: of the address, by WIDEST."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    residue: int

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def stride(self, dim: int) -> int:
        return self.strides[dim]


@overload
def laid(t: torch.Tensor) -> Laid: ...


@overload
def laid(t: torch.Tensor | None) -> Laid | None: ...


def laid(t: torch.Tensor | None) -> Laid | None:
    return None if t is None else Laid(t.shape, t.stride(), t.dtype, t.data_ptr() % WIDEST)
