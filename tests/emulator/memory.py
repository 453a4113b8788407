"""Memory of tensors between pages that cannot be touched, at a chosen distance from a multiple of 16 bytes.

It begins as 0xff bytes, NaN in every floating-point dtype, so that what a kernel does not write is seen; so
does what lies beside a tensor in its pages.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Callable, Sequence

import torch

PAGE = mmap.PAGESIZE
ALIGNMENT = 16
POISON = 0xFF


class Memory:
    """`register` hears where pages and the tensor in them begin and end, `forget` when they are gone."""

    def __init__(self, register: Callable[[int, int, int, int], None], forget: Callable[[int], None]) -> None:
        self.register, self.forget = register, forget
        self._protect = ctypes.CDLL(None, use_errno=True).mprotect
        self._protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def piece(self, n_bytes: int, offset: int = 0) -> torch.Tensor:
        """Bytes, `offset` behind a multiple of 16, that end as near before a guarded page as can be."""
        if n_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        size = -(-(n_bytes + offset) // ALIGNMENT) * ALIGNMENT
        pages = -(-size // PAGE) * PAGE
        mapped = mmap.mmap(-1, pages + 2 * PAGE)
        first = ctypes.addressof(ctypes.c_char.from_buffer(mapped)) + PAGE
        ctypes.memset(first, POISON, pages)
        for guard in (first - PAGE, first + pages):
            if self._protect(guard, PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        begin = first + pages - size + offset
        self.register(first, first + pages, begin, begin + n_bytes)
        # The tensor keeps the array, which keeps the mapping.
        array = (ctypes.c_ubyte * n_bytes).from_buffer(mapped, begin - first + PAGE)
        weakref.finalize(mapped, self.forget, first).atexit = False
        return torch.frombuffer(array, dtype=torch.uint8)

    def empty_strided(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, offset: int = 0
                      ) -> torch.Tensor:
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        elements = last + 1 if math.prod(shape) else 0
        piece = self.piece(elements * dtype.itemsize, offset * dtype.itemsize % ALIGNMENT)
        return piece.view(dtype).as_strided(tuple(shape), tuple(strides))

    def guarded(self, tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """The same numbers with the same strides, `offset` elements behind a multiple of 16 bytes."""
        made = self.empty_strided(tensor.shape, tensor.stride(), tensor.dtype, offset)
        return made.copy_(tensor)
