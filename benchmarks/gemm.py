"""The kernel of a linear layer and what follows it (fusionrt.ops.gemm), against cuBLAS and a pass.

y = activation(x W^T + b), x [M, K] and W [N, K] of random numbers; `residual`: residual + gelu(x W^T + b);
`keep`: gelu with x W^T + b as a second result, as training wants it. Device time in CUDA graphs, on input
sets in rotation, variants in turns: so much matrix work throttles the clock, and all meet the same one.

us: ours, whether or not `chosen` would take it. cublas_us: F.linear alone; of_cublas: ours over that.
eager_us: F.linear and torch's activation. pass_us: F.linear and our pointwise kernel. epilogue_us:
cuBLASLt's epilogue, which there is for relu and gelu_tanh. compile_us: torch.compile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks import script
from fusionrt import activation as activations
from fusionrt.bench import timing
from fusionrt.bench.results import Results, why
from fusionrt.ops import gemm
from fusionrt.ops.product import PRODUCT, RESIDUAL

LAYERS = ((3072, 768), (4096, 1024), (16384, 4096))  # N, K
ROWS = (1, 32, 128, 512, 2048, 8192, 16384)
TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "relu": torch.relu, "silu": F.silu, "gelu": F.gelu, "mish": F.mish,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}
EPILOGUES = {"relu": False, "gelu_tanh": True}
COLUMNS = ("M", "N", "K", "case", "dtype", "us", "TFLOP/s", "cublas_us", "of_cublas", "eager_us", "vs_eager",
           "pass_us", "vs_pass", "epilogue_us", "vs_epilogue", "compile_us", "vs_compile", "chosen", "spread",
           "error")


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile: seconds a row")
    options = parser.parse_args()
    script.need_gpu()
    run = script.results("gemm-gpu", __doc__, options)
    if gemm.cuda.architecture(torch.cuda.current_device()) != gemm.ARCHITECTURE:
        raise SystemExit("this kernel is for Hopper")
    cases = ("gelu", "relu") if options.quick else (*TORCH, "residual", "keep")
    for n, k in LAYERS[:2] if options.quick else LAYERS:
        for m in (512, 8192) if options.quick else ROWS:
            for case in cases:
                for dtype in ("bfloat16",) if case != "gelu" else ("bfloat16", "float16"):
                    try:
                        _measure(run, m, n, k, case, dtype, not options.no_compile)
                    except Exception as error:
                        run.add(M=m, N=n, K=k, case=case, dtype=dtype, error=why(error))
                    timing.release()
    run.finish(COLUMNS)


def _measure(run: Results, m: int, n: int, k: int, case: str, dtype: str, compiles: bool) -> None:
    calls = _variants(case, compiles)
    n_sets = min(4, timing.n_sets(2 * (m * k + n * k + m * n)))
    sets = [_inputs(m, n, k, getattr(torch, dtype)) for _ in range(n_sets)]
    count = max(4, min(40, int(3000 / (m * n * k / 3e8 + 4))))
    with timing.stream(), torch.no_grad():
        times = timing.replayed({name: [functools.partial(call, *sets[i % len(sets)]) for i in range(count)]
                                 for name, call in calls.items()}, rounds=7)
    ours = times.pop("").us
    row: dict[str, Any] = {"M": m, "N": n, "K": k, "case": case, "dtype": dtype, "us": ours,
                           "TFLOP/s": round(2e-6 * m * n * k / ours, 1)}
    for name, time in times.items():
        row[f"{name}_us"] = time.us
        row["of_cublas" if name == "cublas" else f"vs_{name}"] = round(
            ours / time.us if name == "cublas" else time.us / ours, 3)
    row["chosen"] = gemm.chosen(m, n, k, getattr(torch, dtype), sets[0][0].device, _epilogue(case),
                                case in EPILOGUES)
    run.add(**row, spread=max(time.spread for time in times.values()))


def _inputs(m: int, n: int, k: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, weight, bias, residual."""
    shapes = ((m, k), (n, k), (n,), (m, n))
    return [(torch.randn(shape, device="cuda") / (k ** 0.5 if i == 1 else 1)).to(dtype)
            for i, shape in enumerate(shapes)]


def _epilogue(case: str) -> Any:
    function = activations.resolve("gemm", case if case in TORCH else "gelu")
    assert function is not None
    activated = function(PRODUCT)
    return activated + RESIDUAL if case == "residual" else activated


def _variants(case: str, compiles: bool) -> dict[str, Callable[..., Any]]:
    epilogue, theirs = _epilogue(case), TORCH.get(case, F.gelu)
    name = case if case in TORCH else "gelu"
    finish = activations.finishing("gemm", name, False, case == "residual", False)

    def eager(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> Any:
        z = F.linear(x, w, b)
        y = theirs(z) + r if case == "residual" else theirs(z)
        return (y, z) if case == "keep" else y

    def ours(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> Any:
        added = r if case == "residual" else None
        return gemm.Planned(x, w, b, epilogue, added, case == "keep")(x, w, b, added)

    def passed(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> Any:
        z = F.linear(x, w, b)
        y = finish(z, r) if case == "residual" else finish(z)
        return (y, z) if case == "keep" else y

    found: dict[str, Callable[..., Any]] = {
        "": ours, "cublas": lambda x, w, b, r: F.linear(x, w, b), "eager": eager, "pass": passed}
    if case in EPILOGUES:
        found["epilogue"] = lambda x, w, b, r: torch._addmm_activation(b, x, w.t(), use_gelu=EPILOGUES[case])
    if compiles:
        torch._dynamo.reset()
        found["compile"] = torch.compile(eager, dynamic=False)
    return found


if __name__ == "__main__":
    main()
