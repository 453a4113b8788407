"""Rows that begin and end within packs of 16 bytes, of any length, at any address; and very short ones."""

import pytest
import torch
from checking import BF16, F16, F32, check, check_in_norm, lost, needs_nvrtc
from test_row_layout import norm, problems
from torch.nn import functional as F

import fusionrt as frt
from fusionrt.rehearsal import collecting
from fusionrt.runtime import compiler, launch, row_choice
from fusionrt.runtime.row_operands import is_ragged, width

COLUMNS = (131, 1023, 4099, 50_257)
OPS = {
    "softmax": (frt.softmax, torch.softmax),
    "log_softmax": (frt.log_softmax, torch.log_softmax),
    "logsumexp": (frt.logsumexp, torch.logsumexp),
    "sum": (frt.sum, torch.sum),
    "var": (frt.var, torch.var),
    "amax": (frt.amax, torch.amax),
    "argmax": (frt.argmax, torch.argmax),
}
dtypes = pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)


def found_of(op, columns, dtype, weights=0):
    return [is_ragged(p, 16) for p in problems(op, columns, dtype, 4096, weights)]


@pytest.mark.parametrize(("op", "columns", "dtype", "weights", "expected"), [
    (frt.softmax, 1023, BF16, 0, [True, True]),
    (frt.softmax, 1023, F32, 0, [True, True]),
    (frt.softmax, 1022, BF16, 0, [True, True]),      # pairs would be a quarter of a pack
    (frt.softmax, 1020, BF16, 0, [False, False]),    # of packs of half the size
    (frt.softmax, 1022, F32, 0, [False, False]),
    (frt.softmax, 127, BF16, 0, [False, False]),     # of single elements a large part
    (frt.softmax, 1024, BF16, 0, [False, False]),
    (norm, 1023, BF16, 2, [True, False]),            # its gradient has sums over the rows
])
def test_which_rows_are_ragged(op, columns, dtype, weights, expected):
    assert found_of(op, columns, dtype, weights) == expected


def test_what_begins_at_different_places_is_not_ragged():
    wide = torch.empty(4096, 1024, device="meta", dtype=BF16)
    with collecting() as needed:
        frt.softmax(wide[:, :1023], -1)
        frt.sum(wide[:, 1:], -1)
        frt.sum(torch.empty(4096, 1000, device="meta", dtype=BF16), -1)
    softmax, of_odd, of_even = needed
    assert not is_ragged(softmax, 16)            # its results are dense
    assert is_ragged(of_odd, 2) and width(of_odd, 2) == 8
    assert is_ragged(of_even, 2) and not is_ragged(of_even, 16)


def test_drawn_numbers_and_first_maxima_go_by_packs_of_their_own():
    x = torch.empty(4096, 1023, device="meta", dtype=BF16)
    with collecting() as needed:
        frt.layer_norm(x, (1023,), dropout_p=0.5)
        frt.argmax(x, -1)
    assert not any(is_ragged(p, 16) for p in needed)


@needs_nvrtc
@pytest.mark.covering(1)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("op", "columns", "weights"), [
    (frt.softmax, 1023, 0), (frt.softmax, 50_257, 0), (frt.softmax, 7, 0), (norm, 1023, 2),
    (norm, 50_257, 2)])
def test_no_kernel_spills(op, columns, weights, dtype, arch):
    rows = max(64, (1 << 25) // columns)
    for problem in problems(op, columns, dtype, rows, weights)[:1 if weights else 2]:
        for source in launch.sources(problem):
            made = compiler.build(source.text, source.entry, compiler.target(source.entry, arch), "row")
            assert not made.metadata["spills"]


def test_a_thread_has_a_few_elements_of_short_rows():
    problem, _ = problems(frt.softmax, 7, BF16, 1 << 22)
    made = row_choice.layout(problem, 16, True)
    assert (made.threads, made.packs, made.width) == (2, 4, 1)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("op", OPS)
def test_results_and_gradients(op, columns, dtype):
    ours, torchs = OPS[op]
    x = torch.randn(67, columns, device="cuda", dtype=dtype)
    if op == "argmax":
        assert torch.equal(ours(x, -1), torchs(x, -1))
        return
    compare(ours, torchs, x)


def compare(ours, torchs, x):
    check(lambda x: ours(x, -1), (x,), reference=lambda x: torchs(x, -1),
          extra=lost(x.double().abs().sum(-1), x.dtype) if ours is frt.sum else 0.0)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("columns", COLUMNS)
def test_norms_and_losses(columns, dtype):
    x, w, b = (torch.randn(*s, device="cuda", dtype=dtype) for s in ((67, columns), (columns,), (columns,)))
    check_in_norm(lambda x, w, b: frt.layer_norm(x, (columns,), w, b), (x, w, b),
                  reference=lambda x, w, b: F.layer_norm(x, (columns,), w, b))
    check_in_norm(lambda x, w: frt.rms_norm(x, (columns,), w, 1e-6), (x, w),
                  reference=lambda x, w: F.rms_norm(x, (columns,), w, 1e-6))
    target = torch.randint(0, columns, (67,), device="cuda")
    check(lambda x: frt.cross_entropy(x, target, reduction="none"), (x,),
          reference=lambda x: F.cross_entropy(x, target, reduction="none"))


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("first", range(1, 9))
def test_rows_at_any_address(first, dtype):
    x = torch.randn(67 * 1024 + 8, device="cuda", dtype=dtype)[first:first + 67 * 1024].view(67, 1024)
    for name in ("sum", "logsumexp", "softmax"):
        compare(*OPS[name], x)
    compare(frt.sum, torch.sum, torch.randn(67, 1033, device="cuda", dtype=dtype)[:, first:])


@pytest.mark.gpu
@dtypes
def test_few_long_rows(dtype):
    x = torch.randn(3, 1_000_003, device="cuda", dtype=dtype)
    compare(frt.softmax, torch.softmax, x)
    compare(frt.logsumexp, torch.logsumexp, x)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("columns", [1, 2, 3, 7, 9, 17, 33, 63])
def test_many_short_rows(columns, dtype):
    x = torch.randn(40_000, columns, device="cuda", dtype=dtype)
    for name in ("softmax", "log_softmax", "sum", "amax"):
        compare(*OPS[name], x)
    assert torch.equal(frt.argmax(x, -1), x.argmax(-1))
