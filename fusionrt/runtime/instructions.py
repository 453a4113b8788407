"""What an expression costs an element: instructions of its primitives."""

from __future__ import annotations

from collections.abc import Sequence

from fusionrt.expr import Expr
from fusionrt.graph import of_roots, toposort


@of_roots
def instructions(roots: Sequence[Expr]) -> int:
    """Of what is computed for each element; what a row has one value of costs nothing."""
    return sum(n.primitive.instructions for n in toposort(roots) if not n.uniform)
