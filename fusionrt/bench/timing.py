"""How everything here is measured.

Variants take turns within a run, so that a drift of the clock meets all of them; what counts is the
median. Times are microseconds a call.

* `replayed`: device time of large or short kernels. Calls on several input sets are captured into a
  CUDA graph whose outputs all stay alive, and replayed between two events: nothing of the host.
* `bursts`: what a call costs the host, and a user, when calls follow each other.
* `latency`: one call and a wait for it.
* `cpu`: wall time of a call on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fusionrt import collector

Call = Callable[[], object]
BURST = 300  # calls: fewer than the launch queue holds (1024), so the host never waits for it


class Time(NamedTuple):
    us: float
    spread: float  # interquartile range / median: a smaller difference between variants is noise


class Burst(NamedTuple):
    host: Time  # until the calls have been issued
    wall: Time  # until the device has finished them


def summary(samples: Sequence[float]) -> Time:
    middle = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else (middle,) * 3
    return Time(round(middle, 3), round((high - low) / middle, 4) if middle else 0.0)


def in_turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Every name once a round, backwards in every other one: no variant always follows the same."""
    for k in range(rounds):
        yield from names if k % 2 == 0 else reversed(names)


# -- CPU -------------------------------------------------------------------------------------------

def cpu(variants: Mapping[str, Call], rounds: int = 15, uncounted: float = 0.02) -> dict[str, Time]:
    """A turn is three calls, after `uncounted` seconds of calls that are not counted: OpenMP's threads
    keep spinning after torch's calls and would slow down whoever comes next."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        call()
    with collector.paused():
        for name in in_turns(list(variants), rounds):
            call, begin = variants[name], time.perf_counter() + uncounted
            while time.perf_counter() < begin:
                call()
            for _ in range(3):
                start = time.perf_counter()
                call()
                samples[name].append((time.perf_counter() - start) * 1e6)
    return {name: summary(taken) for name, taken in samples.items()}


# -- GPU: the host's side --------------------------------------------------------------------------

def bursts(variants: Mapping[str, Call], calls: int = BURST, rounds: int = 21) -> dict[str, Burst]:
    host: dict[str, list[float]] = {name: [] for name in variants}
    wall: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        for _ in range(20):
            call()
    with collector.paused():
        for name in in_turns(list(variants), rounds):
            call = variants[name]
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            issued = time.perf_counter()
            torch.cuda.synchronize()
            host[name].append((issued - start) * 1e6 / calls)
            wall[name].append((time.perf_counter() - start) * 1e6 / calls)
    return {name: Burst(summary(host[name]), summary(wall[name])) for name in variants}


def latency(variants: Mapping[str, Call], rounds: int = 70) -> dict[str, Time]:
    def waiting(call: Call) -> Call:
        def run() -> None:
            call()
            torch.cuda.synchronize()
        return run

    return cpu({name: waiting(call) for name, call in variants.items()}, rounds, uncounted=0.001)


# -- GPU: the device's side ------------------------------------------------------------------------

@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def stream() -> Iterator[None]:
    """All of a GPU benchmark runs in here: a backward pass runs on the stream of its forward pass,
    and a graph can only be captured on a stream that is not the default one."""
    with torch.cuda.stream(_stream(torch.cuda.current_device())):
        yield
    torch.cuda.synchronize()


@functools.cache
def _pool(device: int) -> tuple[Any, torch.cuda.CUDAGraph]:
    """One memory pool for all graphs, kept by an empty one: memory is not fetched anew for each.

    Graphs then write over each other's outputs, which nobody reads.
    """
    pool, keeper = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    keeper.capture_begin(pool=pool)
    torch.zeros(1, dtype=torch.uint8, device="cuda")
    keeper.capture_end()
    return pool, keeper


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    for call in calls[:2]:
        call()  # compiles and allocates whatever has to be
    torch.cuda.synchronize()
    pool, graph = _pool(torch.cuda.current_device())[0], torch.cuda.CUDAGraph()
    gc.disable()  # what it may free cannot be freed during a capture
    graph.capture_begin(pool=pool)
    try:
        kept = [call() for call in calls]  # alive until the end: no output reuses another's memory
    except BaseException:  # KeyboardInterrupt as well: an open capture makes whatever comes after it fail
        _abandon(graph)
        raise
    else:
        graph.capture_end()
    finally:
        gc.enable()
    del kept
    return graph


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture that failed. torch leaves it half open then: its pool cannot be used again, and random
    numbers are refused until some other capture has ended well."""
    with contextlib.suppress(RuntimeError):  # it would hide why
        graph.capture_end()
    _pool.cache_clear()
    _pool(torch.cuda.current_device())


def release() -> None:
    """Between cases: give memory back."""
    gc.collect()
    torch.cuda.empty_cache()


def replayed(variants: Mapping[str, Sequence[Call]], rounds: int = 11) -> dict[str, Time]:
    """Device time a call; a variant is its calls, on as many input sets as there are."""
    graphs = {name: capture(calls) for name, calls in variants.items()}
    return _on_device({name: (graphs[name].replay, len(calls)) for name, calls in variants.items()},
                      rounds)


AHEAD = 200_000  # cycles of the device, 0.1 ms, in which the host issues graphs


def _on_device(variants: Mapping[str, tuple[Call, int]], rounds: int) -> dict[str, Time]:
    names, events = list(variants), []
    for k, name in enumerate(in_turns(names, rounds + 2)):
        if k % len(names) == 0:
            torch.cuda.synchronize()
            torch.cuda._sleep(AHEAD)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        variants[name][0]()
        end.record()
        events.append((name, start, end))
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in names}
    for name, start, end in events[2 * len(names):]:  # without the first two rounds
        samples[name].append(start.elapsed_time(end) * 1e3 / variants[name][1])
    return {name: summary(taken) for name, taken in samples.items()}


# -- input sets ------------------------------------------------------------------------------------

LARGE = 16 << 20  # bytes a call, from which on the inputs are rotated so that they leave the L2


def n_sets(nbytes: int) -> int:
    """Input sets in rotation: four times the L2 in all; one, and a warm L2, for small calls."""
    if nbytes < LARGE:
        return 1
    l2 = torch.cuda.get_device_properties(None).L2_cache_size
    return max(2, -(-4 * l2 // nbytes))


def n_calls(nbytes: int) -> int:
    """Calls in a graph: so many that its start does not count, in a few gigabytes."""
    return max(n_sets(nbytes), min(100, max(2, (4 << 30) // nbytes)))
