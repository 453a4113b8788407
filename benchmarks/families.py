"""The ops of the catalogue by family: the modules of `fusionrt.ops`, and their titles in tables."""

from __future__ import annotations

from collections.abc import Sequence

from fusionrt.catalogue import OPS

FAMILIES = {"pointwise": "Chains", "dropout": "With dropout", "quantize": "int8",
            "activations": "Activations", "norm": "Norms", "softmax": "Softmax",
            "attention": "Attention", "qkv": "Heads of attention",
            "loss": "Losses", "cross_entropy": "Cross-entropy",
            "linear_cross_entropy": "Cross-entropy of a linear layer",
            "linear": "Linear layers", "ffn": "Feed-forward blocks",
            "convolution": "Convolutions",
            "reduction": "Reductions", "batch_norm": "Channel norms",
            "embedding": "Embeddings", "rotary": "Rotary embeddings"}
POINTWISE = ("pointwise", "dropout", "quantize", "activations")


def members(modules: Sequence[str]) -> list[str]:
    """The ops that are defined in these modules."""
    return [name for name, op in OPS.items() if op.__module__.rpartition(".")[2] in modules]
