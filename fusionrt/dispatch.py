"""The entry function of an operator: what happens in the microsecond before a launch.

A call has to cost less than one eager torch op. So each thread remembers the kind of call it made
last, as one of Dynamo's tensor guards (type, dtype, device, sizes, strides, gradient requirement and
dispatch state of all tensors, compared in C++ in 0.2 us; a dictionary keyed by the same costs 0.8)
and what to run then. Everything else goes to `Operator.__call__`. The guard does not look at
`torch.no_grad`: what is run asks for it, or was kept under it.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from fusionrt.arguments import BEYOND
from fusionrt.array import check_dense
from fusionrt.sites import EQUAL, NUMBERS, Sites, Way, alike, all_alike, keep
from fusionrt.texts import compiled
from fusionrt.watching import SCOPE, UNGUARDED

if TYPE_CHECKING:
    from fusionrt.op import Operator

Run = Callable[..., Any]
_SEEN = f"_frt_is_compiling() or {UNGUARDED}"  # whether torch must see each operation


def is_number(parameter: inspect.Parameter) -> bool:
    """By its annotation."""
    return parameter.annotation in (float, int, "float", "int")


def entry(operator: Operator, signature: inspect.Signature, general: Run) -> Run:
    """The function that users call, written for its signature.

    `operator.local.site` is the thread's last (whether of all arguments, check, what to run); `others` has
    the last of each kind of first tensor, as a model calls an op for several shapes in turn. Parameters with
    a default or annotated as numbers are taken for numbers, the others for tensors, and a check sees the
    tensors alone: one of all arguments, of a call that is otherwise, costs a frame.

    In the text parameters are numbered, so that most operators share its compilation, of a third of a
    millisecond; they bear their names in what is made of it.
    """
    params = list(signature.parameters.values())
    operator.entry_tensors = [p.default is p.empty and not is_number(p) for p in params]
    numbered = [p.replace(name=f"a{k}") for k, p in enumerate(params)]
    given = [p.name for p in numbered]
    names = ", ".join(given)
    write = functools.partial(_written, operator, numbered, given, names, of_all=f"_frt_check({names})")
    return _defined(write, operator.name, numbered, names, _scope(operator, general),
                    list(signature.parameters))


class Usual(NamedTuple):
    """The operator of most calls of a public function, the values that it is given and the condition under
    which it is, written in the function's parameters."""

    operator: Operator
    given: tuple[str, ...]
    condition: str


def shortcut(public: Run, usual: Usual) -> Run:
    """A function that checks its arguments and chooses an operator, with a short way to the usual one for
    numbers that are Python's: a quarter of a microsecond less."""
    params = list(inspect.signature(public).parameters.values())
    passed = _passed(params)
    write = functools.partial(_written, usual.operator, params, usual.given, passed,
                              condition=usual.condition)
    made = _defined(write, public.__name__, params, passed, _scope(usual.operator, public))
    return functools.update_wrapper(made, public)


def front(public: Run, sites: Sites, asked: str) -> Run:
    """A function that asks `sites`, and gives what they say, with a short way to what the thread asked for
    last, for options as then: a microsecond less. `asked`: with which tensors, in its parameters."""
    params, local = list(inspect.signature(public).parameters.values()), threading.local()
    tensors = asked.split()
    options = [p.name for p in params if p.name not in tensors]
    values, kinds = ([f"_frt_{what}{k}" for k in range(len(options))] for what in ("value", "kind"))
    known = [f"({name} is {value} or type({name}) is {kind} and {name} == {value}"
             f" and ({kind} is not tuple or _frt_ints({name})))"
             for name, value, kind in zip(options, values, kinds, strict=True)]
    known += ["_frt_grad is _frt_grad_enabled()", f"_frt_way.check({', '.join(tensors)})"]
    passed = _passed(params)
    last = ", ".join([*values, *kinds, "_frt_grad", "_frt_way"])
    body = f"""    try:
        {last} = _frt_local.last
        _frt_known = {' and '.join(known)}
        if not _frt_known and not {tensors[0]}.is_nested:
            {last} = _frt_local.last = _frt_local.others[_frt_alike({', '.join(tensors)})]
            _frt_known = {' and '.join(known)}
    except _frt_errors:
        _frt_known = False
    if _frt_known:
        return _frt_way.run({', '.join(tensors)})
    _frt_refuse_nested({', '.join(tensors)})
    _frt_outer = _frt_sites.listen()
    try:
        _frt_result = _frt_general({passed})
    finally:
        _frt_asked = _frt_sites.heard(_frt_outer)
    if _frt_asked:
        _frt_remember([{', '.join(tensors)}], [{', '.join(options)}], *_frt_asked)
    return _frt_result
"""

    def remember(tensors: Sequence[Any], options: Sequence[Any], way: Way, asked: list[int]) -> None:
        kinds = [_kind(o) for o in options]
        is_known_again = all(kind is not None or isinstance(o, tuple) or _is_constant(o)
                             for o, kind in zip(options, kinds, strict=True))
        if is_known_again and asked == list(map(id, tensors)):
            local.last = (*options, *kinds, torch.is_grad_enabled(), way)
            keep(vars(local).setdefault("others", {}), all_alike(*tensors), local.last)

    def refuse_nested(*given: Any) -> None:
        """Which has no sizes to look for; sparse ones are for the op to refuse."""
        for name, tensor in zip(tensors, given, strict=True):
            if isinstance(tensor, torch.Tensor) and tensor.is_nested:
                check_dense(public.__name__, name, tensor)

    scope = {"_frt_general": public, "_frt_local": local, "_frt_sites": sites, "_frt_remember": remember,
             "_frt_grad_enabled": torch.is_grad_enabled, "_frt_ints": _are_ints,
             "_frt_refuse_nested": refuse_nested, "_frt_alike": all_alike}
    return functools.update_wrapper(_defined(lambda: body, public.__name__, params, passed, scope), public)


