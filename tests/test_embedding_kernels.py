"""Kernels of embeddings by themselves: sums by index, what compiles for which GPU, what a warm-up finds."""

import itertools

import pytest
import torch
from checking import BF16, F32, F64, assert_same_bits, lost, needs_nvrtc
from test_embedding import COLUMNS, WORDS, ids, table
from test_embedding_gradients import exact_sums

import fusionrt as frt
from fusionrt.laid import Laid
from fusionrt.ops import embedding_kernels
from fusionrt.ops.embedding_gradients import CHUNK, gradient_kernel, sort_kernel
from fusionrt.ops.embedding_kernels import (
    Form,
    Lookup,
    Norm,
    Rows,
    norm_gradient_on_gpu,
    sum_by_index,
    sum_kernel,
    sum_on_gpu,
    threads_and_packs,
)
from fusionrt.rehearsal import collecting
from fusionrt.runtime import compiler


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
@pytest.mark.parametrize("kind", ["few", "one", "all different", "one among many", "runs", "longer runs"])
def test_sums_by_index(kind, dtype, device):
    """Indices that fill many chunks, one or a part of one, and their ends at the ends of chunks."""
    count = 2500
    index = {
        "few": torch.randint(3, (count,)),
        "one": torch.full((count,), 4),
        "all different": torch.randperm(count),
        "one among many": torch.where(torch.rand(count) < 0.5, 7, torch.randint(count, (count,))),
        "runs": (torch.arange(count) + 5) // CHUNK,
        "longer runs": (torch.arange(count) + 5) // (CHUNK + 1),
    }[kind].to(device)
    for columns in (1, 8, 40, 300):
        grad = torch.randn(count, columns, device=device).to(dtype)
        found = sum_by_index(grad, index, count, 0.5, -1)
        exact = 0.5 * exact_sums(grad, index, count)
        # 2500 terms in float32, rounded to dtype.
        tolerance = {BF16: 2.0**-8, F32: 2.0**-20, F64: 2.0**-45}[dtype]
        size = 0.5 * exact_sums(grad.abs(), index, count)
        assert ((found.double().cpu() - exact).abs() <= tolerance * exact.abs() + lost(size, dtype)).all()
        assert_same_bits(found, sum_by_index(grad, index, count, 0.5, -1))


@needs_nvrtc
@pytest.mark.covering(1)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize(
    ("dtype", "vec", "columns", "norm"),
    [
        ("bfloat16", 8, 4096, False),
        ("bfloat16", 8, 4096, True),
        ("float32", 4, 16384, True),
        ("float64", 1, 77, True),
    ],
)
def test_kernels_compile_without_spills(dtype, vec, columns, norm, arch):
    itemsize = {"bfloat16": 2, "float32": 4, "float64": 8}[dtype]
    threads, packs = threads_and_packs(columns, vec, norm, itemsize)
    full = columns % (vec * packs * threads) == 0
    dtypes, each = ("int64", "int32", "int64"), 1 if norm else 4
    form = Form(
        dtype, dtypes, vec, packs, threads, full, each, (2, 2), not norm, True, norm, (norm, norm), norm
    )
    kernels = [sum_kernel(form), *(gradient_kernel(dtype, "int32", vec, 4 * norm, stage) for stage in (0, 1))]
    shape = threads_and_packs(columns, vec, True, itemsize, True)
    if norm and shape is not None:
        tile = vec * shape[0] * shape[1]
        more = {"threads": shape[0], "packs": shape[1], "full": columns % tile == 0, "gradient": True}
        kernels.append(sum_kernel(form._replace(**more, one_position=True, affine=(True, False))))
    assert_no_spills(kernels, arch)


