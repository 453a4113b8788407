"""Depthwise convolutions on matrix units: the arithmetic of blocks, strips and turns, the kernels."""

import itertools

import numpy as np
import pytest
import torch
from checking import BF16, F16, F32, check_in_norm, needs_nvrtc
from depthwise_walk import (
    GEOMETRIES,
    LONG,
    check_epilogues,
    check_gradients,
    check_infinities_and_nan,
    check_large_images,
    digits,
    images,
    pixels,
    planned_anew,
)

import fusionrt as frt
from fusionrt.expr import normcdf
from fusionrt.ops import depthwise_kernels as kernels
from fusionrt.ops import depthwise_mma as mma
from fusionrt.ops import depthwise_mma_weights as weights
from fusionrt.ops.depthwise_forms import PLAIN, VALUE, Finish, Form, Geometry, channel, line_of
from fusionrt.runtime import compiler

STRIPS = 8


class Blocks:
    """One kind of convolution, cut as the kernels' host code cuts it."""

    def __init__(self, source, result, kernel, geometry, transposed, cut):
        self.form = Form("float16", kernel, geometry.stride, 4, 0, transposed)
        self.rows, self.columns = (line_of(n, m, k, s, p, d, transposed) for n, m, k, s, p, d in zip(
            source.shape[1:3], result, kernel, *geometry, strict=True))
        self.cut = cut(len(source), source.shape[3], self.rows, self.columns, self.form)

    def strips(self):
        """image, first columns of source and result, chunk of rows, residue of rows"""
        made, step = self.cut, self.columns.step
        for block in range(made.blocks):
            _, tile, right, group = digits(block, made.slices, made.tiles, made.residues)
            for strip in range(STRIPS):
                lines = group * made.bands + (strip >> made.strips)
                beside = (tile << made.strips) + strip % (1 << made.strips)
                if lines < made.lines:
                    chunk, down, image = digits(lines, made.chunks, self.rows.step)
                    source = beside * made.pitch * step + self.columns.source_first + right
                    result = beside * made.columns * step + self.columns.result_first + right
                    yield image, source, result, chunk * made.chunk, down


