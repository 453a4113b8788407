"""From a problem to a Python callable that runs it on one GPU.

The callable is written as text, one straight line of allocations, packed parameters and launches:
what can be decided once it knows by name. It owns its parameter buffers and therefore belongs to
one thread, because the driver reads them after the GIL is released.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fusionrt import random, settling
from fusionrt.layout import Reduction
from fusionrt.problem import MASK, Operand, Output, Problem
from fusionrt.runtime import accumulators, arrivals, pointwise, scratch
from fusionrt.runtime import device as cuda
from fusionrt.runtime.access import REDUCE_BLOCK
from fusionrt.runtime.parts import Launch, split
from fusionrt.runtime.plan import ARRIVED, RANDOM, Allocated, Launched, Plan
from fusionrt.runtime.source import Specialisation
from fusionrt.texts import Lines

Run = Callable[..., Any]
Values = dict[str, Any]  # of parameters: numbers, or text

try:  # Inductor's: half the cost of torch.empty_strided; on the current device, as we are
    from torch._C._dynamo.guards import _empty_strided_cuda as empty_strided  # type: ignore
except ImportError:
    def empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Any:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


class Call(NamedTuple):
    """What an operator knows of one kind of call."""

    problem: Problem
    results: Sequence[Output]
    n_arguments: int                  # of the operator: a0, a1, ...
    device: int


class Text(Lines):
    """The body of the callable, and what its names refer to."""

    def __init__(self, call: Call) -> None:
        driver = cuda.driver()
        super().__init__(empty=empty_strided, stream=cuda.raw_stream, scratch=scratch.piece,
                         coarsen=_coarsen, launch=driver.launchKernel,
                         launch_together=driver.launchCooperativeKernel,
                         is_capturing=torch.cuda.is_current_stream_capturing)
        self.call = call
        if cuda.device_count() > 1:
            self.scope |= {"current": cuda.current, "elsewhere": _elsewhere}
        self.depends = cuda.has_dependent_launches(call.device)
        self.allocated: list[Allocated] = []
        self.launched: list[Launched] = []
        self.is_launches_alone = True  # beside allocations there is nothing more to do

    def allocate(self, name: str, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
                 ) -> None:
        self.allocated.append(Allocated(name, shape, strides, dtype))
        known = map(self.name, (tuple(shape), tuple(strides), dtype))
        self.lines.append(f"{name} = empty({', '.join(known)})")

    def arrived(self) -> dict[str, str]:
        """Where the blocks of a launch count themselves."""
        self.scope["counter"] = arrivals.counter
        return {"arrived": ARRIVED.format(device=self.call.device)}

    def launch(self, source: Specialisation, grid: int, block: int, values: Mapping[str, str | float],
               shared: int = 0, cluster: int = 1, layers: int = 1, together: bool = False,
               kernel: str = "", waits: bool = False) -> None:
        """Load a kernel, and write the lines that fill its parameters and launch it, with so many bytes of
        shared memory. `kernel`: which one of a translation unit with several. `waits`: for one of the same
        text, which lets it begin early, so that this pays outside of graphs too.

        The parameter buffer belongs to this text, and the text to one thread.
        """
        k = len(self.launched)
        if k == 0:  # 0, the default stream, is never captured
            self.lines.append(f"at = stream({self.call.device})")
            self.lines += ["captured = at and is_capturing()"] * self.depends
        packer = source.params.packer
        buffer = ctypes.create_string_buffer(packer.size)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self.scope |= {f"pack{k}": packer.pack_into, f"buffer{k}": buffer, f"pointers{k}": pointers,
                       f"converted{k}": source.params.converted}
        function = cuda.function(source.text, source.entry, self.call.device, self.call.problem.name, kernel)
        cuda.allow(function, shared, cluster)
        each = [values.get(v, v) if isinstance(v, str) else v for field in source.values for v in field]
        packed = ", ".join(map(self.spelled, each))
        launched = Launched(function, grid, layers, block, shared, source.params, each, len(self.allocated))
        self.lines += [f"try: pack{k}(buffer{k}, 0, {packed})",
                       f"except OverflowError: pack{k}(buffer{k}, 0, *converted{k}({packed}))"]
        launch, last = ("launch_together", "") if together else ("launch", ", 0")
        kernel, grid_x, grid_y, block_x, bytes_shared, parameters = map(self.name, (
            function, grid, layers, block, shared, ctypes.addressof(pointers)))
        line = (f"{launch}({kernel}, {grid_x}, {grid_y}, 1, {block_x}, 1, 1, {bytes_shared}, at, "
                f"{parameters}{last})")
        if together or not self.depends:
            self.lines.append(line)
            self.is_launches_alone &= not together
        else:
            depend = cuda.DependentLaunch(function, (grid, layers), block, shared, pointers)
            self.scope[f"depend{k}"] = depend
            self.lines += [f"depend{k}(at)"] if waits else [f"if captured: depend{k}(at)", f"else: {line}"]
            launched = launched._replace(attribute=depend.attribute if waits else None)
        self.launched.append(launched)

    def more(self, line: str) -> None:
        """What Python alone can do."""
        self.lines.append(line)
        self.is_launches_alone = False

    def at_a_time(self, source: Specialisation, block: int, blocks: int, shared: int, cluster: int) -> int:
        """Clusters that the device holds, `blocks` being what was reckoned with on a multiprocessor."""
        device = self.call.device
        most = blocks * cuda.multiprocessors(device) // cluster
        if cluster == 1:
            return most
        function = cuda.function(source.text, source.entry, device, self.call.problem.name)
        cuda.allow(function, shared, cluster)
        return min(most, cuda.clusters_at_a_time(function, block, shared, cluster) or most)

    def compile(self, arguments: Sequence[str], another: Callable[[], Run]) -> Run:
        """`another` does all this again: see `Lines.function`."""
        device = self.call.device
        elsewhere = f"if current() != {device}: return elsewhere({device}, run, {', '.join(arguments)})"
        return self.function(arguments, *[elsewhere] * ("current" in self.scope), another=another)

    def settles(self, run: Run, arguments: Sequence[str], returned: Sequence[str]) -> Run:
        """`run`, which is compiled from this, so that it can be machine code if it gives what it allocates;
        where it is given random numbers, also together with whoever draws them."""
        device = self.call.device
        if not self.is_launches_alone or not {o.name for o in self.allocated}.issuperset(returned):
            return run
        plan = Plan(run, arguments, self.allocated, returned, self.launched, device, threading.get_ident(),
                    self.scope, still=(cuda.current, device) if "current" in self.scope else None)

        def on_device(plan: Plan) -> Run:
            from fusionrt.runtime import native
            with torch.cuda.device(device):
                return native.settled(plan)

        on = functools.lru_cache(4)(lambda stream: on_device(plan))  # for all who ask
        settling.settles(run, lambda: on(self.scope["stream"](device)))
        if RANDOM in arguments:
            settling.settles_drawing(run, lambda drawn, counters: on_device(plan._replace(
                general=drawn, arguments=arguments[:-1], random=random.taking(device, counters))))
        return run


def build(call: Call, alignment: int, misaligned: Run) -> Run:
    """`alignment` in bytes, 16 at most, holds for every pointer; otherwise `misaligned` is called."""
    with torch.cuda.device(call.device):
        cuda.bind_context(call.device)
        return _write(call, alignment, misaligned)


def _elsewhere(device: int, run: Run, *args: Any) -> Any:
    """`run`, called while another device is the current one."""
    with torch.cuda.device(device):
        return run(*args)


def _write(call: Call, alignment: int, misaligned: Run) -> Run:
    problem, text = call.problem, Text(call)
    inputs = list(problem.inputs)
    masks = [o.name for o in inputs if o.dtype == MASK]
    names = [f"a{i}" for i in range(call.n_arguments)] + [RANDOM] * problem.draws
    for name in masks:
        text.more(f"{name} = rng[2]")
    if problem.then is not None:
        here = {*(o.name for o in inputs), *(name for name, _ in problem.found)}
        inputs += [o for o in problem.then.inputs if o.name not in here]
    given = [*(o.name for o in inputs), *(f"a{o.into}" for o in call.results if o.into is not None)]
    pointers = {name: f"p_{name}" for name in given}
    values: Values = {**pointers, "row_size": float(problem.row_size)}
    text.lines += [f"{value} = {name}.data_ptr()" for name, value in pointers.items()]
    if alignment == 16 and pointers:
        text.scope["misaligned"] = misaligned
        text.lines.append(f"if ({' | '.join(pointers.values())}) & 15: return misaligned({', '.join(names)})")
    if problem.streams:
        values |= {"seed": "rng[0]", "random_offset": "rng[1]", "random_state": "state"}
        text.lines.append("state = 0 if rng[2] is None else rng[2].data_ptr()")
    for operand, result, reduced in zip(problem.outputs, call.results, problem.reduced, strict=False):
        if not reduced:
            if result.into is None:
                text.allocate(operand.name, result.shape, result.strides, result.dtype)
                values[operand.name] = f"{operand.name}.data_ptr()"
            else:
                text.lines.append(f"{operand.name} = a{result.into}")
                values[operand.name] = f"p_a{result.into}"
    if problem.row_dims or problem.then is not None:
        from fusionrt.runtime import row_launch  # a dozen modules, for which pointwise ops do not wait
        row_launch.write(text, problem, alignment, values)
    else:
        # The one that writes full outputs last: they may take the memory of operands.
        for launch in reversed(split(problem)):
            _write_launch(text, launch, alignment, values)
    returned = list(problem.returned) or [o.name for o in problem.outputs]
    text.lines.append("return " + ", ".join(returned))
    run = text.compile(names, lambda: build(call, alignment, misaligned))
    return text.settles(run, names, returned) if alignment == 16 else run


def _write_launch(text: Text, launch: Launch, alignment: int, values: Values) -> None:
    part, rows = launch.problem, launch.rows
    source, width = pointwise.generate(part, alignment, rows), pointwise.vector_width(part, alignment)
    if rows is None:
        kernel, blocks, block = pointwise.grid(part, width)
        text.launch(source, blocks, block, values | {"count": part.domain.numel}, kernel=kernel)
        return
    grid, chunks = pointwise.reduction_grid(part, rows, width)
    if pointwise.is_joined(part, rows, width):
        _write_joined_parts(text, launch, source, grid, values)
        return
    if part.across:
        _write_across(text, launch, source, grid, chunks, values)
        return
    reduced = [k for k in launch.outputs if text.call.problem.reduced[k]]
    acc = getattr(torch, part.acc)
    text.allocate("partials", (len(reduced) * chunks * rows.kept,), (1,), acc)
    text.lines.append("p_partials = partials.data_ptr()")
    text.launch(source, grid, REDUCE_BLOCK, values | {"partials": "p_partials"})
    sums = list(zip(reduced, _sum_dtypes(launch), strict=True))
    write_sums(text, part, sums, rows, launch.kept, chunks * part.abreast)


def _write_joined_parts(text: Text, launch: Launch, source: Specialisation, grid: int,
                        values: Values) -> None:
    """The block that ends last joins what all have left."""
    part, call = launch.problem, text.call
    for k in launch.outputs:
        operand, result = call.problem.outputs[k], call.results[k]
        if call.problem.reduced[k]:
            text.allocate(operand.name, result.shape, result.strides, result.dtype)
            values = values | {operand.name: f"{operand.name}.data_ptr()"}
    n_values, acc = accumulators.n_values(accumulators.groups(part)), getattr(torch, part.acc)
    text.allocate("partials", (n_values * grid,), (1,), acc)
    text.launch(source, grid, REDUCE_BLOCK, values | {"partials": "partials.data_ptr()", **text.arrived()})


def _joined(kept: int, chunks: int, alone: bool = False) -> Values:
    return {"chunks": chunks, "kept": kept, "side": accumulators.side(kept, chunks, alone)}


def _write_across(text: Text, launch: Launch, source: Specialisation, grid: int, chunks: int,
                  values: Values) -> None:
    """Partial values of all rows, then what follows from them; both at once where one block has a row."""
    part, rows = launch.problem, launch.rows
    assert rows is not None
    for operand, result in zip(part.outputs, text.call.results, strict=True):
        text.allocate(operand.name, result.shape, result.walk_strides, result.dtype)
        values = values | {operand.name: f"{operand.name}.data_ptr()"}
    parted = chunks > 1 or part.inner > 1 or part.abreast > 1
    if parted:
        n_values, acc = accumulators.n_values(accumulators.groups(part)), getattr(torch, part.acc)
        text.allocate("partials", (n_values * chunks * rows.kept,), (1,), acc)
        kept, chunks = launch.kept // part.inner, chunks * part.abreast
        each = chunks * part.inner
        values = values | {"partials": "partials.data_ptr()", **_joined(kept, each), "chunks": chunks}
    text.launch(source, grid, REDUCE_BLOCK, values)
    if parted:
        text.launch(pointwise.generate_join(part), accumulators.blocks(kept, each), accumulators.BLOCK,
                    values, waits=True)
    for operand, result in zip(part.outputs, text.call.results, strict=True):
        if tuple(result.walk_strides) != tuple(result.strides):
            text.more(f"{operand.name} = {operand.name}.contiguous()")


def write_sums(text: Text, part: Problem, sums: Sequence[tuple[int, str]], rows: Reduction | None,
               kept: int, chunks: int) -> None:
    """Add the partial sums of outputs (place, dtype), of each `kept` in `chunks`. Their memory has the order
    of the walk until the last lines."""
    size = chunks * kept * getattr(torch, part.acc).itemsize
    before, alone = 0, len(sums) == 1
    for dtype, group in _together(sums):
        outs: Values = dict.fromkeys((f"out{n}" for n in range(accumulators.SUMS)), 0)
        for n, k in enumerate(group):
            outs[f"out{n}"] = _allocate_sum(text, part, k, kept)
        values = outs | {"partials": f"p_partials + {before * size}"} | _joined(kept, chunks, alone)
        text.launch(pointwise.generate_sum(part, dtype), accumulators.blocks(kept, chunks, alone),
                    accumulators.BLOCK, values, layers=len(group), waits=True)
        before += len(group)
    for k, _ in sums:
        _finish_sum(text, part, k, rows)


def _together(sums: Sequence[tuple[int, str]]) -> list[tuple[str, list[int]]]:
    """What one launch can add: neighbours of one dtype."""
    groups: list[tuple[str, list[int]]] = []
    for k, dtype in sums:
        if not groups or groups[-1][0] != dtype or len(groups[-1][1]) == accumulators.SUMS:
            groups.append((dtype, []))
        groups[-1][1].append(k)
    return groups


def _allocate_sum(text: Text, part: Problem, k: int, kept: int) -> str:
    """Memory for output k, or for the finer sums that it is made of; its address."""
    operand, result = text.call.problem.outputs[k], text.call.results[k]
    if _kept(operand, text.call.problem) == kept:
        text.allocate(operand.name, result.shape, result.walk_strides, result.dtype)
    else:
        text.allocate(operand.name, (kept,), (1,), getattr(torch, part.acc))
    return f"{operand.name}.data_ptr()"


def _finish_sum(text: Text, part: Problem, k: int, rows: Reduction | None) -> None:
    operand, result = text.call.problem.outputs[k], text.call.results[k]
    if rows is not None and _kept(operand, text.call.problem) * part.abreast != rows.kept:
        text.scope |= {f"rows{k}": rows, f"strides{k}": operand.strides, f"sizes{k}": part.sizes,
                       f"result{k}": result}
        text.more(f"{operand.name} = coarsen({operand.name}, rows{k}, strides{k}, sizes{k}, result{k})")
    if tuple(result.walk_strides) != tuple(result.strides):
        text.more(f"{operand.name} = {operand.name}.contiguous()")


def sources(problem: Problem) -> list[Specialisation]:
    """All that a call on 16-byte aligned tensors compiles."""
    if problem.row_dims or problem.then is not None:
        from fusionrt.runtime import row_launch
        return row_launch.sources(problem)
    made = []
    for launch in split(problem):
        part = launch.problem
        made.append(pointwise.generate(part, 16, launch.rows))
        if launch.rows is None or pointwise.needs_no_other(part, launch.rows):
            continue
        if part.across:
            made.append(pointwise.generate_join(part))
        else:
            made += [pointwise.generate_sum(part, dtype) for dtype in _sum_dtypes(launch)]
    return made


def _sum_dtypes(launch: Launch) -> list[str]:
    """Of the finished sums: the output's, or acc_t where a coarser output is summed further."""
    part = launch.problem
    return [o.dtype if _kept(o, part) == launch.kept else part.acc for o in part.sums]


def _kept(operand: Operand, problem: Problem) -> int:
    return math.prod(size for stride, size in zip(operand.strides, problem.sizes, strict=True) if stride)


def _coarsen(finer: Any, rows: Reduction, strides: Sequence[int], sizes: Sequence[int], result: Output
             ) -> Any:
    """Sum a small finer gradient over what a coarser one (a scalar's) does not keep."""
    kept = [d for d in reversed(range(len(sizes))) if rows.pattern[d]]
    gone = [i for i, d in enumerate(kept) if not strides[d]]
    summed = finer.view([sizes[d] for d in kept]).sum(dim=gone).to(result.dtype)
    return summed.contiguous().as_strided(result.shape, result.walk_strides)
