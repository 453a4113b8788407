"""What is installed, what works, and what to do about the rest.

Every check is a function that yields `Check`s. A check that raises becomes a problem itself, so
`doctor()` never fails. Nothing is written, and no kernel is run.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fusionrt.runtime import binding, cache, lock

Status = Literal["ok", "warning", "problem"]
CUPY_WHEELS = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
INSTALL = "pip install 'fusionrt[cuda12]' or 'fusionrt[cuda13]'"
PROBE = 'extern "C" __global__ void probe(float* x) { *x = 1.0f; }'
CPU_PROBE = "def kernel(pointers, integers, scalars, start, stop):\n    pass\n"


@dataclass
class Check:
    """One finding; a cure says what to do, and is empty where nothing is to be done."""

    name: str
    status: Status
    detail: str
    cure: str = ""

    def __str__(self) -> str:
        cure = f" -> {self.cure}" if self.cure else ""
        return f"{self.status:8} {self.name}: {self.detail}{cure}"


@dataclass
class Report:
    checks: list[Check]

    @property
    def ok(self) -> bool:
        """Whether there is no problem; warnings do not count."""
        return all(check.status != "problem" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, "checks": [asdict(check) for check in self.checks]}

    @property
    def summary(self) -> str:
        count = {kind: sum(check.status == kind for check in self.checks)
                 for kind in ("problem", "warning")}
        found = [f"{n} {kind}{'s' * (n > 1)}" for kind, n in count.items() if n]
        return ", ".join(found) or "all is well"

    def __str__(self) -> str:
        return "\n".join(map(str, self.checks))


def doctor() -> Report:
    """Examine the installation: driver, GPUs, CuPy, NVRTC, torch, the CPU path, the cache.

    Never raises and needs no GPU. `fusionrt doctor` prints it.

        assert fusionrt.doctor().ok, fusionrt.doctor()
    """
    return Report([check for name, examine in CHECKS.items() for check in _examined(name, examine)])


def _examined(name: str, examine: Callable[[], Iterator[Check]]) -> list[Check]:
    found: list[Check] = []
    try:
        found.extend(examine())
    except Exception as error:
        found.append(Check(name, "problem", f"the check failed: {_named(error)}",
                           "Reinstall fusionrt and its dependencies; if it stays, report it."))
    return found


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def cuda_available() -> bool:
    """Whether CUDA tensors can be served: torch sees a GPU and CuPy's driver binding loads."""
    try:
        import torch

        from fusionrt.runtime import device
        return torch.cuda.is_available() and device.driver() is not None
    except Exception:  # whatever is broken, the answer is no
        return False


def compiler_available() -> bool:
    """Whether CuPy and NVRTC load and compile a kernel; no GPU is needed for that."""
    return _compiler_fault() is None


def _compiler_fault() -> str | None:
    try:
        from fusionrt.runtime import compiler
        known = compiler.supported()
        compiler.build(PROBE, "probe", "sm_80" if "sm_80" in known else known[-1], "probe")
    except Exception as error:  # ImportError, RuntimeError or one of CuPy's own
        return str(error) or type(error).__name__
    return None


# -- the machine and the GPU -----------------------------------------------------------------------

def _installation() -> Iterator[Check]:
    import fusionrt
    from fusionrt.runtime import source
    yield Check("fusionrt", "ok", f"{fusionrt.__version__}, Python {platform.python_version()}, "
                f"{platform.platform()}")
    folder = source.directory()
    count, has_prelude = len(list(folder.glob("*.cu"))), (folder / "prelude.cuh").is_file()
    if count and has_prelude:
        yield Check("templates", "ok", f"{count} in {folder}")
    else:
        yield Check("templates", "problem", f"{folder} holds {count} templates and "
                    f"{'a' if has_prelude else 'no'} prelude.cuh", "It is incomplete: "
                    "run pip install --force-reinstall --no-deps fusionrt.")


