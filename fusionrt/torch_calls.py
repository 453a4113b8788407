"""Torch's functions and methods, called in a fused function: `torch.sign(x)`, `F.celu(x)`, `x.clamp(0, 1)`.

To the rules of `functions` come those that models have otherwise or not at all: conversions, constants, and
what asks for infinities, which a model's values of 16 bits become before a kernel's float32 does.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from fusionrt import expr, functions
from fusionrt.expr import Expr, TraceError, node, where
from fusionrt.functions import Rule

_RULES = functions.RULES.copied()
rule = _RULES.rule


def function(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Expr:
    """What a function of torch's is of these arguments."""
    made = _RULES.functions.get(func)
    if made is None:
        raise TraceError(f"torch.{func.__name__} cannot be fused: known are {', '.join(_known())}")
    return _called(func.__name__.removeprefix("special_"), made, args, kwargs)


def method(value: Expr, name: str) -> Callable[..., Expr]:
    """A method of tensors, of a traced value."""
    made = _RULES.methods.get(name)
    if made is None:
        raise TraceError(f"a traced value is one scalar and has no attribute {name!r}: write "
                         "functions and operators; reductions and reshapes stay outside fuse")
    return lambda *args, **kwargs: _called(name, made, (value, *args), kwargs)


def _known() -> list[str]:
    spaces = (torch, torch.nn.functional, torch.special)
    return sorted({name for space in spaces for name, f in vars(space).items()
                   if callable(f) and f in _RULES.functions and f not in _INEXACT and name[0] != "_"})


def _called(name: str, made: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Expr:
    if kwargs.get("inplace"):
        raise TraceError(f"{name}: a traced value cannot be changed in place: leave inplace out")
    options = {k: v for k, v in kwargs.items() if v is not None}
    if any(isinstance(a, torch.Tensor) for a in (*args, *options.values())):
        raise TraceError(f"{name}: a tensor is captured by closure: make it an argument "
                         "of the fused function")
    signature = inspect.signature(made)
    try:
        signature.bind(*args, **options)
    except TypeError:
        found = None
    else:
        found = made(*args, **options)
    if not isinstance(found, Expr):
        given = ", ".join([*map(_shown, args), *(f"{k}={_shown(v)}" for k, v in options.items())])
        takes = signature.replace(return_annotation=signature.empty, parameters=[
            p.replace(annotation=p.empty) for p in signature.parameters.values()])
        raise TraceError(f"{name} cannot be fused with these arguments, ({given}): known is {name}{takes}, "
                         "of each element alone")
    return found


def _shown(argument: Any) -> str:
    return "a traced value" if isinstance(argument, Expr) else repr(argument)


# -- infinities ------------------------------------------------------------------------------------


@rule()
def isinf(input: Any) -> Any:
    return expr.abs_(input) == math.inf


@rule()
def isposinf(input: Any) -> Any:
    return input == math.inf


@rule()
def isneginf(input: Any) -> Any:
    return input == -math.inf


@rule()
def isfinite(input: Any) -> Any:
    return expr.abs_(input) < math.inf


@rule()
def nan_to_num(input: Any, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Any:
    if posinf is None or neginf is None:
        raise TraceError("nan_to_num: posinf and neginf must be numbers in a fused function, which is traced "
                         "once for dtypes whose largest numbers differ")
    finite = where(input == math.inf, posinf, where(input == -math.inf, neginf, input))
    return where(input != input, nan, finite)


# -- constants and identities -----------------------------------------------------------------------


@rule()
def full_like(input: Any, fill_value: float) -> Any:
    made = node("const", repr(float(fill_value)))
    return made != 0 if input.is_truth else made


@rule()
def zeros_like(input: Any) -> Any:
    return full_like(input, 0)


@rule()
def ones_like(input: Any) -> Any:
    return full_like(input, 1)


@rule()
def positive(input: Any) -> Any:
    return +input


# -- conditions, whose signs join the bits of integers -----------------------------------------------


@rule()
def bitwise_and(input: Any, other: Any) -> Any:
    return input & other


@rule()
def bitwise_or(input: Any, other: Any) -> Any:
    return input | other


@rule()
def bitwise_not(input: Any) -> Any:
    return ~input


# -- conversions -------------------------------------------------------------------------------------


@rule("type", spaces=())
def to(input: Any, dtype: Any) -> Any:
    return expr.cast(input, dtype)


def _conversion(dtype: torch.dtype) -> Rule:
    return lambda input: expr.cast(input, dtype)


_RULES.methods.update((name, _conversion(dtype)) for name, dtype in (
    ("half", torch.float16), ("bfloat16", torch.bfloat16), ("float", torch.float32),
    ("double", torch.float64), ("char", torch.int8), ("byte", torch.uint8), ("short", torch.int16),
    ("int", torch.int32), ("long", torch.int64), ("bool", torch.bool)))


# -- what no formula of primitives gives as exactly as torch -----------------------------------------

_INEXACT = {torch.remainder: "x - y * floor(x / y)", torch.fmod: "x - y * trunc(x / y)",
            torch.floor_divide: "floor(x / y)"}


def _refused(name: str, formula: str) -> Rule:
    def refused(input: Any, other: Any) -> NoReturn:
        raise TraceError(f"{name} cannot be fused, as torch's is exact where x / y is rounded: where that "
                         f"does not matter write {formula}")

    refused.__name__ = name
    return refused


for _function, _formula in _INEXACT.items():
    rule()(_refused(_function.__name__, _formula))
