"""Files that others never see by halves."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole(file: str | os.PathLike[str]) -> Iterator[Path]:
    """A name to write to, whose file takes the target's place at the end: a full disk or an interruption
    leaves what was there, and nothing beside it. A link stays and leads to the new file; what is no file (a
    device, a pipe) is written to as it is. What the system refuses names `file`."""
    path = Path(file)
    if path.exists() and not path.is_file():  # asked of the name: /dev/stdout leads to none in a pipe
        temporary = path
    else:
        target = Path(os.path.realpath(path))
        temporary = target.with_name(f"{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        if temporary is not path:
            temporary.replace(target)
    except OSError as error:
        if error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    finally:
        if temporary is not path:
            temporary.unlink(missing_ok=True)
