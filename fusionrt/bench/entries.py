"""The engine under the names and signatures of older libraries. Times are in milliseconds here, as theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fusionrt.arguments import as_count
from fusionrt.bench import memory, profile, traffic
from fusionrt.bench.kernel import Measurement, benchmark_kernel, check_functions, name_of

Function = Callable[..., Any]
Statistics = dict[str, float]


class KernelProfiler:
    """Compares functions.

        profiler = KernelProfiler()
        results = profiler.compare_implementations({"eager": f, "fused": g}, args=(x,))
        results["fused"]["mean_time"], results["fused"]["memory"]
        profiler.plot_comparison(results, path="comparison.png")
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        """`device`: "cpu" or "cuda"; default: where the arguments are."""
        self.device = device

    def compare_implementations(self, implementations: Mapping[str, Function], args: Sequence[Any] = (),
                                kwargs: Mapping[str, Any] | None = None, num_iterations: int = 50
                                ) -> dict[str, Statistics]:
        """Name -> mean_time, median_time, std_time, min_time, max_time (ms), memory (bytes, the most that
        a call takes beyond its arguments), of num_iterations samples.

        `args`: a tuple or list of arguments, or a single one. Raises TypeError for what is no function.
        """
        as_count("compare_implementations", "num_iterations", num_iterations, 1)
        if not isinstance(implementations, Mapping):
            raise TypeError("compare_implementations: implementations must be a mapping of names to "
                            f"functions, got {type(implementations).__name__}")
        check_functions("compare_implementations", implementations)
        args = _arguments(args)
        calls = {name: functools.partial(f, *args, **(kwargs or {})) for name, f in implementations.items()}
        where = traffic.device_of((args, kwargs), self.device)
        times = benchmark_kernel(calls, repeat=num_iterations, device=where)
        return {name: {**measured, "memory": memory.measure(calls[name], where).peak}
                for name, measured in times.items()}

    @staticmethod
    def plot_comparison(results: Mapping[str, Mapping[str, float]], metric: str = "mean_time",
                        title: str = "", path: str | Path = "comparison.png") -> None:
        """Draw one of the times as bars into the file `path`; needs matplotlib, and no display."""
        from fusionrt.bench import plot
        unknown = [name for name, row in results.items() if metric not in row or not metric.endswith("_time")]
        if unknown:
            raise ValueError(f"plot_comparison: metric must be a time in the results, as mean_time, got "
                             f"{metric!r}")
        plot.bars([{"name": name, "us": row[metric] * 1e3} for name, row in results.items()], path, title)


class CPUKernelBenchmark:
    """Wall times on the CPU.

        CPUKernelBenchmark.compare_implementations({"sdpa": f, "ours": g}, q, k, v)
    """

    @staticmethod
    def benchmark_function(func: Function, *args: Any, warmup: int = 5, repeat: int = 20) -> Statistics:
        """mean, std, min, max in ms."""
        return _plain(benchmark_kernel(func, args, warmup, repeat, device="cpu"))

    @staticmethod
    def compare_implementations(implementations: Mapping[str, Function], *args: Any, warmup: int = 5,
                                repeat: int = 20) -> dict[str, Statistics]:
        """Name -> mean, std, min, max in ms. They take turns."""
        times = benchmark_kernel(implementations, args, warmup, repeat, device="cpu")
        return {name: _plain(measured) for name, measured in times.items()}


def _plain(measured: Measurement) -> Statistics:
    return {name: measured[f"{name}_time"] for name in ("mean", "std", "min", "max")}


def quick_benchmark(function: Function, *args: Any, num_iterations: int = 50, **kwargs: Any) -> Measurement:
    """One function's times. Raises TypeError for what is no function.

        quick_benchmark(torch.relu, x)["mean_time"]    # ms
    """
    check_functions("quick_benchmark", {"function": function})
    as_count("quick_benchmark", "num_iterations", num_iterations, 1)
    name, call = name_of(function), functools.partial(function, **kwargs)
    where = traffic.device_of((args, kwargs))
    return benchmark_kernel({name: call}, args, repeat=num_iterations, device=where)[name]


