"""Half a gigabyte of rows, of which kernels have layouts that no smaller test meets, against float64."""

import pytest
import torch
from checking import BF16, F32
from torch.nn import functional as F

import fusionrt as frt

BYTES, PART = 1 << 29, 1 << 24  # of the operand; elements that are looked at together
# Ours and torch's, of x, a residual, a weight and a bias.
OPS = {
    "layer_norm": (lambda x, r, w, b: frt.layer_norm(x, w.shape, w, b),
                   lambda x, r, w, b: F.layer_norm(x, w.shape, w, b)),
    "rms_norm": (lambda x, r, w, b: frt.rms_norm(x, w.shape, w, 1e-6),
                 lambda x, r, w, b: F.rms_norm(x, w.shape, w, 1e-6)),
    "add_norm": (lambda x, r, w, b: frt.add_norm(x, r, w, b)[0],
                 lambda x, r, w, b: F.layer_norm(x + r, w.shape, w, b)),
    "layer_norm_gelu": (lambda x, r, w, b: frt.layer_norm_gelu(x, w.shape, w, b),
                        lambda x, r, w, b: F.gelu(F.layer_norm(x, w.shape, w, b))),
    "softmax": (lambda x, r, w, b: frt.softmax(x, -1), lambda x, r, w, b: torch.softmax(x, -1)),
    "log_softmax": (lambda x, r, w, b: frt.log_softmax(x, -1), lambda x, r, w, b: torch.log_softmax(x, -1)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1 << k for k in range(13, 19)])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_results_and_gradients(op, dtype, columns):
    ours, torchs = OPS[op]
    rows = BYTES // (columns * dtype.itemsize)
    args = [torch.randn(*shape, dtype=dtype, device="cuda", requires_grad=True)
            for shape in ((rows, columns), (rows, columns), (columns,), (columns,))]
    incoming = torch.randn(rows, columns, dtype=dtype, device="cuda")
    found, theirs = (evaluated(function, args, incoming) for function in (ours, torchs))
    sums = [torch.zeros(columns, dtype=torch.float64, device="cuda") for _ in args[2:]]
    for part in torch.arange(rows, device="cuda").split(max(1, PART // columns)):
        here = slice(int(part[0]), int(part[-1]) + 1)
        wide = [a.detach()[here if a.dim() > 1 else slice(None)].double().requires_grad_() for a in args]
        exact = evaluated(torchs, wide, incoming[here].double())
        for a, b, true in zip(found[:3], theirs[:3], exact[:3], strict=True):
            if true is not None:
                assert_close_as_torchs(a[here], b[here], true)
        for total, true in zip(sums, exact[3:], strict=True):
            if true is not None:
                total += true
    for a, b, true in zip(found[3:], theirs[3:], sums, strict=True):
        if b is not None:
            assert_close_as_torchs(a, b, true)


def evaluated(function, args, incoming):
    """The result and the gradients of all arguments, None of those that have no part in it."""
    out = function(*args)
    return [out.detach(), *torch.autograd.grad(out, args, incoming, allow_unused=True)]


def assert_close_as_torchs(ours, torchs, exact):
    """At most twice torch's worst error, and two ulp of the largest number."""
    error, allowed = ((t.double() - exact).abs().max() for t in (ours, torchs))
    assert error <= 2 * allowed + 2 * exact.abs().max() * torch.finfo(ours.dtype).eps
