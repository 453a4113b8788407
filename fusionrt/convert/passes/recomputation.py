"""Activations between convolutions that a training step makes again, instead of keeping them."""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, arguments, called
from fusionrt.ops.batch_norm import batch_norm
from fusionrt.ops.convolution import conv_activation, conv_bn_act

_OURS = (conv_activation, conv_bn_act)


def recomputation(edits: Edits) -> None:
    """Of norms in training whose result nobody reads but convolutions, which then are ours."""
    for n in edits.nodes():
        if (called(n) in (conv_bn_act, batch_norm) and n.kwargs.get("training") and value(n).requires_grad
                and all(_reads(u, n) for u in n.users) and edits.allows(n)):
            n.kwargs = {**n.kwargs, "recompute": True}
            edits.note(n, None)
            for u in list(n.users):
                if u.target is F.conv2d:
                    given = _plain(u) or {}
                    args = [given.pop(name) for name in ("input", "weight", "bias")]
                    edits.replace([u], u, conv_activation, args, None, activation=None, **given)


def _reads(u: Node, n: Node) -> bool:
    """As its images alone."""
    return (bool(u.args) and u.args[0] is n and (called(u) in _OURS or _plain(u) is not None)
            and n not in u.args[1:] and n not in u.kwargs.values())


def _plain(u: Node) -> dict[str, Any] | None:
    return None if u.target is not F.conv2d else arguments(
        u, input=None, weight=None, bias=None, stride=1, padding=0, dilation=1, groups=1)
