"""What a kernel over rows reads and writes: which operands are a row's own, which are read more than once,
which outputs are sums; and how its threads reach them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from fusionrt.graph import leaves, toposort
from fusionrt.layout import dense
from fusionrt.problem import Operand, Problem, of_problem
from fusionrt.rowwise import schedule, with_sums
from fusionrt.runtime.source import ITEMSIZE

RAGGED_PACKS = 16  # of a row, from which on single elements at its ends are few


def columns(problem: Problem) -> int:
    return math.prod(problem.sizes[:problem.row_dims])


def n_rows(problem: Problem) -> int:
    return math.prod(problem.sizes[problem.row_dims:])


def is_uniform(operand: Operand, problem: Problem) -> bool:
    """One value a row; where a row is one element, what the expression takes for that."""
    if any(operand.strides[:problem.row_dims]):
        return False
    return columns(problem) > 1 or operand.name in _declared(problem)


@of_problem
def _declared(problem: Problem) -> frozenset[str]:
    """Operands that the expression takes or makes for one value a row."""
    outputs = {o.name for o, root in zip(problem.outputs, problem.roots, strict=True) if root.uniform}
    return frozenset(outputs | {str(n.args[0]) for n in toposort(problem.roots)
                                if n.op == "arg" and n.uniform})


def varies(operand: Operand, problem: Problem) -> bool:
    """From row to row: not a weight."""
    return any(operand.strides[problem.row_dims:]) or n_rows(problem) == 1


def repeats(operand: Operand, problem: Problem) -> bool:
    """Within a row: a channel's weight, in the rows of groups of channels."""
    row = zip(problem.sizes[:problem.row_dims], operand.strides, strict=False)
    return any(size > 1 and not step for size, step in row)


@of_problem
def held(problem: Problem) -> Sequence[Operand]:
    """What a row consists of: operands that change all along it and from row to row."""
    return tuple(o for o in problem.inputs
                 if varies(o, problem) and not is_uniform(o, problem) and not repeats(o, problem))


def late(problem: Problem) -> list[Operand]:
    """What of a row only the last pass reads: a residual's gradient."""
    roots = with_sums(problem.roots)
    *earlier, _ = schedule(roots)
    read = leaves([n for one in earlier for n in (*(f.operand for f in one.found),
                                                  *(roots[k] for k in one.outputs))], "arg")
    return [o for o in held(problem) if o.name not in read]


@of_problem
def weights(problem: Problem) -> Sequence[Operand]:
    """What is read more than once: of columns alone, or alike in many of a row."""
    here = held(problem)
    return tuple(o for o in problem.inputs if o not in here and not is_uniform(o, problem))


@of_problem
def sums(problem: Problem) -> Sequence[int]:
    """Outputs that are a row of sums over the rows."""
    return tuple(k for k in problem.summed if not repeats(problem.outputs[k], problem))


@of_problem
def segment_sums(problem: Problem) -> Sequence[int]:
    """Outputs that are sums over segments of rows, and over rows: the gradients of channels' weights."""
    return tuple(k for k in problem.summed if repeats(problem.outputs[k], problem))


class Segments(NamedTuple):
    """Of a row there are `each`, as long as its inner dimensions; a value is kept for `kept` of them, which
    `repeats` rows after the other add to."""

    each: int
    kept: int
    repeats: int


def segments(problem: Problem) -> Segments | None:
    """None where there are no sums over segments, or not in the order of the rows."""
    n, sizes, found = problem.row_dims, problem.sizes, segment_sums(problem)
    steps = {problem.outputs[k].strides for k in found}
    if len(steps) != 1:
        return None
    strides = next(iter(steps))
    first = next((d for d, step in enumerate(strides) if step), n)
    last = next((d for d in range(first, len(sizes)) if not strides[d]), len(sizes))
    in_order = (*(0,) * first, *dense(sizes[first:last]), *(0,) * (len(sizes) - last))
    if not 0 < first < n <= last or strides != in_order:
        return None
    return Segments(math.prod(sizes[first:n]), math.prod(sizes[first:last]), math.prod(sizes[last:]))


