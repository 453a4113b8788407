"""Capturing CUDA graphs: whose turn it is, on which stream, in which memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fusionrt.convert.calls import copied
from fusionrt.ops.convolution_cudnn import convolves_in_tf32

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_SETTINGS: list[Callable[[], bool]] = [getattr(torch._C, f"_get_{name}") for name in (
    "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "flash_sdp_enabled",
    "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")]


# -- taking turns --------------------------------------------------------------------------------------


class Turn:
    """Of a device: its replays share memory, and so run one after the other, whatever their streams."""

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self.stream = torch.cuda.Stream()
        self._libraries = _of_captures(device)
        self._captures = self._libraries.stream
        self._last: Any = None
        self._raw = -1
        self.forgetful: weakref.WeakSet[Any] = weakref.WeakSet()
        self.open_pool()

    def open_pool(self) -> None:
        """Memory for graphs."""
        self.pool, self._keeper = _opened(self._captures)

    def recover(self) -> None:
        """After a capture that failed: torch leaves its pool half open, and refuses random numbers until
        another capture has ended well."""
        torch.cuda.synchronize()
        self.open_pool()
        self._libraries.renew()

    def forget(self) -> None:
        """Give back the memory of graphs that are captured again when they are needed: of all that are in
        `forgetful`."""
        if self.forgetful:
            torch.cuda.synchronize()
            for one in self.forgetful:
                one.forget()
            self.forgetful.clear()
            self.open_pool()

    def after_others(self) -> None:
        """What the current stream does next waits for what was done in another one."""
        raw = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        if raw != self._raw:
            now = torch.cuda.current_stream()
            if self._last is not None:
                now.wait_stream(self._last)
            self._last, self._raw = now, raw

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """On a stream where nothing else is ever done: cuBLAS has workspaces for each stream, which others
        may free (torch.compile's CUDA graphs do), and which lie in the memory of whoever needs them first.
        So here somebody whose memory stays needs them before each capture. Its handle, one for each thread,
        cannot be made in a capture."""
        with torch.cuda.stream(self.stream):
            _use_cublas()
        with torch.cuda.stream(self._captures):
            into(torch.cuda.CUDAGraph(), self._libraries.pool, _use_cublas)
            yield

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """On a stream of its own, for what comes before a capture."""
        self.stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            torch.cuda.current_stream().wait_stream(self.stream)


class Libraries:
    """The stream of a device's captures, and memory for what libraries need there. Never given back."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._keepers: list[Any] = []
        self.renew()

    def renew(self) -> None:
        self.pool, keeper = _opened(self.stream)
        self._keepers.append(keeper)


_of_captures = functools.cache(Libraries)


def _opened(stream: Any) -> tuple[Any, Any]:
    """A pool of memory, and the empty graph that keeps it."""
    pool, keeper = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        into(keeper, pool, lambda: torch.zeros(1, dtype=torch.uint8, device="cuda"))
    return pool, keeper


def _use_cublas() -> None:
    """cuBLAS itself and cuBLASLt, which is what takes a bias."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.empty(16, 16, device="cuda", dtype=dtype)
        torch.nn.functional.linear(torch.mm(x, x), x, x[0])


@functools.cache
def turn_of(device: torch.device) -> Turn:
    with torch.cuda.device(device):
        return Turn(device)


def settings() -> tuple[bool, ...]:
    """What libraries go by, and Dynamo does not guard: a graph holds what they chose."""
    return convolves_in_tf32(), *(get() for get in _SETTINGS)


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


@contextlib.contextmanager
def growing_segments() -> Iterator[None]:
    """Memory is taken in segments that grow, for graphs that need much: among the allocator's usual ones gaps
    stay, a sixth of what a training step of ResNet-50 holds. The setting is of all threads; those are served
    alike."""
    growing, settings = "expandable_segments", _settings()
    if settings is None or f"{growing}:True" in settings:
        yield
        return
    _set(",".join(filter(None, [settings, f"{growing}:True"])))
    try:
        yield
    finally:
        _set(",".join(filter(None, [settings, f"{growing}:False"])))


def _settings() -> str | None:
    """Those of torch's caching allocator, all of which have to be given to change one: where torch does not
    tell them, those of the environment. None: they cannot be changed."""
    if not hasattr(torch._C, "_accelerator_setAllocatorSettings") or (
            torch.cuda.get_allocator_backend() != "native"):
        return None
    told = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    found = told() if told is not None else next(filter(None, map(os.environ.get, _VARIABLES)), "")
    return ",".join(part for part in found.split(",") if part != "expandable_segments:False")


def _set(settings: str) -> None:
    torch._C._accelerator_setAllocatorSettings(settings)


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


def copies_of(results: Sequence[Any], strides: Mapping[int, Sequence[int]] | None = None
              ) -> Callable[[], tuple[Any, ...]]:
    """A function that copies the results, to other `strides` those at the places named; what else shares
    memory among them does so in the copies."""
    moved = {id(results[k]): its for k, its in (strides or {}).items()}
    distinct = {id(r): r for r in results if isinstance(r, torch.Tensor)}
    sharing = Counter(t.untyped_storage().data_ptr() for t in distinct.values())
    alone = {i for i, t in distinct.items() if i not in moved
             and sharing[t.untyped_storage().data_ptr()] == 1 and t.clone().stride() == t.stride()}

    def copies() -> tuple[Any, ...]:
        made: dict[int, Any] = {i: distinct[i].clone() for i in alone}
        made |= {i: copied(distinct[i], its) for i, its in moved.items()}
        memory: dict[int, Any] = {}
        for i, t in distinct.items():
            if i not in made:
                whole = t.untyped_storage()
                found = memory.get(whole.data_ptr())
                if found is None:
                    found = memory[whole.data_ptr()] = whole.clone()
                view = torch.empty(0, dtype=t.dtype, device=t.device)
                view.set_(found, t.storage_offset(), t.shape, t.stride())
                view = view.conj() if t.is_conj() else view
                made[i] = torch._neg_view(view) if t.is_neg() else view
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
