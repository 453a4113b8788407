"""How samples of a call's time are taken; variants take turns.

On a GPU a sample is the time between two events around some calls, which the host issues while the
device is still kept busy. So it holds nothing of the host, as long as the host gets that far ahead,
which each sample checks. On a CPU it is wall time.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from fusionrt import collector
from fusionrt.bench import timing
from fusionrt.bench.timing import Call
from fusionrt.errors import one_line

CPU_SAMPLE = 20.0       # us that a sample should take at least: 400 ticks of the clock
GPU_SAMPLE = 250.0      # us, beside which what two events add counts little
LONG_SAMPLE = 1000.0    # us, beside which the start of a graph does
MOST_CALLS = 50         # a sample: fewer launches than the queue holds (1024) wait in it
CYCLES = 2000           # of the device's clock a microsecond, at most
LONGEST_SPIN = 500_000  # us


class VariantError(RuntimeError):
    """A benchmarked function raised: `variant` is its name, `__cause__` what it raised."""

    def __init__(self, variant: str, error: Exception) -> None:
        super().__init__(f"variant {variant!r} raised {one_line(error)}")
        self.variant = variant


class naming:
    """What is raised in here is the variant's fault. (`contextmanager` would let StopIteration through.)"""

    def __init__(self, variant: str) -> None:
        self.variant = variant

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            raise VariantError(self.variant, error) from error


class Samples(NamedTuple):
    us: list[float]
    host: list[float]  # us in which the host issued a call; empty on a CPU
    calls: int         # that a sample is the mean of
    method: str


# -- CPU -------------------------------------------------------------------------------------------

