"""Reductions taken as of another dtype, and those of integers and truth values."""

import math

import numpy as np
import pytest
import torch
from checking import BF16, DTYPES, F32, make

import fusionrt as frt
from fusionrt.rehearsal import collecting

OF_A_DTYPE = {
    "sum": lambda op, x, dim, dtype: op(x, dim, dtype=dtype),
    "mean": lambda op, x, dim, dtype: op(x, dim, dtype=dtype),
    "norm": lambda op, x, dim, dtype: op(x, 2, dim, dtype=dtype),
    "norm of powers": lambda op, x, dim, dtype: op(x, 3, dim, dtype=dtype),
    "norm of maxima": lambda op, x, dim, dtype: op(x, math.inf, dim, dtype=dtype),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("of", [*DTYPES, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("name", OF_A_DTYPE)
def test_taken_as_of_a_dtype(name, of, dtype, dim, device):
    """As accurate as of a copy of that dtype; the gradient has x's."""
    x = make((9, 300), torch.float64, device).to(of).requires_grad_(of.is_floating_point)
    op, call = getattr(frt, name.split()[0]), OF_A_DTYPE[name]
    found, exact = call(op, x, dim, dtype), call(op.reference, x.detach().to(dtype).double(), dim, None)
    assert found.dtype == dtype
    eps = torch.finfo(dtype).eps
    atol = 1000 * min(eps, torch.finfo(F32).eps)  # of the sums of signed numbers
    torch.testing.assert_close(found.double(), exact, rtol=8 * eps, atol=atol)
    if of.is_floating_point:
        wide = x.detach().to(dtype).double().requires_grad_()
        grad = torch.randn_like(found)
        ours, = torch.autograd.grad(found, x, grad)
        exact, = torch.autograd.grad(call(op.reference, wide, dim, None), wide, grad.double())
        assert ours.dtype == of
        eps = max(eps, torch.finfo(of).eps)
        torch.testing.assert_close(ours.double(), exact, rtol=4 * eps, atol=4 * eps)


def test_a_dtype_takes_no_copy():
    for name, call in OF_A_DTYPE.items():
        for dtype in (torch.float32, torch.float64, torch.float16):
            x = torch.empty(512, 1024, device="meta", dtype=BF16)
            with collecting("cuda") as problems:
                call(getattr(frt, name.split()[0]), x, 1, dtype)
            (problem,) = problems
            assert [o.dtype for o in problem.inputs] == ["bfloat16"]
            assert problem.acc == ("float64" if dtype == torch.float64 else "float32")


INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("name", ["sum", "amax", "amin", "argmax", "argmin"])
def test_integers_and_truth_values(name, dtype, device):
    op, x = getattr(frt, name), torch.randint(-100, 100, (7, 33), device=device).to(dtype)
    for values in (x, x.t(), x[:, ::2], x[0], x[0, 0]):
        for dim in (None, 0, -1):
            for keepdim in (False, True):
                # Of truth values torch finds no position.
                found, exact = op(values, dim, keepdim), values.int() if "arg" in name else values
                expected = op.reference(exact, dim, keepdim) if dim is not None or name != "sum" else (
                    exact.sum() if not keepdim else exact.sum(tuple(range(exact.dim())), True))
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected)
    if device == "cpu":
        array = x.numpy()
        found = op(array, 0)
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, op(x, 0))


def test_sums_of_integers(device):
    x = torch.tensor([[2**60, 3], [5, -7]], device=device)
    assert frt.sum(x, 0).tolist() == [2**60 + 5, -4]  # float32 has no such numbers
    assert frt.sum(x[:, 1], dtype=torch.int32).dtype == torch.int32
    assert frt.sum(x, dtype=torch.float64).dtype == torch.float64
    assert frt.sum(x[:0], 0).tolist() == [0, 0]
    assert frt.sum(x > 4).item() == 2
    with pytest.raises(IndexError, match="amax: a dimension that is reduced must not be empty"):
        frt.amax(x[:0], 0)
    compiled = torch.compile(lambda x: frt.sum(x > 4) + frt.argmax(x), backend="aot_eager", fullgraph=True)
    assert compiled(x) == 2


@pytest.mark.parametrize("name", ["mean", "var", "std", "norm", "logsumexp", "row_reduce", "sum_squared"])
def test_no_means_of_integers(name):
    for x in (torch.ones(3, 4, dtype=torch.int64), torch.ones(3, 4, dtype=torch.bool)):
        text = f"{name}: x must be a floating-point tensor, got one of {x.dtype}"
        with pytest.raises(TypeError, match=text):
            getattr(frt, name)(x)
