"""linear_activation in inference, with a bias, in bfloat16, against eager torch and torch.compile.

M rows of K columns to N. Device time in CUDA graphs of calls on input sets in rotation, variants in turns.
product_us: torch's F.linear alone; share: what eager's pass for the activation adds to that. epilogue_us,
gemm_us, gemv_us, kernel_us: ours by cuBLASLt's epilogue, by our own product, by that of few rows, by a
product and a kernel, those that there are; way: the one that `fusionrt.ops.linear_path.route` takes. vs_best:
the faster one of eager and torch.compile over ours. host_us: what a call costs the host. The representative
rows have five activations, and torch.compile for some of them; --all has all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

import fusionrt
from benchmarks import script
from benchmarks.resume import add_options, is_complete, remaining
from fusionrt import reference
from fusionrt.activation import finishing
from fusionrt.bench import rivals, timing
from fusionrt.bench.results import Row, why
from fusionrt.op_names import OPS
from fusionrt.ops import gemm, gemv, linear, linear_path
from fusionrt.sites import Sites

ROWS = (1, 32, 512, 8192, 16384)
SIZES = ((768, 3072), (1024, 4096), (4096, 16384))  # K, N
COMMON = ("relu", "gelu", "gelu_tanh", "silu", "mish")
COMPILED = {("relu", 32), ("gelu", 32), ("silu", 8192), ("gelu", 8192)}
COLUMNS = ("m", "k", "n", "activation", "us", "product_us", "share", "eager_us", "compile_us", "vs_eager",
           "vs_compile", "vs_best", "way", "epilogue_us", "gemm_us", "gemv_us", "kernel_us", "TFLOP/s",
           "host_us", "host_vs_eager", "spread", "error")
DTYPE = torch.bfloat16
FEW_CALLS_BYTES = 2 << 30  # of results in a graph, which all stay alive


def main() -> None:
    parser = script.parser(__doc__)
    add_options(parser)
    options = parser.parse_args()
    script.need_gpu()
    run = script.results("linear-gpu", __doc__, options)
    cells: list[Row] = [{"m": m, "k": k, "n": n, "activation": activation} for k, n in SIZES for m in ROWS
                        for activation in (OPS["activations"] if options.all else COMMON)]
    cells = cells[::16] if options.quick else cells
    with timing.stream():
        for cell in remaining(run, cells, options):
            try:
                run.add(**cell, **_measured(**cell, compiled=options.all or (
                    cell["activation"], cell["m"]) in COMPILED))
            except Exception as error:
                run.add(**cell, error=why(error))
            timing.release()
    if is_complete(run, cells):
        run.finish(COLUMNS)


def _measured(m: int, k: int, n: int, activation: str, compiled: bool) -> Row:
    def made(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device="cuda") * scale).to(DTYPE)

    sets = [(made(m, k), made(n, k, scale=k**-0.5), made(n))
            for _ in range(timing.n_sets(2 * (m * k + k * n + m * n)))]
    calls = max(len(sets), 2, min(20, FEW_CALLS_BYTES // (2 * m * n)))
    functions: dict[str, Callable[..., Any]] = {
        "ours": functools.partial(fusionrt.linear_activation, activation=activation), "product": F.linear,
        "eager": functools.partial(reference.linear_activation, activation=activation)}
    if compiled:
        rivals.fresh_compilers()
        functions["compile"] = torch.compile(functions["eager"], dynamic=False, fullgraph=True)
    x, weight, bias = sets[0]
    epilogue = finishing("linear_activation", activation, False, False, False).operator.outputs[0]
    ways = [linear_path.KERNEL, *([linear_path.EPILOGUE] if activation in linear_path.EPILOGUES else []),
            *([linear_path.GEMM] if gemm.takes(epilogue, k) and gemm.supports(x, weight, bias) else []),
            *([linear_path.GEMV] if m <= gemv.MOST_ROWS else [])]
    functions |= {name: _by(name, activation) for name in ways}
    with torch.no_grad():
        times = timing.replayed({name: [functools.partial(f, *sets[i % len(sets)]) for i in range(calls)]
                                 for name, f in functions.items()})
        host = timing.bursts({name: functools.partial(functions[name], *sets[0])
                              for name in ("ours", "eager")}, 100, 5) if m <= 32 else None
    ours = times["ours"].us
    row: Row = {"dtype": "bfloat16", "us": ours, "spread": times["ours"].spread,
                "way": linear_path.route(x.device, DTYPE, m, n, k, epilogue, True),
                "TFLOP/s": round(2 * m * k * n / ours / 1e6, 1),
                **{f"{name}_us": time.us for name, time in times.items() if name != "ours"},
                "share": round(times["eager"].us / times["product"].us - 1, 3)}
    row |= {f"vs_{name}": round(times[name].us / ours, 3) for name in ("eager", "compile") if name in times}
    row["vs_best"] = min(row[key] for key in ("vs_eager", "vs_compile") if key in row)
    if host is not None:
        row |= {"host_us": host["ours"].host.us,
                "host_vs_eager": round(host["eager"].host.us / host["ours"].host.us, 3)}
    return row


def _by(way: str, activation: str) -> Callable[..., Any]:
    """Whatever `route` would choose. (The public function remembers what was chosen.)"""
    own = Sites()

    def call(*args: Any) -> Any:
        before = linear_path.route, linear.sites
        linear_path.route, linear.sites = lambda *_: way, own  # type: ignore[assignment]
        try:
            return linear._linear("linear_activation", *args, activation)
        finally:
            linear_path.route, linear.sites = before

    return call


if __name__ == "__main__":
    main()
