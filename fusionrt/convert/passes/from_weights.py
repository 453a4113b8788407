"""What follows from weights alone (tables that an index spreads out, norms of weights) is computed once.

Once for the weights' present numbers: it is computed anew when one of them was written to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusionrt.convert import derived
from fusionrt.convert.effects import Facts, tensors, value
from fusionrt.convert.graph import DERIVED, Edits, is_weight
from fusionrt.convert.match import between
from fusionrt.convert.passes.constants import CONSTANT, LARGEST, can_be_known

ALL = 4 * LARGEST  # bytes: of what is kept of one graph


def from_weights(edits: Edits) -> None:
    """Where the graph records no gradients, and a kernel is saved: views cost nothing."""
    _merge(edits)
    left = ALL
    for root in _roots(edits.facts):
        size, nodes = value(root).numel() * value(root).itemsize, between([], root)
        weights = [n for n in nodes if n.op == "placeholder"]
        calls = [n for n in nodes if n.op.startswith("call")]
        if not weights or size > left or not edits.allows(root, calls):
            continue
        left -= size
        run = derived.kept_by(_computation(edits.gm, weights, nodes))
        made = edits.call(run, weights, {}, root)
        made.meta[DERIVED] = tuple(weights)
        root.replace_all_uses_with(made)
        edits.note(root, None)
        edits.erase([root])


def _merge(edits: Edits) -> None:
    """Equal calls: T5's layers arrange one bias each for themselves."""
    facts, first = edits.facts, dict[Any, Node]()
    for n in known_from_weights(facts):
        if n.op.startswith("call"):
            like = first.setdefault((n.target, repr((n.args, n.kwargs)), facts.region[n]), n)
            if like is not n:
                n.replace_all_uses_with(like)
                edits.erase([n])
    edits.changed()


def known_from_weights(facts: Facts) -> dict[Node, Node | None]:
    """Weights, constants and what follows from them, each with the call that has computed the numbers seen in
    it. Nothing of a graph that records gradients."""
    known: dict[Node, Node | None] = {}
    if any(t.requires_grad for n in facts.nodes if n.op.startswith("call") for t in tensors(value(n))):
        return known
    for n in facts.nodes:
        if _is_given(n, facts):
            known[n] = None
        elif _follows(n, known, facts):
            seen = next((a for a in n.all_input_nodes if _is_view(n, a)), None)
            known[n] = n if seen is None else known[seen]
    return known


def _roots(facts: Facts) -> list[Node]:
    """Values that others read; of several views of one value that value."""
    known = known_from_weights(facts)
    shown: dict[Node, list[Node]] = defaultdict(list)
    for n, kernel in known.items():
        if kernel is not None and isinstance(value(n), torch.Tensor) and any(u not in known for u in n.users):
            shown[kernel].append(n)
    return [root for kernel, views in shown.items()
            for root in ([kernel] if len(views) > 1 and isinstance(value(kernel), torch.Tensor) else views)]


def _is_given(n: Node, facts: Facts) -> bool:
    """A constant, a parameter or a table of whole numbers. What norms write to buffers no version tells."""
    t = value(n)
    return CONSTANT in n.meta or (
        n.op == "placeholder" and is_weight(n) and isinstance(t, torch.Tensor)
        and not derived.is_statistic(t) and not facts.is_written(n))


def _follows(n: Node, known: Container[Node], facts: Facts) -> bool:
    """Whether it is known, not kept already, and nothing (an autocast that begins) stands between it and what
    it is made of."""
    return (can_be_known(n, known, facts) and not facts.is_written(n) and DERIVED not in n.meta
            and all(facts.region[a] == facts.region[n] for a in n.all_input_nodes if a.op.startswith("call")))


def _is_view(n: Node, operand: Node) -> bool:
    memory = {t.untyped_storage()._cdata for t in tensors(value(operand))}
    return not memory.isdisjoint(t.untyped_storage()._cdata for t in tensors(value(n)))


def _computation(gm: GraphModule, weights: list[Node], nodes: list[Node]) -> GraphModule:
    """The last node as a function of the weights."""
    graph = Graph()
    made = {w: graph.placeholder(w.name) for w in weights}
    for n in nodes:
        if n not in made:
            made[n] = graph.node_copy(n, made.__getitem__)
    graph.output(made[nodes[-1]])
    return GraphModule(gm, graph)
