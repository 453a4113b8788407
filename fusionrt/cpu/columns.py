"""Sums and maxima of many rows that lie across memory, on the CPU: blocks of columns, of each of which a
task walks down all rows, with the sums in the cache.

Where there are few columns, tasks have parts of the rows instead, and sums of all columns (`pointwise`): of
many columns these would be more than what is read. Elements that follow from the sums (a softmax's gradient)
are computed by the same task, if its rows are few enough to stay in the cache (`problem.then`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusionrt.cpu import compiler, team
from fusionrt.cpu.calling import Arguments, PlanText, pays
from fusionrt.cpu.lines import coordinates, indented
from fusionrt.cpu.pointwise import (
    BLOCK,
    BUFFER,
    TASKS,
    TOPS,
    bases,
    buffered_sums,
    entering,
    fetched,
    gathers,
    goes_together,
    inner_run,
    outputs_of,
    step,
    walk_down,
    walk_down_together,
)
from fusionrt.cpu.signature import Signature, extents, function, known, pointers
from fusionrt.dtypes import element_of
from fusionrt.graph import emit
from fusionrt.problem import Operand, Output, Problem

LEAST_BLOCKS = 16  # of columns, for many threads
LANES = 16         # columns that a block has a multiple of
KEPT = 1 << 19     # bytes of a block's columns, of which a task computes the elements while it has them


def serves(problem: Problem) -> bool:
    kept = {tuple(map(bool, o.strides)) for o in problem.outputs}
    return (problem.across and len(kept) == 1 and bool(problem.outputs[0].strides[0]) and not problem.streams
            and _blocks(problem) >= LEAST_BLOCKS)


def width(problem: Problem) -> int:
    """Columns of a block: as many as there is room for."""
    if problem.then is None:
        return BLOCK
    rows = math.prod(problem.sizes[d] for d in _dims(problem, False))
    a_column = rows * sum(getattr(torch, o.dtype).itemsize for o in problem.inputs if o.strides[0])
    return min(BLOCK, KEPT // max(1, a_column) // LANES * LANES)


def _blocks(problem: Problem) -> int:
    columns = width(problem)
    of_one = -(-problem.sizes[0] // columns) if columns else 0
    return of_one * math.prod(problem.sizes[d] for d in _dims(problem, True))


def _dims(problem: Problem, kept: bool) -> list[int]:
    """All but the innermost one."""
    strides = problem.outputs[0].strides
    return [d for d in range(1, len(problem.sizes)) if bool(strides[d]) == kept]


def generate(problem: Problem) -> str:
    """The kernel's text. The pointers of scratch are those of the first task."""
    inputs = problem.inputs
    outputs, scalars = _written(problem)
    buffered, means, tops = (buffered_sums(problem), outputs_of(problem, ("moment_mean",)),
                             outputs_of(problem, TOPS))
    near, operands, scratch = fetched(problem), _operands(problem), _scratch(problem)
    places = Signature(pointers(operands, scratch), tuple(_integers(problem)), scalars).places()
    own = {name: f"{places[name]} + task * {BUFFER}" for name in scratch}
    lines = known(places, problem.sizes, operands, scalars)
    lines += [f"{o.name}_data = {element_of(o.dtype)}_at({places[o.name]})" for o in inputs]
    lines += [f"{o.name}_result = {element_of(o.dtype)}_at({places[o.name]})" for o in outputs]
    tasks = places["tasks"]
    lines += [f"width = {places['width']}", "blocks = (n0 + width - 1) // width"]

    row = [*coordinates("row", _dims(problem, False)), *entering(problem.inputs),
           *inner_run(problem, problem.outputs, buffered, means)]
    rows = " * ".join(f"n{d}" for d in _dims(problem, False)) or "1"
    block = ["c0 = block % blocks * width", "number = block // blocks",
             *coordinates("number", _dims(problem, True)), "length = min(n0 - c0, width)"]
    for o in problem.outputs:
        block += [f"{o.name}_data = float64_at({own[f'sums_{o.name}']} - c0 * 8)",
                  "for j in range(length):",
                  f"    {o.name}_data[c0 + j] = float64_of({'-inf' if o in tops else '0'})"]
    walk = (walk_down_together(problem, coordinates("row", _dims(problem, False)), row)
            if goes_together(problem) else
            walk_down(row, [o for o in buffered if gathers(problem, o)], tops))
    block += [*(f"{o.name}_base = c0" for o in problem.outputs), "start = 0", f"stop = {rows}", *walk]
    block += _elements(problem) if problem.then else [*bases(outputs), "for j in range(length):", *(
        f"    {o.name}_result[{o.name}_base + j] = store_{o.dtype}({o.name}_data[c0 + j])" for o in outputs)]
    begin = [f"buffer_{o.name} = {problem.acc}_at({own[f'buffer_{o.name}']})" for o in buffered]
    begin += [f"near_{o.name} = {element_of(o.dtype)}_at({own[f'near_{o.name}']})" for o in near]
    begin += [f"value_{name} = {problem.acc}_at({own[f'value_{name}']})" for name, _ in problem.found]
    count = " * ".join(["blocks", *(f"n{d}" for d in _dims(problem, True))])
    loop = [*begin, f"for block in range({count} * task // {tasks}, {count} * (task + 1) // {tasks}):",
            *indented(block)]
    return function([*lines, "for task in range(first, last):", *indented(loop)], "first", "last")


