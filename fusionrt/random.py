"""Where the fused dropouts' random numbers come from: torch's generators.

A mask is a function of (seed, offset, place in the walk of the forward pass), so it is recomputed in the
backward pass, in that walk whatever lies otherwise there, and never stored. On a GPU seed and offset are
those of torch's CUDA generator, advanced as torch's own kernels advance it. Torch's CPU generator (a
Mersenne twister) has no offset: we count our draws since its seed, so that the same `torch.manual_seed`
gives the same masks on a CPU and on a GPU.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fusionrt import forks

# A generator is read and moved on in two steps: two threads must not take the same counters.
_lock = forks.Lock(threading.RLock)  # finalizers and handlers of signals may draw as well

# seed, offset in Philox counters, and, if those are known on the device alone, a tensor of them: the offset
# here then counts from the one there
Rng = tuple[int, int, Any]


def draw(device: torch.device, streams: int) -> Rng:
    """Take `streams` counters from the device's default generator."""
    return drawing(device, streams)()


def drawing(device: torch.device, streams: int) -> Callable[[], Rng]:
    """A function that does so: it looks at the device once."""
    if device.type == "meta":
        return lambda: (0, 0, None)
    return _drawing_cuda(device, streams) if device.type == "cuda" else functools.partial(_draw_cpu, streams)


class Taking(NamedTuple):
    """What takes counters from a CUDA generator, outside of captures."""

    acquire: Callable[[], Any]
    release: Callable[[], None]
    get_offset: Callable[[], int]
    set_offset: Callable[[int], Any]
    initial_seed: Callable[[], int]
    step: int                          # in 32-bit values, as torch counts


def taking(device: int, streams: int) -> Taking:
    lock, generator = _lock(), torch.cuda.default_generators[device]  # no process forked from here has a GPU
    return Taking(lock.acquire, lock.release, generator.get_offset, generator.set_offset,
                  generator.initial_seed, 4 * streams)


def _drawing_cuda(device: torch.device, streams: int) -> Callable[[], Rng]:
    index = torch.cuda.current_device() if device.index is None else device.index
    _, _, offset_of, move, seed, step = taking(index, streams)
    is_capturing = torch.cuda.is_current_stream_capturing

    def draw() -> Rng:
        if is_capturing():
            return _captured.draw(device, streams)
        _captured.forget()
        with _lock():
            offset = offset_of()
            move(offset + step)
        return seed(), offset // 4, None

    return draw


class _Captured(threading.local):
    """While a graph is captured the generator's state is on the device. What a kernel of torch's draws from
    it is drawn again at every replay: one such kernel serves what follows it on its stream, each op from an
    offset of its own. It is kept until the next draw, as the memory of the graph would be given to others."""

    key: tuple[int, int] | None = None
    state: torch.Tensor | None = None
    offset = 0

    def draw(self, device: torch.device, streams: int) -> Rng:
        from fusionrt.runtime.device import captured_graph

        stream = torch.cuda.current_stream(device).cuda_stream
        key = captured_graph(stream), stream
        if self.key != key or self.state is None:
            self.state, self.offset = draw_tensor(device), 0
            self.key = key
        offset, self.offset = self.offset, self.offset + streams
        return 0, offset, self.state

    def forget(self) -> None:
        if self.key is not None:
            self.key = self.state = None


_captured = _Captured()


def draw_tensor(device: torch.device) -> torch.Tensor:
    return torch.randint(-2**63, 2**63 - 1, (2,), dtype=torch.int64, device=device)


# State in which we left the generator -> (seed, counters drawn since that seed).
_left: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
_REMEMBERED = 1 << 16  # for a checkpoint to come back to
_draws = 0  # on the CPU


def _draw_cpu(streams: int) -> Rng:
    with _lock():
        return (*_counted(streams), None)


def _counted(streams: int) -> tuple[int, int]:
    global _draws
    generator, number = torch.default_generator, -1
    while number != _draws:  # what a finalizer, or the handler of a signal, draws meanwhile comes first
        number, before = _draws, _digest(generator)
        if before in _left:
            seed, offset = _left[before]
        elif before == _digest(torch.Generator().manual_seed(generator.initial_seed())):
            seed, offset = generator.initial_seed(), 0
        else:  # others have drawn from it: any value that follows from its state will do
            seed, offset = int(torch.randint(2**63 - 1, (), device="cpu").item()), 0
    _draws += 1
    # Advance it, so that a saved and restored state repeats the mask.
    torch.rand((), dtype=torch.float32, device="cpu")
    _left[_digest(generator)] = seed, offset + streams
    if len(_left) > _REMEMBERED:
        _left.popitem(last=False)
    return seed & (2**64 - 1), offset


def _digest(generator: torch.Generator) -> bytes:
    return hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=16).digest()
