"""Torch's functions and methods in a fused function: what torch computes in float64, and its gradients."""

import inspect
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import fusionrt as frt

# By name, of one value: spelled as a user of torch's does.
UNARY = {
    "ceil": torch.ceil,
    "frac": torch.frac,
    "fix": torch.fix,
    "square": torch.square,
    "sign": torch.sign,
    "sgn": lambda x: x.sgn(),
    "positive": torch.positive,
    "isnan": lambda x: torch.isnan(x) * 2.0 + x,
    "isinf": lambda x: torch.isinf(x) * 2.0 + x,
    "isposinf": lambda x: torch.isposinf(x) * 2.0 + x,
    "isneginf": lambda x: torch.isneginf(x) * 2.0 + x,
    "isfinite": lambda x: torch.where(torch.isfinite(x), x, 3.0),
    "nan_to_num": lambda x: torch.nan_to_num(x, 0.5, 100.0, -50.0),
    "nan_to_num_method": lambda x: x.nan_to_num(posinf=2.0, neginf=1.0),
    "clamp_min": lambda x: torch.clamp_min(x, -0.5),
    "clamp_max": lambda x: torch.clamp_max(x, 0.5),
    "clip": lambda x: torch.clip(x, -1, 1),
    "tan": torch.tan,
    "log10": torch.log10,
    "deg2rad": torch.deg2rad,
    "rad2deg": torch.rad2deg,
    "rsub": lambda x: torch.rsub(x, 1.5),
    "special_erf": torch.special.erf,
    "special_expit": torch.special.expit,
    "special_exp2": torch.special.exp2,
    "special_expm1": torch.special.expm1,
    "special_log1p": torch.special.log1p,
    "special_ndtr": torch.special.ndtr,
    "special_round": torch.special.round,
    "celu": lambda x: F.celu(x, 1.5),
    "celu_of_torch": torch.celu,
    "selu": F.selu,
    "softsign": F.softsign,
    "logsigmoid": F.logsigmoid,
    "hardshrink": F.hardshrink,
    "softshrink": lambda x: F.softshrink(x, 0.25),
    "tanhshrink": F.tanhshrink,
    "threshold": lambda x: F.threshold(x, 0.5, -3.0),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 1.0),
    "relu6": F.relu6,
    "softplus": lambda x: F.softplus(x, 2.0, 6.0),
    "sigmoid_of_F": F.sigmoid,
    "tanh_of_F": F.tanh,
    "logical_not": lambda x: torch.logical_not(x) * 2.0 + x,
    "zeros_like": lambda x: torch.zeros_like(x) + x,
    "ones_like": lambda x: x * torch.ones_like(x),
    "full_like": lambda x: x - torch.full_like(x, 0.25),
    "masked_fill": lambda x: torch.masked_fill(x, x < -1, -2.0),
    "div_trunc": lambda x: torch.div(x, 0.5, rounding_mode="trunc"),
    "lerp_number": lambda x: torch.lerp(x, torch.full_like(x, 2.0), 0.75),
    "methods": lambda x: x.sigmoid().mul(x.exp()).add(x.clamp(0, 1), alpha=2).sub((x * x + 1).rsqrt().neg()),
    "pow": lambda x: x.square() + x.pow(2) + (x.abs() + 1).pow(0.5),
    "where": lambda x: x.where(x > 0, x.tanh()),
    "methods_of_conditions": lambda x: (x.gt(0) & x.le(1).logical_not()).logical_or(x.eq(-1)) * 2.0 + x,
    "float": lambda x: x.bfloat16().float(),
    "int": lambda x: x.nan_to_num(0, 9.0, -9.0).int() + x.trunc(),
    **{type(m).__name__: m for m in (
        nn.CELU(), nn.SELU(), nn.Softsign(), nn.LogSigmoid(), nn.Hardshrink(0.25), nn.Softshrink(),
        nn.Tanhshrink(), nn.Threshold(0.5, 1.5), nn.Hardtanh())},
}
BINARY = {
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "lerp_weight": lambda x, y: x.lerp(y, torch.clamp(x * 0.25, -1, 1)),
    "logical_and": lambda x, y: torch.logical_and(x, y) * 2.0 + x,
    "logical_or": lambda x, y: torch.logical_or(x, y) * 2.0 + x,
    "logical_xor": lambda x, y: torch.logical_xor(x, y) * 2.0 + x,
    "bitwise": lambda x, y: torch.bitwise_and(x > y, x < 3) * 2.0 + torch.bitwise_or(x > y, x == 0) * x,
    "bitwise_not": lambda x, y: torch.where(torch.bitwise_not(x > y), y, x),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.5),
    "addcdiv": lambda x, y: x.addcdiv(y, torch.full_like(x, 4.0)),
    "rsub": lambda x, y: torch.rsub(x, y, alpha=2),
    "add_alpha": lambda x, y: torch.add(x, y, alpha=0.5),
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "max": lambda x, y: torch.max(x, other=y),
    "min": lambda x, y: x.min(y),
    "clamp": lambda x, y: torch.clamp(x, y, y + 1),
    "clamp_min": lambda x, y: x.clamp_min(y.clamp(max=100)),
    "clamp_max": lambda x, y: x.clamp_max(y),
}
# Whose gradient of NaN is another one than torch's: NaN as the result is, or 0 as beyond the bounds.
SLOPES_OF_NAN = {"celu", "celu_of_torch", "selu", "hardtanh", "relu6", "CELU", "SELU", "Hardtanh", "clamp"}
if torch.__version__[:4] == "2.14":
    SLOPES_OF_NAN |= {"fmax", "fmin"}  # both operands had it there
