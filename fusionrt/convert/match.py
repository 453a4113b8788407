"""Recognising what a model has spelled out: products, sums, conversions, whoever wrote them in what order."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from fusionrt import functions as p
from fusionrt.convert.effects import value
from fusionrt.convert.graph import arguments, same
from fusionrt.convert.pointwise import CONVERSIONS, FUNCTIONS, METHODS


def rule_of(n: Any) -> Any:
    """The rule of a pointwise call, None for what is none."""
    if not isinstance(n, Node) or n.op not in ("call_function", "call_method"):
        return None
    rules: dict[Any, Any] = METHODS if n.op == "call_method" else FUNCTIONS
    return rules.get(n.target)


def named(n: Any, *names: str) -> bool:
    """Whether it calls a function or a method of one of these names."""
    if not isinstance(n, Node) or n.op not in ("call_function", "call_method"):
        return False
    return (n.target if n.op == "call_method" else getattr(n.target, "__name__", "")) in names


def factors(n: Any) -> tuple[float, list[Node]]:
    """A product as its constant factor and the others; x ** 3 has three."""
    if isinstance(n, (int, float)):
        return float(n), []
    rule = rule_of(n)
    if rule is p.mul and len(n.args) == 2:
        (a, left), (b, right) = map(factors, n.args)
        return a * b, left + right
    if rule is p.div and len(n.args) == 2 and not n.kwargs:
        divisor = n.args[1]
        if isinstance(divisor, (int, float)) and divisor:
            a, left = factors(n.args[0])
            return a / divisor, left
    if rule is p.pow_ and len(n.args) == 2 and n.args[1] in (2, 3):
        a, left = factors(n.args[0])
        return a ** n.args[1], left * int(n.args[1])
    if rule is p.square:
        a, left = factors(n.args[0])
        return a * a, left * 2
    return 1.0, [n]


def plus_constant(n: Any) -> tuple[Node, float] | None:
    """x and c of x + c."""
    if not is_sum(n):
        return None
    a, b = n.args
    if isinstance(b, (int, float)) and isinstance(a, Node):
        return a, float(b)
    return (b, float(a)) if isinstance(a, (int, float)) and isinstance(b, Node) else None


def is_sum(n: Any) -> bool:
    """Whether it adds two things, without a factor (`alpha`)."""
    return rule_of(n) is p.add and len(n.args) == 2 and not n.kwargs


def without_conversions(n: Any, exactly: bool = False) -> Any:
    """What was converted between floating dtypes; `exactly`: without losing anything."""
    while rule_of(n) in CONVERSIONS and all(
            isinstance(value(a), torch.Tensor) and value(a).is_floating_point() for a in (n, n.args[0])):
        to, of = value(n).dtype, value(n.args[0]).dtype
        if exactly and torch.promote_types(to, of) != to:
            break
        n = n.args[0]
    return n


def linear_layer(n: Any) -> dict[str, Any] | None:
    """Input, weight and bias of F.linear, of a matrix and one number a result: torch takes other shapes."""
    target = n.target if isinstance(n, Node) else None
    given = arguments(n, input=None, weight=None, bias=None) if target is F.linear else None
    if given is None or value(given["weight"]).dim() != 2:
        return None
    bias = given["bias"]
    return given if bias is None or same(value(bias).shape, value(given["weight"]).shape[:1]) else None


def is_last_dim(given: Any, t: torch.Tensor) -> bool:
    given = given[0] if isinstance(given, (tuple, list)) and len(given) == 1 else given
    return t.dim() > 0 and given in (-1, t.dim() - 1)


def only_users(nodes: Iterable[Node], inside: Collection[Node]) -> bool:
    """Whether nobody else uses these."""
    return all(u in inside for n in nodes for u in n.users)


def between(ends: Collection[Node | None], n: Node) -> list[Node]:
    """The calls that lead from the ends to n, in order, n the last."""
    found: dict[Node, None] = {}

    def visit(m: Node) -> None:
        for a in m.all_input_nodes:
            if a not in ends and a not in found:
                visit(a)
        found[m] = None

    visit(n)
    return list(found)
