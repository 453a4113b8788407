"""Tracing without what takes time and is of no use to it. Collecting garbage takes a quarter of a model's
first call: Python's collector walks torch's million objects again and again, and Dynamo asks for it once more
when it is done. To time its guards, for a log, Dynamo empties the processor's caches: 0.1 s."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from fusionrt.collector import paused


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """For a call in here that is traced."""
    from torch._dynamo import config
    options = {"run_gc_after_compile": False} if hasattr(config, "run_gc_after_compile") else {}
    with paused(), config.patch(options), _guards_untimed():
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
