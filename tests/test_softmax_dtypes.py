"""Softmax of operands that are taken as of another dtype."""

import pytest
import torch
from checking import BF16, F16, F32, F64, assert_as_accurate, dtypes
from torch.testing import assert_close

import fusionrt as frt
from fusionrt.rehearsal import collecting

BOTH = pytest.mark.parametrize("op", [frt.softmax, frt.log_softmax], ids=lambda op: op.__name__)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dim", [0, 1])
@dtypes
@pytest.mark.parametrize("of", [F16, BF16, F32, F64, torch.int64], ids=str)
@BOTH
def test_taken_as_of_a_dtype(op, of, dtype, dim, device):
    """As accurate as of a copy of that dtype; the gradient has x's."""
    x = torch.randn(6, 70, dtype=F64).to(device, of).requires_grad_(of.is_floating_point)
    found = op(x, dim, dtype)
    wide = x.detach().to(dtype).double().requires_grad_()
    exact = op.reference(wide, dim)
    assert_as_accurate(found, op.reference(x, dim, dtype), exact)
    if of.is_floating_point:
        grad = torch.randn_like(found)
        ours, = torch.autograd.grad(found, x, grad)
        expected, = torch.autograd.grad(exact, wide, grad.double())
        assert ours.dtype == of
        eps = max(torch.finfo(t).eps for t in (of, dtype))
        assert_close(ours.double(), expected, rtol=4 * eps, atol=8 * eps)


@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=str)
def test_a_dtype_takes_no_copy(dtype):
    """One kernel each way, of which the second reads the result alone."""
    x = torch.empty(512, 4096, device="meta", dtype=BF16, requires_grad=True)
    with collecting() as forward:
        y = frt.softmax(x, -1, dtype)
    with collecting() as backward:
        torch.autograd.grad(y, x, torch.empty_like(y))
    dtypes = [[o.dtype for o in operands] for p in (*forward, *backward)
              for operands in (p.inputs, p.outputs)]
    name = str(dtype).removeprefix("torch.")
    assert dtypes == [["bfloat16"], [name], [name, name], ["bfloat16"]]
    assert {p.acc for p in (*forward, *backward)} == {"float64" if dtype == F64 else "float32"}


def test_a_dtype_beside_other_options(device):
    x = torch.randn(3, 8, 8, device=device).to(BF16)
    mask = (torch.rand(8, 8, device=device) > 0.5) | torch.eye(8, dtype=torch.bool, device=device)
    for options in ({"scale": 0.5, "mask": mask}, {"causal": True}, {"epilogue": frt.relu}):
        for _ in range(3):  # what is asked for again is not what another dtype gave
            for dtype in (None, F32, F16, F64):
                found = frt.softmax(x, -1, dtype, **options)
                assert_close(found, frt.softmax(x.to(dtype or BF16), **options))
    assert frt.softmax(torch.tensor(3.0), 0, F16).dtype == F16
    compiled = torch.compile(lambda x: frt.softmax(x, dtype=F32), backend="aot_eager", fullgraph=True)
    assert_close(compiled(x), frt.softmax(x.float()))
