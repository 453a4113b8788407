"""The ops that other libraries fuse too, side by side: eager torch, torch.compile, liger-kernel, and NVIDIA's
apex and transformer-engine where they are installed.

bfloat16: large matrices, and small ones with what a call costs a user. Device time from CUDA graphs of calls
on input sets in rotation, or, where a function waits for the device, from events around issued calls.
"""

from __future__ import annotations

from benchmarks import script
from fusionrt.bench import suite
from fusionrt.bench.case import BACKWARD, BOTH, FORWARD
from fusionrt.bench.suite import Cell

OPS = ("layer_norm", "rms_norm", "softmax", "cross_entropy", "swish_multiply", "geglu", "relu_squared")
AGAINST = ("eager", "compile", "liger", "apex", "transformer-engine")
LARGE = ((16384, 4096), (4096, 32768))
SMALL = ((2048, 2048), (512, 1024))
COLUMNS = ("op", "dtype", "direction", "rows", "columns", "us", "of_copy",
           *(f"vs_{rival}" for rival in AGAINST), "wall_us",
           *(f"wall_vs_{rival}" for rival in AGAINST), "error")


def main() -> None:
    options = script.parser(__doc__).parse_args()
    script.need_gpu()
    script.compile_here()
    run = script.results("rivals-gpu", __doc__, options)
    ops = OPS[:2] if options.quick else OPS
    sizes = SMALL if options.quick else LARGE + SMALL
    suite.run([_cell(op, *size) for op in ops for size in sizes], run, "cuda")
    run.finish(COLUMNS)


def _cell(op: str, rows: int, columns: int) -> Cell:
    return Cell(op, "bfloat16", rows * columns, (FORWARD, BACKWARD, BOTH), AGAINST, columns,
                {"rows": rows, "columns": columns}, host=(rows, columns) in SMALL)


if __name__ == "__main__":
    main()
