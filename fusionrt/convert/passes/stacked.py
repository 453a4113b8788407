"""Linear layers of one input as one, their weights stacked: queries, keys and values, gate and up."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert import derived
from fusionrt.convert.effects import value
from fusionrt.convert.graph import DERIVED, Edits
from fusionrt.convert.match import linear_layer
from fusionrt.convert.revalue import revalue

DEVICES = ("cuda",)  # on a CPU little is gained
Given = dict[str, Any]
Group = list[tuple[Node, Given]]


def stacked(edits: Edits) -> None:
    """Where no gradients are recorded: the stacked weights are kept."""
    groups: dict[Any, Group] = defaultdict(list)
    for n in edits.nodes():
        given = linear_layer(n)
        if given is not None and _can_be_stacked(edits, n, given):
            groups[given["input"], given["bias"] is None, edits.facts.region[n]].append((n, given))
    found = [group for group in groups.values()
             if len({given["weight"] for _, given in group}) == len(group) > 1 and edits.allows(group[-1][0])]
    if found and not _stack(edits, found):
        for group in found if len(found) > 1 else ():
            _stack(edits, [group])


def _can_be_stacked(edits: Edits, n: Node, given: Given) -> bool:
    """Results of the graph would keep the whole product alive."""
    facts, t = edits.facts, value(n)
    weights = [given["weight"], *([] if given["bias"] is None else [given["bias"]])]
    escapes = any(u.op == "output" for c in facts.classes[n] for m in facts.members[c] for u in m.users)
    return (t.device.type in DEVICES and not t.requires_grad and not escapes
            and value(given["input"]).dtype == t.dtype
            and not any(map(facts.is_written, (n, given["input"], *weights)))
            and all(w.op == "placeholder" and value(w).dtype == t.dtype for w in weights))


def _stack(edits: Edits, groups: Sequence[Group]) -> bool:
    """Whether what follows can take the results as views of one product; all is as it was where not."""
    made = [_product(edits, group) for group in groups]
    views = [(n, view) for group, nodes in zip(groups, made, strict=True)
             for (n, _), view in zip(group, nodes[-len(group):], strict=True)]
    for n, view in views:
        n.replace_all_uses_with(view)
    if revalue(edits, {view: value(n) for n, view in views}):
        for n, _ in views:
            edits.note(n, None)
        edits.counts["stacked_linear"] += len(groups)
        edits.erase([n for n, _ in views])
        return True
    for n, view in views:
        view.replace_all_uses_with(n)
    edits.erase([n for nodes in made for n in nodes])
    return False


def _product(edits: Edits, group: Group) -> list[Node]:
    """The calls of one product in the place of the first; the last are views of it, one a layer."""
    first, given = group[0]
    widths = [value(g["weight"]).shape[0] for _, g in group]
    weights = [_kept(edits, [g[name] for _, g in group], first)
               for name in ("weight", "bias") if given[name] is not None]
    x = value(given["input"])
    whole = edits.call(F.linear, (given["input"], *weights), {}, first,
                       given=x.new_empty((*x.shape[:-1], sum(widths))))
    fakes = torch.split(value(whole), widths, -1)
    parts = edits.call(torch.split, (whole, widths, -1), {}, first, given=fakes)
    return [*weights, whole, parts, *(edits.call(operator.getitem, (parts, k), {}, first, given=fake)
                                      for k, fake in enumerate(fakes))]


def _kept(edits: Edits, weights: list[Node], at: Node) -> Node:
    fake = value(weights[0])
    rows = sum(value(w).shape[0] for w in weights)
    made = edits.call(derived.stacked, weights, {}, at, given=fake.new_empty((rows, *fake.shape[1:])))
    made.meta[DERIVED] = tuple(weights)
    return made
