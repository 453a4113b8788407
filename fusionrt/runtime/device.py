"""The CUDA driver: load cubins, launch kernels on the caller's device and stream.

Only CuPy's binding of the driver is imported: 2 ms, where `import cupy` takes 90. Measured
host cost of its `launchKernel` and of the alternatives: benchmarks/NOTES.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fusionrt import forks, rehearsal
from fusionrt.errors import CaptureError
from fusionrt.runtime import binding, compiler

# CUfunction_attribute of cuda.h
_DYNAMIC_SHARED_BYTES, _LARGE_CLUSTERS = 8, 14
_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID
_RELAXED = 2  # CUstreamCaptureMode
_NON_BLOCKING = 1  # CUstream_flags
_DEPENDENT_LAUNCHES_IN_GRAPHS = 12030  # since this version of the driver
_SHARED_OF_MULTIPROCESSOR, _SHARED_OF_BLOCK = 81, 97  # CUdevice_attribute
_KERNELS = re.compile(rb"\.nv\.constant0\.(\w+)\0")  # of a cubin: sections of their parameters
_functions: dict[tuple[tuple[str, int], str], int] = {}
_shared: dict[int, int] = {}  # bytes that a function may have
_lock = forks.Lock()
# Of the GPU that work is cut for, whichever runs it: sums depend on shapes alone. An H200 has as many.
MULTIPROCESSORS = 132

# The number of this thread's current device, once torch has begun to use one.
current: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
# The handle of the current stream of a device.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


def index_of(device: torch.device) -> int:
    """Of "cuda" that of the current one."""
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def driver() -> Any:
    try:
        return binding.driver()
    except ImportError as error:
        raise RuntimeError("CUDA tensors need CuPy: pip install 'fusionrt[cuda12]' or "
                           f"'fusionrt[cuda13]' ({error})") from error


@functools.cache
def architecture(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def shared_bytes(device: int) -> tuple[int, int]:
    """Of shared memory: a multiprocessor's, and what a block may have of it. torch 2.6 does not tell."""
    driver, found = binding.libcuda(), []
    for attribute in (_SHARED_OF_MULTIPROCESSOR, _SHARED_OF_BLOCK):
        value = ctypes.c_int()
        status = driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        found.append(value.value if status == 0 else 0)
    return found[0], found[1]


def memory(n_bytes: int) -> int:
    """Address of memory of the current device that is nobody's but the caller's, for as long as the process
    lives: what torch allocates while it prepares a CUDA graph may become somebody else's."""
    address = ctypes.c_uint64()
    with _captures_go_on() as driver:
        status = driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(n_bytes))
    if status:
        raise RuntimeError(f"no {n_bytes} bytes of the device's memory: CUDA error {status}")
    return address.value


def zeros(n_bytes: int) -> int:
    """The same, filled with them: on a stream of its own, as the whole device cannot be waited for while
    another thread captures."""
    address, stream = ctypes.c_uint64(memory(n_bytes)), ctypes.c_void_p()
    with _captures_go_on() as driver:
        status = (driver.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING)
                  or driver.cuMemsetD8Async(address, 0, ctypes.c_size_t(n_bytes), stream)
                  or driver.cuStreamSynchronize(stream) or driver.cuStreamDestroy_v2(stream))
    if status:
        raise RuntimeError(f"{n_bytes} bytes of the device's memory: CUDA error {status}")
    return address.value


