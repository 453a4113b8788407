"""Rows of partial sums that the blocks of a kernel have left, added up by one of its own: sum_partials.cu."""

from __future__ import annotations

import functools

import torch

from fusionrt.dtypes import SIGNIFICANT_BITS, name_of
from fusionrt.runtime import accumulators
from fusionrt.runtime.kernel import Kernel
from fusionrt.runtime.source import definitions


def add_up(op: str, partials: torch.Tensor, out: torch.Tensor) -> None:
    """out = partials.sum(0), of as many elements as a row has, rounded once."""
    chunks, kept = partials.shape
    kernel, blocks, side = _planned(op, partials.dtype, out.dtype, chunks, kept)
    addresses = (0, 0) if out.is_meta else (partials.data_ptr(), out.data_ptr())
    kernel(out.device, blocks, addresses[0], *accumulators.outs(addresses[1]), chunks, kept, side)


@functools.lru_cache(4096)
def _planned(op: str, acc: torch.dtype, out: torch.dtype, chunks: int, kept: int) -> tuple[Kernel, int, int]:
    kernel = _kernel(op, *(name_of(dtype) for dtype in (acc, out)))
    return kernel, accumulators.blocks(kept, chunks), accumulators.side(kept, chunks)


@functools.cache
def _kernel(op: str, acc: str, out: str) -> Kernel:
    return Kernel(op, "sum_partials", accumulators.sum_fields("acc_t", "out_t"),
                  definitions(index_t="unsigned long long", out_t=f"{out}_t"),
                  block=accumulators.BLOCK, acc=acc, significant_bits=SIGNIFICANT_BITS[out],
                  reads_first=True)
