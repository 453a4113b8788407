"""Cross-entropy by the kernels that keep no probabilities."""

from __future__ import annotations

from torch.nn import functional as F

from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, arguments
from fusionrt.dtypes import FLOATS
from fusionrt.ops.cross_entropy import cross_entropy

DEVICES = ("cuda",)  # on a CPU torch's is as good


def losses(edits: Edits) -> None:
    """F.cross_entropy, whatever its target."""
    for n in edits.nodes():
        given = arguments(n, input=None, target=None, weight=None, size_average=None, ignore_index=-100,
                          reduce=None, reduction="mean", label_smoothing=0.0
                          ) if n.target is F.cross_entropy else None
        if given is None or given.pop("size_average") is not None or given.pop("reduce") is not None:
            continue
        logits = value(given["input"])
        if logits.device.type in DEVICES and logits.dtype in FLOATS and edits.allows(n):
            args = [given.pop(name) for name in ("input", "target", "weight")]
            edits.replace([n], n, cross_entropy, args, "cross_entropy", **given)