def convolved(source, taps, result, geometry, transposed):
    """depthwise_mma.cu"""
    (kh, kw), (sh, sw) = taps.shape[:2], geometry.stride
    blocks = Blocks(source, result, (kh, kw), geometry, transposed, mma.cut)
    made, rows, columns = blocks.cut, blocks.rows, blocks.columns
    (rows_in, rows_out), before = mma.rows_of_turn(blocks.form), mma.before(blocks.form)
    left, depth = (kw - 1) // sw if transposed else 0, mma.depth(blocks.form)
    n_held = max(kh, sh) if transposed else (before + 1) * rows_out
    assert mma.pairs(blocks.form) == -(-n_held // 2)
    out = np.full((len(source), *result, source.shape[3]), np.nan)
    for image, first, result_first, unit, down in blocks.strips():
        held = np.zeros((n_held, made.columns, source.shape[3]))
        first_turn, last = mma.skipped(made, rows, blocks.form), mma.turns(blocks.form, rows) - unit
        for turn in range(first_turn, min(made.chunk, last) + before):
            held = np.concatenate((held[rows_out:], np.zeros((rows_out, *held.shape[1:]))))
            for s in range(rows_in):
                row = ((unit + turn) * rows_in + s) * rows.step + rows.source_first + down
                x = pixels(source[image], row, [first + k * columns.step for k in range(depth)])
                for h, q, k in itertools.product(range(n_held), range(made.columns), range(depth)):
                    i = h if transposed else s + sh * (before * rows_out - h)
                    j = q + (left - k) * sw if transposed else k - q * sw
                    if 0 <= i < kh and 0 <= j < kw:
                        held[h, q] += x[k] * taps[i, j]
            for r, q in itertools.product(range(rows_out if turn >= before else 0), range(made.columns)):
                row = ((unit + turn - before) * rows_out + r) * rows.step + rows.result_first + down
                column = result_first + q * columns.step
                if 0 <= row < result[0] and 0 <= column < result[1]:
                    assert np.isnan(out[image, row, column]).all(), "written once"
                    out[image, row, column] = held[r, q]
    return out


def weighed(source, grad, kernel, geometry):
    """depthwise_mma_backward.cu"""
    (kh, kw), (sh, sw) = kernel, geometry.stride
    blocks = Blocks(source, grad.shape[1:3], kernel, geometry, False, weights.cut)
    made, rows, columns, sums = blocks.cut, blocks.rows, blocks.columns, np.zeros((kh, kw, source.shape[3]))
    taken, counted = weights.rows(blocks.form), weights.counted(blocks.form, weights.rows(blocks.form))
    for image, first, grad_first, unit, down in blocks.strips():
        count = min(made.chunk, rows.units - unit)
        for turn in range(-(-((count - 1) * sh + kh) // taken)):
            for r, n, j in itertools.product(range(taken), range(counted), range(kw)):
                i, back = r - taken + sh + sh * n, (turn + 1) * taken // sh - 1 - n
                if 0 <= i < kh and 0 <= back < count:
                    row = (unit * sh + turn * taken + r) * rows.step + rows.source_first + down
                    across = [q * columns.step for q in range(made.columns)]
                    x = pixels(source[image], row,
                               [first + q * sw + j * columns.step for q in across])
                    up = pixels(grad[image], (unit + back) * rows.step + down,
                                [grad_first + q for q in across])
                    sums[i, j] += (x * up).sum(0)
    return sums


@pytest.mark.parametrize("size, kernel, stride, padding, dilation", [
    *GEOMETRIES, ((9, 40), 3, 1, 1, 1), ((7, 7), 7, 1, 3, 1), ((20, 23), 7, 2, 3, 1)], ids=str)
def test_blocks_and_turns_add_up(size, kernel, stride, padding, dilation):
    check_gradients(convolved, weighed, size, kernel, stride, padding, dilation)


def test_cuts_fit():
    for k, stride, n, c, size in itertools.product((3, 5, 7), (1, 2), (1, 32), (8, 96, 576), (7, 14, 112)):
        line = line_of(size, -(-size // stride), k, stride, k // 2, 1, False)
        form = Form("bfloat16", (k, k), (stride, stride), 4, 0)
        for module in (mma, weights):
            made = module.cut(n, c, line, line, form)
            assert made.pixels <= mma.MOST_PIXELS
            assert made.lines >= n
            assert (made.tiles << made.strips) * made.columns >= line.result
            if n * c * size * size > 1 << 22:
                assert made.blocks >= 100
        assert mma.shared_bytes(mma.cut(n, c, line, line, form), form) <= mma.MOST_SHARED
        assert weights.shared_bytes(weights.cut(n, c, line, line, form), form) <= mma.MOST_SHARED


# --- the kernels

ALONE = Finish(normcdf(VALUE * channel(0) + channel(1)) * (VALUE + channel(2)), ("float16",) * 3, False)


@needs_nvrtc
@pytest.mark.covering(1)
@pytest.mark.parametrize("arch", [pytest.param(a, marks=[] if a in ("sm_80", "sm_90") else pytest.mark.slow)
                                  for a in compiler.ARCHITECTURES])
@pytest.mark.parametrize("dtype, k, stride", [
    ("float16", (3, 3), 1), ("bfloat16", (5, 5), 1), ("float16", (7, 7), 1), ("float16", (8, 9), 1),
    ("float16", (3, 3), 2), ("bfloat16", (5, 5), 2), ("float16", (7, 7), 2), ("float16", (1, 1), 1)], ids=str)
def test_kernels_compile_without_spills(dtype, k, stride, arch):
    form = Form(dtype, k, (stride, stride), 4, 0)
    made = [mma.convolution_kernel(form, finish) for finish in (PLAIN, LONG, ALONE)]
    if k[1] < 9:
        made.append(weights.grad_weight_kernel(form))
    if stride > 1:
        made.append(mma.convolution_kernel(form._replace(transposed=True), PLAIN))
    for kernel in made:
        found = compiler.cubin(kernel.text, kernel.stem, arch, kernel.name)[0].metadata
        assert (found["spills"], found["stack"], found["warnings"]) == (0, 0, 0), kernel.stem


# --- which images are theirs, and on a GPU

@pytest.mark.parametrize("channels, size, stems", [
    (96, 112, ("depthwise_mma", "depthwise_mma_backward")),
    (192, 28, ("depthwise_mma", "depthwise_mma_backward")),
    (576, 14, ("depthwise_images", "depthwise_images_backward"))], ids=str)
def test_large_images_are_theirs(channels, size, stems):
    geometry = Geometry((1, 1), (2, 2), (1, 1))
    shape = (32, channels, size, size)
    strides = (channels * size * size, 1, channels * size, channels)
    kind = kernels.Kind(shape, (strides, strides), (5, 5), F16, 16, True)
    launch, = kernels._planned_forward(kind, geometry, PLAIN).launches
    sums, = kernels._planned_grad_weight(kind, geometry, (size, size))
    assert (launch.kernel.stem, sums.partial.kernel.stem) == stems
    for other in (kind._replace(has_units=False), kind._replace(alignment=8)):
        launch, = kernels._planned_forward(other, geometry, PLAIN).launches
        assert launch.kernel.stem == "depthwise"
    for other in (kind._replace(dtype=F32), kind._replace(kernel=(3, 3))):
        launch, = kernels._planned_forward(other, geometry, PLAIN).launches
        assert launch.kernel.stem != "depthwise_mma"


@pytest.fixture
def of_any_size():
    """Small images as well by matrix units."""
    with planned_anew(**{name: {0: 0} for name in vars(kernels) if name.startswith("UNITS_OF")}):
        yield


OPTIONS = [((3, 3), 1, 1, 1, F16), ((5, 5), 2, 2, 1, F16), ((7, 7), 1, 3, 1, F16), ((7, 7), 2, 3, 1, BF16),
           ((3, 3), 1, 2, 2, F16), ((3, 5), (2, 1), (1, 2), 1, BF16), ((8, 9), 1, 4, 1, F16),
           ((1, 1), 1, 0, 1, F16), ((2, 4), 2, 1, 1, F16), ((5, 5), 1, 2, 1, BF16)]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel, stride, padding, dilation, dtype", OPTIONS, ids=str)
def test_as_accurate_as_torch(kernel, stride, padding, dilation, dtype, of_any_size):
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    for n, channels, *size in ((9, 40, 7, 9), (1, 104, 31, 70)):
        x = images(n, channels, *size, dtype=dtype, device="cuda")
        weight = torch.randn(channels, 1, *kernel, device="cuda").to(dtype)
        check_in_norm(frt.depthwise_conv2d, (x, weight), options)


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 2])
def test_large_images(stride):
    check_large_images(16 * stride, 5, stride)


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 2])
def test_epilogues(stride, of_any_size):
    check_epilogues(5, stride)


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 2])
def test_infinities_and_nan_stay_where_they_are(stride, of_any_size):
    """A band matrix has zeros, and what they meet are pixels of other results."""
    check_infinities_and_nan(stride)
