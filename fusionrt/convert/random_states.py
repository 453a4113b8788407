"""The states of random generators, torch's, NumPy's and Python's, and how they are put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

# How a state is read, and how it is set.
_Access = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]


def of_torch() -> list[torch.Generator]:
    """Those that are used where none is given. There are none of GPUs before CUDA has begun."""
    return [torch.default_generator, *torch.cuda.default_generators]


def everybodys() -> list[Any]:
    """Those, and Python's and NumPy's."""
    numpy: Any = sys.modules.get("numpy.random")
    methods: list[Any] = [random.getstate, *([] if numpy is None else [numpy.get_state])]
    return [*of_torch(), *(method.__self__ for method in methods)]


def seed_torch(seed: int) -> None:
    """torch.manual_seed also seeds what cannot be put back: GPUs' generators that are yet to come."""
    for generator in of_torch():
        generator.manual_seed(seed)


def access(kind: type) -> _Access | None:
    """None where the class is no generator's."""
    return next((found for base, found in _accesses().items() if issubclass(kind, base)), None)


def _accesses() -> dict[type, _Access]:
    found: dict[type, _Access] = {
        torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
        random.Random: (random.Random.getstate, random.Random.setstate)}
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        found[numpy.Generator] = attrgetter("bit_generator.state"), lambda g, s: _set(g.bit_generator, s)
        found[numpy.BitGenerator] = attrgetter("state"), _set
        found[numpy.RandomState] = lambda g: g.get_state(legacy=False), numpy.RandomState.set_state
    return found


def _set(bits: Any, state: Any) -> None:
    bits.state = state
