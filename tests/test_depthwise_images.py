"""Depthwise convolutions of small images: the arithmetic of units and blocks, the kernels."""

import itertools

import numpy as np
import pytest
import torch
from checking import BF16, F16, F32, assert_same_bits, check_in_norm, needs_nvrtc
from depthwise_walk import (
    GEOMETRIES,
    LONG,
    check_epilogues,
    check_gradients,
    check_infinities_and_nan,
    check_large_images,
    images,
    planned_anew,
)
from machine_code import reads_too_early

import fusionrt as frt
from fusionrt.ops import depthwise_images as ours
from fusionrt.ops import depthwise_kernels as kernels
from fusionrt.ops.depthwise_forms import (
    PLAIN,
    Form,
    Geometry,
    Images,
    dense_strides,
    line_of,
)
from fusionrt.runtime import compiler


class Blocks:
    """One kind of convolution, as depthwise_images.cuh has it."""

    def __init__(self, source, result, kernel, geometry, transposed, sums=False):
        self.form = Form("float16", kernel, geometry.stride, 1, 0, transposed)
        self.rows, self.columns = (line_of(n, m, k, s, p, d, transposed) for n, m, k, s, p, d in zip(
            source.shape[1:3], result, kernel, *geometry, strict=True))
        find = ours.cut_of_sums if sums else ours.cut
        self.cut = find(len(source), source.shape[3], self.rows, self.columns, self.form)
        self.sides = ours.sides_of(self.rows, self.columns, self.form)
        self.units = -(-result[0] // self.cut.rows)
        stride, top = geometry.stride[0], self.sides.top
        self.above = (kernel[0] - 1 - top) // stride if transposed else top
        self.depth = ((self.cut.rows - 1 + top) // stride + self.above + 1 if transposed else
                      (self.cut.rows - 1) * stride + kernel[0])

    def first(self, unit):
        """Its image, the first rows of the result and of the source."""
        image, row = unit // self.units, unit % self.units * self.cut.rows
        stride = self.form.stride[0]
        return image, row, (row // stride if self.form.transposed else row * stride) - self.above

    def parts(self, count):
        """Each block's units of each turn, whose rows have room."""
        most, most_results = ours.lines(self.form, self.rows, self.cut)
        height, results = self.rows.source, self.rows.result
        for block in range(0, count * self.units, self.cut.chunk):
            last = min(block + self.cut.chunk, count * self.units)
            for begin in range(block, last, self.cut.together):
                end = min(begin + self.cut.together, last)
                (low, row, first), (high, final, below) = self.first(begin), self.first(end - 1)
                lines = low * height + max(0, first), high * height + min(height, below + self.depth)
                assert lines[1] - lines[0] <= most
                assert (high - low) * results + min(results, final + self.cut.rows) - row <= most_results
                yield range(begin, end), lines

    def taps(self, n, r):
        """Row of the tap, and each column's with where it is in source and result."""
        (kh, kw), (sh, sw), left = self.form.kernel, self.form.stride, self.sides.left
        i = r + self.sides.top - (n - self.above) * sh if self.form.transposed else n - r * sh
        for s, q in itertools.product(range(self.sides.width), range(self.sides.columns)):
            j = q + left - s * sw if self.form.transposed else s - q * sw + left
            if 0 <= i < kh and 0 <= j < kw:
                yield i, j, s, q

    def met(self, count):
        """image, source row, result row, taps"""
        for units, lines in self.parts(count):
            for unit in units:
                image, row, first = self.first(unit)
                for n, r in itertools.product(range(self.depth), range(self.cut.rows)):
                    if 0 <= first + n < self.rows.source and row + r < self.rows.result:
                        assert lines[0] <= image * self.rows.source + first + n < lines[1], "it was copied"
                        yield image, first + n, row + r, self.taps(n, r)


def convolved(source, taps, result, geometry, transposed):
    """depthwise_images.cu: `source` (N, H, W, C), `taps` (kH, kW, C)."""
    out = np.zeros((len(source), *result, source.shape[3]))
    blocks = Blocks(source, result, taps.shape[:2], geometry, transposed)
    for image, above, row, met in blocks.met(len(source)):
        for i, j, s, q in met:
            out[image, row, q] += source[image, above, s] * taps[i, j]
    return out


def weighed(source, grad, kernel, geometry):
    """depthwise_images_backward.cu"""
    sums = np.zeros((*kernel, source.shape[3]))
    blocks = Blocks(source, grad.shape[1:3], kernel, geometry, False, True)
    for image, above, row, met in blocks.met(len(source)):
        for i, j, s, q in met:
            sums[i, j] += source[image, above, s] * grad[image, row, q]
    return sums


@pytest.mark.covering(1)
@pytest.mark.parametrize("size, kernel, stride, padding, dilation", [
    *(case for case in GEOMETRIES if case[-1] == 1), ((7, 7), 7, 1, 3, 1), ((14, 14), 7, 2, 3, 1),
    ((20, 5), 5, 1, 2, 1), ((5, 3), 2, 2, 0, 1), ((9, 9), 3, 2, 0, 1)], ids=str)
@pytest.mark.parametrize("few", [False, True])
def test_units_add_up(monkeypatch, few, size, kernel, stride, padding, dilation):
    if not few:  # as if there were many images
        monkeypatch.setattr(ours, "FEW_BLOCKS", 0)
        monkeypatch.setattr(ours, "FEW_BLOCKS_OF_SUMS", 0)
    ours.cut.cache_clear()
    ours.cut_of_sums.cache_clear()
    check_gradients(convolved, weighed, size, kernel, stride, padding, dilation)
    ours.cut.cache_clear()
    ours.cut_of_sums.cache_clear()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_blocks_share_the_work(dtype):
    for k, stride, n, c, size in itertools.product((3, 5, 7), (1, 2), (1, 32, 512), (8, 576), (7, 14, 28)):
        line = line_of(size, -(-size // stride), k, stride, k // 2, 1, False)
        form = Form(dtype, (k, k), (stride, stride), 1, 0)
        made = Images(dtype, n, c, dense_strides(c, (size, size)), dense_strides(c, (line.result,) * 2), 16)
        if not ours.serves(form, made, line, line):
            assert size == 28
            continue
        launch, (sums, groups) = ours.convolution(form, made, line, line, PLAIN), ours.grad_weight(
            form, made, line, line)
        assert launch.shared <= ours.MOST_SHARED >= sums.shared
        assert launch.grid * launch.kernel.block * 2 * 8 >= n * c * line.result
        assert sums.grid <= 8 * ours.MULTIPROCESSORS and groups <= n * line.result


# --- the kernels

@needs_nvrtc
@pytest.mark.covering(1)
@pytest.mark.parametrize("arch", [pytest.param(a, marks=[] if a in ("sm_90", "sm_100") else pytest.mark.slow)
                                  for a in compiler.ARCHITECTURES if a != "sm_75"])
@pytest.mark.parametrize("dtype, size, k, stride", [
    ("float16", 7, 7, 1), ("float16", 14, 7, 1), ("bfloat16", 14, 5, 1), ("float32", 14, 3, 1),
    ("float16", 28, 7, 2)], ids=str)
def test_kernels_compile_without_spills(dtype, size, k, stride, arch):
    line = line_of(size, -(-size // stride), k, stride, k // 2, 1, False)
    back = line_of(line.result, size, k, stride, k // 2, 1, True) if stride > 1 else line
    form, results = Form(dtype, (k, k), (stride, stride), 1, 0), (line.result,) * 2
    many = Images(dtype, 32, 576, dense_strides(576, (size, size)), dense_strides(576, results), 16)
    found = [launch for made in (many, many._replace(batch=1)) for launch in (
        ours.convolution(form, made, line, line, PLAIN), ours.grad_weight(form, made, line, line)[0])]
    found.append(ours.convolution(form, many, line, line, LONG))
    found.append(ours.convolution(form._replace(transposed=stride > 1, flipped=stride == 1),
                                  many._replace(source=many.result, result=many.source), back, back, PLAIN))
    for kernel in (launch.kernel for launch in found):
        metadata, code = compiler.cubin(kernel.text, kernel.stem, arch, kernel.name)[0]
        assert (metadata["spills"], metadata["stack"], metadata["warnings"]) == (0, 0, 0), kernel.stem
        assert arch != "sm_90" or not reads_too_early(code)


# --- which images are theirs, and on a GPU

@pytest.mark.parametrize("size, k, stride, dtype, stem", [
    (14, 3, 1, F16, "depthwise_images"), (7, 7, 2, BF16, "depthwise_images"),
    (28, 5, 2, F16, "depthwise_images"), (16, 3, 1, F32, "depthwise_images"), (28, 3, 1, F16, "depthwise"),
    (14, 9, 1, F16, "depthwise"), (14, 3, 1, torch.float64, "depthwise")], ids=str)
def test_small_images_are_theirs(size, k, stride, dtype, stem):
    geometry = Geometry((stride, stride), (k // 2, k // 2), (1, 1))
    shape, strides = (2, 96, size, size), (96 * size * size, 1, 96 * size, 96)
    kind = kernels.Kind(shape, (strides, strides), (k, k), dtype, 16, True)

    def used(kind):
        launch, = kernels._planned_forward(kind, geometry, PLAIN).launches
        return launch.kernel.stem

    assert used(kind) == stem
    wide = (200 * size * size, 1, 100 * size, 96)  # of a wider image
    for other in ({"has_units": False}, {"alignment": 8}, {"strides": (wide, wide)}):
        assert used(kind._replace(**other)) == "depthwise"


def test_many_images_are_others_where_these_are_faster():
    def used(count, k, size=14, stride=1):
        geometry = Geometry((stride, stride), (k // 2, k // 2), (1, 1))
        result = geometry.output_size((size, size), (k, k))
        strides = tuple((576 * n * n, 1, 576 * n, 576) for n in (size, result[0]))
        kind = kernels.Kind((count, 576, size, size), strides, (k, k), F16, 16, True)
        launch, = kernels._planned_forward(kind, geometry, PLAIN).launches
        sums, = kernels._planned_grad_weight(kind, geometry, result)
        return launch.kernel.stem, sums.partial.kernel.stem

    assert used(64, 3) == used(256, 3, stride=2) == used(256, 5) == used(256, 7, 7) == (
        "depthwise_images", "depthwise_images_backward")
    assert used(256, 3) == ("depthwise_tiles", "depthwise_images_backward")
    assert used(256, 7) == ("depthwise_images", "depthwise_mma_backward")


def test_what_they_do_not_write_out_is_others():
    """Long kernels, high images, more images than 32 bits count, and few channels of a thread too many."""
    def served(kernel, size, batch=2, padding=(0, 0)):
        geometry = Geometry((1, 1), padding, (1, 1))
        rows, columns = (line_of(n, n + 2 * p - k + 1, k, 1, p, 1, False)
                         for n, k, p in zip(size, kernel, padding, strict=True))
        strides = [dense_strides(64, n) for n in (size, geometry.output_size(size, kernel))]
        made = Images("float16", batch, 64, *strides, 16)
        return ours.serves(Form("float16", kernel, (1, 1), 1, 0), made, rows, columns)

    assert served((7, 7), (14, 14))
    assert not served((26, 1), (28, 14)) and not served((7, 1), (100_000, 1), padding=(3, 0))
    assert not served((3, 3), (8, 8), batch=1 << 28)
    line, form = line_of(14, 14, 3, 1, 1, 1, False), Form("float16", (3, 3), (1, 1), 1, 0)
    assert [ours.cut(256, c, line, line, form).vec for c in (24, 32, 64, 72, 80, 576)] == [1, 1, 2, 1, 1, 2]


OPTIONS = [(3, 1, 1), (3, 2, 1), (5, 1, 2), (5, 2, 2), (7, 1, 3), (7, 2, 3), ((3, 5), (2, 1), (1, 2)),
           (1, 1, 0), ((2, 4), 2, 1), (4, 1, 0)]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel, stride, padding", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_as_accurate_as_torch(dtype, kernel, stride, padding):
    kh, kw = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    for n, channels, *size in ((9, 40, 7, 9), (70, 144, 14, 14), (2, 8, 31, 13), (33, 96, 7, 7)):
        x = images(n, channels, *size, dtype=dtype, device="cuda")
        weight = torch.randn(channels, 1, kh, kw, device="cuda").to(dtype)
        check_in_norm(frt.depthwise_conv2d, (x, weight), {"stride": stride, "padding": padding})


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [7, 14])
def test_many_images(size, stride):
    check_large_images(500, 3, stride, size=size + size % 2)


@pytest.mark.gpu
def test_the_same_bits_as_strips_and_views():
    """A result's additions have the same order; neighbouring channels of wider images; weights anywhere."""
    wide = images(3, 48, 14, 14, dtype=F16, device="cuda")
    weight = torch.randn(1 + 24 * 9, device="cuda").to(F16)
    for w in (part.view(24, 1, 3, 3) for part in (weight[:-1], weight[1:])):
        cases = wide[:, :24], wide[:, 8:32], wide[:, 24:]
        found = [frt.depthwise_conv2d(x, w, padding=1) for x in cases]
        with planned_anew():
            for x, y in zip(cases, found, strict=True):
                assert_same_bits(y, frt.depthwise_conv2d(x, w, padding=1))


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 2])
def test_epilogues(stride):
    check_epilogues(5, stride, size=(11, 13))


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 2])
def test_infinities_and_nan_stay_where_they_are(stride):
    check_infinities_and_nan(stride, size=(14, 16))
