"""Python's collector of cycles, out of the way for a while."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

MANY = 10_000  # new objects, of which a walk takes a millisecond
FEW = 1_000    # frozen objects: Python 3.12 starts with some hundreds, who freezes a program has more

_program_freezes = False


def _is_frozen() -> bool:
    """Whether a program has frozen what it holds. Who does so goes on, and is asked once: to count a million
    objects takes 50 ms."""
    global _program_freezes
    _program_freezes = _program_freezes or gc.get_freeze_count() >= FEW
    return _program_freezes


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """For what makes many objects that stay: walking torch's million beside them takes 80 ms a time."""
    enabled, before = gc.isenabled(), gc.get_count()[0]
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            # Of few, the next walk is as it would have been: a program that comes here often would have none.
            if gc.get_count()[0] - before > MANY and not _is_frozen():
                gc.freeze()  # the new objects are old ones then: else they would be walked now
                gc.unfreeze()
            gc.enable()
