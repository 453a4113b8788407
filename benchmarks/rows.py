"""Norms, softmax and cross-entropy over rows of 1 Ki to 256 Ki columns, forward and backward.

At least 512 MB an operand; device time from CUDA graphs of calls on input sets in rotation. The fraction
is of the copy bandwidth at the same number of bytes, measured in the same run, counting the least bytes:
every operand and every result once. Eager torch runs in every row, torch.compile in bfloat16 at 4096 and
32768 columns. Rows of table `small` are matrices of 2048 × 2048 and 512 × 1024, with what a call costs the
host and a user as well.
"""

from __future__ import annotations

from benchmarks import script
from fusionrt.bench import suite
from fusionrt.bench.case import BACKWARD, BOTH, FORWARD
from fusionrt.bench.suite import Cell

OPS = ("layer_norm", "rms_norm", "add_norm", "layer_norm_gelu", "softmax", "log_softmax", "cross_entropy")
COLUMNS_OF_ROWS = tuple(1 << k for k in (10, 12, 13, 14, 15, 16, 17, 18))
DTYPES = ("bfloat16", "float32")
COMPILED_AT = (4096, 32768)
BYTES = 512 << 20  # of one full operand
SMALL = ((2048, 2048), (512, 1024))
COLUMNS = ("op", "dtype", "direction", "table", "columns", "MB", "us", "TB/s", "of_copy", "vs_eager",
           "vs_compile", "wall_us", "wall_vs_eager", "spread", "error")


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--ops", default=",".join(OPS), help="default: %(default)s")
    options = parser.parse_args()
    script.need_gpu()
    ops, wide = script.names(options.ops), COLUMNS_OF_ROWS[1::3] if options.quick else COLUMNS_OF_ROWS
    run = script.results("rows-gpu", __doc__, options, len(ops) < len(OPS))
    cells = [_large(op, dtype, columns) for op in ops for dtype in DTYPES for columns in wide]
    cells += [_small(op, dtype, *size) for op in ops for dtype in DTYPES for size in SMALL]
    suite.run(cells, run, "cuda")
    run.finish(COLUMNS)


def _large(op: str, dtype: str, columns: int) -> Cell:
    compiles = dtype == "bfloat16" and columns in COMPILED_AT
    elements = BYTES // (2 if dtype == "bfloat16" else 4)
    return Cell(op, dtype, elements, (FORWARD, BACKWARD), ("eager", "compile") if compiles else ("eager",),
                columns, {"table": "large", "columns": columns}, host=False)


def _small(op: str, dtype: str, rows: int, columns: int) -> Cell:
    return Cell(op, dtype, rows * columns, (FORWARD, BACKWARD, BOTH), ("eager",), columns,
                {"table": "small", "columns": columns}, host=True)


if __name__ == "__main__":
    main()
