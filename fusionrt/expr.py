"""Scalar expressions: a graph of interned nodes, a table of primitives, reverse-mode derivatives, text.

One graph serves every back end. The emitted statements are valid in C++ and in Python alike:
`acc_t`, `where`, `exp`, ... are defined by `kernels_src/prelude.cuh` on one side and by
`fusionrt/cpu/math32.py` on the other. Every node is a number of type `acc_t` or a truth value;
storage types appear only at loads, stores and explicit casts.

The one thing that is not a scalar is the row: `row_sum` and `row_max` of an expression are one value
for all elements of a row, and so is everything computed from such values alone (`Expr.uniform`).

Limits: no loops, no simplifier.
"""

from __future__ import annotations

import builtins
import functools
import math
import numbers
import operator
import re
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from fusionrt import forks, op_names

Leaf = str
Function = Callable[..., "Expr"]
Analysis = TypeVar("Analysis", bound=Callable[..., Any])
CASTS = ("float16", "bfloat16", "float32", "int8", "uint8", "int16", "int32", "int64", "bool")
_INTEGER_CASTS = frozenset(CASTS[3:])


class TraceError(TypeError):
    """A function given to `fuse` does something that cannot become one kernel."""


class Expr:
    """A node: the name of a primitive and its operands. Equal nodes are the same object."""

    __slots__ = ("__weakref__", "args", "op", "uniform")

    def __init__(self, op: str, args: tuple[Expr | Leaf, ...]) -> None:
        self.op, self.args = op, args
        # The same for every element of a row, as far as that is known without shapes.
        self.uniform: bool = op in _UNIFORM or (op not in _VARYING and (
            len(args) > 1 if op == "arg" else all(isinstance(a, Expr) and a.uniform for a in args)))

    __hash__ = object.__hash__

    @property
    def is_truth(self) -> bool:
        return self.op in _TRUTH

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

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # let Python probe for protocols
            raise AttributeError(name)
        raise TraceError(f"a traced value is one scalar and has no attribute {name!r}: write "
                         "functions and operators; reductions and reshapes stay outside fuse")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Expr:
        """`torch.exp(x)` in a traced function means our `exp(x)`, and `F.silu(x)` our `silu(x)`."""
        name = _TORCH_NAMES.get(func.__name__, func.__name__)
        if not all(isinstance(a, (Expr, numbers.Real, type(None))) for a in args):
            raise TraceError(f"{func.__name__}: a tensor is captured by closure: make it an argument "
                             "of the fused function")
        options = {k: v for k, v in (kwargs or {}).items() if v is not None
                   and (k not in _TORCH_DEFAULTS or v != _TORCH_DEFAULTS[k])}
        if options.get("inplace"):
            raise TraceError(f"{name}: a traced value cannot be changed in place: leave inplace out")
        if options.get("approximate") == "tanh":
            name, options = f"{name}_tanh", {}
        if name in ACTIVATIONS:
            return getattr(op_names.load(name), name)(*args, **options)
        if name not in FUNCTIONS:
            raise TraceError(f"torch.{func.__name__} cannot be fused: known are "
                             + ", ".join(sorted({*FUNCTIONS, *ACTIVATIONS})))
        return FUNCTIONS[name](*args, **options)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> NoReturn:
        known = func.__name__ in FUNCTIONS
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
_interned: WeakValueDictionary[tuple[Any, ...], Expr] = WeakValueDictionary()
_interning = forks.Lock(threading.RLock)


def node(op: str, *operands: Any) -> Expr:
    """Build an interned node: equal subexpressions are one object, so they are computed once."""
    wants_truth = _TRUTH_OPERANDS.get(op, ())
    args = operands if op in _LEAVES else tuple(
        _operand(op, a, i in wants_truth) for i, a in enumerate(operands))
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


def _number(op: str, value: Any) -> numbers.Real:
    """Python's own, also of numpy's scalars, of which numpy makes arrays to compare them."""
    number = value.item() if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0 else value
    if not isinstance(number, numbers.Real):
        raise TraceError(f"{op}: operand {type(value).__name__} is neither a traced value nor a "
                         "number: a tensor must be an argument of the fused function, not "
                         "captured by closure (outside of one, torch's own functions take tensors)")
    return number


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


