"""Calls whose results nobody uses. Fused with others they would give a parameter that only they read a
gradient of zeros, which an optimizer takes for one, where eager has none."""

from __future__ import annotations

from torch.fx import Node

from fusionrt.convert.effects import NONE, effect
from fusionrt.convert.graph import Edits

_DRAWS = ("rand", "dropout", "rrelu", "bernoulli", "multinomial", "normal", "poisson", "uniform",
          "exponential")


def unused(edits: Edits) -> None:
    edits.erase([n for n in edits.nodes() if n.op in ("call_function", "call_method") and not n.users
                 and effect(n) == NONE and not _draws(n)])


def _draws(node: Node) -> bool:
    """Random numbers, of which those after it would be others."""
    name = str(getattr(node.target, "__name__", node.target))
    return any(part in name for part in _DRAWS)
