"""Every op of the catalogue at sizes that fill an H200: fractions of what a copy reaches.

Forward, backward, and both in one; float32, bfloat16, float16; at least 256 MB of traffic a call.
Device time from CUDA graphs of calls on input sets in rotation, so that nothing is left in the L2.
The fraction is of the copy bandwidth at the same number of bytes, measured in the same run.
Eager torch runs in every row, torch.compile in those of COMPILED. The backward pass of our ops is
that of a recorded result, with the gradients of all arguments. In a graph a dropout draws its seed
with a small kernel of torch's, which is part of its time.
"""

from __future__ import annotations

from benchmarks import cases, results, timing
from benchmarks.cases import BACKWARD, BOTH, COMPILE, EAGER, FORWARD, OURS, Case

COMPILED = ("bias_gelu", "gelu_dropout", "swish_multiply", "add_relu", "mish", "geglu")
COMPILED_DTYPES = ("bfloat16", "float32")
QUICK = ("add_relu", "bias_gelu", "gelu_dropout", "quantize_int8")
ELEMENTS, LEAST = 64 << 20, 256 << 20  # elements a call, more where that is too few bytes
COLUMNS = ("op", "dtype", "direction", "MB", "us", "TB/s", "of_copy", "vs_eager", "vs_compile",
           "spread", "error")


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--ops", help="only these, separated by commas")
    parser.add_argument("--dtypes", default=",".join(cases.DTYPES), help="default: %(default)s")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    options = parser.parse_args()
    results.need_gpu()
    ops = options.ops.split(",") if options.ops else list(QUICK if options.quick else cases.OPS)
    dtypes = options.dtypes.split(",")
    part = bool(options.ops or options.no_compile or len(dtypes) < len(cases.DTYPES))
    run = results.Results("pointwise_large-gpu", __doc__, options, part)
    _warm_up(ops, dtypes)
    with timing.stream():
        for op in ops:
            for dtype in dtypes:
                compiles = op in COMPILED and dtype in COMPILED_DTYPES and not options.no_compile
                measure(run, op, dtype, compiles)
                timing.release()
    run.finish(COLUMNS)


def _warm_up(ops: list[str], dtypes: list[str]) -> None:
    """Compile our kernels on all cores, before the clock matters."""
    import fusionrt
    print(f"warm-up: {fusionrt.warmup(ops=ops, dtypes=dtypes)}", flush=True)


def measure(run: results.Results, op: str, dtype: str, compiles: bool) -> None:
    elements = ELEMENTS
    while cases.least_bytes(op, dtype, elements) < LEAST:
        elements *= 2
    case = Case(op, dtype, elements, "cuda", timing.n_sets(LEAST))
    for direction in (FORWARD, BACKWARD, BOTH) if case.differentiable else (FORWARD,):
        row = {"op": op, "dtype": dtype, "direction": direction, "elements": case.elements}
        try:
            run.add(**row, **figures(run, case, direction, compiles))
        except Exception as error:  # one row less; it says why
            run.add(**row, error=cases.why(error))


def figures(run: results.Results, case: Case, direction: str, compiles: bool) -> results.Row:
    nbytes = case.traffic[direction]
    n, fault = max(timing.n_calls(nbytes), len(case.inputs)), {}
    variants = {v: case.calls(v, direction, n) for v in (OURS, EAGER)}
    if compiles:
        try:
            variants[COMPILE] = case.calls(COMPILE, direction, n)
            variants[COMPILE][0]()
        except Exception as error:
            variants.pop(COMPILE, None)
            fault = {"compile_error": cases.why(error)}
    times = timing.replayed(variants)
    ceiling = run.ceiling("copy", timing.copy_ceiling(nbytes))
    found = {"bytes": nbytes, "MB": nbytes >> 20, **cases.ratios(times, nbytes), **fault}
    return {**found, "of_copy": round(found["TB/s"] / ceiling, 4)}


if __name__ == "__main__":
    main()
