"""Group norm's own kernels: groups whose rows are long, that packs do not fit, of which nothing is whole."""

import pytest
import torch
from checking import BF16, F16, F32, make
from test_batch_norm import images
from torch.nn import functional as F

import fusionrt as frt
from fusionrt.rehearsal import collecting
from fusionrt.runtime import row_choice, row_operands


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("shape, groups, channels_last", [
    ((3, 64, 7, 7), 8, False), ((2, 24, 5, 3), 3, False),       # packs that reach over a channel's end
    ((3, 64, 9, 7), 32, True), ((2, 24, 5, 3), 12, True), ((2, 40, 33, 1), 20, True)], ids=str)
def test_groups_that_packs_do_not_fit(shape, groups, channels_last, dtype):
    """Channels of a group that are fewer than a pack holds, or smaller."""
    of_channel = [make((shape[1],), dtype, "cuda") for _ in range(2)]
    tensors = [images(shape, channels_last, dtype, "cuda"), *of_channel]
    grad = torch.randn_like(tensors[0])

    def both_ways(function, dtype=dtype):
        x, weight, bias = (t.detach().to(dtype).requires_grad_() for t in tensors)
        y = function(x, groups, weight, bias)
        return [y.detach(), *torch.autograd.grad(y, [x, weight, bias], grad.to(dtype))]

    few = {BF16: 5e-3, F16: 6e-4, F32: 1e-6}[dtype]
    for a, b in zip(both_ways(frt.group_norm), both_ways(F.group_norm, torch.float64), strict=True):
        assert (a.double() - b).norm() <= few * b.norm()


LONG_GROUPS = [((3, 8, 112, 112), 4), ((3, 24, 56, 56), 3), ((5, 32, 28, 28), 2), ((2, 18, 60, 68), 2),
               ((4, 24, 14, 14), 2), ((7, 6, 64, 64), 1), ((1, 12, 40, 40), 2), ((2, 256, 8, 8), 4)]


def begins_at(x, place):
    """The same at an address that is `place` elements behind one that packs can be read from."""
    room = torch.empty(x.numel() + 16, dtype=x.dtype, device=x.device)
    return room[place:place + x.numel()].view_as(x).copy_(x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16, F32, torch.float64], ids=str)
@pytest.mark.parametrize("shape, groups", LONG_GROUPS, ids=str)
@pytest.mark.parametrize("place", [0, 1, 4])  # elements behind where packs begin
def test_groups_of_long_rows(place, shape, groups, dtype):
    """Rows that wait in shared memory, or in registers, while the weights of their channels are read anew."""
    tensors = [make(s, dtype, "cuda") for s in (shape, (shape[1],), (shape[1],), shape)]
    tensors[0] = begins_at(tensors[0], place)
    grad = torch.randn_like(tensors[3])

    def both_ways(function, dtype=dtype):
        x, weight, bias, residual = (t.detach().to(dtype).requires_grad_() for t in tensors)
        y = function(x, weight, bias, residual)
        return [y.detach(), *torch.autograd.grad(y, [x, weight, bias, residual], grad.to(dtype))]

    found = both_ways(lambda x, w, b, r: frt.group_norm(x, groups, w, b, residual=r, epilogue=frt.silu))
    expected = both_ways(lambda x, w, b, r: F.silu(F.group_norm(x, groups, w, b) + r), torch.float64)
    few = {BF16: 5e-3, F16: 6e-4, F32: 1e-6, torch.float64: 1e-14}[dtype]
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() <= few * b.norm()
        assert (a.double() - b).abs().max() <= 20 * few * b.abs().max()


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_where_rows_of_groups_wait(dtype):
    x = torch.empty(64, 64, 112, 112, device="meta", dtype=dtype, requires_grad=True)
    of_channel = [torch.empty(64, device="meta", dtype=dtype, requires_grad=True) for _ in range(2)]
    with collecting() as needed:
        y = frt.group_norm(x, 32, *of_channel, epilogue=frt.silu)
        torch.autograd.grad(y, [x, *of_channel], torch.empty_like(y))
    assert [row_choice.layout(p, 16, True).kind for p in needed] == ["staged", "staged"]
    assert [len(row_operands.held(p)) for p in needed] == [1, 2]
    assert row_operands.segments(needed[1]) == row_operands.Segments(each=2, kept=64, repeats=64)


@pytest.mark.parametrize("shape", [(8, 32, 1, 1), (8, 1, 16, 16)], ids=str)
def test_groups_of_which_nothing_is_a_whole_row(shape, device):
    """x repeats within a row, and so does the gradient that a sum hands back."""
    x, weight, bias = (make(s, F32, device) for s in (shape, (32,), (32,)))

    def both_ways(function, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, weight, bias)]
        y = function(leaves[0].expand(8, 32, 16, 16), 4, *leaves[1:])
        return [y.detach(), *torch.autograd.grad(y.sum(), leaves)]

    found, expected = both_ways(frt.group_norm, F32), both_ways(F.group_norm, torch.float64)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("shape", [(8, 32, 1, 1), (8, 1, 16, 16), (1, 1, 1, 1)], ids=str)
def test_kernels_of_groups_of_which_nothing_is_a_whole_row(shape):
    x = torch.empty(shape, device="meta").expand(8, 32, 16, 16).requires_grad_()
    of_channel = [torch.empty(32, device="meta", requires_grad=True) for _ in range(2)]
    with collecting() as needed:
        frt.group_norm(x, 4, *of_channel).sum().backward()
    assert [p.reduced for p in needed if any(p.reduced)] == [(True, True)]


@pytest.mark.parametrize("size, along", [(16, True), (8, True), (4, False)])
def test_sums_over_short_segments_have_a_kernel_of_their_own(size, along):
    x = torch.empty(8, 256, size, size, device="meta", dtype=BF16, requires_grad=True)
    of_channel = [torch.empty(256, device="meta", dtype=BF16, requires_grad=True) for _ in range(2)]
    with collecting() as needed:
        y = frt.group_norm(x, 8, *of_channel)
        torch.autograd.grad(y, [x, *of_channel], torch.empty_like(y))
    assert [bool(p.row_dims) for p in needed] == [True] * 2 + [False] * (not along)
