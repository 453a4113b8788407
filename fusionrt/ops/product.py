"""Products: what our kernels of linear layers compute, out = f(x W^T + bias, residual), and their text of it;
what torch's can."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fusionrt.dtypes import STORAGE
from fusionrt.expr import Expr, argument
from fusionrt.graph import toposort
from fusionrt.runtime.source import definitions, device_function

# The leaves of an epilogue: x W^T + bias, and the residual.
PRODUCT, RESIDUAL = argument("a0"), argument("a1")
# Whether torch's own products have results of a wider dtype than their operands: 2.8.
TO_WIDER = hasattr(torch.ops.aten.bmm, "dtype")

Results = tuple[torch.Tensor, torch.Tensor | None]  # f(x W^T + bias, residual), and x W^T + bias, if kept


class Layer(NamedTuple):
    """What of a layer its kernel is compiled for."""

    dtype: str
    epilogue: Expr           # of PRODUCT and RESIDUAL
    bias: bool
    residual: bool
    keep: bool               # x W^T + bias is a second output

    def constants(self) -> list[str]:
        """Lines of a kernel's prologue: `value_t`, BIAS, RESIDUAL, KEEP, `finish`."""
        return [*definitions(value_t=f"{self.dtype}_t", BIAS=self.bias, RESIDUAL=self.residual,
                             KEEP=self.keep),
                *device_function("acc_t finish(acc_t product, acc_t residual)", self.epilogue,
                                 {PRODUCT: "product", RESIDUAL: "residual"})]


def layer(x: torch.Tensor, bias: torch.Tensor | None, epilogue: Expr, residual: torch.Tensor | None,
          keep: bool) -> Layer:
    return Layer(STORAGE[x.dtype], epilogue, bias is not None, residual is not None, keep)


def is_of_elements(epilogue: Expr) -> bool:
    """Whether it is an expression of PRODUCT and RESIDUAL alone, of their dtype."""
    return not epilogue.is_truth and not epilogue.op.startswith("cast_") and not any(
        node.primitive.of_row or node.op == "random" or (node.op == "arg" and node not in {PRODUCT, RESIDUAL})
        for node in toposort([epilogue]))
