"""From a problem to a Python callable that runs it on one GPU.

What can be decided once is decided here; a call packs pointers, allocates and launches. The
callable owns its parameter buffer and therefore belongs to one thread: the driver reads the buffer
after the GIL is released.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fusionrt.layout import Reduction
from fusionrt.problem import Problem, Result
from fusionrt.runtime import device as cuda
from fusionrt.runtime import pointwise
from fusionrt.runtime.source import ITEMSIZE

Value = str | int
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


class Kernel:
    """A loaded kernel with its parameter buffer."""

    def __init__(self, source: pointwise.Source, grid: int, block: int, device: int, name: str) -> None:
        self.function = cuda.function(source.text, source.entry, device, name)
        self.grid, self.block, self.device = grid, block, device
        self.packer = source.params.packer
        self.values: tuple[Value, ...] = tuple(v for values in source.values for v in values)
        self.buffer = ctypes.create_string_buffer(self.packer.size)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.parameters = ctypes.addressof(self._pointers)

    def __call__(self, known: dict[str, Any]) -> None:
        self.packer.pack_into(self.buffer, 0,
                              *[known[v] if isinstance(v, str) else v for v in self.values])
        cuda.driver().launchKernel(self.function, self.grid, 1, 1, self.block, 1, 1, 0,
                                   raw_stream(self.device), self.parameters, 0)


class Call(NamedTuple):
    """What an operator knows of one kind of call."""

    problem: Problem
    results: Sequence[Result]
    n_arguments: int                  # of the operator: a0, a1, ...
    device: int

    @property
    def arguments(self) -> list[str]:
        return [f"a{i}" for i in range(self.n_arguments)]


try:  # Inductor's: half the cost of torch.empty_strided; on the current device, as we are
    from torch._C._dynamo.guards import _empty_strided_cuda as empty_strided
except ImportError:
    def empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


def build(call: Call, alignment: int, misaligned: Callable[..., Any]) -> Callable[..., Any]:
    """`alignment` in bytes, 16 at most, holds for every pointer; otherwise `misaligned` is called."""
    with torch.cuda.device(call.device):
        cuda.bind_context(call.device)
        make = _reducing if any(call.problem.reduced) else _pointwise
        run = make(call, alignment, misaligned)
    if cuda.device_count() == 1:
        return run

    def guarded(*args: Any) -> Any:
        if torch.cuda.current_device() == call.device:
            return run(*args)
        with torch.cuda.device(call.device):
            return run(*args)

    return guarded


def _elements(problem: Problem, alignment: int) -> int:
    """Alignment in bytes -> what vector_width wants: elements of the widest flat operand."""
    return alignment // max(ITEMSIZE[o.dtype] for o in (*problem.inputs, *problem.outputs)) or 1


def _pointwise(call: Call, alignment: int, misaligned: Callable[..., Any]) -> Callable[..., Any]:
    problem = call.problem
    source = pointwise.generate(problem, _elements(problem, alignment))
    width = pointwise.vector_width(problem, _elements(problem, alignment))
    grid = -(-problem.domain.count // pointwise.tile(problem, width))
    kernel = Kernel(source, grid, pointwise.BLOCK, call.device, problem.name)
    pointers = {o.name: f"p_{o.name}" for o in problem.inputs}
    pointers |= {o.name: f"{o.name}.data_ptr()" for o in problem.outputs}
    special = {"seed": "rng[0]", "random_offset": "rng[1]",
               "random_state": "rng[2].data_ptr() if rng[2] is not None else 0"}
    values = [(pointers | special).get(v, v) if isinstance(v, str) else str(v) for v in kernel.values]
    lines = [f"{pointers[o.name]} = {o.name}.data_ptr()" for o in problem.inputs]
    arguments = ", ".join([*call.arguments, *(["rng"] if problem.streams else [])])
    if alignment == 16 and problem.inputs:
        lines.append(f"if ({' | '.join(pointers[o.name] for o in problem.inputs)}) & 15: "
                     f"return misaligned({arguments})")
    lines += [f"{o.name} = empty({r.shape}, {tuple(r.strides)}, {r.dtype})"
              for o, r in zip(problem.outputs, call.results, strict=True)]
    lines.append(f"pack(buffer, 0, {', '.join(values)})")
    lines.append(f"launch({kernel.function}, {grid}, 1, 1, {kernel.block}, 1, 1, 0, "
                 f"stream({call.device}), {kernel.parameters}, 0)")
    lines.append("return " + ", ".join(o.name for o in problem.outputs))
    text = f"def run({arguments}):\n" + "".join(f"    {line}\n" for line in lines)
    scope = {"torch": torch, "empty": empty_strided, "pack": kernel.packer.pack_into, "buffer": kernel.buffer, "kernel": kernel,
             "launch": cuda.driver().launchKernel, "stream": raw_stream, "misaligned": misaligned}
    exec(text, scope)
    return scope["run"]


def sources(problem: Problem) -> list[pointwise.Source]:
    """All that a call on 16-byte aligned tensors compiles."""
    found = []
    for launch in pointwise.split(problem):
        part = launch.problem
        found.append(pointwise.generate(part, _elements(part, 16), launch.rows))
        if launch.rows is not None:
            found += [pointwise.generate_sum(part, dtype) for dtype in _sum_dtypes(launch)]
    return found


def _sum_dtypes(launch: pointwise.Launch) -> list[str]:
    """Of the finished sums: the output's, or acc_t where a coarser output is summed further."""
    part, rows = launch.problem, launch.rows
    assert rows is not None
    return [o.dtype if _kept(o.strides, part.sizes) == rows.kept else part.acc
            for o, reduced in zip(part.outputs, part.reduced, strict=True) if reduced]


