"""What may stand for an activation in a module: what the ops take, and torch's own modules and functions."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from torch import nn

from fusionrt.activation import Activation, activated, resolve, translated
from fusionrt.catalogue import OPS
from fusionrt.expr import argument
from fusionrt.op_names import OPS as NAMES


def known(module: str, activation: Any) -> Activation:
    """`activation` as modules keep it: by name where the catalogue has it, so that it is written as a word.

    Raises what `fusionrt.activation.resolve` does, with the name of the `module`.

        known("FusedLinear", nn.LeakyReLU(0.2))    # leaky_relu with that slope
    """
    found: Activation = translated(module, activation)
    if found is not activation:
        return found
    function = resolve(module, activation)
    activated(module, argument("value"), function)  # what cannot be traced is refused where it is chosen
    name = getattr(function, "__name__", "")
    return name if name in NAMES["activations"] and OPS[name] is function else function


class Activated(nn.Module):
    """A module with an activation: an argument, or a class's own that is derived from it:

        class FusedLinearReLU(FusedLinear, activation="relu"): ...
    """

    activation: Activation
    _fixed: ClassVar[str | None] = None

    def __init_subclass__(cls, activation: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._fixed = activation or cls._fixed

    def _choose(self, activation: Any) -> None:
        name = type(self).__name__
        if activation is not None and self._fixed is not None:
            raise TypeError(f"{name}: the activation is {self._fixed}, got activation={activation!r}")
        self.activation = known(name, activation if self._fixed is None else self._fixed)

    def extra_repr(self) -> str:
        shown = self.activation is not None and self._fixed is None
        parts = [super().extra_repr(), f"activation={_spelled(self.activation)}" if shown else ""]
        return ", ".join(filter(None, parts))


def _spelled(activation: Activation) -> str:
    if isinstance(activation, functools.partial):
        numbers = ", ".join(f"{name}={value}" for name, value in activation.keywords.items())
        return f"{_spelled(activation.func)}({numbers})"
    return activation if isinstance(activation, str) else getattr(activation, "__name__", repr(activation))
