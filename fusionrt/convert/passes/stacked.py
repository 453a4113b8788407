"""Linear layers of one input as one, with their weights stacked: queries, keys and values, gate and up."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert import derived
from fusionrt.convert.effects import value
from fusionrt.convert.graph import DERIVED, Edits, arguments
from fusionrt.convert.revalue import revalue

DEVICES = ("cuda",)  # on a CPU little is gained
Group = list[tuple[Node, dict[str, Any]]]


def stacked(edits: Edits) -> None:
    """Where no gradients are recorded: the stacked weights are kept."""
    groups: dict[Any, Group] = defaultdict(list)
    for n in edits.graph.nodes:
        given = arguments(n, input=None, weight=None, bias=None) if n.target is F.linear else None
        if given is not None and _can_be_stacked(edits, n, given):
            groups[given["input"], given["bias"] is None, edits.facts.region[n]].append((n, given))
    for group in groups.values():
        weights = [given["weight"] for _, given in group]
        if len(set(weights)) == len(group) > 1 and edits.allows(group[-1][0]):
            _stack(edits, group)
    edits.changed()


def _can_be_stacked(edits: Edits, n: Node, given: dict[str, Any]) -> bool:
    tensors = [given["weight"], *([] if given["bias"] is None else [given["bias"]])]
    return (
        value(n).device.type in DEVICES
        and not edits.facts.is_written(n)
        and not value(n).requires_grad
        and value(n).dtype == value(given["input"]).dtype
        and all(t.op == "placeholder" and value(t).dtype == value(n).dtype for t in tensors)
    )


def _stack(edits: Edits, group: Group) -> None:
    """One product in the place of the first, and views of it."""
    first, given = group[0]
    widths = [value(g["weight"]).shape[0] for _, g in group]
    operands = [given["input"]]
    for name in ("weight", "bias"):
        if given[name] is not None:
            operands.append(_kept(edits, [g[name] for _, g in group], first))
    x = value(given["input"])
    whole = edits.call(F.linear, operands, {}, first, given=x.new_empty((*x.shape[:-1], sum(widths))))
    parts = edits.call(
        torch.split, (whole, widths, -1), {}, first, given=torch.split(value(whole), widths, -1)
    )
    views = [
        edits.call(operator.getitem, (parts, k), {}, first, given=value(parts)[k]) for k in range(len(group))
    ]
    for (n, _), view in zip(group, views, strict=True):
        n.replace_all_uses_with(view)
    if revalue(edits, views):
        for n, _ in group:
            edits.note(n, None)
        edits.counts["stacked_linear"] += 1
        edits.erase([n for n, _ in group])
        return
    for (n, _), view in zip(group, views, strict=True):
        view.replace_all_uses_with(n)
    edits.erase([*operands[1:], whole, parts, *views])


def _kept(edits: Edits, weights: list[Node], at: Node) -> Node:
    fake = value(weights[0])
    made = edits.call(
        derived.stacked,
        weights,
        {},
        at,
        given=fake.detach().new_empty((sum(value(w).shape[0] for w in weights), *fake.shape[1:])),
    )
    made.meta[DERIVED] = tuple(weights)
    return made
