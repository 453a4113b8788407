"""`benchmark_kernel`: the time of a call, of one function or of several that take turns."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch

from fusionrt.arguments import as_count
from fusionrt.bench import sampling, timing, traffic
from fusionrt.bench.timing import Call

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
MOST_SETS = 64        # in rotation; where more would be needed, the L2 is flushed
FLUSH = 4             # times the L2: what is read to flush it, or rotated through


@dataclass(frozen=True, repr=False)
class Measurement:
    """Times of one function. Attributes are microseconds a call, items milliseconds.

    On a GPU `samples` and what follows from it are device time, `host_samples` and `host` the time
    in which the host issued a call. On a CPU there is only the wall time.

    Items, as other benchmark libraries name them: `mean_time`, `median_time`, `std_time`, `min_time`,
    `max_time`, in ms.
    """

    name: str
    device: str
    method: str                          # how it was measured, in words
    samples: tuple[float, ...]
    host_samples: tuple[float, ...] = ()
    calls: int = 1                       # that each sample is the mean of

    @property
    def mean(self) -> float:
        return float(np.mean(self.samples))

    @property
    def median(self) -> float:
        return float(np.median(self.samples))

    us = median  # as result files call it

    @property
    def std(self) -> float:
        """Of the samples, with n - 1; 0 of a single one."""
        return float(np.std(self.samples, ddof=1)) if len(self.samples) > 1 else 0.0

    @property
    def min(self) -> float:
        return min(self.samples)

    @property
    def max(self) -> float:
        return max(self.samples)

    @property
    def host(self) -> float | None:
        """Median time in which the host issued a call; None on a CPU."""
        return float(np.median(self.host_samples)) if self.host_samples else None

    @property
    def spread(self) -> float:
        """The machine's noise: interquartile range / median. Smaller differences mean nothing."""
        low, high = np.percentile(self.samples, (25, 75))
        return float((high - low) / self.median) if self.median else 0.0

    def percentile(self, q: float) -> float:
        return float(np.percentile(self.samples, q))

    @property
    def percentiles(self) -> dict[int, float]:
        return dict(zip(PERCENTILES, map(float, np.percentile(self.samples, PERCENTILES)), strict=True))

    def keys(self) -> list[str]:
        return ["mean_time", "median_time", "std_time", "min_time", "max_time"]

    def __getitem__(self, key: str) -> float:
        if key not in self.keys():
            raise KeyError(f"{key!r}; there are {', '.join(self.keys())} (in ms)")
        return float(getattr(self, key.removesuffix("_time"))) / 1e3

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON, in us."""
        return {"name": self.name, "device": self.device, "method": self.method, "calls": self.calls,
                "us": self.median, "mean": self.mean, "std": self.std, "min": self.min, "max": self.max,
                "spread": self.spread, "host_us": self.host, "percentiles": self.percentiles,
                "samples": list(self.samples), "host_samples": list(self.host_samples)}

    def __repr__(self) -> str:
        host = "" if self.host is None else f", host {self.host:.4g} us"
        return (f"{self.name}: median {self.median:.4g} us (mean {self.mean:.4g}, std {self.std:.2g}, min "
                f"{self.min:.4g}, max {self.max:.4g}, noise {self.spread:.1%}){host}; {self.method}")


@overload
def benchmark_kernel(fn: Callable[..., Any], inputs: Any = ..., warmup: int = ..., repeat: int = ..., *,
                     cold: bool | None = ..., graph: bool = ...,
                     device: str | torch.device | None = ...) -> Measurement: ...
@overload
def benchmark_kernel(fn: Mapping[str, Callable[..., Any]], inputs: Any = ..., warmup: int = ...,
                     repeat: int = ..., *, cold: bool | None = ..., graph: bool = ...,
                     device: str | torch.device | None = ...) -> dict[str, Measurement]: ...


def benchmark_kernel(fn: Callable[..., Any] | Mapping[str, Callable[..., Any]], inputs: Any = (),
                     warmup: int = 10, repeat: int = 100, *, cold: bool | None = None,
                     graph: bool = False, device: str | torch.device | None = None
                     ) -> Measurement | dict[str, Measurement]:
    """Measure a function, or several that take turns, so that a drift of the clock meets all of them.

    fn:      a function, or a mapping of names to functions; the result is a `Measurement`, or a dict of
             them. What it returns is ignored; it may work by side effects.
    inputs:  a tuple or list of arguments, a mapping of keyword arguments, or a single argument. Torch
             tensors, CuPy and NumPy arrays, and anything else.
    warmup:  calls before the clock starts (one at least).
    repeat:  samples. One sample of a short call is the mean of several calls.
    cold:    (GPU) whether the inputs are outside the L2 cache when a call begins: the calls take copies of
             the inputs in turns, four times the L2 in all; inputs that are too small or cannot be copied
             stay, and the L2 is flushed before every sample, which then is one call. False: calls follow
             each other on the same inputs. None: cold from 16 MiB of inputs on, as nobody's inputs of that
             size wait in the L2.
    graph:   (GPU) replay the calls from a CUDA graph: launches then cost nothing. What allocates memory
             other than through torch cannot be captured.
    device:  "cpu", "cuda", "cuda:1". Default: that of the arrays among the inputs; without any, the GPU
             if there is one.

    On a GPU times are device time, by CUDA events, while the host is ahead of the device: a call that
    sleeps on the host does not become longer. The host's own time is `host`. A call that waits for the
    device itself (`.item()`, `synchronize`) cannot be separated from it; `method` says so. On a CPU times
    are wall time, by `perf_counter`.

    Raises VariantError, naming the variant, for what a function raises; ValueError and TypeError for
    arguments.

        m = benchmark_kernel(torch.softmax, (x, -1))
        m.median, m.host, m.spread, m.percentile(99), m.samples     # in us
        m = benchmark_kernel({"a": f, "b": g}, (x,), cold=False)
        m["a"].median / m["b"].median
    """
    check_functions("benchmark_kernel", fn if isinstance(fn, Mapping) else {"fn": fn})
    variants = fn if isinstance(fn, Mapping) else {name_of(fn): fn}
    _check(variants, warmup, repeat)
    args, kwargs = split_inputs(inputs)
    where = traffic.device_of((args, kwargs), device)
    if where.type == "cpu":
        if cold or graph:
            raise ValueError(f"benchmark_kernel: {'cold' if cold else 'graph'}=True is for GPUs; the device "
                             "is the CPU")
        bound = {name: functools.partial(f, *args, **kwargs) for name, f in variants.items()}
        taken, cache = sampling.on_cpu(bound, warmup, repeat), ""
    else:
        taken, cache = _on_gpu(variants, args, kwargs, warmup, repeat, cold, graph, where)
    label = str(where) if where.type == "cpu" else f"{where} ({torch.cuda.get_device_name(where)})"
    found = {name: Measurement(name, label, s.method + cache, tuple(s.us), tuple(s.host), s.calls)
             for name, s in taken.items()}
    return found if isinstance(fn, Mapping) else next(iter(found.values()))


def name_of(fn: Any) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))


def check_functions(caller: str, functions: Mapping[str, Any]) -> None:
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{caller}: {name} must be a function, got {type(function).__name__}")


def _check(variants: Mapping[str, Any], warmup: int, repeat: int) -> None:
    if not variants:
        raise ValueError("benchmark_kernel: no function to measure, got an empty mapping")
    as_count("benchmark_kernel", "warmup", warmup)
    as_count("benchmark_kernel", "repeat", repeat, 1)


def split_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


# -- GPU -------------------------------------------------------------------------------------------

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def _on_gpu(variants: Mapping[str, Callable[..., Any]], args: Any, kwargs: Any, warmup: int, repeat: int,
            cold: bool | None, graph: bool, device: torch.device
            ) -> tuple[dict[str, sampling.Samples], str]:
    with torch.cuda.device(device), _stream(graph):
        nbytes = sum(map(traffic.extent, traffic.arrays((args, kwargs))))
        sets, flush, cache = [(args, kwargs)], None, "; L2 warm"
        if cold or (cold is None and nbytes >= timing.LARGE):
            sets, flush, cache = _cold(args, kwargs, nbytes)
        calls = {name: [functools.partial(f, *a, **k) for a, k in sets] for name, f in variants.items()}
        return sampling.on_gpu(calls, warmup, repeat, flush, graph), cache


def _cold(args: tuple[Any, ...], kwargs: dict[str, Any], nbytes: int
          ) -> tuple[list[Inputs], Call | None, str]:
    """Input sets in rotation, what flushes the L2 where they do not suffice, and both in words."""
    wanted = FLUSH * torch.cuda.get_device_properties(None).L2_cache_size
    count = -(-wanted // max(1, nbytes))
    sets = [(args, kwargs)]
    if count <= MOST_SETS and count * nbytes < torch.cuda.mem_get_info()[0] // 2:
        while len(sets) < count and (one := copied(sets[0])) is not None:
            sets.append(one)
    if len(sets) == count:
        return sets, None, f"; L2 cold: {count} input sets in rotation"
    # Read, not written: dirty lines would be written back in the time of the call.
    buffer = torch.zeros(wanted // 4, dtype=torch.float32, device="cuda")
    result = torch.empty((), dtype=torch.float32, device="cuda")
    return sets[:1], lambda: torch.sum(buffer, 0, out=result), "; L2 cold: flushed before every sample"


def copied(inputs: Any) -> Any:
    """With arrays of their own, of the same strides; None where something cannot be copied."""
    try:
        return copy.deepcopy(inputs)
    except (RuntimeError, TypeError):  # tensors inside an autograd graph, generators, handles
        return None


@contextlib.contextmanager
def _stream(graph: bool) -> Iterator[None]:
    """A graph needs a stream that is not the default one; CuPy, where it is in use, takes torch's."""
    with timing.stream() if graph else contextlib.nullcontext():
        current, cupy = torch.cuda.current_stream().cuda_stream, sys.modules.get("cupy")
        with cupy.cuda.ExternalStream(current) if cupy and current else contextlib.nullcontext():
            yield
