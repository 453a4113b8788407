"""A linear layer of few rows and all that follows it in one kernel: out = f(x W^T + bias, residual).

Nearly all of its time goes into reading W once. cuBLAS takes 3.5 us for one row of 768 and 3072 columns, the
bytes of which take 1.2, and a launch more for what follows.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from fusionrt.dtypes import HALVES, SIGNIFICANT_BITS
from fusionrt.expr import Expr
from fusionrt.laid import address, is_lazy
from fusionrt.ops.product import PRODUCT, Layer, Results, is_of_elements, layer
from fusionrt.runtime.kernel import Kernel, Launch
from fusionrt.runtime.source import definitions, members, pointer

BLOCK = 256
COLUMNS = 16         # of the result, that a block computes
MOST_ROWS = 16
MOST_WEIGHTS = 32 << 20  # more of them cuBLAS reads faster: 64 M in 34.2 us, this kernel in 36
VECTOR = 8           # numbers of one load
WORDS_AT_ONCE = 48   # registers for what is on its way


class Form(NamedTuple):
    """What a kernel is compiled for: `groups` of 8 rows of x."""

    layer: Layer
    groups: int

    @property
    def at_once(self) -> int:
        return WORDS_AT_ONCE // (8 + 4 * self.groups)


@functools.lru_cache(4096)
def chosen(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, epilogue: Expr = PRODUCT
           ) -> bool:
    """Whether this kernel is the fastest way to f(x W^T + bias) of an m x n product over k. Never in a
    warm-up, whose GPU has no index: there are too many kinds. Measured on Hopper: benchmarks/linear.py."""
    if device.type != "cuda" or dtype not in HALVES or k % VECTOR or not 1 <= m <= MOST_ROWS:
        return False
    fast = device.index is not None and torch.cuda.get_device_capability(device.index) >= (9, 0)
    return fast and min(n, k) > 1 and n * k <= MOST_WEIGHTS and is_of_elements(epilogue)


def supports(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
             residual: torch.Tensor | None = None) -> bool:
    """Whether rows of x [M, K] and weight [N, K] can be read 16 bytes at a time; bias [N], residual [M, N],
    all of one dtype."""
    others = [t for t in (bias, residual) if t is not None]
    return (all(t.dtype == x.dtype for t in (weight, *others)) and all(t.stride(-1) == 1 for t in others)
            and not any(map(is_lazy, (x, weight, *others)))
            and all(t.stride(1) == 1 and (t.shape[0] == 1 or t.stride(0) % VECTOR == 0)
                    and (t.is_meta or t.data_ptr() % 16 == 0) for t in (x, weight)))


class Planned:
    """epilogue(x W^T + b, residual), and x W^T + b where it is to be kept, of operands that lie as these, as
    `supports` says, which is asked of the first ones. The products are added up in float32, to which the
    epilogue is applied."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
                 epilogue: Expr = PRODUCT, residual: torch.Tensor | None = None, keep: bool = False) -> None:
        (m, k), n = x.shape, weight.shape[0]
        kernel = _kernel(Form(layer(x, bias, epilogue, residual, keep), -(-m // 8)))
        self.keep, self.shape = keep, (m, n)
        self.launch = Launch(kernel, -(-n // COLUMNS), kernel.planned(
            x_row=x.stride(0), w_row=weight.stride(0),
            residual_row=0 if residual is None else residual.stride(0), m=m, n=n, k=k))

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
                 residual: torch.Tensor | None = None) -> Results | None:
        """None: at these addresses it cannot."""
        out = x.new_empty(self.shape)
        kept = torch.empty_like(out) if self.keep else None
        addresses = [address(t) for t in (x, weight, out, kept, residual, bias)]
        if not x.is_meta and (addresses[0] | addresses[1]) & 15:
            return None
        self.launch(x.device, *addresses)
        return out, kept


@functools.cache
def _kernel(form: Form) -> Kernel:
    fields = [*(pointer("value_t", name, const=name not in {"out", "kept"})
                for name in ("x", "w", "out", "kept", "residual", "bias")),
              *members("long long", "x_row", "w_row", "residual_row"), *members("int", "m", "n", "k")]
    constants = [*definitions(GROUPS=form.groups, AT_ONCE=form.at_once), *form.layer.constants()]
    return Kernel("linear_activation", "gemv", fields, constants,
                  significant_bits=SIGNIFICANT_BITS[form.layer.dtype], block=BLOCK, reads_first=True)
