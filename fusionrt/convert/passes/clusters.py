"""What is left of pointwise calls, norms and softmaxes: every cluster of them becomes one kernel."""

from __future__ import annotations

from fusionrt.convert.cluster import Cluster, Clustering
from fusionrt.convert.fused import fuse_cluster
from fusionrt.convert.graph import Edits
from fusionrt.convert.members import layer_norm, rms_norm


def clusters(edits: Edits) -> None:
    """A pointwise call by itself stays torch's; a norm or a softmax is faster as ours."""
    for c in Clustering(edits.facts).clusters:
        if (len(c.members) > 1 or c.row is not None) and edits.allows(c.nodes[-1]):
            fuse_cluster(edits, c, _statistic(c))
    edits.sort()


def _statistic(c: Cluster) -> str:
    if c.row is None:
        return "pointwise_cluster"
    if c.row.rule not in (layer_norm, rms_norm):
        return "softmax"
    after = c.members[c.members.index(c.row) + 1:]
    return "layernorm_relu" if c.row.rule is layer_norm and [m.name for m in after] == ["relu"] else "norm"
