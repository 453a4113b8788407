"""Norms with a residual: the sum and the statistics as results, and the gradients that come by them."""

import pytest
import torch
from checking import BF16, F32, assert_same_bits
from test_norm import EPS, doubles, spelled
from torch.testing import assert_close

import fusionrt as frt
from fusionrt import reference


def test_sum_and_statistics(device):
    x, r = (torch.randn(6, 5, 100, device=device).bfloat16() for _ in range(2))
    w = torch.randn(100, device=device)
    y, total, mean, rstd = frt.layer_norm(x, 100, w, residual=r, return_sum=True, return_stats=True)
    assert torch.equal(total, x + r)
    exact = total.double()  # rounded: a gradient that reads it needs its statistics
    assert (mean.dtype, mean.shape, rstd.shape) == (F32, (6, 5, 1), (6, 5, 1))
    assert_close(mean, exact.mean(-1, keepdim=True).float(), atol=1e-7, rtol=1e-6)
    assert_close(rstd, (exact.var(-1, correction=0, keepdim=True) + EPS).rsqrt().float(), atol=0, rtol=1e-6)
    assert_close(y.double(), spelled.layer_norm(exact, (100,), w.double()), atol=1e-3, rtol=2**-8)
    y, total, rstd = frt.rms_norm(x, 100, w, EPS, residual=r, return_sum=True, return_stats=True)
    assert_close(rstd, (exact.square().mean(-1, keepdim=True) + EPS).rsqrt().float(), atol=0, rtol=1e-6)
    assert torch.equal(total, x + r)
    assert len(frt.rms_norm(x, 100, return_stats=True)) == 2
    assert torch.equal(frt.add_norm(x, r)[1], total)


def test_results_are_the_same_with_a_gradient_and_without():
    x, r, w = torch.randn(6, 100, requires_grad=True), torch.randn(6, 100), torch.randn(100)
    total, statistics = {"return_sum": True}, {"return_stats": True}
    for options in ({}, total, statistics, total | statistics):
        recorded = frt.layer_norm(x, 100, w, residual=r, **options)
        plain = frt.layer_norm(x.detach(), 100, w, residual=r, **options)
        assert isinstance(recorded, tuple) == bool(options)
        for a, b in zip(recorded, plain, strict=True):
            assert_same_bits(a, b)


ROWS_OF_FIVE = (3, 5), (5,), (5,), (3, 5)
EVERYTHING = {
    "layer_norm": lambda x, w, b, r: frt.layer_norm(
        x, 5, w, b, residual=r, epilogue=frt.gelu, return_sum=True, return_stats=True),
    "statistics alone": lambda x, w, b, r: frt.layer_norm(x, 5, residual=r, return_stats=True)[1:],
    "sum and mean": lambda x, w, b, r: frt.layer_norm(
        x, 5, w, b, residual=r, return_sum=True, return_stats=True)[1:3],
    "rms_norm": lambda x, w, b, r: frt.rms_norm(
        x, 5, w, 1e-6, residual=r, weight_offset=1, epilogue=frt.silu, return_sum=True, return_stats=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYTHING)
def test_gradients_of_every_result(name):
    args = doubles(*ROWS_OF_FIVE)
    assert torch.autograd.gradcheck(EVERYTHING[name], args)
    assert torch.autograd.gradgradcheck(EVERYTHING[name], args)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 2), (1, 3)], ids=str)
def test_some_gradients(wanted, device):
    args = [torch.randn(s, device=device) for s in ((4, 6), (4, 6), (6,), (6,))]
    for k in wanted:
        args[k].requires_grad_()
    mine = [args[k] for k in wanted]
    for pick in (lambda out: out[0].square().sum(), lambda out: (out[0] * 2 + out[1]).square().sum()):
        found = torch.autograd.grad(pick(frt.add_norm(*args)), mine)
        for a, b in zip(found, torch.autograd.grad(pick(reference.add_norm(*args)), mine), strict=True):
            assert_close(a, b, atol=2e-5, rtol=1e-5)


def test_the_sum_is_kept_for_the_backward_pass_and_watched(device):
    x, r, w = (torch.randn(s, device=device, requires_grad=True) for s in ((4, 6), (4, 6), (6,)))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        _, total = frt.add_norm(x, r, w)
    assert total.data_ptr() in kept
    assert not {x.data_ptr(), r.data_ptr()} & set(kept)
    y, total = frt.add_norm(x, r, w)
    with torch.no_grad():
        total.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.covering(1)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("columns", [1, 256])
@pytest.mark.parametrize("rows", ["level", "far from 0"])
def test_gradients_go_with_the_statistics_of_the_rounded_sum(op, columns, rows, device):
    """It is what is normalised, as torch does: the exact sum's are of other rows. (The kernel of the sum by
    itself adds in an order of its own, on which the processor's vectors decide.)"""
    x, r = {"level": (torch.full((4, columns), 3.0), torch.full((4, columns), 0.1234)),
            "far from 0": (torch.randn(4, columns) + 100, torch.randn(4, columns))}[rows]
    x, r = (t.to(device, BF16).requires_grad_() for t in (x, r))
    g, gs = (torch.randn(4, columns, device=device).bfloat16() + 1 for _ in range(2))
    outputs = getattr(frt, op)(x, columns, residual=r, return_sum=True, return_stats=True)
    found = torch.autograd.grad(outputs[:2], (x, r), (g, gs), retain_graph=True)
    total = (x + r).detach().double().requires_grad_()
    expected, = torch.autograd.grad(getattr(spelled, op)(total, (columns,), eps={
        "layer_norm": EPS, "rms_norm": torch.finfo(F32).eps}[op]), total, g.double())
    for grad in found:
        assert_close(grad.double(), expected + gs.double(), atol=2e-2, rtol=2**-7)
    again = getattr(frt, op)(outputs[1], columns, return_stats=True)
    for own, other in zip((outputs[0], *outputs[2:]), again, strict=True):
        ulp = torch.finfo(own.dtype).eps
        assert_close(own, other, atol=ulp, rtol=2 * ulp)


def test_nothing_saved_is_overwritten(device):
    shapes = (40, 60), (40, 60), (60,), (60,)
    x, r, w, b = (torch.randn(s, device=device, requires_grad=True) for s in shapes)
    y, total, mean, rstd = frt.layer_norm(x, 60, w, b, residual=r, epilogue=frt.relu, return_sum=True,
                                          return_stats=True)
    before = [t.clone() for t in (x, r, w, b, y, total, mean, rstd)]
    torch.autograd.grad(y.sum() + total.sum(), (x, r, w, b))
    for a, saved in zip((x, r, w, b, y, total, mean, rstd), before, strict=True):
        assert_same_bits(a, saved)
