"""Squeeze and excitation at inference: mean, two small linear layers and the product in one kernel."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from fusionrt.activation import activated
from fusionrt.dtypes import SIGNIFICANT_BITS, STORAGE
from fusionrt.expr import argument
from fusionrt.ops.convolution import conv_activation
from fusionrt.rehearsal import stands_for
from fusionrt.runtime import device as cuda
from fusionrt.runtime.kernel import Kernel
from fusionrt.runtime.source import ITEMSIZE, definitions, device_function, members, pointer

Tensor = torch.Tensor
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
VECTOR = 16  # bytes
CLUSTER, LARGE_CLUSTER = 8, 16  # blocks of an image
BLOCK = MOST_PACKS = 512  # threads; packs of a row of a matrix, or of a part of it
NEIGHBOURS = 4  # vectors: two sectors, of which memory is made up
LITTLE = 1.3    # times the least
SCRATCH = 6 << 10  # numbers: 2^12, in rows that begin in different banks
MOST_HIDDEN = 1024  # for which shared memory suffices
HAVE_LARGE = ((9, 0), (10, 0), (10, 3))


def squeeze_excite(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, *, inner: Any = "relu",
                   outer: Any = "sigmoid") -> Tensor:
    """x * outer(w2 inner(w1 mean + b1) + b2), the mean over the pixels of x, (N, C, H, W) in channels_last
    memory; w1: (R, C, 1, 1), w2: (C, R, 1, 1). No gradients."""
    if not _serves(x, w1, b1, w2, b2):
        hidden = conv_activation(F.adaptive_avg_pool2d(x, 1), w1, b1, inner)
        return x * conv_activation(hidden, w2, b2, outer)
    out = torch.empty_like(x)
    (n, channels), pixels, hidden = x.shape[:2], math.prod(x.shape[2:]), len(w1)
    pack, cluster = VECTOR // x.itemsize, _cluster(stands_for(x.device).index, len(x))
    cut = _cut(channels // pack, pixels, hidden, cluster)
    hidden_pack = math.gcd(hidden, pack)
    read = [x, *(w.contiguous() for w in (w1, b1, w2, b2))]
    kernel = _kernel(STORAGE[x.dtype], inner, outer, cluster, hidden_pack)
    values = kernel.planned(pixels=pixels, channels=channels, hidden=hidden, part_bits=cut.part_bits,
                            pixels_each=cut.pixels, packs=cut.packs, hidden_packs=hidden // hidden_pack)
    kernel(x.device, n * cluster, *(t.data_ptr() for t in (*read, out)), *values,
           shared=4 * (SCRATCH + 2 * pack * cut.packs + 2 * (hidden + 3) + cluster * hidden))
    return out


def _serves(x: Tensor, *weights: Tensor) -> bool:
    gpu, pack, hidden = stands_for(x.device), VECTOR // x.itemsize, len(weights[0])
    return (gpu.type == "cuda" and gpu.index is not None and cuda.has_clusters(gpu.index)
            and x.dtype in DTYPES and x.numel() > 0 and math.prod(x.shape[1:]) < 1 << 31
            and x.is_contiguous(memory_format=torch.channels_last)
            and x.shape[1] % pack == 0 and x.shape[1] <= CLUSTER * MOST_PACKS * pack
            and all(w.dtype == x.dtype and w.numel() > 0 for w in weights)
            and hidden <= MOST_HIDDEN and hidden // math.gcd(hidden, pack) <= MOST_PACKS
            and not any(t.data_ptr() % VECTOR for t in (x, weights[0], weights[2])))


@functools.cache
def _cluster(device: int, images: int) -> int:
    """The large one where each block has a multiprocessor for itself."""
    large = (torch.cuda.get_device_capability(device) in HAVE_LARGE
             and images * LARGE_CLUSTER <= cuda.multiprocessors(device))
    return LARGE_CLUSTER if large else CLUSTER


class Cut(NamedTuple):
    """How the blocks of a cluster share an image: its channels in 2^part_bits parts of so many packs, the
    pixels of each part among as many blocks as there are for it."""

    part_bits: int
    packs: int
    pixels: int


@functools.lru_cache(1024)
def _cut(packs: int, pixels: int, hidden: int, cluster: int) -> Cut:
    """The fewest parts with little to read and to write for a block. The more parts, the less each reads of
    the weights; but what neighbours in memory is read together."""
    cuts = [Cut(k, -(-packs >> k), -(-pixels // (cluster >> k))) for k in range(cluster.bit_length())]
    moved = {c: c.packs * (c.pixels + hidden) for c in cuts
             if c.packs <= MOST_PACKS and (c.packs >= NEIGHBOURS or not c.part_bits)}
    return next(c for c, packs in moved.items() if packs <= LITTLE * min(moved.values()))


@functools.cache
def _kernel(dtype: str, inner: Any, outer: Any, cluster: int, hidden_pack: int) -> Kernel:
    fields = [*(pointer("value_t", name) for name in ("x", "w1", "b1", "w2", "b2")),
              pointer("value_t", "out", const=False),
              *members("int", "pixels", "channels", "hidden", "part_bits", "pixels_each"),
              *members("Divisor", "packs", "hidden_packs")]
    x = argument("a0")
    constants = definitions(
        value_t=f"{dtype}_t", CLUSTER=cluster, SCRATCH=SCRATCH, FEW=cluster == LARGE_CLUSTER,
        PACK=VECTOR // ITEMSIZE[dtype], HIDDEN_PACK=hidden_pack)
    for name, activation in (("inner", inner), ("outer", outer)):
        constants += device_function(f"acc_t {name}(acc_t x)", activated("squeeze_excite", x, activation),
                                     {x: "x"})
    return Kernel("squeeze_excite", "squeeze_excite", fields, constants,
                  significant_bits=SIGNIFICANT_BITS[dtype], block=BLOCK, cluster=cluster)
