"""One compile a key among the threads and processes of a machine, and never a hang.

The lock only saves work: whoever cannot have it in time goes on without it, because compiling
twice costs milliseconds and the cache publishes whole files in any case. It is a flock, which the
kernel drops when its holder dies; lock files made with O_EXCL outlive a SIGKILL (pytorch #189245).
It lives on the node's own disk, because locks on NFS hang (flashinfer #972, #3777).
"""

from __future__ import annotations

import io
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fusionrt.forks import in_child

if sys.platform != "win32":
    import fcntl

WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.02

_thread_locks: dict[str, threading.Lock] = {}
_lock_files: set[io.FileIO] = set()


@contextmanager
def hold(key: str) -> Iterator[None]:
    """Hold the lock of `key`, or go on without it after WAIT_SECONDS."""
    deadline = time.monotonic() + WAIT_SECONDS
    thread_lock = _thread_locks.setdefault(key, threading.Lock())
    is_ours = thread_lock.acquire(timeout=WAIT_SECONDS)
    try:
        file = _lock_file(key, deadline)
        try:
            yield
        finally:
            if file is not None:
                _release(file)
    finally:
        if is_ours:
            thread_lock.release()


def why_not_private(directory: Path) -> str | None:
    """Say why others could plant files in `directory`; None when they cannot or it is not there.

    A planted cubin is code that we would run (CWE-494, cuda-python #2399).
    """
    if sys.platform == "win32":
        return None  # a user's profile is private by its access list, and st_mode says nothing
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"cannot be examined: {error.strerror}"
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if not stat.S_ISDIR(status.st_mode):
        return "is not a directory"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"is writable by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def _lock_file(key: str, deadline: float) -> io.FileIO | None:
    if sys.platform == "win32":
        return None
    try:
        directory = Path(tempfile.gettempdir()) / f"fusionrt-locks-{os.geteuid()}"
        directory.mkdir(mode=0o700, exist_ok=True)
        if why_not_private(directory) is not None:
            return None
        # Never deleted: a newcomer would lock a fresh file while the old one is still held.
        file = (directory / f"{key}.lock").open("wb", buffering=0)
    except OSError:
        return None  # no place for a lock: the caller works without one
    _lock_files.add(file)
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                continue
        except OSError:
            pass  # a file system without flock (ENOLCK, ENOTSUP): not locked, not waited for
        else:
            return file
        _release(file)
        return None


def _release(file: io.FileIO) -> None:
    _lock_files.discard(file)
    file.close()  # closed before, in a child forked inside hold(): then nothing is unlocked


def _forget_in_child() -> None:
    """Drop what threads of the parent held at the fork: in the child nobody would release it."""
    _thread_locks.clear()
    for file in _lock_files:
        file.close()
    _lock_files.clear()


in_child(_forget_in_child)
