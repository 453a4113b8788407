"""Torch's pointwise functions as functions of traced values: what a fused function may call, and what a
model's cluster is put together from.

A rule has torch's parameter names and is called with traced values and numbers; it returns a traced value, or
None where these arguments make it something else. Dtypes are not its business. What has another meaning, or
another risk, in a fused function or in a model has its rule there: `torch_calls`, `convert.pointwise`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from fusionrt import expr
from fusionrt.expr import Expr, where
from fusionrt.ops import activations

Rule = Callable[..., Any]
_SPECIAL: Any = torch._C._special  # type: ignore[attr-defined]  # which the stubs leave out
_NAMESPACES = (torch, F, torch._C._nn, _SPECIAL)


class Rules(NamedTuple):
    """By torch's function, and by the name of a tensor's method."""

    functions: dict[Any, Rule]
    methods: dict[str, Rule]

    def rule(self, *names: str, operators: tuple[Any, ...] = (), spaces: tuple[Any, ...] = _NAMESPACES,
             method: bool = True) -> Callable[[Rule], Rule]:
        """Enter a rule for the functions and methods of its own name and of the further `names`."""

        def enter(made: Rule) -> Rule:
            for name in (made.__name__.rstrip("_"), *names):
                for space in spaces:
                    if hasattr(space, name):
                        self.functions[getattr(space, name)] = made
                if method and hasattr(torch.Tensor, name):
                    self.methods[name] = made
            self.functions.update(dict.fromkeys(operators, made))
            return made

        return enter

    def copied(self) -> Rules:
        """To be added to."""
        return Rules(dict(self.functions), dict(self.methods))


RULES = Rules({}, {})
rule = RULES.rule
# Rules that compare: torch rounds numbers to the tensors' dtype first.
COMPARISONS: set[Rule] = set()


# -- arithmetic ------------------------------------------------------------------------------------


@rule("__add__", "__radd__", operators=(operator.add,))
def add(input: Any, other: Any, *, alpha: float = 1) -> Any:
    return input + (other if alpha == 1 else other * alpha)


@rule("subtract", "__sub__", operators=(operator.sub,))
def sub(input: Any, other: Any, *, alpha: float = 1) -> Any:
    return input - (other if alpha == 1 else other * alpha)


@rule("__rsub__")
def rsub(input: Any, other: Any, *, alpha: float = 1) -> Any:
    return other - (input if alpha == 1 else input * alpha)


@rule("multiply", "__mul__", "__rmul__", operators=(operator.mul,))
def mul(input: Any, other: Any) -> Any:
    return input * other


@rule("divide", "true_divide", "__truediv__", operators=(operator.truediv,))
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "trunc":
        return expr.trunc(input / other)
    return input / other if rounding_mode is None else None


@rule("__rdiv__", "__rtruediv__")
def rdiv(input: Any, other: Any) -> Any:
    return other / input


@rule("negative", "__neg__", operators=(operator.neg,))
def neg(input: Any) -> Any:
    return -input


@rule("absolute", "__abs__", operators=(operator.abs,))
def abs_(input: Any) -> Any:
    return expr.abs_(input)


@rule("__pow__", operators=(operator.pow, pow))
def pow_(input: Any, exponent: Any) -> Any:
    return expr.power(input, exponent)


@rule("__rpow__")
def _rpow(input: Any, other: Any) -> Any:
    return expr.power(other, input)


@rule()
def square(input: Any) -> Any:
    return input * input


@rule()
def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Any:
    return input + (tensor1 * tensor2 if value == 1 else tensor1 * tensor2 * value)


@rule()
def addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Any:
    return input + (tensor1 / tensor2 if value == 1 else tensor1 * value / tensor2)


@rule()
def lerp(input: Any, end: Any, weight: Any) -> Any:
    if isinstance(weight, Expr):  # one product, else the gradient of the other has 0 times infinite distances
        is_near = expr.abs_(weight) < 0.5
        return where(is_near, input, end) + where(is_near, weight, weight - 1) * (end - input)
    return input + weight * (end - input) if abs(weight) < 0.5 else end - (end - input) * (1 - weight)


# -- functions of one value ------------------------------------------------------------------------


def _unary(function: Callable[[Any], Any], *names: str) -> None:
    def of_one(input: Any) -> Any:
        return function(input)

    of_one.__name__ = names[0]
    rule(*names[1:])(of_one)


for _function, *_names in (
    (expr.exp, "exp"),
    (expr.exp2, "exp2", "special_exp2"),
    (expr.expm1, "expm1", "special_expm1"),
    (expr.log, "log"),
    (expr.log1p, "log1p", "special_log1p"),
    (expr.log2, "log2"),
    (lambda x: expr.log2(x) * math.log10(2), "log10"),
    (expr.sqrt, "sqrt"),
    (expr.rsqrt, "rsqrt"),
    (expr.reciprocal, "reciprocal"),
    (expr.sin, "sin"),
    (expr.cos, "cos"),
    (lambda x: expr.sin(x) / expr.cos(x), "tan"),
    (expr.tanh, "tanh"),
    (expr.erf, "erf", "special_erf"),
    (expr.normcdf, "special_ndtr"),
    (expr.sigmoid, "sigmoid", "special_expit", "expit"),
    (expr.floor, "floor"),
    (expr.trunc, "trunc", "fix"),
    (lambda x: -expr.floor(-x), "ceil"),
    (lambda x: x - expr.trunc(x), "frac"),
    (lambda x: ((0 < x) - (x < 0)) * expr.power(x, 0.0), "sign", "sgn"),  # of x, for it has a derivative, 0
    (lambda x: x * (math.pi / 180), "deg2rad"),
    (lambda x: x * (180 / math.pi), "rad2deg"),
    (lambda x: x != x, "isnan"),
    (lambda x: -expr.softplus(-x), "logsigmoid", "log_sigmoid"),
    (lambda x: x / (1 + expr.abs_(x)), "softsign"),
    (lambda x: x - expr.tanh(x), "tanhshrink"),
):
    _unary(_function, *_names)


@rule("special_round", operators=(round,))
def round_(input: Any, *, decimals: int = 0) -> Any:
    return expr.round_(input) if decimals == 0 else None


# -- activations -----------------------------------------------------------------------------------


def _activation(function: Callable[..., Any], *names: str) -> None:
    """Of one value and, in torch, a flag for working in place, which `inplace` has removed."""

    def activation(input: Any, inplace: bool = False) -> Any:
        return None if inplace else function(input)

    activation.__name__ = names[0]
    rule(*names[1:])(activation)


for _function, *_names in (
    (expr.relu, "relu"),
    (activations.relu6, "relu6"),
    (activations.silu, "silu"),
    (activations.mish, "mish"),
    (activations.hardswish, "hardswish"),
    (activations.hardsigmoid, "hardsigmoid"),
    (
        lambda x: 1.0507009873554804934193349852946 * activations.elu(x, 1.6732632423543772848170429916717),
        "selu",
    ),
):
    _activation(_function, *_names)


@rule(method=False)
def gelu(input: Any, *, approximate: str = "none") -> Any:
    made = {"none": activations.gelu, "tanh": activations.gelu_tanh}.get(approximate)
    return None if made is None else made(input)


@rule(spaces=(F,), method=False)
def elu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    return None if inplace else activations.elu(input, alpha)


@rule(spaces=(torch, F), method=False)
def celu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    below = where(input > 0, 0, input)  # where exp cannot overflow
    return None if inplace else where(input > 0, input, alpha * expr.expm1(below / alpha))


@rule(method=False)
def leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    return None if inplace else activations.leaky_relu(input, negative_slope)


@rule(method=False)
def softplus(input: Any, beta: float = 1, threshold: float = 20) -> Any:
    return activations.softplus(input, beta, threshold)


@rule(method=False)
def hardtanh(input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    return None if inplace else _between(input, min_val, max_val)


@rule(method=False)
def threshold(input: Any, threshold: float, value: float, inplace: bool = False) -> Any:
    return None if inplace else where(input <= threshold, value, input)


@rule()
def hardshrink(input: Any, lambd: float = 0.5) -> Any:
    return where((-lambd <= input) & (input <= lambd), 0, input)


@rule(method=False)
def softshrink(input: Any, lambd: float = 0.5) -> Any:
    return input - expr.clamp(input, -lambd, lambd) if isinstance(lambd, Expr) or lambd >= 0 else None


# -- bounds, choices, comparisons -------------------------------------------------------------------


@rule("clip")
def clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    return None if min is None and max is None else _clamped(input, min, max)


@rule()
def clamp_min(input: Any, min: Any) -> Any:
    return _clamped(input, min, None)


@rule()
def clamp_max(input: Any, max: Any) -> Any:
    return _clamped(input, None, max)


def _between(x: Any, low: Any, high: Any) -> Any:
    """Of numbers alone; torch refuses those in the wrong order."""
    return None if isinstance(low, Expr) or isinstance(high, Expr) or low > high else expr.node(
        "hardtanh", x, low, high)


def _clamped(x: Any, low: Any, high: Any) -> Any:
    """What lies on a bound has a gradient of 1 before torch 2.14; since then of 0 where the bounds are
    numbers, and shares it with one that is a tensor, but not with two."""
    if torch.__version__ < "2.14":
        return expr.clamp(x, low, high)
    if not isinstance(low, Expr) and not isinstance(high, Expr):
        return _clamped_by_numbers(x, low, high)
    above = x if low is None else expr.maximum(x, low)
    if low is None or high is None:
        return above if high is None else expr.minimum(x, high)
    return where((low == high) & (x <= low), where(x < low, low, x), expr.minimum(above, high))


def _clamped_by_numbers(x: Any, low: float | None, high: float | None) -> Any:
    if low is not None and high is not None:
        return _between(x, low, high)
    passes, bound = (x > low, low) if high is None else (x < high, high)
    return where(passes, x, where(x != x, math.nan, bound))  # a NaN's gradient is 0, an infinity's is not


@rule()
def maximum(input: Any, other: Any) -> Any:
    return expr.maximum(input, other)


@rule()
def minimum(input: Any, other: Any) -> Any:
    return expr.minimum(input, other)


@rule()
def fmax(input: Any, other: Any) -> Any:
    return _number_of(input, other, expr.maximum, input >= other)


@rule()
def fmin(input: Any, other: Any) -> Any:
    return _number_of(input, other, expr.minimum, input <= other)


def _number_of(x: Any, y: Any, choose: Callable[[Any, Any], Any], first: Any) -> Any:
    """Not NaN if one of them is not. Equals share the gradient since torch 2.14; before, x has it."""
    if torch.__version__ < "2.14":
        return where(first | (y != y), x, y)
    return where(y != y, x, where(x != x, y, choose(x, y)))


@rule("max")
def _larger(input: Any, other: Any = None) -> Any:
    return expr.maximum(input, other) if isinstance(other, Expr) else None


@rule("min")
def _smaller(input: Any, other: Any = None) -> Any:
    return expr.minimum(input, other) if isinstance(other, Expr) else None


@rule(method=False)
def where_(condition: Any, input: Any = None, other: Any = None) -> Any:
    return None if input is None or other is None else where(condition, input, other)


def _where_method(input: Any, condition: Any, other: Any) -> Any:
    return where(condition, input, other)


RULES.methods["where"] = _where_method


@rule()
def masked_fill(input: Any, mask: Any, value: Any) -> Any:
    return where(mask, value, input)


def _comparison(function: Callable[[Any, Any], Any], *names: str) -> None:
    def comparison(input: Any, other: Any) -> Any:
        return function(input, other)

    comparison.__name__ = names[0]
    rule(*names[1:], operators=(function,))(comparison)
    COMPARISONS.add(comparison)


for _compare, *_names in (
    (operator.lt, "lt", "less", "__lt__"),
    (operator.le, "le", "less_equal", "__le__"),
    (operator.gt, "gt", "greater", "__gt__"),
    (operator.ge, "ge", "greater_equal", "__ge__"),
    (operator.eq, "eq", "__eq__"),
    (operator.ne, "ne", "not_equal", "__ne__"),
):
    _comparison(_compare, *_names)


@rule()
def logical_and(input: Any, other: Any) -> Any:
    return expr.node("and", input, other)


@rule()
def logical_or(input: Any, other: Any) -> Any:
    return expr.node("or", input, other)


@rule()
def logical_xor(input: Any, other: Any) -> Any:
    return expr.node("ne", input != 0, other != 0)


@rule()
def logical_not(input: Any) -> Any:
    return expr.node("not", input)
