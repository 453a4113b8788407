"""Quantisation to int8 and back: torch's bits, saturation, scales per channel, gradients."""

import math

import numpy as np
import pytest
import torch
from checking import BF16, F16, F32, F64, assert_as_accurate, dtypes, make
from pointwise_ops import SPECIALS

import fusionrt as frt
from fusionrt.catalogue import OPS
from fusionrt.rehearsal import collecting


def quantize_values(dtype, device, scale):
    """Ties, neighbours of ties, values out of range, NaN, and a million others."""
    ties = torch.arange(-300, 300, dtype=F32, device=device) * scale + 0.5 * scale
    near = [torch.nextafter(ties, torch.full_like(ties, s)) for s in (-math.inf, math.inf)]
    special = torch.tensor(SPECIALS, dtype=F32, device=device)
    many = torch.randn(2**20, device=device) * 60 * scale
    return torch.cat([ties, *near, special, many]).to(dtype)


@dtypes
@pytest.mark.parametrize("zero_point", [0.0, 3, -7.0])
def test_quantize(dtype, zero_point, device):
    for scale in (0.5, 0.05, 1 / 3, 1e-3):
        x = quantize_values(dtype, device, scale)
        out = frt.quantize_int8(x, scale, zero_point)
        assert out.dtype == torch.int8
        assert torch.equal(out, OPS["quantize_int8"].reference(x, scale, zero_point))
        assert not out[x.isnan()].any()
    assert not frt.quantize_int8(x.float().requires_grad_(), 0.5).requires_grad


@pytest.mark.covering(1)
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_quantize_per_channel(dim, dtype, device):
    x = make((31, 65, 33), dtype, device)
    scale = torch.rand(x.shape[dim], device=device) * 0.1 + 0.01
    zero_point = torch.randint(-9, 9, scale.shape, device=device).float()
    reference = OPS["quantize_int8"].reference
    for args in (
        (scale,),
        (scale, 2.0),
        (scale, zero_point),
        (0.05, zero_point),
        (scale[0], zero_point),
    ):
        assert torch.equal(frt.quantize_int8(x, *args, dim=dim), reference(x, *args, dim=dim))
    assert torch.equal(frt.quantize_int8(x, scale, dim=np.int64(dim)), reference(x, scale, dim=dim))
    assert torch.equal(frt.quantize_int8(x, scale[0]), reference(x, scale[0]))


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_dequantize(dtype, device):
    q = torch.arange(-128, 128, device=device).to(torch.int8)
    scale = torch.rand(256, device=device) + 0.1
    zero_point = torch.randint(-9, 9, (256,), device=device).float()
    reference = OPS["dequantize_int8"].reference
    for args, kwargs in [
        ((0.05,), {}),
        ((0.05, 3.0), {}),
        ((scale, zero_point), {"dim": 0}),
        ((scale,), {}),
    ]:
        out = frt.dequantize_int8(q, *args, **kwargs, dtype=dtype)
        theirs = reference(q, *args, **kwargs, dtype=dtype)
        assert_as_accurate(
            out,
            theirs,
            reference(
                q, *(a.double() if torch.is_tensor(a) else a for a in args), **kwargs, dtype=F64
            ),
        )
    assert torch.equal(out, frt.dequantize_int8(q, scale, dtype=str(dtype)))


def test_dequantize_gradients(device):
    q = torch.randint(-128, 128, (33, 17), device=device).to(torch.int8)
    args = [
        (torch.rand(17, device=device) + 0.1).requires_grad_(),
        make((17,), F32, device).requires_grad_(),
    ]
    grad_output = torch.randn(33, 17, device=device)
    wide = [a.detach().double().requires_grad_() for a in args]
    truth = (q.double() - wide[1]) * wide[0]
    torch.testing.assert_close(
        torch.autograd.grad(frt.dequantize_int8(q, *args, dim=1), args, grad_output),
        torch.autograd.grad(truth, wide, grad_output.double()),
        check_dtype=False,
        rtol=1e-5,
        atol=1e-4,
    )


def test_quantize_then_dequantize(device):
    x = make((33, 17), F32, device).clamp(-6, 6)
    back = frt.dequantize_int8(frt.quantize_int8(x, 0.05, 3), 0.05, 3)
    assert (back - x).abs().max() <= 0.025 * (1 + 1e-5)


def test_each_of_many_calls_is_checked(device):
    """The short way of calls like the one before is for numbers in range."""
    x = torch.randn(8, 24, device=device)
    for _ in range(3):
        q = frt.quantize_int8(x, 0.05, 3)
        assert torch.equal(q, OPS["quantize_int8"].reference(x, 0.05, 3))
        assert torch.equal(frt.dequantize_int8(q, 0.05, 3.0), OPS["dequantize_int8"].reference(q, 0.05, 3.0))
    scale, zero_point = torch.rand(8, device=device) + 0.1, torch.arange(8.0, device=device)
    for args, kwargs in (((scale,), {"dim": 0}), ((0.05, zero_point), {"dim": 0}), ((np.float32(0.05),), {}),
                         ((0.05, np.float64(3)), {}), ((True, False), {})):
        assert torch.equal(frt.quantize_int8(x, *args, **kwargs),
                           OPS["quantize_int8"].reference(x, *args, **kwargs))
    assert frt.dequantize_int8(q, 0.05, dtype=BF16).dtype == BF16
    for op, a in ((frt.quantize_int8, x), (frt.dequantize_int8, q)):
        for value in (0.0, -0.05, math.inf, math.nan):
            with pytest.raises(ValueError, match="scale must be a finite positive number"):
                op(a, value)
        with pytest.raises(ValueError, match="zero_point must be a finite number, got nan"):
            op(a, 0.05, math.nan)


def test_numbers_of_numpys_are_numbers():
    x = torch.empty(64, 64, device="meta")
    for number in (float, np.float64, np.float32, np.float16):
        with collecting("cuda") as needed:
            frt.quantize_int8(x, number(0.05), number(3))
        assert [kernel.name for kernel in needed] == ["quantize_int8_by_inverse"]
