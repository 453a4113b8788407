"""Norms, softmax, losses and reductions over 4096 rows of 1024 columns on the CPU, against eager torch.

float32, torch's threads; wall time of a call, variants in turns, results in newly allocated memory. Measure
on a quiet machine.
"""

from __future__ import annotations

from benchmarks import script
from benchmarks.families import members
from fusionrt.bench import suite
from fusionrt.bench.case import BOTH, FORWARD
from fusionrt.bench.suite import Cell

FAMILIES = ("norm", "softmax", "cross_entropy", "loss", "reduction")
QUICK = ("layer_norm", "softmax")
ROWS, COLUMNS_OF_ROWS = 4096, 1024
COLUMNS = ("op", "direction", "us", "spread", "GB/s", "of_copy", "vs_eager", "error")


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--ops", help="only these, separated by commas")
    options = parser.parse_args()
    ops = script.names(options.ops) or list(QUICK if options.quick else members(FAMILIES))
    run = script.results("rows_cpu", __doc__, options, bool(options.ops))
    suite.run([Cell(op, "float32", ROWS * COLUMNS_OF_ROWS, (FORWARD, BOTH), columns=COLUMNS_OF_ROWS)
               for op in ops], run, "cpu")
    run.finish(COLUMNS)


if __name__ == "__main__":
    main()
