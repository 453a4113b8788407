"""Sums over the rows (weights' gradients) that the CPU's kernel over rows takes along."""

import pytest
import torch
from checking import BF16, F16, F32, F64, assert_same_bits, check_in_norm
from torch.nn import functional as F

import fusionrt as frt
from fusionrt.cpu import rows
from fusionrt.rehearsal import collecting

LEAST = rows.LEAST_SUMMED
dtypes = pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)


def layer_norm(x, w, b):
    return frt.layer_norm(x, w.shape, w, b)


def eagers(x, w, b):
    return F.layer_norm(x, w.shape, w, b)


def kernels(function, *shapes, dtype=F32):
    """Of the gradients: how many, and whether a kernel over rows sums."""
    tensors = [torch.empty(s, dtype=dtype, device="meta", requires_grad=True) for s in shapes]
    y = function(*tensors)
    with collecting("cpu") as needed:
        y.backward(torch.empty_like(y))
    return len(needed), any(p.row_dims and any(p.reduced) for p in needed)


def test_which_sums_go_along():
    assert kernels(layer_norm, (LEAST, 64), 64, 64) == (1, True)
    assert kernels(layer_norm, (4, LEAST, 64), 64, 64, dtype=BF16) == (1, True)
    assert kernels(lambda x, w: frt.rms_norm(x, w), (LEAST, 64), 64) == (1, True)
    # Few rows; an activation, which would be computed twice; what is summed depends on sums of the row.
    assert kernels(layer_norm, (LEAST - 1, 64), 64, 64) == (2, False)
    assert kernels(lambda x, w, b: frt.layer_norm_gelu(x, w.shape, w, b), (LEAST, 64), 64, 64) == (2, False)


@pytest.mark.covering(1)
@pytest.mark.parametrize("columns", [2, 33, 1024, 5001])
@pytest.mark.parametrize("n", [LEAST, LEAST + 3, 1030])
@dtypes
def test_norms(dtype, n, columns):
    x, w, b = torch.randn(n, columns).to(dtype), *(torch.randn(columns).to(dtype) for _ in "wb")
    check_in_norm(layer_norm, (x, w, b), reference=eagers)
    check_in_norm(lambda x, w: frt.rms_norm(x, w.shape, w, 1e-6), (x, w),
                  reference=lambda x, w: F.rms_norm(x, w.shape, w, 1e-6))


@pytest.mark.covering(1)
@dtypes
def test_rows_that_lie_apart_or_in_two_dimensions(dtype):
    w, b = (torch.randn(70).to(dtype) for _ in "wb")
    for x in (torch.randn(2 * LEAST, 70)[::2], torch.randn(LEAST, 90)[:, :70], torch.randn(5, LEAST, 70),
              torch.randn(5, LEAST, 140)[:, ::3, 3:73]):
        check_in_norm(layer_norm, (x.to(dtype), w, b), reference=eagers)


def test_residuals_and_dropped_elements():
    x, r = torch.randn(300, 65), torch.randn(300, 65)
    w, b = torch.randn(65), torch.randn(65)
    check_in_norm(lambda x, r, w, b: sum(frt.add_norm(x, r, w, b)), (x, r, w, b),
                  reference=lambda x, r, w, b: F.layer_norm(x + r, (65,), w, b) + (x + r))
    leaves = [t.clone().requires_grad_() for t in (x, r, w, b)]
    torch.manual_seed(5)
    y = frt.dropout_add_layer_norm(*leaves, p=0.3)
    torch.manual_seed(5)
    dropped = frt.dropout_add(leaves[0], leaves[1], 0.3)
    expected = F.layer_norm(dropped, (65,), *leaves[2:])
    grad = torch.randn_like(y)
    for a, e in zip(torch.autograd.grad(y, leaves, grad), torch.autograd.grad(expected, leaves, grad),
                    strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


def test_any_number_of_threads_gives_the_same_bits():
    x, w, b = torch.randn(2051, 130), torch.randn(130), torch.randn(130)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            leaves = [t.clone().requires_grad_() for t in (x, w, b)]
            y = layer_norm(*leaves)
            found.append(torch.autograd.grad(y, leaves, torch.sin(torch.arange(y.numel())).view(y.shape)))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        for a, b in zip(found[0], others, strict=True):
            assert_same_bits(a, b)
