"""The gradients of tables on a GPU: rows of an incoming gradient, summed by index or where they stand."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fusionrt.dtypes import acc_of, name_of
from fusionrt.laid import Laid, address, laid
from fusionrt.runtime.kernel import Kernel, Launch
from fusionrt.runtime.source import definitions, members, pointer

Tensor = torch.Tensor


def vector_of(columns: int, tables: Sequence[Laid]) -> int:
    """The widest pack that all rows are multiples of."""
    itemsize = tables[0].itemsize
    strides = [t.stride(0) for t in tables if len(t.shape) > 1]
    return math.gcd(16 // itemsize, columns, *strides, *(t.residue // itemsize for t in tables))


# -- indices, sorted -------------------------------------------------------------------------------

MOST_BITS, SMALLEST_TILE, MOST_TILES = 9, 1 << 10, 64


@functools.cache
def sort_kernel(index: str, bits: int, scatter: bool, first: bool, last: bool) -> Kernel:
    fields = [pointer("index_t", "indices"), pointer("unsigned", "keys"), pointer("unsigned", "order"),
              *(pointer("unsigned", name, const=False) for name in (
                  "keys_out", "order_out", "counts", "next_counts", "zeroed")),
              pointer("unsigned char", "present", const=False),
              *members("int64_t", "rows", "padding"),
              *members("unsigned", "count", "zeros", "tile", "shift")]
    constants = definitions(index_t=f"{index}_t", BITS=bits, SCATTER=scatter, FIRST=first, LAST=last)
    return Kernel("embedding_position_backward", "sort_indices", fields, constants, block=512)


class Sort:
    """The kernels of kernels_src/sort_indices.cu for so many indices of a table of `rows` rows: one that
    counts and one for each pass. Call it with where the indices lie and where there is memory of `nbytes`;
    `found` are the offsets of what it leaves there, 32-bit words: keys, their order, a byte for each row of
    the table that says whether it occurs; a list of `list_length`, and its length, which is 0."""

    def __init__(self, index: Laid, rows: int, padding: int, list_length: int) -> None:
        count, key_bits = index.numel, max(1, rows.bit_length())   # `rows` is a key as well
        self.passes = -(-key_bits // MOST_BITS)
        bits = -(-key_bits // self.passes)
        tile = max(SMALLEST_TILE, 1 << (-(-count // MOST_TILES) - 1).bit_length())
        self.tiles = -(-count // tile)
        table = self.tiles << bits
        # What starts as 0: the counts of later passes, the list's length, the rows that occur.
        zeros = (self.passes - 1) * table + 1 + -(-rows // 4)
        offsets = [0]
        for size in (table, (self.passes - 1) * table, 1, -(-rows // 4), list_length, *[count] * 4):
            offsets.append(offsets[-1] + 4 * size)
        counts, later, listed, present, listing, *places, self.nbytes = offsets
        pairs = (places[0], places[1]), (places[2], places[3])
        self.found = *pairs[(self.passes - 1) % 2], present, listing, listed
        steps = [(False, 0), *((True, k) for k in range(self.passes))]
        self._launches = []
        for scatter, k in steps:
            kernel = sort_kernel(name_of(index.dtype), bits, scatter, k == 0, k + 1 == self.passes)
            offsets_of_pass = (*pairs[(k + 1) % 2], *pairs[k % 2],
                               counts if k == 0 else later + 4 * (k - 1) * table, later + 4 * k * table,
                               later, present)
            values = kernel.planned(rows=rows, padding=padding, count=count, zeros=zeros,
                                    tile=tile.bit_length() - 1, shift=k * bits)
            self._launches.append((Launch(kernel, self.tiles, values), offsets_of_pass))

    def __call__(self, device: torch.device, index: int, memory: int) -> None:
        for launch, offsets in self._launches:
            launch(device, index, *(memory + offset for offset in offsets))


# -- rows of a gradient ----------------------------------------------------------------------------

MOST_TYPES = 4                       # that are summed with the positions
CHUNK, TEAMS_WANTED, MOST_WINDOWS, MOST_JOINS = 32, 1 << 11, 8, 128
ROWS_OF_A_GROUP, FEWEST_ROWS_OF_A_GROUP = 128, 8   # of token types
BLOCK = 128
_BLOCKS = "group_blocks", "chunk_blocks", "zero_blocks"


@functools.cache
def gradient_kernel(dtype: str, type_ids: str, vec: int, types: int, stage: int) -> Kernel:
    acc = acc_of(dtype)
    fields = [pointer("scalar_t", "grad"), pointer("unsigned", "keys"), pointer("unsigned", "order"),
              pointer("unsigned char", "present"), pointer("type_t", "types"),
              *(pointer("unsigned", name, const=False) for name in ("list", "listed")),
              *(pointer("acc_t", name, const=False) for name in ("partials", "of_types")),
              *(pointer("scalar_t", name, const=False) for name in ("out", "position_out", "type_out")),
              *members("int64_t", "count", "rows"), *members("double", "scale"),
              *members("unsigned", "columns", "windows", "period", "share", "position_rows", "type_period",
                       *_BLOCKS, "joins")]
    constants = definitions(scalar_t=f"{dtype}_t", type_t=f"{type_ids}_t", VEC=vec, TYPES=types, STAGE=stage)
    return Kernel("embedding_position_backward", "embedding_backward", fields, constants, acc=acc,
                  block=BLOCK if stage == 0 else 512)


class Groups(NamedTuple):
    """Rows of a gradient that are summed where they stand: those `period` apart have one position, and the
    gradient of the positions has `rows` rows. Of token types there are `types`, whose ids lie as `type_ids`:
    repeated, or all 0."""

    period: int
    rows: int
    types: int
    type_ids: Laid | None


NO_GROUPS = Groups(1, 0, 0, None)


class Plan(NamedTuple):
    sort: Sort | None
    launches: tuple[Launch, ...]
    of_types: int   # where their partial sums begin, and the memory that is needed
    nbytes: int


@functools.lru_cache(1024)
def _planned(grad: Laid, index: Laid | None, rows: int, scale: float, padding: int, groups: Groups) -> Plan:
    count, columns = grad.shape
    period, repeats = groups.period, -(-count // groups.period)
    acc = getattr(torch, acc_of(grad.dtype)).itemsize
    vec = vector_of(columns, (grad,))
    parts, warps = -(-columns // (32 * vec)), BLOCK // 32
    windows = min(MOST_WINDOWS, max(1, count // CHUNK // TEAMS_WANTED))
    chunks = -(-count // (CHUNK * windows)) if index is not None else 0
    grouped = groups.rows > 0 or groups.types > 0
    share = min(warps, 1 << (max(1, repeats // 4).bit_length() - 1))
    joins = min(MOST_JOINS, chunks)
    blocks = (-(-max(period, groups.rows) // (warps // share)) * grouped, -(-chunks // warps),
              -(-rows // (32 * warps)) if index is not None else 0)
    dtype, ids = name_of(grad.dtype), groups.type_ids
    kernels = [gradient_kernel(dtype, "int64" if ids is None else name_of(ids.dtype), vec,
                               0 if stage else groups.types, stage) for stage in (0, 1)]
    grids = (sum(blocks) * parts, 1), (joins + groups.types, parts)
    launches = tuple(Launch(kernel, grid, kernel.planned(
        count=count, rows=rows, scale=scale, columns=columns, windows=windows, period=period, share=share,
        position_rows=groups.rows, type_period=1 if ids is None else ids.numel,
        **dict(zip(_BLOCKS, blocks, strict=True)), joins=joins))
        for kernel, grid in zip(kernels, grids, strict=True) if grid[0])
    of_types = 2 * chunks * columns * acc
    partials = of_types + groups.types * period * columns * acc
    sort = None if index is None else Sort(index, rows, padding, chunks)
    return Plan(sort, launches, of_types, partials + (0 if sort is None else sort.nbytes))


def gradients_on_gpu(grad: Tensor, index: Tensor | None, rows: int, scale: float, padding: int,
                     groups: Groups = NO_GROUPS, type_ids: Tensor | None = None) -> list[Tensor]:
    """Of `rows` rows of tokens, as `sum_by_index` has them (none without an index), and of the groups."""
    outs = [grad.new_empty((n, grad.shape[1])) for n in (rows, groups.rows, groups.types)]
    if not grad.numel():
        return [out.zero_() for out in outs]
    plan = _planned(laid(grad), laid(index), rows, scale, padding, groups)
    memory = torch.empty(plan.nbytes, dtype=torch.uint8, device=grad.device)
    partials = memory.data_ptr()
    found: tuple[int, ...] = (0,) * 5
    if plan.sort is not None and index is not None:
        sorts = partials + plan.nbytes - plan.sort.nbytes
        plan.sort(grad.device, index.data_ptr(), sorts)
        found = tuple(sorts + offset for offset in plan.sort.found)
    addresses = (grad.data_ptr(), *found[:3], address(type_ids), *found[3:],
                 partials, partials + plan.of_types, *(out.data_ptr() for out in outs))
    for launch in plan.launches:
        launch(grad.device, *addresses)
    return outs


def add_partials(partials: Tensor, out: Tensor) -> None:
    """out[k] = partials[k].sum(0), of shape (kinds, rows, columns)."""
    launch = _joining(name_of(out.dtype), vector_of(partials.shape[2], (laid(out),)), *partials.shape)
    launch(out.device, *(0,) * 8, partials.data_ptr(), 0, 0, out.data_ptr())


@functools.lru_cache(1024)
def _joining(dtype: str, vec: int, kinds: int, rows: int, columns: int) -> Launch:
    """The second stage alone: kinds are its types, rows their groups."""
    kernel = gradient_kernel(dtype, "int64", vec, 0, 1)
    none = dict.fromkeys(("rows", "share", "position_rows", "type_period", *_BLOCKS, "joins"), 0)
    return Launch(kernel, (kinds, -(-columns // (32 * vec))), kernel.planned(
        **none, count=rows, scale=1.0, columns=columns, windows=1, period=rows))


def sum_rows_on_gpu(grad: Tensor, tokens: Tensor, token_type: Tensor | None, period: int,
                    sizes: Sequence[int], scale: float, padding: int) -> tuple[Tensor, ...]:
    """The gradients of tables of so many rows, of tokens, positions and types: those of no rows are none."""
    grad, count = grad.contiguous(), grad.shape[0]
    index = tokens.contiguous() if sizes[0] else None
    token_type = token_type.contiguous() if sizes[2] and token_type is not None else None
    # Partial sums of types, one a group, are few where groups are long.
    of_types = Groups(max(1, count // ROWS_OF_A_GROUP), 0, sizes[2], laid(token_type))
    groups = Groups(period, sizes[1], *of_types[2:]) if sizes[1] else of_types
    apart = sizes[1] and sizes[2] and count < FEWEST_ROWS_OF_A_GROUP * period
    if apart:
        groups = groups._replace(types=0, type_ids=None)
    found = gradients_on_gpu(grad, index, sizes[0], scale, padding, groups, token_type)
    if apart:
        found[2] = gradients_on_gpu(grad, None, 0, 1.0, -1, of_types, token_type)[2]
    return tuple(found)
