"""Numba text for a pointwise problem, and the callable that runs it on CPU tensors.

A kernel walks a linear range of the domain, one run of the innermost dimension at a time, so that
the inner loop has constant strides (0, 1 or a variable) and vectorises. Sums go to an array of the
task's own, in float64; the number of tasks follows from the shape alone, so results do as well.

Of rows that lie across memory (`across`) each root is a sum, a maximum or a mean, and the output what is
added up or compared for it. For a mean that is done in float64 throughout: that of equal elements is one.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from fusionrt.cpu import compiler, team, threads
from fusionrt.expr import Expr, emit
from fusionrt.layout import Ints
from fusionrt.problem import Operand, Output, Problem

BLOCK = 1024     # elements a random or summed run is cut into: two blocks of random numbers
SUM_TASKS = 32
# Storage dtype -> element type of its array: 16-bit floats are bit patterns.
ELEMENT = {"float16": "uint16", "bfloat16": "uint16", "bool": "uint8"}


def generate(problem: Problem) -> str:
    """The kernel's text. `pointers`: inputs, outputs (a task's sums for reduced ones), scratch."""
    inputs, outputs, sizes = problem.inputs, problem.outputs, problem.sizes
    apart = _apart(problem)
    summed = [o for o, reduced in zip(outputs, problem.reduced, strict=True) if reduced]
    # Summed over the inner dimension: collected in a buffer, then added pairwise.
    tops = {o for o, root in zip(outputs, problem.roots, strict=True) if _is_top(root)}
    means = {o for o, root in zip(outputs, problem.roots, strict=True) if root.op == "moment_mean"}
    buffered = [o for o in summed if o.strides[0] == 0 and o not in tops]
    inner_tops = [o for o in summed if o.strides[0] == 0 and o in tops]
    arrays = [(f"{o.name}_data", ELEMENT.get(o.dtype, o.dtype)) for o in inputs]
    arrays += [(f"{o.name}_data", "float64" if o in summed else ELEMENT.get(o.dtype, o.dtype))
               for o in outputs]
    arrays += [(f"bits_{s}", "uint16") for s in problem.streams]
    arrays += [(f"buffer_{o.name}", "float64" if o in means else problem.acc) for o in buffered]
    lines = [f"{name} = {dtype}_at(pointers[{k}])" for k, (name, dtype) in enumerate(arrays)]
    lines += [f"words_{s} = uint64_at(pointers[{len(inputs) + len(outputs) + k}])"
              for k, s in enumerate(problem.streams)]
    if problem.streams:
        lines += ["drawn = 0", "drawn_end = start"]
    lines += [f"{name} = acc_t(scalars[{k}])" for k, name in enumerate(problem.scalars)]
    operands = [*inputs, *summed, *apart]
    lines += [f"n{d} = integers[{d}]" for d in range(len(sizes))]
    lines += [f"{o.name}_s{d} = integers[{len(sizes) * (1 + k) + d}]"
              for k, o in enumerate(operands) for d in range(len(sizes)) if o.strides[d] not in (0, 1)]
    seed = len(sizes) * (1 + len(operands))
    body = ["row = i // n0", "c0 = i - row * n0", "length = min(n0 - c0, stop - i)"]
    if problem.streams or buffered:
        body.append(f"length = min(length, {BLOCK})")
    for d in range(1, len(sizes)):
        body += [f"c{d} = row % n{d}", f"row = row // n{d}"] if d < len(sizes) - 1 else [f"c{d} = row"]
    body += [f"{o.name}_base = {_offset(o)}" for o in operands]
    if problem.streams:
        body += ["if i + length > drawn_end:", "    drawn = i - (i & 511)",
                 "    n_blocks = 2 if (i & 511) + length <= 1024 else 3",
                 *(f"    fill_random(words_{s}, drawn // 512, n_blocks, uint64_of(integers[{seed}]), "
                   f"uint64_of(integers[{seed + 1}] + {s.removeprefix('random')}))"
                   for s in problem.streams), "    drawn_end = drawn + 512 * n_blocks"]
    body += [f"{o.name} = load_{o.dtype}({o.name}_data[{o.name}_base])"
             for o in inputs if not o.strides[0]]
    body += [line for o in inner_tops for line in (f"top_{o.name} = -acc_t(INF)", f"met_{o.name} = False")]
    inner = _inner(problem, summed, buffered, tops, means, apart)
    body += ["for j in range(length):", *("    " + line for line in inner)]
    body += [f"{o.name}_data[{o.name}_base] += float64_of(pairwise_sum(buffer_{o.name}, length))"
             for o in buffered]
    body += [_raise_top(o, f"{o.name}_data[{o.name}_base]", f"maximum_found(top_{o.name}, met_{o.name})")
             for o in inner_tops]
    body.append("i += length")
    return "\n".join(["def kernel(pointers, integers, scalars, start, stop):",
                      *("    " + line for line in lines), "    i = start", "    while i < stop:",
                      *("        " + line for line in body), ""])


def _offset(operand: Operand) -> str:
    terms = [f"c{d}" + ("" if stride == 1 else f" * {operand.name}_s{d}")
             for d, stride in enumerate(operand.strides) if stride]
    return " + ".join(terms) or "0"


def _raise_top(output: Operand, place: str, value: str) -> str:
    return f"{place} = larger_or_nan({place}, float64_of({value}))"


def _is_top(root: Expr) -> bool:
    return root.op in ("row_max", "row_top")


def _apart(problem: Problem) -> list[Operand]:
    """Full outputs that do not lie as the domain is walked: parts of something wider."""
    return [o for o, reduced in zip(problem.outputs, problem.reduced, strict=True)
            if not reduced and any(s != flat and n != 1 for s, flat, n in zip(
                o.strides, problem.domain.flat, problem.sizes, strict=True))]


def _inner(problem: Problem, summed: Sequence[Operand], buffered: Sequence[Operand], tops: Container[Operand],
           means: Container[Operand], apart: Container[Operand]) -> list[str]:
    lines = [f"{o.name} = load_{o.dtype}({o.name}_data[{o.name}_base + {_step(o)}])"
             for o in problem.inputs if o.strides[0]]
    lines += [f"{s} = bits_{s}[i - drawn + j]" for s in problem.streams]
    roots = [a for root in problem.roots for a in (root.args if problem.across else [root])
             if isinstance(a, Expr)]
    statements, results = emit(roots, "{} = {}")
    lines += statements
    taken = dict(problem.taken)
    for o, value in zip(problem.outputs, results, strict=True):
        if o in tops and not o.strides[0]:
            lines += [f"top_{o.name} = larger(top_{o.name}, {value})",
                      f"met_{o.name} = met_nan(met_{o.name}, {value})"]
        elif o in tops:
            lines.append(_raise_top(o, f"{o.name}_data[{o.name}_base + {_step(o)}]", value))
        elif o in buffered:
            lines.append(f"buffer_{o.name}[j] = {'float64_of' if o in means else 'acc_t'}({value})")
        elif o in summed:
            lines.append(f"{o.name}_data[{o.name}_base + {_step(o)}] += float64_of({value})")
        else:
            # By the name of the operand whose memory it takes: LLVM sees one memory, and vectorises.
            name = taken.get(o.name, o.name)
            place = f"{name}_base + {_step(o)}" if o in apart or o.name in taken else "i + j"
            lines.append(f"{name}_data[{place}] = store_{o.dtype}(acc_t({value}))")
    return lines


def _step(operand: Operand) -> str:
    return "j" if operand.strides[0] == 1 else f"j * {operand.name}_s0"


def build(problem: Problem, results: Sequence[Output], n_args: int) -> Callable[..., Any]:
    """A callable of the operator's arguments (and seed) that allocates and computes."""
    run = compiler.function(generate(problem), problem.accuracy, problem.name)
    count = problem.domain.numel
    summed = [k for k, reduced in enumerate(problem.reduced) if reduced]
    operands = [*problem.inputs, *(problem.outputs[k] for k in summed), *_apart(problem)]
    integers = [*problem.sizes, *(s for o in operands for s in o.strides)]
    positions = [int(o.name[1:]) for o in problem.inputs]
    scalars = [int(name[1:]) for name in problem.scalars if name != "row_size"]
    constant = [problem.row_size] if len(scalars) < len(problem.scalars) else []  # the last one
    sums_of = [_kept(problem.outputs[k], problem.sizes) for k in summed]
    tops = [k for k in summed if _is_top(problem.roots[k])]
    buffers = len(problem.streams) + sum(problem.outputs[k].strides[0] == 0 for k in summed if k not in tops)

    def call(*args: Any) -> Any:
        inputs = [args[k].data_ptr() for k in positions]
        outputs = [torch.empty_strided(r.shape, r.strides, dtype=r.dtype) if r.into is None else args[r.into]
                   for r in results]
        rng = args[n_args] if problem.streams else (0, 0, None)
        seed, offset = rng[:2] if rng[2] is None else rng[2].tolist()
        constants = struct.pack(f"={len(integers)}q2Q", *integers, seed % 2**64, offset % 2**64)
        numbers = struct.pack(f"={len(problem.scalars)}d", *(args[k] for k in scalars), *constant)
        if not summed:
            _whole(run, inputs + [o.data_ptr() for o in outputs], constants, numbers, buffers, count)
        else:
            _summing(run, problem, inputs, outputs, constants, numbers, buffers, count, sums_of,
                     [r.walk_strides for r in results], [k in tops for k in summed])
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return call


