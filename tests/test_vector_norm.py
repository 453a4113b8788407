"""Norms of any power."""

import math

import pytest
import torch
from checking import needs_nvrtc

import fusionrt as frt
from fusionrt.rehearsal import collecting
from fusionrt.runtime import compiler, launch

POWERS = (0, 0.5, 1.5, 3, 7.25, -1, -2.5, -math.inf)


@pytest.mark.covering(1)
@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("dim", [None, 0, -1])
def test_norms_of_any_power(p, dim, device):
    """With zeros, rows of them, and what is neither."""
    x = torch.randn(6, 5, dtype=torch.float64, device=device)
    x[1], x[2, 3], x[3, 1] = 0, 0, -0.0
    for values in (x, x.float(), x.bfloat16()):
        exact = torch.linalg.vector_norm(values.double(), p, dim)
        found = frt.norm(values, p, dim)
        assert found.dtype == values.dtype
        rtol = 16 * torch.finfo(values.dtype).eps
        torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=0, equal_nan=True)
        torch.testing.assert_close(frt.norm(values, p, dim, True).flatten(), found.flatten(), equal_nan=True)
    if p != 0:  # which has no derivative in torch
        x.requires_grad_()
        grads = [torch.autograd.grad(f(x, p, dim).sin().sum(), x)[0] for f in (frt.norm, frt.norm.reference)]
        torch.testing.assert_close(*grads, equal_nan=True)


@pytest.mark.parametrize("p", POWERS)
def test_gradients_of_norms_of_any_power(p, device):
    x = (torch.rand(3, 4, dtype=torch.float64, device=device) + 0.5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: frt.norm(x, p, -1), x)
    assert torch.autograd.gradgradcheck(lambda x: frt.norm(x, p, -1), x)
    zeros = torch.zeros(2, 3, device=device, requires_grad=True)
    first, = torch.autograd.grad(frt.norm(zeros, p, 0).sum(), zeros, create_graph=True)
    assert not first.any()
    if first.requires_grad:
        assert not torch.autograd.grad(first.sum(), zeros)[0].any()


@needs_nvrtc
@pytest.mark.parametrize("p", POWERS)
def test_second_derivatives_of_norms_compile(p):
    """Whose choices are between truths of a row."""
    x = torch.empty(4, 8, device="meta", requires_grad=True)
    with collecting("cuda") as problems:
        first, = torch.autograd.grad(frt.norm(x, p, -1).sum(), x, create_graph=True)
        if first.requires_grad:
            first.sum().backward()
    for problem in problems:
        for source in launch.sources(problem):
            assert compiler.build(source.text, source.entry, "sm_90", problem.name)


@pytest.mark.parametrize("p", [0.5, 3, -1, -math.inf, math.inf])
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_norms_of_special_values(p, special, device):
    x = torch.tensor([[special, 1.0, 2.0], [0.0, special, 1.0]], device=device)
    torch.testing.assert_close(frt.norm(x, p, -1), torch.linalg.vector_norm(x, p, -1), equal_nan=True)


def test_powers_of_norms_share_a_kernel():
    with collecting("cuda") as problems:
        for p in (1.5, 3, 4.25):
            frt.norm(torch.empty(4, 8, device="meta"), p, -1)
    assert len({(p.roots, p.scalars) for p in problems}) == 1
    for p, of_nothing in ((3, 0.0), (-1, None), (-math.inf, None), (0, 0.0)):
        x = torch.empty(3, 0)
        if of_nothing is None:
            with pytest.raises(IndexError, match="norm: a dimension that is reduced must not be empty"):
                frt.norm(x, p, 1)
        else:
            assert frt.norm(x, p, 1).tolist() == [of_nothing] * 3
