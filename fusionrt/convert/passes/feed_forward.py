"""Feed-forward blocks where gradients are recorded: the hidden layer is not kept, but computed again."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert.cluster import Cluster, Clustering
from fusionrt.convert.effects import value
from fusionrt.convert.fused import traced
from fusionrt.convert.graph import Edits, arguments, present
from fusionrt.convert.passes.convolution import is_plain
from fusionrt.convert.passes.linear import STATISTICS
from fusionrt.convert.tail import catalogue, tail_of
from fusionrt.expr import Expr, argument
from fusionrt.ops.ffn import ffn, geglu_mlp, swiglu_mlp

Given = dict[str, Any]


def feed_forward(edits: Edits) -> None:
    """Linear, activation, dropout, linear; and act(gate) * up between linear layers. At inference they are
    left to the passes for their parts."""
    clusters = Clustering(edits.facts).of
    for n in edits.nodes():
        given = _linear(n)
        hidden = given["input"] if given is not None and value(n).requires_grad else None
        cluster = clusters.get(hidden)
        if given is None or cluster is None or list(hidden.users) != [n] or cluster.results != [hidden]:
            continue
        products = [a for a in cluster.operands() if isinstance(value(a), torch.Tensor)]
        if len(products) == 1:
            _plain(edits, n, given, products[0], clusters)
        elif len(products) == 2:
            _gated(edits, n, given, products, cluster)
    edits.sort()


def _linear(n: Any) -> Given | None:
    """The arguments of a linear layer."""
    found = isinstance(n, Node) and n.target is F.linear and is_plain(n)
    return arguments(n, input=None, weight=None, bias=None) if found else None


def _plain(edits: Edits, n: Node, given: Given, product: Node, clusters: Mapping[Node, Cluster]) -> None:
    first, tail = _linear(product), tail_of(product, clusters)
    if first is None or tail is None or tail.activation is None or not edits.allows(n):
        return
    args = first["input"], first["weight"], first["bias"], given["weight"], given["bias"]
    # What relu's derivative needs is the hidden layer, and it alone is kept then.
    edits.replace(
        [product, *tail.nodes, n],
        n,
        ffn,
        args,
        STATISTICS.get(tail.activation, "linear_activation"),
        activation=tail.activation,
        recompute=tail.activation != "relu",
        **present(dropout_p=tail.dropout_p or None),
    )


def _gated(edits: Edits, n: Node, given: Given, products: list[Node], cluster: Cluster) -> None:
    (hidden,) = cluster.results
    for gate, up in (products, products[::-1]):
        layers = _linear(gate), _linear(up)
        known = _gates().get(traced(cluster, [gate, up], [hidden])[0])
        if (
            known is None
            or layers[0] is None
            or layers[1] is None
            or layers[0]["input"] is not layers[1]["input"]
        ):
            continue
        inside = set(cluster.nodes)
        if all(set(p.users) <= inside for p in products) and edits.allows(n):
            run, options = known
            args = layers[0]["input"], layers[0]["weight"], layers[1]["weight"], given["weight"]
            edits.replace(
                [gate, up, *cluster.nodes, n],
                n,
                run,
                args,
                "gated_mlp",
                recompute=True,
                **options,
                **present(gate_bias=layers[0]["bias"], up_bias=layers[1]["bias"], down_bias=given["bias"]),
            )
            return


@functools.cache
def _gates() -> dict[Expr, tuple[Any, dict[str, Any]]]:
    """What stands between, of gate and up, and the op that has it."""
    up = argument("a1")
    found = {}
    for name, op, options in (
        ("silu", swiglu_mlp, {}),
        ("gelu", geglu_mlp, {}),
        ("gelu_tanh", geglu_mlp, {"approximate": "tanh"}),
    ):
        activated = catalogue()[name]
        found.update({activated * up: (op, options), up * activated: (op, options)})
    return found
