"""Norms and activations that a model spells out become calls of torch's, which later passes know."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from fusionrt import functions as p
from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, arguments, same
from fusionrt.convert.match import (
    between,
    factors,
    is_last_dim,
    is_sum,
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
        if found is None or product is None or rule_of(product) is not p.mul:
            continue
        x, eps, inner = found
        other = product.args[0] if product.args[1] is n else product.args[1]
        old = [*inner, n, product]
        alike = without_conversions(other, exactly=True) is without_conversions(x, exactly=True)
        if alike and value(product).dtype == value(x).dtype and edits.allows(product, old):
            edits.replace(old, product, F.rms_norm, (x, (value(x).shape[-1],), None, eps), None)


def _of_rsqrt(n: Node) -> tuple[Node, float, list[Node]] | None:
    """x, eps and the calls before the last one of rsqrt(mean(x ** 2, -1, keepdim=True) + eps)."""
    total = plus_constant(n.args[0]) if named(n, "rsqrt") and n.args else None
    mean, eps = total if total is not None else (None, 0.0)
    if mean is None or not named(mean, "mean"):
        return None
    given = arguments(mean, input=None, dim=None, keepdim=False)
    if given is None or not isinstance(given["input"], Node) or given["keepdim"] is not True:
        return None
    squares: Node = given["input"]
    scale, xs = factors(squares)
    inner: list[Any] = [squares, mean, n.args[0]]
    fits = (scale == 1 and len(xs) == 2 and xs[0] is xs[1] and is_last_dim(given["dim"], value(squares))
            and isinstance(value(squares).shape[-1], int) and value(n).dtype == value(xs[0]).dtype)
    return (xs[0], eps, inner) if fits and only_users(inner, [*inner, n]) else None


def gelu(edits: Edits) -> None:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x ** 3))) and 0.5 x (1 + erf(x / sqrt(2)))."""
    for n in edits.nodes():
        half, xs = factors(n) if rule_of(n) is p.mul else (0.0, [])
        if not _near(half, 0.5) or len(xs) != 2:
            continue
        for x, factor in (xs, xs[::-1]):
            approximate = _approximate(factor, x)
            nodes = between([x], n) if approximate is not None else []
            if (approximate is not None and value(n).dtype == value(x).dtype  # of integers there is none
                    and only_users(nodes[:-1], nodes) and edits.allows(n, nodes)):
                edits.replace(nodes, n, F.gelu, (x,), None, approximate=approximate)
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
    if len(us) == 1 and is_sum(us[0]):
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


def addmm(edits: Edits) -> None:
    """bias + x @ weight, as GPT-2 has it, of x in two dimensions and back: a linear layer of the transposed
    weight."""
    for n in edits.nodes():
        given = arguments(n, input=None, mat1=None, mat2=None) if n.target is torch.addmm else None
        if given is None or not same(value(given["input"]).shape, value(n).shape[1:]):
            continue
        x, old = given["mat1"], [n]
        after = next(iter(n.users)) if len(n.users) == 1 else None
        if _changes_shape(x) and after is not None and _changes_shape(after):
            whole, flat = value(x.args[0]).shape, value(x).shape
            if same((*whole[:-1], value(n).shape[1]), value(after).shape) and same(whole[-1], flat[1]):
                x, old = x.args[0], [n, after]
        if edits.allows(old[-1], old) and not edits.facts.is_written(x):
            weight = edits.call(torch.t, (given["mat2"],), {}, n, given=value(given["mat2"]).t())
            edits.replace(old, old[-1], F.linear, (x, weight, given["input"]), None)


def _changes_shape(n: Node) -> bool:
    """And nothing else: there are views as another dtype."""
    return named(n, "view", "reshape") and value(n).dtype == value(n.args[0]).dtype
