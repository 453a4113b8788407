"""Numba text for a problem over rows, and the callable that runs it on CPU tensors.

A kernel takes a range of rows. Each row is walked several times, while it is in the cache: a loop for
every pass of the schedule, and one for the exponentials of a softmax after the one for its maximum.
What is costly and needed again is kept in a row of scratch; everything else is computed anew.
Of an operand whose rows, and not columns, are neighbours in memory (a transposed gradient, say) several
rows at a time are turned over in scratch.

Sums over all rows (a weight's gradient) go along: after a few rows what these add to them, while they are in
the cache. Then a kernel takes a range of tasks with sums of their own; their number follows from the shape.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fusionrt.cpu import compiler, team
from fusionrt.cpu.calling import Arguments, PlanText, pays
from fusionrt.cpu.lines import coordinates, indented, of_several
from fusionrt.cpu.pointwise import (
    PLACES,
    SUM_TASKS,
    bases,
    buffered_sums,
    entering,
    in_tasks,
    inner_run,
    walk_down_together,
)
from fusionrt.cpu.signature import Signature, extents, function, known, pointers
from fusionrt.dtypes import ITEMSIZE, element_of
from fusionrt.expr import Expr
from fusionrt.graph import emit, leaves, toposort
from fusionrt.primitives import REDUCTION, SIZE
from fusionrt.problem import Operand, Output, Problem
from fusionrt.rowwise import schedule, spelled_out

BLOCK = 256           # elements added in the arithmetic's type, 8 or 32 by a lane, before float64 adds these
                      # sums, and between which lines of memory are asked for that a later loop needs
DRAWN_AHEAD = 8       # blocks of 512 random numbers: short rows share them
TURNED = 16           # rows that are turned over at a time: a cache line of float32
TURNED_COLUMNS = 1 << 14   # at most, so that they stay in a cache of 1 MB
PAD = 16              # elements between turned rows: columns are often a power of two, rows one cache set
CACHE_LINE = 64       # bytes
APART = 1024          # bytes between a buffer and whatever else is in memory; see `_apart`
LEAST_SUMMED = 256    # rows whose sums go along: a task has 32 of them at least
_COLUMN_TESTS = {"is_column": "==", "up_to_column": "<="}


# -- loops -----------------------------------------------------------------------------------------

class Loop(NamedTuple):
    """One walk over the columns of a row."""

    sums: tuple[Expr, ...]
    maxima: tuple[Expr, ...]
    outputs: tuple[int, ...]       # positions of the roots that can be written
    tops: tuple[Expr, ...] = ()    # the maxima relative to which exponentials are summed

    @property
    def operands(self) -> list[Expr]:
        return [a for n in (*self.sums, *self.maxima) for a in n.args if isinstance(a, Expr)]


def loops(roots: Sequence[Expr]) -> list[Loop]:
    made = []
    for one in schedule(roots):
        of_kind: dict[str, list[list[Expr]]] = {"sum": [], "max": [], "softmax": [], "moments": []}
        for f in one.found:
            of_kind[f.kind].append([value for value in f.values if value is not None])
        maxima = [values[0] for values in (*of_kind["max"], *of_kind["softmax"])]
        sums_of = (*of_kind["sum"], *of_kind["moments"])
        made.append(Loop(tuple(values[0] for values in sums_of), tuple(maxima), one.outputs))
        if of_kind["softmax"]:
            tops, sums = zip(*of_kind["softmax"], strict=True)
            made.append(Loop(sums, (), (), tops))
    return made


def kept_values(roots: Sequence[Expr], walks: Sequence[Loop]) -> dict[Expr, str]:
    """What is costly and needed by a later loop as well, and the name of its row of scratch."""
    kept: dict[Expr, str] = {}
    computed: set[Expr] = set()
    found: set[Expr] = set()
    for loop in walks:
        wanted = [*loop.operands, *(roots[i] for i in loop.outputs)]
        while again := [n for n in toposort(wanted, found | kept.keys())
                        if n in computed and n.primitive.is_costly and not n.uniform]:
            kept[again[-1]] = f"kept{len(kept)}"
        computed.update(toposort(wanted, found | kept.keys()))
        found.update(loop.sums, loop.maxima)
    return kept


# -- text ------------------------------------------------------------------------------------------

def generate(problem: Problem) -> str:
    """The kernel's text. The pointers of scratch are those of the first task."""
    return _written(_formed(problem))[0]