def _operands(problem: Problem) -> tuple[Operand, ...]:
    return *problem.inputs, *_written(problem)[0]


def _integers(problem: Problem, tasks: int = 0) -> dict[str, int]:
    return extents(problem.sizes, _operands(problem)) | {"tasks": tasks, "width": width(problem)}


def _written(problem: Problem) -> tuple[tuple[Operand, ...], tuple[str, ...]]:
    """The outputs, and the numbers that the whole kernel needs."""
    then = problem.then
    if then is None:
        return problem.outputs, problem.scalars
    return then.outputs, tuple(dict.fromkeys((*problem.scalars, *then.scalars)))


def _scratch(problem: Problem) -> list[str]:
    return [*(f"buffer_{o.name}" for o in buffered_sums(problem)),
            *(f"near_{o.name}" for o in fetched(problem)), *(f"sums_{o.name}" for o in problem.outputs),
            *(f"value_{name}" for name, _ in problem.found)]


def _elements(problem: Problem) -> list[str]:
    """Of the block's columns, once more down all rows, given what was found."""
    then = problem.then
    assert then is not None
    found = dict(problem.found)
    values = [line for name, output in found.items() for line in (
        "for j in range(length):", f"    value_{name}[j] = acc_t({output}_data[c0 + j])")]
    read = [o for o in then.inputs if o.name not in found]
    statements, results = emit(then.roots, "{} = {}", stem="e")
    each = [*(f"{o.name} = load_{o.dtype}({o.name}_data[{o.name}_base + {step(o)}])"
              for o in read if o.strides[0]),
            *(f"{name} = value_{name}[j]" for name in found), *statements,
            *(f"{o.name}_result[{o.name}_base + {step(o)}] = store_{o.dtype}(acc_t({result}))"
              for o, result in zip(then.outputs, results, strict=True))]
    row = [*coordinates("row", _dims(problem, False)), *entering(read), *bases(then.outputs),
           "for j in range(length):", *indented(each)]
    return [*values, "for row in range(start, stop):", *indented(row)]


def build(problem: Problem, results: Sequence[Output], n_args: int) -> Callable[..., Any]:
    """A callable of the operator's arguments."""
    run = compiler.function(generate(problem), problem.accuracy, problem.name)
    _, scalars = _written(problem)
    count, scratch = problem.domain.numel, _scratch(problem)
    tasks = max(1, min(TASKS, _blocks(problem), count // team.SERIAL_BELOW))
    arguments = Arguments(pointers(_operands(problem), scratch), _integers(problem, tasks), scalars)
    text = PlanText(problem, results, run, arguments)
    text.divide(tasks, tasks > 1 and pays(count), 1)
    text.memory_of_tasks(tasks * len(scratch) * BUFFER // 8)
    text.pointers |= {name: f"own.data_ptr() + {k * tasks * BUFFER}" for k, name in enumerate(scratch)}
    text.launch()
    return text.compile(n_args, lambda: build(problem, results, n_args))
