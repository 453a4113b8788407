"""Activation checkpoints, of which Dynamo leaves a mark for a partitioner, compute anew in the backward
pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fusionrt.convert.effects import BARRIER, Facts
from fusionrt.convert.graph import EFFECT, Edits

_WRITTEN = "fusionrt_written"


def checkpoints(edits: Edits) -> None:
    """Run as it stands, such a call would keep everything. A policy of what to keep is left to it."""
    for n, body in checkpointed(edits.gm):
        if n.target is not checkpointing and edits.allows(n):
            edits.note(n, None)
            n.target, n.kwargs = checkpointing, {**n.kwargs, "use_reentrant": False}
            n.meta[EFFECT] = BARRIER
            body.recompile()
    edits.changed()


def checkpointing(body: GraphModule, *args: Any, **options: Any) -> Any:
    """torch's, which saves the arguments; but not what the body writes to, as a norm does to its statistics:
    that autograd would refuse in the second run. That is to write the same again, and goes on to the end."""
    written = body.meta.get(_WRITTEN)
    if written is None:
        facts, given = Facts(body.graph), [n for n in body.graph.nodes if n.op == "placeholder"]
        written = body.meta[_WRITTEN] = [k for k, n in enumerate(given) if facts.is_written(n)]
    bound = {k: args[k] for k in written}

    def run(*rest: Any) -> Any:
        others = iter(rest)
        return body(*(bound[k] if k in bound else next(others) for k in range(len(args))))

    with set_checkpoint_early_stop(False) if bound else contextlib.nullcontext():
        return checkpoint(run, *(a for k, a in enumerate(args) if k not in bound), **options)


def checkpointed(gm: GraphModule) -> Iterator[tuple[Node, GraphModule]]:
    """The calls, and the graphs of what they checkpoint."""
    marks = tag_activation_checkpoint, checkpointing
    for n in gm.graph.nodes:
        body: Any = getattr(gm, n.args[0].target, None) if n.target in marks else None
        if isinstance(body, GraphModule) and "_checkpoint_context_fn" not in body.meta:
            yield n, body
