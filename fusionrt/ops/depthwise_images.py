"""Depthwise convolutions of small images, kernels_src/depthwise_images.cu, and the gradient of their weights,
depthwise_images_backward.cu: kernels, how their work is cut into blocks, their launches.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from fusionrt.ops.depthwise_forms import (
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
    stride_values,
)
from fusionrt.runtime.device import MULTIPROCESSORS
from fusionrt.runtime.kernel import Kernel, Launch
from fusionrt.runtime.source import ITEMSIZE, definitions, members, pointer

UNIT = 16                    # bytes that are copied at a time
MOST_COLUMNS, MOST_STRIDED_COLUMNS = 16, 28  # of either image: with more, other kernels are as fast
MOST_ROWS = 64               # of an image
MANY_TAPS, MOST_SIDE = 25, 7  # of a kernel, all of whose taps are written out
MOST_SHARED = 96 << 10       # bytes of a block, that any GPU since Ampere has
MOST_NUMBERS = 176           # of a thread
FEW_BLOCKS, FEW_BLOCKS_OF_SUMS = 2 * MULTIPROCESSORS, 64  # fewer leave a GPU idle
WASTE = 1.15                 # in channels that are none, of two channels a thread


class Cut(NamedTuple):
    """How the work is shared: blocks are slices of 32 `vec` channels, of `chunk` units of `rows` rows of
    results, of which there is memory for `together`; `warps` of a block share these."""

    vec: int
    rows: int
    warps: int
    together: int
    chunk: int

    def slices(self, channels: int) -> int:
        return -(-channels // (32 * self.vec))

    def units(self, rows: Line) -> int:
        """Of an image."""
        return -(-rows.result // self.rows)

    def groups(self, batch: int, rows: Line) -> int:
        """Blocks of a slice."""
        return -(-batch * self.units(rows) // self.chunk)

    def blocks(self, batch: int, channels: int, rows: Line) -> int:
        return self.slices(channels) * self.groups(batch, rows)


class Sides(NamedTuple):
    """What of the geometry a kernel is compiled for: columns of both images, the padding."""

    width: int
    columns: int
    top: int
    left: int


def sides_of(rows: Line, columns: Line, form: Form) -> Sides:
    return Sides(columns.source, columns.result, _padding(rows, form, 0), _padding(columns, form, 1))


def _padding(line: Line, form: Form, side: int) -> int:
    kernel, stride = form.kernel[side], form.stride[side]
    if not form.transposed:
        return -line.source_first
    return (line.source_first + (kernel - 1) // stride) * stride - line.result_first


def serves(form: Form, images: Images, rows: Line, columns: Line) -> bool:
    """Whether what is read is dense, of whole units of channels, few enough columns are to be written out,
    and a block has room for its rows."""
    unit, taps = UNIT // ITEMSIZE[images.dtype], math.prod(form.kernel)
    most = MOST_STRIDED_COLUMNS if form.stride != (1, 1) and taps >= MANY_TAPS else MOST_COLUMNS
    if not (images.dtype != "float64" and images.unit(unit) == unit and rows.step == columns.step == 1
            and max(form.kernel) <= MOST_SIDE and max(rows.source, rows.result) <= MOST_ROWS
            and images.batch * MOST_ROWS < 1 << 31 and max(columns.source, columns.result) <= most
            and _is_dense(images.source, images.batch, (rows.source, columns.source))
            and _is_dense(images.result, images.batch, (rows.result, columns.result))):
        return False
    case = images.batch, images.channels, rows, columns, form
    made = [(cut(*case), False), *([] if form.transposed else [(cut_of_sums(*case), True)])]
    return all(shared_bytes(form, rows, columns, *one) <= MOST_SHARED for one in made)


def most_elements(form: Form, rows: Line, sums: bool) -> float:
    """Of both images: up to so many no other kernels are faster, where these serve. `sums`: at the gradient
    of the weights."""
    taps, plain = math.prod(form.kernel), form.stride == (1, 1)
    if sums:
        return 6 << 20 if plain and taps == MOST_SIDE ** 2 and rows.result > 8 else math.inf
    return 20 << 20 if taps < MANY_TAPS and (plain or form.transposed) else math.inf


def _is_dense(strides: Strides, batch: int, size: Pair) -> bool:
    """Whether rows, and images, follow each other."""
    return ((size[0] == 1 or strides.row == size[1] * strides.column)
            and (batch == 1 or strides.batch == size[0] * size[1] * strides.column))


@functools.lru_cache(1024)
def cut(batch: int, channels: int, rows: Line, columns: Line, form: Form) -> Cut:
    """Of a convolution. The smaller blocks are, the more do copies and work of others overlap: of what was
    measured those of four warps, with a unit each, were the fastest in any case."""
    least = form.stride[0] if form.transposed else 1
    small = Cut(1, least, 4, 4, 4)
    shapes = [(2, least), (1, least)]
    if math.prod(form.kernel) > MANY_TAPS:  # weights in registers, which few rows would not be worth
        shapes = [(1, 2), (1, least)] if form.stride == (1, 1) and columns.source > 8 else [
            (2, 2), (1, 2), (1, least)]
    if 2 * Cut(2, *small[1:]).slices(channels) > WASTE * small.slices(channels):
        shapes = [(1, height) for _, height in shapes]
    found = [made for made in (Cut(vec, height, 4, 4, 4) for vec, height in shapes)
             if numbers(form, columns, made.rows, made.vec) <= MOST_NUMBERS
             and shared_bytes(form, rows, columns, made, False) <= MOST_SHARED]
    return found[0] if found and found[0].blocks(batch, channels, rows) >= FEW_BLOCKS else small


@functools.lru_cache(1024)
def cut_of_sums(batch: int, channels: int, rows: Line, columns: Line, form: Form) -> Cut:
    """Of the weights' gradient: enough blocks, and few rows of partial sums."""
    if form.stride[0] > 1:
        height, warps, stages = 4, 4, 1
    elif rows.result > 8:
        height, warps, stages = 2, 8, 2
    else:
        height, warps, stages = 7 if rows.result == 7 else 4, 8, 1
    small = Cut(1, 1, 4, 4, 4)
    made = next((made for made in (Cut(1, height, n, n, n * stages) for n in (warps, 4))
                 if shared_bytes(form, rows, columns, made, True) <= MOST_SHARED), small)
    count = made.blocks(batch, channels, rows)
    if count < FEW_BLOCKS_OF_SUMS:
        return small
    return made._replace(chunk=made.chunk * -(-count // (4 * MULTIPROCESSORS)))


def numbers(form: Form, columns: Line, height: int, vec: int) -> int:
    """Of a thread: weights, sums of rows of results (or the reverse), a row."""
    return vec * (math.prod(form.kernel) + height * columns.result + columns.source)


def lines(form: Form, rows: Line, made: Cut) -> Pair:
    """Rows of the source that a block has at most at a time, and of the result."""
    units, (kh, _), (stride, _) = made.units(rows), form.kernel, form.stride
    top = _padding(rows, form, 0)
    above = (kh - 1 - top) // stride if form.transposed else top
    depth = ((made.rows - 1 + top) // stride + above + 1 if form.transposed else
             (made.rows - 1) * stride + kh)

    def first(unit: int) -> int:
        row = unit % units * made.rows
        return (row // stride if form.transposed else row * stride) - above

    def of_source(begin: int, last: int) -> int:
        return (last // units * rows.source + min(rows.source, first(last) + depth)
                - begin // units * rows.source - max(0, first(begin)))

    def of_result(begin: int, last: int) -> int:
        end = min(rows.result, (last % units + 1) * made.rows)
        return last // units * rows.result + end - begin // units * rows.result - begin % units * made.rows

    begins = {k * math.gcd(made.together, made.chunk) % units for k in range(units)}
    return (max(of_source(k, k + made.together - 1) for k in begins),
            max(of_result(k, k + made.together - 1) for k in begins))


def shared_bytes(form: Form, rows: Line, columns: Line, made: Cut, sums: bool) -> int:
    source, result = lines(form, rows, made)
    beside = result * columns.result if sums else math.prod(form.kernel)
    images = (source * columns.source + beside) * 32 * made.vec * ITEMSIZE[form.dtype]
    return max(images, made.warps * math.prod(form.kernel) * (32 * made.vec + 1) * 4) if sums else images


def resident(form: Form, columns: Line, made: Cut) -> int:
    """Blocks that share a multiprocessor, by their registers."""
    registers = -(-(numbers(form, columns, made.rows, made.vec) + 32) // 8) * 8
    threads = made.warps * 32
    return max(1, min(1024 // threads, (1 << 16) // (threads * registers)))


# -- what a kernel is given ----------------------------------------------------------------------------

def _constants(form: Form, sides: Sides, made: Cut, blocks: int) -> list[str]:
    return [*constants(form._replace(vec=made.vec)), *definitions(
        WIDTH=sides.width, COLUMNS=sides.columns, TOP=sides.top, LEFT=sides.left, ROWS=made.rows,
        BLOCKS=blocks)]


_FIELDS = (*members("int", "channels", "source_rows", "result_rows", "chunk", "all"),
           *members("Divisor", "slices", "units"))


def _values(images: Images, rows: Line, made: Cut) -> dict[str, int]:
    """Of _FIELDS."""
    units = made.units(rows)
    return {"channels": images.channels, "source_rows": rows.source, "result_rows": rows.result,
            "chunk": made.chunk, "all": images.batch * units, "slices": made.slices(images.channels),
            "units": units}


# -- convolution, and the gradient of its input --------------------------------------------------------

@functools.cache
def convolution_kernel(form: Form, sides: Sides, made: Cut, blocks: int, finish: Finish) -> Kernel:
    return Kernel("depthwise_conv2d", "depthwise_images", [*operands(finish), *_FIELDS],
                  [*_constants(form, sides, made, blocks), *epilogue(finish)], block=made.warps * 32,
                  **arithmetic(form.dtype))


def convolution(form: Form, images: Images, rows: Line, columns: Line, finish: Finish, made: Cut | None = None
                ) -> Launch:
    made = made or cut(images.batch, images.channels, rows, columns, form)
    kernel = convolution_kernel(form, sides_of(rows, columns, form), made._replace(together=0, chunk=0),
                        resident(form, columns, made), finish)
    values = kernel.planned(**stride_values(x=images.source, out=images.result),
                            **_values(images, rows, made))
    return Launch(kernel, made.blocks(images.batch, images.channels, rows), values,
                  shared_bytes(form, rows, columns, made, False))


# -- the gradient of the weights -----------------------------------------------------------------------

@functools.cache
def grad_weight_kernel(form: Form, sides: Sides, made: Cut, blocks: int) -> Kernel:
    fields = [pointer("scalar_t", "x"), pointer("scalar_t", "grad"),
              pointer("acc_t", "partials", const=False), *_FIELDS,
              *members("int", "x_column", "grad_column", "together", "most_lines")]
    return Kernel("depthwise_conv2d_backward", "depthwise_images_backward", fields,
                  _constants(form, sides, made, blocks), block=made.warps * 32, **arithmetic(form.dtype))


def grad_weight(form: Form, images: Images, rows: Line, columns: Line, made: Cut | None = None
                ) -> tuple[Launch, int]:
    """And how many rows of partial sums it writes."""
    made = made or cut_of_sums(images.batch, images.channels, rows, columns, form)
    kernel = grad_weight_kernel(form, sides_of(rows, columns, form), made._replace(together=0, chunk=0),
                      resident(form, columns, made))
    values = kernel.planned(**_values(images, rows, made), x_column=images.source.column,
                            grad_column=images.result.column, together=made.together,
                            most_lines=lines(form, rows, made)[0])
    launch = Launch(kernel, made.blocks(images.batch, images.channels, rows), values,
                    shared_bytes(form, rows, columns, made, True))
    return launch, made.groups(images.batch, rows)
