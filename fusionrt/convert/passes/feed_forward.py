"""Feed-forward blocks where gradients are recorded: the hidden layer is not kept, but computed again."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert.cluster import Cluster, homes
from fusionrt.convert.effects import value
from fusionrt.convert.fused import traced
from fusionrt.convert.graph import Edits, is_tensor, present
from fusionrt.convert.match import linear_layer
from fusionrt.convert.passes.convolution import is_plain
from fusionrt.convert.passes.linear import statistic
from fusionrt.convert.tail import catalogue, tail_of
from fusionrt.expr import Expr, argument
from fusionrt.ops.ffn import ffn, geglu_mlp, swiglu_mlp

Given = dict[str, Any]


def feed_forward(edits: Edits) -> None:
    """Linear, activation, dropout, linear; and act(gate) * up between linear layers. At inference they are
    left to the passes for their parts."""
    clusters = homes(edits, lambda n: _linear(n) is not None and value(n).requires_grad)
    for n in edits.nodes():
        given = _linear(n)
        hidden: Any = given["input"] if given is not None and value(n).requires_grad else None
        cluster = clusters.get(hidden)
        if given is None or cluster is None or list(hidden.users) != [n] or cluster.results != [hidden]:
            continue
        products = cluster.operands()
        if not all(map(is_tensor, products)):  # symbols
            continue
        if len(products) == 1:
            _plain(edits, n, given, products[0], clusters)
        elif len(products) == 2:
            _gated(edits, n, given, products, cluster)
    edits.sort()


def _linear(n: Node) -> Given | None:
    """The arguments of a linear layer."""
    return linear_layer(n) if n.target is F.linear and is_plain(n) else None


def _plain(edits: Edits, n: Node, given: Given, product: Node, clusters: Mapping[Node, Cluster]) -> None:
    first, tail = _linear(product), tail_of(product, clusters)
    if first is None or tail is None or tail.activation is None or not edits.allows(
            n, [product, *tail.nodes, n]):
        return
    args = *first.values(), given["weight"], given["bias"]
    # What relu's derivative needs is the hidden layer, and it alone is kept then.
    edits.replace([product, *tail.nodes, n], n, ffn, args, statistic(tail.activation),
                  activation=tail.activation, recompute=tail.activation != "relu",
                  **present(dropout_p=tail.dropout_p or None))


def _gated(edits: Edits, n: Node, given: Given, products: list[Node], cluster: Cluster) -> None:
    inside = set(cluster.nodes)
    for gate, up in (products, products[::-1]):
        known = _gates().get(traced(cluster, [gate, up], cluster.results)[0])
        a, b = _linear(gate), _linear(up)
        if known is None or a is None or b is None or a["input"] is not b["input"]:
            continue
        old = [gate, up, *cluster.nodes, n]
        if set(gate.users) | set(up.users) <= inside and edits.allows(n, old):
            run, options = known
            edits.replace(old, n, run, (a["input"], a["weight"], b["weight"], given["weight"]), "gated_mlp",
                          recompute=True, **options,
                          **present(gate_bias=a["bias"], up_bias=b["bias"], down_bias=given["bias"]))
            return


@functools.cache
def _gates() -> dict[Expr, tuple[Any, dict[str, Any]]]:
    """What stands between, of gate and up, and the op that has it."""
    up, found = argument("a1"), {}
    for name, op, options in (("silu", swiglu_mlp, {}), ("gelu", geglu_mlp, {}),
                              ("gelu_tanh", geglu_mlp, {"approximate": "tanh"})):
        activated = catalogue()[name]
        found.update(dict.fromkeys((activated * up, up * activated), (op, options)))
    return found
