"""The CUDA driver: load cubins, launch kernels on the caller's device and stream.

Only `cupy_backends.cuda.api.driver` is imported: 10 ms, where `import cupy` takes 200. Measured
host cost of its `launchKernel` and of the alternatives: benchmarks/NOTES.md.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from fusionrt.errors import CaptureError
from fusionrt.runtime import compiler

_functions: dict[tuple[str, int], int] = {}
_lock = threading.Lock()


@functools.cache
def driver() -> Any:
    try:
        from cupy_backends.cuda.api import driver
    except ImportError as error:
        raise RuntimeError("CUDA tensors need CuPy: pip install 'fusionrt[cuda12]' or "
                           f"'fusionrt[cuda13]' ({error})") from error
    return driver


@functools.cache
def architecture(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def device_count() -> int:
    return torch.cuda.device_count()


def function(text: str, entry: str, device: int, name: str) -> int:
    """Handle of a compiled and loaded kernel. The device must be the current one."""
    arch = architecture(device)
    key = (compiler.key(text, entry, arch), device)
    found = _functions.get(key)
    if found is not None:
        return found
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(name)
    cached, _ = compiler.cubin(text, entry, arch, name)
    with _lock:
        if key not in _functions:
            module = driver().moduleLoadData(cached.payload)
            _functions[key] = driver().moduleGetFunction(module, entry)
        return _functions[key]


def bind_context(device: int) -> None:
    """Make the device's context current in this thread, as the driver's own calls need it.

    torch leaves that to the first runtime call of a thread, and skips `cudaSetDevice` when the
    number does not change; filling one element is such a call.
    """
    if not driver().ctxGetCurrent():
        torch.zeros((), device=f"cuda:{device}")
