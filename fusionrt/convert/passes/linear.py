"""Linear layers with the activation and the dropout that follow them."""

from __future__ import annotations

from typing import Any

from fusionrt.convert.cluster import homes
from fusionrt.convert.graph import Edits, present
from fusionrt.convert.match import linear_layer
from fusionrt.convert.passes.convolution import is_plain
from fusionrt.convert.tail import tail_of
from fusionrt.ops.linear import linear_activation


def linear(edits: Edits) -> None:
    """Only with an activation: a residual by itself goes into the norm behind it, or is one more kernel
    either way."""
    clusters = homes(edits, lambda n: linear_layer(n) is not None)
    for n in edits.nodes():
        given = linear_layer(n)
        tail = tail_of(n, clusters) if given is not None and is_plain(n) else None
        if given is None or tail is None or tail.activation is None or not edits.allows(
                tail.result, [n, *tail.nodes]):
            continue
        edits.replace([n, *tail.nodes], tail.result, linear_activation, list(given.values()),
                      statistic(tail.activation), activation=tail.activation,
                      **present(dropout_p=tail.dropout_p or None, residual=tail.residual))
    edits.sort()


def statistic(activation: Any) -> str:
    """What a linear layer with this activation is counted as."""
    known = {"relu": "linear_relu", "gelu": "linear_gelu", "gelu_tanh": "linear_gelu"}
    return known.get(activation, "linear_activation") if isinstance(activation, str) else "linear_activation"
