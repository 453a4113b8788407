"""Convolutions with what follows them: batch norm, a residual, an activation, dropout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert.cluster import Cluster, homes
from fusionrt.convert.effects import effect, value
from fusionrt.convert.graph import Edits, arguments, is_tensor, present, same
from fusionrt.convert.tail import Tail, tail_of
from fusionrt.dtypes import FLOATS
from fusionrt.ops.convolution import conv_activation, conv_bn_act

_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_OPTIONS = ("stride", "padding", "dilation", "groups")
Given = dict[str, Any]
Clusters = Mapping[Node, Cluster]


def convolution(edits: Edits) -> None:
    """One call each: conv + bn + residual + activation, and conv + activation + dropout + residual."""
    clusters = homes(edits, lambda n: n.target in _CONVOLUTIONS)
    for n in edits.nodes():
        given = _arguments(n) if n.target in _CONVOLUTIONS else None
        if given is None or not is_plain(n) or value(given["input"]).dim() != value(given["weight"]).dim():
            continue  # of one image without a batch
        norm = next(iter(n.users)) if len(n.users) == 1 else None
        if norm is not None and norm.target is F.batch_norm:
            _with_norm(edits, n, given, norm, clusters)
        else:
            _with_activation(edits, n, given, clusters)
    edits.sort()


def is_plain(n: Node) -> bool:
    """Whether its tensors are of one floating dtype, or cast by autocast, and on one device."""
    t = value(n)
    tensors = [t, *(v for v in map(value, n.all_input_nodes) if isinstance(v, torch.Tensor))]
    return t.device.type in ("cpu", "cuda") and all(
        v.device == t.device and v.layout == torch.strided and v.dtype in FLOATS
        and (v.dtype == t.dtype or torch.float64 not in (v.dtype, t.dtype)) for v in tensors)


def _arguments(n: Node) -> Given | None:
    return arguments(n, input=None, weight=None, bias=None, stride=1, padding=0, dilation=1, groups=1)


def norm_arguments(norm: Node) -> Given | None:
    """Of F.batch_norm, of one number a channel: of no numbers torch takes any statistics."""
    given = arguments(norm, input=None, running_mean=None, running_var=None, weight=None, bias=None,
                      training=False, momentum=0.1, eps=1e-5)
    channels = value(norm).shape[1:2]
    fits = all(same(value(a).shape, channels) for a in norm.all_input_nodes
               if is_tensor(a) and value(a).dim() == 1)  # the momentum may be a symbol
    return given if fits else None


def _with_norm(edits: Edits, n: Node, given: Given, norm: Node, clusters: Clusters) -> None:
    of = norm_arguments(norm)
    if of is None or of["input"] is not n or value(norm).dtype != value(n).dtype:
        return
    tail = tail_of_norm(edits, [n, norm], clusters)
    if not edits.allows(tail.result, [n, norm, *tail.nodes]):
        return
    args = [given[name] for name in ("input", "weight", "bias")]
    args += [of[name] for name in ("running_mean", "running_var", "weight", "bias")]
    edits.replace([n, norm, *tail.nodes], tail.result, conv_bn_act, args,
                  "conv_bn_relu" if tail.activation == "relu" else "conv_bn", effect(norm),
                  activation=tail.activation, **{name: of[name] for name in ("training", "momentum", "eps")},
                  **present(residual=tail.residual), **{name: given[name] for name in _OPTIONS})


def tail_of_norm(edits: Edits, nodes: list[Node], clusters: Clusters) -> Tail:
    """What follows a norm, the last of the nodes, if it can be taken along; else nothing."""
    tail = tail_of(nodes[-1], clusters, residual_first=True)
    taken = tail is not None and edits.allows(tail.result, [*nodes, *tail.nodes])
    return tail if tail is not None and taken else Tail([], nodes[-1])


def _with_activation(edits: Edits, n: Node, given: Given, clusters: Clusters) -> None:
    tail = tail_of(n, clusters)
    if tail is None or (tail.activation is None and not tail.dropout_p) or not edits.allows(
            tail.result, [n, *tail.nodes]):
        return
    edits.replace([n, *tail.nodes], tail.result, conv_activation,
                  [given[name] for name in ("input", "weight", "bias")], "conv_activation",
                  activation=tail.activation, **{name: given[name] for name in _OPTIONS},
                  **present(dropout_p=tail.dropout_p or None, residual=tail.residual))
