"""Fixtures: a kernel cache for all, the device, random numbers that repeat, a cache to break."""

import gc
import itertools
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fusionrt.runtime import cache

ROOT = Path(__file__).parents[1]
pytest.register_assert_rewrite("checking", "module_checks", "pointwise_ops", "cache_faults",
                              "product_checks")


def pytest_configure():
    """For the workers of pytest-xdist, which share the cores: threads that spin while they wait, as OpenMP's
    do unless told, take them from another worker."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(request, tmp_path_factory):
    """Every kernel is compiled once: in this process, in one that a test starts, in another worker of
    pytest-xdist, or in an earlier session, from which pytest's own cache keeps it. Its key is all that it was
    made of: source, options, compiler, processor."""
    before = os.environ.get("FUSIONRT_CACHE_DIR")
    kept = getattr(request.config, "cache", None)  # none with `-p no:cacheprovider`
    folder = kept.mkdir("kernels") if kept else tmp_path_factory.getbasetemp() / "kernels"
    os.environ["FUSIONRT_CACHE_DIR"] = str(folder)
    yield
    if before is None:
        del os.environ["FUSIONRT_CACHE_DIR"]
    else:
        os.environ["FUSIONRT_CACHE_DIR"] = before


def pytest_collection_finish():
    """What is there now stays: the collector need not walk torch and thousands of tests again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture
def only_new_objects():
    """Neither `gc.collect` nor `gc.get_objects` looks at what is there already: half a second in a fresh
    process, several after thousands of tests."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def pytest_pyfunc_call(pyfuncitem):
    pyfuncitem.obj = with_room(pyfuncitem.obj)


def with_room(function: Callable) -> Callable:
    """The function, called with half a megabyte for the frames of what it calls.

    CPython keeps frames in chunks of 16 KB, and asks the system for the next one and gives it back in every
    call across a chunk's end: below pytest's frames Numba does so thousands of times a kernel, up to a third
    of its time. A frame that is itself large gets a chunk of the next power of two.
    """
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=1 << 16)
    return call


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


# What no CPU has to repeat in the default run: kernels that differ by loads and stores alone.
BY_OTHER_DTYPES = {
    **dict.fromkeys(("test_batch_norm", "test_cross_entropy", "test_embedding", "test_ffn", "test_image",
                     "test_linear", "test_linear_cross_entropy", "test_loss", "test_norm", "test_reduction",
                     "test_softmax", "test_window"), "float16"),
    "test_ops_layouts": "bfloat16",
}
LONGEST = ("test_warmup", "test_wheel", "test_examples", "test_cpu")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """With these dtypes, which the pointwise tests cover, the files would take minutes more; with what
    `covering` leaves out, ten. Files with tests of many seconds come first: at the end one worker would wait
    for another."""
    groups = {}
    for item in items:
        if not hasattr(item, "callspec") or item.get_closest_marker("gpu"):
            continue
        params = item.callspec.params
        names = [str(p).removeprefix("torch.") for p in params.values()]
        if BY_OTHER_DTYPES.get(item.path.stem) in names:
            item.add_marker(pytest.mark.slow)
        elif item.get_closest_marker("covering") and not item.get_closest_marker("slow"):
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in groups.values():
        (together,) = group[0].get_closest_marker("covering").args
        kept = covering([item.callspec.params for item in group], together)
        for k, item in enumerate(group):
            if k not in kept:
                item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def covering(combinations: list[dict], together: int) -> list[int]:
    """Positions of few combinations of parameters in which every `together` values meet that do so in any.

    What a kernel is made of (op, dtype, layout, option) goes wrong by one of these or where two of them meet,
    so that every value of a third one would compile once more what others have shown. Each time the one is
    taken in which most meet for the first time, or whose values were taken least: the same one in every
    worker of pytest-xdist.
    """
    values = [[(name, repr(value)) for name, value in c.items()] for c in combinations]
    meetings = [set(itertools.combinations(of_one, together)) for of_one in values]
    missing, taken, kept = set().union(*meetings), Counter(), []
    while missing:
        best = max(range(len(values)), key=lambda k: (
            len(meetings[k] & missing), -sum(taken[value] for value in values[k])))
        kept.append(best)
        taken.update(values[best])
        missing -= meetings[best]
    return kept


@pytest.fixture
def launches(monkeypatch):
    """Names of the kernels that calls are built with."""
    from fusionrt.runtime.plan_text import PlanText
    built, real = [], PlanText.launch

    def launched(self, source, *args, **more):
        built.append(source.entry)
        return real(self, source, *args, **more)

    monkeypatch.setattr(PlanText, "launch", launched)
    return built
