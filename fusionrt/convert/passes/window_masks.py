"""Scores of Swin's shifted windows take a bias of positions, and then, in a view with images and windows
apart, a mask. Both are known, and so is their sum: one mask like any other."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

import torch
from torch.fx import Node

from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, is_tensor, same
from fusionrt.convert.match import is_sum, named, only_users
from fusionrt.convert.passes.constants import LARGEST
from fusionrt.convert.passes.from_weights import known_from_weights
from fusionrt.convert.revalue import computed


def window_masks(edits: Edits) -> None:
    """Where the graph records no gradients."""
    known = known_from_weights(edits.facts)
    for n in edits.nodes() if known else ():
        apart: Any = n.args[0] if named(n, "view", "reshape") else None
        outer = _sum(apart, known)
        view: Any = outer[1] if outer is not None and named(outer[1], "view", "reshape") else None
        inner = _sum(view.args[0], known) if view is not None else None
        if outer is None or inner is None or not _divides(value(view), value(outer[0]), value(n)):
            continue
        old = [view.args[0], view, apart, n]
        if (only_users(old[:-1], old) and same(value(inner[1]).shape, value(n).shape)
                and edits.allows(n, old)):
            _replace(edits, n, old, inner[1], inner[0], outer[0])


def _sum(n: Any, known: Container[Node]) -> tuple[Node, Node] | None:
    """What is known of two summands, and the other one."""
    if is_sum(n) and all(map(is_tensor, n.args)):
        for a, b in (n.args, n.args[::-1]):
            if a in known and b not in known and value(a).dtype == value(b).dtype:
                return a, b
    return None


def _divides(apart: torch.Tensor, mask: torch.Tensor, scores: torch.Tensor) -> bool:
    """Whether of (images, windows, ...) the scores have the first two as one, and how much the sum takes."""
    return (apart.dim() == mask.dim() == 5 and scores.dim() == 4 and same(apart.shape[2:], scores.shape[1:])
            and all(isinstance(size, int) for size in scores.shape)
            and math.prod(scores.shape) * scores.itemsize <= LARGEST)


def _replace(edits: Edits, n: Node, old: list[Node], scores: Node, bias: Node, mask: Node) -> None:
    def call(target: Any, *args: Any) -> Node:
        return edits.call(target, args, {}, n, given=computed(target, args, {}))

    whole = call(torch.broadcast_to, mask, (*value(old[1]).shape[:2], *value(mask).shape[2:]))
    total = call(torch.add, bias, call(torch.flatten, whole, 0, 1))
    edits.replace(old, n, torch.add, (scores, total), None)
