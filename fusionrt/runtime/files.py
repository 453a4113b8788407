"""Files that others never see by halves."""

from __future__ import annotations

import contextlib
import os
import secrets
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
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp") if _may_be_replaced(path, target) else path
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


def _may_be_replaced(path: Path, target: Path) -> bool:
    if not path.exists():
        return True
    # A device is asked for by its name: /dev/stdout leads to none in a pipe.
    return (path.is_file() and os.access(target, os.W_OK) and os.access(target.parent, os.W_OK)
            and not os.path.ismount(target))
