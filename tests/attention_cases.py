"""Attention's operands, and how its results are compared."""

import math

import torch
from checking import F32, F64, assert_as_accurate, wide
from torch.nn import functional as F

import fusionrt as frt

INF = math.inf
DIM = 32


def heads(*lengths, n=4, batch=2, dim=DIM, dtype=F32, device="cpu"):
    """(batch, n, length, dim) for each length."""
    return [torch.randn(batch, n, length, dim, dtype=F64).to(device, dtype) for length in lengths]


def evaluated(function, args, grad_output, **options):
    args = [a.detach().requires_grad_() if a.is_floating_point() else a for a in args]
    leaves = [a for a in args if a.requires_grad]
    out = function(*args, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_output.to(out.dtype))


def same(q, k, v, *, function=frt.attention, mask=None, **options):
    """As accurate as the formula, result and gradients of q, k, v and a mask that is added."""
    graded = mask is not None and mask.is_floating_point()
    fixed = options if graded or mask is None else {**options, "mask": mask}
    operands = (q, k, v, *([mask] if graded else []))

    def call(of):
        return lambda q, k, v, mask=None, **more: of(q, k, v, **({"mask": mask} if graded else {}), **more)

    with torch.no_grad():
        shape = call(function.reference)(*operands, **fixed).shape
    grad = torch.randn(shape, dtype=F64, device=q.device)
    found = evaluated(call(function), operands, grad.to(q.dtype), **fixed)
    theirs = evaluated(call(function.reference), operands, grad.to(q.dtype), **fixed)
    exact = evaluated(call(function.reference), [wide(t) for t in operands], grad.to(q.dtype).double(),
                      **{name: wide(value) for name, value in fixed.items()})
    # Of a score's gradient two terms cancel, each of which is a product of rows of the gradient and of v.
    of_scores = grad.norm(dim=-1).max() * v.double().norm(dim=-1).max() * q.shape[-1] ** -0.5
    if q.is_cuda and q.dtype == F32 and function is frt.attention and options.keys() <= {"causal", "scale"}:
        theirs = [*worse(theirs, evaluated(call(sdpa), operands, grad.to(q.dtype), **fixed), exact)]
    lost = 2.0**-48 if q.dtype == F64 else 2.0**-22
    for ours, torchs, truth, other in zip(found, theirs, exact, (v, k, q, v, v), strict=False):
        terms = max(truth.abs().max(), of_scores * other.double().abs().max())
        assert_as_accurate(ours, torchs, truth, extra=terms.item() * lost)
    return found


def sdpa(q, k, v, mask=None, causal=False, scale=None):
    """torch's fused kernels: of float32 their products are of three parts of fewer bits."""
    if causal and mask is not None:  # torch takes one of both
        diagonal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        mask = mask & diagonal if mask.dtype == torch.bool else mask.masked_fill(~diagonal, -INF)
        causal = False
    q, k, v = (t.contiguous() for t in (q, k, v))  # a kernel refuses rows at odd addresses
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)


def worse(formula, kernel, exact):
    for a, b, truth in zip(formula, kernel, exact, strict=True):
        first, second = ((t.double() - truth).abs().nan_to_num().max() for t in (a, b))
        yield a if first > second else b
