"""How a tensor lies in memory: what a launch is planned by, once for all tensors that lie so."""

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


def address(t: torch.Tensor | None) -> int:
    """0 where there is no tensor, and of meta tensors."""
    return 0 if t is None else t.data_ptr()


def is_lazy(t: torch.Tensor) -> bool:
    """Whether memory does not hold the values: torch negates some views lazily (`z.conj().imag`), and zeros
    among its derivatives have no memory."""
    return t.is_neg() or t._is_zerotensor()


def in_memory(t: torch.Tensor) -> torch.Tensor:
    """The same values, held by memory; itself if they are."""
    return torch.zeros_like(t) if t._is_zerotensor() else t.resolve_neg()


def heads_of_rows(like: torch.Tensor, batch: int, heads: int, length: int, dim: int) -> torch.Tensor:
    """Memory of the shape (B, heads, S, D), the heads of a row beside each other: merging them is free.

    No view: of an autograd.Function it could not be changed in place."""
    row = heads * dim
    return like.new_empty_strided((batch, heads, length, dim), (length * row, dim, row, 1))


@overload
def laid(t: torch.Tensor) -> Laid: ...


@overload
def laid(t: torch.Tensor | None) -> Laid | None: ...


def laid(t: torch.Tensor | None) -> Laid | None:
    return None if t is None else Laid(t.shape, t.stride(), t.dtype, t.data_ptr() % WIDEST)
