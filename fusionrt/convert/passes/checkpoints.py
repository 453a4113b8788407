"""Activation checkpoints, of which Dynamo leaves a mark for a partitioner, compute anew in the backward
pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

from fusionrt.convert.effects import BARRIER
from fusionrt.convert.graph import EFFECT, Edits


def checkpoints(edits: Edits) -> None:
    """Run as it stands, such a call would keep everything. A policy of what to keep is left to it."""
    for n, body in checkpointed(edits.gm):
        if n.target is not checkpoint and edits.allows(n):
            edits.note(n, None)
            n.target, n.kwargs = checkpoint, {**n.kwargs, "use_reentrant": False}
            n.meta[EFFECT] = BARRIER
            body.recompile()
    edits.changed()


def checkpointed(gm: GraphModule) -> Iterator[tuple[Node, GraphModule]]:
    """The calls, and the graphs of what they checkpoint."""
    marks = tag_activation_checkpoint, checkpoint
    for n in gm.graph.nodes:
        body: Any = getattr(gm, n.args[0].target, None) if n.target in marks else None
        if isinstance(body, GraphModule) and "_checkpoint_context_fn" not in body.meta:
            yield n, body
