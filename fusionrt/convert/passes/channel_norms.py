"""Batch norm and group norm that follow no convolution, with residual and activation."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from fusionrt.activation import resolve
from fusionrt.convert.cluster import homes
from fusionrt.convert.effects import effect, value
from fusionrt.convert.graph import Edits, arguments, present
from fusionrt.convert.passes.convolution import is_plain, norm_arguments, tail_of_norm
from fusionrt.ops.batch_norm import batch_norm, group_norm


def channel_norms(edits: Edits) -> None:
    """One call each. At inference a batch norm by itself stays torch's: either is one kernel."""
    clusters = homes(edits, lambda n: _call(n)[1] is not None)
    for n in edits.nodes():
        run, given = _call(n)
        if given is None or not is_plain(n):
            continue
        tail = tail_of_norm(edits, [n], clusters)
        gains = tail.nodes or run is group_norm or given["training"]
        if gains and edits.allows(tail.result, [n, *tail.nodes]):
            x, epilogue = given.pop("input"), resolve("channel_norms", tail.activation)
            edits.replace([n, *tail.nodes], tail.result, run, (x,), "norm", effect(n), **given,
                          **present(residual=tail.residual, epilogue=epilogue))
    edits.sort()


def _call(n: Node) -> tuple[Any, dict[str, Any] | None]:
    """Our op and its arguments."""
    if n.target is F.batch_norm:
        given = norm_arguments(n)
        return batch_norm, given if given and _keeps_its_format(value(given["input"])) else None
    if n.target is F.group_norm:
        return group_norm, arguments(n, input=None, num_groups=None, weight=None, bias=None, eps=1e-5)
    return None, None


def _keeps_its_format(image: torch.Tensor) -> bool:
    """Whether torch's result lies as the image does, as ours does. Of others it is contiguous, where fake
    tensors tell otherwise: (N, C, L) seen of (N, L, C)."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(image.dim())
    return image.is_contiguous() or (last is not None and image.is_contiguous(memory_format=last))
