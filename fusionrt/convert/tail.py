"""What follows a convolution, a linear layer or a norm, as far as an op of ours takes it along."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fusionrt.catalogue import OPS
from fusionrt.convert.cluster import Cluster
from fusionrt.convert.effects import value
from fusionrt.convert.fused import lies, traced
from fusionrt.convert.graph import same
from fusionrt.expr import Expr, argument, node
from fusionrt.graph import leaves, substitute, toposort
from fusionrt.op_names import OPS as NAMES

_X, _RESIDUAL, _SUM = argument("a0"), argument("a1"), argument("sum")


class Tail(NamedTuple):
    """`nodes` compute `result`: activation(x) + residual, activation(x + residual) where the residual comes
    `first`, either of dropout(activation(x)). `activation`: None, a name of the catalogue, or a function of
    one traced value, the same object for the same function."""

    nodes: list[Node]
    result: Node
    activation: Any = None
    residual: Node | None = None
    first: bool = False
    dropout_p: float = 0.0


def tail_of(x: Node, clusters: Mapping[Node, Cluster], *, residual_first: bool = False) -> Tail | None:
    """What one cluster makes of x, all of whose uses it is, if that has the form of a Tail."""
    users = list(x.users)
    cluster = clusters.get(users[0]) if users else None
    if cluster is None or cluster.row is not None or any(clusters.get(u) is not cluster for u in users):
        return None
    results = cluster.results
    residuals = [n for n in cluster.operands() if n is not x]
    if (len(results) != 1 or len(residuals) > 1 or not all(_alike(n, x) for n in (*residuals, *results))
            or not lies(results[0], value(x).stride())):  # a residual may have decided otherwise
        return None
    root = traced(cluster, [x, *residuals], results)[0]
    residual = residuals[0] if residuals else None
    parts = _parts(root, residual is not None, residual_first)
    if parts is None:
        return None
    function, p = parts
    first = residual_first and residual is not None
    return Tail(cluster.nodes, results[0], activation(function), residual, first, p)


def _alike(n: Node, x: Node) -> bool:
    """Of x's shape and dtype: what an op takes as a residual, and gives."""
    a, b = value(n), value(x)
    return isinstance(a, torch.Tensor) and a.dtype == b.dtype and same(a.shape, b.shape)


def _parts(root: Expr, has_residual: bool, residual_first: bool) -> tuple[Expr, float] | None:
    """The activation as an expression of _X, and the dropout's probability."""
    p = 0.0
    if has_residual and residual_first:
        total = next((n for n in toposort([root]) if n.op == "add" and set(n.args) == {_X, _RESIDUAL}), None)
        if total is None:
            return None
        root = substitute([root], {total: _SUM})[0]
        if leaves([root], "arg") != ("sum",):  # x or the residual by itself as well
            return None
        root = substitute([root], {_SUM: _X})[0]
    elif has_residual:
        if root.op != "add" or not any(a is _RESIDUAL for a in root.args):  # `in` would compare them
            return None
        root = next(a for a in root.args if isinstance(a, Expr) and a is not _RESIDUAL)
    if not residual_first:
        root, p = _without_dropout(root)
    return (root, p) if leaves([root], "arg") in ((), ("a0",)) and not leaves([root], "random") else None


def _without_dropout(root: Expr) -> tuple[Expr, float]:
    """What is dropped, and with which probability."""
    if root.op == "relu_dropped":
        x, kept, _ = root.args
        return node("relu", x), _probability(kept)
    if root.op == "where" and isinstance(root.args[0], Expr) and root.args[0].op == "kept":
        kept, scaled, _ = root.args
        if isinstance(scaled, Expr) and scaled.op == "mul" and isinstance(scaled.args[0], Expr):
            return scaled.args[0], _probability(kept)
    return root, 0.0


def _probability(kept: Any) -> float:
    return float(kept.args[1].args[0])


# -- the activation ----------------------------------------------------------------------------------


@functools.lru_cache(1024)
def activation(function: Expr) -> Any:
    """None, a name, or a function of a traced value, that an expression of `a0` is."""
    if function is _X:
        return None
    for name, expression in catalogue().items():
        if expression is function:
            return name

    def of_traced(x: Expr) -> Expr:
        return substitute([function], {_X: x})[0]

    return of_traced


@functools.cache
def catalogue() -> dict[str, Expr]:
    """The activations of the catalogue as expressions of `a0`."""
    return {name: OPS[name](_X) for name in NAMES["activations"]}