def on_cpu(variants: Mapping[str, Call], warmup: int, repeat: int) -> dict[str, Samples]:
    calls = {}
    for name, call in variants.items():
        with naming(name):
            for _ in range(max(1, warmup)):
                call()
            calls[name] = _enough(_timed(call, 1), CPU_SAMPLE, 1000)
    found: dict[str, list[float]] = {name: [] for name in variants}
    turns = min(repeat, 10) if len(variants) > 1 else 1
    shares = [repeat // turns + (turn < repeat % turns) for turn in range(turns)]
    with collector.paused():
        for k, name in enumerate(timing.in_turns(list(variants), turns)):
            call = variants[name]
            with naming(name):
                if turns > 1:
                    _call_uncounted(call)
                else:
                    _timed(call, calls[name])  # caches are not what they were before the collector
                for _ in range(shares[k // len(variants)]):
                    found[name].append(_timed(call, calls[name]))
    return {name: Samples(taken, [], calls[name], f"perf_counter around {_calls(calls[name])}")
            for name, taken in found.items()}


def _timed(call: Call, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) * 1e6 / calls


def _call_uncounted(call: Call, seconds: float = 0.02) -> None:
    """Calls that do not count: OpenMP's threads keep spinning after the variant before."""
    until = time.perf_counter() + seconds
    call()
    while time.perf_counter() < until:
        call()


def _enough(us: float, sample: float, most: int) -> int:
    """Calls whose time fills a sample."""
    return max(1, min(most, math.ceil(sample / max(us, 1e-3))))


def _calls(calls: int) -> str:
    return f"{calls} calls" if calls > 1 else "a call"


# -- GPU -------------------------------------------------------------------------------------------

class Sample(NamedTuple):
    us: float     # on the device, a call
    host: float   # us that issuing took, a call
    ahead: bool   # the host had issued everything before the device began


class Variant:
    """Takes samples of one function, whose calls (one an input set) take turns."""

    def __init__(self, name: str, calls: Sequence[Call], flush: Call | None, weight: int = 1) -> None:
        self.name, self.flush, self.rotation = name, flush, itertools.cycle(calls)
        self.weight = weight   # what one of `calls` counts for: a graph holds many
        self.calls, self.spin, self.waits, self.behind = 1, 0.0, False, 0

    def take(self) -> Sample:
        if self.flush is not None:
            self.flush()
        if self.spin:
            torch.cuda._sleep(int(self.spin * CYCLES))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        began = time.perf_counter()
        for call in itertools.islice(self.rotation, self.calls):
            call()
        host = time.perf_counter() - began
        end.record()
        ahead = not start.query()
        end.synchronize()
        count = self.calls * self.weight
        return Sample(start.elapsed_time(end) * 1e3 / count, host * 1e6 / count, ahead)

    def prepare(self, sample: float = GPU_SAMPLE) -> None:
        """Find how long the device must be kept busy, and how many calls a sample of so many us needs."""
        self._get_ahead()
        if self.flush is not None or self.waits:
            return
        first = min((self.take() for _ in range(3)), key=lambda sample: sample.us)
        few = max(1, int(2000 / max(1.0, first.host * self.weight)))  # a slow host: 2 ms a sample
        self.calls = min(few, _enough(first.us * self.weight, sample, MOST_CALLS))
        if self.calls > 1:
            self._get_ahead()

    def _get_ahead(self) -> None:
        self.spin = 0.0
        torch.cuda.synchronize()
        self.spin = 20 + 2 * self.take().host * self.calls * self.weight
        for _ in range(3):
            if self.spin > LONGEST_SPIN:
                break
            if self.take().ahead:
                return
            self.spin *= 2
        self.spin, self.waits = 0.0, True

    def counted(self) -> Sample:
        """A sample; taken again when something held up the host."""
        for _ in range(1 if self.waits else 3):
            sample = self.take()
            if sample.ahead:
                return sample
        self.behind += 1
        return sample


def issued(variants: Mapping[str, Sequence[Call]], rounds: int = 11) -> dict[str, timing.Time]:
    """Device time of calls that no graph can hold, as `timing.replayed` gives it of those that one can; what
    they raise is raised as it is as well."""
    try:
        found = on_gpu(variants, 2, rounds, None, False, LONG_SAMPLE)
    except VariantError as error:
        raise error.__cause__ or error from None
    return {name: timing.summary(samples.us) for name, samples in found.items()}


def on_gpu(variants: Mapping[str, Sequence[Call]], warmup: int, repeat: int, flush: Call | None,
           graph: bool, sample: float = GPU_SAMPLE) -> dict[str, Samples]:
    """A variant is its calls, one an input set; `flush` comes before every sample.

    Graphs are captured on the current stream, which then must not be the default one.
    """
    prepared: dict[str, Variant] = {}
    for name, calls in variants.items():
        with naming(name):
            for call in itertools.islice(itertools.cycle(calls), max(1, warmup)):
                call()
            torch.cuda.synchronize()
            prepared[name] = variant = Variant(name, calls, flush)
            variant.prepare(sample)
            if graph:
                prepared[name] = _captured(variant, calls)
    samples: dict[str, list[Sample]] = {name: [] for name in variants}
    with collector.paused():
        for name in timing.in_turns(list(variants), repeat):
            with naming(name):
                samples[name].append(prepared[name].counted())
    return {name: Samples([s.us for s in taken], [s.host for s in taken],
                          prepared[name].calls * prepared[name].weight,
                          _how(prepared[name], repeat, graph))
            for name, taken in samples.items()}


def _captured(variant: Variant, calls: Sequence[Call]) -> Variant:
    """The same calls as a CUDA graph; one alone where the L2 is flushed in between."""
    count = 1
    if variant.flush is None:
        us = min(variant.take().us for _ in range(3))
        count = max(len(calls), _enough(us, LONG_SAMPLE, 300))
    graph = timing.capture(list(itertools.islice(itertools.cycle(calls), count)))
    found = Variant(variant.name, [graph.replay], variant.flush, count)
    found.prepare()
    return found


def _how(variant: Variant, repeat: int, graph: bool) -> str:
    count = _calls(variant.calls * variant.weight)
    how = f"CUDA events around {'a graph of ' if graph else ''}{count}"
    if variant.waits:
        return f"{how}, which waited for the device or issued slowly: gaps that the host leaves count"
    if variant.behind:
        return f"{how}; in {variant.behind} of {repeat} samples the host fell behind"
    return how
