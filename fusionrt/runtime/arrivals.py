"""Where the blocks of a launch count themselves: to meet, or for the last one to add up what all left."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from fusionrt import forks
from fusionrt.runtime import device as cuda

COUNTERS = 1 << 14  # of a device, and as many more when none is left

_local = threading.local()
_lock = forks.Lock()
_free: dict[int, Iterator[int]] = {}  # of a device, the addresses of counters that nobody has


def counter(device: int, stream: int) -> int:
    """Its address. Launches of one stream follow each other and share it; each that a graph holds has its
    own, as graphs run beside each other."""
    return _next(device) if torch.cuda.is_current_stream_capturing() else of_stream(device, stream)


def of_stream(device: int, stream: int) -> int:
    """This thread's, whatever is captured."""
    known = _local.__dict__.setdefault("counters", {})
    found: int | None = known.get((device, stream))
    if found is None:
        found = known[device, stream] = _next(device)
    return found


def _next(device: int) -> int:
    with _lock():
        address = next(_free.get(device, iter(())), None)
        if address is None:
            address = cuda.zeros(4 * COUNTERS)
            _free[device] = iter(range(address + 4, address + 4 * COUNTERS, 4))
        return address
