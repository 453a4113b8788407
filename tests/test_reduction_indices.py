"""Indices of the largest and smallest: the first one, special values, what is read, what a tracer saw."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fusionrt as frt
from fusionrt.ops import reduction
from fusionrt.rehearsal import collecting
from fusionrt.runtime import launch


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("dim", [None, 0, 1, -1])
@pytest.mark.parametrize("keepdim", [False, True])
def test_indices_of_the_first(name, dim, keepdim, device):
    x = torch.randint(-3, 4, (9, 40, 3), device=device).to(torch.bfloat16)
    x[2, 7, 1] = math.nan
    op = getattr(frt, name)
    for values in (x, x.transpose(0, 1)):
        found = op(values, dim, keepdim)
        assert found.dtype == torch.int64
        assert torch.equal(found, op.reference(values, dim, keepdim))


EXTREMES = {
    "ties": lambda x: x,
    "both zeros": lambda x: torch.where(x.abs() < 2, x * 0, x.abs().neg()),
    "NaN": lambda x: torch.where(x > 2, math.nan, x),
    "infinities": lambda x: torch.where(x > 1, math.inf, torch.where(x < -1, -math.inf, x)),
    "-inf alone": lambda x: torch.full_like(x, -math.inf),
    "NaN alone": lambda x: torch.full_like(x, math.nan),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("special", EXTREMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "shape, dim", [((3, 70_001), 1), ((2000, 24), 0), ((5, 257, 33), 1), ((140_000,), None)]
)
def test_indices_of_special_values(shape, dim, dtype, special, device):
    x = EXTREMES[special](torch.randint(-3, 4, shape, device=device).to(dtype))
    for op in (frt.argmax, frt.argmin):
        assert torch.equal(op(x, dim), op.reference(x, dim))


def test_indices_far_apart(device):
    """The first of equal ones in every lane and pack of a row, and of a column."""
    for columns in (256, 1000, 4096, 50_000):
        x = torch.zeros(64, columns, device=device)
        at = torch.randint(columns, (64,), device=device)
        x[torch.arange(64), at] = 1
        x[:, -1] = 1
        assert torch.equal(frt.argmax(x, -1), at)
        assert torch.equal(frt.argmax(x.t().contiguous(), 0), at)


@pytest.mark.gpu
def test_indices_in_parts(monkeypatch):
    """Rows of which a kernel holds no positions."""
    monkeypatch.setattr(reduction, "LONGEST", 100)
    x = torch.randint(-5, 6, (7, 1030), device="cuda").float()
    x[3, [150, 900]] = math.nan
    for op in (frt.argmax, frt.argmin):
        for keepdim in (False, True):
            for dim in (None, 0, 1):
                assert torch.equal(op(x, dim, keepdim), op.reference(x, dim, keepdim))


def test_indices_beyond_2_31_on_a_cpu(monkeypatch):
    far = 1 << 31  # of a row that long only the last elements
    monkeypatch.setattr(reduction, "_indices", lambda n, _: torch.arange(n, dtype=torch.float64) + far - 4)
    x = torch.zeros(2, 10)
    x[0, 7] = x[1, 2] = 1
    assert (frt.argmax(x, 1) - far + 4).tolist() == [7, 2] == (frt.argmin(-x, 1) - far + 4).tolist()


def test_what_an_index_reads():
    """Nothing but x; and what is reduced within a block is one kernel."""
    for shape, dim in (((64, 4096), 1), ((4096, 64), 0), ((64, 256, 256), 1), ((1 << 20,), None)):
        with collecting("cuda") as problems:
            frt.argmax(torch.empty(shape, device="meta"), dim)
        assert [[o.name for o in p.inputs] for p in problems] == [["a0"]]
    with collecting("cuda") as problems:
        for op in (frt.sum, frt.var, frt.argmax):
            op(torch.empty(4096, 256, 256, device="meta"), 1)
    assert [[s.entry for s in launch.sources(p)] for p in problems] == [["pointwise_reduce"]] * 3


@pytest.mark.parametrize("op", ["argmax", "argmin"])
def test_positions_that_a_tracer_saw(op, device):
    """What it made of them is no other call's."""
    of = getattr(frt, op)

    def fake(x):
        with FakeTensorMode() as mode:
            of(mode.from_tensor(x), -1)

    for n, watch in enumerate((
            fake, lambda x: torch.func.grad(lambda x: (x * of(x, -1, keepdim=True)).sum())(x),
            lambda x: torch.inference_mode()(of)(x, -1))):
        x = torch.randn(4, 1041 + n, device=device)
        watch(x)
        assert torch.equal(of(x, -1), getattr(x, op)(-1))
