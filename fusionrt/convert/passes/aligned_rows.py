"""Products of 16-bit numbers whose rows cuBLAS cannot store 16 bytes at a time, as of GPT-2's 50257 words.

For such results it has nothing but kernels that take several times as long. Into memory with room at the
end of each row it computes all but the last few columns as fast as ever, and the weight stays what it is.
"""

from __future__ import annotations

import math

from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert.calls import ALIGNED, aligned_product
from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, hint, is_tensor
from fusionrt.convert.match import linear_layer, named
from fusionrt.convert.revalue import take_place
from fusionrt.dtypes import HALVES

DEVICES = ("cuda",)
# Products that a number is the sum of, and all of them: from so many on a copy of the result takes less than
# what is saved.
DEEP, MANY = 256, 1 << 30


def aligned_rows(edits: Edits) -> None:
    """Where no gradients are recorded. What has to lie as usual (results of the graph) is copied."""
    for n in edits.nodes():
        given = _operands(n)
        if given is None or not _fits(edits, n, given) or not edits.allows(n):
            continue
        t = value(n)
        room = t.new_empty((*t.shape[:-1], -(-t.shape[-1] // ALIGNED) * ALIGNED))
        take_place(edits, n, edits.call(aligned_product, given, {"transposed": n.target is F.linear}, n,
                                        given=room[..., :t.shape[-1]]))
        edits.note(n, None)
        edits.erase([n])


def _operands(n: Node) -> tuple[Node, Node, Node | None] | None:
    """x, weight and bias."""
    if n.target is F.linear:
        given = linear_layer(n)
        return None if given is None else (given["input"], given["weight"], given["bias"])
    fits = named(n, "matmul") and len(n.args) == 2 and all(map(is_tensor, n.args)) and not n.kwargs
    return (n.args[0], n.args[1], None) if fits else None  # type: ignore[return-value]


def _fits(edits: Edits, n: Node, given: tuple[Node, Node, Node | None]) -> bool:
    t, operands = value(n), [a for a in given if a is not None]
    x, weight = value(given[0]), value(given[1])
    if (not all(value(a).dtype == t.dtype and value(a).device == t.device for a in operands)
            or t.dtype not in HALVES or t.device.type not in DEVICES or t.requires_grad or x.dim() < 2
            or weight.dim() != 2 or any(map(edits.facts.is_written, (n, *operands)))):
        return False
    depth, step = (weight.stride()[::-1] if n.target is F.linear else weight.stride())
    products = math.prod(hint(size, 1) for size in (*t.shape, x.shape[-1]))
    return (isinstance(t.shape[-1], int) and t.shape[-1] % ALIGNED != 0 and x.shape[-1] % ALIGNED == 0
            and depth == 1 and step % ALIGNED == 0 and x.shape[-1] >= DEEP and products >= MANY)
