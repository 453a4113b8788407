"""Attention with a mask that is the same tensor in each call: what kernels want to have of it is kept."""

from __future__ import annotations

import dataclasses

import torch

from fusionrt.convert.derived import derived
from fusionrt.ops.attention import attention, options_of
from fusionrt.ops.attention_masked import attention_of_prepared, prepared, regular
from fusionrt.ops.attention_path import way_of
from fusionrt.watching import PLAIN

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """Makes what is added to the scores, and the first key of each query; None where none is without one."""

    dtype: torch.dtype
    keys: int

    def __call__(self, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        added, first = prepared(mask, mask.new_empty((1, 1, 1, 1), dtype=self.dtype), self.keys)
        if torch.cuda.is_current_stream_capturing():  # when the host cannot ask
            return added, first
        return added, None if bool((first < self.keys).all()) else first


def attention_by_kept_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None
                           ) -> Tensor:
    """`attention` of q, k and v of as many heads, without gradients. Under autocast, and for ways that read a
    mask as it is, it is one like any other."""
    if (q.is_cuda and type(mask) in PLAIN and mask.dim() == 4 and q.numel() and v.numel()
            and not torch.is_autocast_enabled("cuda")):
        options = options_of("attention", q, k.shape[2], False, scale, 0.0, True, None, False, None)
        q, k, v = (regular(t) for t in (q, k, v))
        way, kind = way_of(q, k, v, mask, None, options)
        if way in ("cudnn", "efficient") and not kind.recorded:
            added, first = derived(_Prepared(q.dtype, k.shape[2]), mask)
            return attention_of_prepared(q, k, v, added, first, way, options.scale)
    return attention(q, k, v, mask=mask, scale=scale)
