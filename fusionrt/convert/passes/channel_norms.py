"""Batch norm and group norm that follow no convolution, with residual and activation."""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from torch.nn import functional as F

from fusionrt.activation import resolve
from fusionrt.convert.cluster import Clustering
from fusionrt.convert.effects import effect
from fusionrt.convert.graph import Edits, arguments
from fusionrt.convert.passes.convolution import is_plain, norm_arguments, whole_tail
from fusionrt.ops.batch_norm import batch_norm, group_norm


def channel_norms(edits: Edits) -> None:
    """One call each. At inference a batch norm by itself stays torch's: either is one kernel."""
    clusters = Clustering(edits.facts).of
    for n in edits.nodes():
        run, options = _call(n)
        if run is None or not is_plain(n):
            continue
        tail = whole_tail(edits, n, clusters)
        if edits.allows(tail.result) and (tail.nodes or run is group_norm or options["training"]):
            edits.replace([n, *tail.nodes], tail.result, run, (), "norm", effect(n),
                          residual=tail.residual, epilogue=resolve("convert", tail.activation), **options)
    edits.sort()


def _call(n: Node) -> tuple[Any, dict[str, Any]]:
    """Our op and its arguments."""
    if n.target is F.batch_norm:
        given = norm_arguments(n)
        return batch_norm if given is not None else None, _renamed(given)
    if n.target is F.group_norm:
        given = arguments(n, input=None, num_groups=None, weight=None, bias=None, eps=1e-5)
        return group_norm if given is not None else None, _renamed(given)
    return None, {}


def _renamed(given: dict[str, Any] | None) -> dict[str, Any]:
    return {"x" if k == "input" else k: v for k, v in (given or {}).items()}
