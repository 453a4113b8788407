"""Where the fused dropouts' random numbers come from: torch's generators.

A mask is a function of (seed, offset, place in the walk of the forward pass), so it is recomputed in the
backward pass, in that walk whatever lies otherwise there, and never stored. On a GPU seed and offset are
those of torch's CUDA generator, advanced as torch's own kernels advance it. Torch's CPU generator (a
Mersenne twister) has no offset: what it has drawn since its seed is counted, so that the same
`torch.manual_seed` gives the same masks on a CPU and on a GPU.
"""

import functools
import hashlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fusionrt import forks

# A generator is read and moved on in two steps: two threads must not take the same counters.
_lock = forks.Lock()

# Seed, offset in Philox counters, and, if those are known on the device alone, a tensor of them: the offset
# here then counts from the one there. Of a gradient that reads what was drawn (`mask.py`) that, after zeros.
Rng = tuple[int, int, Any]


def draw(device: torch.device, counters: int) -> Rng:
    """Take so many counters from the device's default generator."""
    return drawing(device, counters)()


def drawing(device: torch.device, counters: int) -> Callable[[], Rng]:
    """A function that does so: it looks at the device once."""
    if device.type == "meta":
        return lambda: (0, 0, None)
    return (_drawing_cuda(device, counters) if device.type == "cuda" else
            functools.partial(_draw_cpu, counters))


def packed(rng: Rng, device: torch.device | None = None) -> torch.Tensor:
    """As one tensor, for operators of torch's."""
    seed, offset, state = rng
    if state is None:
        return torch.tensor([seed, offset], dtype=torch.uint64, device=device).view(torch.int64)
    return torch.stack((state[0], state[1] + offset)) if offset else state


def unpacked(rng: torch.Tensor) -> Rng:
    """What was packed; of a meta tensor no numbers."""
    if rng.is_cuda or rng.is_meta:
        return 0, 0, rng if rng.is_cuda else None
    seed, offset = (int(x) & (2**64 - 1) for x in rng.tolist())
    return seed, offset, None


class Taking(NamedTuple):
    """What takes counters from a CUDA generator, outside of captures."""

    acquire: Callable[[], Any]
    release: Callable[[], None]
    get_offset: Callable[[], int]
    set_offset: Callable[[int], Any]
    initial_seed: Callable[[], int]
    step: int                          # in 32-bit values, as torch counts


def taking(device: int, counters: int) -> Taking:
    lock, generator = _lock(), torch.cuda.default_generators[device]  # no process forked from here has a GPU
    return Taking(lock.acquire, lock.release, generator.get_offset, generator.set_offset,
                  generator.initial_seed, 4 * counters)


def _drawing_cuda(device: torch.device, counters: int) -> Callable[[], Rng]:
    index = torch.cuda.current_device() if device.index is None else device.index
    _, _, offset_of, move, seed, step = taking(index, counters)
    is_capturing = torch.cuda.is_current_stream_capturing

    def draw() -> Rng:
        if is_capturing():
            return _captured.draw(device, counters)
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

    def draw(self, device: torch.device, counters: int) -> Rng:
        from fusionrt.runtime.device import captured_graph

        stream = torch.cuda.current_stream(device).cuda_stream
        key = captured_graph(stream), stream
        if self.key != key or self.state is None:
            self.state, self.offset = draw_tensor(device), 0
            self.key = key
        offset, self.offset = self.offset, self.offset + counters
        return 0, offset, self.state

    def forget(self) -> None:
        if self.key is not None:
            self.key = self.state = None


_captured = _Captured()


def draw_tensor(device: torch.device) -> torch.Tensor:
    return torch.randint(-2**63, 2**63 - 1, (2,), dtype=torch.int64, device=device)


# -- of a CPU --------------------------------------------------------------------------------------

WORDS = 624     # that torch's Mersenne twister draws before it makes new ones
BLOCKS = 16     # of so many, after a seed, whose numbers are counted
_FIRST = 24     # byte of a state at which they begin; before it stands how many have been drawn
_draws = 0


def _draw_cpu(counters: int) -> Rng:
    global _draws
    with _lock():
        number, generator = -1, torch.default_generator
        while number != _draws:  # what a finalizer, or the handler of a signal, draws meanwhile comes first
            number, (seed, offset) = _draws, _counted(generator)
        _draws += 1
        torch.rand(counters, dtype=torch.float32, device="cpu")
    return seed, offset, None


def _counted(generator: torch.Generator) -> tuple[int, int]:
    """Seed and offset of a generator: a function of its state alone, so that a saved state gives the same
    masks in whatever process. The offset counts the numbers drawn since the seed, by whomever; where that is
    not known any more, the seed is a hash of the words, and the offset counts from the first of these."""
    state, seed = _state(generator), generator.initial_seed()
    words, drawn = _words(state), _drawn(state)
    drawn_before = _blocks(seed).find(words)
    if drawn_before is None:
        return int.from_bytes(words[:8], "little"), drawn
    return seed & (2**64 - 1), drawn_before + drawn


class _Blocks:
    """The words of a generator's first states after a seed, and how many numbers it drew before these: as far
    as somebody asks."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.drawn_before = {_words(_state(self.generator)): 0}
        self.seen = 0

    def find(self, words: bytes) -> int | None:
        while words not in self.drawn_before and self.seen < BLOCKS:
            torch.rand(WORDS, dtype=torch.float32, device="cpu", generator=self.generator)
            state = _state(self.generator)
            if _drawn(state) != WORDS:  # another torch, whose states are others
                self.seen = BLOCKS
                break
            self.drawn_before[_words(state)] = self.seen * WORDS
            self.seen += 1
        return self.drawn_before.get(words)


_blocks = functools.lru_cache(16)(_Blocks)


def _state(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


_met: tuple[bytes, bytes] = b"", b""  # words and their digest


def _words(state: bytes) -> bytes:
    """Their digest; most often those of the last draw, as there are new ones after many."""
    global _met
    words, (known, digest) = state[_FIRST:_FIRST + 8 * WORDS], _met
    if words != known:
        digest = _digest(words)
        _met = words, digest
    return digest


def _drawn(state: bytes) -> int:
    return int.from_bytes(state[_FIRST - 8:_FIRST], "little")


def _digest(state: bytes) -> bytes:
    return hashlib.blake2b(state, digest_size=16).digest()
