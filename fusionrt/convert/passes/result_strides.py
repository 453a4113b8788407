"""Results of a graph that attention gives: in memory they lie as its kernels leave them, and are put back to
where torch's would."""

from __future__ import annotations

import functools

from torch.fx import Node

from fusionrt.convert.calls import batch_first_attention, laid, self_attention
from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, is_tensor
from fusionrt.convert.kept_masks import attention_by_kept_mask
from fusionrt.ops.attention import attention

_OURS = (attention, attention_by_kept_mask, batch_first_attention, self_attention)


def result_strides(edits: Edits) -> None:
    """Those that share no memory with others; views of attention are left."""
    output = next(n for n in edits.nodes() if n.op == "output")
    for n in output.all_input_nodes:
        if _is_ours(n) and is_tensor(n) and edits.allows(n):
            t = value(n)
            if all(isinstance(size, int) for size in (*t.shape, *t.stride())):
                output.replace_input_with(n, edits.call(laid, (n, t.stride()), {}, output, given=t))


def _is_ours(n: Node) -> bool:
    return (n.target.func if isinstance(n.target, functools.partial) else n.target) in _OURS
