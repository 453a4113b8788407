"""Lines of a kernel's text: further in, of a place among several dimensions, of several rows at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence


def indented(lines: Iterable[str]) -> list[str]:
    return ["    " + line for line in lines]


def coordinates(number: str, dims: Sequence[int]) -> list[str]:
    """`c0`, `c1`, ... of one among all places in these dimensions, the innermost first."""
    lines = []
    for d in dims[:-1]:
        lines += [f"c{d} = {number} % n{d}", f"rest = {number} // n{d}"]
        number = "rest"
    return [*lines, *(f"c{d} = {number}" for d in dims[-1:])]


def of_several(lines: Sequence[str], count: int) -> Callable[[str], list[str]]:
    """A function that writes a line once for each of `count` rows, for which what `lines` assign, and `row`,
    have names of their own: `x_0`, `x_1`, ..."""
    assigned = [line.strip().partition(" = ") for line in lines]
    own = {"row", *(left for left, equals, _ in assigned if equals and left.isidentifier())}
    of_a_row = re.compile(rf"\b({'|'.join(own)})\b")
    return lambda line: [of_a_row.sub(rf"\1_{k}", line) for k in range(count)]