def _whole(run: compiler.Function, pointers: list[int], constants: bytes, numbers: bytes, buffers: int,
           count: int) -> None:
    parallel = count >= threads.SERIAL_BELOW and torch.get_num_threads() > 1
    if parallel and not buffers and team.usable():
        table = struct.pack(f"={len(pointers)}Q", *pointers)
        team.run(run.address, run.scratch, (table, constants, numbers), count, threads.GRAIN)
        return
    task = functools.partial(_task, run, pointers, constants, numbers, buffers)
    threads.run(task, count, parallel, threads.GRAIN)


def _task(run: compiler.Function, pointers: list[int], constants: bytes, numbers: bytes, buffers: int,
          start: int, stop: int) -> None:
    size = (BLOCK + 16) * 8
    scratch = ctypes.create_string_buffer(buffers * size) if buffers else None
    base = ctypes.addressof(scratch) if scratch is not None else 0
    table = struct.pack(f"={len(pointers) + buffers}Q", *pointers,
                        *(base + k * size for k in range(buffers)))
    run(table, constants, numbers, start, stop)


def _summing(run: compiler.Function, problem: Problem, inputs: list[int], outputs: list[torch.Tensor],
             constants: bytes, numbers: bytes, buffers: int, count: int, sums_of: list[int],
             kept_strides: Sequence[Ints], is_top: Sequence[bool]) -> None:
    # A task per part of the domain, never so many that their sums outweigh the domain itself.
    tasks = max(1, min(SUM_TASKS, count // threads.SERIAL_BELOW, count // (4 * max(sums_of)) + 1))
    partials = [torch.full((tasks, n), -math.inf if top else 0.0, dtype=torch.float64)
                for n, top in zip(sums_of, is_top, strict=True)]
    bounds = [count * t // tasks for t in range(tasks + 1)]

    def part(first: int, last: int) -> None:
        for t in range(first, last):
            sums = iter(partials)
            pointers = inputs + [next(sums)[t].data_ptr() if reduced else o.data_ptr() for o, reduced in
                                 zip(outputs, problem.reduced, strict=True)]
            _task(run, pointers, constants, numbers, buffers, bounds[t], bounds[t + 1])

    threads.run(part, tasks, parallel=count >= threads.SERIAL_BELOW, grain=1)
    sums = zip(partials, is_top, strict=True)
    for o, strides, reduced in zip(outputs, kept_strides, problem.reduced, strict=True):
        if reduced:
            total, top = next(sums)
            for t in range(1, tasks):
                (torch.maximum if top else torch.add)(total[0], total[t], out=total[0])
            o.copy_(total[0].as_strided(o.shape, strides))  # from the order of the walk


def _kept(operand: Operand, sizes: Ints) -> int:
    count = 1
    for size, stride in zip(sizes, operand.strides, strict=True):
        count *= size if stride else 1
    return count
