"""Convolutions whose windows lie side by side, as where images become tokens: a linear layer of patches.

cuDNN takes up to twenty times as long as the product, and copies images and result to other layouts.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from fusionrt.convert.calls import patch_linear
from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, arguments
from fusionrt.convert.passes.convolution import is_plain
from fusionrt.convert.revalue import take_place
from fusionrt.dtypes import HALVES

DEVICES = ("cuda",)
ALIGNED = 8  # numbers of a patch that a product reads at a time


def patches(edits: Edits) -> None:
    """Where no gradients are recorded, in 16 bits: in float32 convolutions have TF32, products do not."""
    for n in edits.nodes():
        given = _arguments(n) if n.target is torch.conv2d else None
        if given is None or not edits.allows(n):
            continue
        t = value(n)
        lies = t.new_empty((t.shape[0], *t.shape[2:], t.shape[1])).permute(0, 3, 1, 2)
        take_place(edits, n, edits.call(patch_linear, given, {}, n, given=lies))
        edits.note(n, None)
        edits.erase([n])


def _arguments(n: Node) -> tuple[Node, Node, Node | None] | None:
    """Images, weight and bias, if it is one of these."""
    given = arguments(n, input=None, weight=None, bias=None, stride=1, padding=0, dilation=1, groups=1)
    if given is None or not is_plain(n):
        return None
    t, x, weight = value(n), value(given["input"]), value(given["weight"])
    window = tuple(weight.shape[2:])
    stride, padding, dilation = (_both(given[name]) for name in ("stride", "padding", "dilation"))
    fits = (t.device.type in DEVICES and t.dtype in HALVES and not t.requires_grad and x.dim() == 4
            and x.dtype == weight.dtype == t.dtype and t.is_contiguous() and weight.is_contiguous()
            and stride == window and padding == (0, 0) and dilation == (1, 1) and given["groups"] == 1
            and math.prod(window) > 1 and math.prod(weight.shape[1:]) % ALIGNED == 0)
    whole = all(isinstance(n, int) and n % k == 0 for n, k in zip(x.shape[2:], window, strict=False))
    return (given["input"], given["weight"], given["bias"]) if fits and whole else None


def _both(given: object) -> tuple[object, ...]:
    return tuple(given) if isinstance(given, (tuple, list)) else (given, given)
