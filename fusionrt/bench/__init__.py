"""Measure, compare and explain: benchmarks of GPU and CPU code, ours or anyone's.

    from fusionrt import bench

    bench.benchmark_kernel(torch.softmax, (x, -1))             # one call: time, host time, noise
    found = bench.compare_implementations(
        {"eager": lambda a, b: torch.relu(a + b), "fused": fusionrt.add_relu}, (a, b),
        reference=lambda a, b: torch.relu(a + b))
    print(found)                                               # a table; to_json, to_csv, plot, ...

One file an idea: `kernel` and `sampling` (times), `accuracy`, `traffic` (bytes, the unfused chain),
`ceilings` (the copy's rate), `memory`, `profile` (kernels, registers, occupancy), `comparison` (all of it,
side by side), `plot`, `entries` (the same under the names of older libraries). Of our own ops: `command`
(`fusionrt bench`), `suite` with `case`, `rivals` and `timing`, `results` (files of them), `baseline`,
`findings`, `report` with `charts` (the page).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusionrt import lazy

_MODULE = {
    "Accuracy": "accuracy", "Comparison": "comparison", "CPUKernelBenchmark": "entries",
    "KernelProfiler": "entries", "Measurement": "kernel", "VariantError": "sampling",
    "benchmark_kernel": "kernel", "compare_functions": "entries", "compare_implementations": "comparison",
    "profile_model_inference": "entries", "profile_with_pytorch_profiler": "entries",
    "quick_benchmark": "entries",
}
_SUBMODULES = ("accuracy", "comparison", "entries", "kernel", "memory", "plot", "profile", "report",
               "results", "sampling", "suite", "timing", "traffic")

__getattr__, __dir__, __all__ = lazy.attach(__name__, _MODULE, _SUBMODULES)

if TYPE_CHECKING:
    from fusionrt.bench.accuracy import Accuracy as Accuracy
    from fusionrt.bench.comparison import Comparison as Comparison
    from fusionrt.bench.comparison import compare_implementations as compare_implementations
    from fusionrt.bench.entries import CPUKernelBenchmark as CPUKernelBenchmark
    from fusionrt.bench.entries import KernelProfiler as KernelProfiler
    from fusionrt.bench.entries import compare_functions as compare_functions
    from fusionrt.bench.entries import profile_model_inference as profile_model_inference
    from fusionrt.bench.entries import profile_with_pytorch_profiler as profile_with_pytorch_profiler
    from fusionrt.bench.entries import quick_benchmark as quick_benchmark
    from fusionrt.bench.kernel import Measurement as Measurement
    from fusionrt.bench.kernel import benchmark_kernel as benchmark_kernel
    from fusionrt.bench.sampling import VariantError as VariantError
