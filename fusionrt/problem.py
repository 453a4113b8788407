"""One pointwise kernel to be built: what to compute, on which storage, over which domain.

The GPU and the CPU runtime take the same description. Operands are named by position (`a0`, `a1`,
..., `out0`, ...), so no name that a user chose reaches generated text.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fusionrt.expr import Expr
from fusionrt.layout import Domain, Ints


class Operand(NamedTuple):
    name: str
    dtype: str
    strides: Ints          # over the collapsed domain, innermost first


class Result(NamedTuple):
    """How an output is allocated, and the order in which a reduced one is computed."""

    shape: Ints
    strides: Ints
    dtype: Any             # of torch
    walk_strides: Ints     # dense in the order in which the domain is walked


class Problem(NamedTuple):
    name: str
    inputs: tuple[Operand, ...]       # the tensors that the roots really need
    scalars: tuple[str, ...]          # names of the Python numbers that they need
    roots: tuple[Expr, ...]
    outputs: tuple[Operand, ...]      # one a root
    reduced: tuple[bool, ...]         # whether an output is summed over its stride-0 dimensions
    sizes: Ints
    acc: str                          # float32 or float64
    streams: tuple[str, ...]          # random streams

    @property
    def domain(self) -> Domain:
        return Domain(self.sizes, tuple(o.strides for o in (*self.inputs, *self.outputs)))

    @property
    def accuracy(self) -> str:
        """That the CPU's mathematics need: float16 for 16-bit results, else that of the arithmetic."""
        return "float16" if self.significant_bits <= 11 and self.acc == "float32" else self.acc

    @property
    def significant_bits(self) -> int:
        """Of the widest floating output; integers and truth values want float32's accuracy."""
        return max(_BITS.get(o.dtype, 24) for o in self.outputs)


_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
