"""Chains of pointwise operations on the CPU: ours, eager torch, torch.compile (by a C++ compiler).

1 Mi and 16 Mi elements, float32 and bfloat16, torch's threads; wall time of a call, variants in
turns, results in newly allocated memory, as users get it. The fraction is of the rate of `copy_`
(into memory that is there already) at the next lower power of two. Measure on a quiet machine.
"""

from __future__ import annotations

import functools

from benchmarks import cases, results, timing
from benchmarks.cases import BOTH, COMPILE, EAGER, FORWARD, OURS, Case

OPS = ("add_relu", "multiply_relu", "add_sigmoid", "mul_tanh", "bias_relu", "bias_gelu",
       "bias_silu", "swish_multiply", "geglu", "reglu", "mish_scale", "add_mul_exp", "add_mul_add",
       "scale_bias_sigmoid", "gelu_dropout", "quantize_int8")
WITH_BACKWARD = ("add_relu", "bias_gelu", "swish_multiply")
QUICK = ("add_relu", "bias_gelu")
SIZES = (1 << 20, 16 << 20)
COLUMNS = ("op", "dtype", "elements", "direction", "us", "spread", "GB/s", "of_copy", "vs_eager",
           "vs_compile", "compile_error")


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--ops", help="only these, separated by commas")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    options = parser.parse_args()
    ops = options.ops.split(",") if options.ops else list(QUICK if options.quick else OPS)
    part = bool(options.ops or options.no_compile)
    run = results.Results("pointwise_cpu", __doc__, options, part)
    if (load := run.content["machine"]["load_at_start"] or 0) > 0.5:
        run.note(f"the machine was busy: load {load}; the figures are not to be trusted")
    for op in ops:
        for dtype in ("float32", "bfloat16"):
            for elements in SIZES[:1] if options.quick else SIZES:
                case = Case(op, dtype, elements, "cpu")
                for direction in (FORWARD, BOTH) if op in WITH_BACKWARD else (FORWARD,):
                    run.add(op=op, dtype=dtype, elements=elements, direction=direction,
                            **measure(run, case, direction, not options.no_compile))
    run.finish(COLUMNS)


def measure(run: results.Results, case: Case, direction: str, compiles: bool) -> results.Row:
    variants, fault = {v: case.calls(v, direction)[0] for v in (OURS, EAGER)}, {}
    if compiles:
        try:
            variants[COMPILE] = case.calls(COMPILE, direction)[0]
            variants[COMPILE]()
        except Exception as error:
            variants.pop(COMPILE, None)
            fault = {"compile_error": cases.why(error)}
    nbytes = case.traffic[direction]
    times = timing.cpu(variants, rounds=21 if case.elements <= SIZES[0] else 7)
    ceiling = run.ceiling("copy", _ceiling(1 << nbytes.bit_length() - 1))
    found = {"bytes": nbytes, **cases.ratios(times, nbytes), **fault}
    rate = 1e3 * found.pop("TB/s")
    return {**found, "GB/s": round(rate, 2), "of_copy": round(rate / ceiling, 4)}


@functools.cache
def _ceiling(nbytes: int) -> results.Row:
    return timing.cpu_copy_ceiling(nbytes)


if __name__ == "__main__":
    main()
