"""What the tests of our own products share: operands, epilogues, and a comparison with torch's accuracy."""

import torch
from torch.nn import functional as F

from fusionrt.activation import resolve
from fusionrt.ops.product import PRODUCT, RESIDUAL


def applied(activation, residual=False):
    function = resolve("gemm", activation)
    y = PRODUCT if function is None else function(PRODUCT)
    return y + RESIDUAL if residual else y


def operands(m, n, k, dtype, bias=True, residual=False):
    x, weight = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda") / k ** 0.5
    b = torch.randn(n, device="cuda").to(dtype) if bias else None
    r = torch.randn(m, n, device="cuda").to(dtype) if residual else None
    return x.to(dtype), weight.to(dtype), b, r


def distance(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


def poison(m, n, dtype):
    """Memory that the next results are likely to get: what they leave out is seen."""
    left = [torch.full((m, n), float("nan"), dtype=dtype, device="cuda") for _ in range(2)]
    del left


def linear(by, x, weight, bias=None, epilogue=PRODUCT, residual=None, keep=False, **options):
    """`by`: the module whose product it is."""
    planned = by.Planned(x, weight, bias, epilogue, residual, keep, **options)
    return planned(x, weight, bias, residual)


def check(by, m, n, k, dtype, activation="gelu", bias=True, residual=False, keep=False, **options):
    """`by`: the module whose product it is."""
    x, weight, b, r = operands(m, n, k, dtype, bias, residual)
    assert by.supports(x, weight, b, r)
    poison(m, n, dtype)
    out, kept = linear(by, x, weight, b, applied(activation, residual), r, keep, **options)
    torchs = {"gelu": F.gelu, "mish": F.mish, "silu": F.silu, None: lambda z: z}[activation]

    def formula(x, weight, b, r):
        y = torchs(F.linear(x, weight, b))
        return y if r is None else y + r

    double = [t if t is None else t.double() for t in (x, weight, b, r)]
    exact = formula(*double)
    assert distance(out, exact) <= 1.1 * distance(formula(x, weight, b, r), exact)
    assert (kept is not None) == keep
    if keep:
        assert distance(kept, F.linear(*double[:3])) <= torch.finfo(dtype).eps / 2
