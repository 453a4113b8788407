"""LLVM as llvmlite brings it: for kernels of a CPU, and for launches of those of a GPU in machine code."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def machine() -> Any:
    """This one, for code in memory."""
    from llvmlite import binding
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(jit=True)
