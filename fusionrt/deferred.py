"""Errors in the values of a tensor, without waiting for the device that has them.

On a CPU they are raised at once. A GPU is not waited for: a kernel counts what is wrong, the number is on
its way to the host while the program goes on, and the next check that finds it there raises. What was
computed in the meantime is in the hands of the kernel, which neither reads nor writes out of bounds.
In a graph (torch.compile, torch.func, a CUDA graph's capture) nothing is checked.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from fusionrt.autograd import is_watched

ON_THEIR_WAY = 1024     # counts, at most
_UNKNOWN = -1
Message = Callable[[int], str]
_lock = threading.Lock()
# Places on the host, in the order of calls, and the devices that write there.
_pending: deque[tuple[int, Message, torch.device]] = deque()


class _Host:
    """Memory that a GPU writes to, and the same as NumPy sees it: reading an element there costs least."""

    def __init__(self) -> None:
        memory = torch.full((ON_THEIR_WAY,), _UNKNOWN, dtype=torch.int64, device="cpu",
                            pin_memory=True)
        self.counts, self.places, self.next = memory.numpy(), memory.unbind(), 0


_host: _Host | None = None


def check(count: torch.Tensor, message: Message) -> None:
    """Raise IndexError(message(n)) if the integer n in `count` is not 0: now, or in a later check."""
    if is_watched():
        return
    if count.device.type == "cpu":
        wrong = int(count)
        if wrong:
            raise IndexError(message(wrong))
    elif count.is_cuda:
        examine()
        if not torch.cuda.is_current_stream_capturing():
            _send(count, message)


def examine(wait: bool = False) -> None:
    """Raise what a GPU has found by now, or (`wait`) in all that it was given."""
    if wait:
        for device in {device for _, _, device in tuple(_pending)}:
            torch.cuda.synchronize(device)
    with _lock:
        while _pending and _host is not None:
            place, message, _ = _pending[0]
            wrong = int(_host.counts[place])
            if wrong == _UNKNOWN:
                return
            _pending.popleft()
            if wrong:
                raise IndexError(message(wrong))


def _send(count: Any, message: Message) -> None:
    while not _sent(count, message):
        examine(wait=True)


def _sent(count: Any, message: Message) -> bool:
    """Whether there was a place for it."""
    global _host
    with _lock:
        if len(_pending) >= ON_THEIR_WAY:
            return False
        _host = _host or _Host()
        place, _host.next = _host.next, (_host.next + 1) % ON_THEIR_WAY
        _host.counts[place] = _UNKNOWN
        _host.places[place].copy_(count, non_blocking=True)
        _pending.append((place, message, count.device))
        return True
