"""x * cos + rotate_half(x) * sin, of queries and keys, becomes one call of `rotary_embedding`."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fusionrt.convert import pointwise as p
from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, same
from fusionrt.convert.match import factors, is_last_dim, named, only_users, rule_of
from fusionrt.ops.rotary import rotary_embedding


class Rotation(NamedTuple):
    result: Node
    x: Node
    cos: Node
    sin: Node
    layout: str
    nodes: list[Node]


def rotary(edits: Edits) -> None:
    """Two with the same tables, of which neither needs the other, in one kernel."""
    waiting: dict[Any, Rotation] = {}
    for n in edits.nodes():
        found = _rotation(n)
        if found is None or not edits.allows(found.result):
            continue
        key = found.cos, found.sin, found.layout
        other = waiting.pop(key, None)
        if other is not None and _fit(other, found):
            _both(edits, other, found)
        else:
            if other is not None:
                _one(edits, other)
            waiting[key] = found
    for left in waiting.values():
        _one(edits, left)
    edits.sort()


def _one(edits: Edits, r: Rotation) -> None:
    edits.replace(r.nodes, r.result, rotary_embedding, (r.x, None, r.cos, r.sin), "rotary", layout=r.layout)


def _both(edits: Edits, q: Rotation, k: Rotation) -> None:
    edits.note(q.result, None)
    edits.note(k.result, "rotary")
    made = edits.call(
        rotary_embedding,
        (q.x, k.x, q.cos, q.sin),
        {"layout": q.layout},
        k.result,
        given=(value(q.result), value(k.result)),
    )
    for at, r in enumerate((q, k)):
        r.result.replace_all_uses_with(
            edits.call(operator.getitem, (made, at), {}, k.result, given=value(r.result))
        )
    edits.erase([*q.nodes, *k.nodes])


def _fit(a: Rotation, b: Rotation) -> bool:
    """Whether one call can take both: the same batch, length and dtype; b does not need a."""
    x, y = value(a.x), value(b.x)
    heads = 1 if a.layout == "bhsd" else 2
    sizes = [[size for d, size in enumerate(t.shape) if d != heads] for t in (x, y)]
    return x.dtype == y.dtype and same(*sizes) and not _needs(b.x, a.result)


def _needs(n: Node, wanted: Node) -> bool:
    seen: set[Node] = set()
    left = [n]
    while left:
        m = left.pop()
        if m is wanted:
            return True
        left += [a for a in m.all_input_nodes if a not in seen]
        seen.update(m.all_input_nodes)
    return False


# -- the pattern -------------------------------------------------------------------------------------


def _rotation(cat: Node) -> Rotation | None:
    x = _half_turned(cat)
    of_sin = next(iter(cat.users)) if x is not None and len(cat.users) == 1 else None
    total = next(iter(of_sin.users)) if of_sin is not None and len(of_sin.users) == 1 else None
    if x is None or of_sin is None or total is None or rule_of(total) is not p.add or len(total.args) != 2:
        return None
    of_cos: Any = next((a for a in total.args if a is not of_sin), None)
    sin, cos = _other_factor(of_sin, cat), _other_factor(of_cos, x)
    if sin is None or cos is None or value(total).dtype != value(x).dtype or value(x).dim() != 4:
        return None
    layouts = {_table(t, x) for t in (cos, sin)}
    layout = layouts.pop()
    halves = cat.args[0]
    nodes = [*_halves(halves), cat, of_cos, of_sin, total]
    if layouts or layout is None or not only_users(nodes[:-1], nodes):
        return None
    return Rotation(total, x, cos.args[0], sin.args[0], layout, nodes)


def _half_turned(n: Node) -> Node | None:
    """x of cat((-x2, x1)), its halves."""
    if not named(n, "cat", "concat") or not isinstance(n.args[0], tuple | list) or len(n.args[0]) != 2:
        return None
    dim = n.args[1] if len(n.args) > 1 else n.kwargs.get("dim", 0)
    negative, first = n.args[0]
    if not is_last_dim(dim, value(n)) or rule_of(negative) is not p.neg:
        return None
    x = _part(first, 0)
    return x if x is not None and _part(negative.args[0], 1) is x else None


def _halves(parts: Any) -> list[Node]:
    """The calls that make the operands of cat((-x2, x1)), in order, without a chunk that both come from."""
    negative, first = parts
    return [first, negative.args[0], negative]


def _part(n: Any, which: int) -> Node | None:
    """x of its first or second half of the last dimension."""
    if not isinstance(n, Node) or n.target is not operator.getitem:
        return None
    x, index = n.args
    if not isinstance(x, Node) or not isinstance(value(x), torch.Tensor) or not isinstance(index, tuple):
        return None
    half = value(x).shape[-1] // 2 if isinstance(value(x).shape[-1], int) else None
    expected = slice(None, half, None) if which == 0 else slice(half, None, None)
    whole = all(i is Ellipsis or i == slice(None, None, None) for i in index[:-1])
    reaches = Ellipsis in index[:-1] or len(index) == value(x).dim()
    return (
        x if half and half * 2 == value(x).shape[-1] and whole and reaches and index[-1] == expected else None
    )


def _other_factor(product: Any, one: Node) -> Node | None:
    scale, both = factors(product) if rule_of(product) is p.mul else (0.0, [])
    rest = [f for f in both if f is not one]
    return rest[0] if scale == 1 and len(both) == 2 and len(rest) == 1 else None


def _table(n: Node, x: Node) -> str | None:
    """The layout of x that an unsqueezed table fits, whose two halves are equal; None for what does not
    fit."""
    if (
        not named(n, "unsqueeze")
        or value(n).dim() != 4
        or value(n).requires_grad
        or value(n).device != value(x).device
    ):
        return None
    at: Any = n.args[1] if len(n.args) > 1 else n.kwargs.get("dim")
    layout = {1: "bhsd", -3: "bhsd", 2: "bshd", -2: "bshd"}.get(at)
    batch, length, width = value(n.args[0]).shape
    sizes = value(x).shape
    fits = (
        layout is not None
        and same(length, sizes[2 if layout == "bhsd" else 1])
        and same(width, sizes[3])
        and (same(batch, 1) or same(batch, sizes[0]))
    )
    return layout if fits and _is_doubled(n.args[0]) else None


def _is_doubled(n: Any) -> bool:
    """Whether its two halves of the last dimension are equal by how it is made."""
    while isinstance(n, Node):
        if named(n, "cat", "concat"):
            parts = n.args[0]
            dim = n.args[1] if len(n.args) > 1 else n.kwargs.get("dim", 0)
            return (
                isinstance(parts, tuple | list)
                and len(parts) == 2
                and parts[0] is parts[1]
                and is_last_dim(dim, value(n))
            )
        operands = n.all_input_nodes
        if rule_of(n) is None or len(operands) != 1:
            return False
        n = operands[0]
    return False
