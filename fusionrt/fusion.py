"""`fuse`: a Python function of scalars becomes a function of tensors, in one kernel."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import itertools
import numbers
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast, overload

import torch

from fusionrt import (
    dispatch,
    library,  # noqa: F401  operators need it: see autograd.Dispatched
)
from fusionrt.array import is_foreign
from fusionrt.definition import Target
from fusionrt.expr import Expr, TraceError, argument, node, random_bits, where
from fusionrt.op import Operator

TraceError.__module__ = "fusionrt"


class Fused(Protocol):
    """What `fuse` returns: the function, and ways to insist on a device."""

    __name__: str
    operator: Operator
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def cuda(self, *args: Any, **kwargs: Any) -> Any: ...
    def cpu(self, *args: Any, **kwargs: Any) -> Any: ...


_streams: contextvars.ContextVar[Iterator[int]] = contextvars.ContextVar("streams")


def kept(p: Any) -> Expr:
    """In a fused function: true with probability 1 - p, drawn anew for every element.

    Each call in a function draws its own bits. `p`, from 0 to 1, is taken to the nearest 2^-16; the masks
    come from torch's generator and are recomputed, not stored, for the backward pass.

        where(kept(p), x / (1 - p), 0)      # dropout, of p below 1: `dropout_add` takes any
    """
    if isinstance(p, numbers.Real) and not 0 <= float(p) <= 1:
        raise ValueError(f"kept: p must be a probability in [0, 1], got {p!r}")
    return node("kept", fresh_bits(), p)


def fresh_bits() -> Expr:
    """Random ones that no other draw of the function has that is traced now."""
    try:
        return random_bits(next(_streams.get()))
    except LookupError:
        raise TraceError("kept: only inside a fused function") from None


def dropped(x: Expr, p: Any, scale: Any) -> Expr:
    """In a fused function: dropout of x with probability p, kept values times `scale`."""
    if x.op == "relu":  # whose derivative follows from the result
        return node("relu_dropped", x.args[0], kept(p), scale)
    return where(kept(p), x * scale, 0)


@overload
def fuse(function: Callable[..., Any], /, *, name: str | None = None) -> Fused: ...
@overload
def fuse(*, name: str) -> Callable[[Callable[..., Any]], Fused]: ...


def fuse(function: Callable[..., Any] | None = None, /, *, name: str | None = None) -> Any:
    """Compile a Python function of scalars into one kernel over tensors, with its gradients.

    The function is called once, with traced values instead of numbers. It may use arithmetic,
    comparisons, `&`, `|`, `~` of these and of bool arguments, the functions of this package (`where`, `exp`,
    `erf`, `sigmoid`, `cast`, ...), torch's elementwise functions, methods and modules (`torch.sign(x)`,
    `x.clamp(0, 1)`, `x.to(torch.float16)`, `F.silu(x)`, `torch.nn.GELU()`; of one that is not known the
    error lists those that are), other fused functions, and helpers that do the same.
    It returns one value or a tuple. `name`: what errors and profilers call it, the function's unless given.

    Arguments of the result: torch tensors, CuPy or NumPy arrays (any object with `__dlpack__`) that
    broadcast, of dtype float16, bfloat16, float32, float64, an integer or bool; or Python numbers,
    whose value can change without a recompilation. Results have torch's promoted dtype, bool for
    comparisons, or that of an outermost `cast`; 16-bit types are computed in float32, so are integers beside
    float32 (ids above 2^24 lose bits there); int32 and int64 alone, and what gives integers of 16 bits or
    more, in float64, which has all of 53 bits. Without a floating-point tensor only a `cast` or a comparison
    gives a result; where torch would give integers, or floats of them, a call is a TypeError. Several results
    have one shape, that of all arguments together, and, unless cast, one dtype; of 16 bits, one that others
    follow from is rounded before they do.

    Raises TraceError where the function cannot become one kernel, and says what to write instead;
    TypeError and ValueError name the argument of a call that cannot be served.

        @fusionrt.fuse
        def gate(x, y):
            return fusionrt.sigmoid(x) * y + 0.5 * x
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"fuse: name must be text, got {name!r}")
    if function is None:
        return lambda f: fuse(f, name=name)
    made = fuse_named(function, name or _name_of(function))
    _ = made.operator.outputs  # now, so that what cannot be traced is refused where it is written
    return made


def _name_of(function: Any) -> str:
    """A partial's is that of its function, an object's that of its class."""
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__name__", type(inner).__name__))


def fused(name: str) -> Callable[[Callable[..., Any]], Fused]:
    """As `fuse`, for the package's own functions: to trace them all would take a program, which calls few of
    them, longer than to launch one."""
    return lambda function: fuse_named(function, name)


