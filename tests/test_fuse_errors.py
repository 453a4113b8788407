"""`fuse`: what a user's function may not do, and what the error says to write instead."""

import math
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fusionrt as frt

CAPTURED = torch.ones(3)


def condition(x):
    return x if x > 0 else -x


def loop(x):
    return sum(v for v in x)


def reduction(x):
    return x / x.sum()


def attribute(x):
    return x * x.shape


CONDITION = (
    "a condition on a traced value (if, and, or, min, max, chained comparison) cannot be "
    "decided while "
    "tracing: write where(condition, a, b), &, |, ~, minimum(a, b) or maximum(a, b)"
)
NUMBER = (
    "a traced value has no number yet: write fusionrt.exp(x), not math.exp(x); "
    "cast(x, 'int32'), not int(x)"
)
NO_ATTRIBUTE = (
    "a traced value is one scalar and has no attribute {!r}: write functions and "
    "operators; reductions "
    "and reshapes stay outside fuse"
)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (condition, CONDITION),
        (lambda x: x > 0 and x < 1, CONDITION),
        (lambda x: x or 1, CONDITION),
        (lambda x: not x, CONDITION),
        (lambda x: 0 < x < 1, CONDITION),
        (lambda x: max(x, 0), CONDITION),
        (lambda x: min(x, 0), CONDITION),
        (
            loop,
            "a traced value is one scalar and cannot be looped over: the function is "
            "applied to every element already",
        ),
        (
            lambda x: x[0],
            "a traced value is one scalar and cannot be indexed: pass the part of the "
            "tensor that you need "
            "as an argument of its own",
        ),
        (lambda x: float(x), NUMBER),
        (lambda x: int(x), NUMBER),
        (lambda x: math.exp(x), NUMBER),
        (lambda x: complex(x), NUMBER),
        (lambda x: range(x), NUMBER),
        (reduction, NO_ATTRIBUTE.format("sum")),
        (attribute, NO_ATTRIBUTE.format("shape")),
        (
            lambda x: x + CAPTURED,
            "add: operand Tensor is neither a traced value nor a number: a tensor must be an "
            "argument of the fused function, not captured by closure (outside of one, torch's own "
            "functions take tensors)",
        ),
        (
            lambda x: CAPTURED + x,
            "add: operand Tensor is neither a traced value nor a number: a tensor must be an "
            "argument of the fused function, not captured by closure (outside of one, torch's own "
            "functions take tensors)",
        ),
        (
            lambda x: torch.maximum(CAPTURED, x),
            "maximum: a tensor is captured by closure: make it an argument of the fused function",
        ),
        (
            lambda x: x + "1",
            "add: operand str is neither a traced value nor a number: a tensor must be "
            "an argument of the "
            "fused function, not captured by closure (outside of one, torch's own functions take tensors)",
        ),
        (lambda x: round(x, 2), "round(x, n) is not supported: write round(x * 10**n) / 10**n"),
        (lambda x: CAPTURED,
         "must return traced values, got Tensor: make it an argument of the fused function"),
        (lambda x: None, "must return traced values, got NoneType"),
        (lambda x: (x, "a"), "must return traced values, got str"),
        (
            lambda x: frt.cast(x, "complex64"),
            "cast: dtype 'complex64' is not one of float16, bfloat16, float32, int8, "
            "uint8, int16, int32, int64, bool",
        ),
    ],
)
def test_untraceable(function, text):
    with pytest.raises(frt.TraceError) as caught:
        frt.fuse(name="mine")(function)
    assert str(caught.value) == f"mine: {text}"


def test_untraceable_function_of_torch():
    with pytest.raises(
        frt.TraceError,
        match=re.escape("mine: torch.softmax cannot be fused: known are abs, absolute, add,"),
    ):
        frt.fuse(name="mine")(lambda x: torch.softmax(x, 0))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda *x: x[0], "mine: *x cannot be fused: name each argument"),
        (lambda x, **kw: x, "mine: *kw cannot be fused: name each argument"),
        (lambda x, mode="a": x, "mine: the default of mode must be a number, got 'a'"),
        (lambda x, y=None: x, "mine: the default of y must be a number, got None"),
        (lambda: 1.0, "mine: must have an argument, as its results have the shape of one"),
    ],
)
def test_unsuitable_signatures(function, text):
    with pytest.raises(frt.TraceError) as caught:
        frt.fuse(name="mine")(function)
    assert str(caught.value) == text


