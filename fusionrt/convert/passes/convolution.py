"""Convolutions with what follows them: batch norm, a residual, an activation, dropout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert.cluster import Cluster, Clustering
from fusionrt.convert.effects import effect, value
from fusionrt.convert.graph import Edits, arguments, present
from fusionrt.convert.members import FLOATS
from fusionrt.convert.tail import Tail, tail_of

CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_OPTIONS = ("stride", "padding", "dilation", "groups")


def convolution(edits: Edits) -> None:
    """One call each: conv + bn + residual + activation, and conv + activation + dropout + residual."""
    clusters = Clustering(edits.facts).of
    for n in edits.nodes():
        given = (
            arguments(n, input=None, weight=None, bias=None, stride=1, padding=0, dilation=1, groups=1)
            if n.target in CONVOLUTIONS
            else None
        )
        if given is None or not is_plain(n):
            continue
        norm = next(iter(n.users)) if len(n.users) == 1 else None
        if norm is not None and norm.target is F.batch_norm:
            _with_norm(edits, n, given, norm, clusters)
        else:
            _with_activation(edits, n, given, clusters)
    edits.sort()


def is_plain(n: Node) -> bool:
    """Whether its tensors are of one floating dtype, or cast by autocast, and on one device."""
    tensors = [v for v in map(value, n.all_input_nodes) if isinstance(v, torch.Tensor)]
    t = value(n)
    return (
        t.device.type in ("cpu", "cuda")
        and t.layout == torch.strided
        and all(
            v.device == t.device
            and v.dtype in FLOATS
            and (v.dtype == t.dtype or torch.float64 not in (v.dtype, t.dtype))
            for v in (t, *tensors)
        )
    )


def norm_arguments(norm: Node) -> dict[str, Any] | None:
    return arguments(
        norm,
        input=None,
        running_mean=None,
        running_var=None,
        weight=None,
        bias=None,
        training=False,
        momentum=0.1,
        eps=1e-5,
    )


def _with_norm(
    edits: Edits, n: Node, given: dict[str, Any], norm: Node, clusters: Mapping[Node, Cluster]
) -> None:
    from fusionrt.ops.convolution import conv_bn_act

    of_norm = norm_arguments(norm)
    if of_norm is None or of_norm["input"] is not n or value(norm).dtype != value(n).dtype:
        return
    tail = whole_tail(edits, norm, clusters)
    args = (
        given["input"],
        given["weight"],
        given["bias"],
        *(of_norm[k] for k in ("running_mean", "running_var", "weight", "bias")),
    )
    if not edits.allows(tail.result):
        return
    edits.replace(
        [n, norm, *tail.nodes],
        tail.result,
        conv_bn_act,
        args,
        "conv_bn_relu" if tail.activation == "relu" else "conv_bn",
        effect(norm),
        activation=tail.activation,
        training=of_norm["training"],
        momentum=of_norm["momentum"],
        eps=of_norm["eps"],
        **present(residual=tail.residual),
        **{k: given[k] for k in _OPTIONS},
    )


def whole_tail(edits: Edits, norm: Node, clusters: Mapping[Node, Cluster]) -> Tail:
    """What follows a batch norm, if it can be taken along; else nothing."""
    tail = tail_of(norm, clusters, residual_first=True)
    return tail if tail is not None and edits.allows(tail.result) else Tail([], norm)


def _with_activation(edits: Edits, n: Node, given: dict[str, Any], clusters: Mapping[Node, Cluster]) -> None:
    from fusionrt.ops.convolution import conv_activation

    tail = tail_of(n, clusters)
    if tail is None or (tail.activation is None and not tail.dropout_p) or not edits.allows(tail.result):
        return
    edits.replace(
        [n, *tail.nodes],
        tail.result,
        conv_activation,
        (given["input"], given["weight"], given["bias"]),
        "conv_activation",
        activation=tail.activation,
        **present(dropout_p=tail.dropout_p or None, residual=tail.residual),
        **{k: given[k] for k in _OPTIONS},
    )
