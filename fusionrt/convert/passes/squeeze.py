"""Squeeze and excitation: images times a gate that two 1 × 1 convolutions make of their mean."""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from torch.nn import functional as F

from fusionrt import functions as p
from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, arguments, is_tensor, same
from fusionrt.convert.match import named, only_users, rule_of
from fusionrt.convert.passes.pixels import is_linear_of_pixels
from fusionrt.convert.squeeze_excite import DTYPES, squeeze_excite
from fusionrt.ops.convolution import conv_activation

DEVICES = ("cuda",)


def squeeze(edits: Edits) -> None:
    """One call where no gradients are recorded, of images in channels_last memory."""
    for n in edits.nodes():
        factors = n.args if rule_of(n) is p.mul and len(n.args) == 2 and all(map(is_tensor, n.args)) else ()
        for x, gate in (factors, factors[::-1]) if factors else ():
            if _replaced(edits, n, x, gate):
                break


def _replaced(edits: Edits, n: Node, x: Any, gate: Any) -> bool:
    second = _convolution(gate)
    first = _convolution(second.args[0]) if second is not None else None
    if first is None or not _is_mean(first.args[0], x) or not _fits(n, x, first, second):
        return False
    old = [first.args[0], first, second, n]
    if not only_users(old[:-1], old) or not edits.allows(n, old):
        return False
    edits.replace(old, n, squeeze_excite, (x, *first.args[1:3], *second.args[1:3]), "squeeze_excite",
                  inner=first.kwargs["activation"], outer=second.kwargs["activation"])
    return True


def _convolution(n: Any) -> Any:
    """A 1 × 1 convolution with a bias and an activation that has a name."""
    fits = (isinstance(n, Node) and n.target is conv_activation and is_linear_of_pixels(n)
            and n.args[2] is not None and isinstance(n.kwargs["activation"], str)
            and not n.kwargs.get("residual"))
    return n if fits else None


def _is_mean(n: Any, x: Any) -> bool:
    """Whether it is the mean of x over its pixels, in four dimensions."""
    if not isinstance(n, Node) or not n.args or n.args[0] is not x:
        return False
    if n.target is F.adaptive_avg_pool2d:
        return len(n.args) == 2 and n.args[1] in (1, (1, 1), [1, 1])
    given = arguments(n, input=None, dim=None, keepdim=False) if named(n, "mean") else None
    return (given is not None and given["keepdim"] is True and isinstance(given["dim"], (tuple, list))
            and sorted(d % 4 for d in given["dim"]) == [2, 3])


def _fits(n: Node, x: Node, *convolutions: Node) -> bool:
    t, images = value(n), value(x)
    tensors = [t, images, *(value(a) for c in convolutions for a in c.all_input_nodes)]
    return (t.device.type in DEVICES and images.dim() == 4 and images.stride(1) == 1 and t.stride(1) == 1
            and same(t.shape, images.shape) and images.dtype in DTYPES
            and all(a.dtype == t.dtype and not a.requires_grad for a in (t, images))
            and all(a.dtype == t.dtype for a in tensors))
