"""Rows: the vocabulary of norms, softmax and losses, and the order in which a kernel works on a row.

A row expression is a scalar expression that may also use sums and maxima over its row. A kernel keeps
the row at hand and goes over it in passes: each computes the reductions whose operands are known,
and the outputs that need no later one.

    mean = row_mean(x)                        # pass 0
    rstd = rsqrt(row_mean((x - mean) ** 2))   # pass 1
    (x - mean) * rstd                         # pass 2
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fusionrt.expr import Expr, exp, log, maximum, node, row_mean, row_sum, rsqrt, where
from fusionrt.graph import of_roots, substitute, toposort
from fusionrt.primitives import REDUCTION

# What stands in the place of a score that a mask does not let pass: the least float32, which is finite, to be
# told from a score of -inf.
LOWEST = -(2 - 2.0**-23) * 2.0**127
# A score that passes is at least that, if it is finite: models fill in, or add, the least number of a dtype.
LOWEST_PASSED = -1e38


def row_max(a: Any) -> Expr:
    return node("row_max", a)


def row_first(a: Any) -> Expr:
    """The position in the row of the first maximum, to be cast to int64; NaN counts as one. Only a GPU's
    kernels find it."""
    return node("row_first", a)


def total(a: Expr) -> Expr:
    """The sum over all rows of what has one value a row: of numbers, uniform arguments and other outputs. For
    outputs without dimensions, of a GPU's kernels."""
    return node("total", a)


def is_total(root: Expr) -> bool:
    return any(n.op == "total" for n in toposort([root]))


def taken(tensor: Expr, column: Expr) -> Expr:
    """The argument `tensor` at `column` of the row, a uniform value; 0 where there is no such column."""
    return node("taken", tensor, column)


def is_column(column: Expr) -> Expr:
    """Whether an element stands in that column."""
    return node("is_column", column)


def up_to_column(column: Expr) -> Expr:
    """Whether an element stands in that column or before it."""
    return node("up_to_column", column)


def standardize(x: Expr, eps: Any) -> tuple[Expr, Expr, Expr]:
    """(x - mean) / sqrt(variance + eps), mean, and 1 / sqrt(variance + eps); the variance is biased."""
    mean = node("moment_mean", x)
    rstd = rsqrt(node("moment_squares", x, mean) / node("row_size", "row_size") + eps)
    return node("standardized", x, mean, rstd), mean, rstd


def rms_scale(x: Expr, eps: Any) -> tuple[Expr, Expr]:
    """x / sqrt(mean(x^2) + eps), and the factor."""
    rstd = rsqrt(row_mean(x * x) + eps)
    return node("rms_scaled", x, rstd), rstd


def softmax_terms(x: Expr) -> tuple[Expr, Expr]:
    """The row's maximum and the sum of exp(x - maximum); a kernel finds both in one pass. Only for what does
    not depend on where the exponentials are taken relative to: derivatives leave the maximum out."""
    most = node("row_top", x)
    return most, row_sum(exp(x - most))


def above_masked(x: Expr) -> Expr:
    """x, and what is finite above what stands for elements that do not pass. Its derivative is 1."""
    return node("masked", x, ~(x < LOWEST_PASSED) | (x == -math.inf), LOWEST_PASSED)


def softmax(x: Expr, passed: Expr | None = None) -> tuple[Expr, Expr, Expr]:
    """exp(x) / sum(exp(x)), the row's maximum, and the factor of exp(x - maximum). Elements that are not
    `passed` are as if they were not there; a row without any is zeros. What is finite must be `above_masked`:
    attention's scores are, by what their mask adds."""
    x = x if passed is None else node("masked", x, passed, LOWEST)
    most, total = softmax_terms(x)
    scale = 1 / total
    if passed is not None:
        scale = where(most < LOWEST, math.nan, where(most <= LOWEST, 0, scale))
    return node("softmaxed", x, most, scale), most, scale


def log_softmax(x: Expr, passed: Expr | None = None) -> tuple[Expr, Expr, Expr]:
    """x - log(sum(exp(x))), the row's maximum, and the logarithm of the sum of exp(x - maximum). What is not
    `passed` is -inf."""
    above = x if passed is None else above_masked(x)
    most, total = softmax_terms(x if passed is None else where(passed, above, LOWEST))
    log_total = log(total)
    x = x if passed is None else where(passed, where(LOWEST_PASSED < most, x, above), -math.inf)
    return node("log_softmaxed", x, most, log_total), most, log_total


# -- passes ----------------------------------------------------------------------------------------

