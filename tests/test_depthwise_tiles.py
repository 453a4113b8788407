"""Depthwise convolutions by way of shared memory: the arithmetic of blocks, bands and turns, the kernels."""

import itertools

import numpy as np
import pytest
import torch
from checking import BF16, F16, F32, F64, assert_same_bits, check_in_norm, needs_nvrtc
from depthwise_walk import (
    GEOMETRIES,
    LONG,
    check_epilogues,
    check_gradients,
    check_infinities_and_nan,
    check_large_images,
    digits,
    images,
    of_last,
    pairs,
    pixels,
    planned_anew,
)
from torch.nn import functional as F

import fusionrt as frt
from fusionrt.ops import depthwise
from fusionrt.ops import depthwise_kernels as kernels
from fusionrt.ops import depthwise_tiles as tiles
from fusionrt.ops.depthwise_forms import (
    PLAIN,
    Form,
    Geometry,
    Images,
    dense_strides,
    line_of,
    window,
)
from fusionrt.ops.depthwise_tiles import Wanted
from fusionrt.runtime import compiler


class Blocks:
    """One kind of convolution, cut as the kernels' host code cuts it."""

    def __init__(self, source, result, kernel, geometry, transposed, wanted):
        self.form = Form("float16", kernel, geometry.stride, 2, 0, transposed)
        self.rows, self.columns = (line_of(n, m, k, s, p, d, transposed) for n, m, k, s, p, d in zip(
            source.shape[1:3], result, kernel, *geometry, strict=True))
        self.cut = tiles.cut(len(source), source.shape[3], self.rows, self.columns, self.form, wanted)

    def strips(self):
        """image, first columns of source and result, first unit of rows, how many, residue of rows"""
        made, step = self.cut, self.columns.step
        for block, slot in itertools.product(range(made.blocks), range(made.beside * made.bands)):
            _, tile, right, group = digits(block, made.slices, made.tiles, made.residues)
            band, strip = divmod(slot, made.beside)
            lines = group * made.bands + band
            if lines < made.lines:
                chunk, down, image = digits(lines, made.chunks, self.rows.step)
                beside, unit = tile * made.beside + strip, chunk * made.chunk
                source = beside * made.pitch(self.form) * step + self.columns.source_first + right
                result = beside * made.columns * step + self.columns.result_first + right
                yield image, source, result, unit, min(made.chunk, self.rows.units - unit), down

    def turns(self, wanted):
        """Steps of all turns: every band of a block takes as many."""
        steps = tiles.steps(self.form, wanted)
        return -(-(self.cut.chunk + tiles.before(self.form)) // steps) * steps


def convolved(source, taps, result, geometry, transposed):
    """depthwise_tiles.cu: `source` (N, H, W, C), `taps` (kH, kW, C)."""
    (kh, kw), (sh, sw) = taps.shape[:2], geometry.stride
    blocks = Blocks(source, result, (kh, kw), geometry, transposed, Wanted.RESULT)
    made, rows, columns, before = blocks.cut, blocks.rows, blocks.columns, tiles.before(blocks.form)
    rows_in, rows_out = tiles.rows_of_step(blocks.form)
    held_rows, left = (max(kh, sh), (kw - 1) // sw) if transposed else (before + 1, 0)
    out = np.full((len(source), *result, source.shape[3]), np.nan)
    for image, first, result_first, unit, units, down in blocks.strips():
        held = np.zeros((held_rows, made.columns, source.shape[3]))
        across = [first + k * columns.step for k in range(window(blocks.form, made.columns))]
        for step in range(blocks.turns(Wanted.RESULT)):
            held = np.concatenate((held[rows_out:], np.zeros((rows_out, *held.shape[1:]))))
            for s in range(rows_in):
                row = ((unit + step) * rows_in + s) * rows.step + rows.source_first + down
                x = pixels(source[image], row, across)
                for j, h, q in itertools.product(range(kw), range(held_rows), range(made.columns)):
                    i, at = h if transposed else s + sh * (before - h), q * sw + j
                    if transposed:
                        at = (q + left * sw - j) // sw if (q - j) % sw == 0 else -1
                    if i < kh and at >= 0:
                        held[h, q] += x[at] * taps[i, j]
            inside = before <= step < units + before
            for r, q in itertools.product(range(rows_out if inside else 0), range(made.columns)):
                row = ((unit + step - before) * rows_out + r) * rows.step + rows.result_first + down
                column = result_first + q * columns.step
                if 0 <= row < result[0] and 0 <= column < result[1]:
                    assert np.isnan(out[image, row, column]).all(), "written once"
                    out[image, row, column] = held[r, q]
    return out


def weighed(source, grad, kernel, geometry):
    """depthwise_tiles_backward.cu"""
    (kh, kw), (sh, sw) = kernel, geometry.stride
    blocks = Blocks(source, grad.shape[1:3], kernel, geometry, False, Wanted.GRAD_WEIGHT)
    made, rows, columns, before = blocks.cut, blocks.rows, blocks.columns, tiles.before(blocks.form)
    sums = np.zeros((kh, kw, source.shape[3]))
    for image, first, grad_first, unit, units, down in blocks.strips():
        held = np.zeros((before + 1, made.columns, source.shape[3]))
        across = [first + k * columns.step for k in range(window(blocks.form, made.columns))]
        grad_across = [grad_first + q * columns.step for q in range(made.columns)]
        for step in range(blocks.turns(Wanted.GRAD_WEIGHT)):
            row = (unit + step) * rows.step + down if step < units else -1
            held = np.concatenate((pixels(grad[image], row, grad_across)[None], held[:-1]))
            for s in range(sh):
                row = ((unit + step) * sh + s) * rows.step + rows.source_first + down
                x = pixels(source[image], row, across)
                for age, j, q in itertools.product(range(before + 1), range(kw), range(made.columns)):
                    if s + sh * age < kh:
                        sums[s + sh * age, j] += held[age, q] * x[q * sw + j]
    return sums


def differentiated(grad, x, taps, geometry):
    """depthwise_tiles_gradients.cu: `taps` of the convolution, which it takes turned."""
    kh, kw = taps.shape[:2]
    moved = [d * (k - 1) - p for k, p, d in zip((kh, kw), geometry.padding, geometry.dilation, strict=True)]
    blocks = Blocks(grad, x.shape[1:3], (kh, kw), geometry._replace(padding=tuple(moved)), False, Wanted.BOTH)
    made, rows, columns, before = blocks.cut, blocks.rows, blocks.columns, kh - 1
    out, sums = np.full(x.shape, np.nan), np.zeros(taps.shape)
    for image, first, result_first, unit, units, down in blocks.strips():
        held, xs = np.zeros((kh, made.columns, x.shape[3])), np.zeros((kh, made.columns, x.shape[3]))
        across = [first + k * columns.step for k in range(window(blocks.form, made.columns))]
        x_across = [result_first + q * columns.step for q in range(made.columns)]
        for step in range(blocks.turns(Wanted.BOTH)):
            row = (unit + step) * rows.step + down
            held = np.concatenate((held[1:], np.zeros((1, *held.shape[1:]))))
            xs[step % kh] = pixels(x[image], row if step < units else -1, x_across)
            up = pixels(grad[image], row + rows.source_first, across)
            for j, h, q in itertools.product(range(kw), range(kh), range(made.columns)):
                tap = h, kw - 1 - j  # of the convolution: row kh - 1 - (before - h)
                held[h, q] += up[q + j] * taps[tap]
                sums[tap] += up[q + j] * xs[(step + 1 + h) % kh, q]
            for q in range(made.columns if before <= step < units + before else 0):
                row, column = (unit + step - before) * rows.step + down, x_across[q]
                if 0 <= row < x.shape[1] and 0 <= column < x.shape[2]:
                    assert np.isnan(out[image, row, column]).all(), "written once"
                    out[image, row, column] = held[0, q]
    return out, sums


@pytest.mark.parametrize("size, kernel, padding, dilation", [
    ((9, 11), 3, 1, 1), ((3, 40), 3, 0, 1), ((30, 5), 2, 0, 3), ((12, 10), 3, 2, 2),
    ((9, 8), (3, 2), (2, 1), 1)], ids=str)
def test_both_gradients_add_up(size, kernel, padding, dilation):
    kernel, *options = pairs(kernel, 1, padding, dilation)
    geometry = Geometry(*options)
    x, weight = torch.randn(2, 3, *size, dtype=F64, requires_grad=True), torch.randn(
        3, 1, *kernel, dtype=F64, requires_grad=True)
    y = F.conv2d(x, weight, None, *geometry, groups=3)
    grad = torch.randn_like(y)
    expected = torch.autograd.grad(y, (x, weight), grad)
    of_x, of_weight = differentiated(*(t.detach().movedim(1, -1).numpy() for t in (grad, x)),
                                     weight.detach()[:, 0].movedim(0, -1).numpy(), geometry)
    torch.testing.assert_close(of_last(of_x), expected[0])
    torch.testing.assert_close(torch.from_numpy(of_weight).movedim(-1, 0)[:, None], expected[1])


@pytest.mark.parametrize("size, kernel, stride, padding, dilation", [
    *GEOMETRIES, ((9, 40), 3, 1, 1, 1), ((40, 9), 3, 2, 1, 1), ((20, 23), 5, 1, 2, 2)], ids=str)
def test_blocks_and_turns_add_up(size, kernel, stride, padding, dilation):
    check_gradients(convolved, weighed, size, kernel, stride, padding, dilation)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_cuts_fit(dtype):
    for k, stride, n, c, size in itertools.product((3, 5), (1, 2), (1, 32), (8, 96, 144, 576), (7, 14, 112)):
        line = line_of(size, -(-size // stride), k, stride, k // 2, 1, False)
        form = Form(dtype, (k, k), (stride, stride), 2, 0)
        for wanted in Wanted:
            made = tiles.cut(n, c, line, line, form, wanted)
            assert tiles.shared_bytes(made, form, wanted) <= tiles.MOST_SHARED
            assert made.lanes * made.slices * 2 >= c > (made.slices - 1) * made.lanes * 2
            assert made.tiles * made.beside * made.columns >= line.result
            assert made.chunks * made.chunk >= line.units and made.lines == n * made.chunks
            assert made.threads <= 512 and made.lanes * 2 * tiles.ITEMSIZE[dtype] % tiles.UNIT == 0
            if n * c * size * size > 1 << 23:
                assert made.blocks >= 100


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_one_strip_has_room(dtype):
    """Of any pixels that are served, or a block's ring would be sought forever."""
    for k, stride, channels in itertools.product(((5, 5), (1, 5), (5, 1)), (1, 2), range(4, 260, 4)):
        form = Form(dtype, k, (stride, stride), 2, 0)
        lanes, slices = tiles.lanes_of(channels, form)
        line = line_of(56, -(-56 // stride), k[0], stride, 0, 1, False)
        found = list(tiles.cuts(lanes, slices, 1, 2, line, line, form))
        for wanted in Wanted:
            assert any(tiles.shared_bytes(made, form, wanted) <= tiles.MOST_SHARED for made in found)


def test_the_gradient_of_a_permuted_weight_is_contiguous():
    x = images(2, 8, 6, 7, device="meta")
    weight = torch.empty(3, 3, 1, 8, device="meta").permute(3, 2, 1, 0)
    for run in (depthwise._backward.run, depthwise._backward._overload):
        made = run(x, x, weight, [1, 1], [1, 1], [1, 1])
        assert made[1].is_contiguous() and made[1].shape == weight.shape


def test_slices_are_whole_lines_of_memory():
    form = Form("float16", (3, 3), (1, 1), 2, 0)
    assert [tiles.lanes_of(c, form) for c in (16, 32, 96, 144, 192, 240, 384, 576)] == [
        (8, 1), (16, 1), (48, 1), (36, 2), (32, 3), (32, 4), (32, 6), (32, 9)]


# --- the kernels

@needs_nvrtc
@pytest.mark.covering(1)
@pytest.mark.parametrize("arch", [pytest.param(a, marks=[] if a in ("sm_80", "sm_90") else pytest.mark.slow)
                                  for a in compiler.ARCHITECTURES])
@pytest.mark.parametrize("dtype, k, stride", [
    ("float16", 3, 1), ("bfloat16", 3, 2), ("float32", 3, 1), ("float16", 5, 1), ("float32", 5, 2)], ids=str)
def test_kernels_compile_without_spills(dtype, k, stride, arch):
    line = line_of(112, 112 // stride, k, stride, k // 2, 1, False)
    form = Form(dtype, (k, k), (stride, stride), 2, 0)
    size, half = (112, 112), (112 // stride,) * 2
    made = Images(dtype, 32, 96, dense_strides(96, size), dense_strides(96, half), 16)
    found = [tiles.convolution(form, made, line, line, finish) for finish in (PLAIN, LONG)]
    found.append(tiles.grad_weight(form, made, line, line)[0])
    if tiles.serves_both(form, made):
        flipped = form._replace(flipped=True)
        found.append(tiles.backward(flipped, made, line, line, dense_strides(96, size))[0])
    if stride > 1:
        line = line_of(56, 112, k, stride, k // 2, 1, True)
        made = made._replace(source=made.result, result=made.source)
        found.append(tiles.convolution(form._replace(transposed=True), made, line, line, PLAIN))
    for kernel in (launch.kernel for launch in found):
        entry = compiler.cubin(kernel.text, kernel.stem, arch, kernel.name)[0].metadata
        assert (entry["spills"], entry["stack"], entry["warnings"]) == (0, 0, 0), kernel.stem


# --- which images are theirs, and on a GPU

@pytest.mark.parametrize("size, k, stride, dtype, stems", [
    (112, 3, 1, F16, ("depthwise_tiles", "depthwise_tiles_backward")),
    (112, 3, 2, F16, ("depthwise_tiles", "depthwise_tiles_backward")),
    (112, 5, 1, F16, ("depthwise_mma", "depthwise_mma_backward")),
    (112, 5, 2, F16, ("depthwise_tiles", "depthwise_tiles_backward")),
    (112, 5, 1, F32, ("depthwise_tiles", "depthwise_tiles_backward")),
    (112, 3, 1, F64, ("depthwise", "depthwise_backward")),
    (28, 3, 1, F16, ("depthwise", "depthwise_tiles_backward"))], ids=str)
def test_large_images_are_theirs(size, k, stride, dtype, stems):
    geometry = Geometry((stride, stride), (k // 2, k // 2), (1, 1))
    shape, strides = (32, 96, size, size), (96 * size * size, 1, 96 * size, 96)
    kind = kernels.Kind(shape, (strides, strides), (k, k), dtype, 16, True)

    def used(kind):
        launch, = kernels._planned_forward(kind, geometry, PLAIN).launches
        sums, = kernels._planned_grad_weight(kind, geometry, geometry.output_size((size, size), (k, k)))
        return launch.kernel.stem, sums.partial.kernel.stem

    assert used(kind) == stems
    for other in (kind._replace(has_units=False), kind._replace(alignment=8)):
        assert used(other) == ("depthwise", "depthwise_backward")


@pytest.fixture
def of_any_size():
    """Small images as well by way of shared memory, and no others."""
    with planned_anew(**{name: {1: 0} if name.startswith("TILES") else {} for name in vars(kernels)
                         if name.startswith(("UNITS_OF", "TILES_OF"))}):
        yield


OPTIONS = [(3, 1, 1, 1), (3, 2, 1, 1), (5, 1, 2, 1), (5, 2, 2, 1), (3, 1, 2, 2), ((3, 5), (2, 1), (1, 2), 1),
           (1, 1, 0, 1), ((2, 4), 2, 1, 1), (4, 1, 0, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel, stride, padding, dilation", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_as_accurate_as_torch(dtype, kernel, stride, padding, dilation, of_any_size):
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    kh, kw = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    for n, channels, *size in ((9, 40, 7, 9), (2, 144, 31, 70)):
        x = images(n, channels, *size, dtype=dtype, device="cuda")
        weight = torch.randn(channels, 1, kh, kw, device="cuda").to(dtype)
        check_in_norm(frt.depthwise_conv2d, (x, weight), options)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel, padding, dilation", [
    (3, 1, 1), (3, 0, 1), (2, 1, 1), (3, 2, 2), ((3, 2), 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_each_gradient_alone_and_both(dtype, kernel, padding, dilation, of_any_size):
    kh, kw = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    for n, channels, *size in ((9, 40, 7, 9), (2, 104, 31, 70)):
        x = images(n, channels, *size, dtype=dtype, device="cuda").requires_grad_()
        weight = torch.randn(channels, 1, kh, kw, device="cuda").to(dtype).requires_grad_()
        y = frt.depthwise_conv2d(x, weight, padding=padding, dilation=dilation)
        grad = torch.randn_like(y)
        both, again = (torch.autograd.grad(y, (x, weight), grad, retain_graph=True) for _ in range(2))
        of_x, = torch.autograd.grad(y, x, grad, retain_graph=True)
        of_weight, = torch.autograd.grad(y, weight, grad)
        for first, second in zip(both, again, strict=True):
            assert_same_bits(first, second)
        assert_same_bits(both[0], of_x)
        torch.testing.assert_close(both[1], of_weight, rtol=1e-5 if dtype == F32 else 2e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 2])
def test_large_images(stride):
    check_large_images(8 * stride, 3, stride)


@pytest.mark.gpu
def test_the_same_bits_as_strips_and_views(of_any_size, monkeypatch):
    """A result's additions have the same order; and strides may be any multiples of 16 bytes."""
    wide = images(3, 48, 20, 23, dtype=F16, device="cuda")
    weight = torch.randn(24, 1, 3, 3, device="cuda").to(F16)
    cases = wide[:, :24], wide[:, 8:32], wide[:, 24:, 1:, 2:], wide[:, :24, ::2]
    ours = [frt.depthwise_conv2d(x, weight, padding=1) for x in cases]
    monkeypatch.setattr(kernels, "TILES_OF_RESULTS", {})
    kernels._planned_forward.cache_clear()
    for x, y in zip(cases, ours, strict=True):
        assert_same_bits(y, frt.depthwise_conv2d(x, weight, padding=1))


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 2])
def test_epilogues(stride, of_any_size):
    check_epilogues(3, stride)


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 2])
def test_infinities_and_nan_stay_where_they_are(stride, of_any_size):
    check_infinities_and_nan(stride)