# name: (spelling in C++ and Python,
#        vector-Jacobian product (g, out, *operands) -> one gradient, or None for zero, per operand)
PRIMITIVES: dict[str, tuple[str, Callable[..., tuple[Expr | None, ...]]]] = {
    "add": ("{} + {}", lambda g, out, a, b: (g, g)),
    "sub": ("{} - {}", lambda g, out, a, b: (g, -g)),
    "mul": ("{} * {}", lambda g, out, a, b: (g * b, g * a)),
    "mul_rn": ("mul_rn({}, {})", lambda g, out, a, b: (g * b, g * a)),  # never contracted to an FMA
    "div": ("div({}, {})", lambda g, out, a, b: (g / b, -(g * (out / b)))),
    "reciprocal": ("reciprocal({})", lambda g, out, a: (-g * (out * out),)),
    # 1 / a for 2^-126 < |a| < 2^126: what is out of range need not be looked after.
    "near_reciprocal": ("near_reciprocal({})", lambda g, out, a: (-g * (out * out),)),
    "neg": ("-{}", lambda g, out, a: (-g,)),
    "lt": ("{} < {}", lambda *_: (None, None)),
    "le": ("{} <= {}", lambda *_: (None, None)),
    "eq": ("{} == {}", lambda *_: (None, None)),
    "ne": ("{} != {}", lambda *_: (None, None)),
    "flag": ("{} != {}", lambda *_: (None, None)),  # of an argument that has to be bool, and 0
    "and": ("{} & {}", lambda *_: (None, None)),
    "or": ("{} | {}", lambda *_: (None, None)),
    "not": ("logical_not({})", lambda *_: (None,)),
    "number": ("acc_t({})", lambda *_: (None,)),
    "where": ("where({}, {}, {})",
              lambda g, out, c, a, b: (None, where(c, g, 0), where(c, 0, g))),
    # A primitive, so that its derivative can be had from the output: 0 at 0, and NaN passes.
    "relu": ("where({0} <= acc_t(0), acc_t(0), {0})", lambda g, out, a: (where(out <= 0, 0, g),)),
    # With dropout after it: what is dropped is 0 too, so the derivative needs no mask. `scale` is a number.
    "relu_dropped": ("where({1}, where({0} <= acc_t(0), acc_t(0), {0}) * {2}, acc_t(0))",
                     lambda g, out, a, kept, scale: (where(out <= 0, 0, g * scale), None, None)),
    # Between two numbers. NaN passes and has a gradient of 0; so have the ends, which `clamp` lets pass.
    "hardtanh": ("where({0} <= {1}, {1}, where({0} >= {2}, {2}, {0}))",
                 lambda g, out, a, lo, hi: (where(lo < a, where(a < hi, g, 0), 0), None, None)),
    # A primitive, so that at 0 its slope is alpha and the slope of that is 0, as torch's.
    "elu": ("where({0} > acc_t(0), {0}, {1} * expm1(where({0} > acc_t(0), acc_t(0), {0})))",
            lambda g, out, a, alpha: (where(0 < a, g, g * (alpha * exp(where(0 <= a, 0, a)))),
                                      where(0 < a, 0, g * expm1(where(0 < a, 0, a))))),
    # Ties share the gradient and NaN lets it pass, as torch.minimum does.
    "minimum": ("minimum({}, {})",
                lambda g, out, a, b: (_picked(g, a == b, b < a), _picked(g, a == b, a < b))),
    "maximum": ("maximum({}, {})",
                lambda g, out, a, b: (_picked(g, a == b, a < b), _picked(g, a == b, b < a))),
    "clamp": ("minimum(maximum({}, {}), {})",
              lambda g, out, a, lo, hi: (where((lo <= a) & (a <= hi), g, 0),
                                         where((a < lo) & (lo < hi), g, 0),
                                         where((hi < a) | (hi < lo), g, 0))),
    "abs": ("abs_({})", lambda g, out, a: (where(a < 0, -g, where(0 < a, g, 0)),)),
    "exp": ("exp({})", lambda g, out, a: (g * out,)),
    "exp2": ("exp2({})", lambda g, out, a: (g * (out * math.log(2)),)),
    "expm1": ("expm1({})", lambda g, out, a: (g * exp(a),)),  # out + 1 cancels
    "log": ("log({})", lambda g, out, a: (g / a,)),
    "log1p": ("log1p({})", lambda g, out, a: (g / (1 + a),)),
    "log2": ("log2({})", lambda g, out, a: (g / (a * math.log(2)),)),
    "sqrt": ("sqrt({})", lambda g, out, a: (g / (2 * out),)),
    # Of norms and deviations: its derivative follows from the result, where the square may leave the range,
    # and is 0 at 0, as torch's.
    "root": ("sqrt({})", lambda g, out, a: (where(out == 0, 0, g) / (2 * where(out == 0, 1, out)),)),
    "rsqrt": ("rsqrt({})", lambda g, out, a: (-0.5 * g * (out * out * out),)),
    "pow": ("pow_({}, {})",
            lambda g, out, a, b: (g * (b * _lower_power(a, b)),
                                  g * (out * log(where((a == 0) & (0 <= b), 1, a))))),
    "sin": ("sin({})", lambda g, out, a: (g * cos(a),)),
    "cos": ("cos({})", lambda g, out, a: (-g * sin(a),)),
    "tanh": ("tanh({})", lambda g, out, a: (g * (1 - out * out),)),
    "erf": ("erf({})", lambda g, out, a: (g * (2 / math.sqrt(math.pi) * exp(-a * a)),)),
    "sigmoid": ("sigmoid({})",
                lambda g, out, a: (g * (out * node("sigmoid_complement", a, out)),)),
    # 1 - sigmoid(a), given both; a function of a alone.
    "sigmoid_complement": ("sigmoid_complement({}, {})", lambda g, out, a, s: (-g * (s * out), None)),
    "softplus": ("softplus({})", lambda g, out, a: (g * sigmoid(a),)),
    # Of a alone; the others are parts of `tanh_softplus`, of which the slope needs two as well.
    "tanh_softplus": ("{2} * {1}", lambda g, out, a, s, u, r: (g * where(20 <= a, 0, u * (u + r)),
                                                               None, None, None)),
    "normcdf": ("normcdf({})", lambda g, out, a: (g * normpdf(a),)),
    "normpdf": ("normpdf({})", lambda g, out, a: (-g * (a * out),)),
    "floor": ("floor({})", lambda *_: (None,)),
    "round": ("rint({})", lambda *_: (None,)),
    "trunc": ("trunc({})", lambda *_: (None,)),
    "round_near": ("rint_near({})", lambda *_: (None,)),  # round, for |a| < 2^21
    "kept": ("kept({}, {})", lambda *_: (None, None)),
    # Rows: a value over all elements of a row.
    "row_sum": ("row_sum({})", lambda g, out, a: (g,)),
    "row_max": ("row_max({})",
                # A product, not a choice: of a row with NaN, which none equals, it is NaN.
                lambda g, out, a: (node("number", a == out) * (g / row_sum(node("number", a == out))),)),
    "row_first": ("row_first({})", lambda *_: (None,)),  # where the first maximum stands
    "total": ("total({})", lambda *_: (None,)),  # of one value a row, over all rows
    # Mean, and the sum of the squares of the distances from it, which a kernel finds together.
    "moment_mean": ("moment_mean({})", lambda g, out, a: (g / node("row_size", "row_size"),)),
    "moment_squares": ("moment_squares({}, {})", lambda g, out, a, mean: (2 * g * (a - mean), None)),
    # A maximum on which the result does not depend: that of a softmax, whose derivative cancels.
    "row_top": ("row_max({})", lambda *_: (None,)),
    # The value of argument a in the column that is given, 0 outside of the row.
    "taken": ("taken({}, {})", lambda g, out, a, column: (where(node("is_column", column), g, 0), None)),
    "is_column": ("is_column({})", lambda *_: (None,)),
    "up_to_column": ("up_to_column({})", lambda *_: (None,)),  # this column <= the given one
    # Of x alone: mean and rstd are its (x - mean)'s and their derivatives are in the first operand's.
    # Differences first, so that those of equal gradients are 0; what is uniform is multiplied by itself.
    "standardized": ("({} - {}) * {}", lambda g, out, x, mean, rstd: (
        (g - row_mean(g)) * rstd - (x - mean) * (rstd * rstd * row_mean(g * out)), None, None)),
    "rms_scaled": ("{} * {}", lambda g, out, x, rstd: (
        g * rstd - x * (rstd * rstd * row_mean(g * out)), None)),
    # For a softmax, whose gradient is 0 where its result is: not to read the mask again.
    "masked": ("where({1}, {0}, {2})", lambda g, out, a, passed, low: (g, None, None)),
    # exp(x - max) / sum, and its logarithm x - max - log(sum): of x alone as well.
    "softmaxed": ("softmaxed({}, {}, {})", lambda g, out, x, most, scale: (
        out * (g - row_sum(g * out)), None, None)),
    "log_softmaxed": ("({} - {}) - {}", lambda g, out, x, most, log_total: (
        g - exp(out) * row_sum(g), None, None)),
    **{f"cast_{t}": (f"cast_{t}({{}})",
                     (lambda *_: (None,)) if t in _INTEGER_CASTS else (lambda g, out, a: (g,)))
       for t in CASTS},
}
_TRUTH = frozenset({"lt", "le", "eq", "ne", "flag", "and", "or", "not", "kept", "is_column", "up_to_column",
                    "mask"})