INFINITE = [math.inf, -math.inf, math.nan]
KINKS = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 0.25, -0.25, 3.0, -3.0, 6.0, 1.5, 2.5, -1.5]
VALUES = [*KINKS, 1e-3, -1e-3, 1e-6, 0.3, -0.7, 2.2, -4.1, 9.5, -9.5, 30.0, -30.0, 80.0, *INFINITE]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 1e-2}


def joined(table, names, operands):
    """All of them as one kernel, each of operands of its own: their gradients do not meet."""
    def every(*args):
        return tuple(table[name](*args[k * operands:][:operands]) for k, name in enumerate(names))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    every.__signature__ = inspect.Signature([inspect.Parameter(f"x{k}", kind)
                                             for k in range(len(names) * operands)])
    return frt.fuse(every, name="every")


CHUNKS = [(table, list(table)[k:k + 10]) for table in (UNARY, BINARY) for k in range(0, len(table), 10)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("table", "names"), CHUNKS, ids=[f"{names[0]}-{names[-1]}" for _, names in CHUNKS])
def test_functions_are_torchs(table, names, dtype, device):
    x = torch.tensor(VALUES, dtype=dtype, device=device)
    operands = (x,) if table is UNARY else (x.repeat_interleave(len(x)), x.repeat(len(x)))
    args = [a.clone().requires_grad_() for _ in names for a in operands]
    found = joined(table, names, len(operands))(*args)
    grads = torch.autograd.grad(found, args, [torch.full_like(y, 0.75) for y in found],
                                allow_unused=True, materialize_grads=True)
    for k, (name, ours) in enumerate(zip(names, found, strict=True)):
        wide = [a.detach().double().requires_grad_() for a in operands]
        theirs = table[name](*wide)
        slopes = torch.autograd.grad(theirs, wide, torch.full_like(theirs, 0.75), allow_unused=True,
                                     materialize_grads=True)
        bound = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype], "equal_nan": True}
        assert_close(ours.double(), theirs.double(), **bound, msg=lambda m, n=name: f"{n}: {m}")
        compared = ~torch.stack(operands).isnan().any(0) | (name not in SLOPES_OF_NAN)
        for slope, expected in zip(grads[k * len(operands):], slopes, strict=False):
            assert_close(slope.double()[compared], expected[compared], **bound,
                         msg=lambda m, n=name: f"gradient of {n}: {m}")


