"""`forward` of a converted module: its class's own, compiled by Dynamo with our backend."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import _symbolic_trace
from torch.nn import Module
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from fusionrt.convert import capture, tracing
from fusionrt.convert.sharing import SeparateLoads, SeparateMoves, shared_clone
from fusionrt.nn.hooks import GLOBAL_HOOKS, HOOKS
from fusionrt.watching import is_watched, tracing_state

Call = Callable[..., Any]
# Later versions of torch warn of the second name, which earlier ones have alone.
is_fx_tracing: Callable[[], bool] = getattr(_symbolic_trace, "is_fx_symbolic_tracing",
                                            _symbolic_trace.is_fx_tracing)
_numbers = itertools.count()


class Replicas:
    """In the place of `_replicate_for_data_parallel`, by which DataParallel makes modules on other devices:
    replicas run uncompiled, for what was compiled reads the parameters of the module."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def __call__(self) -> Module:
        replica = type(self.module)._replicate_for_data_parallel(self.module)
        detach(replica)
        return replica


class Scripted:
    """In the place of `__prepare_scriptable__`, which gives torch.jit.script the uncompiled module."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def __call__(self) -> Module:
        made = shared_clone(self.module)
        detach(made)
        return made


_OWN = {"_apply": SeparateMoves, "_load_from_state_dict": SeparateLoads,
        "_replicate_for_data_parallel": Replicas, "__prepare_scriptable__": Scripted}


def attach(module: Module, options: capture.Options) -> Forward:
    """Make a clone a converted module: what differs from its class stands in its own `__dict__`."""
    own = detach(module)
    forward = Forward(module, options, own)
    vars(module).update(forward=forward, **{name: made(module) for name, made in _OWN.items()})
    return forward


def detach(module: Module) -> Call | None:
    """The reverse; what `forward` the module had besides its class's, if it had one."""
    for name, made in _OWN.items():
        if isinstance(vars(module).get(name), made):
            del vars(module)[name]
    own: Call | None = vars(module).pop("forward", None)
    if isinstance(own, Forward):
        own = own.own
    if own is not None:
        vars(module)["forward"] = own
    return own


class Forward:
    """Compiled when it is first called, and again when hooks came or went or the class has another function,
    which Dynamo does not watch.

    `own`: what `forward` the module itself had, where that was not its class's. `first`: is told the
    arguments of the first call that has numbers, before it runs. `graphs`: what was found in each graph that
    the first run of what was compiled needed.
    """

    def __init__(self, module: Module, options: capture.Options, own: Call | None = None,
                 record: Any = None) -> None:
        self.module, self.options, self.own, self.record = module, options, own, record
        self.first: Callable[[tuple[Any, ...], Mapping[str, Any]], None] | None = None
        self._start()

    def _start(self) -> None:
        self.graphs: list[capture.Found] = []
        self._run: Call | None = None
        self._function = _function(self.module)
        self._hooked: list[tuple[int, tuple[int, ...]]] = []
        self._last_hook = 0
        functools.update_wrapper(self, self.own or type(self.module).forward, updated=())
        self.__wrapped__ = self.inner  # bound: signatures are asked for

    @property
    def inner(self) -> Call:
        """The uncompiled forward."""
        return self.own or types.MethodType(type(self.module).forward, self.module)

    @property
    def __code__(self) -> types.CodeType:
        """That of the uncompiled forward, at which torch.export looks."""
        inner = self.inner.func if isinstance(self.inner, functools.partial) else self.inner
        code: types.CodeType = getattr(inner, "__func__", inner).__code__
        return code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (torch.compiler.is_compiling() or tracing_state() is not None
                or is_fx_tracing()):  # by someone else
            return self.__wrapped__(*args, **kwargs)
        if (self._run is not None and RemovableHandle.next_id == self._last_hook and not self._hooked
                and self.first is None and _function(self.module) is self._function):
            return self._run(*args, **kwargs)
        return self._unsettled(args, kwargs)

    def use(self, options: capture.Options) -> None:
        """Convert otherwise, from the next call on."""
        self.options, self._run = options, None

    def _unsettled(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call that may have to be compiled."""
        first = self.first
        if first is not None and _has_numbers(self.module, args, kwargs):
            self.first = None  # while it runs
            try:
                first(args, kwargs)
            except BaseException:
                self.first = first  # whatever it was, the model is not proven
                raise
        self._last_hook, hooked = RemovableHandle.next_id, self._hooks()
        function = _function(self.module)
        if self._run is not None and hooked == self._hooked and function is self._function:
            return self._run(*args, **kwargs)
        self._hooked, self._function, heard = hooked, function, list[capture.Found]()
        self.__wrapped__ = self.inner
        options = self.options._replace(on_graph=heard.append)
        try:
            with tracing.quickly():
                self._run = torch.compile(_entry(self.inner),
                                          backend=functools.partial(capture.backend, options=options))
                return self._run(*args, **kwargs)
        finally:
            self.graphs = list(heard)

    def _hooks(self) -> list[tuple[int, tuple[int, ...]]]:
        """Of the whole tree and of all modules: where they are, and which."""
        places = [*GLOBAL_HOOKS, *(vars(m)[name] for m in self.module.modules() for name in HOOKS)]
        return [(id(place), tuple(place)) for place in places if place]

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("module", "options", "own", "record", "first")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()


def _function(module: Module) -> Any:
    """What stands for `forward` in its class: a descriptor gives another function each time."""
    for kind in type(module).__mro__:
        if "forward" in vars(kind):
            return vars(kind)["forward"]
    return None


def _has_numbers(module: Module, *inputs: Any) -> bool:
    """Whether a call can be repeated and its results compared: not where it is transformed, counted or faked,
    nor with sharded or meta tensors."""
    if is_watched():
        return False
    sharded = sys.modules.get("torch.distributed.tensor")
    without = (FakeTensor, *(() if sharded is None else (sharded.DTensor,)))
    tensors = itertools.chain(pytree.tree_leaves(inputs), module.parameters(), module.buffers())
    return not any(isinstance(t, torch.Tensor) and (t.is_meta or isinstance(t, without)) for t in tensors)


def _entry(inner: Call) -> Call:
    """A frame of its own for Dynamo, which counts recompilations, and remembers which sizes varied, by the
    code of a function: converted models of one class would take each other's room."""
    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    code = forward.__code__.replace(co_name=f"forward_{next(_numbers)}")
    return types.FunctionType(code, forward.__globals__, "forward", None, forward.__closure__)
