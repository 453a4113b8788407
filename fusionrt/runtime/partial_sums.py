"""Rows of partial sums that the blocks of a kernel have left, added up by one of its own: sum_partials.cu."""

from __future__ import annotations

import functools

import torch

from fusionrt.dtypes import SIGNIFICANT_BITS, name_of
from fusionrt.laid import address
from fusionrt.runtime import accumulators
from fusionrt.runtime.kernel import Kernel, Launch
from fusionrt.runtime.source import definitions


def add_up(op: str, partials: torch.Tensor, out: torch.Tensor) -> None:
    """out = partials.sum(0), of as many elements as a row has, rounded once."""
    chunks, kept = partials.shape
    launch = _planned(op, partials.dtype, out.dtype, chunks, kept)
    launch(out.device, address(partials), *accumulators.outs(address(out)))


@functools.lru_cache(4096)
def _planned(op: str, acc: torch.dtype, out: torch.dtype, chunks: int, kept: int) -> Launch:
    kernel = _kernel(op, *(name_of(dtype) for dtype in (acc, out)))
    return Launch(kernel, accumulators.blocks(kept, chunks), kernel.planned(
        chunks=chunks, kept=kept, side=accumulators.side(kept, chunks)))


@functools.cache
def _kernel(op: str, acc: str, out: str) -> Kernel:
    return Kernel(op, "sum_partials", accumulators.sum_fields("acc_t", "out_t"),
                  definitions(index_t="unsigned long long", out_t=f"{out}_t"),
                  block=accumulators.BLOCK, acc=acc, significant_bits=SIGNIFICANT_BITS[out],
                  reads_first=True)
