"""Memory of results. Large ones are new to the process at every call (glibc maps 32 MiB and more anew), and
to be given them in pages of 4 KiB takes Linux three times as long as the arithmetic; so ask for 2 MiB ones.
Where the system has none to give (transparent_hugepage: never), nothing changes.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import torch

try:  # Inductor's: a third of the time
    from torch._C._dynamo.guards import _empty_strided_cpu as empty_strided  # type: ignore
except ImportError:
    def empty_strided(shape: Ints, strides: Ints, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")

from fusionrt.layout import Ints

LARGE = 32 << 20  # bytes
_SMALL_PAGE = 4096
_MADV_HUGEPAGE = 14


def is_large(shape: Ints, strides: Ints, dtype: torch.dtype) -> bool:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return extent * dtype.itemsize >= LARGE and _madvise() is not None


def allocator(shape: Ints, strides: Ints, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Of memory for a result, not initialised."""
    make = functools.partial(empty_strided, tuple(shape), tuple(strides), dtype)
    if not is_large(shape, strides, dtype) or (advise := _madvise()) is None:
        return make

    def large() -> torch.Tensor:
        made = make()
        first = -(-made.data_ptr() // _SMALL_PAGE) * _SMALL_PAGE
        last = (made.data_ptr() + made.nbytes) // _SMALL_PAGE * _SMALL_PAGE
        advise(first, last - first, _MADV_HUGEPAGE)  # advice: whether it is taken does not matter
        return made

    return large


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    found: Callable[[int, int, int], int] = function
    return found
