"""Whether tensors are like those of an earlier call: one of Dynamo's tensor guards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

Check = Callable[..., bool]

TensorGuards: Any = None
with contextlib.suppress(ImportError):  # private to torch: without it calls take the general path
    from torch._C._dynamo.guards import TensorGuards


def guard(*tensors: torch.Tensor) -> Check:
    """A predicate: true for tensors that a plan made for `tensors` serves."""
    # Of those without strides the guard asks for them, which ends the process.
    if TensorGuards is None or any(t.is_nested or t.layout is not torch.strided for t in tensors):
        return lambda *tensors: False
    firsts = [next(k for k, other in enumerate(tensors) if other is t) for t in tensors]
    own = [t for k, t in enumerate(tensors) if firsts[k] == k]
    check: Check = TensorGuards(*own, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check if len(own) == len(tensors) else _of_some_twice(check, firsts)


def _of_some_twice(check: Check, firsts: Sequence[int]) -> Check:
    """Of tensors some of which stand in several places, which torch's guard refuses; it sees each once."""
    again = [(k, first) for k, first in enumerate(firsts) if k != first]
    own = [k for k, first in enumerate(firsts) if k == first]

    def checked(*tensors: Any) -> bool:
        return all(tensors[k] is tensors[first] for k, first in again) and check(*(tensors[k] for k in own))

    return checked


def both(check: Check, other: Check) -> Check:
    return lambda *args: check(*args) and other(*args)


def guard_all(check: Check, args: Sequence[Any]) -> Check:
    """A predicate of all arguments of a call like this one: `check` of its tensors, its types of numbers."""
    made: Check = _with_numbers(tuple(None if isinstance(a, torch.Tensor) else type(a) for a in args))(check)
    return made


@functools.lru_cache(256)
def _with_numbers(kinds: tuple[type | None, ...]) -> Callable[[Check], Check]:
    names = [f"a{k}" for k in range(len(kinds))]
    tensors = [name for name, kind in zip(names, kinds, strict=True) if kind is None]
    conditions = [f"type({name}) is kinds[{k}]" for k, name in enumerate(names) if name not in tensors]
    conditions += [f"isinstance({name}, tensor) and not {name}.is_nested" for name in tensors]
    text = f"lambda check: lambda {', '.join(names)}: " + " and ".join(
        [*conditions, f"check({', '.join(tensors)})"])
    made: Callable[[Check], Check] = eval(text, {"kinds": kinds, "tensor": torch.Tensor})
    return made
