"""Fixtures: a kernel cache for all, the device, random numbers that repeat, a cache to break."""

import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fusionrt.runtime import cache

ROOT = Path(__file__).parents[1]
pytest.register_assert_rewrite("checking", "module_checks", "pointwise_ops", "cache_faults")


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory):
    """Every kernel is compiled once a session, in this process, in one that a test starts, or in another
    worker of pytest-xdist, whose base directories lie beside each other."""
    before = os.environ.get("FUSIONRT_CACHE_DIR")
    base = tmp_path_factory.getbasetemp()
    session = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["FUSIONRT_CACHE_DIR"] = str(session / "kernels")
    yield
    if before is None:
        del os.environ["FUSIONRT_CACHE_DIR"]
    else:
        os.environ["FUSIONRT_CACHE_DIR"] = before


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1234)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache that is empty, explicit, and forgets this test; an unexpected warning is an error."""
    for name in ("CACHE_READONLY_DIRS", "DISABLE_JIT"):
        monkeypatch.delenv(f"FUSIONRT_{name}", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_warned", {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o755)  # for the unprivileged tests; pytest makes it 0700
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield tmp_path / "cache"


BY_OTHER_DTYPES = ("test_batch_norm", "test_cross_entropy", "test_embedding", "test_ffn", "test_image",
                   "test_linear", "test_loss", "test_norm", "test_reduction", "test_softmax", "test_window")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """On a CPU float16 differs from bfloat16 by its loads and stores, which the pointwise tests cover; with
    it these files would take minutes more."""
    for item in items:
        params = getattr(item, "callspec", None) and item.callspec.params.values()
        half = any(str(p).removeprefix("torch.") == "float16" for p in params or ())
        if item.path.stem in BY_OTHER_DTYPES and half and not item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.slow)
