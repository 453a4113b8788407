"""What may stand for an activation or an epilogue, and the kernel of what follows a linear layer or a
convolution."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fusionrt.catalogue import OPS
from fusionrt.expr import Expr
from fusionrt.fusion import UnfitError, dropped
from fusionrt.op_names import OPS as NAMES
from fusionrt.row_fusion import Epilogue, Run, as_function, once, one_value, per_call, row_operator

# None, a name of the catalogue's, a module or function of torch's that it has, a function of a traced value.
Activation = str | Callable[[Any], Any] | None

_MODULES: dict[type[nn.Module], str | None] = {
    nn.Identity: None, nn.ReLU: "relu", nn.ReLU6: "relu6", nn.SiLU: "silu", nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh", nn.Mish: "mish", nn.Hardswish: "hardswish", nn.Hardsigmoid: "hardsigmoid"}
_NUMBERS = {nn.LeakyReLU: ("leaky_relu", ("negative_slope",)), nn.ELU: ("elu", ("alpha",)),
            nn.Softplus: ("softplus", ("beta", "threshold"))}
_FUNCTIONS: dict[Any, str] = {
    F.relu: "relu", torch.relu: "relu", F.relu6: "relu6", F.gelu: "gelu", F.silu: "silu",
    F.sigmoid: "sigmoid", torch.sigmoid: "sigmoid", F.tanh: "tanh", torch.tanh: "tanh", F.mish: "mish",
    F.hardswish: "hardswish", F.hardsigmoid: "hardsigmoid", F.elu: "elu", F.leaky_relu: "leaky_relu",
    F.softplus: "softplus"}


@functools.cache
def _numbered(name: str, **numbers: float) -> Epilogue:
    """An activation of the catalogue with other numbers: the same object, and key, as long as these are."""
    return functools.partial(OPS[name], **numbers)


def resolve(op: str, activation: Any, argument: str = "activation") -> Epilogue:
    """The function of a traced value that `activation` says; None where there is nothing to compute.

    `activation`, an op's `argument`: None, the name of one of the catalogue's activations ("relu",
    "gelu_tanh", ...), one of torch's modules (`nn.GELU("tanh")`) or functions (`F.silu`) that the catalogue
    has, or a function of one traced value: an op, one made by `fuse`, a plain one of scalars, another module
    without parameters (whose attributes are constants: what is traced is kept).
    Raises ValueError for an unknown name, TypeError for anything else, with the name of the `op` that was
    called; what cannot be traced raises when it is.

        resolve("linear_activation", "silu")(x)
    """
    activation = translated(op, activation, argument)
    if activation is None:
        return None
    if isinstance(activation, str):
        if activation not in NAMES["activations"]:
            raise ValueError(f"{op}: {argument} must be None, a function of one traced value, or one of "
                             f"{', '.join(NAMES['activations'])}, got {activation!r}")
        return OPS[activation]
    if not callable(activation) or isinstance(activation, type):
        name = getattr(activation, "__name__", None)
        got = type(activation).__name__ if name is None else f"the class {name}: write {name}()"
        raise TypeError(f"{op}: {argument} must be None, a name, or a function of one traced value, got "
                        f"{got}")
    return as_function(op, activation, argument)


def by_value(op: str, activation: Any) -> Any:
    """To be part of a key: of a module of torch's what its numbers say now, which may change."""
    return translated(op, activation) if isinstance(activation, nn.Module) else activation


def translated(op: str, activation: Any, argument: str = "activation") -> Any:
    """What the catalogue calls a module or a function of torch's: a name, an op with other numbers, or None;
    anything else as it is."""
    if isinstance(activation, nn.Module):
        return _of_module(op, activation, argument)
    # Not looked up: torch's compiler hashes no functions made within others. Nor by `next`: that of torch 2.6
    # knows none with a default.
    for function, name in _FUNCTIONS.items():
        if function is activation:
            return name
    return activation


def _of_module(op: str, activation: nn.Module, argument: str) -> Any:
    kind = type(activation)
    if kind in _MODULES:
        return _MODULES[kind]
    if kind is nn.GELU:
        return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    if kind in _NUMBERS:
        name, numbers = _NUMBERS[kind]
        return _numbered(name, **{number: getattr(activation, number) for number in numbers})
    if any(True for _ in itertools.chain(activation.parameters(), activation.buffers())):
        raise TypeError(f"{op}: {argument} must be None, a name, a function of one traced value or a module "
                        f"without parameters, got a {kind.__name__}")
    return activation


def activated(op: str, x: Expr, activation: Any) -> Expr:
    """The activation of a traced value."""
    function = resolve(op, activation)
    try:
        return x if function is None else one_value(once(function, x, "activation"), "activation")
    except UnfitError as error:
        raise TypeError(f"{op}: {error}") from None


def finishing(op: str, activation: Any, bias: bool, residual: bool, dropout: bool) -> Any:
    """residual + dropout(activation(z + bias), p) in one kernel: a function of z, bias, residual, p and the
    scale of what is kept, of those that there are."""
    return _finishing(op, by_value(op, activation), bias, residual, dropout)


@per_call
def _finishing(op: str, activation: Any, bias: bool, residual: bool, dropout: bool) -> Run:

    def expression(z: Expr, bias: Any = None, residual: Any = None, p: float = 0, scale: float = 1) -> Expr:
        y = activated(op, z if bias is None else z + bias, activation)
        y = dropped(y, p, scale) if dropout else y
        return y if residual is None else residual + y

    params = ("z", *(("bias",) if bias else ()), *(("residual",) if residual else ()),
              *(("p", "scale") if dropout else ()))
    return row_operator(expression, params, name=op, row_dims=0)


__all__ = ["Activation", "Epilogue", "activated", "by_value", "finishing", "resolve", "translated"]
