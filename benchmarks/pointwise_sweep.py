"""Four ops from 8 thousand to 512 million elements, and two three-way tables.

The sweep: bfloat16 and float32, forward. Device time from CUDA graphs; up to 1 Mi elements also the
host's time a call in bursts of 300. Calls below 16 MB meet a warm L2 (`cache`), larger ones rotate
their input sets. The tables: quantize_int8 and add_mul_exp, float32, the same device time, and the
wall time a call of a burst with the wait at its end, on one input set: what a user sees.
"""

from __future__ import annotations

from benchmarks import cases, results, timing
from benchmarks.cases import COMPILE, EAGER, FORWARD, OURS, Case

OPS = ("add_relu", "bias_gelu", "swish_multiply", "gelu_dropout")
SIZES = tuple(1 << k for k in (13, 15, 17, 19, 20, 22, 24, 26, 28, 29))
QUICK_SIZES = (1 << 13, 1 << 20, 1 << 26)
HOST_BELOW = 1 << 20
TABLES = {"quantize_int8": (500_000, 1_000_000, 5_000_000, 10_000_000, 50_000_000),
          "add_mul_exp": (100_000, 300_000, 1_000_000, 5_000_000, 20_000_000)}
COLUMNS = ("table", "op", "dtype", "elements", "cache", "us", "TB/s", "of_copy", "vs_eager",
           "vs_compile", "host_us", "host_vs_eager", "host_vs_compile", "wall_us",
           "wall_vs_eager", "wall_vs_compile", "error")


def main() -> None:
    options = results.parser(__doc__).parse_args()
    results.need_gpu()
    run = results.Results("pointwise_sweep-gpu", __doc__, options)
    sizes = QUICK_SIZES if options.quick else SIZES
    todo = [("sweep", op, dtype, n, cases.COLUMNS) for op in (OPS[:2] if options.quick else OPS)
            for dtype in ("bfloat16", "float32") for n in sizes]
    todo += [("three-way", op, "float32", n, 1000) for op, table in TABLES.items() for n in table]
    with timing.stream():
        for table, op, dtype, n, columns in todo:
            row = {"table": table, "op": op, "dtype": dtype, "elements": n}
            try:
                run.add(**row, **measure(run, table, op, dtype, n, columns))
            except Exception as error:  # one row less; it says why
                run.add(**row, error=cases.why(error))
            timing.release()
    run.finish(COLUMNS)


def measure(run: results.Results, table: str, op: str, dtype: str, elements: int, columns: int
            ) -> results.Row:
    nbytes = cases.least_bytes(op, dtype, elements)
    case = Case(op, dtype, elements, "cuda", timing.n_sets(nbytes), columns)
    nbytes, kinds, fault = case.traffic[FORWARD], [OURS, EAGER, COMPILE], {}
    try:
        case.calls(COMPILE, FORWARD)[0]()
    except Exception as error:
        kinds, fault = [OURS, EAGER], {"compile_error": cases.why(error)}
    calls = {v: case.calls(v, FORWARD, timing.n_calls(nbytes)) for v in kinds}
    ceiling = run.ceiling("copy", timing.copy_ceiling(nbytes))
    found = {"bytes": nbytes, "cache": "warm" if len(case.inputs) == 1 else "cold",
             **cases.ratios(timing.replayed(calls), nbytes), **fault}
    found["of_copy"] = round(found["TB/s"] / ceiling, 4)
    if table == "three-way" or elements <= HOST_BELOW:
        bursts = timing.bursts({v: c[0] for v, c in calls.items()})
        side, of_burst = ("wall", 1) if table == "three-way" else ("host", 0)
        times = {v: burst[of_burst] for v, burst in bursts.items()}
        found |= {f"{side}_{k}": v for k, v in cases.ratios(times, nbytes).items() if k != "TB/s"}
    return found


if __name__ == "__main__":
    main()
