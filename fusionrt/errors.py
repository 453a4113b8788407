"""Exceptions of fusionrt. Their text is part of the interface: tests read it."""

from __future__ import annotations

from collections.abc import Sequence


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


class CacheWarning(UserWarning):
    """A fault of the kernel cache; the kernel itself was built and works."""


class MissingKernelError(RuntimeError):
    """A kernel is not in the cache and FUSIONRT_DISABLE_JIT forbids to build it."""


def first_line(error: BaseException, most: int | None = None) -> str:
    """Of its text, and of that so many characters; of an error without text there is none."""
    return (str(error).strip().splitlines() or [""])[0][:most]


def one_line(error: BaseException, most: int | None = None) -> str:
    """Its class and `first_line`."""
    return f"{type(error).__name__}: {first_line(error, most)}"


for _error in (CompileError, CaptureError, CacheWarning, MissingKernelError):
    _error.__module__ = "fusionrt"  # tracebacks show the public name
