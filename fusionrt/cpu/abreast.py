"""Sums over many short rows: as many of them side by side as fill a block, so that loops are long.

Those over the rows of (N, 7) are then sums over those of (N / 128, 896), of which each task has one of 896
columns, and in the end the first 7 are given what stands 7, 14, ... further on.
"""

from __future__ import annotations

from fusionrt.cpu.pointwise import BLOCK
from fusionrt.problem import MASK, Operand, Problem

SHORT, LONG = 40, 256  # columns of such rows at most; of what is made of them at least


def side_by_side(problem: Problem) -> Problem:
    """The same problem, seen so where memory has no gaps and the number of rows is a multiple."""
    if not _fits(problem):
        return problem
    columns, n = problem.sizes
    each = next((k for k in range(BLOCK // columns, 1, -1) if n % k == 0), 1)
    if columns * each < LONG:
        return problem

    def seen(o: Operand) -> Operand:
        within, apart = o.strides
        return o._replace(strides=(within, apart * each))

    return problem._replace(sizes=(columns * each, n // each), abreast=each,
                            inputs=tuple(map(seen, problem.inputs)),
                            outputs=tuple(map(seen, problem.outputs)))


def _fits(problem: Problem) -> bool:
    if len(problem.sizes) != 2 or not 2 <= problem.sizes[0] <= SHORT or problem.streams:
        return False
    flat, operands = (1, problem.sizes[0]), (*problem.inputs, *problem.outputs)
    sums = problem.sums
    return (bool(sums) and all(o.strides == (1, 0) for o in sums)
            and all(o.strides in (flat, (1, 0), (0, 0)) and o.dtype != MASK for o in operands))
