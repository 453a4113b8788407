"""Reductions over the last, the first, a middle, and all dimensions of 512 MB.

Device time from CUDA graphs, on input sets in rotation. of_read: of the rate of a kernel that reads as many
bytes and writes nothing, in the same run; counting the operand once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

import fusionrt
from benchmarks import script
from benchmarks.work import Made, Work, measure

OPS = ("sum", "mean", "amax", "argmax", "var", "norm", "logsumexp", "sum_squared")
DTYPES = ("bfloat16", "float32")
BYTES = 512 << 20
# Which are reduced -> (the shape but for its first dimension, dim).
SHAPES = {"last": ((4096,), -1), "last, wide": ((65536,), -1), "last, narrow": ((256,), -1),
          "first": ((4096,), 0), "middle": ((256, 256), 1), "all": ((4096,), None)}
COLUMNS = ("op", "dtype", "reduced", "us", "TB/s", "of_read", "vs_eager", "spread", "error")


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--ops", default=",".join(OPS), help="default: %(default)s")
    options = parser.parse_args()
    script.need_gpu()
    ops = script.names(options.ops)
    run = script.results("reductions-gpu", __doc__, options, len(ops) < len(OPS))
    works = list(_works(ops))
    measure(works[::7] if options.quick else works, run)
    run.finish(COLUMNS)


def _works(ops: list[str]) -> Iterator[Work]:
    for op in ops:
        for dtype in DTYPES:
            for reduced, (columns, dim) in SHAPES.items():
                if dim is None and op in ("argmax", "logsumexp"):
                    continue
                yield Work({"op": op, "dtype": dtype, "reduced": reduced}, {"forward": BYTES},
                           functools.partial(_make, op, dtype, columns, dim), "read")


def _make(op: str, dtype: str, columns: tuple[int, ...], dim: int | None) -> Made:
    x = torch.randn(BYTES // getattr(torch, dtype).itemsize, device="cuda").to(getattr(torch, dtype))
    x = x.view(-1, *columns)
    made = getattr(fusionrt, op)
    return Made(functools.partial(made, x, dim=dim), functools.partial(made.reference, x, dim=dim), [])


if __name__ == "__main__":
    main()