def compare_functions(functions: Mapping[str, Function] | Sequence[Function], *args: Any,
                      num_iterations: int = 50, **kwargs: Any) -> dict[str, Statistics]:
    """As KernelProfiler.compare_implementations; functions of a list go by their own names.

    Raises ValueError where two of a list have the same name, TypeError for what is no function.

        compare_functions([torch.relu, torch.sigmoid], x)["relu"]["mean_time"]
    """
    if not isinstance(functions, (Mapping, Sequence)):
        raise TypeError("compare_functions: functions must be a list of functions or a mapping of names to "
                        f"functions, got {name_of(functions)}")
    if not isinstance(functions, Mapping):
        named = {getattr(f, "__name__", repr(f)): f for f in functions}
        if len(named) < len(functions):
            raise ValueError("compare_functions: the functions need different names; give a mapping of names "
                             "to functions")
        functions = named
    return KernelProfiler().compare_implementations(functions, args, kwargs, num_iterations)


def profile_with_pytorch_profiler(functions: Sequence[tuple[Function, str, Sequence[Any]]],
                                  iterations: int = 10) -> dict[str, list[profile.KernelTime]]:
    """Of each (function, name, arguments) what it runs on the GPU, or its ops on a CPU: name, us and launches
    a call, the longest first. Raises TypeError for what is no function, ValueError for a name twice.

        profile_with_pytorch_profiler([(torch.softmax, "softmax", (x, -1))])["softmax"][0].us
    """
    as_count("profile_with_pytorch_profiler", "iterations", iterations, 1)
    for each in functions:
        if not isinstance(each, (tuple, list)) or len(each) != 3:
            raise TypeError("profile_with_pytorch_profiler: functions must be triples (function, name, "
                            f"arguments), got {name_of(each)}")
    named = {name: (function, _arguments(args)) for function, name, args in functions}
    if len(named) < len(functions):
        raise ValueError("profile_with_pytorch_profiler: the functions need different names, got "
                         + ", ".join(str(name) for _, name, _ in functions))
    check_functions("profile_with_pytorch_profiler", {name: f for name, (f, _) in named.items()})
    found = {}
    for name, (function, args) in named.items():
        call = functools.partial(function, *args)
        call()
        found[name] = profile.kernels(call, traffic.device_of(args), iterations)
    return found


def _arguments(args: Any) -> tuple[Any, ...]:
    """A tuple or a list of them, or a single one."""
    return tuple(args) if isinstance(args, (tuple, list)) else (args,)


def profile_model_inference(model: torch.nn.Module, x: Any, num_iterations: int = 50, top: int = 10) -> str:
    """A report on a model's forward pass without gradients: time, memory, and what takes the time.

    `x` is its argument, or a tuple of them. The model is in evaluation mode meanwhile, and keeps its own
    mode and parameters. Raises TypeError for what is no module.

        print(profile_model_inference(model, x))
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError("profile_model_inference: model must be a torch.nn.Module, got "
                        f"{type(model).__name__}")
    as_count("profile_model_inference", "num_iterations", num_iterations, 1)
    as_count("profile_model_inference", "top", top)
    args = _arguments(x)
    where = traffic.device_of((args, list(model.parameters())))
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            model.eval()
            call = functools.partial(model, *args)
            taken = benchmark_kernel({type(model).__name__: call}, repeat=num_iterations, device=where)
            peak = memory.measure(call, where).peak
            found = profile.kernels(call, where)
    finally:
        for module, mode in modes:
            module.training = mode
    return _report(next(iter(taken.values())), sum(p.numel() for p in model.parameters()), peak, found, top)


def _report(measured: Measurement, parameters: int, peak: int, found: list[profile.KernelTime], top: int
            ) -> str:
    kind = "op" if measured.device == "cpu" else "kernel"
    total, count = sum(k.us for k in found), sum(k.launches for k in found)
    host = "" if measured.host is None else f", of the host {measured.host / 1e3:.4g} ms"
    lines = [f"{measured.name} on {measured.device}: {parameters:,} parameters",
             f"time: {measured['median_time']:.4g} ms (mean {measured['mean_time']:.4g}, std "
             f"{measured['std_time']:.2g}, min {measured['min_time']:.4g}, max {measured['max_time']:.4g}, "
             f"noise {measured.spread:.1%}){host}",
             f"memory beyond the arguments: {peak / 1e6:.4g} MB",
             f"{count:g} {kind}s, {total / 1e3:.4g} ms"]
    lines += [f"  {k.us / total:6.1%}  {k.us:10.2f} us  {k.launches:5g} x  {k.name[:90]}"
              for k in found[:top]]
    if len(found) > top:
        rest = sum(k.us for k in found[top:])
        lines.append(f"  {rest / total:6.1%}  {rest:10.2f} us  {len(found) - top} other {kind}s")
    return "\n".join(lines)