def _formed(problem: Problem) -> Problem:
    """With the sizes and strides of all problems that have the same text."""
    first, *others = problem.sizes
    sizes = TURNED_COLUMNS + (first > TURNED_COLUMNS), *(1 for _ in others)
    inputs, outputs = (tuple(o._replace(strides=tuple(min(s, 2) for s in o.strides)) for o in some)
                       for some in (problem.inputs, problem.outputs))
    return problem._replace(sizes=sizes, inputs=inputs, outputs=outputs)


@functools.lru_cache(1024)
def _written(problem: Problem) -> tuple[str, tuple[str, ...]]:
    """The text, and the names of its rows of kept values."""
    text = _Text(problem)
    return text.kernel(), tuple(text.kept.values())


def _operands(problem: Problem) -> tuple[Operand, ...]:
    return *problem.inputs, *problem.outputs


def _integers(problem: Problem, share: int = 0, tasks: int = 0) -> dict[str, int]:
    """`chunk`: how much of the range a thread has at a time; `share`: bytes of its scratch."""
    return extents(problem.sizes, _operands(problem)) | {
        "chunk": 0, "share": share, "seed": 0, "offset": 0, "tasks": tasks}


def turned(problem: Problem) -> list[Operand]:
    """The operands whose elements of a row are no neighbours, while those of rows are; others where rows are
    looked at more than once, or what is done takes longer than to move them."""
    if problem.row_dims > 1 or problem.sizes[0] > TURNED_COLUMNS:
        return []
    roots = spelled_out(problem.roots)
    long = len(loops(roots)) > 1 or any(n.primitive.is_costly for n in toposort(roots))
    apart = [o for o in (*problem.inputs, *problem.outputs) if o.strides[0] > 1]
    return [o for o in apart if o.strides[1] == 1 or long]


