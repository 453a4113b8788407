"""The doctor: its findings on a sound machine, and a cure for every fault that we can make."""

import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checking import needs_nvrtc

import fusionrt as frt
from fusionrt import doctor as examine
from fusionrt.runtime import cache, compiler, source

doctor_module = sys.modules["fusionrt.diagnosis"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty, private cache of this test's own."""
    for name in ("FUSIONRT_CACHE_READONLY_DIRS", "FUSIONRT_DISABLE_JIT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "cache"
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(folder))
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_warned", {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder.mkdir(mode=0o700)
    return folder


def checks() -> dict[str, "doctor_module.Check"]:
    return {check.name: check for check in examine().checks}


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Let these packages have these versions; None: not installed."""
    known = importlib.metadata.version

    def version(package: str) -> str:
        found = versions.get(package.replace("-", "_"), "")
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found or known(package)

    monkeypatch.setattr(importlib.metadata, "version", version)


def with_gpu(monkeypatch: pytest.MonkeyPatch, driver: int = 13000) -> None:
    monkeypatch.setattr(doctor_module, "_cuda_driver", lambda: (driver, 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr("fusionrt.runtime.device.driver", lambda: object())
    monkeypatch.setattr("fusionrt.runtime.device.device_count", lambda: 1)
    monkeypatch.setattr("fusionrt.runtime.device.architecture", lambda index: "sm_90")


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "_cuda_driver", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# --- what it finds


def test_report_of_this_machine() -> None:
    report = examine()
    found = {check.name: check for check in report.checks}

    assert set(found) >= {
        "fusionrt", "templates", "cupy", "nvrtc", "torch", "numba", "cpu", "cache"}
    assert report.ok, report
    assert found["fusionrt"].detail.startswith(frt.__version__)
    assert found["torch"].detail.startswith(torch.__version__)
    assert found["templates"].detail.startswith(f"{len(list(source.directory().glob('*.cu')))} in ")
    assert f"{torch.get_num_threads()} threads" in found["cpu"].detail
    assert "Numba's threading layer is not used" in found["cpu"].detail
    assert str(report).count("\n") == len(report.checks) - 1


def test_report_as_json() -> None:
    report = json.loads(json.dumps(examine().as_dict()))

    assert set(report) == {"ok", "checks"}
    assert report["ok"] is True
    for check in report["checks"]:
        assert set(check) == {"name", "status", "detail", "cure"}
        assert check["status"] in ("ok", "warning", "problem")
        assert bool(check["cure"]) == (check["status"] != "ok"), check


def test_nothing_is_written(home: Path) -> None:
    examine()
    assert list(home.iterdir()) == []


def test_no_gpu_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    found = checks()
    assert found["gpu"].status == "ok"
    assert found["gpu"].detail == "no GPU (no NVIDIA driver): the CPU path is used"
    assert not frt.CUDA_AVAILABLE


@needs_nvrtc
def test_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch)
    found = checks()
    assert found["driver"].detail.endswith("CUDA 13.0")
    assert (found["gpu 0"].status, found["gpu 0"].detail) == ("ok", "NVIDIA H200, sm_90")
    assert found["nvrtc"].status == "ok"
    assert found["nvrtc"].detail.startswith(compiler.version())
    assert frt.CUDA_AVAILABLE


@pytest.mark.gpu
def test_the_gpu_of_this_machine() -> None:
    major, minor = torch.cuda.get_device_capability(0)
    found = checks()
    assert found["gpu 0"].detail == f"{torch.cuda.get_device_name(0)}, sm_{major}{minor}"
    assert found["driver"].status == "ok"
    assert frt.CUDA_AVAILABLE and frt.EXTENSION_LOADED


def test_the_cache_is_counted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("a", "b"):
        assert cache.store(cache.key(source=text), cache.Entry({}, bytes(500_000)))
    baked = home.with_name("baked")
    baked.mkdir()
    monkeypatch.setenv("FUSIONRT_CACHE_READONLY_DIRS", str(baked))
    monkeypatch.setenv("FUSIONRT_DISABLE_JIT", "1")

    found = checks()
    assert found["cache"].detail == f"{home}: 2 kernels, 1.0 MB, private"
    assert found["read-only cache"].detail == f"{baked}: 0 kernels"
    assert found["FUSIONRT_DISABLE_JIT"].status == "warning"


# --- what it advises


def cupy_missing(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    with_gpu(monkeypatch)
    installed(monkeypatch, **dict.fromkeys(
        ("cupy", "cupy_cuda11x", "cupy_cuda12x", "cupy_cuda13x")))


def two_cupys(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    installed(monkeypatch, cupy=None, cupy_cuda11x=None, cupy_cuda12x="14.1.0",
              cupy_cuda13x="14.2.0")


def cupy_too_new_for_the_driver(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    with_gpu(monkeypatch, driver=12040)
    installed(monkeypatch, cupy=None, cupy_cuda11x=None, cupy_cuda12x=None, cupy_cuda13x="14.2.0")


def cupy_broken(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    def fail() -> None:
        raise RuntimeError("libcudart.so.13: cannot open shared object file")

    with_gpu(monkeypatch)
    installed(monkeypatch, cupy=None, cupy_cuda11x=None, cupy_cuda12x=None, cupy_cuda13x="14.2.0")
    monkeypatch.setattr("fusionrt.runtime.device.driver", fail)


def nvrtc_missing(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    with_gpu(monkeypatch)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)


def nvrtc_too_old(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    with_gpu(monkeypatch)
    monkeypatch.setattr(compiler, "supported", lambda: ("sm_75", "sm_80"))
    monkeypatch.setattr(compiler, "build", lambda *args: None)
    monkeypatch.setattr(compiler, "version", lambda: "11.1")


def torch_without_cuda(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    with_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)


def gpu_too_old(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    with_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))


def numba_missing(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)


def templates_missing(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(source, "directory", lambda: home / "nowhere")


def cache_unwritable(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    (home / "file").touch()  # also root cannot make a directory in a file
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(home / "file" / "cache"))


def cache_not_private(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.delenv("FUSIONRT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    (home / "fusionrt").mkdir()
    (home / "fusionrt").chmod(0o777)


def entry_damaged(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    (home / f"{cache.key(source='a')}.frt").write_bytes(b"FRTCACHE, but not for long")


def check_broken(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    def fail() -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(cache, "directory", fail)


FAULTS = [
    (cupy_missing, "cupy", "not installed: GPU kernels can be neither compiled nor run",
     "Run pip install 'fusionrt[cuda12]' or 'fusionrt[cuda13]'."),
    (two_cupys, "cupy", "cupy-cuda12x 14.1.0, cupy-cuda13x 14.2.0: they overwrite each other's",
     "Run pip uninstall cupy-cuda12x cupy-cuda13x, then pip install 'fusionrt[cuda12]' or"),
    (cupy_too_new_for_the_driver, "cupy",
     "cupy-cuda13x 14.2.0, but the driver knows CUDA 12 at most",
     "Update the driver, or run pip uninstall cupy-cuda13x and pip install 'fusionrt[cuda12]'."),
    (cupy_broken, "cupy", "cupy-cuda13x 14.2.0 cannot be loaded: libcudart.so.13: cannot open",
     "Run pip uninstall cupy-cuda13x, then pip install"),
    (nvrtc_missing, "nvrtc", "cannot compile: compiling a CUDA kernel needs CuPy and NVRTC",
     "Run pip install 'fusionrt[cuda12]' or 'fusionrt[cuda13]'."),
    (nvrtc_too_old, "nvrtc", "11.1 (", "Run pip install --upgrade nvidia-cuda-nvrtc"),
    (torch_without_cuda, "gpu", "torch, built for the CPU only, sees none of 1",
     "Install the CUDA build of torch"),
    (gpu_too_old, "gpu 0", "NVIDIA H200, sm_70: older than sm_75",
     "Use a GPU of the Turing generation or later, or the CPU."),
    (numba_missing, "numba", "", "Run pip install --force-reinstall numba llvmlite."),
    (templates_missing, "templates", "{home}/nowhere holds 0 templates and no prelude.cuh",
     "It is incomplete: run pip install --force-reinstall --no-deps fusionrt."),
    (cache_unwritable, "cache", "{home}/file/cache is not writable: {home}/file: Not a directory",
     "Make it writable, or set FUSIONRT_CACHE_DIR to a directory that is."),
    (cache_not_private, "cache", "in memory only: fusionrt cache: {home}/fusionrt is writable by "
     "others (mode 0777)", "Set FUSIONRT_CACHE_DIR to a directory of your own, or mend"),
    (entry_damaged, "cache entries", "1 damaged: ",
     "Run fusionrt cache clear, then fusionrt warmup"),
    (check_broken, "cache", "the check failed: KeyError: 'surprise'", "Reinstall fusionrt"),
]


@pytest.mark.parametrize(("fault", "name", "detail", "cure"), FAULTS,
                         ids=[fault.__name__ for fault, *_ in FAULTS])
def test_every_fault_has_a_cure(fault: Callable[..., None], name: str, detail: str, cure: str,
                                home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch, home)

    report = examine()
    (check,) = [check for check in report.checks if check.name == name]
    assert not report.ok
    assert check.status == "problem"
    assert check.detail.startswith(detail.format(home=home)), check.detail
    assert check.cure.startswith(cure), check.cure
    count = sum(check.status == "problem" for check in report.checks)
    assert report.summary.startswith(f"{count} problem")


@needs_nvrtc
@pytest.mark.parametrize("fault", [cupy_missing, nvrtc_missing])
def test_without_a_gpu_missing_packages_are_warnings(
        fault: Callable[..., None], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch, home)
    without_gpu(monkeypatch)

    report = examine()
    assert report.ok
    assert [c.name for c in report.checks if c.status == "warning"] == [
        fault.__name__.removesuffix("_missing")]
    assert report.summary == "1 warning"


def test_a_shared_cache_that_was_asked_for_is_a_warning(home: Path) -> None:
    home.chmod(0o775)
    check = checks()["cache"]
    assert check.status == "warning"
    assert check.detail == f"{home}: 0 kernels, 0.0 MB, is writable by others (mode 0775)"
    assert check.cure.startswith("Who can write there can run code as you")


def test_flags_are_false_where_something_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert frt.EXTENSION_LOADED is False
    assert frt.CUDA_AVAILABLE is False


@pytest.mark.skipif(os.name != "posix", reason="a read-only directory")
def test_read_only_directory_that_is_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSIONRT_CACHE_READONLY_DIRS", str(home / "absent"))
    check = checks()["read-only cache"]
    assert (check.status, check.detail) == ("warning", f"{home}/absent is not a directory")
    assert check.cure == "Correct FUSIONRT_CACHE_READONLY_DIRS."