@contextlib.contextmanager
def _captures_go_on() -> Iterator[ctypes.CDLL]:
    """The driver, by which what is otherwise refused while some thread captures does not end that capture."""
    driver, mode = binding.libcuda(), ctypes.c_int(_RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield driver
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def has_clusters(device: int) -> bool:
    return compiler.has_clusters(architecture(device))


def clusters_on(device: torch.device) -> bool:
    """The same of a tensor's device, also of one that a rehearsal stands for."""
    index = rehearsal.stands_for(device).index
    return rehearsal.has_clusters() if index is None else has_clusters(index)


@functools.cache
def device_count() -> int:
    return torch.cuda.device_count()


def function(text: str, entry: str, device: int, name: str, kernel: str = "") -> int:
    """Handle of a compiled and loaded kernel, the one named as its translation unit unless `kernel` names
    another. The device must be the current one."""
    arch = compiler.target(entry, architecture(device))
    unit = compiler.key(text, entry, arch), device
    key = unit, kernel or entry
    found = _functions.get(key)
    if found is not None:
        return found
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(name)
    cached, _ = compiler.cubin(text, entry, arch, name)
    with _lock():
        if key not in _functions:
            module = driver().moduleLoadData(cached.payload)
            # All, as the next call may want another in a capture: the driver loads a kernel when it is got.
            for each in {key[1], *(found.decode() for found in _KERNELS.findall(cached.payload))}:
                _functions[unit, each] = driver().moduleGetFunction(module, each)
        return _functions[key]


def allow(function: int, shared: int, cluster: int) -> None:
    """What a kernel may not have without asking: more than 48 KB of shared memory, `shared` of them sized at
    the launch, more than 8 blocks in a cluster."""
    with _lock():
        if shared > _shared.get(function, 8 << 10):  # never less than other launches were allowed
            driver().funcSetAttribute(function, _DYNAMIC_SHARED_BYTES, shared)
            _shared[function] = shared
    if cluster > 8:
        driver().funcSetAttribute(function, _LARGE_CLUSTERS, 1)


def captured_graph(stream: int) -> int:
    """Which capture a stream takes part in: a number that no other capture of this process has."""
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    failed = binding.libcuda().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    if failed:
        raise RuntimeError(f"cuStreamGetCaptureInfo: CUDA driver error {failed}")
    return number.value


@functools.cache
def has_dependent_launches(device: int) -> bool:
    """Whether a kernel may begin before the one that it depends on has ended."""
    version, least = ctypes.c_int(), _DEPENDENT_LAUNCHES_IN_GRAPHS
    binding.libcuda().cuDriverGetVersion(ctypes.byref(version))
    return torch.cuda.get_device_capability(device) >= (9, 0) and version.value >= least


class DependentLaunch:
    """Of a kernel that may begin when the blocks of the one before it have left, or sooner if that one says
    so: every kernel here waits by itself for what was written before (programmatic dependent launch). In a
    graph that is a quarter of a microsecond less; the host takes half a microsecond more. Owns what the
    driver reads."""

    def __init__(self, function: int, grid: tuple[int, int], block: int, shared: int, parameters: Any
                 ) -> None:
        self.attribute = _attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 1)
        self._config = _LaunchConfig(*grid, 1, block, 1, 1, shared, None,
                                     ctypes.addressof(self.attribute), 1)
        self._arguments = ctypes.byref(self._config), ctypes.c_void_p(function), parameters, None
        self._launch = binding.libcuda().cuLaunchKernelEx

    def __call__(self, stream: int) -> None:
        self._config.stream = stream
        status = self._launch(*self._arguments)
        if status:
            raise RuntimeError(f"cuLaunchKernelEx: CUDA driver error {status}")


def _attribute(kind: int, *value: int) -> Any:
    """A CUlaunchAttribute: its kind, padding, a union of 64 bytes."""
    return (ctypes.c_uint * 18)(kind, 0, *value)


@functools.cache
def clusters_at_a_time(function: int, block: int, shared: int, cluster: int) -> int:
    """How many clusters of blocks the device holds: fewer than its multiprocessors suggest, as each lies
    within one of their groups."""
    attribute = _attribute(_CLUSTER_DIMENSION, cluster, 1, 1)
    config = _LaunchConfig(cluster, 1, 1, block, 1, 1, shared, None, ctypes.addressof(attribute), 1)
    found = ctypes.c_int()
    status = binding.libcuda().cuOccupancyMaxActiveClusters(
        ctypes.byref(found), ctypes.c_void_p(function), ctypes.byref(config))
    return found.value if status == 0 else 0


class _LaunchConfig(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_uint) for name in
                  ("x", "y", "z", "block_x", "block_y", "block_z", "shared")),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint))


def bind_context(device: int) -> None:
    """Make the device's context current in this thread, as the driver's own calls need it.

    torch leaves that to the first runtime call of a thread, and skips `cudaSetDevice` when the
    number does not change; filling one element is such a call.
    """
    if not driver().ctxGetCurrent():
        torch.zeros((), dtype=torch.uint8, device=f"cuda:{device}")
