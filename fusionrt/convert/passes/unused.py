"""Calls whose results nobody uses. Fused with others they would give a parameter that only they read a
gradient of zeros, which an optimizer takes for one, where eager has none.

What writes to a value that nobody reads goes only where "in_place" has made it a call that returns another.
"""

from __future__ import annotations

from fusionrt.convert.graph import Edits
from fusionrt.convert.purity import is_pure


def unused(edits: Edits) -> None:
    edits.erase([n for n in edits.nodes() if n.op.startswith("call") and not n.users and is_pure(n)])
