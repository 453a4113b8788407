"""What may stand for an activation in a module: what the ops take, and torch's own modules and functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from fusionrt.activation import resolve
from fusionrt.catalogue import OPS
from fusionrt.op_names import OPS as NAMES

# None, a name of the catalogue's, or a function of a traced value.
Activation = str | Callable[[Any], Any] | None

_MODULES: dict[type[nn.Module], str | None] = {
    nn.Identity: None, nn.ReLU: "relu", nn.ReLU6: "relu6", nn.SiLU: "silu", nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh", nn.Mish: "mish", nn.Hardswish: "hardswish", nn.Hardsigmoid: "hardsigmoid"}
_NUMBERS = {nn.LeakyReLU: ("leaky_relu", ("negative_slope",)), nn.ELU: ("elu", ("alpha",)),
            nn.Softplus: ("softplus", ("beta", "threshold"))}
_FUNCTIONS = {F.relu: "relu", torch.relu: "relu", F.relu6: "relu6", F.gelu: "gelu", F.silu: "silu",
              F.sigmoid: "sigmoid", torch.sigmoid: "sigmoid", F.tanh: "tanh", torch.tanh: "tanh",
              F.mish: "mish", F.hardswish: "hardswish", F.hardsigmoid: "hardsigmoid", F.elu: "elu",
              F.leaky_relu: "leaky_relu", F.softplus: "softplus"}


def known(module: str, activation: Any) -> Activation:
    """`activation` as modules keep it: by name where the catalogue has it, so that it is written as a word.

    Besides what `fusionrt.activation.resolve` takes: torch's modules (`nn.GELU("tanh")`) and functions
    (`F.relu`) that the catalogue has. Raises what `resolve` does, with the name of the `module`, and
    TypeError for other modules: one may have parameters, or work on more than an element.

        known("FusedLinear", nn.LeakyReLU(0.2))    # leaky_relu with that slope
    """
    if isinstance(activation, nn.Module):
        return _of_module(module, activation)
    if activation in _FUNCTIONS:
        return _FUNCTIONS[activation]
    function = resolve(module, activation)
    name = getattr(function, "__name__", "")
    return name if name in NAMES["activations"] and OPS[name] is function else function


def _of_module(module: str, activation: nn.Module) -> Activation:
    kind = type(activation)
    if kind in _MODULES:
        return _MODULES[kind]
    if isinstance(activation, nn.GELU):
        return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    if kind in _NUMBERS:
        name, numbers = _NUMBERS[kind]
        return functools.partial(OPS[name], **{number: getattr(activation, number) for number in numbers})
    taken = [k.__name__ for k in (*_MODULES, nn.GELU, *_NUMBERS)]
    raise TypeError(f"{module}: activation must be None, a name, a function of one traced value, or one of "
                    f"torch.nn's modules {', '.join(taken)}, got a {kind.__name__}")


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
