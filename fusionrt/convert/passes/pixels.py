"""1 × 1 convolutions as what they are in channels_last memory: a linear layer of all pixels."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from fusionrt.convert.calls import pixel_linear
from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, called, is_tensor, options_of, present
from fusionrt.dtypes import HALVES
from fusionrt.ops.convolution import conv_activation, conv_bn_act

DEVICES = ("cuda",)
MANY, TILE = 1 << 16, 32  # pixels; channels that our product's tiles are made of


def pixels(edits: Edits) -> None:
    """Where no gradients are recorded, in 16 bits: cuBLAS has the bias, which a norm becomes, and our product
    what follows it in one kernel. So has cuDNN with a relu, which is left to it."""
    for n in edits.nodes():
        if called(n) in (conv_activation, conv_bn_act) and _fits(n) and edits.allows(n):
            given = options_of(n)
            options = present(eps=given.get("eps"), activation=given["activation"],
                              residual=given.get("residual"))
            edits.replace([n], n, pixel_linear, n.args, None, **options)


def _fits(n: Node) -> bool:
    t, x = value(n), value(n.args[0])
    tensors = [value(a) for a in n.args[:3] if a is not None]
    residual: Any = n.kwargs.get("residual")
    return (t.device.type in DEVICES and t.dtype in HALVES and not t.requires_grad
            and all(a.dtype == t.dtype for a in tensors) and is_linear_of_pixels(n)
            and x.stride(1) == 1 and t.stride(1) == 1
            and (residual is None or _takes(n, residual))
            and options_of(n)["activation"] != "relu" and _pays(n))


def _pays(n: Node) -> bool:
    """Of many pixels memory decides: tiles that are not full cost more than one more pass does."""
    if options_of(n)["activation"] is None and n.kwargs.get("residual") is None:
        return True
    sizes = value(n).shape
    many = all(isinstance(size, int) for size in sizes) and sizes.numel() // sizes[1] >= MANY
    return not many or bool(sizes[1] % TILE == 0)


def is_linear_of_pixels(n: Node) -> bool:
    """Of one of our convolutions: whether each of its results depends on one pixel, at inference."""
    given: dict[str, Any] = dict(n.kwargs)
    t, weight = value(n), value(n.args[1])
    return (t.dim() == 4 and tuple(weight.shape[2:]) == (1, 1) and given["groups"] == 1
            and not given.get("training") and not given.get("dropout_p")
            and _is(given["stride"], 1) and _is(given["padding"], 0))


def _takes(n: Node, residual: Node) -> bool:
    before_activation = called(n) is conv_bn_act and options_of(n)["activation"] is not None
    return is_tensor(residual) and value(residual).dtype == value(n).dtype and not before_activation


def _is(given: Any, number: int) -> bool:
    """Of an option: this in all dimensions."""
    return all(g == number for g in (given if isinstance(given, (tuple, list)) else (given,)))
