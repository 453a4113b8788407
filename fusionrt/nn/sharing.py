"""How a module takes the place of torch's: with the same parameters, not with copies of them."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def expect(made: type[nn.Module], module: Any, *kinds: type[nn.Module], argument: str = "module") -> None:
    """Raises TypeError unless `module` is of exactly one of the kinds: a subclass may compute another
    thing."""
    if type(module) not in kinds:
        names = " or ".join(f"torch.nn.{kind.__name__}" for kind in kinds if hasattr(nn, kind.__name__))
        raise TypeError(f"{made.__name__}: {argument} must be a {names}, not of a class derived from it, got "
                        f"{type(module).__module__}.{type(module).__qualname__}")
    for name, value in vars(module).items():
        # `weight_norm`, `spectral_norm` and `prune` of torch.nn.utils: a hook makes it before each call.
        if isinstance(value, torch.Tensor) and name.endswith(("weight", "bias")):
            raise TypeError(f"{made.__name__}: the {name} of {argument} must be a parameter, not computed "
                            "from others before each call: make it permanent first, as by remove_weight_norm "
                            "or prune.remove")


def share(made: M, module: nn.Module) -> M:
    """`made` with the very parameters, buffers and children of `module`, whose names are the same, and in its
    mode."""
    # Not `named_parameters()` and its like, which leave out the second name of what has two.
    for name, parameter in module._parameters.items():
        if parameter is not None:
            made.register_parameter(name, parameter)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            made.register_buffer(name, buffer, name not in module._non_persistent_buffers_set)
    for name, child in module._modules.items():
        if child is not None:
            made.add_module(name, child)
    made.training = module.training
    return made


def place(module: nn.Module) -> dict[str, Any]:
    """Keyword arguments of a constructor: no memory, and the dtype that `share` will bring anyway."""
    first = next(module.parameters(), None)
    return {"device": "meta"} if first is None else {"device": "meta", "dtype": first.dtype}
