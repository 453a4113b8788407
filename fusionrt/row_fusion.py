"""From a row expression, a function of traced values, to an operator; one for each way to call an op."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from fusionrt import dispatch, library, settling
from fusionrt.dtypes import as_torchs
from fusionrt.expr import Expr, argument, where
from fusionrt.fusion import UnfitError, fresh_bits, numbering_draws, trace
from fusionrt.graph import substitute, toposort
from fusionrt.op import Operator
from fusionrt.row_op import RowOperator
from fusionrt.steps import Steps

READS_PARTIALS = torch.__version__ >= "2.8"  # whether Dynamo can tell what a partial function is given

Run = Callable[..., Any]
# Any function that works on a traced value: a public op, one made by `fuse`, a plain one of scalars.
Epilogue = Callable[[Any], Any] | None
_made: dict[tuple[Any, ...], Run] = {}


def row_operator(function: Run, params: Sequence[str] = (), *, name: str = "", uniform: Sequence[str] = (),
                 targets: Sequence[Any] | None = None, row_dims: int = 1, like: str = "", **traits: Any
                 ) -> Run:
    """A function of tensors and numbers from a row expression, a function of traced values:

        def rms_norm(x, eps: float, weight=None):
            y, rstd = rms_scale(x, eps)
            return y if weight is None else y * weight, rstd

        row_operator(rms_norm, ("x", "weight", "eps"))(x, weight, 1e-6)

    `params`: the arguments, in the order of calls; those of the expression that are not among them have
    their defaults; all of the expression's unless given. One that is annotated as a float or int is a
    number, and so one value a row; `uniform` names the tensors that have one value a row. `name` is the
    expression's unless given, `like` (the argument whose dtype results have) the first argument. `targets`,
    `row_dims` and `traits` are RowOperator's; without rows (`row_dims` 0) it is an Operator, whose results
    have the promoted dtype.

    Equal expressions give the same object, which lives on: a graph of torch.compile's knows it by number.
    The result's `operator` is the operator.
    """
    of_expression = inspect.signature(function).parameters
    params, name = tuple(params) or tuple(of_expression), name or function.__name__
    signature = inspect.Signature([inspect.Parameter(p, inspect.Parameter.POSITIONAL_OR_KEYWORD,
                                                     annotation=of_expression[p].annotation) for p in params])
    one_a_row = tuple(i for i, p in enumerate(signature.parameters.values())
                      if row_dims and (p.name in uniform or dispatch.is_number(p)))

    def expression(*args: Expr) -> Any:
        return function(**dict(zip(params, args, strict=True)))

    arguments = [argument(f"a{i}", i in one_a_row) for i in range(len(params))]
    outputs = trace(expression, name, arguments, signature)
    traits |= {"row_dims": row_dims, "like": params.index(like) if like else 0}
    key = name, params, outputs, tuple(targets or ()), one_a_row, *sorted(traits.items())
    if key not in _made:
        operator = (RowOperator(name, params, outputs, targets, one_a_row, **traits) if row_dims else
                    Operator(name, params, outputs, targets))
        made: Any = dispatch.entry(operator, signature, operator)
        made.operator = operator
        _made[key] = made
    return _made[key]


def like_sum(x: Any, residual: Any) -> str:
    """Whose dtype results have, for `row_operator`: as torch's sum of both. Those that torch has not are for
    the operator to refuse."""
    dtypes = [as_torchs(t.dtype) for t in (x, residual) if t is not None]
    are_torchs = all(isinstance(dtype, torch.dtype) for dtype in dtypes)
    return "residual" if are_torchs and functools.reduce(torch.promote_types, dtypes) != dtypes[0] else "x"


def as_function(op: str, function: Any, name: str) -> Epilogue:
    """For whoever asks for an operator by it: hence its hash."""
    kind = type(function).__name__
    if function is not None and not callable(function):
        raise TypeError(f"{op}: {name} must be a function of one traced value, got {kind}")
    has_hash = isinstance(function, Hashable)  # by itself: mypy would take a function for no more than that
    if not has_hash:
        raise TypeError(f"{op}: {name} must be hashable, as kernels are known by it, got one of {kind} (of a "
                        "dataclass write frozen=True)")
    return function


def once(function: Run, y: Expr, name: str = "epilogue") -> Any:
    """function(y) of a function that is called once: what it captures is the same in all kernels that it is
    part of, whenever these are made. What it draws is drawn beside all else in the kernel. `name`: of the
    argument that it is."""
    try:
        value, result = _traced(function)
    except TypeError:
        _check_takes_one(function, name)
        raise
    if not isinstance(result, Expr):
        return result
    draws = {n: fresh_bits() for n in toposort([result]) if n.op == "random"}
    return substitute([result], {value: y, **draws})[0]


@functools.lru_cache(1024)
def _traced(function: Run) -> tuple[Expr, Any]:
    value = argument("value")
    with numbering_draws():
        return value, function(value)


def _check_takes_one(function: Run, argument: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a builtin, which tells nothing
        return
    try:
        signature.bind(None)
    except TypeError:
        name = getattr(function, "__name__", type(function).__name__)
        raise UnfitError(f"{argument} must be a function of one traced value, got {name}{signature}"
                         ) from None


def one_value(result: Any, argument: str) -> Expr:
    """What a function has given, if it is what it should."""
    if not isinstance(result, Expr):
        raise UnfitError(f"{argument} must give one traced value, got {type(result).__name__}")
    return result


def finished(y: Expr, epilogue: Epilogue) -> Any:
    """The epilogue of y."""
    if epilogue is None:
        return y
    result = once(epilogue, y)
    if isinstance(result, numbers.Real) or (isinstance(result, Expr) and result.uniform and not y.uniform):
        return where(y == y, result, result)  # of every element, whatever that is
    return one_value(result, "epilogue")


def per_call(make: Run) -> Run:
    """For a function that makes an operator for the flags of a call, which are hashable: makes each once.

        @per_call
        def _operator(params, row_dims, epilogue): ... return row_operator(...)

        _operator(("x", "weight"), 1, relu)(x, weight)
    """
    made = functools.lru_cache(1024)(make)

    def number(*flags: Any) -> int:
        handle: int = made(*flags).operator.handle
        return handle

    # As torch.compiler.assume_constant_result does, whose import takes a second: Dynamo asks for the number
    # while it traces, and puts a call by number into its graph.
    number._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @functools.wraps(make)
    def chosen(*flags: Any) -> Run:
        if torch.compiler.is_dynamo_compiling():
            library.allow()
            return functools.partial(library.call, number(*map(_constant, flags)))
        return made(*flags)

    return chosen


def way_of(run: Run, args: Sequence[Any], params: Sequence[str], given: Sequence[bool],
          told: int | None = None, shape: Sequence[int] | None = None) -> Run:
    """For `Sites` what `run`, an operator's function, does with plain tensors like these and these numbers,
    as a function of `params`, the given ones of which it passes on. `told`: how many of its results are, of
    several; `shape`: in which the one is seen."""
    operator: Operator = run.operator  # type: ignore[attr-defined]
    numbers, way = args[sum(given):], operator.way(args, in_this_mode=True)

    def steps(way: Run) -> Steps:
        made = Steps(len(params))
        passed = [a for a, is_given in zip(made.arguments, given, strict=True) if is_given]
        out = made.call(way, *passed, *numbers)
        if told is not None:
            outs = [made.item(out, k) for k in range(told)]
            out = outs[0] if told == 1 else made.tuple(*outs)
        if shape is not None:
            sizes: Sequence[Any] = shape or [()]  # each for itself: a tuple of them takes 0.7 us longer
            out = made.call(made.get(out, "view"), *sizes)
        made.give(out)
        return made

    return settling.prepare_settling(
        steps(way).function(), lambda: steps(settling.settled_now(way)).machine_code())


def _constant(flag: Any) -> Any:
    """Dynamo makes a number of a module a variable of its program where sizes are, before torch 2.13 also one
    that changes; as the key of a dictionary (before 2.13) and in a set it is a constant again."""
    if callable(flag):  # first: of a function within a function Dynamo of torch 2.6 says no type
        if not (READS_PARTIALS and isinstance(flag, functools.partial)):
            return flag
        numbers = {name: _constant(number) for name, number in flag.keywords.items()}
        return functools.partial(flag.func, *flag.args, **numbers)
    return next(iter({*{flag: None}})) if isinstance(flag, float) else flag
