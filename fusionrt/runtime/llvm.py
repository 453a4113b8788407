"""LLVM as llvmlite brings it: for kernels of a CPU, and for launches of those of a GPU in machine code."""

from __future__ import annotations

import functools
import re
from typing import Any

from fusionrt import forks

_DECLARED = re.compile(r"^declare .* @(\w+)\(", re.MULTILINE)  # without LLVM's own, which have points
_engines: list[Any] = []  # they own the code


@functools.cache
def library() -> Any:
    """llvmlite, of which one thread at a time is in LLVM."""
    from llvmlite import binding
    lock = getattr(getattr(binding.ffi.lib, "_lock", None), "_lock", None)
    if lock is not None:
        forks.waits_for(lock)
    return binding


@functools.cache
def machine(effort: int = 2) -> Any:
    """This one, for code in memory; 0 for what shall be ready in half the time rather than fast."""
    binding = library()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(jit=True, opt=effort)


def compiled(text: str, symbol: str, effort: int = 2) -> int:
    """The address of a function of a module, whose code lives as long as the process."""
    binding, engine = library(), _engine(text, effort)
    missing = [name for name in _DECLARED.findall(text) if binding.address_of_symbol(name) is None]
    if missing:  # to go on would end the process
        raise RuntimeError(f"this process does not export {', '.join(missing)}")
    return _address(engine, symbol)


def loaded(object_code: bytes, symbol: str) -> int:
    """As `compiled`, of what LLVM had compiled."""
    engine = _engine("")
    engine.add_object_file(library().ObjectFileRef.from_data(object_code))
    return _address(engine, symbol)


def _engine(text: str, effort: int = 2) -> Any:
    """Kept from the start, as it also takes the machine with it where it ends."""
    binding = library()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(text), machine(effort))
    _engines.append(engine)
    return engine


def _address(engine: Any, symbol: str) -> int:
    engine.finalize_object()
    return int(engine.get_function_address(symbol))
