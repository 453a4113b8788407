"""Calls that return their operand: dropout outside of training, conversions to what a tensor is already."""

from __future__ import annotations

from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert.effects import Facts, value
from fusionrt.convert.graph import Edits, arguments
from fusionrt.convert.match import named, rule_of
from fusionrt.convert.pointwise import CONVERSIONS

_DROPOUTS = (F.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout)


def identities(edits: Edits) -> None:
    """Their users get the operand. What torch reports about itself goes as well."""
    facts = edits.facts
    for n in facts.nodes:
        if named(n, "_log_api_usage_once") and not n.users:
            edits.graph.erase_node(n)
        elif _returns_its_operand(n, facts) and edits.allows(n):
            edits.note(n, None)
            operand = n.args[0] if n.args else n.kwargs["input"]
            n.replace_all_uses_with(operand)
            edits.graph.erase_node(n)
    edits.changed()


def _returns_its_operand(n: Node, facts: Facts) -> bool:
    if n.target in _DROPOUTS:
        given = arguments(n, input=None, p=0.5, training=True, inplace=False)
        return given is not None and (given["training"] is False or given["p"] == 0)
    operand = n.args[0] if n.args else None
    if rule_of(n) in CONVERSIONS and isinstance(operand, Node):
        return value(operand).dtype == value(n).dtype and not facts.classes[n].isdisjoint(
            facts.classes[operand]
        )
    if n.target is F.pad and isinstance(operand, Node):  # copies
        return not any(n.args[1]) and not facts.is_written(operand) and not facts.is_written(n)
    return False
