"""What a forked child must not take over from its parent: locks, threads, files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def in_child(renew: Callable[[], object]) -> None:
    """Call it in each forked child, where a system has such."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)


def waits_for(lock: Any) -> None:
    """Whoever forks waits for the thread that holds this lock of a library's, which a child could not renew.
    Of several locks, in the order in which a thread takes them, the last one is to be named first."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


def without_exec() -> bool:
    """Whether this process is a copy of another, in which no program was started since; Linux tells."""
    try:
        flags = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[6])
    except OSError:
        return False
    return bool(flags & 0x40)  # PF_FORKNOEXEC


class Lock:
    """`with lock():`. A child has one of its own, as a thread that it has not may have held its parent's.
    Whoever holds it may take it again, as finalizers and handlers of signals call ops in the middle of
    others: what was read under it has to be read again after whatever may run them."""

    def __init__(self) -> None:
        self._renew()
        in_child(self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def __call__(self) -> Any:
        return self._lock
