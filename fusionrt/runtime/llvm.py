"""LLVM as llvmlite brings it: for kernels of a CPU, and for launches of those of a GPU in machine code."""

from __future__ import annotations

import functools
from typing import Any

from fusionrt import forks


@functools.cache
def library() -> Any:
    """llvmlite, of which one thread at a time is in LLVM."""
    from llvmlite import binding
    lock = getattr(getattr(binding.ffi.lib, "_lock", None), "_lock", None)
    if lock is not None:
        forks.waits_for(lock)
    return binding


@functools.cache
def machine() -> Any:
    """This one, for code in memory."""
    binding = library()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(jit=True)
