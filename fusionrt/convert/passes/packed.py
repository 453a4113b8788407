"""Convolutions on a CPU, where no gradients are recorded, by oneDNN's fused kernels, weights packed once."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fusionrt.convert.effects import value
from fusionrt.convert.graph import DERIVED, Edits, is_tensor, present
from fusionrt.convert.packed import ACTIVATIONS, AFTER_RESIDUAL, is_possible, packed_conv
from fusionrt.ops.convolution import conv_activation, conv_bn_act


def packed(edits: Edits) -> None:
    """Of float32 images in channels_last memory; what oneDNN has no name for stays."""
    for n in edits.nodes():
        given = _arguments(n) if n.target in (conv_activation, conv_bn_act) else None
        if given is None or not _fits(n) or not edits.allows(n):
            continue
        args, options = given
        weights = [a for a in args[1:] if a is not None]
        if all(a.op == "placeholder" for a in weights):
            made = edits.replace([n], n, packed_conv, args, None, **options)
            made.meta[DERIVED] = tuple(weights)


def _fits(n: Node) -> bool:
    t, x = value(n), value(n.args[0])
    tensors = [t, *(value(a) for a in n.all_input_nodes if is_tensor(a))]
    return (is_possible() and not t.requires_grad and x.dim() == 4 and x.stride(1) == 1
            and all(isinstance(size, int) for size in x.shape)
            and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors))


def _arguments(n: Node) -> tuple[list[Any], dict[str, Any]] | None:
    """Of `packed_conv`; None for what it does not do."""
    given: dict[str, Any] = dict(n.kwargs)
    has_norm, activation, residual = n.target is conv_bn_act, given["activation"], given.get("residual")
    if (not isinstance(activation, (str, type(None))) or activation not in ACTIVATIONS
            or given.get("training")
            or isinstance(given["padding"], str) or given.get("dropout_p")
            or (residual is not None and (activation not in AFTER_RESIDUAL or not has_norm))):
        return None
    norm = list(n.args[3:]) if has_norm else []  # mean, variance, weight and bias
    if has_norm and (norm[2] is None) != (norm[3] is None):
        return None
    sizes = [size for name in ("stride", "padding", "dilation") for size in _both(given[name])]
    return [*n.args[:3], *(t for t in norm if t is not None)], {
        "geometry": (*sizes, given["groups"]), "eps": given.get("eps"), "activation": activation,
        **present(residual=residual)}


def _both(given: Any) -> tuple[int, ...]:
    sizes = (given,) if isinstance(given, int) else tuple(given)
    return sizes * 2 if len(sizes) == 1 else sizes
