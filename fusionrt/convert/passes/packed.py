"""Convolutions on a CPU, where no gradients are recorded, by oneDNN's fused kernels with weights packed
once."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fusionrt.convert.effects import value
from fusionrt.convert.graph import DERIVED, Edits, is_tensor
from fusionrt.convert.packed import ACTIVATIONS, AFTER_RESIDUAL, is_possible, packed_conv
from fusionrt.ops.convolution import conv_activation, conv_bn_act

_NORM = 4  # mean, variance, weight and bias


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
    tensors = [value(a) for a in n.all_input_nodes if is_tensor(a)]
    x = tensors[0]
    return (
        is_possible()
        and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in (value(n), *tensors))
        and not value(n).requires_grad
        and x.dim() == 4
        and x.stride(1) == 1
        and all(isinstance(size, int) for size in x.shape)
    )


def _arguments(n: Node) -> tuple[list[Any], dict[str, Any]] | None:
    """Of `packed_conv`; None for what it does not do."""
    more = n.kwargs
    has_norm, residual = n.target is conv_bn_act, more.get("residual")
    activation: Any = more.get("activation")
    known = isinstance(activation, str | None) and activation in ACTIVATIONS
    padding: Any = more.get("padding")
    if (
        not known
        or isinstance(padding, str)
        or more.get("dropout_p")
        or more.get("training")
        or (residual is not None and (activation not in AFTER_RESIDUAL or not has_norm))
    ):
        return None
    norm = list(n.args[3 : 3 + _NORM]) if has_norm else []
    if has_norm and (norm[2] is None) != (norm[3] is None):
        return None
    sizes = [size for name in ("stride", "padding", "dilation") for size in _both(more[name])]
    options = {
        "geometry": (*sizes, more["groups"]),
        "eps": more["eps"] if has_norm else None,
        "activation": activation,
    }
    return [*n.args[:3], *(t for t in norm if t is not None)], options | (
        {} if residual is None else {"residual": residual}
    )


def _both(given: Any) -> tuple[int, int]:
    sizes = (given, given) if isinstance(given, int) else tuple(given)
    return (sizes * 2)[:2] if len(sizes) == 1 else (sizes[0], sizes[1])