def _kind(option: Any) -> type | None:
    """Of an option of which one of this type that equals it is as good; others are known by identity."""
    kind = type(option)
    return kind if kind in EQUAL or kind is torch.Size or (kind is tuple and _are_ints(option)) else None


def _is_constant(option: Any) -> bool:
    """A function or a dtype. (The numbers of a module may change.)"""
    is_function = callable(option) and not isinstance(option, torch.nn.Module)
    return is_function or isinstance(option, torch.dtype)


def _are_ints(values: tuple[Any, ...]) -> bool:
    """(8.0,) and (True,) equal tuples of such."""
    return {*map(type, values)} == {int}


def _scope(operator: Operator, general: Run) -> dict[str, Any]:
    """What names in the text of an operator's entry function refer to."""
    return {"_frt_type": type, "_frt_general": general, "_frt_beyond": BEYOND,
            "_frt_refuse": operator.check_types, "_frt_local": operator.local, "_frt_numbers": NUMBERS,
            "_frt_bool": (bool,), "_frt_alike": alike}


def _written(operator: Operator, params: Sequence[inspect.Parameter], given: Sequence[str], passed: str, *,
             of_all: str = "False", condition: str = "") -> str:
    """`given`: what the operator is, in terms of the parameters; `passed`: what the general function is. Our
    own names must be none of the parameters'."""
    assert operator.entry_tensors is not None
    each = list(zip(given, operator.entry_tensors, strict=True))
    tensors = [text for text, is_tensor in each if is_tensor]
    # Of each number what type it may have: truth values are not to be others.
    numbers = {name: "_frt_bool" if f"a{k}" in operator.flags else "_frt_numbers"
               for k, (text, is_tensor) in enumerate(each) if not is_tensor
               for name in compile(text, "<given>", "eval").co_names}
    # Of a strided nested tensor the guard asks for sizes that it has not, which ends the process.
    dense = [f"not {text}.is_nested" for text in tensors]
    of_numbers = [f"_frt_type({name}) in {types}" for name, types in numbers.items()]
    known = [*of_numbers, *filter(None, [condition]), *dense, f"_frt_check({', '.join(tensors)})"]
    fits = f"{of_all} if _frt_all else {' and '.join(known)}"
    other = f"""
        if not _frt_known and not {tensors[0]}.is_nested:
            _frt_all, _frt_check, _frt_run = _frt_local.site = _frt_local.others[_frt_alike({tensors[0]})]
            _frt_known = {fits}""" if tensors else ""
    return f"""    try:
        _frt_all, _frt_check, _frt_run = _frt_local.site
        _frt_known = {fits}{other}
    except _frt_errors:
        _frt_known = False
    if not _frt_known:
        return _frt_general({passed})
    try:
        return _frt_run({', '.join(given)})
    except _frt_beyond:
        _frt_refuse([{', '.join(given)}])
        raise
"""


def _defined(write: Callable[[], str], name: str, params: Sequence[inspect.Parameter], passed: str,
             scope: Mapping[str, Any], named: Sequence[str] = ()) -> Run:
    """An entry function, by its name: `passed` to the general one where torch must see each operation, or
    else what `write` says; `named`: what its parameters are called.

    It is written and compiled when it is first called, as a program calls few of the functions that a module
    has. Or when Dynamo first traces it, whose graphs are of the code that is there when they are made: what
    it goes through is the same before and after, as it may begin anew in between.
    """
    names = named or [p.name for p in params]
    known: dict[str, Any] = {
        **SCOPE, "_frt_is_compiling": torch.compiler.is_dynamo_compiling,
        "_frt_errors": (AttributeError, TypeError, KeyError, RuntimeError),  # what nested ones raise too
        "inf": math.inf, "torch": torch,
        **{f"_frt_default_{p.name}": p.default for p in params}, **scope}

    def code(body: str) -> CodeType:
        exec(compiled(f"""def entry{_parameters(params)}:
    if {_SEEN}:
        _frt_begin()
        return _frt_general({passed})
{body}"""), known)
        made: CodeType = known["entry"].__code__
        own = (f".{n}" for n in made.co_varnames[len(params):])  # as no parameter can be called
        return made.replace(  # its own, by which Dynamo and profilers know a function
            co_name=name, co_filename=f"<fusionrt entry of {name}>", co_varnames=(*names, *own))

    def begin() -> bool:
        if made.__code__ is stub:
            made.__code__ = code(write())
        return True

    begin._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo calls it while it traces
    stub = code(f"    _frt_begin()\n    return _frt_made({_passed(params, names)})")
    made: Any = known["entry"]
    made.__code__, made.__name__, made.__qualname__ = stub, name, name
    made.__kwdefaults__ = {n: p.default for n, p in zip(names, params, strict=True)
                           if p.kind is p.KEYWORD_ONLY and p.default is not p.empty} or None
    known |= {"_frt_begin": begin, "_frt_made": made}
    return cast(Run, made)


def _passed(params: Sequence[inspect.Parameter], names: Sequence[str] = ()) -> str:
    """The parameters, to a function that has the same ones by these names."""
    return ", ".join(f"{name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name
                     for name, p in zip(names or [p.name for p in params], params, strict=True))


def _parameters(params: Sequence[inspect.Parameter]) -> str:
    parts, starred = list[str](), False
    for p in params:
        if p.kind is p.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        parts.append(p.name if p.default is p.empty else f"{p.name}=_frt_default_{p.name}")
    if positional := sum(p.kind is p.POSITIONAL_ONLY for p in params):
        parts.insert(positional, "/")
    return f"({', '.join(parts)})"
