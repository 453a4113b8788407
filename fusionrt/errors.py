"""Exceptions of fusionrt. Their text is part of the interface: tests read it."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, TypeGuard


class CompileError(RuntimeError):
    """NVRTC refused a kernel, or the compiler's log shows a fault (spills, local memory)."""

    def __init__(self, kernel: str, arch: str, options: Sequence[str], log: str, source: str) -> None:
        super().__init__(f"{kernel}: cannot compile for {arch} with {' '.join(options)}\n{log}\n"
                         f"source: {source}")
        self.kernel, self.arch, self.options, self.log, self.source = kernel, arch, options, log, source


class CaptureError(RuntimeError):
    """A kernel that is not loaded yet was called while a CUDA graph is being captured."""

    def __init__(self, kernel: str) -> None:
        super().__init__(
            f"{kernel}: this specialisation is not loaded yet, and loading a kernel would break the "
            "CUDA graph that is being captured. Call the op once with the same dtypes, shapes and "
            "strides before the capture (fusionrt warmup fills the disk cache, a call loads it).")


def as_float(op: str, name: str, value: Any) -> float:
    """Of a number, or of what gives one (a tensor of one element); of nothing that is text."""
    if isinstance(value, (int, float)) or hasattr(value, "__float__"):
        return float(value)
    raise TypeError(f"{op}: {name} must be a number, got {value!r}")


def check_number(op: str, name: str, value: Any) -> None:
    """As `as_float`, without making one of a number that a tracer follows."""
    if not isinstance(value, (int, float)):
        as_float(op, name, value)


def is_int(value: Any) -> TypeGuard[int]:
    """Whether it is an integer, also one of NumPy or of a tracer: no truth value, which Python counts among
    them and torch does not, and no array, which has `__index__` whatever its dtype is."""
    if isinstance(value, numbers.Integral):
        return not isinstance(value, bool)
    return hasattr(value, "__index__") and not hasattr(value, "__array__")


def as_int(op: str, name: str, value: Any) -> int:
    if is_int(value):
        return value
    raise TypeError(f"{op}: {name} must be an integer, got {value!r}")


def as_count(op: str, name: str, value: Any, least: int = 0) -> int:
    if as_int(op, name, value) < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {value}")
    return value


for _error in (CompileError, CaptureError):
    _error.__module__ = "fusionrt"  # tracebacks show the public name
