"""The pointwise catalogue, small to large: 64 Ki, 1 Mi and 16 Mi elements, against eager torch.

Forward, backward and both in one; float32, bfloat16, float16; on the GPU, or on the CPU where there is
none (`--device cpu`). On a GPU device time from CUDA graphs, below 16 MB with a warm L2 (`cache`), and
up to 1 Mi elements also the host's time of a call in bursts. On a CPU the wall time of a call, results
in newly allocated memory. `of_copy` is a fraction of the rate of a copy of as many bytes.

--resume, --seconds: in pieces of a few minutes.
"""

from __future__ import annotations

import itertools
import math
from operator import itemgetter

from benchmarks import script
from benchmarks.families import POINTWISE, members
from benchmarks.resume import add_resume, is_complete, remaining
from fusionrt.bench import suite
from fusionrt.bench.case import BACKWARD, BOTH, FORWARD
from fusionrt.bench.results import kind
from fusionrt.bench.suite import Cell

DTYPES = ("float32", "bfloat16", "float16")
SIZES = (64 << 10, 1 << 20, 16 << 20)
QUICK = ("add_relu", "quantize_int8")
COLUMNS = (*suite.SETTINGS, *suite.FIGURES, "vs_eager", "host_us", "host_vs_eager", "error")


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--ops", help="only these, separated by commas")
    add_resume(parser, math.inf)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if kind() == "gpu" else "cpu")
    options = parser.parse_args()
    ops = script.names(options.ops) or list(QUICK if options.quick else members(POINTWISE))
    name = f"catalogue-{'gpu' if options.device == 'cuda' else 'cpu'}"
    run = script.results(name, __doc__, options, bool(options.ops))
    sizes = SIZES[:1] if options.quick else SIZES
    rows = [{"op": op, "dtype": dtype, "elements": elements} for op in ops for dtype in DTYPES
            for elements in sizes]
    for _, missing in itertools.groupby(remaining(run, rows, options), itemgetter("op")):
        suite.run([Cell(**row, directions=(FORWARD, BACKWARD, BOTH)) for row in missing], run, options.device)
    if is_complete(run, rows):
        run.finish(COLUMNS)


if __name__ == "__main__":
    main()
