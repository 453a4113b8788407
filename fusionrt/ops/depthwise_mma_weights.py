"""The gradient of depthwise convolutions' weights on matrix units, kernels_src/depthwise_mma_backward.cu."""

from __future__ import annotations

import functools

from fusionrt.ops.depthwise_forms import (
    SIZES,
    Form,
    Images,
    Line,
    arithmetic,
    constants,
    rounds,
    size_values,
    stride_fields,
    stride_values,
    window,
)
from fusionrt.ops.depthwise_mma import (
    CUT_FIELDS,
    MOST_SHARED,
    RESULTS,
    STRIPS,
    UNIT,
    Cut,
    cut_values,
    cuts,
    has_units,
)
from fusionrt.runtime.kernel import Kernel, Launch
from fusionrt.runtime.source import definitions, members, pointer

UNITS = 2                   # of a pixel that a block has
BLOCKS = 4                  # that share a multiprocessor
# As in depthwise_mma, fitted to measured cuts of 24 layers.
LATENCY, START, BYTES_A_CYCLE, INSTRUCTIONS = 1900, 4, 8, 220
MOST_COUNTED = 8            # rows of the gradient that a product has room for
BEHIND = 24                 # pixels that are read behind those of a row
WARP_SUMS = 8 * 128 + 4     # numbers


def rows(form: Form) -> int:
    """Of x in a turn."""
    return 4 if form.kernel[1] <= 4 and counted(form, 4) <= MOST_COUNTED else 2


def stages(form: Form) -> int:
    """Turns in the ring of x."""
    return 3 if rows(form) == 2 else 2


def counted(form: Form, rows: int) -> int:
    """Rows of the gradient that rows of x meet."""
    return (form.kernel[0] - 1 + rows) // form.stride[0]


def serves(form: Form, images: Images) -> bool:
    return has_units(images) and form.kernel[1] <= 8 and counted(form, rows(form)) <= MOST_COUNTED


@functools.lru_cache(1024)
def cut(batch: int, channels: int, rows: Line, columns: Line, form: Form) -> Cut:
    """The one that seems fastest."""
    before, most = (form.kernel[0] - 1) // form.stride[0], window(form, RESULTS)
    slices = -(-channels // (UNITS * 8))
    found = cuts(batch * rows.step, slices, rows.units, before, columns, form, most)
    return min((made for made in found if shared_bytes(made, form) <= MOST_SHARED),
               key=lambda made: _cycles(made, form))


def _cycles(made: Cut, form: Form) -> float:
    new = rows(form) // form.stride[0]
    moved = (rows(form) * made.pixels + new * STRIPS * made.columns) * UNITS * UNIT / BYTES_A_CYCLE
    turn = max(moved, (INSTRUCTIONS + 20 * rows(form)) * UNITS)
    turns = -(-((made.chunk - 1) * form.stride[0] + form.kernel[0]) // rows(form)) + START
    return turns * sum(max(LATENCY, n * turn) for n in rounds(made.blocks, BLOCKS))


@functools.cache
def grad_weight_kernel(form: Form) -> Kernel:
    fields = [pointer("scalar_t", "x"), pointer("scalar_t", "grad"),
              pointer("acc_t", "partials", const=False),
              *stride_fields("x", "grad", step=True),
              *members("int", *SIZES, "units", "row_bytes", "shared_bytes"), *CUT_FIELDS]
    return Kernel("depthwise_conv2d_backward", "depthwise_mma_backward", fields, [
        *constants(form), *definitions(ROWS=rows(form), SHIFTS=16 // rows(form), STAGES=stages(form),
                                       GRADS=grads(form), BLOCKS=BLOCKS)],
        block=STRIPS * RESULTS * UNITS, **arithmetic(form.dtype))


def row_bytes(made: Cut) -> int:
    return (made.pixels + BEHIND) * UNITS * UNIT


def shared_bytes(made: Cut, form: Form) -> int:
    ring = stages(form) * rows(form) * row_bytes(made) + grads(form) * (STRIPS * RESULTS + 1) * UNITS * UNIT
    return max(ring, 2 * UNITS * WARP_SUMS * 4)


def grads(form: Form) -> int:
    """Rows in the ring: those that count and those on their way, a multiple of a turn's."""
    new = rows(form) // form.stride[0]
    return new * (stages(form) - 1) + -(-counted(form, rows(form)) // new) * new


def grad_weight(form: Form, images: Images, lines: Line, columns: Line) -> tuple[Launch, int]:
    """And how many rows of partial sums it writes."""
    form = form._replace(vec=8)
    made = cut(images.batch, images.channels, lines, columns, form)
    kernel, shared = grad_weight_kernel(form), shared_bytes(made, form)
    values = kernel.planned(
        **stride_values(lines, x=images.source, grad=images.result), **size_values(images, lines, columns),
        **cut_values(made, lines, columns), units=lines.units, row_bytes=row_bytes(made), shared_bytes=shared)
    return Launch(kernel, made.blocks, values, shared), made.blocks // made.slices
