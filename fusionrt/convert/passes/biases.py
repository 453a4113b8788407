"""Biases of float32 linear layers apart from the product.

cuBLAS chooses a product with a bias among few kernels, none of which is split along K: of 128 rows they take
up to three times as long as the product alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert.calls import FEW_ROWS, linear
from fusionrt.convert.cluster import Cluster, Clustering
from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, arguments

DEVICES = ("cuda",)


def biases(edits: Edits) -> None:
    """linear(x, W) + b where no gradient is recorded: as part of the cluster that has all uses, or, of few
    rows, in a pass of its own."""
    clusters = Clustering(edits.facts).of
    for n in edits.nodes():
        given = arguments(n, input=None, weight=None, bias=None) if n.target is F.linear else None
        if given is None or given["bias"] is None or not _fits(n) or not edits.allows(n):
            continue
        if _are_in_one(n, clusters):
            made = edits.call(F.linear, (given["input"], given["weight"]), {}, n)
            edits.replace([n], n, torch.add, (made, given["bias"]), None)
        elif _has_few_rows(n):
            edits.replace([n], n, linear, tuple(given.values()), None)


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
