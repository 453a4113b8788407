"""One range over several cores: a thread pool around functions that release the GIL.

For where there is no `team`. Not Numba's `prange`: its portable layer aborts the process when two threads
call it at once, its OpenMP layer kills forked children (DataLoader workers), and parallel=True costs seconds
to compile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from fusionrt.forks import in_child

SERIAL_BELOW = 1 << 17  # elements: 13 us of additions, where waking a thread costs 30 to 50
GRAIN = 1024            # range boundaries, a multiple of every vector and of Philox's 8 elements

_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _forget_pool() -> None:
    global _pool
    _pool = None  # its threads did not survive the fork


in_child(_forget_pool)


def run(task: Callable[[int, int], object], size: int, parallel: bool, grain: int) -> None:
    """task(start, stop) over [0, size), in as many parts as torch would use threads."""
    parts = min(torch.get_num_threads(), -(-size // grain)) if parallel else 1
    if parts == 1:
        task(0, size)
        return
    bounds = [min(size, -(-size * i // (parts * grain)) * grain) for i in range(parts + 1)]
    futures: list[Future[object]] = []
    try:
        for start, stop in itertools.pairwise(bounds[1:]):
            futures.append(_executor(parts).submit(task, start, stop))
        task(bounds[0], bounds[1])
        for future in futures:
            future.result()
    finally:
        _end(futures)


def _end(futures: Sequence[Future[object]]) -> None:
    """Return when none of them runs: they write to memory that the caller gives back, also after Ctrl-C."""
    interrupted: KeyboardInterrupt | None = None
    while True:
        try:
            running = [future for future in futures if not (future.cancel() or future.done())]
            if not running:
                break
            wait(running)
        except KeyboardInterrupt as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


def _executor(size: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    if _pool is None or _pool_size < size:
        _pool, _pool_size = ThreadPoolExecutor(size, thread_name_prefix="fusionrt"), size
    return _pool