@needs_nvrtc
@pytest.mark.covering(1)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("columns", [768, 1024])
@pytest.mark.parametrize("common", [0, 1, 2])
def test_norms_of_a_positions_rows_compile_without_spills(common, columns, gradient, arch):
    threads, packs = threads_and_packs(columns, 8, True, 2, gradient)
    assert threads * packs * 8 == columns
    form = Form("bfloat16", ("int64",) * 3, 8, packs, threads, True, 1, (1, 2), True, False, True,
                (True, not gradient), True, gradient, common)
    assert_no_spills([sum_kernel(form)], arch)


@pytest.mark.parametrize("held", [None, 1, 1584, 2640])
@pytest.mark.parametrize("count, period", [
    (1, 1), (77, 77), (4096, 512), (65536, 512), (65537, 65537), (40, 8)])
def test_shares_have_every_row_once(count, period, held):
    table, ids = (Laid(shape, (1,), torch.float32, 0) for shape in ((period, 8), (count,)))
    rows = Rows((table, table, None), (ids, None, None), (None, None), False, held is not None, False, period)
    share = embedding_kernels._best_share(rows, 32, held)
    assert 1 <= share.each <= 32 and share.apart * (share.each - 1) < count <= share.apart * share.each
    assert not share.one_position or share.apart % period == 0


def test_teams_fill_whole_rounds():
    """Of what a GPU holds: 64 Ki rows of 768 columns, of 512 positions."""
    table, ids = Laid((512, 768), (768, 1), torch.bfloat16, 0), Laid((65536,), (1,), torch.int64, 0)
    rows = Rows((table, table, None), (ids, None, None), (None, None), False, True, True, 512)
    for held in (1584, 2640):  # of the gradient, forward
        teams = embedding_kernels._best_share(rows, 32, held).apart
        assert teams / held > 0.95 * -(-teams // held)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_sorting_compiles_without_spills(arch):
    passes = (False, True, False), (True, True, False), (True, False, True)
    assert_no_spills([sort_kernel("int64", 9, *which) for which in passes], arch)


def assert_no_spills(kernels, arch):
    for kernel in kernels:
        made = compiler.build(kernel.text, kernel.stem, arch, kernel.name).metadata
        assert (made["spills"], made["stack"], made["warnings"]) == (0, 0, 0)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_warm_up_finds_its_kernels(kind):
    tokens, weight = ids().to("meta"), table(WORDS).to("meta").requires_grad_()
    with collecting(kind) as needed:
        frt.embedding_position(tokens, weight).backward(torch.empty(4, 11, COLUMNS, device="meta"))
    backward = "embedding_position_backward"
    assert [kernel.name for kernel in needed] == [
        "embedding_position",
        *[backward] * (4 if kind == "cuda" else 1),
    ]


@pytest.mark.parametrize("columns", [40, 768, 1024, 2048, 4096, 6144, 8192, 9001, 20000])
def test_both_passes_agree_on_what_is_rounded(columns, monkeypatch):
    """However tables and the norm's parameters lie, which hooks of saved tensors may change in between."""
    launched, found = [], set()
    monkeypatch.setattr(embedding_kernels, "_run", lambda launch, *_: launched.append(launch.kernel.text))
    monkeypatch.setattr(embedding_kernels, "add_partials", lambda *_: None)
    monkeypatch.setattr(embedding_kernels.indices, "fault_of", lambda _: None)

    def note(result):  # where there is no kernel, rounded rows are what the norm is taken of
        found.add(result is None or "ROUNDED = true" in launched.pop())

    tokens, stats = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 1)
    grad = torch.zeros(8, columns, dtype=BF16)
    lies = [lambda n: torch.zeros(n, columns, dtype=BF16),
            lambda n: torch.zeros(n, columns + 1, dtype=BF16)[:, 1:]]
    for table_of, bias_of in itertools.product(lies, lies):
        norm = Norm(torch.zeros(columns, dtype=BF16), bias_of(1)[0], 1e-5)
        lookup = Lookup("embedding", tokens, table_of(5), table_of(4), None, None, None, 1.0, 4)
        note(sum_on_gpu(lookup, norm))
        note(norm_gradient_on_gpu(lookup, norm, None, grad, stats, stats))
    assert len(found) == 1
