"""What the tests share: a kernel cache, the device, how far a result may be off."""

import math
import os

import pytest
import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory):
    """Every kernel is compiled once a session, in this process or in one that a test starts."""
    before = os.environ.get("FUSIONRT_CACHE_DIR")
    os.environ["FUSIONRT_CACHE_DIR"] = str(tmp_path_factory.mktemp("kernels"))
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


def ulp(exact, dtype):
    """The spacing of dtype's numbers at |exact|, in float64."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(exact.abs().clamp(info.tiny, info.max))[1] - 1
    return torch.ldexp(torch.full_like(exact, info.eps, dtype=torch.float64), exponent)


def assert_as_accurate(ours, torchs, exact, extra=0.0, near=None):
    """|ours - exact| is at most 2 ulp and twice torch's worst error nearby.

    "Nearby": among the 64 neighbours of an element in the order of `near` (for a function of one
    variable, that variable), so that neither a small result hides behind the error of a large one,
    nor a lucky one of torch's counts as its accuracy; or, without `near`, anywhere.
    Where torch or the exact result leaves the dtype's range, ours equals one of them.
    In float64 `exact` is torch's own result: what is allowed is 16 ulp and 16 ulp of 1.
    """
    assert ours.dtype == torchs.dtype
    assert ours.shape == torchs.shape == exact.shape
    dtype = ours.dtype
    extra, near = (
        torch.as_tensor(v).expand(exact.shape) for v in (extra, 0.0 if near is None else near)
    )
    rounded = exact.to(dtype).double().cpu().flatten()
    ours, torchs, exact, extra, near = (
        t.detach().double().cpu().flatten() for t in (ours, torchs, exact, extra, near)
    )
    inside = torchs.isfinite() & rounded.isfinite()
    found = ours[~inside]
    same = [(found == o) | (found.isnan() & o.isnan()) for o in (torchs[~inside], rounded[~inside])]
    assert (same[0] | same[1]).all()
    ours, torchs, exact, extra, near = (t[inside] for t in (ours, torchs, exact, extra, near))
    if not exact.numel():
        return
    if dtype == torch.float64:
        allowed = 16 * (ulp(exact, dtype) + torch.finfo(dtype).eps) + extra
    else:
        order = near.argsort()
        theirs = (torchs - exact).abs()
        if near.min() == near.max():
            worst = theirs.max()
        else:
            worst = torch.empty_like(theirs)
            worst[order] = torch.nn.functional.max_pool1d(theirs[order][None], 65, 1, 32)[0]
        allowed = 2 * worst + 2 * ulp(exact, dtype) + extra
    error = (ours - exact).abs()
    error[error.isnan()] = math.inf
    at = (error / allowed).argmax()
    assert error[at] <= allowed[at], (
        f"{ours[at]:.9g} against {exact[at]:.9g} (torch {torchs[at]:.9g}): error {error[at]:.3g}, "
        f"allowed {allowed[at]:.3g}; near {near[at]:.9g}"
    )


def assert_same_bits(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    a, b = a.detach().contiguous(), b.detach().contiguous()
    assert torch.equal(
        a.view(torch.uint8) if a.dim() else a.reshape(1).view(torch.uint8),
        b.view(torch.uint8) if b.dim() else b.reshape(1).view(torch.uint8),
    )
