"""The kernel of a linear layer of few rows and what follows it: results, what it takes, its registers."""

import itertools

import pytest
import torch
from product_checks import applied, check, linear, operands

from fusionrt import expr
from fusionrt.ops import gemv
from fusionrt.ops.gemv import Form
from fusionrt.ops.product import PRODUCT, Layer
from fusionrt.runtime import compiler

HALF = (torch.bfloat16, torch.float16)
CASES = tuple(itertools.product((False, True), repeat=3))   # bias, residual, keep
BEFORE_AMPERE = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
pytestmark = pytest.mark.skipif(BEFORE_AMPERE, reason="no matrix units for bfloat16")


# --- results ---------------------------------------------------------------------------------------

@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 7, 8, 9, 16])
@pytest.mark.parametrize("n, k", [(2, 8), (17, 40), (520, 200), (3080, 776), (1000, 8192)])
def test_results_are_as_accurate_as_torchs(m, n, k):
    for dtype, (bias, residual, keep) in itertools.product(HALF, CASES):
        check(gemv, m, n, k, dtype, "gelu", bias, residual, keep)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "silu", "mish"])
def test_activations(activation):
    for dtype in HALF:
        check(gemv, 5, 3072, 768, dtype, activation)


@pytest.mark.gpu
def test_rows_may_lie_apart_and_bits_are_the_same():
    x, weight, bias, residual = operands(13, 136, 264, torch.float16, residual=True)
    apart = [torch.cat([t, torch.full_like(t[:, :8], float("nan"))], 1)[:, :-8]
             for t in (x, weight, residual)]
    expected, _ = linear(gemv, x, weight, bias, applied("silu", True), residual)
    for _ in range(5):
        found, _ = linear(gemv, *apart[:2], bias, applied("silu", True), apart[2])
        assert torch.equal(found, expected)


@pytest.mark.gpu
def test_nan_and_infinity_stay_in_their_rows():
    x, weight, bias, _ = operands(12, 256, 128, torch.bfloat16)
    x[3], x[9] = float("nan"), float("inf")
    out, _ = linear(gemv, x, weight, bias)
    assert out[3].isnan().all()
    assert not out[9].isfinite().any()
    assert out[[i for i in range(12) if i not in (3, 9)]].isfinite().all()


@pytest.mark.gpu
def test_in_a_graph():
    x, weight, bias, _ = operands(1, 512, 512, torch.bfloat16)
    expected, _ = linear(gemv, x, weight, bias, applied("gelu"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = linear(gemv, x, weight, bias, applied("gelu"))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


# --- what it takes ---------------------------------------------------------------------------------

def test_what_is_chosen(monkeypatch):
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    gemv.chosen.cache_clear()
    good = (1, 3072, 768, torch.bfloat16, torch.device("cuda", 0))
    assert gemv.chosen(*good)
    assert gemv.chosen(*good, expr.pow_(PRODUCT, PRODUCT))
    for place, value in [(0, 17), (0, 0), (1, 1), (1, 1 << 16), (2, 770), (3, torch.float32),
                         (4, torch.device("cpu"))]:
        assert not gemv.chosen(*(value if i == place else a for i, a in enumerate(good)))
    assert not gemv.chosen(*good, expr.row_sum(PRODUCT))
    capability = (8, 0)
    gemv.chosen.cache_clear()
    assert not gemv.chosen(*good)
    gemv.chosen.cache_clear()


def test_memory_that_cannot_be_read_16_bytes_at_a_time_is_not_supported():
    x, weight, bias = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((32, 64), (47, 64), (47,)))
    assert gemv.supports(x, weight, bias)
    assert gemv.supports(x[:1, 8:], weight[:, 8:], bias, torch.empty(1, 47, dtype=torch.bfloat16))
    assert not gemv.supports(x.t(), weight, bias)
    assert not gemv.supports(x[:, 1:], weight[:, 1:], bias)
    assert not gemv.supports(x.half(), weight, bias)
    assert not gemv.supports(x, weight, bias.float())
    assert not gemv.supports(x, weight, torch.empty(94, dtype=torch.bfloat16)[::2])


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("groups", [1, 2])
def test_kernels_compile_without_spills(arch, groups):
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    for dtype, activation, case in [("bfloat16", "gelu", (True, True, True)),
                                    ("float16", "softplus", (False, False, False))]:
        kernel = gemv._kernel(Form(Layer(dtype, applied(activation, case[1]), *case), groups))
        entry, _ = compiler.cubin(kernel.text, kernel.stem, arch, "gemv")
        assert not any(entry.metadata[key] for key in ("stack", "spills", "warnings")), (activation, case)
