"""Operands that begin between the addresses of whole packs: other kernels, the same results and gradients."""

import pytest
import torch
from checking import BF16, F32

from fusionrt.catalogue import COLUMNS, OPS, ROWS

SIZES = {ROWS: 72, COLUMNS: 4096}
ON_A_CPU = {"cpu_fused_attention", "optimized_cpu_attention"}
# torch's kernels read their incoming gradient by 16 bytes unasked.
OF_TORCH = {"attention", "multihead_attention"}


def making(usual):
    """What an example makes its arguments with, of a dtype unless it says another."""
    def make(*shape, dtype=usual, high=100):
        shape = tuple(SIZES.get(n, n) for n in shape)
        if dtype.is_floating_point:
            return (torch.rand(shape, device="cuda") + 0.1).to(dtype).requires_grad_()  # variances, too
        if dtype == torch.bool:
            return torch.rand(shape, device="cuda") < 0.5
        return torch.randint(0, high or 100, shape, device="cuda").to(dtype)

    return make


def moved(a):
    """The same, an element behind where packs begin."""
    room = torch.empty(a.numel() + 1, dtype=a.dtype, device=a.device)
    found = room[1:].view(a.shape).copy_(a.detach())
    return found.requires_grad_(a.requires_grad)


def as_it_is(a):
    return a


def tensors(values):
    several = values if isinstance(values, (tuple, list)) else [values]
    return [v for v in several if isinstance(v, torch.Tensor)]


def results(op, args, seeds_at):
    torch.manual_seed(3)
    outs = tensors(op(*args))
    found, recorded = [o.detach().clone() for o in outs], [o for o in outs if o.requires_grad]
    leaves = [a for a in tensors(args) if a.requires_grad]
    if recorded and leaves:
        torch.manual_seed(4)
        seeds = [seeds_at(torch.randn(o.shape, device=o.device).to(o.dtype)) for o in recorded]
        found += tensors(torch.autograd.grad(recorded, leaves, seeds, allow_unused=True))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("name", sorted({*OPS} - ON_A_CPU))
def test_op(name, dtype):
    args = OPS[name].example(making(dtype))
    expected = results(OPS[name], args, as_it_is)
    first = next(i for i, a in enumerate(args) if isinstance(a, torch.Tensor))
    some = [moved(a) if i == first else a for i, a in enumerate(args)]
    every = [moved(a) if isinstance(a, torch.Tensor) else a for a in args]
    for odd, seeds_at in ((some, as_it_is), (every, as_it_is if name in OF_TORCH else moved)):
        for a, b in zip(results(OPS[name], odd, seeds_at), expected, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            few = 1e-2 if a.dtype in (BF16, torch.int8) else 1e-4
            assert (a.double() - b.double()).norm() <= few * b.double().norm()