_TRUTH_OPERANDS = {"and": (0, 1), "or": (0, 1), "not": (0,), "where": (0,), "number": (0,), "masked": (1,),
                   "relu_dropped": (1,)}
_LEAVES = frozenset({"arg", "random", "mask", "const", "row_size"})
REDUCTIONS = ("row_sum", "row_max", "row_first", "row_top", "moment_mean", "moment_squares")
_UNIFORM = frozenset({*REDUCTIONS, "total", "taken", "const", "row_size"})
_VARYING = frozenset({"random", "mask", "is_column", "up_to_column"})
BY_COLUMN = frozenset({"taken", "is_column", "up_to_column"})
OF_ROWS = frozenset({*REDUCTIONS, *BY_COLUMN, "row_size"})
# Neither language has names for these.
_NOT_FINITE = {"inf": "div(acc_t(1.0), acc_t(0.0))", "-inf": "div(acc_t(-1.0), acc_t(0.0))",
               "nan": "div(acc_t(0.0), acc_t(0.0))"}


def row_sum(a: Any) -> Expr:
    return node("row_sum", a)


def row_mean(a: Any) -> Expr:
    return row_sum(a) / node("row_size", "row_size")


def _picked(g: Expr, tie: Expr, loses: Expr) -> Expr:
    return where(loses, 0, where(tie, 0.5 * g, g))


