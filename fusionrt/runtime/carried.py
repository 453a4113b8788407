"""What a pass over a row computes at length and a later one needs again: it waits in registers.

The gradient of a norm with an activation behind it reads the activation's gradient twice, for the sums of the
row and for its elements; of a GELU that is forty instructions an element each time.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusionrt.expr import Expr
from fusionrt.graph import of_roots, toposort
from fusionrt.rowwise import Pass, schedule, with_sums
from fusionrt.runtime.instructions import instructions

AT_LENGTH = 8  # instructions an element: more than it takes to read and unpack the operands again


def carried(passes: Sequence[Pass], roots: Sequence[Expr]) -> dict[Expr, int]:
    """Values of elements, with the pass that leaves them to later ones."""
    computed: dict[Expr, int] = {}
    left: dict[Expr, int] = {}
    for k, one in enumerate(passes):
        wanted = [f.operand for f in one.found] + [roots[i] for i in one.outputs]
        here = [n for n in toposort(wanted, left.copy()) if not n.uniform]
        again = {n for n in here if n in computed and not n.is_truth and instructions([n]) >= AT_LENGTH}
        read = {a for n in here if n not in again for a in n.args if isinstance(a, Expr)} | set(wanted)
        left |= {n: computed[n] for n in here if n in again and n in read}
        for n in here:
            computed.setdefault(n, k)
    return left


@of_roots
def how_many(roots: Sequence[Expr]) -> int:
    """Values of an element that wait."""
    whole = with_sums(roots)
    return len(carried(schedule(whole), whole))
