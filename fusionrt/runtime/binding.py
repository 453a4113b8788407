"""The driver itself, and CuPy's bindings of it and of NVRTC, without the rest of CuPy.

Where they load a library they would import all of it, 90 ms, for the function that may log that.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from typing import Any

from fusionrt import forks

_lock = forks.Lock()


@functools.cache
def libcuda() -> ctypes.CDLL:
    """For what CuPy's binding of it lacks. Raises OSError where there is none."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def driver() -> Any:
    """Raises ImportError where there is no CuPy."""
    _log_nothing()
    from cupy_backends.cuda.api import driver
    return driver


def nvrtc() -> Any:
    """Raises ImportError where there is no CuPy, and CuPy's own errors where there is no NVRTC."""
    _log_nothing()
    with _lock():  # a thread that comes while it is loaded would find it without its builtins
        from cupy_backends.cuda.libs import nvrtc
        nvrtc.getVersion()
    return nvrtc


def _log_nothing() -> None:
    if os.environ.get("CUPY_DEBUG_LIBRARY_LOAD", "0") != "1":
        with contextlib.suppress(ImportError):  # of a CuPy that loads libraries in another way
            from cupy_backends.cuda import _softlink
            _softlink._log = lambda message: None
