"""Calls that work in place on a value that nobody else sees become calls that return a new one, and back."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from fusionrt.convert.effects import IN_PLACE, INPLACE_AT, Facts, effect, value
from fusionrt.convert.fused import lies
from fusionrt.convert.graph import KEY, Edits, same
from fusionrt.convert.match import named
from fusionrt.convert.pointwise import FUNCTIONS, METHODS
from fusionrt.convert.revalue import computed

_WAS = "fusionrt_in_place"


def in_place(edits: Edits) -> None:
    """Only calls that can be part of a cluster: for others nothing would be gained."""
    facts, entered = edits.facts, list[Node]()
    for n in facts.nodes:
        if named(n, "_enter_autocast"):
            entered.append(n)
        elif named(n, "_exit_autocast"):
            entered.remove(n.args[0])
        target = _functional(n)
        if (target is None or not _is_private(n, facts) or not _gives_alike(n, target, entered)
                or not edits.allows(n)):
            continue
        operand: Any = n.args[0]
        operand.replace_all_uses_with(n, delete_user_cb=lambda u, n=n: facts.position[u] > facts.position[n])
        n.meta[_WAS] = n.target, n.args[1:], n.kwargs
        n.target = target
        n.kwargs = {k: v for k, v in n.kwargs.items() if k != "inplace"}
        at = INPLACE_AT.get(target)
        n.args = n.args if at is None else n.args[:at]


def restored(edits: Edits) -> None:
    """What became part of nothing works in place again, on what torch's own call computed for it alone."""
    facts = edits.facts
    for n in facts.nodes:
        if _WAS not in n.meta:
            continue
        operand: Any = n.args[0]
        alone = all(m in (n, operand) or facts.position[m] > facts.position[n]
                    for c in facts.classes[operand] for m in facts.members[c])
        if (alone and list(operand.users) == [n] and operand.op.startswith("call")  # not a constant
                and KEY not in operand.meta):
            n.target, rest, n.kwargs = n.meta.pop(_WAS)
            now = (*n.args[1:], *rest[len(n.args) - 1:])  # with what was an argument for working in place
            n.args = (operand, *now)


def _functional(n: Node) -> Any:
    """The target that computes the same out of place."""
    target: Any = n.target
    if not n.args or effect(n).writes != (n.args[0],):
        return None
    if n.op == "call_method":
        return target[:-1] if target[:-1] in METHODS else None
    if getattr(target, "__name__", "").endswith("_"):
        target = getattr(torch, target.__name__[:-1], None)
    target = IN_PLACE.get(target, target)
    return target if target in FUNCTIONS else None


def _is_private(n: Node, facts: Facts) -> bool:
    """Whether the memory that is written to is one that a call of this graph allocated, of which after this
    call there is no other view."""
    operand: Any = n.args[0]
    now = facts.position[n]
    for c in facts.classes[operand]:
        for m in facts.members[c]:
            if not m.op.startswith("call") or facts.effects[m].barrier:
                return False
            earlier = facts.position[m] < now and m is not operand
            if earlier and any(facts.position[u] > now for u in m.users):
                return False
    return len(facts.classes[operand]) == 1


def _gives_alike(n: Node, target: Any, entered: Sequence[Node]) -> bool:
    """Whether the result would have its operand's dtype, and lie as it does, by itself. `entered`: autocasts,
    which know calls in place by other rules."""
    own, kwargs = value(n.args[0]), {k: v for k, v in n.kwargs.items() if k != "inplace"}
    try:
        with contextlib.ExitStack() as casting:
            for autocast in entered:
                casting.enter_context(torch.autocast(*autocast.args))  # type: ignore[arg-type]
            found = computed(target, n.args[:INPLACE_AT.get(target)], kwargs)
    except Exception:  # of whatever the call is: it is left as it was
        return False
    return (isinstance(found, torch.Tensor) and found.dtype == own.dtype and same(found.shape, own.shape)
            and lies(n.args[0], found.stride()))  # type: ignore[arg-type]
