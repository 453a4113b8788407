"""Depthwise convolutions of 16-bit images on matrix units, kernels_src/depthwise_mma.cu."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from fusionrt.ops.depthwise_forms import (
    PLAIN,
    SIZES,
    Finish,
    Form,
    Images,
    Line,
    Pair,
    arithmetic,
    constants,
    epilogue,
    operands,
    rounds,
    size_values,
    stride_values,
    window,
)
from fusionrt.runtime.kernel import Kernel, Launch
from fusionrt.runtime.source import definitions, members

STRIPS, RESULTS = 8, 8              # of a product: strips, and results of each that there is room for
ROWS = 2                            # of results that a turn finishes, where the stride is 1
VEC, UNIT = 4, 16                   # channels of a warp; bytes that are copied at a time
STAGES = 4                          # turns in the ring
MOST_PIXELS = 128                   # of a row of a block's: its threads fetch two units each
MOST_SHARED = 99 << 10              # bytes of a block, that any GPU has
MOST_ROWS, MOST_COLUMNS = 8, 9      # of a kernel's taps, by registers and by the depth of a product
BYTES_A_CYCLE = 16                  # of memory, a multiprocessor's share
LATENCY, START = 700, 2             # cycles of a turn when nothing else runs; turns that beginning takes
UNITS = 2                           # of a pixel that a block has


class Cut(NamedTuple):
    """How the work is shared: blocks are slices of the channels, of tiles of 2^`strips` strips of `columns`
    results, of residues of columns, of groups of lines, which are chunks of rows, of residues of rows, of
    images. `pitch` pixels of the source are between strips, `band` in a tile."""

    columns: int
    strips: int
    slices: int
    tiles: int
    residues: int
    chunk: int
    chunks: int
    lines: int
    pitch: int
    band: int

    @property
    def blocks(self) -> int:
        return self.slices * self.tiles * self.residues * -(-self.lines // self.bands)

    @property
    def bands(self) -> int:
        return STRIPS >> self.strips

    @property
    def pixels(self) -> int:
        return self.bands * self.band


def serves(form: Form, images: Images) -> bool:
    kh, kw = form.kernel
    return has_units(images) and kh <= MOST_ROWS and kw <= MOST_COLUMNS


def has_units(images: Images) -> bool:
    """Whether images are of numbers that matrix units take, in units of 16 bytes."""
    return images.dtype in ("float16", "bfloat16") and images.unit(8) == 8


def depth(form: Form) -> int:
    return 8 if form.transposed and window(form, RESULTS) <= 8 else 16


def rows_of_turn(form: Form) -> Pair:
    """Of the source that a turn takes, of the result that it finishes."""
    stride = form.stride[0]
    if form.transposed:
        return 1, stride
    return (ROWS, ROWS) if stride == 1 else (stride, 1)


def turns(form: Form, rows: Line) -> int:
    """Turns that finish rows."""
    return rows.units if form.transposed else -(-rows.units // rows_of_turn(form)[1])


def before(form: Form) -> int:
    """Turns until the first row is finished."""
    return -(-((form.kernel[0] - 1) // form.stride[0]) // (1 if form.transposed else rows_of_turn(form)[1]))


@functools.lru_cache(1024)
def cut(batch: int, channels: int, rows: Line, columns: Line, form: Form, finish: Finish = PLAIN) -> Cut:
    """The one that seems fastest."""
    slices = -(-channels // (UNITS * 8))
    found = cuts(batch * rows.step, slices, turns(form, rows), before(form), columns, form, depth(form))
    return min((made for made in found if shared_bytes(made, form) <= MOST_SHARED),
               key=lambda made: _cycles(made, rows, form, blocks(form, finish)))


def cuts(images: int, slices: int, units: int, before: int, columns: Line, form: Form, most: int
         ) -> Iterator[Cut]:
    """All that there are of images with so many units of rows, with windows of `most` pixels."""
    stride = form.stride[1]
    results = columns.units * (stride if form.transposed else 1)
    for width in range(1, RESULTS + 1):
        if window(form, width) > most or (form.transposed and width % stride):
            continue
        pitch = width // stride if form.transposed else width * stride
        for strips in range(4):
            band = ((1 << strips) - 1) * pitch + window(form, width)
            if band << (3 - strips) > MOST_PIXELS:
                continue
            for pieces in range(1, max(1, min(64, units // max(1, before))) + 1):
                chunk = -(-units // pieces)
                chunks = -(-units // chunk)
                yield Cut(width, strips, slices, -(-results // (width << strips)), columns.step, chunk,
                          chunks, images * chunks, pitch, band)


def skipped(made: Cut, rows: Line, form: Form) -> int:
    """Turns before there is a row of the source."""
    return max(0, -rows.source_first) // (rows_of_turn(form)[0] * rows.step) if made.chunks == 1 else 0


def _cycles(made: Cut, rows: Line, form: Form, together: int) -> float:
    """Estimate of what all blocks take, so many of them `together` on a multiprocessor: memory traffic, or
    instructions, of which a scheduler issues one in two cycles."""
    rows_in, rows_out = rows_of_turn(form)
    moved = (rows_in * made.pixels + rows_out * STRIPS * made.columns) * UNITS * UNIT / BYTES_A_CYCLE
    instructions = 90 + 25 * rows_in + 20 * rows_out + rows_in * pairs(form) * VEC
    turn = max(moved, instructions * UNITS)  # a unit is two warps
    each = made.chunk + before(form) - skipped(made, rows, form) + START
    return each * sum(max(LATENCY, n * turn) for n in rounds(made.blocks, together))


def pairs(form: Form) -> int:
    """Of rows of results that a warp holds."""
    kh, stride = form.kernel[0], form.stride[0]
    return -(-(max(kh, stride) if form.transposed else (before(form) + 1) * rows_of_turn(form)[1]) // 2)


def blocks(form: Form, finish: Finish = PLAIN) -> int:
    """That share a multiprocessor, by their registers: sums, products of taps, a residual and its place."""
    products = pairs(form) if form.transposed else rows_of_turn(form)[0] + form.stride[0] * (pairs(form) - 1)
    numbers = VEC * (4 * pairs(form) + products * depth(form) // 4)
    return max(2, (4 if numbers <= 64 else 3 if numbers <= 112 else 2) - finish.residual)


@functools.cache
def convolution_kernel(form: Form, finish: Finish) -> Kernel:
    fields = [*operands(finish, step=True), *members("int", *SIZES, "units", "skipped", "row_bytes"),
              *CUT_FIELDS]
    return Kernel("depthwise_conv2d", "depthwise_mma", fields, [
        *constants(form), *epilogue(finish),
        *definitions(ROWS=1 if form.transposed else rows_of_turn(form)[1], DEPTH=depth(form), STAGES=STAGES,
                     BLOCKS=blocks(form, finish))],
        block=STRIPS * RESULTS * UNITS, **arithmetic(form.dtype))


def convolution(form: Form, images: Images, rows: Line, columns: Line, finish: Finish) -> Launch:
    form = form._replace(vec=VEC)
    made = cut(images.batch, images.channels, rows, columns, form, finish)
    kernel = convolution_kernel(form, finish)
    values = kernel.planned(
        **stride_values(rows, x=images.source, out=images.result), **size_values(images, rows, columns),
        **cut_values(made, rows, columns), units=turns(form, rows), skipped=skipped(made, rows, form),
        row_bytes=row_bytes(made, form))
    return Launch(kernel, made.blocks, values, shared_bytes(made, form))


CUT_FIELDS = (*members("int", "chunk", "columns", "strips", "pitch", "pixels"), *members("unsigned", "lines"),
              *members("Divisor", "slices", "tiles", "residues_w", "chunks", "residues_h", "band"))


def cut_values(made: Cut, rows: Line, columns: Line) -> dict[str, int]:
    """Of CUT_FIELDS."""
    return {"chunk": made.chunk, "columns": made.columns, "strips": made.strips, "pitch": made.pitch,
            "pixels": made.pixels, "lines": made.lines, "slices": made.slices, "tiles": made.tiles,
            "residues_w": columns.step, "chunks": made.chunks, "residues_h": rows.step, "band": made.band}


def row_bytes(made: Cut, form: Form) -> int:
    return (made.pixels + depth(form)) * UNITS * UNIT


def shared_bytes(made: Cut, form: Form) -> int:
    rows_in, rows_out = rows_of_turn(form)
    return (2 * rows_out * STRIPS * RESULTS * UNITS * UNIT
            + STAGES * rows_in * row_bytes(made, form))
