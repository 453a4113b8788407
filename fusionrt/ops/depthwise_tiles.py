"""Depthwise convolutions whose rows come by way of shared memory, kernels_src/depthwise_tiles.cu, and their
gradients, depthwise_tiles_backward.cu and depthwise_tiles_gradients.cu (both at a time): kernels, how their
work is cut into blocks, their launches.
"""

from __future__ import annotations

import enum
import functools
import math
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
    Strides,
    arithmetic,
    constants,
    epilogue,
    operands,
    rounds,
    size_values,
    stride_fields,
    stride_values,
    window,
)
from fusionrt.runtime.kernel import Kernel, Launch
from fusionrt.runtime.source import ITEMSIZE, definitions, members, pointer

VEC, UNIT = 2, 16           # channels of a thread; bytes that are copied at a time
WIDTHS = 8, 7, 4            # columns of a thread
MOST_PIXEL = 256            # bytes of a pixel, which so many threads side by side have
MOST_THREADS = 192          # of a block
MOST_SIDE = 5               # of a kernel
MOST_SHARED = 84 << 10      # bytes of a block's ring: any GPU since Ampere has 99 KB, and 13 are for weights
REGISTERS, SHARED = 1 << 16, 227 << 10  # of a large GPU's multiprocessor
# Instructions that a multiprocessor issues in a cycle and bytes that it moves, cycles of a turn when nothing
# else runs, turns that beginning takes, instructions of a step beside those that are counted: fitted to 3500
# measured cuts of 84 layers, those chosen take 1.05 of the best ones' time, at worst 1.38.
RATE, BYTES_A_CYCLE, LATENCY, START, BESIDE = 4.3, 31, 1500, 7, 22


class Wanted(enum.Enum):
    """What a kernel finds: a convolution's result (the output, or the gradient of the input), the gradient of
    the weight, or both gradients."""

    RESULT, GRAD_WEIGHT, BOTH = range(3)


