"""Scalar expressions: interned nodes, their operators, and the functions of traced values.

A node is a primitive (`primitives`) of other nodes; a graph of them serves every back end (`graph`) and has
derivatives (`derivatives`). Every node is a number of type `acc_t` or a truth value; storage types appear
only at loads, stores and explicit casts.

The one thing that is not a scalar is the row: `row_sum` and `row_max` of an expression are one value
for all elements of a row, and so is everything computed from such values alone (`Expr.uniform`).

Limits: no loops, no simplifier.
"""

from __future__ import annotations

import builtins
import math
import numbers
import operator
import re
from collections.abc import Callable
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import numpy as np

from fusionrt import forks
from fusionrt.dtypes import name_of
from fusionrt.primitives import CASTS, PRIMITIVES, Primitive

Leaf = str
Function = Callable[..., "Expr"]


class TraceError(TypeError):
    """A function given to `fuse` does something that cannot become one kernel."""


class Expr:
    """A node: the name of a primitive and its operands. Equal nodes are the same object."""

    __slots__ = ("__weakref__", "args", "op", "uniform")

    def __init__(self, op: str, args: tuple[Expr | Leaf, ...]) -> None:
        self.op, self.args = op, args
        # The same for every element of a row, as far as that is known without shapes.
        known = PRIMITIVES[op].uniform
        self.uniform: bool = known if known is not None else (
            len(args) > 1 if op == "arg" else all(isinstance(a, Expr) and a.uniform for a in args))

    __hash__ = object.__hash__

    @property
    def primitive(self) -> Primitive:
        return PRIMITIVES[self.op]

    @property
    def is_truth(self) -> bool:
        return PRIMITIVES[self.op].is_truth

    def __add__(self, other: Any) -> Expr: return node("add", self, other)
    def __sub__(self, other: Any) -> Expr: return node("sub", self, other)
    def __mul__(self, other: Any) -> Expr: return node("mul", self, other)
    def __truediv__(self, other: Any) -> Expr: return node("div", self, other)
    def __radd__(self, other: Any) -> Expr: return node("add", other, self)
    def __rsub__(self, other: Any) -> Expr: return node("sub", other, self)
    def __rmul__(self, other: Any) -> Expr: return node("mul", other, self)
    def __rtruediv__(self, other: Any) -> Expr: return node("div", other, self)
    def __rpow__(self, other: Any) -> Expr: return power(other, self)
    def __pow__(self, other: Any) -> Expr: return power(self, other)
    def __neg__(self) -> Expr: return node("neg", self)
    def __pos__(self) -> Expr: return self
    def __abs__(self) -> Expr: return node("abs", self)
    def __floor__(self) -> Expr: return node("floor", self)
    def __lt__(self, other: Any) -> Expr: return node("lt", self, other)
    def __le__(self, other: Any) -> Expr: return node("le", self, other)
    def __gt__(self, other: Any) -> Expr: return node("lt", other, self)
    def __ge__(self, other: Any) -> Expr: return node("le", other, self)
    def __eq__(self, other: object) -> Expr: return node("eq", self, other)  # type: ignore[override]
    def __ne__(self, other: object) -> Expr: return node("ne", self, other)  # type: ignore[override]
    def __and__(self, other: Any) -> Expr: return _joined("&", self, other)
    def __or__(self, other: Any) -> Expr: return _joined("|", self, other)
    def __rand__(self, other: Any) -> Expr: return _joined("&", other, self)
    def __ror__(self, other: Any) -> Expr: return _joined("|", other, self)
    def __invert__(self) -> Expr: return _joined("~", self)
    def __trunc__(self) -> Expr: return node("trunc", self)
    def __ceil__(self) -> Expr: return -node("floor", -self)
    def __floordiv__(self, other: Any) -> NoReturn: raise TraceError(_WRITE["//"])
    def __mod__(self, other: Any) -> NoReturn: raise TraceError(_WRITE["%"])
    def __xor__(self, other: Any) -> NoReturn: raise TraceError(_WRITE["^"])
    def __matmul__(self, other: Any) -> NoReturn: raise TraceError(_WRITE["@"])
    def __lshift__(self, other: Any) -> NoReturn: raise TraceError(_WRITE["<<"])
    def __rshift__(self, other: Any) -> NoReturn: raise TraceError(_WRITE["<<"])
    def __len__(self) -> NoReturn: raise TraceError(_WRITE["len"])
    __rfloordiv__, __rmod__, __rxor__ = __floordiv__, __mod__, __xor__
    __divmod__ = __rdivmod__ = __floordiv__

    def __round__(self, ndigits: int | None = None) -> Expr:
        if ndigits is not None:
            raise TraceError("round(x, n) is not supported: write round(x * 10**n) / 10**n")
        return node("round", self)

    def __bool__(self) -> NoReturn:
        raise TraceError("a condition on a traced value (if, and, or, min, max, chained comparison) "
                         "cannot be decided while tracing: write where(condition, a, b), &, |, ~, "
                         "minimum(a, b) or maximum(a, b)")

    def __iter__(self) -> NoReturn:
        raise TraceError("a traced value is one scalar and cannot be looped over: the function is "
                         "applied to every element already")

    def __getitem__(self, index: object) -> NoReturn:
        raise TraceError("a traced value is one scalar and cannot be indexed: pass the part of the "
                         "tensor that you need as an argument of its own")

    def __float__(self) -> NoReturn:
        raise TraceError("a traced value has no number yet: write fusionrt.exp(x), not math.exp(x); "
                         "cast(x, 'int32'), not int(x)")

    __int__ = __index__ = __complex__ = __float__

    def __getattr__(self, name: str) -> Any:
        """A method of torch's, or an error."""
        if name.startswith("__"):  # let Python probe for protocols
            raise AttributeError(name)
        from fusionrt import torch_calls  # which stands above the ops, and is needed for torch's names alone

        return torch_calls.method(self, name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Expr:
        """`torch.exp(x)` in a traced function means our `exp(x)`, and `F.silu(x)` our `silu(x)`."""
        from fusionrt import torch_calls

        return torch_calls.function(func, args, kwargs or {})

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> NoReturn:
        known = func.__name__ in PRIMITIVES
        raise TraceError(f"numpy.{func.__name__} cannot be traced: write "
                         + (f"fusionrt.{func.__name__}" if known else "functions of fusionrt"))

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
        """Numpy's scalars ask here for their operators: `np.float32(2) * x`."""
        name = ufunc.__name__
        if name not in _OF_NUMPY or method != "__call__" or options:
            raise TraceError(f"numpy.{name} cannot be traced: write the function of fusionrt")
        return _OF_NUMPY[name](*(a if isinstance(a, Expr) else _number(name, a) for a in operands))


_OF_NUMPY: dict[str, Callable[..., Any]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv,
    "power": operator.pow, "less": operator.lt, "less_equal": operator.le, "greater": operator.gt,
    "greater_equal": operator.ge, "equal": operator.eq, "not_equal": operator.ne,
    "bitwise_and": operator.and_, "bitwise_or": operator.or_, "bitwise_xor": operator.xor,
    "floor_divide": operator.floordiv, "remainder": operator.mod, "divmod": divmod}
_WRITE = {"//": "x // y cannot be fused: write floor(x / y)",
          "%": "x % y cannot be fused: write x - y * floor(x / y)",
          "^": "x ^ y cannot be fused: of conditions write a != b",
          "@": "x @ y cannot be fused: a traced value is one scalar; call torch.matmul outside",
          "<<": "shifts cannot be fused: write x * 2**n, or floor(x / 2**n)",
          "len": "a traced value is one scalar and has no length: pass the size as an argument of its own"}
# What to call outside of a fused function, where it is not torch's function of the same name.
_OF_TENSORS = {"cast": "torch.Tensor.to", "normcdf": "torch.special.ndtr",
               "normpdf": "fusionrt.fuse(lambda x: fusionrt.normpdf(x))"}
_interned: WeakValueDictionary[tuple[Any, ...], Expr] = WeakValueDictionary()
_interning = forks.Lock()


def node(op: str, *operands: Any) -> Expr:
    """Build an interned node: equal subexpressions are one object, so they are computed once."""
    primitive = PRIMITIVES[op]
    args = operands if primitive.is_leaf else tuple(
        _operand(op, a, i in primitive.truths) for i, a in enumerate(operands))
    key = (op, args)
    found = _interned.get(key)
    if found is None:
        with _interning():  # one for all threads: derivatives are found by identity
            found = _interned.get(key)
            if found is None:
                found = _interned[key] = Expr(op, args)
    return found


def _operand(op: str, value: Any, truth: bool) -> Expr:
    if not isinstance(value, Expr):
        try:
            value = node("const", repr(float(_number(op, value))))
        except OverflowError:
            raise TraceError(f"{op}: an operand is a number beyond those of float64") from None
    if truth and not value.is_truth:
        return node("ne", value, 0)
    if value.is_truth and not truth:
        return node("number", value)
    return value


def _plain(value: Any) -> Any:
    """Python's own number of numpy's scalars, of which numpy makes arrays to compare them."""
    return value.item() if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0 else value


def _number(op: str, value: Any) -> numbers.Real:
    number = _plain(value)
    if not isinstance(number, numbers.Real):
        raise TraceError(f"{op}: operand {type(value).__name__} is neither a traced value nor a "
                         "number: a tensor must be an argument of the fused function, not "
                         "captured by closure (outside of one, torch's own functions take tensors)")
    return number


def _check_traced(name: str, *operands: Any) -> None:
    """A public function was called by this name, which an error has to say, not what it is made of."""
    if any(isinstance(a, Expr) for a in operands):
        return
    for a in operands:
        if not isinstance(_plain(a), (numbers.Real, type(None))):
            raise TraceError(f"{name}: works on traced values, in a fused function, got {type(a).__name__}: "
                             f"call {_OF_TENSORS.get(name, f'torch.{name}')} on tensors; one that a fused "
                             "function needs must be an argument of it")


def _joined(sign: str, *operands: Any) -> Expr:
    return node({"&": "and", "|": "or", "~": "not"}[sign], *(_condition(sign, value) for value in operands))


def _condition(sign: str, value: Any) -> Any:
    """What may be joined: in torch the same signs join the bits of integers."""
    if isinstance(value, Expr):
        if value.op == "arg":  # a call will tell
            return node("flag", value, 0)
        of_conditions = value.op == "where" and {a.op for a in value.args[1:]} == {"number"}  # type: ignore
        if not (value.is_truth or value.op == "cast_bool" or of_conditions):
            raise TraceError(f"{sign} joins conditions, got a number: write x != 0; bits cannot be fused")
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        raise TraceError(f"{sign} joins conditions, got the number {value!r}: bits cannot be fused")
    return value


def argument(name: str, uniform: bool = False) -> Expr:
    """`uniform`: a number, or a tensor with one value a row."""
    return node("arg", name, "row") if uniform else node("arg", name)


def random_bits(stream: int) -> Expr:
    """32 bits of which the upper 16 are random: one draw per element and stream."""
    return node("random", f"random{stream}")


def row_sum(a: Any) -> Expr:
    return node("row_sum", a)


def row_mean(a: Any) -> Expr:
    return row_sum(a) / node("row_size", "row_size")


def _function(op: str) -> Callable[..., Expr]:
    takes = len({int(n or k) for k, n in enumerate(re.findall(r"{(\d*)}", PRIMITIVES[op].text))})

    def apply(*operands: Any, **options: Any) -> Expr:
        _check_traced(op, *operands)
        if options or len(operands) != takes:
            named = [k for k, v in options.items() if isinstance(v, Expr)]
            if named:
                raise TraceError(f"{op} takes operands by position in a fused function, got "
                                 f"{' and '.join(named)} by name")
            got = [str(len(operands)), *(f"{k}={v!r}" for k, v in options.items())]
            raise TraceError(f"{op} takes {takes} operand{'s' * (takes > 1)} in a fused function, got "
                             f"{' and '.join(got)}")
        return node(op, *operands)

    apply.__name__ = op
    apply.__qualname__ = f"{op}_" if hasattr(builtins, op) else op  # as pickle finds it here
    apply.__doc__ = f"{op} of traced values, in a fused function."
    return apply


where: Function = _function("where")
minimum: Function = _function("minimum")
maximum: Function = _function("maximum")
relu: Function = _function("relu")
exp: Function = _function("exp")
exp2: Function = _function("exp2")
expm1: Function = _function("expm1")
log: Function = _function("log")
log1p: Function = _function("log1p")
log2: Function = _function("log2")
sqrt: Function = _function("sqrt")
rsqrt: Function = _function("rsqrt")
sin: Function = _function("sin")
cos: Function = _function("cos")
tanh: Function = _function("tanh")
erf: Function = _function("erf")
sigmoid: Function = _function("sigmoid")
softplus: Function = _function("softplus")
normcdf: Function = _function("normcdf")
normpdf: Function = _function("normpdf")
floor: Function = _function("floor")
round_: Function = _function("round")
trunc: Function = _function("trunc")
abs_: Function = _function("abs")
pow_: Function = _function("pow")
reciprocal: Function = _function("reciprocal")
near_reciprocal: Function = _function("near_reciprocal")


def tanh_softplus(a: Any) -> Expr:
    """tanh(log(1 + e^a)) = n / (n + 2) with n = e^a (e^a + 2); beyond 20 it is 1 in double precision.

    With s = e^a / 2 + 1, r = 1 / (e^a s + 1) and u = e^a r it is u s, and its slope u (u + r): few products,
    and no cancellation.
    """
    e = exp(where(20 <= a, 20, a))
    s = 0.5 * e + 1
    r = near_reciprocal(e * s + 1)
    return node("tanh_softplus", a, s, e * r, r)


def clamp(x: Any, min: Any = None, max: Any = None) -> Expr:
    """x, but not below `min` and not above `max`; either may be None. NaN passes. What lies on a bound has a
    gradient of 1, as in torch before 2.14."""
    _check_traced("clamp", x, min, max)
    if min is None and max is None:
        raise TraceError("clamp needs min or max")
    return node("clamp", x, -math.inf if min is None else min, math.inf if max is None else max)


def power(base: Any, exponent: Any) -> Expr:
    """base ** exponent; small constant exponents become products."""
    _check_traced("pow", base, exponent)
    if isinstance(exponent, numbers.Real):
        match float(exponent):
            case 0.0:  # of the base, for it has a derivative, 0
                return where((base == base) | (base != base), 1, base)
            case 1.0:
                return +base if not base.is_truth else node("number", base)
            case 0.5:
                return sqrt(base)
            case -0.5:
                return rsqrt(base)
            case -1.0:
                return reciprocal(base)
            case 2.0:
                return node("mul", base, base)
            case 3.0:
                return node("mul", node("mul", base, base), base)
    return pow_(base, exponent)


def cast(value: Any, dtype: object) -> Expr:
    """Convert to a storage dtype, by name, torch's or NumPy's: float16, bfloat16, float32, int8, uint8,
    int16, int32, int64 or bool. To integers: toward zero, saturating, NaN becomes 0."""
    _check_traced("cast", value)
    name = name_of(dtype)
    if name == "float64":  # the arithmetic of a kernel has one type, which its operands decide
        raise TraceError("cast: float64 is no dtype to cast to, as operands decide what a kernel computes "
                         "in: pass tensors of float64, or convert the result outside of the fused function")
    if name not in CASTS:
        raise TraceError(f"cast: dtype {name!r} is not one of {', '.join(CASTS)}")
    return node(f"cast_{name}", value)
