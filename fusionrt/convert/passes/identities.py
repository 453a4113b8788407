"""Calls that return their operand: dropout outside of training, conversions to what a tensor is already."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert.effects import Facts, value
from fusionrt.convert.graph import Edits, arguments, is_tensor
from fusionrt.convert.match import named, rule_of
from fusionrt.convert.pointwise import CONVERSIONS

_DROPOUTS = (F.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout)


def identities(edits: Edits) -> None:
    """Their users get the operand. What torch reports about itself goes as well."""
    for n in edits.nodes():
        if _drops_nothing(n):  # nor writes, whatever it was told
            n.kwargs = {name: given for name, given in n.kwargs.items() if name != "inplace"}
            n.args = n.args[:3]
    edits.changed()
    facts = edits.facts
    for n in facts.nodes:
        operand: Any = n.args[0] if n.args else n.kwargs.get("input")
        if named(n, "_log_api_usage_once") and not n.users:
            edits.graph.erase_node(n)
        elif is_tensor(operand) and _returns(n, operand, facts) and edits.allows(n):
            edits.note(n, None)
            n.replace_all_uses_with(operand)
            edits.graph.erase_node(n)
    edits.changed()


def _returns(n: Node, operand: Node, facts: Facts) -> bool:
    if _drops_nothing(n):
        # Nobody told fake tensors: views of the result would be taken for other memory than the operand's.
        return not facts.is_written(n)
    if rule_of(n) in CONVERSIONS:
        wishes = (n.kwargs.get("copy"), n.kwargs.get("memory_format"))
        if True in n.args or not all(w in (None, False, torch.preserve_format) for w in wishes):
            return False  # a copy, or another layout
        own, its = value(n), value(operand)
        return own.dtype == its.dtype and not facts.classes[n].isdisjoint(facts.classes[operand])
    pads: Any = n.args[1] if named(n, "pad") and len(n.args) > 1 else (1,)
    returned = any(u.op == "output" for c in facts.classes[n] for m in facts.members[c] for u in m.users)
    return not (any(pads) or returned or facts.is_written(operand) or facts.is_written(n))  # of a copy


def _drops_nothing(n: Node) -> bool:
    given = arguments(n, input=None, p=0.5, training=True, inplace=False) if n.target in _DROPOUTS else None
    return given is not None and (given["training"] is False or given["p"] == 0)
