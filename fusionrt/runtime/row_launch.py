"""How problems with rows are launched, and those whose elements wait for what their rows find."""

from __future__ import annotations

import torch

from fusionrt.problem import Problem
from fusionrt.runtime import (
    accumulators,
    planes,
    pointwise,
    resident,
    row_choice,
    row_layout,
    row_operands,
    rows,
)
from fusionrt.runtime import device as cuda
from fusionrt.runtime.access import REDUCE_BLOCK
from fusionrt.runtime.plan_text import PlanText, Values
from fusionrt.runtime.pointwise_launch import write_sums
from fusionrt.runtime.source import Specialisation


def write(text: PlanText, problem: Problem, alignment: int, values: Values) -> None:
    if problem.row_dims:
        _write_rows(text, problem, alignment, values)
    else:
        _write_joined(text, problem, values)


def sources(problem: Problem) -> list[Specialisation]:
    """All that a call on 16-byte aligned tensors compiles."""
    if problem.then is not None:
        joined = resident if planes.layout(problem) is None else planes
        return [joined.generate(problem)]
    sums = dict.fromkeys(o.dtype for o in problem.sums)
    return [rows.generate(problem, 16), *(pointwise.generate_sum(problem, dtype) for dtype in sums)]


def _write_joined(text: PlanText, problem: Problem, values: Values) -> None:
    """What rows across memory find, what follows from it, and the elements: one launch."""
    assert problem.then is not None
    for operand, result in zip((*problem.outputs, *problem.then.outputs), text.call.results, strict=True):
        text.allocate(operand.name, result.shape, result.strides, result.dtype)
        values = values | {operand.name: f"{operand.name}.data_ptr()"}
    values |= {name: values[found] for name, found in problem.found}
    of_planes = planes.layout(problem)
    if of_planes is None:
        _write_resident(text, problem, values)
        return
    text.launch(planes.generate(problem), planes.grid(problem, of_planes), of_planes.threads, values,
                of_planes.part, of_planes.cluster)


def _write_resident(text: PlanText, problem: Problem, values: Values) -> None:
    made, kept = resident.shape(problem, text.call.device), resident.rows(problem).kept
    assert made is not None
    acc = getattr(torch, problem.acc)
    n_values = accumulators.n_values(accumulators.groups(problem))
    text.allocate("partials", (n_values * made.chunks * kept,), (1,), acc)
    values |= {"partials": "partials.data_ptr()", "chunks": made.chunks, "side": made.side,
               "packs_kept": made.packs, **text.arrived()}
    text.launch(resident.generate(problem), made.grid, REDUCE_BLOCK, values, made.shared,
                together=True)


def _write_rows(text: PlanText, problem: Problem, alignment: int, values: Values) -> None:
    device = text.call.device
    layout = row_choice.layout(problem, alignment, cuda.has_clusters(device))
    source, shared = rows.generate(problem, alignment), row_layout.shared_bytes(problem, layout)
    at_a_time = text.at_a_time(source, layout.block, layout.blocks, shared, layout.cluster)
    blocks = row_layout.grid(problem, layout, at_a_time)
    values |= {"span": row_layout.span(problem, layout),
               "early": int(row_layout.lets_next_begin(problem, layout)),
               "ahead": row_layout.rows_ahead(layout, blocks if layout.persistent else at_a_time)}
    values |= text.arrived()
    summed = problem.summed
    of_segments = row_operands.segments(problem)
    kept, chunks = row_operands.columns(problem), blocks
    if of_segments is not None:
        kept, chunks = of_segments.kept, layout.cluster * of_segments.repeats
        values["segments"] = of_segments.each
    if summed:
        text.allocate("partials", (len(summed) * chunks * kept,), (1,), getattr(torch, problem.acc))
        text.lines.append("p_partials = partials.data_ptr()")
        values |= {"partials": "p_partials", "chunks": chunks}
    text.launch(source, blocks * layout.blocks_a_row, layout.block, values, shared, layout.cluster)
    write_sums(text, problem, [(k, problem.outputs[k].dtype) for k in summed], None, kept, chunks)
