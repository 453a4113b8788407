"""Memory that a call takes beyond its inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch


class Memory(NamedTuple):
    """Of one call, its result included. What is not allocated through torch (CuPy's pool, NumPy's arrays,
    a library's own workspace) is not seen."""

    peak: int          # bytes, the most at one time beyond what there was before
    allocations: int   # blocks asked for


def measure(call: Callable[[], object], device: torch.device) -> Memory:
    """Of a call that has been warmed up: what is kept for later calls should be there already.

    On a GPU by the counters of torch's caching allocator, which rounds blocks to 512 bytes; on a CPU by
    the profiler's record of torch's allocator, which sees every block, a number's 8 bytes too.
    """
    return _on_gpu(call, device) if device.type == "cuda" else _on_cpu(call)


def _on_gpu(call: Callable[[], object], device: torch.device) -> Memory:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    after = torch.cuda.memory_stats(device)
    del result
    peak = after.get("allocated_bytes.all.peak", 0) - before.get("allocated_bytes.all.current", 0)
    blocks = "allocation.all.allocated"
    return Memory(peak, after.get(blocks, 0) - before.get(blocks, 0))


def _on_cpu(call: Callable[[], object]) -> Memory:
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        result = call()
    del result
    assert profiler.kineto_results is not None  # of a profile that has ended
    steps = [e.nbytes() for e in sorted(profiler.kineto_results.events(), key=lambda e: e.start_ns())
             if e.name() == "[memory]" and e.device_type() == torch.autograd.DeviceType.CPU]
    return Memory(max(itertools.accumulate(steps, initial=0)), sum(size > 0 for size in steps))
