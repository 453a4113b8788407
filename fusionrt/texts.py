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

    def function(self, parameters: Sequence[str], *before: str) -> Callable[..., Any]:
        """`before`: lines that come first."""
        text = "\n    ".join([f"def run({', '.join(parameters)}):", *before, *self.lines])
        exec(compiled(text), self.scope)
        made: Callable[..., Any] = self.scope["run"]
        return made
