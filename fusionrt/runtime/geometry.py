"""Coordinates of elements in CUDA text, and the parameters that they are computed from."""

from __future__ import annotations

from collections.abc import Sequence

from fusionrt.layout import dense
from fusionrt.problem import Operand
from fusionrt.runtime.source import Field, members

INDEX_LIMIT = 2**31  # where 32-bit index arithmetic ends


class Geometry:
    """Fields and text for the coordinates of an element, shared by all operands that need them.

    `axis` begins the names of what is declared here, so that two geometries may stand side by side.
    """

    def __init__(self, sizes: Sequence[int], wide: bool, axis: str = "c", wide_strides: bool = False) -> None:
        self.sizes, self.wide, self.axis = sizes, wide, axis
        self.wide_strides = wide or wide_strides
        self.index_t = "unsigned long long" if wide else "unsigned"
        self.divisor_t = "WideDivisor" if wide else "Divisor"
        self.fields: list[tuple[Field, tuple[str | int, ...]]] = []

    def index(self, name: str, value: str | int) -> str:
        self._declare(self.index_t, name, value)
        return f"p.{name}"

    def divisor(self, name: str, value: int) -> str:
        self._declare(self.divisor_t, name, value)
        return f"p.{name}"

    def coordinates(self, index: str) -> list[str]:
        """Statements for c0, c1, ...: the coordinates of linear element `index`."""
        last, rest, lines, c, t = len(self.sizes) - 1, index, [], self.axis, self.index_t
        for d in range(last):
            lines.append(f"const {t} {c}q{d} = p.{c}_size{d}.divide({rest}), "
                         f"{c}{d} = {rest} - {c}q{d} * p.{c}_size{d}.value;")
            rest = f"{c}q{d}"
        return [*lines, f"const {t} {c}{last} = {rest};"]

    def declare(self, operands: Sequence[Operand]) -> None:
        """Parameters that `coordinates` and `offset` read, for the operands that need them."""
        if operands:
            for d, size in enumerate(self.sizes[:-1]):
                self.divisor(f"{self.axis}_size{d}", size)
        for o in operands:
            for d, stride in enumerate(o.strides):
                if stride not in (0, 1):
                    self._declare("unsigned long long" if self.wide_strides else self.index_t,
                                  f"{o.name}_{self.axis}_stride{d}", stride)

    def _declare(self, type: str, name: str, value: str | int) -> None:
        field, = members(type, name)
        self.fields.append((field, field.packed(value)))

    def offset(self, operand: Operand) -> str:
        terms = [f"{self.axis}{d}" + ("" if stride == 1 else f" * p.{operand.name}_{self.axis}_stride{d}")
                 for d, stride in enumerate(operand.strides) if stride]
        return " + ".join(terms) or "0"


def is_flat(operand: Operand, sizes: Sequence[int]) -> bool:
    return all(s == f or n == 1 for s, f, n in zip(operand.strides, dense(sizes), sizes, strict=True))
