"""Networks of convolutions in channels_last memory, which is how their kernels want images."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert.derived import channels_last
from fusionrt.convert.effects import value
from fusionrt.convert.graph import DERIVED, VALUE, Edits, called, hint, is_tensor, options_of
from fusionrt.convert.match import named
from fusionrt.convert.revalue import revalue
from fusionrt.ops.convolution import conv_activation, conv_bn_act

DEVICES = ("cuda",)  # whose weights are converted: on a CPU oneDNN arranges them for itself
FEW = 4  # depthwise convolutions: so many make a network that of images
MOST = 4  # conversions: a network that needs more of them leaves the layout again and again
_CONVOLUTIONS = (F.conv2d, conv_activation, conv_bn_act)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def layout(edits: Edits) -> None:
    """What a convolution reads is converted where it lies otherwise; what follows does so by itself."""
    if not _is_of_images(edits):
        return
    for _ in range(MOST):
        n = next((n for n in edits.nodes() if _is_convolution(n) and value(n.args[0]).stride(1) != 1), None)
        image: Any = None if n is None else n.args[0]
        if n is None or edits.facts.is_written(image) or not edits.allows(n):
            return
        with edits.graph.inserting_before(n):
            made = edits.graph.call_method("contiguous", (image,), {"memory_format": torch.channels_last})
        t = value(image)
        fake = torch.empty_like(t, memory_format=torch.channels_last)
        made.meta[VALUE] = fake.requires_grad_(t.requires_grad)
        image.replace_all_uses_with(made, delete_user_cb=_is_convolution)
        if not revalue(edits, {made: t}):
            made.replace_all_uses_with(image)
            edits.graph.erase_node(made)
            return
        edits.note(n, None)


def _is_of_images(edits: Edits) -> bool:
    """Whether convolutions are most of the work, or depthwise ones many."""
    images = [n for n in edits.nodes() if _is_convolution(n)]
    others = sum(_work(n) for n in edits.nodes() if named(n, "linear", "matmul", "bmm", "addmm", "baddbmm"))
    depthwise = sum(value(n.args[1]).shape[1] == 1 < value(n).shape[1] for n in images)
    return bool(images) and (sum(map(_work, images)) > others or depthwise >= FEW)


def _work(n: Node) -> float:
    """Multiplications, of the sizes that were seen."""
    operands = [value(a) for a in n.all_input_nodes if is_tensor(a)]
    if not is_tensor(n) or len(operands) < 2:
        return 0.0
    sizes = [*value(n).shape, *(operands[1].shape[1:] if _is_convolution(n) else operands[0].shape[-1:])]
    return float(math.prod(hint(size, 1) for size in sizes))


def _is_convolution(n: Node) -> bool:
    return n.target is F.conv2d and len(n.args) > 1 and is_tensor(n.args[0]) and value(n).dim() == 4 and (
        value(n).dtype in _DTYPES and value(n).device.type in ("cpu", "cuda"))


# -- weights -----------------------------------------------------------------------------------------

def weights(edits: Edits) -> None:
    """Weights of convolutions of channels_last images are converted once, where no gradients are recorded:
    cuDNN would do so in every call. With a norm and a relu behind the folded weights have that layout."""
    for n in edits.nodes():
        if called(n) not in _CONVOLUTIONS or not _converts(n) or not edits.allows(n):
            continue
        weight: Any = n.args[1]
        made = edits.call(channels_last, (weight,), {}, n, given=torch.empty_like(
            value(weight).detach(), memory_format=torch.channels_last))
        made.meta[DERIVED] = (weight,)
        n.replace_input_with(weight, made)
        edits.note(n, None)


def _converts(n: Node) -> bool:
    weight = n.args[1] if len(n.args) > 1 else None
    if not isinstance(weight, Node) or weight.op != "placeholder" or not is_tensor(n.args[0]):
        return False
    x, w = value(n.args[0]), value(weight)
    folded = called(n) is conv_bn_act and options_of(n)["activation"] == "relu"
    return (not folded and w.dim() == 4 and w.device.type in DEVICES and not value(n).requires_grad
            and bool(w.shape[1] > 1 and x.stride(1) == 1 and w.stride(1) != 1))