def fuse_named(function: Callable[..., Any], name: str, target: Target = None) -> Fused:
    """Traced when what it computes is first asked for. `target`: None, or SCALAR for results that are summed
    over all elements."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise TypeError(f"fuse: needs a Python function of scalars, got {function!r}; of what has no "
                        "signature write lambda x: ...") from None
    if not signature.parameters:
        raise TraceError(f"{name}: must have an argument, as its results have the shape of one")
    for p in signature.parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise TraceError(f"{name}: *{p.name} cannot be fused: name each argument")
        if p.default is not p.empty and not isinstance(p.default, numbers.Real):
            raise TraceError(f"{name}: the default of {p.name} must be a number, got {p.default!r}")
    # Defaults as Python's own numbers: no fractions, not NumPy's.
    own = [p if p.default is p.empty or isinstance(p.default, (int, float)) else
           p.replace(default=float(p.default)) for p in signature.parameters.values()]
    signature = signature.replace(parameters=own)
    if not name.isidentifier():
        name = "fused"  # a lambda
    params = list(signature.parameters)
    arguments = [argument(f"a{i}") for i in range(len(params))]
    targets = None if target is None else [target]
    return entry(Operator(name, params, lambda: trace(function, name, arguments, signature), targets),
                 function, signature)


class UnfitError(TypeError):
    """Of an argument that is a function; whoever knows which op was called puts its name in front."""


def trace(function: Callable[..., Any], name: str, args: list[Expr], signature: inspect.Signature
          ) -> tuple[Expr, ...]:
    """Call the function with traced values; what it returns is the expression."""
    keyword = {p.name: a for p, a in zip(signature.parameters.values(), args, strict=True)
               if p.kind is p.KEYWORD_ONLY}
    try:
        with numbering_draws():
            result = function(*args[:len(args) - len(keyword)], **keyword)
    except TraceError as error:
        raise TraceError(f"{name}: {error}") from None
    except UnfitError as error:
        raise TypeError(f"{name}: {error}") from None
    except TypeError as error:
        if not str(error).endswith(f"got {Expr.__name__}"):
            raise
        raise TraceError(f"{name}: {error}: what needs more than one element is called outside of a fused "
                         "function, on its argument or its result") from None
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    if not outputs:
        raise TraceError(f"{name}: must return a traced value, got none")
    for out in outputs:
        if not isinstance(out, (Expr, numbers.Real)):
            captured = isinstance(out, torch.Tensor) or is_foreign(out)
            raise TraceError(f"{name}: must return traced values, got {type(out).__name__}"
                             + (": make it an argument of the fused function" if captured else ""))
    return tuple(out if isinstance(out, Expr) else node("const", repr(float(out))) for out in outputs)


def entry(operator: Operator, function: Callable[..., Any], signature: inspect.Signature) -> Fused:
    params = list(signature.parameters.values())
    names = [p.name for p in params]

    def general(*args: Any) -> Any:
        if any(isinstance(a, Expr) for a in args):
            with _nested():
                bound = dict(zip(names, args, strict=True))
                return function(*(bound[p.name] for p in params if p.kind is not p.KEYWORD_ONLY),
                                **{p.name: bound[p.name] for p in params if p.kind is p.KEYWORD_ONLY})
        return operator(*args)

    made: Any = dispatch.entry(operator, signature, general)
    made.__module__ = getattr(function, "__module__", __name__)
    made.__qualname__ = getattr(function, "__qualname__", operator.name)
    made.__doc__, made.__signature__, made.__wrapped__ = function.__doc__, signature, function
    made.operator, made.function = operator, function
    made.cuda, made.cpu = (on_device(made, operator.name, device) for device in ("CUDA", "CPU"))
    return cast(Fused, made)


@contextlib.contextmanager
def numbering_draws() -> Iterator[None]:
    """For a function that is traced by itself."""
    token = _streams.set(itertools.count())
    try:
        yield
    finally:
        _streams.reset(token)


def _nested() -> contextlib.AbstractContextManager[None]:
    """A fused function inside another goes on with the outer one's numbers."""
    return numbering_draws() if _streams.get(None) is None else contextlib.nullcontext()


def on_device(function: Callable[..., Any], op: str, device: str) -> Callable[..., Any]:
    """`op.cuda` and `op.cpu`: the same function, refusing tensors that are elsewhere."""
    signature = functools.cache(lambda: inspect.signature(function))

    def insist(*args: Any, **kwargs: Any) -> Any:
        for name, value in signature().bind(*args, **kwargs).arguments.items():
            where_it_is = _device_of(value)
            if where_it_is is not None and where_it_is.upper() != device:
                raise TypeError(f"{op}: {name} must be a {device} tensor, got one on {where_it_is}")
        return function(*args, **kwargs)

    insist.__name__, insist.__module__ = f"{op}.{device.lower()}", function.__module__
    insist.__qualname__ = f"{function.__qualname__}.{device.lower()}"  # pickled as attributes are
    insist.__doc__ = f"{op}, refusing tensors that are not on a {device} device."
    return insist


def _device_of(value: Any) -> str | None:
    if isinstance(value, torch.Tensor):
        return value.device.type
    if hasattr(value, "__cuda_array_interface__"):
        return "cuda"
    if hasattr(value, "__array_interface__"):
        return "cpu"
    if hasattr(value, "__dlpack_device__"):
        return {1: "cpu", 2: "cuda"}.get(int(value.__dlpack_device__()[0]), "another device")
    return None