def of_one(function):
    """Also of what has no signature."""
    return frt.fuse(lambda x: function(x))


def test_large_arguments(device):
    """Where a formula that is right in exact arithmetic would overflow or cancel."""
    x = torch.tensor([-1e30, -1e4, -100.0, -20.0, 20.0, 100.0, 1e4, 1e30], device=device, requires_grad=True)
    for function in (F.logsigmoid, F.softsign, F.selu, F.softplus, F.celu, torch.ceil, torch.sign):
        ours, wide = of_one(function)(x), x.detach().double().requires_grad_()
        theirs = function(wide)
        assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-37)
        grads = torch.autograd.grad(ours.sum(), x)[0].double(), torch.autograd.grad(theirs.sum(), wide)[0]
        assert_close(*grads, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("function", "dtype"), [
    (torch.isnan, torch.bool), (lambda x: x.isfinite(), torch.bool), (torch.logical_not, torch.bool),
    (lambda x: torch.ones_like(x > 0), torch.bool), (lambda x: x.bool(), torch.bool),
    (lambda x: x.half(), torch.float16), (lambda x: x.bfloat16(), torch.bfloat16),
    (lambda x: x.to(torch.float16), torch.float16), (lambda x: x.to(dtype=torch.int8), torch.int8),
    (lambda x: x.type(torch.int16), torch.int16), (lambda x: x.int(), torch.int32),
    (lambda x: x.long(), torch.int64), (lambda x: x.byte(), torch.uint8), (lambda x: x.exp(), torch.float32)])
def test_dtypes_of_results(function, dtype, device):
    x = torch.tensor([0.0, 0.4, 1.0, 2.6, 100.0], device=device) / 2
    ours = of_one(function)(x)
    assert ours.dtype == dtype
    assert_close(ours, function(x))


def test_conversions_to_numpys_dtypes(device):
    x = torch.randn(33, device=device)
    for dtype in (np.float16, np.dtype("float16")):
        assert_close(of_one(lambda x, d=dtype: frt.cast(x, d) + 0)(x), x.half().float())
        assert_close(of_one(lambda x, d=dtype: frt.cast(x, d))(x), x.half())


def test_the_gradient_of_a_step_is_zero_not_none(device):
    x = torch.randn(33, device=device, requires_grad=True)
    for function in (torch.sign, torch.ceil, lambda x: torch.div(x, 2, rounding_mode="trunc")):
        (grad,) = torch.autograd.grad(of_one(function)(x).sum(), x)
        assert torch.equal(grad, torch.zeros_like(x))


@pytest.mark.parametrize("epilogue", [
    nn.SELU(), F.softsign, nn.LogSigmoid(), nn.Hardtanh(-0.5, 0.25), lambda y: torch.sign(y) * y.abs().sqrt(),
    lambda y: y.clamp_min(0).square()])
def test_epilogues(epilogue, device):
    x = torch.randn(8, 65, device=device)
    assert_close(frt.layer_norm(x, (65,), epilogue=epilogue), epilogue(F.layer_norm(x, (65,))),
                 rtol=1e-5, atol=1e-5)
    weight, bias = torch.randn(7, 65, device=device), torch.randn(7, device=device)
    assert_close(frt.linear_activation(x, weight, bias, epilogue), epilogue(F.linear(x, weight, bias)),
                 rtol=1e-4, atol=1e-4)


def test_captured_modules_of_training_are_refused():
    """What is traced is kept: a dropout that was training would train for ever."""
    with pytest.raises(frt.TraceError, match=r"torch\.dropout cannot be fused"):
        frt.fuse(lambda x: nn.Dropout(0.5)(x))
