"""Errors in the values of a tensor, without waiting for the device that has them.

On a CPU they are raised at once. A GPU is not waited for: a kernel counts what is wrong, the number is on
its way to the host while the program goes on, and the next check that finds it there raises. What was
computed in the meantime is in the hands of the kernel, which neither reads nor writes out of bounds.
In a graph (torch.compile, a CUDA graph's capture) nothing is checked, nor is it on a GPU under torch.func's
transforms and dispatch modes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from fusionrt import forks
from fusionrt.watching import dispatch_modes, is_watched, is_wrapped, tracing_state, transforms_active

ON_THEIR_WAY = 1024     # counts, at most
_UNKNOWN = -1
_APART = 2              # numbers: kernels want addresses that are multiples of 16 bytes
Message = Callable[[int], str]
Result = TypeVar("Result")
_lock = forks.Lock()
# Places on the host, in the order of calls, and the devices that write there.
_pending: deque[tuple[int, Message, torch.device]] = deque()


class _Host:
    """Memory that a GPU writes to, and the same as Python sees it: reading an element there costs least."""

    def __init__(self) -> None:
        with torch.inference_mode(False):  # whose tensors cannot be copied to outside of it
            memory = torch.full((ON_THEIR_WAY, _APART), _UNKNOWN, dtype=torch.int64, device="cpu",
                                pin_memory=True)[:, 0]
        self.counts, self.places = memory.numpy().data, memory.unbind()
        self.free = deque(range(ON_THEIR_WAY))


_host: _Host | None = None


def check(count: torch.Tensor, message: Message) -> None:
    """Raise IndexError(message(n)) if the integer n in `count` is not 0: now, or in a later check."""
    watched = is_watched()
    if watched and (torch.compiler.is_compiling() or tracing_state() is not None):
        return
    if watched or count.device.type == "cpu":
        if wrong := _at_hand(count) if watched else int(count):
            raise IndexError(message(wrong))
    elif count.is_cuda and not torch.cuda.is_current_stream_capturing():
        written(count.device, lambda memory: memory.copy_(count, non_blocking=True), (), message)


def _at_hand(count: torch.Tensor) -> int:
    """The number, the first one of a batch of torch.func's that is not 0; 0 where there are none yet, or on a
    GPU."""
    transforms = transforms_active()
    while is_wrapped(count):
        count = torch._C._functorch.get_unwrapped(count)
    if type(count) is not torch.Tensor or count.device.type != "cpu" or (transforms and dispatch_modes()):
        return 0
    # By no operation that modes would see; what torch.func has made has no memory that NumPy could read.
    numbers = count.flatten().tolist() if transforms else count.numpy().flat
    return int(next(filter(None, numbers), 0))


def written(device: torch.device, launch: Callable[..., Result], args: Sequence[Any], message: Message
            ) -> Result:
    """What `launch` gives, which writes the count to the memory that is its last argument: of the host, as a
    GPU's kernel reaches it, which takes no copy. Each replay of a capture would write there: it gets memory
    of the device, at which nobody looks."""
    if device.type == "meta" or torch.cuda.is_current_stream_capturing():
        return launch(*args, torch.empty((), dtype=torch.int64, device=device))
    examine()
    host, place = _place()
    host.counts[place] = _UNKNOWN
    try:
        result = launch(*args, host.places[place])
    except Exception:  # nothing was launched; an interrupt may come later than that, and keeps the place
        host.free.append(place)
        raise
    _pending.append((place, message, device))
    return result


def _place() -> tuple[_Host, int]:
    global _host
    host = _host
    if host is None:
        with _lock():
            made = _host or _Host()
            host = _host = _host or made  # a finalizer may have needed one meanwhile
    while True:
        try:
            return host, host.free.popleft()
        except IndexError:
            examine(wait=True)


def examine(wait: bool = False) -> None:
    """Raise what a GPU has found by now, or (`wait`) in all that it was given."""
    if wait:
        for device in {device for _, _, device in tuple(_pending)}:
            torch.cuda.synchronize(device)
    if not _pending:
        return
    with _lock():
        while _pending and _host is not None:
            place, message, _ = first = _pending.popleft()
            wrong = _host.counts[place]
            if wrong == _UNKNOWN:
                _pending.appendleft(first)
                return
            _host.free.append(place)
            if wrong:
                raise IndexError(message(wrong))