@of_problem
def width(problem: Problem, alignment: int) -> int:
    """Elements of a pack: 16 bytes of the widest operand of whole rows (weights may take two accesses), as
    far as pointers are aligned, to `alignment` bytes, and rows are whole packs, or `ragged`."""
    if is_ragged(problem, alignment):
        return 16 // ITEMSIZE[along_rows(problem)[0].dtype]
    return _whole_width(problem, alignment)


def along_rows(problem: Problem) -> list[Operand]:
    """What is read or written all along each row of its own."""
    full = [o for o in problem.outputs if any(o.strides[:problem.row_dims])]
    return [*held(problem), *full]


@functools.lru_cache(4096)
def is_ragged(problem: Problem, alignment: int) -> bool:
    """Whether packs are looked at that rows begin and end within: where all that lies along a row begins at
    the same place between two multiples of 16 bytes, so that packs of all of it are aligned, and rows of
    whole packs would have four times as many. What a row draws goes by packs of its own, sums over rows by
    columns, and the first one of equals by their order."""
    along, passes = along_rows(problem), schedule(with_sums(problem.roots))
    ordered = any(f.kind == "first" for one in passes for f in one.found)
    if not along or problem.row_dims > 1 or problem.streams or any(problem.reduced) or ordered:
        return False
    pack = 16 // ITEMSIZE[along[0].dtype]
    alike = len({(o.dtype, tuple(s % pack for s in o.strides[1:])) for o in along}) == 1
    aligned = alignment >= 16 or len(along) == 1
    return (alike and aligned and all(o.strides[0] == 1 for o in along)
            and columns(problem) >= RAGGED_PACKS * pack and 4 * _whole_width(problem, alignment) <= pack)


def _whole_width(problem: Problem, alignment: int) -> int:
    operands = [o for o in (*problem.inputs, *problem.outputs) if o.strides[0] == 1]
    if alignment >= 16:
        operands = [o for o in operands if varies(o, problem)]
    most = max(1, min(16, alignment) // max([ITEMSIZE[o.dtype] for o in operands], default=4))
    found = math.gcd(most, problem.sizes[0])
    if 4 * found <= most and _is_in_one_piece(problem):  # to gather weights costs less
        return math.gcd(most, columns(problem))
    return found


def _is_in_one_piece(problem: Problem) -> bool:
    """Rows of several dimensions that lie in memory one element after the other, of the results at least: a
    pack may then reach from one of the innermost rows into the next. What does not is gathered."""
    full = [o for o in problem.outputs if any(o.strides[:problem.row_dims])]
    return bool(full) and not sums(problem) and all(is_dense(o, problem) for o in full)


def is_dense(operand: Operand, problem: Problem) -> bool:
    n = problem.row_dims
    each = zip(problem.sizes[:n], operand.strides[:n], dense(problem.sizes[:n]), strict=True)
    return all(size == 1 or own == step for size, own, step in each)


def access_mode(operand: Operand, problem: Problem, pack: int, ragged: bool) -> str:
    """vector: a pack of neighbours; splat: one value for a pack; gather: an offset per element; row."""
    inner, outer = operand.strides[0], operand.strides[1:]
    if is_uniform(operand, problem):
        return "row"
    if ragged:
        return "vector" if operand in along_rows(problem) else "gather"
    if problem.sizes[0] % pack:
        whole = is_dense(operand, problem) and all(s % pack == 0 for s in operand.strides[problem.row_dims:])
        return "vector" if whole else "gather"
    if (pack == 1 and problem.row_dims == 1) or (inner == 1 and all(s % pack == 0 for s in outer)):
        return "vector"
    return "splat" if inner == 0 else "gather"
