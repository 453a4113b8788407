"""`torch.isinf(x).any()`, as T5 asks in 16 bits before it bounds its numbers: one reduction of x itself."""

from __future__ import annotations

import math
from typing import Any

import torch

from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, is_tensor, same
from fusionrt.convert.match import named
from fusionrt.expr import Expr, abs_, where
from fusionrt.ops.reduction import row_reduce

DEVICES = ("cuda",)


def _infinite(x: Expr) -> Expr:
    return where(abs_(x) == math.inf, 1, 0)


def _nan(x: Expr) -> Expr:
    return where(x != x, 1, 0)


_TRUTHS = {"isinf": _infinite, "isnan": _nan}


def any_of(edits: Edits) -> None:
    """Of all elements, where no gradient is recorded."""
    for n in edits.nodes():
        asked: Any = n.args[0] if named(n, "any") and len(n.args) == 1 and not n.kwargs else None
        x: Any = asked.args[0] if named(asked, *_TRUTHS) and len(asked.args) == 1 else None
        if (is_tensor(x) and list(asked.users) == [n] and _fits(value(x)) and not edits.facts.is_written(x)
                and edits.allows(n, [asked, n])):
            truth = _TRUTHS[asked.target if asked.op == "call_method" else asked.target.__name__]
            most = edits.call(row_reduce, (x,), {"map": truth, "op": "max"}, n, given=value(x).new_empty(()))
            edits.replace([asked, n], n, torch.ne, (most, 0), None)


def _fits(x: torch.Tensor) -> bool:
    return (x.is_floating_point() and x.device.type in DEVICES and not x.requires_grad and x.dim() > 0
            and not any(same(size, 0) for size in x.shape))