class _Text:
    """The kernel of one problem, written from top to bottom; `names` says what is known by then."""

    def __init__(self, problem: Problem) -> None:
        self.turned = {o.name: o for o in turned(problem)}
        inputs, outputs = (tuple(o._replace(strides=(1, *o.strides[1:])) if o.name in self.turned else o
                                 for o in some) for some in (problem.inputs, problem.outputs))
        self.problem = problem._replace(inputs=inputs, outputs=outputs)
        self.row_dims = range(problem.row_dims)
        self.operands = (*inputs, *outputs)
        self.inputs = {o.name: o for o in inputs}
        self.roots = spelled_out(problem.roots)
        self.sums = _of_sums(self.problem)
        self.loops = [loop._replace(outputs=tuple(k for k in loop.outputs if k in problem.full))
                      for loop in loops(self.roots)]
        self.kept = kept_values(self.roots, self.loops)
        self.written: dict[Expr, str] = {}   # kept values of the loops so far
        self.names: dict[Expr, str] = {}
        self.numbers = itertools.count()
        self.side_by_side = not (self.turned or problem.summed) and self._waits_for_memory()

    def kernel(self) -> str:
        p, n_dims = self.problem, len(self.problem.sizes)
        scratch = _scratch(p, self.kept.values(), self.turned.values())
        places = Signature(pointers(self.operands, scratch), tuple(_integers(p)), p.scalars).places()
        first, last = ("start", "stop") if self.sums is None else ("first", "last")
        strided = [self.turned.get(o.name, o) for o in self.operands]
        lines = [*known(places, p.sizes, strided, p.scalars),
                 f"columns = {' * '.join(f'n{d}' for d in self.row_dims)}", "row_size = acc_t(columns)",
                 f"mine = {first} // {places['chunk']} * {places['share']}",
                 *self._arrays(places | {name: f"{places[name]} + mine" for name in scratch})]
        body, begin = self._row_begins(), list[str]()
        if p.streams:
            lines += [f"seed = uint64_of({places['seed']})", f"offset = {places['offset']}"]
            begin = ["drawn = 0", "drawn_end = start * columns"]
            body += self._draws()
        body += [line for loop in self.loops for line in self._loop(loop)]
        if self.sums is not None:
            rows = " * ".join(f"n{d}" for d in range(len(self.row_dims), n_dims))
            body = in_tasks(p, places, rows, [*begin, *self._with_sums(body, self.sums)])
        elif self.turned:
            body = [*begin, *self._turning(body)]
        elif self.side_by_side:
            body = self._side_by_side(body)
        else:
            body = [*begin, "for row in range(start, stop):", *indented(body)]
        return function([*lines, *body], first, last)

    def _arrays(self, places: Mapping[str, str]) -> list[str]:
        p = self.problem
        lines = [f"{o.name}_{'memory' if o.name in self.turned else 'data'} = "
                 f"{element_of(o.dtype)}_at({places[o.name]})" for o in self.operands if o not in p.sums]
        lines += [f"{name} = {dtype}_at({places[f'bits_{s}']})" for s in p.streams
                  for name, dtype in ((f"bits_{s}_data", "uint16"), (f"words_{s}", "uint64"))]
        lines += [f"{name}_data = {p.acc}_at({places[name]})" for name in self.kept.values()]
        return lines + [f"{o.name}_data = {element_of(o.dtype)}_at({places[f'turned_{o.name}']})"
                        for o in self.turned.values()]

    def _coordinates(self, row: str) -> list[str]:
        return [f"rest = {row}", *coordinates("rest", range(len(self.row_dims), len(self.problem.sizes)))]

    def _row_begins(self) -> list[str]:
        """Its place in each operand, and the operands that have one value a row."""
        dims = range(len(self.row_dims), len(self.problem.sizes))
        lines = self._coordinates("row")
        lines += [f"{o.name}_row = " + (f"(row - first_row) * (columns + {PAD})" if o.name in self.turned else
                                        _offset(o, dims)) for o in self.operands]
        return lines + [f"{o.name} = load_{o.dtype}({o.name}_data[{o.name}_row])"
                        for o in self.problem.inputs if not self._varies(o)]

    def _turning(self, body: Sequence[str]) -> list[str]:
        """The rows, a few neighbours at a time, whose elements are fetched before and put back after."""
        lines = [*self._coordinates("first_row"),
                 f"last_row = min(first_row + {TURNED}, first_row + n1 - c1, stop)"]
        lines += [f"{o.name}_corner = {_offset(o, range(1, len(o.strides)))}" for o in self.turned.values()]
        lines += [*self._moved(True), "for row in range(first_row, last_row):", *indented(body),
                  *self._moved(False), "first_row = last_row"]
        return ["first_row = start", "while first_row < stop:", *indented(lines)]

    def _moved(self, fetched: bool) -> list[str]:
        """Inputs from memory, or outputs to it, along neighbours where there are some."""
        of_rows: list[str] = []
        of_columns: list[str] = []
        for o in self.turned.values():
            near = f"{o.name}_data[r * (columns + {PAD}) + j]"
            far = f"{o.name}_memory[{o.name}_corner{_step(o)} + r * {_stride(o, 1)}]"
            if fetched == (o.name in self.inputs):
                (of_rows if o.strides[1] == 1 else of_columns).append(
                    f"{near} = {far}" if fetched else f"{far} = {near}")
        each_row, each_column = "for r in range(last_row - first_row):", "for j in range(columns):"
        lines = [each_column, f"    {each_row}", *indented(indented(of_rows))] if of_rows else []
        return lines + (
            [each_row, f"    {each_column}", *indented(indented(of_columns))] if of_columns else [])

    def _with_sums(self, body: Sequence[str], sums: Problem) -> list[str]:
        """The rows, a few and then what they add to the sums."""
        place = coordinates("row", range(1, len(sums.sizes)))
        alone = [*place, *entering(sums.inputs), *inner_run(sums, sums.outputs, [], [])]
        group = [f"end = min(top_row + {PLACES}, stop)", "for row in range(top_row, end):", *indented(body),
                 "c0 = 0", "length = n0", *bases(sums.outputs),
                 *walk_down_together(sums, place, alone, "top_row", "end")]
        return [f"for top_row in range(start, stop, {PLACES}):", *indented(group)]

    def _waits_for_memory(self) -> bool:
        """Whether an element takes a few instructions, and comes from one place: where several operands are
        read, a core has enough on its way."""
        rows = [o for o in self.problem.inputs if self._varies(o) and any(o.strides[len(self.row_dims):])]
        slow = [n for n in toposort(self.roots)
                if n.op == "taken" or (n.primitive.is_costly and not n.uniform)]
        return len(rows) == 1 and not (slow or self.kept or self.problem.streams or self.problem.taken)

    def _side_by_side(self, body: Sequence[str]) -> list[str]:
        """Rows of as many parts of the task at a time: a core that reads in several places has more of memory
        on its way. Each line of a row is written for all of them, with names of their own. What is left over
        is done again, that a row's bits be those of any other division into tasks."""
        of_each = of_several(body, PLACES)
        together = [f"row_{k} = min(row + {k} * part, stop - 1)" for k in range(PLACES)]
        for line in body:
            is_loop = line.lstrip().startswith("for ")
            together += [line] if is_loop else of_each(line)
        return [f"part = (stop - start + {PLACES - 1}) // {PLACES}", "for row in range(start, start + part):",
                *indented(together)]

    def _draws(self) -> list[str]:
        fills = [f"    fill_random(words_{s}, drawn // 512, n_blocks, seed, "
                 f"uint64_of(offset + {s.removeprefix('random')}))" for s in self.problem.streams]
        return ["begin = row * columns", "if begin + columns > drawn_end:",
                "    drawn = begin - (begin & 511)",
                f"    ahead = min({DRAWN_AHEAD}, (stop * columns - drawn + 511) // 512)",
                "    n_blocks = max(ahead, (begin + columns - drawn + 511) // 512)", *fills,
                "    drawn_end = drawn + 512 * n_blocks"]

    def _varies(self, operand: Operand) -> bool:
        """Within a row."""
        return any(operand.strides[d] for d in self.row_dims)

    def _fresh(self, stem: str) -> str:
        return f"{stem}{next(self.numbers)}"

    # -- what is one value a row -----------------------------------------------------------------

    def _uniform(self, roots: Iterable[Expr]) -> list[str]:
        """What the roots need of that, and which columns they ask for."""
        lines: list[str] = []
        for n in toposort(roots, self.names):
            if n.op in _COLUMN_TESTS or n.op == "taken":
                column = self._fresh("column")
                lines.append(f"{column} = {self._column(n.args[-1])}")
                if n.op == "taken":
                    self.names[n] = self._fresh("taken")
                    lines += self._taken(n, column)
                else:
                    self.names[n] = f"(column + j {_COLUMN_TESTS[n.op]} {column})"
            elif n.uniform:
                statements, (self.names[n],) = emit([n], "{} = {}", self.names, self._fresh("u") + "_")
                lines += statements
        return lines

    def _column(self, column: Any) -> str:
        """An integer: as it lies in memory, because acc_t may round it, unless it is computed."""
        operand = self.inputs.get(str(column.args[0])) if column.op == "arg" else None
        if operand is not None and "int" in operand.dtype and not self._varies(operand):
            return f"int64_of({operand.name}_data[{operand.name}_row])"
        if not column.uniform and (operand is None or self._varies(operand)):
            raise TypeError(f"{self.problem.name}: a column must be one value a row, got one that varies "
                            "along it")
        return f"store_int64(acc_t({self.names.get(column, str(column.args[0]))}))"

    def _taken(self, n: Expr, column: str) -> list[str]:
        """Of an operand the element in a column, 0 outside of the row."""
        tensor = n.args[0]
        if not isinstance(tensor, Expr) or str(tensor.args[0]) not in self.inputs:
            raise TypeError(f"{self.problem.name}: taken() reads a tensor argument, got an expression")
        o, name, rest = self.inputs[str(tensor.args[0])], self.names[n], self._fresh("rest")
        lines = [f"{name} = acc_t(0)", f"if {column} >= 0 and {column} < columns:", f"    {rest} = {column}",
                 f"    at = {o.name}_row"]
        for d in self.row_dims:
            lines += [f"    at += {rest} % n{d} * {_stride(o, d)}", f"    {rest} = {rest} // n{d}"]
        return [*lines, f"    {name} = load_{o.dtype}({o.name}_data[at])"]

    # -- a walk over the columns -----------------------------------------------------------------

    def _loop(self, loop: Loop) -> list[str]:
        in_full = [i for i in loop.outputs
                   if self._varies(self.problem.outputs[i]) or not self.roots[i].uniform]
        once = [i for i in loop.outputs if i not in in_full]
        tops = {top: self._fresh("finite") for top in loop.tops}
        lines = [f"{name} = finite_top({self.names[top]})" for top, name in tops.items()]
        before, self.names = self.names, self.names | tops
        roots = [*loop.operands, *(self.roots[i] for i in in_full)]
        lines += self._uniform([*roots, *(self.roots[i] for i in once)])
        lines += [_store(self.problem.outputs[i], "row", self.names[self.roots[i]]) for i in once]
        if roots:
            lines += self._walk(loop, in_full, roots)
        self.names |= {top: before[top] for top in tops}
        return lines

    def _walk(self, loop: Loop, in_full: Sequence[int], roots: Sequence[Expr]) -> list[str]:
        sums, maxima = [self._fresh("sum") for _ in loop.sums], [self._fresh("max") for _ in loop.maxima]
        reads, body, results = self._body(roots)
        outputs = [self.problem.outputs[i] for i in in_full]
        values = iter(results)
        # Means are added up in float64, so that the mean of equal elements is one of them.
        means = {name for name, n in zip(sums, loop.sums, strict=True) if n.op == "moment_mean"}
        body += [f"{name} = plus({name}, {f'float64_of({value})' if name in means else value})"
                 for name, value in zip(sums, values, strict=False)]
        for name, value in zip(maxima, values, strict=False):
            body += [f"{name} = larger({name}, {value})", f"bits_{name} = largest_bits(bits_{name}, {value})"]
        body += [_store(o, f"base{_step(o)}", value)
                 for o, value in zip(outputs, results[len(loop.operands):], strict=True)]
        inner = [f"column = {self._first_column()}",
                 *(f"{o.name}_base = {o.name}_row + {_offset(o, self.row_dims[1:])}"
                   for o in (*reads, *outputs)),
                 *(_load(o) for o in reads if not o.strides[0])]
        ahead = self._ahead(loop)
        if sums or ahead:
            inner += [f"for first in range(0, n0, {BLOCK}):",
                      *(f"    {name} = {'float64_of' if name in means else 'acc_t'}(0)" for name in sums),
                      f"    for j in range(first, min(first + {BLOCK}, n0)):", *indented(indented(body)),
                      *(f"    total_{name} += float64_of({name})" for name in sums), *indented(ahead)]
        else:
            inner += ["for j in range(n0):", *indented(body)]
        for d in self.row_dims[1:]:
            inner = [f"for c{d} in range(n{d}):", *indented(inner)]
        self.names |= dict(zip((*loop.sums, *loop.maxima), (*sums, *maxima), strict=True))
        return [*(f"total_{name} = float64_of(0)" for name in sums),
                *(f"{name} = -acc_t(inf)" for name in maxima),
                *(f"bits_{name} = no_bits(acc_t(0))" for name in maxima), *inner,
                *(f"{name} = acc_t(total_{name}{' / float64_of(columns)' if name in means else ''})"
                  for name in sums),
                *(f"{name} = maximum_found({name}, bits_{name})" for name in maxima)]

    def _ahead(self, loop: Loop) -> list[str]:
        """Of rows side by side, the core waits for the lines that it writes: asked for by the loop before the
        last (layer_norm: 8 % less). Other rows are computed for so long that the next one can come
        meanwhile (softmax: 15 %)."""
        if len(self.loops) == 1 or self.problem.row_dims > 1 or self.turned:
            return []
        if self.side_by_side:
            of_loop, kind, operands = self.loops[-2], "prefetch_to_write", self.problem.outputs
        else:
            of_loop, kind, operands = self.loops[-1], "prefetch", self.problem.inputs
        lines: list[str] = []
        for o in operands:
            if loop is of_loop and o.strides[0] == 1 and o.strides[1] > 1:
                line = CACHE_LINE // getattr(torch, o.dtype).itemsize
                place = f"{o.name}_row{'' if self.side_by_side else f' + {_stride(o, 1)}'} + k"
                lines += [f"for k in range(first, min(first + {BLOCK}, n0), {line}):",
                          f"    {kind}({o.name}_data, {place})"]
        return lines

    def _body(self, roots: Sequence[Expr]) -> tuple[list[Operand], list[str], list[str]]:
        """Of an element: the operands that it reads, what is computed, and the names of the roots."""
        known = self.names | self.written
        needed = dict.fromkeys(toposort(roots, known))
        used = {str(n.args[0]) for n in needed if n.op == "arg"}
        reads = [o for o in self.problem.inputs if o.name in used and self._varies(o)]
        lines = [f"{n.args[0]} = bits_{n.args[0]}_data[begin - drawn + column + j]"
                 for n in needed if n.op == "random"]
        lines += [_load(o) for o in reads if o.strides[0]]
        at_hand = {*roots, *(a for n in needed for a in n.args)}
        lines += [f"{name} = {name}_data[column + j]" for n, name in self.written.items() if n in at_hand]
        keeping = {n: name for n, name in self.kept.items() if n in needed}
        statements, results = emit([*roots, *keeping], "{} = {}", known, self._fresh("t") + "_")
        lines += statements
        lines += [f"{name}_data[column + j] = {value}"
                  for name, value in zip(keeping.values(), results[len(roots):], strict=True)]
        self.written |= keeping
        return reads, lines, results[:len(roots)]

    def _first_column(self) -> str:
        place = [" * ".join((f"c{d}", *(f"n{inner}" for inner in range(d)))) for d in self.row_dims[1:]]
        return " + ".join(place) or "0"