def _lower_power(a: Expr, b: Expr) -> Expr:
    """a ** (b - 1), as finite as it is times b."""
    if b.op == "const" and float(str(b.args[0])) != 0:
        return power(a, float(str(b.args[0])) - 1)  # often a product or a root
    # What would be infinite beside a 0 (of a reciprocal beyond float32 too) is of base 1: a choice afterwards
    # has derivatives of 0 times that.
    return pow_(where((b == 0) & ~(abs_(a) > 3e-39), 1, a), b - 1)


def _function(op: str) -> Callable[..., Expr]:
    takes = len({int(n or k) for k, n in enumerate(re.findall(r"{(\d*)}", PRIMITIVES[op][0]))})

    def apply(*operands: Any, **options: Any) -> Expr:
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
    if min is None and max is None:
        raise TraceError("clamp needs min or max")
    return node("clamp", x, -math.inf if min is None else min, math.inf if max is None else max)


def _hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0) -> Expr:
    return node("hardtanh", x, min_val, max_val)


def power(base: Any, exponent: Any) -> Expr:
    """base ** exponent; small constant exponents become products."""
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
    """Convert to a storage dtype, by name or torch's: float16, bfloat16, float32, int8, uint8, int16, int32,
    int64 or bool. To integers: toward zero, saturating, NaN becomes 0."""
    name = str(dtype).removeprefix("torch.")
    if name not in CASTS:
        raise TraceError(f"cast: dtype {name!r} is not one of {', '.join(CASTS)}")
    return node(f"cast_{name}", value)


FUNCTIONS: dict[str, Callable[..., Expr]] = {
    "where": where, "minimum": minimum, "maximum": maximum, "clamp": clamp, "abs": abs_,
    "exp": exp, "exp2": exp2, "expm1": expm1, "log": log, "log1p": log1p, "log2": log2,
    "sqrt": sqrt, "rsqrt": rsqrt, "pow": power, "sin": sin, "cos": cos, "tanh": tanh, "erf": erf,
    "sigmoid": sigmoid, "softplus": softplus, "normcdf": normcdf, "normpdf": normpdf,
    "relu": relu, "floor": floor, "round": round_, "trunc": trunc, "cast": cast, "reciprocal": reciprocal,
    "hardtanh": _hardtanh,
    **{op: _function(op) for op in ("add", "sub", "mul", "div", "neg", "lt", "le", "eq", "ne")},
}
_TORCH_NAMES = {"absolute": "abs", "true_divide": "div", "multiply": "mul", "subtract": "sub",
                "divide": "div", "negative": "neg", "clip": "clamp"}
