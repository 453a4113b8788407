"""x * cos + rotate_half(x) * sin, of queries and keys, becomes one call of `rotary_embedding`."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torch.fx import Node

from fusionrt import functions as p
from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, is_tensor, same
from fusionrt.convert.match import factors, is_last_dim, is_sum, named, only_users, rule_of
from fusionrt.ops.rotary import rotary_embedding

_WHOLE = slice(None, None, None)


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
        if found is None or not edits.allows(found.result, found.nodes):
            continue
        tables = found.cos, found.sin, found.layout
        other = waiting.pop(tables, None)
        if other is not None and _fit(edits, other, found):
            _both(edits, other, found)
            continue
        if other is not None:
            _one(edits, other)
        waiting[tables] = found
    for left in waiting.values():
        _one(edits, left)
    edits.sort()


def _one(edits: Edits, r: Rotation) -> None:
    edits.replace(r.nodes, r.result, rotary_embedding, (r.x, None, r.cos, r.sin), "rotary", layout=r.layout)


def _both(edits: Edits, q: Rotation, k: Rotation) -> None:
    edits.note(q.result, None)
    edits.note(k.result, "rotary")
    at = k.result
    made = edits.call(rotary_embedding, (q.x, k.x, q.cos, q.sin), {"layout": q.layout}, at,
                      given=(value(q.result), value(k.result)))
    for place, r in enumerate((q, k)):
        part = edits.call(operator.getitem, (made, place), {}, at, given=value(r.result))
        r.result.replace_all_uses_with(part)
    edits.erase([*q.nodes, *k.nodes])


def _fit(edits: Edits, a: Rotation, b: Rotation) -> bool:
    """Whether one call can take both: the same batch, length and dtype; b does not need a."""
    x, y = value(a.x), value(b.x)
    heads = 1 if a.layout == "bhsd" else 2
    sizes = [[size for d, size in enumerate(t.shape) if d != heads] for t in (x, y)]
    return (x.dtype == y.dtype and same(*sizes) and not _needs(b.x, a.result)
            and edits.allows(b.result, [*a.nodes, *b.nodes]))


def _needs(n: Node, wanted: Node) -> bool:
    seen, left = {n}, [n]
    while left:
        m = left.pop()
        if m is wanted:
            return True
        new = [a for a in m.all_input_nodes if a not in seen]
        seen.update(new)
        left += new
    return False


# -- the pattern -------------------------------------------------------------------------------------

def _rotation(cat: Node) -> Rotation | None:
    x = _half_turned(cat)
    of_sin = next(iter(cat.users)) if x is not None and len(cat.users) == 1 else None
    total = next(iter(of_sin.users)) if of_sin is not None and len(of_sin.users) == 1 else None
    if x is None or of_sin is None or total is None or not is_sum(total):
        return None
    of_cos: Any = next((a for a in total.args if a is not of_sin), None)
    sin: Any = _other_factor(of_sin, cat)
    cos: Any = _other_factor(of_cos, x)
    if sin is None or cos is None or value(total).dtype != value(x).dtype or value(x).dim() != 4:
        return None
    layout = _layout(cos, x)
    halves: Any = cat.args[0]
    negative, first = halves
    nodes = [first, negative.args[0], negative, cat, of_cos, of_sin, total]
    if layout is None or _layout(sin, x) != layout or not only_users(nodes[:-1], nodes):
        return None
    return Rotation(total, x, cos.args[0], sin.args[0], layout, nodes)


def _half_turned(n: Node) -> Node | None:
    """x of cat((-x2, x1)), its halves."""
    parts: Any = n.args[0] if named(n, "cat", "concat") else None
    if not isinstance(parts, (tuple, list)) or len(parts) != 2 or not _is_of_last_dim(n):
        return None
    negative, first = parts
    x = _part(first, 0) if rule_of(negative) is p.neg else None
    return x if x is not None and _part(negative.args[0], 1) is x else None


def _is_of_last_dim(cat: Node) -> bool:
    return is_last_dim(cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0), value(cat))


def _part(n: Any, which: int) -> Node | None:
    """x of its first or second half of the last dimension."""
    if not isinstance(n, Node) or n.target is not operator.getitem:
        return None
    x, index = n.args
    width = value(x).shape[-1] if is_tensor(x) and value(x).dim() else None
    if not isinstance(width, int) or width % 2 or not isinstance(index, tuple):
        return None
    expected = slice(width // 2, None, None) if which else slice(None, width // 2, None)
    others = all(i is Ellipsis or i == _WHOLE for i in index[:-1])
    reaches = Ellipsis in index[:-1] or len(index) == value(x).dim()
    found: Any = x
    return found if others and reaches and index[-1] == expected else None


def _other_factor(product: Any, one: Node) -> Node | None:
    scale, both = factors(product) if rule_of(product) is p.mul else (0.0, [])
    rest = [f for f in both if f is not one]
    return rest[0] if scale == 1 and len(both) == 2 and len(rest) == 1 else None


def _layout(table: Node, x: Node) -> str | None:
    """That of x which an unsqueezed table fits, whose two halves are equal; None for what does not fit."""
    if not named(table, "unsqueeze") or value(table).dim() != 4 or value(table).requires_grad:
        return None
    at: Any = table.args[1] if len(table.args) > 1 else table.kwargs.get("dim")
    layout = {1: "bhsd", -3: "bhsd", 2: "bshd", -2: "bshd"}.get(at)
    batch, length, width = value(table.args[0]).shape
    sizes = value(x).shape
    fits = (layout is not None and same(length, sizes[2 if layout == "bhsd" else 1]) and same(width, sizes[3])
            and (same(batch, 1) or same(batch, sizes[0])) and value(table).device == value(x).device)
    return layout if fits and _is_doubled(table.args[0]) else None


def _is_doubled(n: Any) -> bool:
    """Whether its two halves of the last dimension are equal by how it is made."""
    while isinstance(n, Node):
        if named(n, "cat", "concat"):
            parts: Any = n.args[0]
            return len(parts) == 2 and parts[0] is parts[1] and _is_of_last_dim(n)
        operands = n.all_input_nodes
        if rule_of(n) is None or len(operands) != 1:
            return False
        n = operands[0]
    return False