def _cuda_driver() -> tuple[int, int] | None:
    """The driver's CUDA version as 13000, and the number of GPUs; None where there is none."""
    try:
        library = binding.libcuda()
    except OSError:
        return None
    version, count = ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    if library.cuInit(0) == 0:
        library.cuDeviceGetCount(ctypes.byref(count))
    return version.value, count.value


def _has_gpu() -> bool:
    found = _cuda_driver()
    return found is not None and found[1] > 0


def _driver() -> Iterator[Check]:
    found = _cuda_driver()
    if found is None or not found[1]:
        why = "no NVIDIA driver" if found is None else "the driver shows none"
        yield Check("gpu", "ok", f"no GPU ({why}): the CPU path is used")
        return
    release = Path("/proc/driver/nvidia/version")
    words = release.read_text().split() if release.is_file() else []
    number = next((w for w in words if w[0].isdigit() and w.count(".") >= 1), "")
    yield Check("driver", "ok", f"{number}{', ' if number else ''}CUDA {_cuda(found[0])}")
    yield from _gpus(found[1])


def _gpus(count: int) -> Iterator[Check]:
    import torch
    if not torch.cuda.is_available():
        yield Check("gpu", "problem", f"torch, {_built_for()}, sees none of {count}",
                    "Install the CUDA build of torch that suits the driver, as "
                    "https://pytorch.org/get-started says.")
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        arch, name = f"sm_{major}{minor}", torch.cuda.get_device_name(index)
        if (major, minor) < (7, 5):
            yield Check(f"gpu {index}", "problem", f"{name}, {arch}: older than sm_75",
                        "Use a GPU of the Turing generation or later, or the CPU.")
        else:
            yield Check(f"gpu {index}", "ok", f"{name}, {arch}")


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


# -- packages --------------------------------------------------------------------------------------

def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cupy() -> Iterator[Check]:
    installed = {wheel: v for wheel in CUPY_WHEELS if (v := _version(wheel))}
    shown = ", ".join(f"{wheel} {v}" for wheel, v in installed.items())
    if not installed:
        status: Status = "problem" if _has_gpu() else "warning"
        yield Check("cupy", status, "not installed: GPU kernels can be neither compiled nor run",
                    f"Run {INSTALL}.")
        return
    if len(installed) > 1:
        yield Check("cupy", "problem", f"{shown}: they overwrite each other's files",
                    f"Run pip uninstall {' '.join(installed)}, then {INSTALL}.")
        return
    (wheel, version), = installed.items()
    driver = _cuda_driver()
    newest = driver[0] // 1000 if driver and driver[1] else 99
    if fault := _cupy_fault():
        yield Check("cupy", "problem", f"{shown} cannot be loaded: {fault}",
                    f"Run pip uninstall {wheel}, then {INSTALL}.")
    elif wheel.endswith("x") and int(wheel[-3:-1]) > newest:
        yield Check("cupy", "problem", f"{shown}, but the driver knows CUDA {newest} at most",
                    f"Update the driver, or run pip uninstall {wheel} and "
                    f"pip install 'fusionrt[cuda{newest}]'.")
    elif int(version.split(".")[0]) < 14:
        yield Check("cupy", "warning", f"{shown}: it finds NVRTC only in a CUDA toolkit",
                    f"Run pip install --upgrade {wheel}.")
    else:
        yield Check("cupy", "ok", shown)


def _cupy_fault() -> str | None:
    try:
        from fusionrt.runtime import device
        device.driver()
    except Exception as error:
        # On a machine without libcuda the binding to it cannot load, and nothing needs it.
        return str(error) if _has_gpu() else None
    return None


