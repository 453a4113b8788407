"""Tracing without what takes time and is of no use to it. Collecting garbage takes a quarter of a model's
first call: Python's collector walks torch's million objects again and again, and Dynamo asks for it once more
when it is done. To time its guards, for a log, Dynamo empties the processor's caches: 0.1 s. With it comes
AOTAutograd, whose planners of recomputation import networkx, 0.1 s, and until they plan ask it for nothing
but types to annotate with."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

from fusionrt.collector import paused

_PLANNERS = tuple(f"torch._functorch._activation_checkpointing.{name}"
                  for name in ("graph_info_provider", "knapsack_evaluator", "min_cut"))

@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """For a call in here that is traced."""
    from torch._dynamo import config
    options = {"run_gc_after_compile": False} if hasattr(config, "run_gc_after_compile") else {}
    with paused(), config.patch(options), _guards_untimed():
        _import_planners()
        yield


@contextlib.contextmanager
def _guards_untimed() -> Iterator[None]:
    from torch._dynamo import guards
    timer = getattr(guards, "profile_guard_manager", None)
    if timer is None or timer is _no_time or guards.guards_log.isEnabledFor(logging.DEBUG):
        yield
        return
    guards.profile_guard_manager = _no_time  # type: ignore[assignment]
    try:
        yield
    finally:
        guards.profile_guard_manager = timer


def _no_time(*_: object) -> float:
    return 0.0


class _Later(types.ModuleType):
    """Stands for a module in the planners, which find in it whatever they ask for once they are imported."""

    __file__ = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys._getframe(1).f_globals.get("__name__") in _PLANNERS and self is sys.modules.get(self.__name__):
            return Any
        if self is sys.modules.get(self.__name__):
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def _import_planners() -> None:
    if "networkx" in sys.modules or importlib.util.find_spec("networkx") is None:
        return
    sys.modules["networkx"] = stand_in = _Later("networkx")
    try:
        for name in _PLANNERS:
            with contextlib.suppress(ImportError):  # of a torch that has none
                importlib.import_module(name)
    finally:
        if sys.modules.get("networkx") is stand_in:
            del sys.modules["networkx"]
