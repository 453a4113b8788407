"""Max pooling: without the places of what it finds, or with small ones."""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, arguments, is_tensor
from fusionrt.convert.max_pool import DTYPES, max_pool

DEVICES = ("cuda",)
LARGEST = 7  # windows, which the kernel has in its text


def pooling(edits: Edits) -> None:
    """Of images in channels_last memory."""
    for n in edits.nodes():
        sizes = _sizes(n) if n.target is F.max_pool2d else None
        if sizes is not None and _fits(n) and edits.allows(n):
            edits.replace([n], n, max_pool, (n.args[0], *sizes), None)


def _sizes(n: Node) -> list[tuple[int, int]] | None:
    """Kernel, stride, padding and dilation in two dimensions."""
    given = arguments(n, input=None, kernel_size=None, stride=None, padding=0, dilation=1, ceil_mode=False,
                      return_indices=False)
    if given is None or given["ceil_mode"] or given["return_indices"]:
        return None
    given["stride"] = given["stride"] or given["kernel_size"]
    found = [_both(given[name]) for name in ("kernel_size", "stride", "padding", "dilation")]
    return found if all(isinstance(size, int) for both in found for size in both) and max(
        found[0]) <= LARGEST else None


def _both(given: Any) -> tuple[Any, ...]:
    sizes = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    return sizes * 2 if len(sizes) == 1 else sizes


def _fits(n: Node) -> bool:
    if not is_tensor(n) or not n.args or not is_tensor(n.args[0]):
        return False
    t, x = value(n), value(n.args[0])
    return (t.device.type in DEVICES and t.dtype in DTYPES and x.dim() == 4 and x.stride(1) == 1
            and t.stride(1) == 1)
