"""What a kernel is given, by name: its text and its callers know no places."""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fusionrt.cpu.lines import indented
from fusionrt.layout import Ints
from fusionrt.problem import Operand


class Signature(NamedTuple):
    """Names of addresses, of integers and of floating-point numbers, 8 bytes each: so they lie in memory."""

    pointers: tuple[str, ...]
    integers: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()

    @property
    def format(self) -> str:
        """As `struct` spells it."""
        return "=" + "".join(f"{len(names)}{code}" for names, code in zip(self, "Qqd", strict=True))

    @property
    def begins(self) -> tuple[int, int]:
        """Bytes before integers and before scalars."""
        integers = 8 * len(self.pointers)
        return integers, integers + 8 * len(self.integers)

    def places(self) -> dict[str, str]:
        """Where a text finds each."""
        return {name: f"{kind}[{k}]" for kind, names in self._asdict().items()
                for k, name in enumerate(names)}


def function(lines: Iterable[str], start: str = "start", stop: str = "stop") -> str:
    """A kernel's text: what it does on [start, stop)."""
    return "\n".join([f"def kernel({', '.join(Signature._fields)}, {start}, {stop}):", *indented(lines), ""])


# -- of generated kernels --------------------------------------------------------------------------

def pointers(operands: Iterable[Operand], scratch: Iterable[str]) -> tuple[str, ...]:
    return *(o.name for o in operands), *scratch


def extents(sizes: Ints, operands: Sequence[Operand]) -> dict[str, int]:
    """Sizes and strides."""
    names = _extents(len(sizes), *[o.name for o in operands])
    return dict(zip(names, itertools.chain(sizes, *[o.strides for o in operands]), strict=True))


@functools.cache
def _extents(n_dims: int, *operands: str) -> tuple[str, ...]:
    return *(f"n{d}" for d in range(n_dims)), *(f"{o}_s{d}" for o in operands for d in range(n_dims))


def known(places: Mapping[str, str], sizes: Ints, operands: Iterable[Operand], scalars: Iterable[str]
          ) -> list[str]:
    """Lines that read the sizes, strides that are neither 0 nor 1, and the numbers."""
    read = [f"n{d}" for d in range(len(sizes))]
    read += [f"{o.name}_s{d}" for o in operands for d, stride in enumerate(o.strides) if stride > 1]
    return [*(f"{name} = {places[name]}" for name in read), *(f"{s} = acc_t({places[s]})" for s in scalars)]
