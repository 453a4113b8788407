"""What the attributes of modules hold, however deep, so that it can be put back: caches in lists, counters in
dictionaries, a state in an object of the model's own, also one that is a container or has slots.

What other libraries' objects hold is not found, nor what closures, generators and globals do.
"""

from __future__ import annotations

import copyreg
import functools
import gc
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from fusionrt.convert import random_states

# Of what is not looked into: it is no state of a model's.
_CLOSED = (type, ModuleType, FunctionType, MethodType)
_FOREIGN = ("torch", "fusionrt", "numpy", "triton", "builtins", "collections", "functools", "weakref",
            "threading", "logging")
# Each before its base. What they hold is read and put back by their own methods: a subclass's may evict.
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, deque, set)


class Contents(NamedTuple):
    """Containers, each with what it holds; the tensors in them; random generators, each with its state and
    what sets it."""

    held: list[tuple[Any, list[Any]]]
    tensors: list[Tensor]
    generators: list[tuple[Any, Any, Callable[[Any, Any], Any]]]


def contents(roots: Iterable[dict[str, Any]]) -> Contents:
    """What can be reached."""
    found = Contents([], [], [])
    seen: dict[int, Any] = {}
    is_open: Callable[[Any], bool] = functools.cache(_is_open)
    access: Callable[[Any], Any] = functools.cache(random_states.access)
    waiting: list[Any] = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            found.tensors.append(value)
            continue
        if (random := access(type(value))) is not None:
            found.generators.append((value, random[0](value), random[1]))
        if isinstance(value, (tuple, frozenset)):
            waiting += _that_hold(value)
        elif isinstance(value, _CONTAINERS) or is_open(type(value)):
            holds = _holds(value)
            found.held.append((value, holds))
            waiting += _that_hold(holds)
        if is_open(type(value)) and hasattr(value, "__dict__"):
            waiting.append(vars(value))
    return found


def restore(container: Any, before: list[Any]) -> None:
    """What it held, if it holds anything else, or in another order."""
    now, kind = _holds(container), _kind(container)
    if len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True)):
        return
    keys, values = before[:len(before) // 2], before[len(before) // 2:]
    if kind is object:
        for name in now[:len(now) // 2]:
            object.__delattr__(container, name)
        for name, value in zip(keys, values, strict=True):
            object.__setattr__(container, name, value)
        return
    kind.clear(container)
    if issubclass(kind, dict):
        for key, value in zip(keys, values, strict=True):
            kind.__setitem__(container, key, value)
    else:
        (kind.update if kind is set else kind.extend)(container, before)


def _that_hold(values: Iterable[Any]) -> list[Any]:
    """Without numbers and strings, and tuples of them, of which there may be a million: the garbage collector
    does not track what leads nowhere, among that dictionaries of atoms and torch's generators."""
    return [v for v in values if gc.is_tracked(v) or type(v) in (dict, torch.Generator)]


def _is_open(kind: type) -> bool:
    return issubclass(kind, Module) or not (
        issubclass(kind, _CLOSED) or kind.__module__.partition(".")[0] in _FOREIGN)


def _kind(container: Any) -> Any:
    return next((kind for kind in _CONTAINERS if isinstance(container, kind)), object)


def _holds(container: Any) -> list[Any]:
    """Its items; of a mapping, and of the slots of any other object, the keys, then the values."""
    kind = _kind(container)
    if kind is object:
        names = [s for s in copyreg._slotnames(type(container)) if hasattr(container, s)]  # type: ignore[attr-defined]
        return [*names, *(getattr(container, name) for name in names)]
    if issubclass(kind, dict):
        return [*kind.keys(container), *kind.values(container)]
    return list(kind.__iter__(container))
