"""Files that others never see by halves."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole(target: Path) -> Iterator[Path]:
    """A name to write to, whose file takes the target's place at the end: a full disk or an interruption
    leaves what was there, and nothing beside it."""
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
