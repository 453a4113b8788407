"""Attention on Hopper by kernels of our own: scores capped, biased by distance, bounded in a band.

The forward kernel keeps the logarithm of each row's sum of exponentials, from which the backward kernels make
the weights again: one has the gradients of k and v, one that of q. None adds in another order each time.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from fusionrt.dtypes import SIGNIFICANT_BITS, STORAGE
from fusionrt.laid import address, heads_of_rows
from fusionrt.runtime import tensor_map
from fusionrt.runtime.kernel import Kernel
from fusionrt.runtime.matrix_units import multiply
from fusionrt.runtime.source import TENSOR_MAP, Field, definitions, members, pointer
from fusionrt.runtime.tensor_map import Heads

Tensor = torch.Tensor
CAPABILITY = (9, 0)
DIMS = (64, 128)            # of heads
PANEL = 64                  # columns of a box
PADDED = 128                # rows of logarithms are a multiple of it
UNBOUNDED = 1 << 30         # keys on a side
_LOG2_E = math.log2(math.e)


class Scoring(NamedTuple):
    """Between products and weights: as `fusionrt.ops.attention_chunks.Options`."""

    scale: float
    left: int
    right: int
    offset: int
    softcap: float


class Form(NamedTuple):
    """What the kernels are compiled for."""

    dtype: str
    dim: int
    softcap: bool
    alibi: str              # NONE; LEFT: keys lie on the left of their query; BOTH


class Tile(NamedTuple):
    groups: int             # warpgroups, of 64 rows each
    keys: int
    stages: int


OF_KEYS = {64: Tile(2, 64, 4), 128: Tile(2, 64, 3)}
OF_QUERIES = {64: Tile(2, 128, 2), 128: Tile(2, 96, 2)}


def forward_tile(form: Form) -> Tile:
    """Of narrow heads three warpgroups have their sums in registers, which a softcap's tanh needs as well."""
    if form.dim == 128:
        return Tile(2, 128, 2)
    return Tile(3, 112 if form.softcap else 128, 3)


def supports(t: Tensor) -> bool:
    """Whether the copy engine takes the memory of (B, H, S, D)."""
    return t.stride(3) == 1 and tensor_map.can_copy_heads(_heads(t))


