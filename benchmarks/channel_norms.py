"""Batch norm in training, with and without relu, and group norm with silu, on shapes of convolutional nets.

Device time, on input sets in rotation: forward from CUDA graphs, backward from calls issued one by one. The
fraction is of what a copy of as many bytes reaches in the same run. Counted is what statistics allow at
least: the operand read twice forward (once for them) and the result written; backward the operand and the
incoming gradient read twice, the gradient written. Groups of contiguous images wait on the chip and are read
once, which makes fractions above 1. The rival is torch's norm (cuDNN's batch norm) and its activation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch.nn import functional as F

import fusionrt
from benchmarks import script
from benchmarks.work import Made, Work, measure

DTYPES = ("bfloat16", "float32")
SHAPES = ((64, 64, 112, 112), (64, 256, 56, 56), (128, 512, 28, 28), (256, 2048, 7, 7))
NORMS = ("batch_norm", "batch_norm_relu", "group_norm_silu")
COLUMNS = ("op", "dtype", "memory", "shape", "direction", "MB", "us", "TB/s", "of_copy", "vs_eager", "spread",
           "error")


def main() -> None:
    options = script.parser(__doc__).parse_args()
    script.need_gpu()
    run = script.results("channel_norms-gpu", __doc__, options)
    works = list(_works())
    measure(works[::7] if options.quick else works, run)
    run.finish(COLUMNS)


def _works() -> Iterator[Work]:
    for norm in NORMS:
        for dtype in DTYPES:
            for memory in ("channels_last", "contiguous"):
                for shape in SHAPES:
                    operand = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
                    labels = {"op": norm, "dtype": dtype, "memory": memory,
                              "shape": "×".join(map(str, shape))}
                    yield Work(labels, {"forward": 3 * operand, "backward": 5 * operand},
                               functools.partial(_make, norm, dtype, memory, shape))


def _make(norm: str, dtype: str, memory: str, shape: tuple[int, ...]) -> Made:
    layout = torch.channels_last if memory == "channels_last" else torch.contiguous_format
    x = torch.randn(shape, device="cuda").to(getattr(torch, dtype), memory_format=layout).requires_grad_()
    weight, bias = (torch.randn(shape[1], device="cuda", requires_grad=True) for _ in range(2))
    leaves = [x, weight, bias]
    if norm == "group_norm_silu":
        weight, bias = (p.detach().to(x.dtype).requires_grad_() for p in (weight, bias))
        return Made(lambda: fusionrt.group_norm(x, 32, weight, bias, epilogue=fusionrt.silu),
                    lambda: F.silu(F.group_norm(x, 32, weight, bias)), [x, weight, bias])
    state = torch.zeros(shape[1], device="cuda"), torch.ones(shape[1], device="cuda")
    relu = norm == "batch_norm_relu"
    epilogue, activation = (fusionrt.relu, F.relu) if relu else (None, lambda y: y)
    return Made(lambda: fusionrt.batch_norm(x, *state, weight, bias, training=True, epilogue=epilogue),
                lambda: activation(F.batch_norm(x, *state, weight, bias, training=True)), leaves)


if __name__ == "__main__":
    main()