_TORCH_DEFAULTS = {"alpha": 1, "decimals": 0, "inplace": False, "approximate": "none"}
ACTIVATIONS = op_names.OPS["activations"]


def of_roots(analysis: Analysis) -> Analysis:
    """What follows from expressions is found once: each new shape asks for all of it."""
    found = functools.lru_cache(1024)(analysis)
    asked: Any = functools.wraps(analysis)(lambda roots, *more: found(tuple(roots), *more))
    return asked


def toposort(roots: Iterable[Expr], given: Container[Expr] = ()) -> Sequence[Expr]:
    """Every node that the roots need beside the given ones, operands first."""
    return _sorted(roots, given) if given else _sorted_once(roots)


def _sorted(roots: Iterable[Expr], given: Container[Expr] = ()) -> tuple[Expr, ...]:
    order: dict[Expr, None] = {}
    pending = list(roots)[::-1]
    while pending:  # not by recursion: a loop that a function unrolls makes long chains
        n = pending[-1]
        operands = [] if n in order or n in given else [
            a for a in n.args if isinstance(a, Expr) and a not in order and a not in given]
        if operands:
            pending += operands[::-1]
            continue
        pending.pop()
        if n not in given:
            order.setdefault(n)
    return tuple(order)


_sorted_once = of_roots(_sorted)


@of_roots
def leaves(roots: Sequence[Expr], op: str) -> Sequence[str]:
    """Names of the arguments (`arg`), random streams (`random`) or masks (`mask`) that the roots really
    need."""
    return tuple(str(n.args[0]) for n in toposort(roots) if n.op == op)


class _Ungraded:
    """What no gradient goes through: truth values and integers."""

    def __contains__(self, n: Any) -> bool:
        return n.is_truth or n.op.startswith(("cast_int", "cast_uint", "cast_bool"))


UNGRADED = _Ungraded()


def substitute(roots: Iterable[Expr], replacement: Mapping[Expr, Expr]) -> list[Expr]:
    """The same expressions with some nodes replaced."""
    made: dict[Expr, Expr] = dict(replacement)
    for n in toposort(roots):
        if n not in made:
            made[n] = n if n.op in _LEAVES else node(n.op, *(made[a] for a in n.args if isinstance(a, Expr)))
    return [made[r] for r in roots]


def through_output(root: Expr, output: Expr) -> dict[Expr, Expr]:
    """What to substitute so that a derivative reads the value of `root` instead of computing it."""
    replacement = {root: output}
    if root.op == "sigmoid":
        replacement[node("sigmoid_complement", root.args[0], root)] = 1 - output
    return replacement


def gradients(seeds: Mapping[Expr, Expr], wrt: Sequence[Expr]) -> list[Expr]:
    """Reverse-mode derivative: `seeds` gives the incoming gradient of each output."""
    grads = {n: row_sum(g) if n.uniform and not g.uniform else g for n, g in seeds.items()}
    for n in reversed(toposort(seeds)):
        if n not in grads or n.op in _LEAVES:
            continue
        for a, g in zip(n.args, PRIMITIVES[n.op][1](grads[n], n, *n.args), strict=True):
            if g is not None and isinstance(a, Expr) and a.op != "const":
                g = row_sum(g) if a.uniform and not g.uniform else g
                grads[a] = grads[a] + g if a in grads else g
    return [grads.get(v, node("const", "0.0")) for v in wrt]


def emit(roots: Sequence[Expr], declare: str, given: Mapping[Expr, str] | None = None, stem: str = "t"
         ) -> tuple[list[str], list[str]]:
    """One assignment a node, in dependency order: (statements, names of the roots).

    `declare` is the form of an assignment: `"{} = {}"`, or `"const auto {} = {};"`; `given` names what
    has been computed; `stem` begins the names that are made here.
    """
    names: dict[Expr, str] = dict(given or {})
    lines: list[str] = []
    for n in toposort(roots, names):
        if n.op in ("arg", "random", "mask", "row_size"):
            names[n] = str(n.args[0])
        elif n.op == "const":
            names[n] = _NOT_FINITE.get(str(n.args[0]), f"acc_t({n.args[0]})")
        else:
            names[n] = f"{stem}{len(lines)}"
            operands = (names[a] for a in n.args if isinstance(a, Expr))
            lines.append(declare.format(names[n], PRIMITIVES[n.op][0].format(*operands)))
    return lines, [names[r] for r in roots]
