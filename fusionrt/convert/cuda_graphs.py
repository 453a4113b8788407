"""Capturing CUDA graphs: whose turn it is, on which stream, in which memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# -- taking turns --------------------------------------------------------------------------------------


class Turn:
    """Of a device: its replays share memory, and so run one after the other, whatever their streams."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.stream, self._captures = torch.cuda.Stream(), torch.cuda.Stream()
        self._last: Any = None
        self._raw = -1
        self.open_pool()

    def open_pool(self) -> None:
        """Memory for graphs, kept by an empty one."""
        self.pool, self._keeper = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        with self.aside(), self.capturing():
            into(self._keeper, self.pool, lambda: torch.zeros(1, device="cuda"))

    def recover(self) -> None:
        """After a capture that failed: torch leaves its pool half open, and refuses random numbers until
        another capture has ended well."""
        torch.cuda.synchronize()
        self.open_pool()

    def after_others(self) -> None:
        """What the current stream does next waits for what was done in another one."""
        raw = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        if raw != self._raw:
            now = torch.cuda.current_stream()
            if self._last is not None:
                now.wait_stream(self._last)
            self._last, self._raw = now, raw

    def capturing(self) -> contextlib.AbstractContextManager[Any]:
        """On a stream where nothing else is ever done: cuBLAS has a workspace for each stream, which others
        may free (torch.compile's CUDA graphs do). That of this one is made during a capture, and so is a part
        of the graphs' memory, which stays."""
        return torch.cuda.stream(self._captures)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """On a stream of its own, for what comes before a capture."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)


@functools.cache
def turn_of(device: torch.device) -> Turn:
    with torch.cuda.device(device):
        return Turn()


def release() -> None:
    """Give back the memory that graphs have left behind whose models are gone."""
    if turn_of.cache_info().currsize:
        torch.cuda.synchronize()  # the order of replays is forgotten with it
        turn_of.cache_clear()


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    is_current = torch.cuda.current_device() == device.index
    return contextlib.nullcontext() if is_current else torch.cuda.device(device)


# -- memory --------------------------------------------------------------------------------------------


@torch.inference_mode(False)
def buffer_like(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def into(graph: Any, pool: Any, run: Callable[[], Any]) -> Sequence[Any]:
    """What `run` gives, captured. The collector waits: it might free another graph, which no capture
    survives."""
    collects = gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(*(() if pool is None else (pool,)), capture_error_mode="thread_local")
        try:
            found: Sequence[Any] = run()
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return found


def copies_of(results: Sequence[Any]) -> Callable[[], tuple[Any, ...]]:
    """A function that copies the results; what shares memory among them does so in the copies."""
    distinct = {id(r): r for r in results if isinstance(r, torch.Tensor)}
    sharing = Counter(t.untyped_storage().data_ptr() for t in distinct.values())
    alone = {i for i, t in distinct.items()
             if sharing[t.untyped_storage().data_ptr()] == 1 and t.clone().stride() == t.stride()}

    def copies() -> tuple[Any, ...]:
        made: dict[int, Any] = {i: distinct[i].clone() for i in alone}
        memory: dict[int, Any] = {}
        for i, t in distinct.items():
            if i not in made:
                whole = t.untyped_storage()
                copied = memory.get(whole.data_ptr())
                if copied is None:
                    copied = memory[whole.data_ptr()] = whole.clone()
                view = torch.empty(0, dtype=t.dtype, device=t.device)
                made[i] = view.set_(copied, t.storage_offset(), t.shape, t.stride())
        return tuple(made[id(r)] if isinstance(r, torch.Tensor) else r for r in results)

    return copies


@contextlib.contextmanager
def casting_anew() -> Iterator[None]:
    """Autocast keeps what it has cast until it ends. A graph is to cast in each replay: it would read memory
    that is given back, and weights that have changed since."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
