"""Files that others never see by halves."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole(file: str | os.PathLike[str]) -> Iterator[Path]:
    """A name to write to, whose file takes the target's place at the end: a full disk or an interruption
    leaves what was there, and nothing beside it. A link stays and leads to the new file, which has the mode
    of the old one. What is no file (a device, a pipe), or is one in a directory where nothing can be put
    beside it, is written to as it is. What the system refuses names `file`."""
    path = Path(file)
    target = Path(os.path.realpath(path))
    temporary = _place(path, target)
    try:
        yield temporary
        if temporary is not path:
            with contextlib.suppress(FileNotFoundError):
                shutil.copymode(target, temporary)
            temporary.replace(target)
    except OSError as error:
        if error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    finally:
        if temporary is not path:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def write(file: str | os.PathLike[str], text: str) -> None:
    with whole(file) as place:
        place.write_text(text, encoding="utf-8")


def why_not_writable(file: str | os.PathLike[str]) -> str | None:
    """What `whole` would meet, as far as it can be known beforehand; None where nothing is in the way."""
    path = Path(file)
    target = Path(os.path.realpath(path))
    try:
        if path.is_dir():
            return "it is a folder"
        if not target.parent.is_dir():
            return f"there is no folder {path.parent if target.name == path.name else target.parent}"
        place = _place(path, target)
        if place is path:  # not opened: who reads a pipe would see it end
            return None if os.access(path, os.W_OK) else os.strerror(errno.EACCES)
        place.touch()  # tried, as permissions tell little of a quota, a network's disk or /proc
        place.unlink()
    except OSError as error:
        return error.strerror
    return None


def _place(path: Path, target: Path) -> Path:
    """What is written to: a name beside the target, or the path itself."""
    return target.with_name(f".{os.urandom(8).hex()}.tmp") if _may_be_replaced(path, target) else path


def _may_be_replaced(path: Path, target: Path) -> bool:
    if not path.exists():
        return True
    # A device is asked for by its name: /dev/stdout leads to none in a pipe.
    return (path.is_file() and os.access(target, os.W_OK) and os.access(target.parent, os.W_OK)
            and not os.path.ismount(target))
