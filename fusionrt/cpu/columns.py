"""Sums and maxima of many rows that lie across memory, on the CPU: blocks of columns, of each of which a
task walks down all rows, with the sums in the cache.

Where there are few columns, tasks have parts of the rows instead, and sums of all columns (`pointwise`): of
many columns these would be more than what is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fusionrt.cpu import compiler, team
from fusionrt.cpu.calling import Arguments, Text, pays
from fusionrt.cpu.lines import coordinates, indented
from fusionrt.cpu.pointwise import (
    BLOCK,
    BUFFER,
    ELEMENT,
    TASKS,
    TOPS,
    bases,
    buffered_sums,
    entering,
    fetched,
    gathers,
    inner_run,
    outputs_of,
    walk_down,
    walk_down_together,
)
from fusionrt.problem import Output, Problem

LEAST_BLOCKS = 16  # of columns, for many threads


def serves(problem: Problem) -> bool:
    kept = {tuple(map(bool, o.strides)) for o in problem.outputs}
    return (problem.across and len(kept) == 1 and bool(problem.outputs[0].strides[0]) and not problem.streams
            and _blocks(problem) >= LEAST_BLOCKS)


def _blocks(problem: Problem) -> int:
    return -(-problem.sizes[0] // BLOCK) * math.prod(problem.sizes[d] for d in _dims(problem, True))


def _dims(problem: Problem, kept: bool) -> list[int]:
    """All but the innermost one."""
    strides = problem.outputs[0].strides
    return [d for d in range(1, len(problem.sizes)) if bool(strides[d]) == kept]


def generate(problem: Problem) -> str:
    """`pointers`: inputs, outputs, scratch of the first task."""
    inputs, outputs, n_dims = problem.inputs, problem.outputs, len(problem.sizes)
    buffered, means, tops = (buffered_sums(problem), outputs_of(problem, ("moment_mean",)),
                             outputs_of(problem, TOPS))
    near = fetched(problem)
    names = [*(o.name for o in (*inputs, *outputs)), *(f"buffer_{o.name}" for o in buffered),
             *(f"near_{o.name}" for o in near), *(f"sums_{o.name}" for o in outputs)]
    places = {name: f"pointers[{k}]" for k, name in enumerate(names)}
    lines = [f"n{d} = integers[{d}]" for d in range(n_dims)]
    lines += [f"{o.name}_s{d} = integers[{n_dims * (1 + k) + d}]" for k, o in enumerate((*inputs, *outputs))
              for d in range(n_dims) if o.strides[d] not in (0, 1)]
    lines += [f"{name} = acc_t(scalars[{k}])" for k, name in enumerate(problem.scalars)]
    lines += [f"{o.name}_data = {ELEMENT.get(o.dtype, o.dtype)}_at({places[o.name]})" for o in inputs]
    lines += [f"{o.name}_found = {ELEMENT.get(o.dtype, o.dtype)}_at({places[o.name]})" for o in outputs]
    lines.append(f"blocks = (n0 + {BLOCK - 1}) // {BLOCK}")

    row = [*coordinates("row", _dims(problem, False)), *entering(inputs),
           *inner_run(problem, outputs, buffered, means)]
    rows = " * ".join(f"n{d}" for d in _dims(problem, False)) or "1"
    block = [f"c0 = block % blocks * {BLOCK}", "number = block // blocks",
             *coordinates("number", _dims(problem, True)), f"length = min(n0 - c0, {BLOCK})"]
    for o in outputs:
        block += [f"{o.name}_data = float64_at({places[f'sums_{o.name}']} + task * {BUFFER} - c0 * 8)",
                  "for j in range(length):",
                  f"    {o.name}_data[c0 + j] = float64_of({'-INF' if o in tops else '0'})"]
    walk = (walk_down(row, [o for o in buffered if gathers(problem, o)], tops) if buffered or near else
            walk_down_together(problem, coordinates("row", _dims(problem, False)), row))
    block += [*(f"{o.name}_base = c0" for o in outputs), "start = 0", f"stop = {rows}", *walk,
              *bases(outputs),
              "for j in range(length):",
              *(f"    {o.name}_found[{o.name}_base + j] = store_{o.dtype}({o.name}_data[c0 + j])"
                for o in outputs)]
    own = [f"buffer_{o.name} = {problem.acc}_at("
           f"{places[f'buffer_{o.name}']} + task * {BUFFER})" for o in buffered]
    own += [f"near_{o.name} = {ELEMENT.get(o.dtype, o.dtype)}_at("
            f"{places[f'near_{o.name}']} + task * {BUFFER})" for o in near]
    count = " * ".join(["blocks", *(f"n{d}" for d in _dims(problem, True))])
    tasks = f"integers[{n_dims * (1 + len(inputs) + len(outputs))}]"
    loop = [*own, f"for block in range({count} * task // {tasks}, {count} * (task + 1) // {tasks}):",
            *indented(block)]
    return "\n".join(["def kernel(pointers, integers, scalars, first, last):",
                      *indented([*lines, "for task in range(first, last):", *indented(loop)]), ""])


def build(problem: Problem, results: Sequence[Output], n_args: int) -> Callable[..., Any]:
    """A callable of the operator's arguments."""
    run = compiler.function(generate(problem), problem.accuracy, problem.name)
    integers = [*problem.sizes, *(s for o in (*problem.inputs, *problem.outputs) for s in o.strides)]
    count = problem.domain.numel
    scratch = len(buffered_sums(problem)) + len(fetched(problem)) + len(results)
    tasks = max(1, min(TASKS, _blocks(problem), count // team.SERIAL_BELOW))
    text = Text(problem, results, run, Arguments(
        len(problem.inputs) + len(results) + scratch, [*integers, tasks], len(problem.scalars)))
    text.divide(tasks, tasks > 1 and pays(count), 1)
    text.memory_of_tasks(tasks * scratch * BUFFER // 8)
    text.pointers += [f"own.data_ptr() + {k * tasks * BUFFER}" for k in range(scratch)]
    text.launch()
    return text.compile(n_args)
