"""Rolling windows on a GPU: kernels_src/window.cu, specialised, and launched in its stages."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusionrt.data.window_rows import Request, Rows
from fusionrt.dtypes import SIGNIFICANT_BITS, name_of
from fusionrt.laid import address
from fusionrt.runtime.kernel import Kernel
from fusionrt.runtime.source import Field, definitions, members, pointer, template

RADIX = 16    # the template's
LEVELS = 8    # 16^8 tiles are more than a dimension has
SHARED = 64 << 10   # bytes that any device gives a block
ROOM = 200 << 10    # that blocks of several tiles share, on a large device
TOTAL, EXTREME, MOMENTS = range(3)
FAMILIES = {"sum": TOTAL, "mean": TOTAL, "min": EXTREME, "max": EXTREME, "var": MOMENTS, "std": MOMENTS}
STATES = (1, 1, 3)    # numbers that a family keeps of a range
WINDOWS, CHUNKS, FOLDS, MIDDLES = range(4)


class Shape(NamedTuple):
    """Of a block: threads, columns, elements of a thread, blocks that share a multiprocessor at least, tiles
    that it takes one after the other."""

    block: int
    lanes: int
    items: int
    resident: int
    tiles: int

    @property
    def tile(self) -> int:
        return self.block // self.lanes * self.items


def accumulated(op: str, dtype: torch.dtype) -> torch.dtype:
    """What the arithmetic is done in: sums of float32 in double."""
    if dtype == torch.float64 or (dtype == torch.float32 and op not in ("min", "max")):
        return torch.float64
    return torch.float32


def items(op: str, dtype: torch.dtype, indexed: bool, lanes: int) -> int:
    """Elements of a thread: as many as registers allow, an odd number of words of shared memory."""
    family, size = FAMILIES[op], dtype.itemsize
    if indexed or size == 8:
        return 5 if family == MOMENTS else 7 if size == 8 else 14 if size == 2 and lanes == 1 else 9
    if size == 2 and lanes == 1:
        return 18 if family == MOMENTS else 30
    if family == MOMENTS:
        return 13 if size == 2 else 11
    return 13 if family == TOTAL and size == 4 and lanes > 1 else 15


def lanes_of(request: Request, dtype: torch.dtype, indexed: bool, inner: int) -> int:
    """Columns that a block has, a power of two: 128 bytes of them, or fewer where many rows have to fit, or
    where they then are more nearly all that there are."""
    if inner == 1:
        return 1
    size, window, moments = dtype.itemsize, request.window, FAMILIES[request.op] == MOMENTS
    if indexed or size == 8:
        width = 32 if 128 < window <= 1024 else 64
    elif window <= 128:
        width = 64 if moments and size == 4 else 128
    else:
        width = 32 if (moments and size == 4) or (size == 2 and window <= 1024) else 64
    most = min(width // size, 1 << (inner - 1).bit_length())
    half = most // 2
    return half if half * size >= 64 and -(-inner // half) * half * 1.05 < -(-inner // most) * most else most


def resident_threads(op: str, dtype: torch.dtype, lanes: int) -> int:
    """Of a multiprocessor at least: with more, registers would not suffice."""
    family, size = FAMILIES[op], dtype.itemsize
    if family == MOMENTS:
        return 768 if size == 2 else 640
    if size == 8 or (family == TOTAL and lanes > 1):
        return 768
    return 896 if (size == 2 and lanes == 1) or (size == 4 and op == "mean") else 1024


def shape(request: Request, dtype: torch.dtype, indexed: bool, inner: int) -> Shape:
    """As measured: what computes much takes several tiles, whose copies are on their way meanwhile."""
    lanes, moments = lanes_of(request, dtype, indexed, inner), FAMILIES[request.op] == MOMENTS
    if indexed or dtype.itemsize == 8 or lanes == 1:
        block = 128 if (request.window <= 1024 if lanes == 1 else moments) else 256
        tiles = 1 if indexed else 4 if moments else 1 if lanes == 1 and request.window <= 128 else 2
    else:
        block, tiles = 128 if moments and dtype.itemsize == 4 else 256, 4
    return Shape(block, lanes, items(request.op, dtype, indexed, lanes),
                 resident_threads(request.op, dtype, lanes) // block, tiles)


@functools.cache
def kernel(op: str, dtype: torch.dtype, indexed: bool, shape: Shape, stage: int, window: int = 0) -> Kernel:
    """`window`: one that is shorter than a thread's items, or 0."""
    name, acc = name_of(dtype), accumulated(op, dtype)
    constants = [
        *definitions(scalar_t=f"{name}_t", LANES=shape.lanes, ITEMS=shape.items, RESIDENT=shape.resident,
                     TILES=shape.tiles, FAMILY=FAMILIES[op], WINDOW=window, STAGE=stage, MEAN=op == "mean",
                     LARGEST=op == "max", INDEXED=indexed, ROOT=op == "std"),
        "struct State;", template("window_ranges.cuh")]
    scalar = "d" if acc == torch.float64 else "f"
    fields = [pointer("scalar_t", "x"), pointer("scalar_t", "out", const=False),
              pointer("int", "index", const=False),
              *(Field(f"State* {name}", "Q") for name in ("chunks", "heads", "folded", "middles")),
              Field(f"const State* folds[{LEVELS}]", "Q" * LEVELS),
              *members("long long", "outer", "inner", "outer_step", "step", "tiles", "chunk_tiles", "span"),
              *(Field(f"acc_t {name}", scalar) for name in ("inverse", "share", "correction")),
              *members("int", "n", "results", "dense", "left", "window", "min_periods", "stride", "gap",
                       "head", "levels", "chunks_at", "beyond_at"),
              *members("Divisor", "by_groups", "by_tiles"), *members("int", "wide")]
    return Kernel(f"sliding_window {op}", "window", fields, constants,
                  acc=name_of(acc), block=shape.block,
                  significant_bits=SIGNIFICANT_BITS[name])


