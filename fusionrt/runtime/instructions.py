"""What an expression costs an element: instructions of the primitives, measured."""

from __future__ import annotations

from collections.abc import Sequence

from fusionrt.expr import Expr, of_roots, toposort

# Those that are not here take one or two.
_OF_PRIMITIVES = {
    "arg": 0, "const": 0, "pow": 86, "sin": 90, "cos": 90, "erf": 21, "log": 26, "log1p": 29, "log2": 26,
    "exp2": 8, "sqrt": 15, "div": 15, "exp": 5, "expm1": 12, "elu": 16, "hardtanh": 4, "rsqrt": 5,
    "sigmoid": 9, "softplus": 15, "normcdf": 12, "normpdf": 6, "tanh": 10, "reciprocal": 4,
    "near_reciprocal": 2}


@of_roots
def instructions(roots: Sequence[Expr]) -> int:
    """Of what is computed for each element; what a row has one value of costs nothing."""
    return sum(_OF_PRIMITIVES.get(n.op, 1) for n in toposort(roots) if not n.uniform)
