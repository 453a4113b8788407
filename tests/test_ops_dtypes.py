"""Operands of different dtypes are promoted as torch promotes them."""

import itertools

import pytest
import torch
from checking import BF16, F16, F32, F64, make
from pointwise_ops import check_op

import fusionrt as frt
from fusionrt.dtypes import STORAGE


@pytest.mark.parametrize(
    ("x", "bias"),
    [
        (BF16, F32),
        (F32, BF16),
        (F16, BF16),
        (BF16, F16),
        (F32, F64),
        (F16, torch.int32),
        (torch.bool, F32),
        (torch.uint8, BF16),
        (torch.int64, F32),
    ],
    ids=str,
)
def test_mixed_dtypes(x, bias, device):
    args = make((33, 17), x, device), make((17,), bias, device)
    out, grads = check_op("multiply_relu", args)
    assert out.dtype == torch.result_type(*args)
    assert [g.dtype for g in grads] == [a.dtype for a in args if a.is_floating_point()]


def test_mixed_dtypes_in_a_reduction_to_the_wider(device):
    args = [
        make(s, d, device) for s, d in [((33, 17), BF16), ((17,), F32), ((33, 1), F16), ((), F64)]
    ]
    out, _ = check_op("add_mul_add", args)
    assert out.dtype == F32


def test_promotion_is_that_of_torch():
    """For every pair of dtypes, with and without dimensions. Meta tensors: no kernel is built."""
    for (a, b), (m, n) in itertools.product(
        itertools.product(STORAGE, repeat=2), itertools.product([(3,), ()], repeat=2)
    ):
        x, y = torch.empty(m, dtype=a, device="meta"), torch.empty(n, dtype=b, device="meta")
        expected = torch.result_type(x, y)
        if expected.is_floating_point:
            assert frt.add_relu(x, y).dtype == expected, (x, y)
        else:
            with pytest.raises(TypeError, match="needs a floating-point tensor"):
                frt.add_relu(x, y)
