"""Networks of convolutions in channels_last memory, which is how their kernels want images."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert.derived import channels_last
from fusionrt.convert.effects import value
from fusionrt.convert.graph import DERIVED, VALUE, Edits, is_tensor
from fusionrt.convert.match import named
from fusionrt.convert.revalue import revalue
from fusionrt.ops.convolution import conv_activation, conv_bn_act

DEVICES = ("cuda",)  # on a CPU oneDNN arranges weights for itself
FEW = 4  # depthwise convolutions: so many make a network that of images
MOST = 4  # conversions: a network that needs more of them leaves the layout again and again
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def layout(edits: Edits) -> None:
    """What a convolution reads is converted where it lies otherwise; what follows from it does so by
    itself."""
    if not _is_of_images(edits):
        return
    for _ in range(MOST):
        n = next(
            (n for n in edits.graph.nodes if _is_convolution(n) and not _is_last(value(n.args[0]))), None
        )
        if n is None or not edits.allows(n):
            return
        image: Any = n.args[0]
        with edits.graph.inserting_before(n):
            made = edits.graph.call_method("contiguous", (image,), {"memory_format": torch.channels_last})
        t = value(image)
        made.meta[VALUE] = torch.empty_like(t, memory_format=torch.channels_last).requires_grad_(
            t.requires_grad
        )
        image.replace_all_uses_with(made, delete_user_cb=lambda user: _is_convolution(user))
        if not revalue(edits, [made]):
            made.replace_all_uses_with(image)
            edits.graph.erase_node(made)
            return
        edits.note(n, None)


def _is_of_images(edits: Edits) -> bool:
    """Whether convolutions are most of the work, or depthwise ones many."""
    images = [n for n in edits.graph.nodes if _is_convolution(n)]
    others = sum(
        _work(n) for n in edits.graph.nodes if named(n, "linear", "matmul", "bmm", "addmm", "baddbmm")
    )
    depthwise = sum(value(n.args[1]).shape[1] == 1 < value(n).shape[1] for n in images)
    return bool(images) and (sum(map(_work, images)) > others or depthwise >= FEW)


def _work(n: Node) -> float:
    """Multiplications, of the sizes that were seen."""
    operands = [value(a) for a in n.all_input_nodes if is_tensor(a)]
    length = math.prod(operands[1].shape[1:]) if _is_convolution(n) else operands[0].shape[-1]
    return float(math.prod(_size(s) for s in value(n).shape) * _size(length)) if is_tensor(n) else 0.0


def _size(n: Any) -> float:
    return n if isinstance(n, int) else n.node.hint if n.node.has_hint() else 1


def _is_convolution(n: Node) -> bool:
    return (
        n.target is F.conv2d
        and len(n.args) > 1
        and is_tensor(n.args[0])
        and value(n).dim() == 4
        and (value(n).dtype in _DTYPES and value(n).device.type in ("cpu", "cuda"))
    )


def _is_last(t: torch.Tensor) -> bool:
    return bool(t.stride(1) == 1)


# -- weights -----------------------------------------------------------------------------------------


def weights(edits: Edits) -> None:
    """Weights of convolutions of channels_last images are converted once, where no gradients are recorded:
    cuDNN
    would do so in every call. A norm and a relu behind are folded into a weight of that layout anyway."""
    for n in edits.nodes():
        if not _converts(n) or not edits.allows(n):
            continue
        args = dict(zip(("x", "weight"), n.args, strict=False))
        weight: Any = args["weight"]
        made = edits.call(
            channels_last,
            (weight,),
            {},
            n,
            given=torch.empty_like(value(weight), memory_format=torch.channels_last),
        )
        made.meta[DERIVED] = (weight,)
        n.replace_input_with(weight, made)
        edits.note(n, None)
    edits.changed()


def _converts(n: Node) -> bool:
    if n.target not in (F.conv2d, conv_activation, conv_bn_act) or len(n.args) < 2 or not is_tensor(n):
        return False
    x, weight = value(n.args[0]), value(n.args[1])
    folded = n.target is conv_bn_act and n.kwargs.get("activation") == "relu"
    return (
        not folded
        and weight.dim() == 4
        and weight.device.type in DEVICES
        and not value(n).requires_grad
        and n.args[1].op == "placeholder"
        and weight.shape[1] > 1
        and _is_last(x)
        and not _is_last(weight)
    )
