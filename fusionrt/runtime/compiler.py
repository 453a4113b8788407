"""Source text to cubin, with NVRTC through CuPy's binding. Needs no GPU and no CUDA toolkit.

`cupy.RawModule` would force `-ftz=true`, hide the log, and compile an empty program even on a warm
hit; the binding below it does none of that. libnvrtc is not loaded while every
kernel is cached.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import re
import tempfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from fusionrt.errors import CompileError
from fusionrt.runtime import binding, cache

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
MAX_JOBS = 8  # at a time: a compile takes a few hundred megabytes
OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--diag-suppress=177")  # 177: unused names
_OF_ARCHITECTURES = re.compile(
    r"^#if __CUDA_ARCH__ >= (\d+)(?: && __CUDA_ARCH__ < (\d+))?\n(.*?)(?:^#else\b[^\n]*\n(.*?))?"
    r"^#endif\b[^\n]*\n", re.M | re.S)
_told: ContextVar[Callable[[], None] | None] = ContextVar("told", default=None)
_NVRTC_WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc-cu13")


@functools.cache
def toolchain() -> str:
    """The compiler's identity, from package metadata: asking libnvrtc itself would load it."""
    for wheel in _NVRTC_WHEELS:
        try:
            return f"nvrtc {importlib.metadata.version(wheel)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "nvrtc of the system"


def target(entry: str, arch: str) -> str:
    """What to compile a template for, so that it runs on `arch`."""
    return "sm_90a" if entry.endswith("_sm90") else arch


@functools.lru_cache(256)
def key(text: str, entry: str, arch: str) -> str:
    return cache.key(source=seen_by(arch, text), options=OPTIONS, arch=arch, toolchain=toolchain(),
                     entry=entry)


def seen_by(arch: str, text: str) -> str:
    """What an architecture sees of a text, whose `#if __CUDA_ARCH__ >= ...` (`&& __CUDA_ARCH__ < ...`) do
    not nest. Rows that are laid out differently on older GPUs alone are one kernel on the others."""
    number = _number(arch)
    return _OF_ARCHITECTURES.sub(
        lambda m: m[3] if int(m[1]) <= number < int(m[2] or number + 1) else m[4] or "", text)


def has_clusters(arch: str) -> bool:
    """Whether blocks can share a row through each other's memory, 16 of them, with 227 KB each: GPUs of
    datacentres. (sm_120 has clusters of 8, and 99 KB.)"""
    return 900 <= _number(arch) < 1200


def _number(arch: str) -> int:
    """`__CUDA_ARCH__`."""
    return 10 * int(arch.removeprefix("sm_").rstrip("af"))


def cubin(text: str, entry: str, arch: str, name: str) -> tuple[cache.Entry, bool]:
    """The compiled kernel and whether it was cached."""

    def made() -> cache.Entry:
        tell = _told.get()
        if tell is not None:
            _told.set(None)
            tell()
        return build(text, entry, arch, name)

    return cache.get_or_build(key(text, entry, arch), made, f"{name} ({entry}, {arch})")


@contextlib.contextmanager
def at_first_miss(tell: Callable[[], None]) -> Iterator[None]:
    """`tell` hears of the first kernel that a call in here has to compile, before it does so."""
    token = _told.set(tell)
    try:
        yield
    finally:
        _told.reset(token)


def build(text: str, entry: str, arch: str, name: str) -> cache.Entry:
    if arch.rstrip("af") not in supported():
        raise RuntimeError(f"{name}: NVRTC {version()} cannot compile for {arch}, only for "
                           f"{', '.join(supported())}; upgrade the package nvidia-cuda-nvrtc")
    nvrtc, text = _nvrtc(), seen_by(arch, text)
    # Its own cache, where it has one, gives no log: no registers, no spills. Without textures and the
    # runtime's own functions it takes a twentieth less time.
    here = nvrtc.getVersion()
    newer = (("--no-cache",) if here >= (12, 9) else ()) + (("--minimal",) if here >= (12, 4) else ())
    options = (*OPTIONS, *newer, f"-arch={arch}")
    program = nvrtc.createProgram(text, f"{entry}.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise CompileError(name, arch, options, log or str(error), _dump(text, entry)) from None
        log, code = nvrtc.getProgramLog(program), nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)
    if not code:  # an arch that NVRTC can only turn into PTX gives success and no bytes
        raise CompileError(name, arch, options, "NVRTC returned an empty cubin", _dump(text, entry))
    code += b"\0" * (-len(code) % 8)  # CuPy strips the last byte, without which nvdisasm refuses it
    return cache.Entry({"kernel": name, "entry": entry, "arch": arch, **resources(log)}, code)


def supported() -> tuple[str, ...]:
    """The architectures that NVRTC knows. Loads it, half a second."""
    return tuple(f"sm_{number}" for number in _nvrtc().getSupportedArchs())


def version() -> str:
    """NVRTC's own, as 13.0."""
    return ".".join(map(str, _nvrtc().getVersion()))


def _nvrtc() -> Any:
    try:
        return binding.nvrtc()
    except Exception as error:  # CuPy raises ImportError, RuntimeError or its own, by what is missing
        raise RuntimeError("compiling a CUDA kernel needs CuPy and NVRTC: pip install "
                           f"'fusionrt[cuda12]' or 'fusionrt[cuda13]' ({error})") from error


def _dump(text: str, entry: str) -> str:
    with tempfile.NamedTemporaryFile("w", prefix=f"fusionrt-{entry}-", suffix=".cu", delete=False) as f:
        f.write(text)
    return f.name


def resources(log: str) -> dict[str, int]:
    """Registers, stack, spills and shared memory from the output of `ptxas -v`: of a translation unit of
    several kernels, of the one that has most."""

    def number(pattern: str) -> int:
        return max((int(n) for n in re.findall(pattern, log)), default=0)

    return {"registers": number(r"Used (\d+) registers"),
            "stack": number(r"(\d+) bytes stack frame"),
            "spills": number(r"(\d+) bytes spill stores"),
            "shared": number(r"(\d+) bytes smem"),
            "warnings": len(re.findall(r"\(C75\d\d\)", log))}
