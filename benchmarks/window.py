"""Rolling windows against reductions of torch's own `unfold`, its pools, and pandas.

Cases: `inner`, windows along rows that are contiguous (GPU 2048 × 65536 elements, CPU 64 × 65536); `outer`,
along the first dimension of the same, transposed; `row`, one row of as many elements. Windows of 2 to half a
row, all valid ones, stride 1. `unfold` is x.unfold(dim, window, 1).mean(-1) and so on; above windows of 64 it
is measured on a part of the rows and its time is scaled (its work is n * window). `pool` is avg_pool1d or
max_pool1d. `pandas` is DataFrame.rolling(window), which is float64 and uses one core, of the same rows.

GPU: device time, ours from CUDA graphs, on input sets in rotation. The fraction of the copy bandwidth counts
x read once and the results written once. It is O(n) if `us` hardly depends on the window. Rows of direction
`both` are forward and backward. CPU: wall time of a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import script
from fusionrt.bench import ceilings, sampling, timing
from fusionrt.bench.results import kind, why
from fusionrt.data import sliding_window

OPS = ("sum", "mean", "min", "max", "var", "std")
WINDOWS = (2, 8, 64, 512, 4096, 32768)
UNFOLDED = 64       # the largest window that unfold gets all rows of
LEAST_ROWS = {"cuda": 32, "cpu": 1}    # that it gets then
COLUMNS = ("case", "op", "dtype", "direction", "window", "us", "TB/s", "GB/s", "of_copy", "unfold_us",
           "vs_unfold", "pool_us", "vs_pool", "pandas_us", "vs_pandas", "spread", "error")
Call = Callable[[], object]


def main() -> None:
    options = script.parser(__doc__).parse_args()
    device = "cuda" if kind() == "gpu" else "cpu"
    run = script.results(f"window-{kind()}", __doc__, options)
    rows = (2048 if device == "cuda" else 64) // (16 if options.quick else 1)
    dtypes = ("float32", "bfloat16") if device == "cuda" else ("float32", "float64")
    pandas = _pandas(run) if device == "cpu" else None
    for case in ("inner", "outer", "row"):
        for dtype in dtypes[:1] if options.quick else dtypes:
            x = _numbers(case, rows, dtype, device)
            for op in OPS[1::3] if options.quick else OPS:
                for window in WINDOWS[2::2] if options.quick else WINDOWS:
                    _measure(run, case, x, op, window, pandas)
                if device == "cuda" and op in ("mean", "max", "std"):
                    _measure(run, case, x, op, UNFOLDED, None, backward=True)
            timing.release()
    run.finish(COLUMNS)


def _pandas(run: Any) -> Any:
    try:
        import pandas  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        run.absent("pandas", why(error))
        return None
    return pandas


def _numbers(case: str, rows: int, dtype: str, device: str) -> torch.Tensor:
    shape = {"inner": (rows, 65536), "outer": (65536, rows), "row": (1, rows * 65536)}[case]
    return torch.randn(shape, device=device).to(getattr(torch, dtype))


def _unfolded(x: torch.Tensor, window: int, op: str, dim: int) -> torch.Tensor:
    windows = x.unfold(dim, window, 1)
    reduced: torch.Tensor = getattr(windows, {"min": "amin", "max": "amax"}.get(op, op))(-1)
    return reduced


def _part(x: torch.Tensor, window: int, case: str) -> tuple[torch.Tensor, float]:
    """A part of the rows, or of the one row, and how many times its windows are in the whole."""
    if window <= UNFOLDED:
        return x, 1.0
    if case == "row":
        part = x[:, :window + (x.numel() - window) * UNFOLDED // window // 4]
        return part, (x.shape[1] - window + 1) / (part.shape[1] - window + 1)
    rows = max(LEAST_ROWS[x.device.type], x.shape[case == "outer"] * UNFOLDED // window)
    part = x[:, :rows].contiguous() if case == "outer" else x[:rows]
    return part, x.numel() / part.numel()


def _both(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> object:
    leaf = x.detach().requires_grad_()
    out = function(leaf)
    return torch.autograd.grad(out, leaf, torch.ones_like(out))


def _rivals(x: torch.Tensor, case: str, op: str, window: int, backward: bool
            ) -> dict[str, tuple[Call, float]]:
    part, scale = _part(x, window, case)
    functions: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, float]] = {
        "unfold": (functools.partial(_unfolded, window=window, op=op, dim=int(case != "outer")), part, scale)}
    if op in ("mean", "max") and case == "inner":
        pool = torch.nn.functional.avg_pool1d if op == "mean" else torch.nn.functional.max_pool1d
        functions["pool"] = (functools.partial(pool, kernel_size=window, stride=1), part, scale)
    return {name: (functools.partial(_both, f, of) if backward else functools.partial(f, of), times)
            for name, (f, of, times) in functions.items()}


def _measure(run: Any, case: str, x: torch.Tensor, op: str, window: int, pandas: Any, backward: bool = False
             ) -> None:
    dim = int(case != "outer")
    results = x.numel() // x.shape[dim] * (x.shape[dim] - window + 1)
    nbytes = (x.numel() + results) * x.element_size() * (2 if backward else 1)
    ours = functools.partial(sliding_window, window=window, op=op, dim=dim)
    row: dict[str, Any] = {"case": case, "op": op, "dtype": str(x.dtype).removeprefix("torch."),
                           "window": window, "direction": "both" if backward else "forward"}
    rivals = _rivals(x, case, op, window, backward)
    on_device = _on_gpu if x.is_cuda else _on_cpu
    if pandas is not None and x.dtype == torch.float64:
        frame = pandas.DataFrame((x.t() if dim == 1 else x).numpy())
        rivals["pandas"] = (lambda: getattr(frame.rolling(window), op)(), 1.0)
    try:
        row |= on_device(run, x, ours, nbytes, rivals, backward)
    except Exception as error:
        row["error"] = why(error)
    run.add(**row)


def _on_gpu(run: Any, x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor], nbytes: int,
            rivals: dict[str, tuple[Call, float]], backward: bool) -> dict[str, Any]:
    sets = [x, *(x.clone() for _ in range(timing.n_sets(nbytes) - 1))]
    with timing.stream():
        if backward:
            time = sampling.issued({"": [functools.partial(_both, function, s) for s in sets]}, rounds=5)[""]
        else:
            time = timing.replayed({"": [functools.partial(function, s) for s in sets]})[""]
        rate = run.ceiling("copy", ceilings.copy(nbytes))
        row = {"us": time.us, "spread": time.spread, "TB/s": nbytes / time.us / 1e6,
               "of_copy": nbytes / time.us / 1e6 / rate}
        for name, (call, times) in rivals.items():
            try:
                taken = sampling.issued({"": [call]}, rounds=3)[""].us * times
                row |= {f"{name}_us": taken, f"vs_{name}": taken / time.us}
            except torch.cuda.OutOfMemoryError as error:
                run.note(f"{name}: {why(error)}")
                timing.release()
    return row


def _on_cpu(run: Any, x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor], nbytes: int,
            rivals: dict[str, tuple[Call, float]], backward: bool) -> dict[str, Any]:
    time = timing.cpu({"ours": functools.partial(function, x)}, rounds=7)["ours"]
    row = {"us": time.us, "spread": time.spread, "GB/s": nbytes / time.us / 1e3}
    for name, (call, times) in rivals.items():
        taken = timing.cpu({name: call}, rounds=1)[name].us * times
        row |= {f"{name}_us": taken, f"vs_{name}": taken / time.us}
    return row


if __name__ == "__main__":
    main()