class Found(NamedTuple):
    """What one pass accumulates: a sum, a maximum, the first maximum and its position, a maximum together
    with a sum of exponentials (Milakov & Gimelshein 2018), or the moments: count, what the mean lost to
    rounding, mean and sum of squares (Chan et al. 1983)."""

    kind: str                         # sum, max, first, softmax, moments
    operand: Expr
    values: tuple[Expr | None, ...]   # the nodes that it gives; None is for its own use

    def names(self, first: int) -> dict[Expr, str]:
        """The nodes, by means of `values`, of which the first one is this one's."""
        forms = {"moment_mean": "(values[{0}] + values[{1}])", "row_first": "index_of(values[{0}])"}
        return {node: forms.get(node.op, "values[{0}]").format(k, k - 1)
                for k, node in enumerate(self.values, first) if node is not None}


class Pass(NamedTuple):
    found: tuple[Found, ...]
    outputs: tuple[int, ...]  # positions of the roots that this pass can write


@of_roots
def schedule(roots: Sequence[Expr], online: bool = True) -> Sequence[Pass]:
    """The passes over a row, first to last; the last one may have nothing to find. `online`: one pass finds
    what belongs together; otherwise one value at a time."""
    level: dict[Expr, int] = {}
    found: dict[Expr, tuple[int, Found]] = {}
    for n in toposort(roots):
        operands = [a for a in n.args if isinstance(a, Expr)]
        level[n] = max((level[a] for a in operands), default=0)
        if n.primitive.of_row != REDUCTION:
            continue
        first = _found_with(n, found) if online else None
        if first is not None:
            at, (kind, operand, values) = found[first]
            joined = {"max": "softmax", "moments": "moments"}[kind]
            found[first] = at, Found(joined, operand, (*values, n))
            level[n] = at + 1
        else:
            kind = {"moment_mean": "moments", "row_top": "max"}.get(n.op, n.op.removeprefix("row_"))
            before = {"moments": (None, None), "first": (None,)}.get(kind, ())
            found[n] = level[n], Found(kind, operands[0], (*before, n))
            level[n] += 1
    last = max([0, *(level[r] for r in roots)])
    return tuple(Pass(tuple(f for at, f in found.values() if at == k),
                      tuple(i for i, r in enumerate(roots) if level[r] == k)) for k in range(last + 1))


def _found_with(n: Expr, found: dict[Expr, tuple[int, Found]]) -> Expr | None:
    """The reduction that finds this one too: a sum of exp(x - max x), the squares about a mean."""
    if n.op == "moment_squares":
        return n.args[1] if n.args[1] in found else None  # type: ignore[return-value]
    inner = n.args[0]
    if n.op != "row_sum" or not isinstance(inner, Expr) or inner.op != "exp":
        return None
    difference = inner.args[0]
    if not isinstance(difference, Expr) or difference.op != "sub":
        return None
    x, most = difference.args
    if isinstance(most, Expr) and most in found and found[most][1].kind == "max" and most.args[0] is x:
        return most
    return None


@of_roots
def with_sums(roots: Sequence[Expr], moments: bool = True) -> Sequence[Expr]:
    """The same with sums in the place of squares about a mean that no pass finds (it is an argument), and,
    unless `moments`, of all squares: for where a second look at the row costs little."""
    made: dict[Expr, Expr] = {}
    for n in toposort(roots):
        operands = [made[a] for a in n.args if isinstance(a, Expr)]
        if n.op == "moment_squares" and not (moments and operands[1].op == "moment_mean"):
            distance = operands[0] - operands[1]
            squares = row_sum(distance * distance)
            # The mean was rounded: what its error adds is taken off again.
            made[n] = squares if moments else where(squares == math.inf, squares, maximum(
                squares - row_sum(distance) * row_mean(distance), 0))
        else:
            made[n] = node(n.op, *operands) if operands else n
    return tuple(made[r] for r in roots)


@of_roots
def spelled_out(roots: Sequence[Expr]) -> Sequence[Expr]:
    """With the exponentials of a softmax as nodes, which are those that its sum has computed, and squares
    about a mean as sums: the second look at a row finds it in the cache."""
    roots = with_sums(roots, False)
    replacement: dict[Expr, Expr] = {}
    for n in toposort(roots):
        if n.op == "softmaxed":
            x, most, scale = substitute([a for a in n.args if isinstance(a, Expr)], replacement)
            replacement[n] = exp(x - most) * scale
    return tuple(substitute(roots, replacement))
