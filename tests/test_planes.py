"""Channels of contiguous images: statistics and elements in one kernel, which reads them once."""

import pytest
import torch
from checking import BF16, F16, F32, assert_same_bits

import fusionrt as frt
from fusionrt.rehearsal import collecting
from fusionrt.runtime import launch, planes

# Planes share packs, or do not.
SHARED = [(16, 16, 7, 7), (5, 24, 5, 9), (64, 64, 14, 14), (128, 128, 7, 7), (3, 8, 21, 21)]
WHOLE = [(3, 5, 8, 8), (64, 128, 28, 28), (64, 70, 56, 56), (8, 64, 29, 8)]


def norm(x, weight, bias, residual=None, running=(None, None)):
    return frt.batch_norm(x, *running, weight, bias, training=True, residual=residual, epilogue=frt.relu)


def problems(shape, dtype=BF16, clusters=True):
    x = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    with collecting(clusters=clusters) as found:
        y = norm(x, *(torch.empty(shape[1], device="meta", requires_grad=True) for _ in range(2)))
        y.backward(torch.empty_like(y))
    return found


def taken(shape, dtype=BF16, clusters=True):
    return [p for p in problems(shape, dtype, clusters)
            if "pointwise_planes" in (s.entry for s in launch.sources(p))]


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("shape", [*SHARED, *WHOLE, (256, 2048, 7, 7), (64, 256, 56, 56)], ids=str)
def test_layouts(shape, dtype):
    """Forward and backward; all packs are kept, and blocks fit on a multiprocessor."""
    found = taken(shape, dtype)
    assert len(found) == 2
    for problem in found:
        made = planes.layout(problem)
        plane = shape[2] * shape[3]
        assert made.lanes * made.width == made.together * plane
        assert made.together == 1 or made.threads % made.lanes == 0
        assert made.packs * made.threads * made.cluster >= shape[0] * made.lanes
        assert made.part < planes.MOST
        assert planes.grid(problem, made) * made.together == shape[1] * made.cluster
        assert planes.blocks(problem, made) * made.part <= planes.SHARED


@pytest.mark.parametrize("shape, dtype, clusters", [
    ((64, 64, 28, 28), BF16, False), ((64, 64, 28, 28), torch.float64, True), ((64, 12, 7, 7), BF16, True),
    ((64, 64, 1, 1), BF16, True), ((64, 64, 2, 2), BF16, True), ((64, 64, 112, 112), F32, True),
    ((64, 3, 64, 64), BF16, True)], ids=str)
def test_what_keeps_its_kernels(shape, dtype, clusters):
    """No clusters, doubles, channels that make no whole packs, packs of many channels, channels that no
    cluster holds, too few of them."""
    assert len(taken(shape, dtype, clusters)) < 2


# --- on a GPU


def images(shape, dtype=F32):
    return torch.randn(shape, device="cuda").mul(2).add(1).to(dtype)


def of_channels(shape):
    return torch.rand(shape[1], device="cuda").add(0.5).requires_grad_()


@pytest.mark.gpu
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("shape", [*SHARED, *WHOLE], ids=str)
def test_against_double(shape, dtype, with_residual, launches):
    x, weight, bias = images(shape, dtype).requires_grad_(), of_channels(shape), of_channels(shape)
    residual = images(shape, dtype) if with_residual else None
    running = torch.zeros(shape[1], device="cuda"), torch.ones(shape[1], device="cuda")
    y = norm(x, weight, bias, residual, running)
    grad = torch.randn_like(y)
    found = [y.detach(), *running, *torch.autograd.grad(y, [x, weight, bias], grad)]
    if dtype != F32 or not with_residual:  # of which no cluster holds the three operands of some
        assert set(launches) <= {"pointwise_planes"}  # plans may be there from another test
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    twice = torch.zeros_like(wide[1]).detach(), torch.ones_like(wide[1]).detach()
    expected = torch.nn.functional.batch_norm(wide[0], *twice, *wide[1:], training=True)
    expected = expected if residual is None else expected + residual.double()
    # Where rounding decides what relu lets pass, one element's gradient is another.
    expected = torch.where(y.detach() > 0, expected, 0)
    gradients = torch.autograd.grad(expected, wide, grad.double())
    few = {BF16: 4e-3, F16: 5e-4, F32: 2e-6}[dtype]
    for a, b in zip(found, [expected.detach(), *twice, *gradients], strict=True):
        assert (a.double() - b).norm() <= few * b.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHARED[3], WHOLE[2]], ids=str)
def test_every_call_gives_the_same_bits(shape):
    x, weight, bias = images(shape, BF16).requires_grad_(), of_channels(shape), of_channels(shape)
    grad = images(shape, BF16)

    def results():
        y = norm(x, weight, bias)
        return y.detach(), *torch.autograd.grad(y, [x, weight, bias], grad)

    first = results()
    for _ in range(5):
        for a, b in zip(results(), first, strict=True):
            assert_same_bits(a, b)


@pytest.mark.gpu
def test_far_from_zero_and_not_finite():
    x = images((16, 16, 7, 7)).add(1e4).requires_grad_()
    weight, bias = of_channels(x.shape), of_channels(x.shape)
    x.data[3, 5, 2, 2], x.data[1, 9, 0, 0] = torch.nan, torch.inf
    y, expected = norm(x, weight, bias), torch.nn.functional.batch_norm(
        x.double(), None, None, weight.double(), bias.double(), training=True).relu()
    assert torch.equal(y.isnan(), expected.isnan())
    assert y[:, 5].isnan().all() and y[:, 9].isnan().all()
    good = ~expected.isnan()
    assert (y[good] - expected[good]).abs().max() <= 2e-3  # x's own rounding, 2^-11, over its deviation
