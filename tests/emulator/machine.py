"""What stands in for a GPU and its driver: compiles kernels, loads them, launches them, has memory."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

from fusionrt.runtime.device import _LaunchConfig

from .memory import Memory
from .translation import HEADER, translated

ENGINE, INTERFACE = (HEADER.with_name(name) for name in ("engine.cpp", "engine.h"))
FLAGS = ("-std=c++17", "-w", "-fPIC", "-shared", "-fno-strict-aliasing", "-fno-stack-protector")
# Products are part of additions, as NVRTC has it: rounded twice, results would not be as accurate. What is
# misaligned traps. Two kernels' variables of one name are two.
OF_KERNELS = ("-O1", "-mfma", "-ffp-contract=fast", "-fpermissive", "-fsanitize=alignment",
              "-fsanitize-undefined-trap-on-error", "-fno-gnu-unique", "-Wl,-Bsymbolic")
# Without clusters, the copy engine and launches that depend on each other: an L4 has no more.
ARCHITECTURE = "sm_89"
NUMBER = 1 << 10  # of the device, which no other has


def missing() -> str | None:
    """Why kernels cannot be emulated here."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return "fibers switch as on Linux on x86-64"
    if " fma " not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        return "the processor has no fused multiplication and addition"
    return None if shutil.which("g++") else "kernels are compiled by g++, which is not installed"


_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_LaunchConfig), *[ctypes.c_void_p] * 3)
_IS_CAPTURING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))


def _no_capture(stream: int, status: Any) -> int:
    status[0] = 0
    return 0


class KernelFault(AssertionError):
    """What a kernel did that no kernel may."""


class Machine:
    """`folder`: where what is compiled is kept, which several processes may share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for header in (HEADER, INTERFACE):
            own = folder / f"{os.getpid()}.h"
            shutil.copy(header, own)
            own.replace(folder / header.name)
        self._headers = [header.read_text(encoding="utf-8") for header in (HEADER, INTERFACE)]
        # Its names are seen by the kernels, which are loaded after it.
        self._engine = ctypes.CDLL(str(self._compiled(ENGINE.read_text(encoding="utf-8"), ("-O2",))),
                                   mode=ctypes.RTLD_GLOBAL)
        self._launch = self._engine.emu_launch
        self._launch.restype = ctypes.c_char_p
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_uint] * 4]
        address = ctypes.c_size_t
        self._engine.emu_register.argtypes = [address] * 4
        self._engine.emu_forget.argtypes = [address]
        self.memory = Memory(self._engine.emu_register, self._engine.emu_forget)
        self._kernels: list[tuple[str, str, ctypes.CDLL]] = []  # what for, text and entry, where it is
        self._handles: dict[tuple[str, str], int] = {}
        self._kept: list[torch.Tensor] = []
        self.launched: list[str] = []  # names of kernels
        self.by_machine_code = 0       # how many of them
        self._for_machine_code = _LAUNCH(self._launch_by_config), _IS_CAPTURING(_no_capture)

    # -- as fusionrt.runtime.device ----------------------------------------------------------------

    def function(self, text: str, entry: str, device: int, name: str, kernel: str = "") -> int:
        key = text, kernel or entry
        if key not in self._handles:
            number = 10 * int(ARCHITECTURE.removeprefix("sm_"))
            library = ctypes.CDLL(str(self._compiled(translated(*key, number), OF_KERNELS)))
            self._kernels.append((name, key[1], library))
            self._handles[key] = len(self._kernels)
        return self._handles[key]

    def memory_of_process(self, n_bytes: int) -> int:
        """Address of zeros that are never freed."""
        self._kept.append(self.memory.piece(n_bytes).zero_())
        return self._kept[-1].data_ptr()

    # -- as CuPy's driver --------------------------------------------------------------------------

    def launchKernel(self, function: int, x: int, y: int, z: int, block_x: int, block_y: int, block_z: int,
                     shared: int, stream: int, pointers: int, extra: int) -> None:
        op, kernel, library = self._kernels[function - 1]
        if not (0 < x < 1 << 31 and 0 < y < 1 << 16 and z == block_y == block_z == 1 and 0 < block_x <= 1024):
            raise KernelFault(f"{op}: {kernel} cannot have a grid of {x} x {y} x {z} blocks of "
                              f"{block_x} x {block_y} x {block_z} threads")
        self.launched.append(kernel)
        params = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))[0]
        fault = self._launch(library.emu_entry, params, x, y, block_x, shared)
        if fault is not None:
            raise KernelFault(f"{op}: {kernel}: {fault.decode()}")

    def addresses(self) -> tuple[int | None, ...]:
        """Of what machine code calls in the place of cuLaunchKernelEx and cuStreamIsCapturing."""
        return tuple(ctypes.cast(f, ctypes.c_void_p).value for f in self._for_machine_code)

    def _launch_by_config(self, config: Any, function: int, pointers: int, extra: None) -> int:
        of = config[0]
        try:
            self.launchKernel(function, of.x, of.y, of.z, of.block_x, of.block_y, of.block_z, of.shared,
                              of.stream or 0, pointers, 0)
        except KernelFault:  # Python's call, which follows, raises it
            return 1
        self.by_machine_code += 1
        return 0

    def launchCooperativeKernel(self, *_: int) -> NoReturn:
        raise NotImplementedError("blocks that wait for each other are not emulated")

    def ctxGetCurrent(self) -> int:
        return 1

    # -- compiling ---------------------------------------------------------------------------------

    def _compiled(self, text: str, flags: tuple[str, ...]) -> Path:
        """Once for all processes that share the folder: by all that it is made of."""
        all_of_it = "\0".join([text, *self._headers, *FLAGS, *flags])
        key = hashlib.blake2b(all_of_it.encode(), digest_size=16).hexdigest()
        made, own = self.folder / f"{key}.so", self.folder / f"{key}.{os.getpid()}"
        if not made.exists():
            source, library = own.with_suffix(f"{own.suffix}.cpp"), own.with_suffix(f"{own.suffix}.so")
            source.write_text(text, encoding="utf-8")
            command = ["g++", *FLAGS, *flags, str(source), "-o", str(library)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"g++ does not compile {source}:\n{done.stderr[:4000]}")
            library.replace(made)
        return made
