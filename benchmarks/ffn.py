"""A training step of feed-forward blocks, forward and backward, in bfloat16: time and memory.

ffn: linear, activation, dropout, linear, with biases; swiglu: silu(gate) * up, linear, without. `tokens`
rows, `width` to `hidden` and back. Gradients of the input and of every parameter. us: device time in a CUDA
graph of two steps, on one input, as the layer before has just written it; variants take turns. (In a graph
our masks take a kernel that draws their seed, which steps issued one by one do not.) wall_us: steps issued
one after the other. recompute: ours with recompute=True. peak_MB: the most that a step takes beyond operands
and incoming gradient; kept_MB: what is alive between forward and backward pass, without the result;
allocations: blocks asked for. peak, kept: ours over eager's. TFLOP/s: of the six products (nine) alone. The
representative rows are four blocks of two sizes; --all has all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import fusionrt
from benchmarks import script
from benchmarks.resume import add_options, is_complete, remaining
from fusionrt import reference
from fusionrt.bench import memory, rivals, timing
from fusionrt.bench.results import Row, why

SIZES = ((2048, 768, 3072), (8192, 768, 3072), (8192, 1024, 4096), (16384, 1024, 4096), (8192, 4096, 16384))
KINDS = (("ffn", "gelu", 0.1), ("ffn", "gelu", 0.0), ("ffn", "relu", 0.1), ("swiglu", "silu", 0.0),
         ("ffn", "gelu_tanh", 0.1), ("ffn", "silu", 0.0))
FEW_SIZES, FEW_KINDS = SIZES[1:3], KINDS[:4]
COLUMNS = ("kind", "activation", "dropout", "tokens", "width", "hidden", "us", "recompute_us", "eager_us",
           "compile_us", "vs_eager", "vs_compile", "wall_us", "wall_vs_eager", "peak_MB", "recompute_peak_MB",
           "eager_peak_MB", "compile_peak_MB", "peak", "kept_MB", "recompute_kept_MB", "eager_kept_MB",
           "compile_kept_MB", "kept", "allocations", "eager_allocations", "TFLOP/s", "spread", "error")
DTYPE = torch.bfloat16
Block = Callable[..., torch.Tensor]


def main() -> None:
    parser = script.parser(__doc__)
    add_options(parser)
    options = parser.parse_args()
    script.need_gpu()
    run = script.results("ffn-gpu", __doc__, options)
    cells: list[Row] = [{"kind": kind, "activation": activation, "dropout": dropout, "tokens": tokens,
                         "width": width, "hidden": hidden}
                        for kind, activation, dropout in (KINDS if options.all else FEW_KINDS)
                        for tokens, width, hidden in (SIZES if options.all else FEW_SIZES)]
    cells = cells[::6] if options.quick else cells
    with timing.stream():
        for cell in remaining(run, cells, options):
            try:
                run.add(**cell, **_measured(**cell))
            except Exception as error:
                run.add(**cell, error=why(error))
            timing.release()
    if is_complete(run, cells):
        run.finish(COLUMNS)


def _measured(kind: str, activation: str, dropout: float, tokens: int, width: int, hidden: int) -> Row:
    def made(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device="cuda") / shape[-1] ** 0.5).to(DTYPE).requires_grad_()

    x = torch.randn(tokens, width, device="cuda").to(DTYPE).requires_grad_()
    if kind == "ffn":
        operands = [x, made(hidden, width), made(hidden), made(width, hidden), made(width)]
        blocks = {name: functools.partial(f, activation=activation, dropout_p=dropout) for name, f in (
            ("ours", fusionrt.ffn), ("eager", reference.ffn))}
    else:
        operands = [x, made(hidden, width), made(hidden, width), made(width, hidden)]
        blocks = {name: functools.partial(f) for name, f in (
            ("ours", fusionrt.swiglu_mlp), ("eager", reference.swiglu_mlp))}
    blocks["recompute"] = functools.partial(blocks["ours"], recompute=True)
    rivals.fresh_compilers()
    compiled: Any = torch.compile(blocks["eager"], dynamic=False, fullgraph=True)
    blocks["compile"] = compiled
    grad_output = torch.randn_like(x)
    steps = {name: _step(block, operands, grad_output) for name, block in blocks.items()}
    peaks, kept, row = {}, {}, Row(dtype="bfloat16")
    for name, step in steps.items():
        stem = "" if name == "ours" else f"{name}_"
        for _ in range(2):
            step()
        (peaks[name], allocations), kept[name] = memory.measure(step, x.device), _kept(blocks[name], operands)
        row |= {f"{stem}peak_MB": round(peaks[name] / (1 << 20), 1), f"{stem}allocations": allocations,
                f"{stem}kept_MB": round(kept[name] / (1 << 20), 1)}
        timing.release()
    times = timing.replayed({name: [step, step] for name, step in steps.items()})
    wall = timing.bursts({name: steps[name] for name in ("ours", "eager")}, 20, 5)
    flops = 6 * tokens * width * hidden * (2 if kind == "ffn" else 3)
    ours = times["ours"].us
    return {**row, "us": ours, "spread": times["ours"].spread, "TFLOP/s": round(flops / ours / 1e6, 1),
            **{f"{name}_us": time.us for name, time in times.items() if name != "ours"},
            **{f"vs_{name}": round(times[name].us / ours, 3) for name in ("eager", "compile")},
            "wall_us": wall["ours"].wall.us,
            "wall_vs_eager": round(wall["eager"].wall.us / wall["ours"].wall.us, 3),
            "peak": round(peaks["ours"] / peaks["eager"], 3), "kept": round(kept["ours"] / kept["eager"], 3)}


def _step(block: Block, operands: list[torch.Tensor], grad_output: torch.Tensor) -> timing.Call:
    return lambda: torch.autograd.grad(block(*operands), operands, grad_output)


def _kept(block: Block, operands: list[torch.Tensor]) -> int:
    """Bytes alive between the passes, without the result's."""
    before = torch.cuda.memory_allocated()
    out = block(*operands)
    return torch.cuda.memory_allocated() - before - out.nbytes


if __name__ == "__main__":
    main()
