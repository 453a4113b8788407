"""Text for calls of one kind: of functions of Python's, and of kernels. For other sizes it is the same.

To write a text, to compile it and to find its hash take longer than all else that a call of new sizes
needs. So functions know by names whatever is of one kind of call alone (sizes, addresses), kernels by
parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from types import CodeType
from typing import Any

Run = Callable[..., Any]
_KEPT = 256


@functools.lru_cache(1024)
def compiled(text: str) -> CodeType:
    return compile(text, "<fusionrt entry>", "exec")


class Texts:
    """Texts of kernels, each under its form: all that it depends on, which is less than a problem's sizes."""

    def __init__(self) -> None:
        self._texts: dict[Hashable, str] = {}

    def text(self, form: Hashable, write: Callable[[], str]) -> str:
        found = self._texts.get(form)
        if found is None:
            if len(self._texts) >= _KEPT:
                self._texts.clear()
            found = self._texts[form] = write()
        return found


class Lines:
    """The body of a function, and what its names refer to."""

    def __init__(self, **scope: Any) -> None:
        self.lines: list[str] = []
        self.scope = scope

    def name(self, value: Any) -> str:
        """One for it."""
        name = f"known{len(self.scope)}"
        self.scope[name] = value
        return name

    def spelled(self, value: str | float) -> str:
        """A number, or a piece of text that may end in one, by name."""
        if not isinstance(value, str):
            return self.name(value)
        address, plus, added = value.partition(" + ")
        return f"{address} + {self.name(int(added))}" if plus else value

    def function(self, parameters: Sequence[str], *before: str, another: Callable[[], Run] | None = None
                 ) -> Run:
        """`before`: lines that come first. `another`: of what has memory of its own, makes one that does the
        same, as a finalizer or a signal's handler may call this one while it runs."""
        lines = self.lines
        if another is not None:
            self.scope |= {"is_running": False, "another": another}
            lines = ["global is_running", f"if is_running: return another()({', '.join(parameters)})",
                     "is_running = True", "try:", *(f"    {line}" for line in lines),
                     "finally: is_running = False"]
        text = "\n    ".join([f"def run({', '.join(parameters)}):", *before, *lines])
        exec(compiled(text), self.scope)
        made: Run = self.scope["run"]
        return made
