"""A benchmark to copy: the int8 ops in two sizes. Say here what is measured, on what, and what a figure
means: this text goes into the result file as its method.

It runs as it is:

    python -m benchmarks.template --quick       # a few rows, nothing is written
    python -m benchmarks.template               # writes benchmarks/results/template-gpu.json (or -cpu)
"""

from __future__ import annotations

from benchmarks import script
from benchmarks.families import members
from fusionrt.bench import suite
from fusionrt.bench.case import BACKWARD, BOTH, FORWARD
from fusionrt.bench.results import kind
from fusionrt.bench.suite import Cell

# The ops: a family (a module of fusionrt.ops), or names of the catalogue. `Case` makes their inputs.
OPS = members(["quantize"])
SIZES = (1 << 20, 16 << 20)  # elements
# Directions that an op does not have are left out of its rows.
DIRECTIONS = (FORWARD, BACKWARD, BOTH)
# Whoever is not installed is named as absent. torch.compile takes seconds a row.
AGAINST = ("eager", "liger")
# What the table at the end shows; the file has everything.
COLUMNS = (*suite.SETTINGS, *suite.FIGURES, "vs_eager", "vs_liger", "liger_absent", "error")


def main() -> None:
    options = script.parser(__doc__).parse_args()  # --json FILE, --quick
    # script.need_gpu() here, and "cuda" below, if a CPU has nothing to say about it.
    device = "cuda" if kind() == "gpu" else "cpu"
    sizes = SIZES[:1] if options.quick else SIZES
    run = script.results(f"template-{kind()}", __doc__, options)
    # One Cell is one op, dtype and size; further fields: columns, labels, host.
    suite.run([Cell(op, dtype, n, DIRECTIONS, AGAINST)
               for op in OPS for dtype in ("float32", "bfloat16") for n in sizes], run, device)
    # What is no op of the catalogue: time it with fusionrt.bench.timing, and run.add(...) a row.
    run.finish(COLUMNS)


if __name__ == "__main__":
    main()
