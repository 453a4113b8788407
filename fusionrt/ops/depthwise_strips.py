"""Depthwise convolutions without matrix units, kernels_src/depthwise.cu and depthwise_backward.cu: kernels,
how their work is cut into blocks, their launches.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from fusionrt.ops.depthwise_forms import (
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
    stride_fields,
    stride_values,
)
from fusionrt.runtime.device import MULTIPROCESSORS
from fusionrt.runtime.kernel import Kernel, Launch
from fusionrt.runtime.source import ITEMSIZE, definitions, members, pointer

BLOCK = 128
LANES = 32                  # threads side by side along the channels, at most
REGISTERS = 1 << 16         # of a multiprocessor
MOST_REGISTERS = 240        # by the estimate below: with all 255 the compiler would begin to spill
LOAD_CYCLES = 800
# A turn takes as long as the next one's loads, when all multiprocessors ask for theirs, or as its
# instructions, and a part of these beside. Fitted to measured cuts of 20 layers of 3 × 3 and 5 × 5: those
# that it chooses take 1.01 of the best ones' time, 1.1 at most.
TURN_CYCLES, BESIDE = 1000, 0.3


class Cut(NamedTuple):
    """How the work is shared: `lanes` of a slice of the channels; tasks are strips of columns, of a residue
    of columns, of chunks of rows, of a residue of rows, of images. `turns` of a task, if they are under way
    together; otherwise 0. `groups`: blocks of a slice, each with several tasks if there are more."""

    lanes: int
    slices: int
    columns: int
    strips: int
    chunk: int
    chunks: int
    tasks: int
    turns: int
    groups: int

    @property
    def blocks(self) -> int:
        return self.slices * self.groups


def lanes_of(channels: int, vec: int) -> Pair:
    """Lanes and slices: slices of about the same size."""
    vectors = -(-channels // vec)
    slices = -(-vectors // LANES)
    return -(-vectors // slices), slices


@functools.lru_cache(1024)
def cut(batch: int, channels: int, rows: Line, columns: Line, form: Form, widths: tuple[int, ...],
        sums: bool = False) -> Cut:
    """The cut that seems fastest. `sums`: of the weights' gradient, whose blocks stay for several tasks."""
    lanes, slices = lanes_of(channels, form.vec)
    slots, group = BLOCK // lanes, form.stride[1] if form.transposed else 1
    before = (form.kernel[0] - 1) // form.stride[0]

    def made(width: int, chunk: int, turns: int) -> Cut:
        strips, chunks = -(-columns.units * group // width), -(-rows.units // chunk)
        tasks = batch * strips * chunks * rows.step * columns.step
        return Cut(lanes, slices, width, strips, chunk, chunks, tasks, turns, -(-tasks // slots))

    found: list[tuple[float, Cut]] = []
    for width in widths:
        most = resident(registers(form, width, sums))
        shares = [max(1, n * MULTIPROCESSORS // slices) for n in range(1, most + 1)]
        for chunks in range(1, max(1, min(64, rows.units // max(1, before))) + 1):
            whole = made(width, -(-rows.units // chunks), 0)
            # Rows outside of the image take no time.
            turns = whole.chunk + (before if whole.chunks > 1 else before / 4)
            for groups in [min(n, whole.groups) for n in shares] if sums else [whole.groups]:
                plan = whole._replace(groups=groups)
                rounds = -(-whole.groups // groups)
                found.append((LOAD_CYCLES + rounds * turns * cycles(form, width, plan.blocks, sums), plan))
        for chunk in CHUNKS_TOGETHER if not sums else ():
            plan = made(width, chunk, chunk + before)
            if (registers_together(form, width, chunk) <= MOST_TOGETHER
                    and plan.blocks <= MULTIPROCESSORS * resident_together(form)):
                found.append((cycles_together(form, width, chunk, plan.blocks), plan))
    return min(found, key=lambda pair: pair[0])[1]


def window_of(form: Form, width: int) -> int:
    kw, sw = form.kernel[1], form.stride[1]
    return width // sw + kw // sw if form.transposed else (width - 1) * sw + kw


def instructions(form: Form, width: int, chunk: int, rows: int) -> int:
    """Estimate for as many rows of the source, and of the result (of TRANSPOSED: groups of them)."""
    (sh, sw), taps = form.stride, math.prod(form.kernel)
    products, results = (taps * width // sw, width * sh) if form.transposed else (taps * width, width)
    return form.vec * chunk * products + 5 * (rows * window_of(form, width) + chunk * results) + taps + 40


def by_way_of_memory(form: Form) -> int:
    """Cycles that the weights take for a block: a multiprocessor has one path to them."""
    taps = math.prod(form.kernel)
    return 4 * form.vec * taps if form.vec * taps > 20 else 0


def cycles(form: Form, width: int, blocks: int, sums: bool) -> float:
    """Estimate of what a turn of all blocks takes, where a multiprocessor has four schedulers for the
    instructions of those that share it."""
    one = max(instructions(form, width, 1, 1 if form.transposed else form.stride[0]), by_way_of_memory(form))
    most = resident(registers(form, width, sums))
    return float(sum(max(TURN_CYCLES, n * one) + BESIDE * n * one for n in rounds(blocks, most)))


def resident(registers: int) -> int:
    """Blocks that share a multiprocessor."""
    return max(1, REGISTERS // (BLOCK * -(-registers // 8) * 8))


def registers(form: Form, width: int, sums: bool) -> int:
    """Estimate of what a thread has: rows of sums (or sums of all taps, and rows of the gradient), a window,
    and what it reads for the next turn."""
    (kh, _), (sh, _), words = form.kernel, form.stride, -(-form.vec * ITEMSIZE[form.dtype] // 4)
    taps, window = math.prod(form.kernel), window_of(form, width)
    held = max(kh, sh) if form.transposed else (kh - 1) // sh + 1
    numbers = form.vec * (held * width + window)
    if sums:
        numbers += form.vec * taps
        rest = words * (sh * window + width) + 50
    else:
        weights = form.vec * taps if form.vec * taps <= 20 else 0  # otherwise in shared memory
        rows = 1 if form.transposed else sh
        rest = words * window * rows + weights + 40 + 15 * (rows > 1)
    return numbers * (2 if form.dtype == "float64" else 1) + rest


# -- all turns of a task together, by blocks that run all at once --------------------------------------

CHUNKS_TOGETHER = (1, 2)  # rows of the result
MOST_TOGETHER = 168       # registers: what the blocks have that are said to share a multiprocessor


def rows_together(form: Form, chunk: int) -> int:
    (kh, _), (sh, _) = form.kernel, form.stride
    return chunk + (kh - 1) // sh if form.transposed else (chunk - 1) * sh + kh


def registers_together(form: Form, width: int, chunk: int) -> int:
    window, size = window_of(form, width), ITEMSIZE[form.dtype]
    sums = chunk * width * (form.stride[0] if form.transposed else 1)
    return (-(-form.vec * size // 4) * rows_together(form, chunk) * window
            + form.vec * max(1, size // 4) * (sums + window) + 40)


def resident_together(form: Form) -> int:
    """Blocks that share a multiprocessor. More are not to be reckoned with: 288 of 7 x 7, with all of their
    loads at a time, took 13 us where the turns one by one take 7 to 8."""
    taps = math.prod(form.kernel)
    return 4 if taps <= 9 else 3 if taps <= 25 else 2


def cycles_together(form: Form, width: int, chunk: int, blocks: int) -> float:
    rows = rows_together(form, chunk)
    loads = 4 * -(-form.vec * ITEMSIZE[form.dtype] // 4) * rows * window_of(form, width)
    begin = 150 + 10 * -(-LANES * form.vec * math.prod(form.kernel) // BLOCK)  # where it is, sharing weights
    one = begin + max(instructions(form, width, chunk, rows), loads + by_way_of_memory(form))
    # A scheduler with one warp waits every other cycle, for what the warp has not found yet.
    return float(LOAD_CYCLES + max(2, -(-blocks // MULTIPROCESSORS)) * one)


# -- what a kernel is given ------------------------------------------------------------------------

def _constants(form: Form) -> list[str]:
    return [*constants(form), *definitions(COLUMNS=form.columns, LANES=LANES)]


_FIELDS = (*members("int", *SIZES, "source_step", "result_step", "lanes", "units", "chunk"),
           *members("unsigned", "tasks", "groups"),
           *members("Divisor", "slices", "strips", "residues_w", "chunks", "residues_h"))


def _values(images: Images, rows: Line, columns: Line, plan: Cut) -> dict[str, int]:
    """Of _FIELDS. A step is from a pixel to the next of the same residue."""
    return {**size_values(images, rows, columns), "source_step": columns.step * images.source.column,
            "result_step": columns.step * images.result.column, "lanes": plan.lanes, "units": rows.units,
            "chunk": plan.chunk, "tasks": plan.tasks, "groups": plan.groups, "slices": plan.slices,
            "strips": plan.strips, "residues_w": columns.step, "chunks": plan.chunks, "residues_h": rows.step}


# -- convolution, and the gradient of its input ------------------------------------------------------

@functools.cache
def convolution_kernel(form: Form, finish: Finish) -> Kernel:
    return Kernel("depthwise_conv2d", "depthwise", [*operands(finish), *_FIELDS],
                  [*_constants(form), *definitions(TURNS=form.turns), *epilogue(finish)],
                  block=BLOCK, **arithmetic(form.dtype))


def convolution(form: Form, images: Images, rows: Line, columns: Line, finish: Finish) -> Launch:
    form = form._replace(vec=_vector(form, images, 49))
    plan = cut(images.batch, images.channels, rows, columns, form, widths_of(form))
    kernel = convolution_kernel(form._replace(columns=plan.columns, turns=plan.turns), finish)
    values = kernel.planned(**stride_values(x=images.source, out=images.result),
                            **_values(images, rows, columns, plan))
    return Launch(kernel, plan.blocks, values)


def widths_of(form: Form) -> tuple[int, ...]:
    """Columns that a thread may have: as many as registers allow."""
    if form.transposed:
        return (4, 2) if form.dtype == "float64" else (8, 4, 2)
    return (4, 2, 1) if form.dtype == "float64" or form.stride[1] > 1 else (8, 7, 4, 2, 1)


def _vector(form: Form, images: Images, most: int) -> int:
    """Channels of a thread: two, with so many taps at most; more would want too many registers."""
    return 1 if form.dtype == "float64" or math.prod(form.kernel) > most else images.unit(2)


# -- the gradient of the weights ---------------------------------------------------------------------

@functools.cache
def grad_weight_kernel(form: Form) -> Kernel:
    fields = [pointer("scalar_t", "x"), pointer("scalar_t", "grad"),
              pointer("acc_t", "partials", const=False), *stride_fields("x", "grad"), *_FIELDS]
    return Kernel("depthwise_conv2d_backward", "depthwise_backward", fields, _constants(form), block=BLOCK,
                  **arithmetic(form.dtype))


def grad_weight(form: Form, images: Images, rows: Line, columns: Line) -> tuple[Launch, int]:
    """And how many rows of partial sums it writes."""
    form = form._replace(vec=_vector(form, images, 49 if ITEMSIZE[form.dtype] == 2 else 25))
    plan = cut(images.batch, images.channels, rows, columns, form, widths_of_gradient(form), True)
    kernel = grad_weight_kernel(form._replace(columns=plan.columns))
    values = kernel.planned(**stride_values(x=images.source, grad=images.result),
                            **_values(images, rows, columns, plan))
    return Launch(kernel, plan.blocks, values), plan.groups


def widths_of_gradient(form: Form) -> tuple[int, ...]:
    """Columns that a thread may have."""
    widths = (8, 7, 4) if form.stride == (1, 1) else (4,)
    return tuple(n for n in widths if registers(form, n, True) <= MOST_REGISTERS) or (2,)
