"""Norms and activations that a model spells out become calls of torch's, which later passes know."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert import pointwise as p
from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, arguments, same
from fusionrt.convert.match import (
    factors,
    is_last_dim,
    named,
    only_users,
    plus_constant,
    rule_of,
    without_conversions,
)


def rms_norm(edits: Edits) -> None:
    """x * rsqrt(mean(x ** 2) + eps), as the RMS norms of Llama and T5 have it, with their conversions."""
    for n in edits.nodes():
        found = _of_rsqrt(n)
        product = next(iter(n.users)) if found is not None and len(n.users) == 1 else None
        if found is None or product is None or rule_of(product) is not p.mul or not edits.allows(product):
            continue
        x, eps, inner = found
        other = product.args[0] if product.args[1] is n else product.args[1]
        if without_conversions(other) is not without_conversions(x) or value(product).dtype != value(x).dtype:
            continue
        edits.replace([*inner, n, product], product, F.rms_norm, (x, (value(x).shape[-1],), None, eps), None)


def _of_rsqrt(n: Node) -> tuple[Node, float, list[Node]] | None:
    """x, eps and the calls of rsqrt(mean(x ** 2, -1, keepdim=True) + eps) before its last one."""
    total = plus_constant(n.args[0]) if named(n, "rsqrt") and n.args else None
    mean = total[0] if total is not None else None
    if mean is None or total is None or not named(mean, "mean") or not isinstance(mean.args[0], Node):
        return None
    squares, dim = mean.args[0], mean.args[1] if len(mean.args) > 1 else mean.kwargs.get("dim")
    keeps = mean.kwargs.get("keepdim", mean.args[2] if len(mean.args) > 2 else False)
    scale, xs = factors(squares)
    if scale != 1 or len(xs) != 2 or xs[0] is not xs[1] or keeps is not True or mean.kwargs.get("dtype"):
        return None
    inner = [squares, mean, n.args[0]]
    fits = is_last_dim(dim, value(squares)) and isinstance(value(xs[0]).shape[-1], int)
    if not fits or not only_users(inner, [*inner, n]) or value(n).dtype != value(xs[0]).dtype:
        return None
    return xs[0], total[1], inner


def gelu(edits: Edits) -> None:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x ** 3))) and 0.5 x (1 + erf(x / sqrt(2)))."""
    for n in edits.nodes():
        half, xs = factors(n) if rule_of(n) is p.mul else (0.0, [])
        if not _near(half, 0.5) or len(xs) != 2:
            continue
        for x, factor in (xs, xs[::-1]):
            approximate = _approximate(factor, x)
            inner = _between(n, x) if approximate is not None else []
            if approximate is not None and only_users(inner, [*inner, n]) and edits.allows(n):
                edits.replace([*inner, n], n, F.gelu, (x,), None, approximate=approximate)
                break


def _approximate(factor: Any, x: Node) -> str | None:
    """Which GELU 0.5 x times this factor is."""
    of_one = plus_constant(factor)
    if of_one is None or of_one[1] != 1 or not named(of_one[0], "tanh", "erf"):
        return None
    scale, us = factors(of_one[0].args[0])
    if named(of_one[0], "erf"):
        return "none" if us == [x] and _near(scale, math.sqrt(0.5)) else None
    if not _near(scale, math.sqrt(2 / math.pi)):
        return None
    if len(us) == 1 and rule_of(us[0]) is p.add and len(us[0].args) == 2:
        cubes = [a for a in us[0].args if a is not x]
        return "tanh" if len(cubes) == 1 and _is_power(cubes[0], x, 3) else None
    rest = [plus_constant(u) for u in us if u is not x]
    first = rest[0] if len(rest) == 1 and len(us) == 2 else None
    return "tanh" if first is not None and first[1] == 1 and _is_power(first[0], x, 2) else None


def _is_power(n: Any, x: Node, exponent: int) -> bool:
    scale, xs = factors(n)
    return _near(scale, 0.044715) and xs == [x] * exponent


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6)


def _between(n: Node, x: Node) -> list[Node]:
    """The calls that lead from x to n, in order."""
    found: dict[Node, None] = {}

    def visit(m: Node) -> None:
        for a in m.all_input_nodes:
            if a is not x and a not in found:
                visit(a)
                found[a] = None

    visit(n)
    return list(found)


def addmm(edits: Edits) -> None:
    """bias + x @ weight, as GPT-2 has it, of x in two dimensions and back: a linear layer of the transposed
    weight."""
    for n in edits.nodes():
        given = arguments(n, input=None, mat1=None, mat2=None) if n.target is torch.addmm else None
        if given is None or not same(value(given["input"]).shape, value(n).shape[1:]) or not edits.allows(n):
            continue
        x, old = given["mat1"], [n]
        after = next(iter(n.users)) if len(n.users) == 1 else None
        if named(x, "view", "reshape") and named(after, "view", "reshape") and after is not None:
            whole = x.args[0]
            if same((*value(whole).shape[:-1], value(n).shape[1]), value(after).shape) and same(
                value(whole).shape[-1], value(x).shape[1]
            ):
                x, old = whole, [n, after]
        weight = edits.call(torch.t, (given["mat2"],), {}, n, given=value(given["mat2"]).t())
        edits.replace(old, old[-1], F.linear, (x, weight, given["input"]), None)
