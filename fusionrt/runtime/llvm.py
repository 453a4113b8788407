"""LLVM as llvmlite brings it: for kernels of a CPU, and for what Python calls often, in machine code."""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections.abc import Callable
from typing import Any

from fusionrt import forks

_DECLARED = re.compile(r"^declare .* @(\w+)\(", re.MULTILINE)  # without LLVM's own, which have points
_engines: list[Any] = []  # they own the code
_FASTCALL = 0x0080  # METH_FASTCALL


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
    if sys.version_info < (3, 11):  # which has the first in headers alone; without names they do the same
        text = text.replace("@PyObject_Vectorcall(", "@PyObject_VectorcallDict(")
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


class _MethodDef(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int),
                ("doc", ctypes.c_char_p))


def builtin(stem: str, address: int, *owned: Any) -> Callable[..., Any]:
    """The function of kernels_src/`stem`.ll that is called as the file is, as Python calls C: it is given a
    tuple that begins with `address` and owns the rest."""
    method = _method(stem)  # which Python does not own, and another thread may have made as well
    function: Callable[..., Any] = _create(ctypes.addressof(method), (address, method, *owned), None)
    return function


_create = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
    ("PyCFunction_NewEx", ctypes.pythonapi))


@functools.cache
def _method(stem: str) -> _MethodDef:
    """What Python needs to know of the machine code."""
    from fusionrt.runtime import source  # a CPU's kernels need none

    code = compiled(source.template(f"{stem}.ll"), stem)
    return _MethodDef(f"fusionrt_{stem}".encode(), code, _FASTCALL, None)
