"""What the attributes of modules hold, however deep, so that it can be put back: caches in lists, counters in
dictionaries, a state in an object of the model's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor
from torch.nn import Module

# Of what is not looked into: it is no state of a model's, or a module that is listed itself.
_CLOSED = (Module, type, ModuleType, FunctionType, MethodType)
_FOREIGN = ("torch", "fusionrt", "numpy", "triton", "builtins", "functools", "weakref", "threading",
            "logging")
_CONTAINERS = (dict, list, deque, set)


def contents(roots: Iterable[dict[str, Any]]) -> tuple[list[tuple[Any, Any]], list[Tensor]]:
    """The containers that can be reached, each with a shallow copy, and the tensors in them."""
    held: list[tuple[Any, Any]] = []
    tensors: list[Tensor] = []
    seen: dict[int, Any] = {}
    waiting: list[Any] = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, _CONTAINERS):
            held.append((value, value.copy()))
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple | frozenset):
            waiting += value
        elif not isinstance(value, _CLOSED) and hasattr(value, "__dict__") and (
                type(value).__module__.partition(".")[0] not in _FOREIGN):
            waiting.append(vars(value))
    return held, tensors


def restore(container: Any, before: Any) -> None:
    """What the container held, if it holds anything else."""
    if isinstance(container, dict):
        same = container.keys() == before.keys() and all(container[k] is before[k] for k in before)
    else:
        same = len(container) == len(before) and all(a is b for a, b in zip(container, before, strict=True))
    if not same:
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(before)
