"""From a problem to a Python callable that runs it on one GPU.

It owns its parameter buffers and therefore belongs to one thread, because the driver reads them after the GIL
is released.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from fusionrt.problem import MASK, Problem
from fusionrt.runtime import device as cuda
from fusionrt.runtime import pointwise_launch
from fusionrt.runtime.plan import RANDOM
from fusionrt.runtime.plan_text import Call, PlanText, Run, Values
from fusionrt.runtime.source import Specialisation


def build(call: Call, alignment: int, misaligned: Run) -> Run:
    """`alignment` in bytes, 16 at most, holds for every pointer; otherwise `misaligned` is called."""
    with torch.cuda.device(call.device):
        cuda.bind_context(call.device)
        return _write(call, alignment, misaligned)


def _write(call: Call, alignment: int, misaligned: Run) -> Run:
    problem, text = call.problem, PlanText(call)
    names = [f"a{i}" for i in range(call.n_arguments)] + [RANDOM] * problem.draws
    for operand in problem.inputs:
        if operand.dtype == MASK:
            text.more(f"{operand.name} = rng[2]")
    values: Values = {**_addresses(text, alignment, misaligned, names), "row_size": float(problem.row_size)}
    if problem.streams:
        values |= {"seed": "rng[0]", "random_offset": "rng[1]", "random_state": "state"}
        text.lines.append("state = 0 if rng[2] is None else rng[2].data_ptr()")
    values |= _full_outputs(text)
    _writer(problem).write(text, problem, alignment, values)
    returned = list(problem.returned) or [o.name for o in problem.outputs]
    text.lines.append("return " + ", ".join(returned))
    run = text.compile(names, lambda: build(call, alignment, misaligned))
    return text.prepare_settling(run, names, returned) if alignment == 16 else run


def _addresses(text: PlanText, alignment: int, misaligned: Run, names: Sequence[str]) -> Values:
    """Of what is given; those that are not multiples of 16 bytes are another plan's."""
    call, problem = text.call, text.call.problem
    inputs = list(problem.inputs)
    if problem.then is not None:
        here = {*(o.name for o in inputs), *(name for name, _ in problem.found)}
        inputs += [o for o in problem.then.inputs if o.name not in here]
    given = [*(o.name for o in inputs), *(f"a{o.into}" for o in call.results if o.into is not None)]
    pointers: Values = {name: f"p_{name}" for name in given}
    text.lines += [f"{value} = {name}.data_ptr()" for name, value in pointers.items()]
    if alignment == 16 and pointers:
        text.scope["misaligned"] = misaligned
        text.lines.append(f"if ({' | '.join(pointers.values())}) & 15: return misaligned({', '.join(names)})")
    return pointers


def _full_outputs(text: PlanText) -> Values:
    """Allocates those that are not reduced, or takes them from the arguments whose memory they take."""
    values: Values = {}
    problem = text.call.problem
    for operand, result, reduced in zip(problem.outputs, text.call.results, problem.reduced, strict=False):
        if reduced:
            continue
        if result.into is None:
            text.allocate(operand.name, result.shape, result.strides, result.dtype)
            values[operand.name] = f"{operand.name}.data_ptr()"
        else:
            text.lines.append(f"{operand.name} = a{result.into}")
            values[operand.name] = f"p_a{result.into}"
    return values


def sources(problem: Problem) -> list[Specialisation]:
    """All that a call on 16-byte aligned tensors compiles."""
    made: list[Specialisation] = _writer(problem).sources(problem)
    return made


def _writer(problem: Problem) -> ModuleType:
    if problem.row_dims or problem.then is not None:
        from fusionrt.runtime import row_launch  # a dozen modules, for which pointwise ops do not wait
        return row_launch
    return pointwise_launch