def _stride(operand: Operand, d: int) -> str:
    return str(operand.strides[d]) if operand.strides[d] in (0, 1) else f"{operand.name}_s{d}"


def _offset(operand: Operand, dims: Iterable[int]) -> str:
    return " + ".join(f"c{d} * {_stride(operand, d)}" for d in dims if operand.strides[d]) or "0"


def _step(operand: Operand) -> str:
    stride = operand.strides[0]
    return ("", " + j")[stride] if stride in (0, 1) else f" + j * {_stride(operand, 0)}"


def _load(operand: Operand) -> str:
    name = operand.name
    return f"{name} = load_{operand.dtype}({name}_data[{name}_base{_step(operand)}])"


def _store(output: Operand, at: str, value: str) -> str:
    return f"{output.name}_data[{output.name}_{at}] = store_{output.dtype}(acc_t({value}))"


# -- sums over the rows ----------------------------------------------------------------------------

def takes_sums(problem: Problem) -> bool:
    """Whether the kernel over the rows takes the sums of columns along: where these are of arguments alone,
    and cheap, as they are computed apart."""
    sums = _of_sums(problem)
    if sums is None or problem.row_dims != 1 or math.prod(problem.sizes[1:]) < LEAST_SUMMED:
        return False
    of_columns = all(o.strides[0] == 1 and not any(o.strides[1:]) for o in sums.outputs)
    of_arguments = not any(n.op == "random" or n.primitive.of_row in (REDUCTION, SIZE)
                           for n in toposort(sums.roots))
    return of_columns and of_arguments and not buffered_sums(sums) and not turned(problem)


