"""`make demo`: warms the cache, runs a few fusions and one of its own, and shows what they gain.

Every figure is measured here and now: medians of interleaved runs on random data, and the largest
difference from float64.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.nn import functional as F

import fusionrt as frt
from fusionrt.runtime import cache

ROUNDS = 40
Tensors = Sequence[torch.Tensor]


@frt.fuse
def gate(x, y):
    """A fusion of your own: CUDA kernel, CPU function and gradient from one line."""
    return frt.sigmoid(x) * y + 0.5 * x


class Case(NamedTuple):
    name: str
    fused: Callable[..., torch.Tensor]
    eager: Callable[..., torch.Tensor]
    has_bias: tuple[bool, ...] = (False, False)  # an argument each: one row of it, or all
    drops: float = 0.0                           # probability; the masks are not the same
    differentiable: bool = True

    def exact(self, result: torch.Tensor, inputs: Tensors) -> torch.Tensor:
        """The formula in float64, dropping what `result` dropped."""
        if self.drops:
            return F.gelu(inputs[0]) / (1 - self.drops) * (result != 0)
        return self.eager(*inputs)


CASES = (
    Case("add_relu", frt.add_relu, frt.add_relu.reference),
    Case("bias_gelu", frt.bias_gelu, frt.bias_gelu.reference, has_bias=(False, True)),
    Case("swish_multiply", frt.swish_multiply, frt.swish_multiply.reference),
    Case("gelu_dropout", lambda x: frt.gelu_dropout(x, 0.1), lambda x: F.dropout(F.gelu(x), 0.1),
         has_bias=(False,), drops=0.1),
    Case("quantize_int8", lambda x: frt.quantize_int8(x, 0.05, 3.0),
         lambda x: frt.quantize_int8.reference(x, 0.05, 3.0), has_bias=(False,),
         differentiable=False),
    Case("own gate", gate, lambda x, y: torch.sigmoid(x) * y + 0.5 * x),
)


def main() -> None:
    console, on_gpu = Console(), frt.CUDA_AVAILABLE
    device = "cuda" if on_gpu else "cpu"
    rows, columns = (4096, 4096) if on_gpu else (1024, 1024)
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    console.print(f"Running on the {'GPU' if on_gpu else 'CPU: there is no CUDA GPU to use'}.")
    warm(console)
    table = Table("op", "pass", title=f"{rows * columns / 2**20:.0f} Mi elements, float32, {where}")
    for column in ("fused µs", "eager µs", "ratio", "error", "eager's"):
        table.add_column(column, justify="right")
    for case in CASES:
        for row in measured(case, device, rows, columns):
            table.add_row(*row)
    console.print(table)
    console.print("Ratio: eager / fused. Errors: the largest differences from float64, for int8 "
                  "in\nsteps. A fused backward pass recomputes what eager mode has stored.")
    console.print(f"The kernels are kept in {cache.directory() or 'memory only'}.")


def warm(console: Console) -> None:
    ops = ["add_relu", "bias_gelu", "swish_multiply", "gelu_dropout", "quantize_int8", "gate"]
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("compiling kernels", total=None)

        def progress(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name)

        summary = frt.warmup(ops=ops, dtypes="float32", module=__name__, progress=progress)
    console.print(f"Warm-up: {summary}")


def measured(case: Case, device: str, rows: int, columns: int) -> Iterator[Sequence[str]]:
    torch.manual_seed(0)
    inputs = [torch.randn((columns,) if is_bias else (rows, columns), device=device)
              for is_bias in case.has_bias]
    for x in inputs:
        x[x == 0] = 1  # whether a zero was dropped could not be seen
        x.requires_grad_(case.differentiable)
    exact_inputs = [x.detach().double().requires_grad_(case.differentiable) for x in inputs]
    results = [f(*inputs) for f in (case.fused, case.eager)]
    exact = [case.exact(result, exact_inputs) for result in results]
    errors = [worst([a], [b]) for a, b in zip(results, exact, strict=True)]
    with torch.no_grad():
        times = medians([lambda: case.fused(*inputs), lambda: case.eager(*inputs)], device)
    yield case.name, "forward", *cells(times, errors)
    if not case.differentiable:
        return
    seed = torch.randn(rows, columns, device=device)

    def backward(result: torch.Tensor, of: Tensors = inputs) -> Tensors:
        return torch.autograd.grad(result, of, seed.to(result.dtype), retain_graph=True)

    errors = [worst(backward(a), backward(b, exact_inputs))
              for a, b in zip(results, exact, strict=True)]
    times = medians([lambda: backward(results[0]), lambda: backward(results[1])], device)
    yield "", "backward", *cells(times, errors)


def worst(ours: Tensors, exact: Tensors) -> float:
    return max((a.double() - b.double()).abs().max().item()
               for a, b in zip(ours, exact, strict=True))


def cells(times: Sequence[float], errors: Sequence[float]) -> Sequence[str]:
    return (*(f"{t:.1f}" for t in times), f"{times[1] / times[0]:.2f}",
            *(f"{e:.1e}" for e in errors))


def medians(functions: Sequence[Callable[[], Any]], device: str) -> list[float]:
    """Microseconds a call of each, taken in turns."""
    time_one = on_cuda if device == "cuda" else on_cpu
    samples: list[list[float]] = [[] for _ in functions]
    for _ in range(5 + ROUNDS):
        for function, taken in zip(functions, samples, strict=True):
            taken.append(time_one(function))
    return [statistics.median(taken[5:]) for taken in samples]


def on_cpu(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e6


def on_cuda(function: Callable[[], Any], calls: int = 10) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / calls


if __name__ == "__main__":
    main()
