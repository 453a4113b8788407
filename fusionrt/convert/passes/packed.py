"""Convolutions and linear layers on a CPU, where no gradients are recorded, by oneDNN's and MKL's kernels,
weights packed once."""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import torch
from torch.fx import Node

from fusionrt.convert.calls import batch_first_attention, self_attention
from fusionrt.convert.effects import value
from fusionrt.convert.graph import DERIVED, Edits, hint, is_tensor, present
from fusionrt.convert.match import linear_layer, named
from fusionrt.convert.packed_conv import ACTIVATIONS, AFTER_RESIDUAL, is_possible, packed_conv
from fusionrt.convert.packed_linear import LEAST_ROWS, PackedLinear, can_pack
from fusionrt.ops.convolution import conv_activation, conv_bn_act
from fusionrt.ops.linear import linear_activation

Given = tuple[list[Any], dict[str, Any]]
_ATTENTION = (self_attention, batch_first_attention)


def packed(edits: Edits) -> None:
    """Of float32 images; what oneDNN has no name for stays."""
    for n in edits.nodes():
        given = _convolution(n) if n.target in (conv_activation, conv_bn_act) else None
        if given is None or not is_possible() or not _fits(n) or not _is_of_images(n) or not edits.allows(n):
            continue
        args, options = given
        weights = [a for a in args[1:] if a is not None]
        if all(a.op == "placeholder" for a in weights):
            made = edits.replace([n], n, packed_conv, args, None, **options)
            made.meta[DERIVED] = tuple(weights)


def packed_linears(edits: Edits) -> None:
    """Linear layers of float32, with an activation that oneDNN has a name for, and those around attention."""
    for n in edits.nodes() if can_pack() else ():
        if n.target in _ATTENTION:
            _around_attention(edits, n)
            continue
        given = _linear(n)
        if given is None:
            continue
        args, options = given
        weight = args[1]
        if weight.op == "placeholder" and _has_rows(n) and edits.allows(n):
            edits.replace([n], n, PackedLinear(**options), args, None).meta[DERIVED] = (weight,)


def _fits(n: Node) -> bool:
    tensors = [value(a) for a in (n, *n.all_input_nodes) if is_tensor(a)]
    return not value(n).requires_grad and all(
        t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)


# -- convolutions ------------------------------------------------------------------------------------

def _is_of_images(n: Node) -> bool:
    x = value(n.args[0])
    return (x.dim() == 4 and all(isinstance(size, int) for size in x.shape)
            and (x.stride(1) == 1 or x.is_contiguous()))


def _convolution(n: Node) -> Given | None:
    """Arguments of `packed_conv`; None for what it does not do."""
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


# -- linear layers -----------------------------------------------------------------------------------

def _linear(n: Node) -> Given | None:
    """Arguments and options of a `PackedLinear`; None for what it does not do."""
    if n.target is linear_activation:
        x, weight, bias = cast("list[Any]", n.args)
        activation, more = n.kwargs["activation"], set(n.kwargs) - {"activation"}
        fits = activation in ACTIVATIONS and not more and value(weight).dim() == 2
    else:
        given, activation = linear_layer(n), None
        x, weight, bias = (None, None, None) if given is None else given.values()
        fits = given is not None
    if not fits or not _fits(n) or value(x).dim() < 2:
        return None
    of_two = named(weight, "t") and weight.args[0].op == "placeholder"
    return [x, weight.args[0] if of_two else weight, bias], {
        "rows": _rows(x), **present(activation=activation, transposed=of_two or None)}


def _rows(x: Any) -> int | None:
    """Where they are known."""
    sizes = value(x).shape[:-1]
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None


def _has_rows(n: Node) -> bool:
    """So many that a packed weight is faster."""
    return math.prod(hint(size, 1) for size in value(n).shape[:-1]) >= LEAST_ROWS


def _around_attention(edits: Edits, n: Node) -> None:
    target: Any = n.target
    weights: Any = n.args[2], n.args[4]
    if _fits(n) and _has_rows(n) and all(w.op == "placeholder" for w in weights) and edits.allows(n):
        rows, options = _rows(n.args[0]), cast("dict[str, Any]", n.kwargs)
        with_layers: Any = functools.partial(target, layers=(PackedLinear(rows), PackedLinear(rows)))
        functools.update_wrapper(with_layers, target)
        edits.replace([n], n, with_layers, n.args, None, **options).meta[DERIVED] = weights