def _nvrtc() -> Iterator[Check]:
    fault = _compiler_fault()
    if fault is not None:
        status: Status = "problem" if _has_gpu() else "warning"
        yield Check("nvrtc", status, f"cannot compile: {fault}", f"Run {INSTALL}.")
        return
    from fusionrt.precompile import native
    from fusionrt.runtime import compiler
    known = compiler.supported()
    detail = f"{compiler.version()} ({compiler.toolchain()}), {known[0]} to {known[-1]}"
    unknown = [arch for arch in native() if arch not in (*known, "cpu")]
    if unknown:
        yield Check("nvrtc", "problem", f"{detail}: not for {', '.join(unknown)} of this machine",
                    "Run pip install --upgrade nvidia-cuda-nvrtc (nvidia-cuda-nvrtc-cu12 beside "
                    "cupy-cuda12x).")
    else:
        yield Check("nvrtc", "ok", detail)


def _torch() -> Iterator[Check]:
    import torch
    yield Check("torch", "ok", f"{torch.__version__}, {_built_for()}")


def _built_for() -> str:
    import torch
    return f"built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'the CPU only'}"


def _cpu() -> Iterator[Check]:
    import torch

    from fusionrt.cpu import compiler
    versions = f"{_version('numba')}, llvmlite {_version('llvmlite')}"
    try:
        compiler.build(CPU_PROBE, "float32", "probe")
    except Exception as error:
        yield Check("numba", "problem", f"{versions}, cannot compile: {_named(error)}",
                    "Run pip install --force-reinstall numba llvmlite.")
        return
    yield Check("numba", "ok", versions)
    yield Check("cpu", "ok", f"{compiler.target().split()[0]}, {torch.get_num_threads()} threads: "
                "a pool of fusionrt's, as large as torch's; Numba's threading layer is not used")


# -- the cache -------------------------------------------------------------------------------------

def _cache() -> Iterator[Check]:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        folder = cache.directory()
    if folder is None:
        why = str(given[0].message) if given else "refused, as an earlier warning said"
        yield Check("cache", "problem", f"in memory only: {why}",
                    "Set FUSIONRT_CACHE_DIR to a directory of your own, or mend what is named.")
        return
    fault = _why_not_writable(folder)
    if fault is not None:
        yield Check("cache", "problem", f"{folder} is not writable: {fault}",
                    "Make it writable, or set FUSIONRT_CACHE_DIR to a directory that is.")
    else:
        found = [info for info in cache.entries() if info.path]
        others = lock.why_not_private(folder)
        yield Check("cache", "warning" if others else "ok",
                    f"{folder}: {len(found)} kernels, {sum(i.size for i in found) / 1e6:.1f} MB, "
                    + (others or "private" if folder.exists() else "not there yet"),
                    "Who can write there can run code as you: unless that is intended, mend owner "
                    "and mode, or choose another FUSIONRT_CACHE_DIR." if others else "")
    damaged = cache.verify()
    if damaged:
        first = "; ".join(f"{path.name}: {why}" for path, why in damaged[:3])
        yield Check("cache entries", "problem", f"{len(damaged)} damaged: {first}",
                    "Run fusionrt cache clear, then fusionrt warmup; rebuild read-only caches.")


def _why_not_writable(folder: Path) -> str | None:
    """Nothing is created but a file without a name, of a kernel's size: a full disk takes empty ones."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(os.urandom(64 << 10))  # nothing that a file system could leave out
    except OSError as error:
        return f"{existing}: {error.strerror}"
    return None


def _environment() -> Iterator[Check]:
    for folder in cache.read_only_directories():
        if folder.is_dir():
            count = len(list(folder.glob("*.frt")))
            yield Check("read-only cache", "ok", f"{folder}: {count} kernels")
        else:
            yield Check("read-only cache", "warning", f"{folder} is not a directory",
                        "Correct FUSIONRT_CACHE_READONLY_DIRS.")
    if cache.forbids_compiling():
        yield Check("FUSIONRT_DISABLE_JIT", "warning", "set: a kernel not in the cache is an error",
                    "Unset it, unless the cache was filled on purpose.")


CHECKS: dict[str, Callable[[], Iterator[Check]]] = {
    "fusionrt": _installation, "driver": _driver, "cupy": _cupy, "nvrtc": _nvrtc, "torch": _torch,
    "cpu": _cpu, "cache": _cache, "environment": _environment}
