"""Chains of pointwise operations on the CPU: ours, eager torch, torch.compile (by a C++ compiler).

1 Mi and 16 Mi elements, float32 and bfloat16, torch's threads; wall time of a call, variants in
turns, results in newly allocated memory, as users get it. The fraction is of the rate of `copy_`
(into memory that is there already) at the next lower power of two. Measure on a quiet machine.
"""

from __future__ import annotations

from benchmarks import script
from fusionrt.bench import suite
from fusionrt.bench.case import BOTH, FORWARD
from fusionrt.bench.suite import Cell

OPS = ("add_relu", "multiply_relu", "add_sigmoid", "mul_tanh", "bias_relu", "bias_gelu",
       "bias_silu", "swish_multiply", "geglu", "reglu", "mish_scale", "add_mul_exp", "add_mul_add",
       "scale_bias_sigmoid", "gelu_dropout", "quantize_int8")
WITH_BACKWARD = ("add_relu", "bias_gelu", "swish_multiply")
QUICK = ("add_relu", "bias_gelu")
SIZES = (1 << 20, 16 << 20)
COLUMNS = ("op", "dtype", "elements", "direction", "us", "spread", "GB/s", "of_copy", "vs_eager",
           "vs_compile", "compile_absent", "compile_error", "error")


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--ops", help="only these, separated by commas")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    options = parser.parse_args()
    ops = script.names(options.ops) or list(QUICK if options.quick else OPS)
    run = script.results("pointwise_cpu", __doc__, options, bool(options.ops or options.no_compile))
    against = ("eager",) if options.no_compile else ("eager", "compile")
    suite.run([Cell(op, dtype, elements, (FORWARD, BOTH) if op in WITH_BACKWARD else (FORWARD,), against)
               for op in ops for dtype in ("float32", "bfloat16")
               for elements in (SIZES[:1] if options.quick else SIZES)], run, "cpu")
    run.finish(COLUMNS)


if __name__ == "__main__":
    main()
