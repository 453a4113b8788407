"""Under autocast: what several linear layers read is cast once, and kept once for their gradients."""

from __future__ import annotations

from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert.calls import cast
from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, is_tensor


def casts(edits: Edits) -> None:
    """Torch casts for each of them."""
    for n in edits.nodes():
        users = sorted((u for u in n.users if _is_cast_by(u, n)), key=edits.facts.position.__getitem__)
        dtypes = {value(u).dtype for u in users}
        if len(users) > 1 == len(dtypes) and edits.allows(users[0]) and not edits.facts.is_written(n):
            dtype, = dtypes
            made = edits.call(cast, (n, dtype), {}, users[0], given=value(n).to(dtype))
            edits.note(users[0], None)
            for u in users:
                u.args = (made, *u.args[1:])


def _is_cast_by(u: Node, n: Node) -> bool:
    return (u.target is F.linear and bool(u.args) and u.args[0] is n and is_tensor(n)
            and value(n).is_floating_point() and value(u).dtype.itemsize < value(n).dtype.itemsize)