class _Stage(NamedTuple):
    launch: pointwise.Launch
    kernel: Kernel
    chunks: int
    sums: tuple[Kernel, ...]          # one a reduced output


def _reducing(call: Call, alignment: int, misaligned: Callable[..., Any]) -> Callable[..., Any]:
    problem = call.problem
    stages = [_stage(call, launch, alignment) for launch in pointwise.split(problem)]
    acc = getattr(torch, problem.acc)
    def run(*args: Any) -> Any:
        tensors: dict[str, Any] = dict(zip(call.arguments, args, strict=False))
        rng = args[-1] if problem.streams else (0, 0, None)
        known = {o.name: tensors[o.name].data_ptr() for o in problem.inputs}
        if alignment == 16 and any(pointer & 15 for pointer in known.values()):
            return misaligned(*args)
        known |= {name: tensors[name] for name in problem.scalars}
        known |= {"seed": rng[0], "random_offset": rng[1],
                  "random_state": 0 if rng[2] is None else rng[2].data_ptr()}
        outputs: list[Any] = [None] * len(problem.outputs)
        for k, o in enumerate(problem.outputs):
            if not problem.reduced[k]:
                shape, strides, dtype, _ = call.results[k]
                outputs[k] = empty_strided(shape, strides, dtype)
                known[o.name] = outputs[k].data_ptr()
        for stage in stages:
            _run_stage(stage, call, known, outputs, acc)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return run


def _stage(call: Call, launch: pointwise.Launch, alignment: int) -> _Stage:
    part, rows = launch.problem, launch.rows
    elements = _elements(part, alignment)
    source = pointwise.generate(part, elements, rows)
    width = pointwise.vector_width(part, elements)
    if rows is None:
        grid = -(-part.domain.count // pointwise.tile(part, width))
        return _Stage(launch, Kernel(source, grid, pointwise.BLOCK, call.device, part.name), 0, ())
    lanes = pointwise.n_lanes(rows, width)
    chunks = pointwise.n_chunks(rows, width, lanes)
    if rows.keeps_columns:
        grid = -(-rows.columns // (lanes * width)) * chunks * rows.n_groups
    else:
        grid = -(-rows.n_groups * lanes // pointwise.REDUCE_BLOCK) * chunks
    sums = [Kernel(pointwise.generate_sum(part, dtype), -(-rows.kept // pointwise.SUM_COLUMNS),
                   pointwise.SUM_BLOCK, call.device, part.name) for dtype in _sum_dtypes(launch)]
    kernel = Kernel(source, grid, pointwise.REDUCE_BLOCK, call.device, part.name)
    return _Stage(launch, kernel, chunks, tuple(sums))


def _kept(strides: Sequence[int], sizes: Sequence[int]) -> int:
    count = 1
    for stride, size in zip(strides, sizes, strict=True):
        count *= size if stride else 1
    return count


def _run_stage(stage: _Stage, call: Call, known: dict[str, Any], outputs: list[Any], acc: Any) -> None:
    rows, members = stage.launch.rows, stage.launch.outputs
    if rows is None:
        stage.kernel(known)
        return
    device = f"cuda:{call.device}"
    reduced = [k for k in members if call.problem.reduced[k]]
    partials = torch.empty((len(reduced), stage.chunks, rows.kept), dtype=acc, device=device)
    stage.kernel({**known, "partials": partials.data_ptr()})
    for position, (k, kernel) in enumerate(zip(reduced, stage.sums, strict=True)):
        operand = call.problem.outputs[k]
        shape, _, dtype, strides = call.results[k]
        exact = _kept(operand.strides, call.problem.sizes) == rows.kept
        out = torch.empty_strided(shape, strides, dtype=dtype, device=device) if exact else \
            torch.empty(rows.kept, dtype=acc, device=device)
        kernel({"partials": partials[position].data_ptr(), "out": out.data_ptr(),
                "chunks": stage.chunks, "kept": rows.kept})
        if not exact:
            out = _coarsen(out, rows, operand.strides, call.problem.sizes, shape, strides).to(dtype)
        outputs[k] = out.contiguous()


def _coarsen(finer: Any, rows: Reduction, strides: Sequence[int], sizes: Sequence[int],
             shape: Sequence[int], shape_strides: Sequence[int]) -> Any:
    """Sum a small finer gradient over what a coarser one (a scalar's) does not keep."""
    kept = [d for d in reversed(range(len(sizes))) if rows.pattern[d]]
    gone = [i for i, d in enumerate(kept) if not strides[d]]
    grid = finer.view([sizes[d] for d in kept])
    return grid.sum(dim=gone).contiguous().as_strided(shape, shape_strides)
