"""Several rows side by side, where one is no whole packs or leaves many of a block's threads without any.

Sums over the rows of (N, 33) are then sums over those of (N / 64, 2112), of which a thread has packs of the
same columns, and each block leaves 64 rows of partial sums.
"""

from __future__ import annotations

import math

from fusionrt.layout import Reduction, reduction
from fusionrt.problem import MASK, Operand, Problem
from fusionrt.runtime import accumulators, reduction_cut, vectors
from fusionrt.runtime.device import MULTIPROCESSORS
from fusionrt.runtime.geometry import is_flat

IDLE, WASTED = 1.25, 1.5    # threads for each that has columns: not too many, too many of whole packs
MOST = 32                   # times as many rows as are whole packs
MANY_ACROSS = 1 << 22       # elements from which on what is found across memory gains by it


def side_by_side(problem: Problem, rows: Reduction) -> tuple[Problem, Reduction]:
    """Both, seen so, where memory has no gaps and the number of rows is a multiple."""
    if rows.pattern != (True, False) or not _fits(problem):
        return problem, rows
    columns, n = problem.sizes
    each, width = 1, vectors.pack_width(problem, 16)
    if not problem.across or (columns % width and problem.domain.numel >= MANY_ACROSS):
        each = _rows(columns, n, width)
    if each == 1:
        return problem, rows

    def seen(o: Operand) -> Operand:
        within, apart = o.strides
        return o._replace(strides=(within, apart, apart * each))

    made = problem._replace(sizes=(columns, each, n // each), abreast=each,
                            inputs=tuple(map(seen, problem.inputs)),
                            outputs=tuple(map(seen, problem.outputs)))
    its = reduction(made.domain, (True, True, False))
    blocks, chunks = reduction_cut.reduction_grid(made, its, vectors.vector_width(made, 16))
    return (made, its) if chunks > 1 and blocks >= MULTIPROCESSORS else (problem, rows)


def _rows(columns: int, n: int, width: int) -> int:
    """The fewest that are whole packs and leave few threads idle; or as few as any."""
    whole = width // math.gcd(width, columns)
    if whole == 1 and _idle(columns // width) < WASTED:
        return 1
    candidates = [each for each in (whole << k for k in range(MOST.bit_length())) if n % each == 0]
    idle = {each: _idle(columns * each // width) for each in candidates}
    few = [each for each in candidates if idle[each] <= IDLE]
    return few[0] if few else min(candidates, key=idle.__getitem__, default=1)


def _idle(packs: int) -> float:
    lanes = min(32, 1 << (packs - 1).bit_length())
    return -(-packs // lanes) * lanes / packs


def _fits(problem: Problem) -> bool:
    """Whether all that changes from row to row lies without gaps, and no value that is found has a place."""
    if problem.then is not None or problem.inner > 1:
        return False
    sizes, operands = problem.sizes, (*problem.inputs, *problem.full_outputs)
    moving = [o for o in operands if o.strides[1] or o.dtype == MASK]
    sums = problem.sums
    found = accumulators.groups(problem)
    return (bool(moving) and all(o.dtype == MASK or is_flat(o, sizes) for o in moving)
            and all(o.strides[0] for o in sums) and all(g.kind != "first" for g in found))