class Plan(NamedTuple):
    """What calls of one kind have in common."""

    shape: Shape
    gap: int            # elements between the two ends of a window that are in shared memory, or 0
    shared: int         # bytes of that
    tiles: int
    groups: int
    numbers: dict[str, Any]   # of the last stage, by the names of its kernel's fields
    kernel: Kernel
    values: tuple[Any, ...]   # its numbers


@functools.lru_cache(256)
def plan(request: Request, rows: Rows, dtype: torch.dtype, indexed: bool, aligned: bool) -> Plan:
    """`aligned`: x begins at a multiple of 16 bytes."""
    size, window, dense = dtype.itemsize, request.window, request.dense(rows.n)
    fitting = shape(request, dtype, indexed, rows.inner)
    room = min(ROOM // fitting.resident, SHARED)
    while fitting.tiles > 1 and _shared(request, dtype, indexed, fitting, 0)[0] > room:
        fitting = fitting._replace(tiles=fitting.tiles - 1)
    while min(_shared(request, dtype, indexed, fitting, gap)[0] for gap in (0, 1)) > SHARED:
        fitting = fitting._replace(block=fitting.block // 2)
    gap = 0 if _shared(request, dtype, indexed, fitting, 0)[0] <= SHARED else window - fitting.tile
    shared, chunks_at, beyond_at = _shared(request, dtype, indexed, fitting, gap)
    # Tiles of a row that is one window begin up to 16 bytes before it.
    shift = 16 // size - 1 if fitting.lanes == 1 and request.stride == 1 else 0
    tiles, groups = -(-(dense + shift) // (fitting.tile * fitting.tiles)), -(-rows.inner // fitting.lanes)
    freedom = window - request.correction
    numbers = {
        **rows._asdict(), "tiles": tiles, "chunk_tiles": 0, "span": 0, "inverse": 1 / window,
        "share": 1 / freedom if freedom > 0 else math.inf, "correction": request.correction,
        "results": request.results(rows.n), "dense": dense, "left": request.left, "window": window,
        "min_periods": request.min_periods, "stride": request.stride, "gap": gap, "head": 0, "levels": 0,
        "chunks_at": chunks_at, "beyond_at": beyond_at, "by_groups": groups, "by_tiles": tiles,
        "wide": aligned and all(a * size % 16 == 0 for a in (rows.inner, rows.outer_step, rows.step))}
    made = kernel(request.op, dtype, indexed, fitting, WINDOWS, window if window < fitting.items else 0)
    return Plan(fitting, gap, shared, tiles, groups, numbers, made, made.planned(**numbers))


def _shared(request: Request, dtype: torch.dtype, indexed: bool, shape: Shape, gap: int
            ) -> tuple[int, int, int]:
    """Bytes of shared memory, at which of them chunks begin, at which element what follows the gap."""
    size, tile, window = dtype.itemsize, shape.tile, request.window
    rows = tile if gap else tile * shape.tiles + window - 1
    near = _rounded((rows * shape.lanes + shape.items) * size + 32)
    far = near if gap else 0
    chunks = (shape.block // shape.lanes + (tile if gap else window) // shape.items) * shape.lanes
    kept = chunks * _state(request.op, dtype, indexed) if window >= shape.items else 0
    staged = tile * shape.lanes * max(size, 4 * indexed)
    return max(near + far + kept, staged), near + far, near // size


def _rounded(size: int) -> int:
    return -(-size // 16) * 16


def _state(op: str, dtype: torch.dtype, indexed: bool) -> int:
    """Bytes of what is kept of a range: numbers, and the place of an extreme, in as many bytes as those."""
    return accumulated(op, dtype).itemsize * (STATES[FAMILIES[op]] + indexed)


class _Launch:
    """The stages of one call."""

    def __init__(self, request: Request, x: torch.Tensor, rows: Rows, out: torch.Tensor,
                 index: torch.Tensor | None) -> None:
        self.request, self.x, self.rows, self.indexed = request, x, rows, index is not None
        self.tensors = address(x), address(out), address(index)
        self.plan = plan(request, rows, x.dtype, self.indexed, self.tensors[0] % 16 == 0)

    def run(self) -> None:
        memory = self.middles() if self.plan.gap else None  # goes back to torch, in the order of the stream
        self.launch(self.plan.kernel, self.rows.outer * self.plan.tiles * self.plan.groups, self.plan.values,
                    middles=address(memory))

    def launch(self, kernel: Kernel, blocks: int, values: Sequence[Any], chunks: int = 0, heads: int = 0,
               folded: int = 0, middles: int = 0, folds: Sequence[int] = ()) -> None:
        kernel(self.x.device, blocks, *self.tensors, chunks, heads, folded, middles, *folds,
               *[0] * (LEVELS - len(folds)), *values, shared=self.plan.shared)

    def stage(self, stage: int, blocks: int, changed: dict[str, int], **memory: Any) -> None:
        made = kernel(self.request.op, self.x.dtype, self.indexed, self.plan.shape, stage)
        self.launch(made, blocks, made.planned(**{**self.plan.numbers, **changed}), **memory)

    def middles(self) -> torch.Tensor:
        """What all windows of a tile have beyond it, before their ends."""
        made, outer_inner = self.plan, self.rows.outer * self.rows.inner
        span, head = divmod(made.gap, made.shape.tile)
        chunk_tiles = made.tiles + span + 1
        sizes, each = {"chunk_tiles": chunk_tiles}, _blocks(outer_inner * chunk_tiles, made.shape)
        levels, heads = [self.states(outer_inner * chunk_tiles)], self.states(outer_inner * chunk_tiles)
        self.stage(CHUNKS, self.rows.outer * chunk_tiles * made.groups,
                   {"tiles": chunk_tiles, "by_tiles": chunk_tiles, "head": head},
                   chunks=address(levels[0]), heads=address(heads))
        while RADIX ** len(levels) <= span:
            levels.append(self.states(outer_inner * chunk_tiles))
            self.stage(FOLDS, each, {**sizes, "span": RADIX ** (len(levels) - 2)},
                       chunks=address(levels[-2]), folded=address(levels[-1]))
        between = self.states(outer_inner * made.tiles)
        self.stage(MIDDLES, _blocks(outer_inner * made.tiles, made.shape),
                   {**sizes, "span": span, "levels": len(levels)}, heads=address(heads),
                   middles=address(between), folds=[address(level) for level in levels])
        return between

    def states(self, count: int) -> torch.Tensor:
        size = count * _state(self.request.op, self.x.dtype, self.indexed)
        return torch.empty(size, dtype=torch.uint8, device=self.x.device)


def _blocks(threads: int, shape: Shape) -> int:
    return -(-threads // shape.block)


def roll(request: Request, x: torch.Tensor, rows: Rows, out: torch.Tensor, index: torch.Tensor | None
         ) -> None:
    """Into `out`, and the places of extremes into `index`."""
    _Launch(request, x, rows, out, index).run()
