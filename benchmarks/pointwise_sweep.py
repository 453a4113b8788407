"""Four ops from 8 thousand to 512 million elements, and two three-way tables.

The sweep: bfloat16 and float32, forward. Device time from CUDA graphs; up to 1 Mi elements also the
host's time a call in bursts of 300. Calls below 16 MB meet a warm L2 (`cache`), larger ones rotate
their input sets. The tables: quantize_int8 and add_mul_exp, float32, the same device time, and the
wall time a call of a burst with the wait at its end, on one input set: what a user sees.
torch.compile, which takes seconds to start for each size, runs in the tables and at every other size
of the sweep.
"""

from __future__ import annotations

import argparse

from benchmarks import script
from fusionrt.bench import suite
from fusionrt.bench.suite import Cell

OPS = ("add_relu", "bias_gelu", "swish_multiply", "gelu_dropout")
SIZES = tuple(1 << k for k in (13, 15, 17, 19, 20, 22, 24, 26, 28, 29))
COMPILED = tuple(1 << k for k in (13, 17, 20, 24, 29))
QUICK_SIZES = (1 << 13, 1 << 20, 1 << 26)
TABLES = {"quantize_int8": (500_000, 1_000_000, 5_000_000, 10_000_000, 50_000_000),
          "add_mul_exp": (100_000, 300_000, 1_000_000, 5_000_000, 20_000_000)}
COLUMNS = ("table", "op", "dtype", "elements", "cache", "us", "TB/s", "of_copy", "vs_eager",
           "vs_compile", "host_us", "host_vs_eager", "host_vs_compile", "wall_us",
           "wall_vs_eager", "wall_vs_compile", "compile_absent", "compile_error", "error")


def main() -> None:
    options = script.parser(__doc__).parse_args()
    script.need_gpu()
    run = script.results("pointwise_sweep-gpu", __doc__, options)
    suite.run(_cells(options), run, "cuda")
    run.finish(COLUMNS)


def _cells(options: argparse.Namespace) -> list[Cell]:
    ops, sizes = (OPS[:2], QUICK_SIZES) if options.quick else (OPS, SIZES)
    both = ("eager", "compile")
    sweep = [Cell(op, dtype, n, against=both if n in COMPILED else both[:1], labels={"table": "sweep"})
             for op in ops for dtype in ("bfloat16", "float32") for n in sizes]
    three = {"against": both, "columns": 1000, "labels": {"table": "three-way"}, "host": True}
    return sweep + [Cell(op, "float32", n, **three) for op, table in TABLES.items() for n in table]


if __name__ == "__main__":
    main()
