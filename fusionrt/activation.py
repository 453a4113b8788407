"""What may stand for an activation, and the kernel of what follows a linear layer or a convolution."""

from __future__ import annotations

from typing import Any

from fusionrt.catalogue import OPS
from fusionrt.expr import Expr
from fusionrt.fusion import dropped
from fusionrt.op_names import OPS as NAMES
from fusionrt.row_fusion import Epilogue, Run, per_call, row_operator


def resolve(op: str, activation: Any) -> Epilogue:
    """The function of a traced value that `activation` says; None where there is nothing to compute.

    `activation`: None, the name of one of the catalogue's activations ("relu", "gelu_tanh", ...), or a
    function of one traced value: an op, one made by `fuse`, a plain one of scalars. Raises ValueError for an
    unknown name, TypeError for anything else, with the name of the `op` that was called.

        resolve("linear_activation", "silu")(x)
    """
    if activation is None:
        return None
    if isinstance(activation, str):
        if activation not in NAMES["activations"]:
            raise ValueError(f"{op}: activation must be None, a function of one traced value, or one of "
                             f"{', '.join(NAMES['activations'])}, got {activation!r}")
        return OPS[activation]
    if not callable(activation):
        raise TypeError(f"{op}: activation must be None, a name, or a function of one traced value, got "
                        f"{type(activation).__name__}")
    made: Epilogue = activation
    return made


def activated(op: str, x: Expr, activation: Any) -> Expr:
    """The activation of a traced value."""
    function = resolve(op, activation)
    y = x if function is None else function(x)
    if not isinstance(y, Expr):
        raise TypeError(f"{op}: activation must give one traced value, got {type(y).__name__}")
    return y


@per_call
def finishing(op: str, activation: Any, bias: bool, residual: bool, dropout: bool) -> Run:
    """residual + dropout(activation(z + bias), p) in one kernel: a function of z, bias, residual, p and the
    scale of what is kept, of those that there are."""

    def expression(z: Expr, bias: Any = None, residual: Any = None, p: float = 0, scale: float = 1) -> Expr:
        y = activated(op, z if bias is None else z + bias, activation)
        y = dropped(y, p, scale) if dropout else y
        return y if residual is None else residual + y

    params = ("z", *(("bias",) if bias else ()), *(("residual",) if residual else ()),
              *(("p", "scale") if dropout else ()))
    return row_operator(expression, params, name=op, row_dims=0)


__all__ = ["Epilogue", "activated", "finishing", "resolve"]
