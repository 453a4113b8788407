"""How problems without rows are launched, and how the partial sums that kernels leave are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusionrt.layout import Reduction
from fusionrt.problem import Output, Problem
from fusionrt.runtime import accumulators, pointwise, reduction_cut, vectors
from fusionrt.runtime.access import REDUCE_BLOCK
from fusionrt.runtime.parts import Part, split
from fusionrt.runtime.plan_text import PlanText, Values
from fusionrt.runtime.source import Specialisation


def write(text: PlanText, problem: Problem, alignment: int, values: Values) -> None:
    # The one that writes full outputs last: they may take the memory of operands.
    for part in reversed(split(problem)):
        _write_part(text, part, alignment, values)


def sources(problem: Problem) -> list[Specialisation]:
    """All that a call on 16-byte aligned tensors compiles."""
    made = []
    for part in split(problem):
        made.append(pointwise.generate(part.problem, 16, part.rows))
        if part.rows is None or reduction_cut.needs_no_other(part.problem, part.rows):
            continue
        if part.problem.across:
            made.append(pointwise.generate_join(part.problem))
        else:
            made += [pointwise.generate_sum(part.problem, dtype) for dtype in _sum_dtypes(part)]
    return made


def _write_part(text: PlanText, part: Part, alignment: int, values: Values) -> None:
    problem, rows = part.problem, part.rows
    source, width = pointwise.generate(problem, alignment, rows), vectors.vector_width(problem, alignment)
    if rows is None:
        kernel, blocks, block = pointwise.grid(problem, width)
        text.launch(source, blocks, block, values | {"count": problem.domain.numel}, kernel=kernel)
        return
    grid, chunks = reduction_cut.reduction_grid(problem, rows, width)
    if reduction_cut.is_joined(problem, rows, width):
        _write_joined(text, part, source, grid, values)
        return
    if problem.across:
        _write_across(text, part, source, grid, chunks, values)
        return
    reduced = [k for k in part.outputs if text.call.problem.reduced[k]]
    acc = getattr(torch, problem.acc)
    text.allocate("partials", (len(reduced) * chunks * rows.kept,), (1,), acc)
    text.lines.append("p_partials = partials.data_ptr()")
    text.launch(source, grid, REDUCE_BLOCK, values | {"partials": "p_partials"})
    sums = list(zip(reduced, _sum_dtypes(part), strict=True))
    write_sums(text, problem, sums, rows, part.kept, chunks * problem.abreast)


def _write_joined(text: PlanText, part: Part, source: Specialisation, grid: int, values: Values) -> None:
    """The block that ends last joins what all have left."""
    problem, call = part.problem, text.call
    for k in part.outputs:
        operand, result = call.problem.outputs[k], call.results[k]
        if call.problem.reduced[k]:
            text.allocate(operand.name, result.shape, result.strides, result.dtype)
            values = values | {operand.name: f"{operand.name}.data_ptr()"}
    n_values, acc = accumulators.n_values(accumulators.groups(problem)), getattr(torch, problem.acc)
    text.allocate("partials", (n_values * grid,), (1,), acc)
    text.launch(source, grid, REDUCE_BLOCK, values | {"partials": "partials.data_ptr()", **text.arrived()})


def _joined(kept: int, chunks: int, alone: bool = False) -> Values:
    return {"chunks": chunks, "kept": kept, "side": accumulators.side(kept, chunks, alone)}


def _write_across(text: PlanText, part: Part, source: Specialisation, grid: int, chunks: int,
                  values: Values) -> None:
    """Partial values of all rows, then what follows from them; both at once where one block has a row."""
    problem, rows = part.problem, part.rows
    assert rows is not None
    for operand, result in zip(problem.outputs, text.call.results, strict=True):
        text.allocate(operand.name, result.shape, result.walk_strides, result.dtype)
        values = values | {operand.name: f"{operand.name}.data_ptr()"}
    parted = chunks > 1 or problem.inner > 1 or problem.abreast > 1
    if parted:
        n_values, acc = accumulators.n_values(accumulators.groups(problem)), getattr(torch, problem.acc)
        text.allocate("partials", (n_values * chunks * rows.kept,), (1,), acc)
        kept, chunks = part.kept // problem.inner, chunks * problem.abreast
        each = chunks * problem.inner
        values = values | {"partials": "partials.data_ptr()", **_joined(kept, each), "chunks": chunks}
    text.launch(source, grid, REDUCE_BLOCK, values)
    if parted:
        text.launch(pointwise.generate_join(problem), accumulators.blocks(kept, each), accumulators.BLOCK,
                    values, waits=True)
    for operand, result in zip(problem.outputs, text.call.results, strict=True):
        if tuple(result.walk_strides) != tuple(result.strides):
            text.more(f"{operand.name} = {operand.name}.contiguous()")


def write_sums(text: PlanText, problem: Problem, sums: Sequence[tuple[int, str]], rows: Reduction | None,
               kept: int, chunks: int) -> None:
    """Add the partial sums of outputs (place, dtype), of each `kept` in `chunks`. Their memory has the order
    of the walk until the last lines."""
    size = chunks * kept * getattr(torch, problem.acc).itemsize
    before, alone = 0, len(sums) == 1
    for dtype, group in _together(sums):
        outs: Values = dict.fromkeys((f"out{n}" for n in range(accumulators.SUMS)), 0)
        for n, k in enumerate(group):
            outs[f"out{n}"] = _allocate_sum(text, problem, k, kept)
        values = outs | {"partials": f"p_partials + {before * size}"} | _joined(kept, chunks, alone)
        text.launch(pointwise.generate_sum(problem, dtype), accumulators.blocks(kept, chunks, alone),
                    accumulators.BLOCK, values, layers=len(group), waits=True)
        before += len(group)
    for k, _ in sums:
        _finish_sum(text, problem, k, rows)


def _together(sums: Sequence[tuple[int, str]]) -> list[tuple[str, list[int]]]:
    """What one launch can add: neighbours of one dtype."""
    groups: list[tuple[str, list[int]]] = []
    for k, dtype in sums:
        if not groups or groups[-1][0] != dtype or len(groups[-1][1]) == accumulators.SUMS:
            groups.append((dtype, []))
        groups[-1][1].append(k)
    return groups


def _allocate_sum(text: PlanText, problem: Problem, k: int, kept: int) -> str:
    """Memory for output k, or for the finer sums that it is made of; its address."""
    operand, result = text.call.problem.outputs[k], text.call.results[k]
    if operand.numel(text.call.problem.sizes) == kept:
        text.allocate(operand.name, result.shape, result.walk_strides, result.dtype)
    else:
        text.allocate(operand.name, (kept,), (1,), getattr(torch, problem.acc))
    return f"{operand.name}.data_ptr()"


def _finish_sum(text: PlanText, problem: Problem, k: int, rows: Reduction | None) -> None:
    operand, result = text.call.problem.outputs[k], text.call.results[k]
    if rows is not None and operand.numel(text.call.problem.sizes) * problem.abreast != rows.kept:
        text.scope |= {"coarsen": _coarsen, f"rows{k}": rows, f"strides{k}": operand.strides,
                       f"sizes{k}": problem.sizes, f"result{k}": result}
        text.more(f"{operand.name} = coarsen({operand.name}, rows{k}, strides{k}, sizes{k}, result{k})")
    if tuple(result.walk_strides) != tuple(result.strides):
        text.more(f"{operand.name} = {operand.name}.contiguous()")


def _sum_dtypes(part: Part) -> list[str]:
    """Of the finished sums: the output's, or acc_t where a coarser output is summed further."""
    sizes, acc = part.problem.sizes, part.problem.acc
    return [o.dtype if o.numel(sizes) == part.kept else acc for o in part.problem.sums]


def _coarsen(finer: Any, rows: Reduction, strides: Sequence[int], sizes: Sequence[int], result: Output
             ) -> Any:
    """Sum a small finer gradient over what a coarser one (a scalar's) does not keep."""
    kept = [d for d in reversed(range(len(sizes))) if rows.pattern[d]]
    gone = [i for i, d in enumerate(kept) if not strides[d]]
    summed = finer.view([sizes[d] for d in kept]).sum(dim=gone).to(result.dtype)
    return summed.contiguous().as_strided(result.shape, result.walk_strides)