class Cut(NamedTuple):
    """How the work is shared: blocks are slices of `lanes` threads of the channels, of tiles of `beside`
    strips of `columns` results, of residues of columns, of `bands` of lines, which are chunks of rows, of
    residues of rows, of images."""

    lanes: int
    columns: int
    beside: int
    bands: int
    slices: int
    tiles: int
    residues: int
    chunk: int
    chunks: int
    lines: int

    @property
    def blocks(self) -> int:
        return self.slices * self.groups

    @property
    def groups(self) -> int:
        return self.tiles * self.residues * -(-self.lines // self.bands)

    @property
    def threads(self) -> int:
        return self.lanes * self.beside * self.bands

    def pitch(self, form: Form) -> int:
        """Pixels of the source between strips."""
        stride = form.stride[1]
        return self.columns // stride if form.transposed else self.columns * stride

    def band(self, form: Form) -> int:
        """Pixels of the source in a band."""
        return (self.beside - 1) * self.pitch(form) + window(form, self.columns)


def serves(form: Form, images: Images) -> bool:
    """Whether pixels are of whole units."""
    unit = UNIT // ITEMSIZE[images.dtype]
    return images.dtype != "float64" and images.unit(unit) == unit and max(form.kernel) <= MOST_SIDE


def rows_of_step(form: Form) -> Pair:
    """Of the source that a step takes, of the result that it finishes."""
    return (1, form.stride[0]) if form.transposed else (form.stride[0], 1)


def before(form: Form) -> int:
    """Steps until the first row is finished."""
    return (form.kernel[0] - 1) // form.stride[0]


def steps(form: Form, wanted: Wanted) -> int:
    """Of a turn. Where rows stay as they were read, as many as these, if few: their places are known then."""
    if wanted is not Wanted.RESULT:
        return before(form) + 1 if before(form) in (1, 2) else 2
    return 1 if form.stride[0] == 2 and not form.transposed else 2


def stages(form: Form, wanted: Wanted) -> int:
    """Turns in the ring."""
    return 4 if wanted is Wanted.RESULT and steps(form, wanted) > 1 else 3


@functools.lru_cache(1024)
def cut(batch: int, channels: int, rows: Line, columns: Line, form: Form, wanted: Wanted = Wanted.RESULT
        ) -> Cut:
    """The one that seems fastest."""
    lanes, slices = lanes_of(channels, form)
    slots = 1 << (MOST_THREADS // lanes).bit_length() - 1
    found: list[Cut] = []
    while not found:  # rows of many strips may want too much, one has room in any case
        found = [made for made in cuts(lanes, slices, slots, batch, rows, columns, form)
                 if shared_bytes(made, form, wanted) <= MOST_SHARED]
        slots //= 2
    return min(found, key=lambda made: _cycles(made, form, wanted))


def cuts(lanes: int, slices: int, slots: int, batch: int, rows: Line, columns: Line, form: Form
         ) -> Iterator[Cut]:
    """All those with so many strips in a block."""
    stride = form.stride[1] if form.transposed else 1
    strips_of = {width: -(-columns.units * stride // width) for width in WIDTHS if width % stride == 0}
    for width, strips in strips_of.items():
        for beside in (1 << n for n in range(slots.bit_length())):
            for chunks in range(1, max(1, min(64, rows.units // (before(form) + 4))) + 1):
                chunk = -(-rows.units // chunks)
                chunks = -(-rows.units // chunk)
                yield Cut(lanes, width, beside, slots // beside, slices, -(-strips // beside), columns.step,
                          chunk, chunks, batch * rows.step * chunks)


def lanes_of(channels: int, form: Form) -> Pair:
    """Lanes and slices: slices of about the same size, of whole lines of memory where that costs little."""
    each = form.vec * ITEMSIZE[form.dtype]
    vectors, unit = -(-channels // form.vec), UNIT // each

    def waste(lanes: int) -> tuple[float, int]:
        slices = -(-vectors // lanes)
        split = slices > 1 and lanes * each % 128 > 0
        return slices * lanes / vectors + 0.1 * split, abs(lanes - 32)

    lanes = min(range(unit, MOST_PIXEL // each + 1, unit), key=waste)
    return lanes, -(-vectors // lanes)


def _cycles(made: Cut, form: Form, wanted: Wanted) -> float:
    """Estimate of what all blocks take."""
    rows_in, rows_out = rows_of_step(form)
    taps, stride = math.prod(form.kernel), form.stride[1] if form.transposed else 1
    other = {Wanted.RESULT: rows_out, Wanted.GRAD_WEIGHT: 1, Wanted.BOTH: 2}[wanted]  # rows of other images
    products = taps * made.columns // stride * form.vec * (2 if wanted is Wanted.BOTH else 1)
    from_memory = 0 if wanted is Wanted.GRAD_WEIGHT or few(taps) else taps
    instructions = (products + rows_in * window(form, made.columns) + other * made.columns + from_memory
                    + BESIDE)
    moved = rows_in * row_bytes(made, form) + other * result_bytes(made, form)
    issued = steps(form, wanted) * made.threads / 32 * instructions / RATE
    moves = steps(form, wanted) * moved / BYTES_A_CYCLE
    registers = -(-estimated_registers(made, form, wanted) // 8) * 8
    together = max(1, min(SHARED // (shared_bytes(made, form, wanted) + (4 << 10)),
                          REGISTERS // (made.threads * registers), 2048 // made.threads))
    turns = -(-(made.chunk + before(form)) // steps(form, wanted)) + START
    return turns * sum(math.hypot(LATENCY, n * issued, n * moves) for n in rounds(made.blocks, together))


def few(taps: int) -> bool:
    """Whether a thread has room for its weights."""
    return taps <= 10


def estimated_registers(made: Cut, form: Form, wanted: Wanted) -> int:
    """Of a thread: rows held and a window; sums of all taps, or weights where these are few."""
    taps, both = math.prod(form.kernel), wanted is Wanted.BOTH
    held = max(form.kernel[0], form.stride[0]) if form.transposed else before(form) + 1
    of_taps = taps * ((wanted is not Wanted.RESULT) + (wanted is not Wanted.GRAD_WEIGHT and few(taps)))
    return form.vec * ((1 + both) * held * made.columns + window(form, made.columns) + of_taps) + 30


def row_bytes(made: Cut, form: Form) -> int:
    return made.bands * made.band(form) * _pixel(made, form)


def result_bytes(made: Cut, form: Form) -> int:
    """Of a row of the result, or of its gradient."""
    return made.bands * made.beside * made.columns * _pixel(made, form)


def _pixel(made: Cut, form: Form) -> int:
    return made.lanes * form.vec * ITEMSIZE[form.dtype]


def shared_bytes(made: Cut, form: Form, wanted: Wanted) -> int:
    step = rows_of_step(form)[0] * row_bytes(made, form)
    if wanted is not Wanted.RESULT:
        step += result_bytes(made, form)
    return stages(form, wanted) * steps(form, wanted) * step


# -- what a kernel is given ----------------------------------------------------------------------------

_FIELDS = (*members("int", *SIZES, "result_step", "units", "chunk", "bands", "pitch", "pixels"),
           *members("unsigned", "lines"), *members(
               "Divisor", "slices", "tiles", "residues_w", "chunks", "residues_h", "band", "beside"))


def _values(images: Images, rows: Line, columns: Line, made: Cut, form: Form) -> dict[str, int]:
    """Of _FIELDS."""
    band = made.band(form)
    return {**size_values(images, rows, columns), "result_step": columns.step * images.result.column,
            "units": rows.units, "chunk": made.chunk, "bands": made.bands, "pitch": made.pitch(form),
            "pixels": made.bands * band, "lines": made.lines, "slices": made.slices, "tiles": made.tiles,
            "residues_w": columns.step, "chunks": made.chunks, "residues_h": rows.step, "band": band,
            "beside": made.beside}


class Shape(NamedTuple):
    """What of a cut a kernel is compiled for."""

    lanes: int
    columns: int
    threads: int
    loads: int        # units of a row that a thread copies
    other_loads: int  # of the image that is read beside


def shape_of(made: Cut, form: Form, wanted: Wanted) -> Shape:
    def loads(row_bytes: int) -> int:
        return -(-row_bytes // UNIT // made.threads)

    other = 0 if wanted is Wanted.RESULT else loads(result_bytes(made, form))
    return Shape(made.lanes, made.columns, made.threads, loads(row_bytes(made, form)), other)


def _constants(form: Form, shape: Shape, wanted: Wanted) -> list[str]:
    return [*constants(form), *definitions(
        COLUMNS=shape.columns, LANES=shape.lanes, STEPS=steps(form, wanted), STAGES=stages(form, wanted),
        LOADS=shape.loads, OTHER_LOADS=shape.other_loads)]


# -- convolution, and the gradient of its input --------------------------------------------------------

def convolution(form: Form, images: Images, rows: Line, columns: Line, finish: Finish) -> Launch:
    form = form._replace(vec=VEC)
    made = cut(images.batch, images.channels, rows, columns, form)
    kernel = convolution_kernel(form, shape_of(made, form, Wanted.RESULT), finish)
    values = kernel.planned(**stride_values(rows, x=images.source, out=images.result),
                            **_values(images, rows, columns, made, form))
    return Launch(kernel, made.blocks, values, shared_bytes(made, form, Wanted.RESULT))


@functools.cache
def convolution_kernel(form: Form, shape: Shape, finish: Finish) -> Kernel:
    return Kernel("depthwise_conv2d", "depthwise_tiles", [*operands(finish, step=True), *_FIELDS],
                  [*_constants(form, shape, Wanted.RESULT), *epilogue(finish)], block=shape.threads,
                  **arithmetic(form.dtype))


# -- gradients -----------------------------------------------------------------------------------------

_OTHER = *members("int", "other_pixels"), *members("Divisor", "other_band")


def _other_values(made: Cut) -> dict[str, int]:
    """Of _OTHER."""
    band = made.beside * made.columns
    return {"other_pixels": made.bands * band, "other_band": band}


def grad_weight(form: Form, images: Images, rows: Line, columns: Line) -> tuple[Launch, int]:
    """The gradient of the weights. And how many rows of partial sums it writes."""
    form = form._replace(vec=VEC)
    made = cut(images.batch, images.channels, rows, columns, form, Wanted.GRAD_WEIGHT)
    kernel = grad_weight_kernel(form, shape_of(made, form, Wanted.GRAD_WEIGHT))
    values = kernel.planned(**stride_values(rows, x=images.source, grad=images.result),
                            **_values(images, rows, columns, made, form), **_other_values(made))
    return Launch(kernel, made.blocks, values, shared_bytes(made, form, Wanted.GRAD_WEIGHT)), made.groups


@functools.cache
def grad_weight_kernel(form: Form, shape: Shape) -> Kernel:
    fields = [pointer("scalar_t", "x"), pointer("scalar_t", "grad"),
              pointer("acc_t", "partials", const=False),
              *stride_fields("x", "grad", step=True), *_FIELDS, *_OTHER]
    return Kernel("depthwise_conv2d_backward", "depthwise_tiles_backward", fields,
                  _constants(form, shape, Wanted.GRAD_WEIGHT), block=shape.threads, **arithmetic(form.dtype))


def serves_both(form: Form, images: Images) -> bool:
    """Without a stride, where the few rows that are held have places that the kernel knows."""
    return (serves(form, images) and form.stride == (1, 1) and before(form) in (1, 2)
            and few(math.prod(form.kernel)))


def backward(form: Form, images: Images, rows: Line, columns: Line, x: Strides
              ) -> tuple[Launch, int]:
    """Both, of a convolution whose grad_output and grad_input are `images`, with x of such strides.
    And how many rows of partial sums the launch writes."""
    form = form._replace(vec=VEC)
    made = cut(images.batch, images.channels, rows, columns, form, Wanted.BOTH)
    kernel = backward_kernel(form, shape_of(made, form, Wanted.BOTH))
    values = kernel.planned(**stride_values(rows, x=x, grad=images.source, out=images.result),
                            **_values(images, rows, columns, made, form), **_other_values(made))
    return Launch(kernel, made.blocks, values, shared_bytes(made, form, Wanted.BOTH)), made.groups


@functools.cache
def backward_kernel(form: Form, shape: Shape) -> Kernel:
    fields = [*(pointer("scalar_t", name) for name in ("grad", "weight", "x", "residual")),
              pointer("scalar_t", "out", const=False), pointer("acc_t", "partials", const=False),
              *stride_fields("x", "grad", "out", step=True), *_FIELDS, *_OTHER]
    return Kernel("depthwise_conv2d_backward", "depthwise_tiles_gradients", fields,
                  [*_constants(form, shape, Wanted.BOTH), *epilogue(PLAIN)], block=shape.threads,
                  **arithmetic(form.dtype))