def test_a_trace_error_is_a_type_error_with_a_public_name():
    assert issubclass(frt.TraceError, TypeError)
    assert (frt.TraceError.__module__, frt.TraceError.__name__) == ("fusionrt", "TraceError")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: frt.log(x, 10), "log takes 1 operand in a fused function, got 2"),
        (lambda x: frt.where(x > 0, x), "where takes 3 operands in a fused function, got 2"),
        (lambda x: frt.minimum(x, other=x),
         "minimum takes operands by position in a fused function, got other by name"),
        (lambda x: torch.round(x, decimals=2),
         "round cannot be fused with these arguments, (a traced value, decimals=2): known is "
         "round(input, *, decimals=0), of each element alone"),
        (lambda x: F.gelu(x, approximate="fast"),
         "gelu cannot be fused with these arguments, (a traced value, approximate='fast'): known is "
         "gelu(input, *, approximate='none'), of each element alone"),
        (lambda x: x.max(), "max cannot be fused with these arguments, (a traced value): known is "
                            "max(input, other=None), of each element alone"),
        (lambda x: torch.zeros_like(x, dtype=torch.int8),
         "zeros_like cannot be fused with these arguments, (a traced value, dtype=torch.int8): known is "
         "zeros_like(input), of each element alone"),
        (lambda x: torch.remainder(x, 2),
         "remainder cannot be fused, as torch's is exact where x / y is rounded: where that does not matter "
         "write x - y * floor(x / y)"),
        (lambda x: torch.nan_to_num(x),
         "nan_to_num: posinf and neginf must be numbers in a fused function, which is traced once for dtypes "
         "whose largest numbers differ"),
        (lambda x: torch.bitwise_and(x + 1, x > 0),
         "& joins conditions, got a number: write x != 0; bits cannot be fused"),
        (lambda x: x.clamp(max=CAPTURED),
         "clamp: a tensor is captured by closure: make it an argument of the fused function"),
        (lambda x: x.to("cuda"), "cast: dtype 'cuda' is not one of float16, bfloat16, float32, int8, uint8, "
                                 "int16, int32, int64, bool"),
        (lambda x: frt.exp(CAPTURED),
         "exp: works on traced values, in a fused function, got Tensor: call torch.exp on tensors; one that "
         "a fused function needs must be an argument of it"),
        (lambda x: frt.clamp(x), "clamp needs min or max"),
        (lambda x: (), "must return a traced value, got none"),
        (lambda x: x // 2, "x // y cannot be fused: write floor(x / y)"),
        (lambda x: divmod(x, 2), "x // y cannot be fused: write floor(x / y)"),
        (lambda x: 2 % x, "x % y cannot be fused: write x - y * floor(x / y)"),
        (lambda x: (x > 0) ^ (x < 1), "x ^ y cannot be fused: of conditions write a != b"),
        (lambda x: x @ x, "x @ y cannot be fused: a traced value is one scalar; call torch.matmul outside"),
        (lambda x: x >> 1, "shifts cannot be fused: write x * 2**n, or floor(x / 2**n)"),
        (lambda x: len(x), "a traced value is one scalar and has no length: pass the size as an argument of "
                           "its own"),
        (lambda x: np.exp(x), "numpy.exp cannot be traced: write the function of fusionrt"),
        (lambda x: np.where(x > 0, x, 0), "numpy.where cannot be traced: write fusionrt.where"),
        (lambda x: np.clip(x, 0, 1), "numpy.clip cannot be traced: write functions of fusionrt"),
        (lambda x: np.ones(3) * x,
         "multiply: operand ndarray is neither a traced value nor a number: a tensor must be an argument of "
         "the fused function, not captured by closure (outside of one, torch's own functions take tensors)"),
        (lambda x: np.int64(2) & x, "& joins conditions, got the number 2: bits cannot be fused"),
        (lambda x: x & 2, "& joins conditions, got the number 2: bits cannot be fused"),
        (lambda x: (x + 1) | (x > 0), "| joins conditions, got a number: write x != 0; bits cannot be fused"),
        (lambda x: ~(x * 2), "~ joins conditions, got a number: write x != 0; bits cannot be fused"),
    ],
)
def test_what_to_write_instead(function, text):
    with pytest.raises(frt.TraceError) as caught:
        frt.fuse(name="mine")(function)
    assert str(caught.value) == f"mine: {text}"


@pytest.mark.parametrize("wrong", [3, torch.exp])
def test_what_is_no_python_function(wrong):
    with pytest.raises(TypeError, match="fuse: needs a Python function of scalars, got "):
        frt.fuse(wrong)


@pytest.mark.parametrize(("function", "text"), [
    (lambda x: frt.softmax(x), "softmax: x must be .*, got Expr: what needs more than one element is called"),
    (lambda x: frt.sum(x), "sum: x must be .*, got Expr: what needs more than one element"),
    (lambda x: x + 10**400, "add: an operand is a number beyond those of float64"),
])
def test_what_else_cannot_be_traced(function, text):
    with pytest.raises(frt.TraceError, match=text):
        frt.fuse(function)


@pytest.mark.parametrize(("function", "text"), [
    (lambda x: F.silu(x, inplace=True), "silu: a traced value cannot be changed in place: leave inplace out"),
    (lambda x: F.glu(x), "torch.glu cannot be fused: known are abs, absolute, add"),
])
def test_activations_of_torchs(function, text):
    with pytest.raises(frt.TraceError, match=text):
        frt.fuse(function)


@pytest.mark.parametrize("convert", [
    lambda x: x.double(), lambda x: x.to(torch.float64), lambda x: frt.cast(x, "float64"),
    lambda x: frt.cast(x, np.float64), lambda x: frt.cast(x, np.dtype(np.float64))])
def test_casts_to_float64(convert):
    with pytest.raises(frt.TraceError, match="cast: float64 is no dtype to cast to, as operands decide what "
                                             "a kernel computes in: pass tensors of float64, or convert"):
        frt.fuse(convert)


@pytest.mark.parametrize("name", [
    "exp", "log2", "normcdf", "normpdf", "where", "minimum", "clamp", "pow", "cast", "abs", "round"])
@pytest.mark.parametrize("operand", [CAPTURED, torch.tensor(2.0), np.ones(3, np.float32), "1"],
                         ids=["Tensor", "number", "ndarray", "str"])
def test_functions_of_traced_values_outside_of_a_fused_function(name, operand):
    """They are called by their name in what they say, and the function to call instead exists."""
    more = {"where": (1.0, 2.0), "minimum": (1.0,), "clamp": (0.0, 1.0), "pow": (2.0,), "cast": ("float16",)}
    with pytest.raises(frt.TraceError) as caught:
        getattr(frt, name)(operand, *more.get(name, ()))
    text = re.fullmatch(f"{name}: works on traced values, in a fused function, got {type(operand).__name__}: "
                        "call (.*) on tensors; one that a fused function needs must be an argument of it",
                        str(caught.value))
    assert callable(eval(text[1], {"torch": torch, "fusionrt": frt}))
