"""Reductions of few rows that lie across memory, whose columns a thread has alone."""

import pytest
import torch
from checking import BF16, F16, F32, check, lost, needs_nvrtc

import fusionrt as frt
from fusionrt.rehearsal import collecting
from fusionrt.runtime import compiler, launch, reduction_cut, vectors
from fusionrt.runtime.parts import split

SHAPES = {"heads": ((4, 512, 16, 64), 2), "batch": ((16, 256, 1024), 0), "height": ((16, 64, 33, 64), 2)}
OPS = {name: getattr(torch, name) for name in ("sum", "mean", "amax", "var", "logsumexp")}
dtypes = pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)


def parts(shape, dim, dtype, op="sum"):
    with collecting() as needed:
        getattr(frt, op)(torch.empty(shape, device="meta", dtype=dtype), dim)
    return [(part.problem, part.rows) for p in needed for part in split(p)]


@pytest.mark.parametrize(("shape", "dim", "expected"), [
    ((16, 2048, 16, 64), 2, True), ((16, 2048, 1024), 0, True),
    ((16, 2048, 128, 64), 2, False),   # more rows than a thread should walk down by itself
    ((2, 64, 16, 64), 2, False),       # too few threads
])
def test_who_has_its_columns_alone(shape, dim, expected):
    (problem, rows), = parts(shape, dim, BF16)
    assert reduction_cut.is_alone(problem, rows, vectors.vector_width(problem, 16)) == expected


@needs_nvrtc
@pytest.mark.covering(1)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("op", OPS)
@dtypes
def test_no_kernel_spills(dtype, op, arch):
    (problem, _), = parts((16, 2048, 16, 64), 2, dtype, op)
    for source in launch.sources(problem):
        made = compiler.build(source.text, source.entry, compiler.target(source.entry, arch), "columns")
        assert not made.metadata["spills"]


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", OPS)
def test_results(op, shape, dtype):
    sizes, dim = SHAPES[shape]
    x = torch.randn(sizes, device="cuda", dtype=dtype)
    magnitude = {"sum": x.double().abs().sum(dim), "mean": x.double().abs().mean(dim)}.get(op)
    check(lambda x: getattr(frt, op)(x, dim), (x,), reference=lambda x: OPS[op](x, dim),
          extra=0.0 if magnitude is None else lost(magnitude, dtype))


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("shape", SHAPES)
def test_first_maxima(shape, dtype):
    sizes, dim = SHAPES[shape]
    x = torch.randint(0, 5, sizes, device="cuda").to(dtype)  # many are equal
    assert torch.equal(frt.argmax(x, dim), x.argmax(dim))
