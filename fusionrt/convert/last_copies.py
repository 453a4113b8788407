"""Results that a graph copies last, to where torch's would lie. A replay copies its results to memory of the
caller's anyway: then it can do so straight from where they are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node

from fusionrt.convert.calls import with_strides
from fusionrt.convert.effects import value


def without_last_copies(gm: GraphModule) -> tuple[Callable[..., Any], dict[int, Sequence[int]]] | None:
    """The graph's function without them, and the strides of the copies by the place of the result; None where
    there are none."""
    output = next(n for n in gm.graph.nodes if n.op == "output")
    last = _last_copies(output)
    if not last:
        return None
    graph, copies = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(gm.graph, copies))
    for n in last:
        copies[n].replace_all_uses_with(copies[n.all_input_nodes[0]])
        graph.erase_node(copies[n])
    strides = {k: value(n).stride() for k, n in enumerate(output.args[0]) if n in last}
    return GraphModule(gm, graph).forward, strides


def _last_copies(output: Node) -> list[Node]:
    """Nothing that they read is written to behind them, and nobody else has it."""
    found: list[Node] = []
    results, n = output.all_input_nodes, output.prev
    while _is_copy(n) and list(n.users) == [output]:
        found.append(n)
        n = n.prev
    sources = [n.all_input_nodes[0] for n in found]
    flat = isinstance(output.args[0], (tuple, list))
    return [n for n, source in zip(found, sources, strict=True)
            if flat and source not in results and sources.count(source) == 1]


def _is_copy(n: Node) -> bool:
    is_method = n.op == "call_method" and n.target == "contiguous" and len(n.args) == 1 and not n.kwargs
    return (n.target is with_strides or is_method) and all(
        isinstance(size, int) for size in (*value(n).shape, *value(n).stride()))
