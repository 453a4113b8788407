"""Swin's windows: tokens are rolled, divided into windows and put back, a copy for each step.

What comes of such steps is a permutation of tokens, which is known from sizes: one gather of rows.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from fusionrt.convert.effects import tensors, value
from fusionrt.convert.graph import VALUE, Edits, is_tensor
from fusionrt.convert.match import named
from fusionrt.convert.passes.constants import hold

DEVICES = ("cuda",)
LARGEST = 1 << 24  # elements: of what is followed through the steps
_STEPS = ("roll", "view", "reshape", "permute", "transpose", "contiguous", "flatten", "unflatten", "squeeze",
          "unsqueeze")
_WHOLE = slice(None, None, None)


def moved_rows(edits: Edits) -> None:
    """Steps around a roll, where no gradient is recorded."""
    orders: dict[str, Node | None] = {}
    for n in edits.nodes():
        steps = _steps(n) if named(n, "roll") and _fits(value(n)) else []
        while steps and (len(_copies(steps)) < 2 or not value(steps[-1]).is_contiguous()):
            steps.pop()
        x: Any = steps[0].args[0] if steps else None
        if not steps or not value(x).is_contiguous() or edits.facts.is_written(x) or not edits.allows(
                steps[-1], steps):
            continue
        key = repr([(value(x).shape, s.target, s.args[1:], s.kwargs) for s in steps])
        if key not in orders:
            order = _order(steps, value(x))
            orders[key] = None if order is None else hold(edits, n, order.to(value(x).device), value(
                x).new_empty(order.shape, dtype=order.dtype))
        found = orders[key]
        if found is not None:
            _replace(edits, steps, x, found)


def _fits(t: torch.Tensor) -> bool:
    return (t.device.type in DEVICES and not t.requires_grad and t.dim() > 1
            and all(isinstance(size, int) for size in t.shape) and 0 < t.numel() <= LARGEST)


def _steps(roll: Node) -> list[Node]:
    """The calls before and after a roll that move elements, and nobody else uses."""
    steps = [roll]
    while _is_step(steps[0].args[0]) and len(steps[0].args[0].users) == 1:  # type: ignore[union-attr]
        steps.insert(0, steps[0].args[0])  # type: ignore[arg-type]
    while len(steps[-1].users) == 1 and _is_step(next(iter(steps[-1].users))):
        steps.append(next(iter(steps[-1].users)))
    return steps


def _is_step(n: Any) -> bool:
    moves = named(n, *_STEPS) or (isinstance(n, Node) and n.target is operator.getitem
                                  and isinstance(n.args[1], tuple) and all(
                                      i == _WHOLE or isinstance(i, slice) for i in n.args[1]))
    return (moves and bool(n.args) and n.all_input_nodes == [n.args[0]] and is_tensor(n)
            and value(n).numel() == value(n.args[0]).numel())


def _copies(steps: list[Node]) -> list[Node]:
    def memory(n: Any) -> set[int]:
        return {t.untyped_storage()._cdata for t in tensors(value(n))}

    return [s for s in steps if memory(s).isdisjoint(memory(s.args[0]))]


def _order(steps: list[Node], x: torch.Tensor) -> torch.Tensor | None:
    """Which rows of x come one after the other; None where rows are torn apart."""
    width = x.shape[-1]
    moved: Any = torch.arange(x.numel(), dtype=torch.int32, device="cpu").view(x.shape)
    for s in steps:
        target: Any = getattr(torch.Tensor, s.target) if isinstance(s.target, str) else s.target
        moved = target(moved, *s.args[1:], **s.kwargs)
    rows, within = moved.reshape(-1, width), torch.arange(width, dtype=torch.int32, device="cpu")
    first = rows[:, :1]
    is_whole = bool((first % width == 0).all()) and torch.equal(rows, first + within)
    return first.flatten() // width if is_whole else None


def _replace(edits: Edits, steps: list[Node], x: Node, order: Node) -> None:
    last, shape = steps[-1], tuple(value(steps[-1]).shape)
    by_rows = value(x).view(-1, value(x).shape[-1])
    flat = edits.call(torch.reshape, (x, tuple(by_rows.shape)), {}, last, given=by_rows)
    rows = edits.call(torch.index_select, (flat, 0, order), {}, last, given=torch.empty_like(by_rows))
    made = edits.replace(steps, last, torch.reshape, (rows, shape), None)
    made.meta[VALUE] = value(rows).view(shape)
