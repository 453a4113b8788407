"""Linear layers at inference on a CPU: weights packed once, by MKL for a number of rows, by oneDNN for any.

torch's own arranges the weight anew in every call. MKL's product is the faster one, with the same bits as
torch's; oneDNN has the activation in its kernel.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch.nn import functional as F

from fusionrt.convert.derived import Last
from fusionrt.convert.packed_conv import ACTIVATIONS

Tensor = torch.Tensor
LEAST_ROWS = 8  # of fewer the bytes of the weight decide, which are the same in either order


@functools.cache
def can_pack() -> bool:
    """Whether this build of torch has oneDNN's packed products."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))


@functools.cache
def _has_mkl() -> bool:
    return torch.backends.mkl.is_available() and all(
        hasattr(torch.ops.mkl, name) for name in ("_mkl_linear", "_mkl_reorder_linear_weight"))


@dataclasses.dataclass(frozen=True)
class _Packed:
    """Makes the packed weight, by MKL if `rows` are given; `transposed`: of a weight as torch.mm wants it."""

    rows: int | None
    transposed: bool

    def __call__(self, weight: Tensor) -> Tensor:
        weight = (weight.t() if self.transposed else weight).contiguous()
        made: Tensor = (torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.rows is None else
                        torch.ops.mkl._mkl_reorder_linear_weight(weight, self.rows))
        return made


class PackedLinear:
    """activation(linear(x, weight, bias)) of float32, for one call in a graph. The packed weight is kept.

    `rows`: of x, if they are the same in all calls; `transposed`: the weight is as torch.mm wants it.
    """

    def __init__(self, rows: int | None = None, activation: str | None = None, transposed: bool = False
                 ) -> None:
        self.rows = rows if activation is None and _has_mkl() else None
        self.transposed, self.activation = transposed, ACTIVATIONS[activation]
        self.packed = Last(_Packed(self.rows, transposed))
        self.__name__ = self.__qualname__ = "packed_linear"  # for the text of a graph

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.is_meta:  # a rehearsal: oneDNN compiles nothing of ours
            return F.linear(x, weight.t() if self.transposed else weight, bias)
        packed: Tensor = self.packed(weight)
        made: Tensor
        if self.rows is None:
            made = torch.ops.mkldnn._linear_pointwise(x, packed, bias, *self.activation)
        else:
            plain = weight.t() if self.transposed else weight
            made = torch.ops.mkl._mkl_linear(x, packed, plain, bias, self.rows)
        return made
