"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from fusionrt.collector import paused


def attach(package: str, modules: Mapping[str, str], submodules: Collection[str]
           ) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package whose names live in submodules: name -> module."""
    home = {name: f"{package}.{module}" for name, module in modules.items()}
    names = sorted([*home, *submodules])
    return lambda name: find(package, name, home, submodules), lambda: names, names


def find(package: str, name: str, home: Mapping[str, str], submodules: Collection[str]) -> Any:
    """What `package`'s `__getattr__` answers. `home` names the module of each name, with `:other` where it
    bears another name there, `:other()` where the answer is that function's, asked anew each time."""
    if name in submodules:
        return _imported(f"{package}.{name}")
    if name not in home:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    module, _, attribute = home[name].partition(":")
    value = getattr(_imported(module), attribute.removesuffix("()") or name)
    if attribute.endswith("()"):
        return value()
    vars(sys.modules[package])[name] = value
    return value


def _imported(module: str) -> Any:
    with paused():
        return importlib.import_module(module)