def _heads(t: Tensor) -> Heads:
    batch, heads, rows, columns = t.shape
    row = -(-columns // 8) * 8  # of a single one the stride says nothing
    strides = (stride if n > 1 else row for n, stride in zip((batch, heads, rows), t.stride(), strict=False))
    return Heads(t.data_ptr(), (batch, heads, rows, columns), tuple(strides), STORAGE.get(t.dtype, ""))


# -- calls -----------------------------------------------------------------------------------------

def forward(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, scoring: Scoring, tile: Tile | None = None
            ) -> tuple[Tensor, Tensor]:
    """The result, its heads beside each other, and the logarithms of the sums of exponentials (B, H, rows of
    which there are a multiple of PADDED): infinite where a query has no key.

    q (B, H, S, D), k and v (B, heads, T, D), which `supports` takes; slopes: float32, (B or 1, H).
    """
    batch, heads, rows, dim = q.shape
    form = _form(q, slopes, scoring)
    tile = tile or forward_tile(form)
    out, logarithms = allocate(q)
    kernel = _forward(form, tile)
    tiles = -(-rows // (64 * tile.groups))
    maps = _maps((q, 64 * tile.groups), (k, tile.keys), (v, tile.keys), (out, 16))
    kernel(q.device, batch * heads * tiles, *maps, address(slopes), logarithms.data_ptr(),
           *kernel.planned(tiles=tiles, **_numbers(q, k, slopes, logarithms, scoring)),
           shared=(tile.groups * 64 + 2 * tile.stages * tile.keys) * dim * 2 + 8 * (1 + 4 * tile.stages))
    return out, logarithms


def allocate(q: Tensor) -> tuple[Tensor, Tensor]:
    """The result and the logarithms, as `forward` gives them."""
    batch, heads, rows, dim = q.shape
    padded = (rows + PADDED - 1) // PADDED * PADDED
    return (heads_of_rows(q, batch, heads, rows, dim),
            q.new_empty((batch, heads, padded), dtype=torch.float32))


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, totals: Tensor,
             logarithms: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; the result's: `grad`, which `supports` takes as well. `totals`: the sums of
    its rows times those of the result, float32, in the shape of the logarithms."""
    form = _form(q, slopes, scoring)
    grad_q, grad_k, grad_v = (torch.empty_like(t) for t in (q, k, v))
    numbers = {**_numbers(q, k, slopes, logarithms, scoring), "plain_scale": scoring.scale}
    pointers = address(slopes), logarithms.data_ptr(), totals.data_ptr()
    dim, tile = q.shape[3], OF_KEYS[q.shape[3]]
    tiles, kernel = -(-k.shape[2] // 128), _of_keys(form, tile)
    kernel(
        q.device, k.shape[0] * k.shape[1] * tiles,
        *_maps((k, 128), (v, 128), (q, tile.keys), (grad, tile.keys), (grad_k, 16), (grad_v, 16)), *pointers,
        *kernel.planned(tiles=tiles, **numbers),
        shared=4 * 128 * dim + tile.stages * (4 * tile.keys * dim + 1024) + 8 * (1 + 2 * tile.stages))
    tile = OF_QUERIES[dim]
    rows = 64 * tile.groups
    tiles, kernel = -(-q.shape[2] // rows), _of_queries(form, tile)
    kernel(
        q.device, q.shape[0] * q.shape[1] * tiles,
        *_maps((q, rows), (grad, rows), (k, tile.keys), (v, tile.keys), (grad_q, 16)), *pointers,
        *kernel.planned(tiles=tiles, **numbers),
        shared=4 * dim * (rows + tile.stages * tile.keys) + 8 * (2 + 2 * tile.stages))
    return grad_q, grad_k, grad_v


def _maps(*boxes: tuple[Tensor, int]) -> list[bytes]:
    return [tensor_map.encode_heads(_heads(t), rows, PANEL) for t, rows in boxes]


def _form(q: Tensor, slopes: Tensor | None, scoring: Scoring) -> Form:
    alibi = "NONE" if slopes is None else "LEFT" if scoring.right == 0 else "BOTH"
    return Form(STORAGE[q.dtype], q.shape[3], scoring.softcap > 0, alibi)


def _numbers(q: Tensor, k: Tensor, slopes: Tensor | None, logarithms: Tensor, scoring: Scoring
             ) -> dict[str, float]:
    """Those of _NUMBERS that do not depend on the tile."""
    left, right = (UNBOUNDED if side < 0 else min(side, UNBOUNDED) for side in (scoring.left, scoring.right))
    scale, cap = scoring.scale, scoring.softcap
    heads = q.shape[1]
    return {"heads": heads, "group": heads // k.shape[1], "padded": logarithms.shape[2],
            "slopes_batch": 0 if slopes is None or slopes.shape[0] == 1 else heads,
            "left": left, "right": right, "offset": scoring.offset, "queries": q.shape[2], "keys": k.shape[2],
            "scale": scale * _LOG2_E, "inner": scale / cap if cap else 0.0, "cap": cap * _LOG2_E,
            "near": 0.75 * cap / scale}


# -- their text ------------------------------------------------------------------------------------

_NUMBERS = [*members("int", "heads", "group", "tiles", "padded", "slopes_batch", "left", "right", "offset",
                     "queries", "keys"), *members("float", "scale", "inner", "cap", "near")]


@functools.cache
def _forward(form: Form, tile: Tile) -> Kernel:
    fields = [*_map_fields("q", "k", "v", "out"), pointer("float32_t", "slopes"),
              pointer("float32_t", "logarithms", const=False), *_NUMBERS]
    constants = [*_constants(form, tile), *definitions(GROUPS=tile.groups)]
    return Kernel("attention", "attention_sm90", fields, constants,
                  significant_bits=SIGNIFICANT_BITS[form.dtype], block=128 * (tile.groups + 1))


@functools.cache
def _of_keys(form: Form, tile: Tile) -> Kernel:
    return _backward("attention_keys_sm90", ("k", "v", "q", "grad", "grad_k", "grad_v"), form, tile, [])


@functools.cache
def _of_queries(form: Form, tile: Tile) -> Kernel:
    return _backward("attention_queries_sm90", ("q", "grad", "k", "v", "grad_q"), form, tile,
                     definitions(GROUPS=tile.groups))


def _backward(stem: str, maps: tuple[str, ...], form: Form, tile: Tile, constants: list[str]) -> Kernel:
    pointers = [pointer("float32_t", name) for name in ("slopes", "logarithms", "totals")]
    fields = [*_map_fields(*maps), *pointers, *_NUMBERS, *members("float", "plain_scale")]
    return Kernel("attention", stem, fields, [*_constants(form, tile), *constants],
                  significant_bits=SIGNIFICANT_BITS[form.dtype], block=128 * (tile.groups + 1))


def _map_fields(*names: str) -> list[Field]:
    return [Field(f"TensorMap {name}", TENSOR_MAP) for name in names]


def _constants(form: Form, tile: Tile) -> list[str]:
    return [*definitions(value_t=f"{form.dtype}_t", D=form.dim, BN=tile.keys, STAGES=tile.stages,
                         SOFTCAP=form.softcap, ALIBI=form.alibi),
            *_product("Tiles", form.dtype, tile.keys, begins=True),
            *_product("Across", form.dtype, form.dim, registers=True)]


def _product(of: str, dtype: str, n: int, **how: bool) -> list[str]:
    """`Tiles` or `Across` of n columns, as attention_sm90.cuh declares them."""
    first, *body = multiply(dtype, n, **how)
    return [f"template <> struct {of}<value_t, {n}> {{", f"static {first}", *body, "};"]
