"""Graphs of expressions: their order, their leaves, substitution, text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fusionrt.expr import Expr, node

Analysis = TypeVar("Analysis", bound=Callable[..., Any])


def of_roots(analysis: Analysis) -> Analysis:
    """What follows from expressions is found once: each new shape asks for all of it."""
    found = functools.lru_cache(1024)(analysis)
    asked: Any = functools.wraps(analysis)(lambda roots, *more: found(tuple(roots), *more))
    return asked


def toposort(roots: Iterable[Expr], given: Container[Expr] = ()) -> Sequence[Expr]:
    """Every node that the roots need beside the given ones, operands first."""
    return _sorted(roots, given) if given else _sorted_once(roots)


def _sorted(roots: Iterable[Expr], given: Container[Expr] = ()) -> tuple[Expr, ...]:
    order: dict[Expr, None] = {}
    pending = list(roots)[::-1]
    while pending:  # not by recursion: a loop that a function unrolls makes long chains
        n = pending[-1]
        operands = [] if n in order or n in given else [
            a for a in n.args if isinstance(a, Expr) and a not in order and a not in given]
        if operands:
            pending += operands[::-1]
            continue
        pending.pop()
        if n not in given:
            order.setdefault(n)
    return tuple(order)


_sorted_once = of_roots(_sorted)


@of_roots
def leaves(roots: Sequence[Expr], op: str) -> Sequence[str]:
    """Names of the arguments (`arg`), random streams (`random`) or masks (`mask`) that the roots really
    need."""
    return tuple(str(n.args[0]) for n in toposort(roots) if n.op == op)


def substitute(roots: Iterable[Expr], replacement: Mapping[Expr, Expr]) -> list[Expr]:
    """The same expressions with some nodes replaced."""
    made: dict[Expr, Expr] = dict(replacement)
    for n in toposort(roots):
        if n not in made:
            is_leaf = n.primitive.is_leaf
            made[n] = n if is_leaf else node(n.op, *(made[a] for a in n.args if isinstance(a, Expr)))
    return [made[r] for r in roots]


def emit(roots: Sequence[Expr], declare: str, given: Mapping[Expr, str] | None = None, stem: str = "t"
         ) -> tuple[list[str], list[str]]:
    """One assignment a node, in dependency order: (statements, names of the roots).

    `declare` is the form of an assignment: `"{} = {}"`, or `"const auto {} = {};"`; `given` names what
    has been computed; `stem` begins the names that are made here.
    """
    names: dict[Expr, str] = dict(given or {})
    lines: list[str] = []
    for n in toposort(roots, names):
        if n.primitive.is_leaf:
            names[n] = n.primitive.text.format(n.args[0])
        else:
            names[n] = f"{stem}{len(lines)}"
            operands = (names[a] for a in n.args if isinstance(a, Expr))
            lines.append(declare.format(names[n], n.primitive.text.format(*operands)))
    return lines, [names[r] for r in roots]