def _of_sums(problem: Problem) -> Problem | None:
    """What is summed over the rows, if anything is."""
    if not any(problem.reduced):
        return None
    of_sums = [(root, o) for root, o, reduced in zip(
        problem.roots, problem.outputs, problem.reduced, strict=True) if reduced]
    roots, outputs = zip(*of_sums, strict=True)
    read = leaves(roots, "arg")
    return problem._replace(roots=roots, outputs=outputs, reduced=(True,) * len(roots), streams=(),
                            inputs=tuple(o for o in problem.inputs if o.name in read))


# -- running ---------------------------------------------------------------------------------------

WORK = 2  # additions that an element is worth: two threads pay from 16 Ki elements on


def build(problem: Problem, results: Sequence[Output], n_args: int) -> Callable[..., Any]:
    """A callable of the operator's arguments (and random numbers) that allocates and computes."""
    run = compiler.function(generate(problem), problem.accuracy, problem.name)
    columns, rows = math.prod(problem.sizes[:problem.row_dims]), math.prod(problem.sizes[problem.row_dims:])
    places, share = _apart(_scratch(problem, _written(_formed(problem))[1], turned(problem)))
    summed, work = problem.summed, WORK * rows * columns
    tasks = max(1, min(SUM_TASKS, rows // 32, work // team.SERIAL_BELOW))
    arguments = Arguments(pointers(_operands(problem), places), _integers(problem, share, tasks),
                          problem.scalars)
    text = PlanText(problem, results, run, arguments)
    text.divide(tasks if summed else rows, pays(work), 1)
    if share:
        text.scratch(share, places)
    if problem.streams:
        text.draw()
    if summed:
        text.launch_tasks(tasks, dict.fromkeys(summed, columns))
    else:
        text.launch()
    return text.compile(n_args, lambda: build(problem, results, n_args))


def _scratch(problem: Problem, kept: Iterable[str], turned: Iterable[Operand]) -> dict[str, int]:
    """Bytes of each of a task's buffers."""
    columns = math.prod(problem.sizes[:problem.row_dims])
    drawn = max(512 * DRAWN_AHEAD, columns + 1024) * 2
    row = columns * (8 if problem.acc == "float64" else 4)
    return {**{f"bits_{s}": drawn for s in problem.streams}, **dict.fromkeys(kept, row),
            **{f"turned_{o.name}": TURNED * (columns + PAD) * ITEMSIZE[o.dtype] for o in turned}}


def _apart(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where a task's buffers lie, and how many bytes they take.

    A loop asks whether what it writes begins within the few vectors behind what it reads, and then goes
    element by element. Sums have another order then: a row's bits would depend on what lies beside it.
    """
    ends = list(itertools.accumulate((-(-size // 64) * 64 + APART for size in sizes.values()), initial=APART))
    return dict(zip(sizes, ends, strict=False)), ends[-1] if sizes else 0
