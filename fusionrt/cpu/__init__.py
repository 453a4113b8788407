"""Machines without a GPU: generated kernels, compiled by Numba.

One file an idea. Text: `pointwise`, `abreast`, `rows`, `across`, `columns`, `lines`, `signature` (names of
what a kernel is given); what it is made of: `math16`, `math32`, `math64`, `storage`, `reductions`, `memory`.
Machine code: `compiler`, `kernel` (of a text of its own). Calls: `calling`, `settled` (in machine code),
`team` and `threads` (several cores), `pages` (memory of results).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusionrt.problem import Output, Problem


def build(problem: Problem, outputs: Sequence[Output], n_args: int) -> Callable[..., Any]:
    """A callable of the operator's arguments (and random numbers)."""
    if problem.row_dims:
        from fusionrt.cpu import rows
        return rows.build(problem, outputs, n_args)
    if problem.across:
        from fusionrt.cpu import across
        return across.build(problem, outputs, n_args)
    from fusionrt.cpu import abreast, pointwise
    return pointwise.build(abreast.side_by_side(problem), outputs, n_args)


def texts(problem: Problem) -> list[tuple[str, str]]:
    """Of each of its kernels the text and the accuracy of the mathematics."""
    if problem.row_dims:
        from fusionrt.cpu import rows
        return [(rows.generate(problem), problem.accuracy)]
    if problem.across:
        from fusionrt.cpu import across
        return [(writer.generate(part), part.accuracy) for writer, part in across.kernels(problem)]
    from fusionrt.cpu import abreast, pointwise
    return [(pointwise.generate(abreast.side_by_side(problem)), problem.accuracy)]
