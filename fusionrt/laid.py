"""How a tensor lies in memory: what a launch is planned by, once for all tensors that lie so."""

from __future__ import annotations

from typing import NamedTuple

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

    def stride(self, dim: int) -> int:
        return self.strides[dim]


def laid(t: torch.Tensor | None) -> Laid | None:
    return None if t is None else Laid(t.shape, t.stride(), t.dtype, t.data_ptr() % WIDEST)
