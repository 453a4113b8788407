"""Every pointwise op at sizes that fill an H200: fractions of what a copy reaches.

Forward, backward, and both in one; float32, bfloat16, float16; at least 256 MB of traffic a call.
Device time from CUDA graphs of calls on input sets in rotation, so that nothing is left in the L2.
The fraction is of the copy bandwidth at the same number of bytes, measured in the same run.
Eager torch runs in every row, torch.compile, which is slow to start, for bias_gelu, gelu_dropout,
swish_multiply, add_relu, mish and geglu in bfloat16 and float32. The backward pass of our ops is
that of a recorded result, with the gradients of all arguments. In a graph dropouts draw their seed
with one small kernel of torch's, which is part of their time.
"""

from __future__ import annotations

from benchmarks import script
from benchmarks.families import POINTWISE, members
from fusionrt.bench import suite
from fusionrt.bench.case import BACKWARD, BOTH, FORWARD, least_bytes
from fusionrt.bench.suite import Cell

COMPILED = ("bias_gelu", "gelu_dropout", "swish_multiply", "add_relu", "mish", "geglu")
COMPILED_DTYPES = ("bfloat16", "float32")
DTYPES = ("float32", "bfloat16", "float16")
QUICK = ("add_relu", "bias_gelu", "gelu_dropout", "quantize_int8")
ELEMENTS, LEAST = 64 << 20, 256 << 20  # elements a call, more where that is too few bytes
COLUMNS = ("op", "dtype", "direction", "MB", "us", "TB/s", "of_copy", "vs_eager", "vs_compile",
           "spread", "compile_absent", "compile_error", "error")


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--ops", help="only these, separated by commas")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="default: %(default)s")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    options = parser.parse_args()
    script.need_gpu()
    ops = script.names(options.ops) or list(QUICK if options.quick else members(POINTWISE))
    dtypes = script.names(options.dtypes)
    part = bool(options.ops or options.no_compile or len(dtypes) < len(DTYPES))
    run = script.results("pointwise_large-gpu", __doc__, options, part)
    suite.run([_cell(op, dtype, not options.no_compile) for op in ops for dtype in dtypes], run, "cuda")
    run.finish(COLUMNS)


def _cell(op: str, dtype: str, compiles: bool) -> Cell:
    elements = ELEMENTS
    while least_bytes(op, dtype, elements) < LEAST:
        elements *= 2
    compiles = compiles and op in COMPILED and dtype in COMPILED_DTYPES
    against = ("eager", "compile") if compiles else ("eager",)
    return Cell(op, dtype, elements, (FORWARD, BACKWARD, BOTH), against)


if __name__ == "__main__":
    main()
