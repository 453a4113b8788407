"""Biases of float32 linear layers and convolutions apart from the product.

cuBLAS chooses a product with a bias among few kernels, none of which is split along K: of 128 rows they take
up to three times as long as the product alone. That of a convolution torch adds in a pass of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert.calls import FEW_ROWS, linear
from fusionrt.convert.cluster import Cluster, homes
from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, arguments
from fusionrt.convert.match import linear_layer, named

DEVICES = ("cuda",)


class _Layer(NamedTuple):
    call: Callable[..., Any]
    args: tuple[Any, ...]   # input, weight, bias and others
    dim: int                # of the result, along which its bias lies


def biases(edits: Edits) -> None:
    """layer(x, W) + b where no gradient is recorded: as part of the cluster that has all uses, with its
    dimensions in whatever order; of few rows otherwise in a pass of its own."""
    clusters = homes(edits, lambda n: _layer(n) is not None)
    for n in edits.nodes():
        layer = _layer(n)
        if layer is None:
            continue
        moved = _moved(n)
        if _are_in_one(moved, clusters) and edits.allows(moved, [n, moved]):
            x, weight, bias, *more = layer.args
            made = edits.call(layer.call, (x, weight, None, *more), {}, n)
            made, bias = _as_moved(edits, moved, made, bias, layer.dim)
            edits.replace(list(dict.fromkeys([n, moved])), moved, torch.add, (made, bias), None)
        elif layer.call is F.linear and _has_few_rows(n) and edits.allows(n):
            edits.replace([n], n, linear, layer.args, None)


def _layer(n: Node) -> _Layer | None:
    """One with a bias that may lie apart."""
    given, dim = linear_layer(n), -1
    if n.target is F.conv2d:
        dim = -3  # there may be no batch
        given = arguments(n, input=None, weight=None, bias=None, stride=1, padding=0, dilation=1, groups=1)
    if given is None or given["bias"] is None or not _fits(n):
        return None
    return _Layer(n.target, tuple(given.values()), dim)  # type: ignore[arg-type]


def _moved(n: Node) -> Node:
    """The same with its dimensions in another order, if nobody reads it otherwise."""
    only = next(iter(n.users)) if len(n.users) == 1 else n
    return only if named(only, "permute", "transpose") and only.args[0] is n and not only.kwargs else n


def _as_moved(edits: Edits, moved: Node, made: Node, bias: Node, dim: int) -> tuple[Node, Node]:
    """The product and the bias, along `dim`, with their dimensions in the order of `moved`."""
    order = list(range(value(made).dim()))
    if moved.target not in (F.linear, F.conv2d):
        numbered = torch.empty(tuple(k + 1 for k in order), device="meta")
        call: Any = getattr(torch.Tensor, str(moved.target)) if moved.op == "call_method" else moved.target
        order = [size - 1 for size in call(numbered, *moved.args[1:]).shape]
        made = edits.call(torch.permute, (made, order), {}, moved)
    behind = len(order) - 1 - order.index(dim % len(order))
    if behind:
        shape = (-1, *[1] * behind)
        bias = edits.call(torch.reshape, (bias, shape), {}, moved, given=value(bias).reshape(shape))
    return made, bias


def _fits(n: Node) -> bool:
    t = value(n)
    tensors = [t, *(value(a) for a in n.all_input_nodes)]
    return (t.device.type in DEVICES and not t.requires_grad and t.dim() > 1
            and all(a.dtype == torch.float32 for a in tensors))


def _are_in_one(n: Node, clusters: Mapping[Node, Cluster]) -> bool:
    homes = [clusters.get(u) for u in n.users]
    return bool(homes) and homes[0] is not None and all(home is homes[0] for home in homes)


def _has_few_rows(n: Node) -> bool:
    rows = value(n).shape[:-1]
    return all(isinstance(size, int) for size in rows) and 1 < math.prod(rows) <= FEW_ROWS
