"""Operands that do not lie as a kernel would like them to: odd lengths and addresses, slices, transposed
views.

GPU: 33 million elements, device time: forward passes in CUDA graphs, backward passes as they are issued one
by one, on input sets in rotation. of_copy counts every operand and every result once, whatever lies between
their elements. CPU: four million, wall time. Rows of 50,257 are GPT-2's vocabulary; `odd half` is x[:, 1:] of
rows of 4097, `offset` a tensor that begins one element behind an address of 16 bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

import fusionrt
from benchmarks import script
from benchmarks.work import Made, Work, measure, measure_on_cpu
from fusionrt.bench.results import kind

Tensor = torch.Tensor
OFFSET = 1          # elements
SHORTEST_NORM = 64  # columns: eager's norm of shorter rows takes twenty milliseconds
ON_CPU = 8          # times as few elements
# Name -> the shape of the memory, but for the CPU's fewer first ones, and the operand in it.
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "rows of 4096": ((8192, 4096), lambda x: x),
    "rows of 1023": ((32768, 1023), lambda x: x),
    "rows of 50257": ((640, 50257), lambda x: x),
    "rows of 33": ((1 << 20, 33), lambda x: x),
    "rows of 7": ((1 << 22, 7), lambda x: x),
    "half": ((8192, 8192), lambda x: x[:, :4096]),
    "odd half": ((8192, 4097), lambda x: x[:, 1:]),
    "offset": ((8192, 4096), lambda x: _offset(x)),
    "every 2nd row": ((16384, 4096), lambda x: x[::2]),
    "every 2nd column": ((8192, 8192), lambda x: x[:, ::2]),
    "transposed": ((4096, 8192), lambda x: x.t()),
    "heads": ((16, 2048, 16, 64), lambda x: x.transpose(1, 2)),
    "batch second": ((16, 2048, 1024), lambda x: x.transpose(0, 1)),
    "channels_last": ((32, 64, 64, 256), lambda x: x.permute(0, 3, 1, 2)),
}
Formula = Callable[..., Tensor]
# Name -> ours, eager's, the operands beside x, times that a tensor of x's size is read or written forward and
# backward (0: not measured).
OPS: dict[str, tuple[Formula, Formula, str, int, int]] = {
    "gelu": (fusionrt.gelu, F.gelu, "", 2, 3),
    "add_relu": (fusionrt.add_relu, lambda x, y: torch.relu(x + y), "like", 3, 0),
    "bias_gelu": (fusionrt.bias_gelu, lambda x, b: F.gelu(x + b), "column", 2, 3),
    "dropout_add": (lambda x, y: fusionrt.dropout_add(x, y, 0.1), lambda x, y: F.dropout(x, 0.1) + y,
                    "like", 3, 0),
    "layer_norm": (lambda x, w, b: fusionrt.layer_norm(x, w.shape, w, b),
                   lambda x, w, b: F.layer_norm(x, w.shape, w, b), "column column", 2, 3),
    "softmax": (lambda x: fusionrt.softmax(x, -1), lambda x: torch.softmax(x, -1), "", 2, 3),
    "cross_entropy": (fusionrt.cross_entropy, F.cross_entropy, "target", 1, 2),
    "sum, last": (lambda x: fusionrt.sum(x, -1), lambda x: x.sum(-1), "", 1, 0),
    "sum, first": (lambda x: fusionrt.sum(x, 0), lambda x: x.sum(0), "", 1, 0),
    "sum, second": (lambda x: fusionrt.sum(x, 1), lambda x: x.sum(1), "", 1, 0),
    "var, last": (lambda x: fusionrt.var(x, -1), lambda x: x.var(-1), "", 1, 0),
}
COLUMNS = ("layout", "op", "dtype", "direction", "us", "TB/s", "GB/s", "of_copy", "eager_us", "vs_eager",
           "spread", "error")


def main() -> None:
    options = script.parser(__doc__).parse_args()
    run = script.results(f"layouts-{kind()}", __doc__, options)
    found = list(works())
    (measure if kind() == "gpu" else measure_on_cpu)(found[::23] if options.quick else found, run)
    run.finish(COLUMNS)


def works() -> Iterator[Work]:
    for layout in LAYOUTS:
        for dtype in ("bfloat16", "float32") if kind() == "gpu" else ("float32",):
            for op, (_, _, others, forward, backward) in OPS.items():
                x = _operand(layout, dtype, "meta")
                short = op == "layer_norm" and x.shape[-1] < SHORTEST_NORM
                if short or (x.dim() > 2 if others == "target" else x.dim() == 2 and op == "sum, second"):
                    continue
                nbytes = {"forward": forward * x.nbytes}
                nbytes |= {"backward": backward * x.nbytes} if backward else {}
                yield Work({"layout": layout, "op": op, "dtype": dtype}, nbytes,
                           functools.partial(_make, layout, op, dtype))


def _operand(layout: str, dtype: str, device: str) -> Tensor:
    (first, *rest), view = LAYOUTS[layout]
    shape = first if kind() == "gpu" else max(1, first // ON_CPU), *rest
    memory = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    return view(memory if device == "meta" else memory.normal_())


def _offset(x: Tensor) -> Tensor:
    """The same numbers, some elements further on in memory."""
    memory = x.new_empty(x.numel() + OFFSET)
    return memory[OFFSET:].view(x.shape).copy_(x)


def _make(layout: str, op: str, dtype: str) -> Made:
    ours, eager, others, _, backward = OPS[op]
    x = _operand(layout, dtype, "cuda" if kind() == "gpu" else "cpu")
    columns = x.shape[-1]
    kinds = {"like": lambda: torch.randn_like(x),
             "column": lambda: torch.randn(columns, device=x.device).to(x.dtype),
             "target": lambda: torch.randint(0, columns, x.shape[:1], device=x.device)}
    args = [x, *(kinds[kind]() for kind in others.split())]
    leaves = [a.requires_grad_() for a in args if a.is_floating_point()] if backward else []
    return Made(functools.partial(ours, *args), functools.partial(eager, *args), leaves)


if __name__ == "__main__":
    main()
