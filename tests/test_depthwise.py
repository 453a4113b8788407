"""Depthwise convolutions: the kernels' arithmetic of strips, windows and turns, gradients, the kernels."""

import itertools

import numpy as np
import pytest
import torch
from checking import BF16, F16, F32, F64, assert_same_bits, check_in_norm, needs_nvrtc
from depthwise_walk import GEOMETRIES, check_gradients, digits, images, pairs, pixels, planned_anew

import fusionrt as frt
from fusionrt.ops import depthwise, depthwise_kernels, depthwise_strips
from fusionrt.ops.depthwise_forms import PLAIN, Form, Geometry, line_of
from fusionrt.ops.depthwise_strips import BLOCK, convolution_kernel, cut, grad_weight_kernel
from fusionrt.rehearsal import collecting
from fusionrt.runtime import compiler


@pytest.fixture(autouse=True)
def without_kernels_for_small_images():
    with planned_anew():
        yield


# --- what kernels_src/depthwise.cu does with indices, step by step

class Walk:
    """One kind of convolution, cut as the kernels' host code cuts it."""

    def __init__(self, source, result, kernel, geometry, transposed, columns=None, groups=0):
        self.kernel, self.stride, self.transposed = kernel, geometry.stride, transposed
        self.rows, self.columns = (line_of(n, m, k, s, p, d, transposed) for n, m, k, s, p, d in zip(
            source.shape[1:3], result, kernel, *geometry, strict=True))
        form = Form("float32", kernel, self.stride, 1, 0, transposed)
        widths = columns or depthwise_strips.widths_of(form)
        self.cut = cut(len(source), source.shape[3], self.rows, self.columns, form, widths, groups)
        self.before = (kernel[0] - 1) // self.stride[0]

    def tasks(self):
        for task in range(self.cut.tasks):
            strip, right, chunk, down, image = digits(
                task, self.cut.strips, self.columns.step, self.cut.chunks, self.rows.step)
            unit = chunk * self.cut.chunk
            yield image, strip, right, unit, down, min(self.cut.chunk, self.rows.units - unit)


def convolved(source, taps, result, geometry, transposed):
    """depthwise.cu: `source` (N, H, W, C), `taps` (kH, kW, C)."""
    (kh, kw), (sh, sw) = taps.shape[:2], geometry.stride
    walk = Walk(source, result, (kh, kw), geometry, transposed)
    width, before, step_h, step_w = walk.cut.columns, walk.before, walk.rows.step, walk.columns.step
    rows_in, rows_out = (1, sh) if transposed else (sh, 1)
    held_rows, left = (max(kh, sh), (kw - 1) // sw) if transposed else (before + 1, 0)
    window = (width - 1) // sw + left + 1 if transposed else (width - 1) * sw + kw
    out = np.full((len(source), *result, source.shape[3]), np.nan)
    for image, strip, right, unit, down, units in walk.tasks():
        column = strip * (width // sw if transposed else width * sw) * step_w + right
        column += walk.columns.source_first
        first = strip * width * step_w + walk.columns.result_first + right
        held = np.zeros((held_rows, width, source.shape[3]))
        for turn in range(units + before):
            held = np.concatenate((held[rows_out:], np.zeros((rows_out, *held.shape[1:]))))
            for s in range(rows_in):
                row = ((unit + turn) * rows_in + s) * step_h + walk.rows.source_first + down
                x = pixels(source[image], row, [column + k * step_w for k in range(window)])
                for j, h, q in itertools.product(range(kw), range(held_rows), range(width)):
                    i = h if transposed else s + sh * (before - h)
                    at = q * sw + j
                    if transposed:
                        at = (q + left * sw - j) // sw if (q - j) % sw == 0 else -1
                    if i < kh and at >= 0:
                        held[h, q] += x[at] * taps[i, j]
            for r, q in itertools.product(range(rows_out if turn >= before else 0), range(width)):
                row = ((unit + turn - before) * rows_out + r) * step_h + walk.rows.result_first + down
                if 0 <= row < result[0] and 0 <= first + q * step_w < result[1]:
                    assert np.isnan(out[image, row, first + q * step_w]).all(), "written once"
                    out[image, row, first + q * step_w] = held[r, q]
    return out


def weighed(source, grad, kernel, geometry):
    """depthwise_backward.cu."""
    (kh, kw), (sh, sw) = kernel, geometry.stride
    walk = Walk(source, grad.shape[1:3], kernel, geometry, False, (4,), 2)
    width, step_h, step_w, sums = 4, walk.rows.step, walk.columns.step, np.zeros((kh, kw, source.shape[3]))
    for image, strip, right, unit, down, units in walk.tasks():
        column = strip * width * sw * step_w + walk.columns.source_first + right
        columns = [strip * width * step_w + right + q * step_w for q in range(width)]
        held = np.zeros((walk.before + 1, width, source.shape[3]))
        for turn in range(units + walk.before):
            row = (unit + turn) * step_h + down if turn < units else -1
            held = np.concatenate((pixels(grad[image], row, columns)[None], held[:-1]))
            for s in range(sh):
                row = ((unit + turn) * sh + s) * step_h + walk.rows.source_first + down
                x = pixels(source[image], row, [column + k * step_w for k in range((width - 1) * sw + kw)])
                for age, j, q in itertools.product(range(walk.before + 1), range(kw), range(width)):
                    if s + sh * age < kh:
                        sums[s + sh * age, j] += held[age, q] * x[q * sw + j]
    return sums


@pytest.mark.parametrize("size, kernel, stride, padding, dilation", GEOMETRIES, ids=str)
def test_strips_and_turns_add_up(size, kernel, stride, padding, dilation):
    check_gradients(convolved, weighed, size, kernel, stride, padding, dilation)


def cut_of(n, c, size, k, stride=1):
    line = line_of(size, (size - 1) // stride + 1, k, stride, k // 2, 1, False)
    form = Form("float32", (k, k), (stride, stride), 2, 0)
    return cut(n, c, line, line, form, depthwise_strips.widths_of(form))


@pytest.mark.parametrize("c, size, k, stride", [
    (16, 112, 3, 1), (96, 112, 3, 2), (144, 56, 3, 1), (144, 56, 5, 2), (480, 14, 5, 1), (960, 7, 5, 1)])
def test_turns_of_one_image_are_under_way_together(c, size, k, stride):
    """Of 32 images they are not: rows would be read by several blocks."""
    one = cut_of(1, c, size, k, stride)
    assert one.turns == one.chunk + (k - 1) // stride
    form = Form("float32", (k, k), (stride, stride), 2, 0)
    assert one.blocks <= 132 * depthwise_strips.resident_together(form)
    assert cut_of(32, c, size, k, stride).turns == 0


def test_cuts_cover_all_and_fill_a_gpu():
    for n, c, size, k in itertools.product((1, 32), (2, 96, 100, 576), (7, 14, 112), (3, 7)):
        line = line_of(size, size, k, 1, k // 2, 1, False)
        form = Form("float16", (k, k), (1, 1), 2, 0)
        found = cut(n, c, line, line, form, depthwise_strips.widths_of(form))
        assert found.lanes * found.slices * 2 >= c > (found.slices - 1) * found.lanes * 2
        assert found.strips * found.columns >= size > (found.strips - 1) * found.columns
        assert found.chunks * found.chunk >= size > (found.chunks - 1) * found.chunk
        assert found.tasks == n * found.strips * found.chunks
        assert found.lanes <= 32 <= BLOCK
        if n * c * size * size > 1 << 22:
            assert found.blocks >= 100
        sums = cut(n, c, line, line, form, depthwise_strips.widths_of_gradient(form), True)
        assert sums.groups <= -(-sums.tasks // (BLOCK // sums.lanes))
        assert sums.blocks <= 132 * depthwise_strips.resident(
            depthwise_strips.registers(form, sums.columns, True)) + sums.slices


# --- the ops of torch's, on a CPU by torch's kernels

ATTRIBUTES = [([1, 1], [1, 0], [1, 1]), ([2, 1], [1, 1], [1, 1]), ([1, 1], [2, 2], [2, 2])]


@pytest.mark.parametrize("geometry", ATTRIBUTES, ids=str)
def test_gradients_of_any_order(geometry, device):
    x = images(1, 4, 5, 6, dtype=F64, device=device).requires_grad_()
    weight = torch.randn(4, 1, 3, 3, dtype=F64, device=device, requires_grad=True)

    def run(x, weight):
        return depthwise._forward(x.contiguous(memory_format=torch.channels_last), weight, *geometry)

    assert torch.autograd.gradcheck(run, (x, weight), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (x, weight), fast_mode=True)


def test_known_to_torch(device):
    x, weight = images(2, 4, 5, 6, device=device).requires_grad_(), torch.randn(
        4, 1, 3, 3, device=device, requires_grad=True)
    for op, *args in ((torch.ops.fusionrt.depthwise_conv2d_forward, x, weight),
                      (torch.ops.fusionrt.depthwise_conv2d_grad_input, x, weight, [5, 6]),
                      (torch.ops.fusionrt.depthwise_conv2d_grad_weight, x, x, [3, 3]),
                      (torch.ops.fusionrt.depthwise_conv2d_backward, x, x, weight)):
        torch.library.opcheck(op.default, (*args, [1, 1], [1, 1], [1, 1]))


# --- which convolutions, by which kernels

def test_whose_convolution_it_is():
    def used(x, weight, bias=None, device="cuda", **options):
        with collecting(device) as found, torch.no_grad():
            frt.conv_activation(x, weight, bias, "silu", **options)
        return {getattr(source, "entry", "expression") for source in found}

    def meta(*shape, dtype=F16):
        return torch.empty(shape, dtype=dtype, device="meta")

    x = meta(2, 8, 16, 16).contiguous(memory_format=torch.channels_last)
    two = {"depthwise", "depthwise_tiles"}  # a rehearsal may be for a GPU without copies or matrix units,
    units = {"depthwise", "depthwise_mma"}  # and for images of any size
    assert used(x, meta(8, 1, 5, 5), groups=8) == two | units
    assert used(x, meta(8, 1, 7, 7), meta(8), groups=8, padding="same", residual=x) == units
    assert used(x, meta(8, 1, 5, 5), groups=8, stride=2, padding=2) == two
    assert used(x, meta(8, 1, 3, 3), groups=8) == two
    assert used(x, meta(8, 1, 9, 9), groups=8, padding=4) == {"depthwise"}
    assert used(x.float(), meta(8, 1, 3, 3, dtype=F32), groups=8) == two
    assert used(x[:, :6], meta(6, 1, 3, 3), groups=6) == {"depthwise"}
    others = [(x.contiguous(), meta(8, 1, 3, 3), {}), (x, meta(16, 1, 3, 3), {}),
              (x, meta(8, 1, 3, 3), {"stride": 3}),
              (x, meta(8, 1, 3, 3), {"stride": (1, 2), "dilation": (2, 1)}),
              (x, meta(8, 1, 12, 12), {"padding": 4}), (x, meta(8, 1, 3, 3), {"padding": 3})]
    for y, weight, options in others:
        assert used(y, weight, groups=8, **options) == {"expression"}, options
    assert used(x, meta(8, 2, 3, 3), groups=4) == {"expression"}
    assert used(x, meta(8, 1, 3, 3), device="cpu", groups=8) == {"expression"}


FORMS = [("float16", 3, 1, 2), ("bfloat16", 7, 1, 2), ("float32", 5, 2, 2), ("float32", 7, 1, 1),
         ("float16", 11, 1, 1), ("float64", 7, 1, 1), ("bfloat16", 2, 1, 1)]


def together(form):
    """Kernels whose turns are under way together, those with the most in registers."""
    fits = [(w, c) for w in depthwise_strips.widths_of(form) for c in depthwise_strips.CHUNKS_TOGETHER
            if depthwise_strips.registers_together(form, w, c) <= depthwise_strips.MOST_TOGETHER]
    most = sorted(fits, key=lambda fit: depthwise_strips.registers_together(form, *fit))[-2:]
    before = (form.kernel[0] - 1) // form.stride[0]
    return [convolution_kernel(form._replace(columns=w, turns=c + before), PLAIN)
            for w, c in most]


@needs_nvrtc
@pytest.mark.covering(1)
@pytest.mark.parametrize("arch", [pytest.param(a, marks=[] if a == "sm_90" else pytest.mark.slow)
                                  for a in compiler.ARCHITECTURES])
@pytest.mark.parametrize("dtype, k, stride, vec", FORMS, ids=str)
def test_kernels_compile_without_spills(dtype, k, stride, vec, arch):
    form = Form(dtype, (k, k), (stride, stride), vec, 0)
    made = [convolution_kernel(form._replace(columns=max(depthwise_strips.widths_of(form))), PLAIN),
            *together(form),
            grad_weight_kernel(form._replace(columns=max(depthwise_strips.widths_of_gradient(form))))]
    if stride > 1:
        form = form._replace(transposed=True)
        made += [convolution_kernel(form._replace(columns=max(depthwise_strips.widths_of(form))), PLAIN),
                 *together(form)]
    for kernel in made:
        found = compiler.cubin(kernel.text, kernel.stem, arch, kernel.name)[0].metadata
        assert (found["spills"], found["stack"], found["warnings"]) == (0, 0, 0), kernel.stem


@needs_nvrtc
@pytest.mark.parametrize("dtype, taps, vec", [("bfloat16", 49, 2), ("float16", 121, 2), ("float64", 49, 1),
                                              ("float32", 121, 1)], ids=str)
def test_long_rows_of_taps_compile(dtype, taps, vec):
    """Their sums do not fit into shared memory together."""
    form = Form(dtype, (1, taps), (1, 1), vec, 0)
    form = form._replace(columns=max(depthwise_strips.widths_of_gradient(form)))
    kernel = grad_weight_kernel(form)
    assert compiler.cubin(kernel.text, kernel.stem, "sm_90", kernel.name)[0].metadata["shared"] <= 48 << 10


def test_without_elements(device):
    for shape, size in (((0, 4, 5, 5), (0, 4, 5, 5)), ((2, 4, 1, 1), (2, 4, 1, 1))):
        x = images(*shape, device=device).requires_grad_()
        weight = torch.randn(4, 1, 3, 3, device=device, requires_grad=True)
        y = frt.depthwise_conv2d(x, weight, padding=1)
        of_x, of_weight = torch.autograd.grad(y.sum(), (x, weight))
        assert y.shape == size
        torch.testing.assert_close(of_weight.sum(), x.detach().sum())  # only the middle tap meets a pixel
        assert of_x.shape == x.shape


# --- on a GPU

# Few: cuDNN plans each of torch's convolutions anew, which takes most of the time.
SHAPES = (1, 9, 11), (3, 31, 3), (32, 9, 11), (100, 31, 3), (130, 9, 11)
FEWER_SHAPES = (7, 31, 3), (100, 9, 11)
OPTIONS = [(3, 1, 1, 1), (5, 2, 2, 1), (7, 1, 3, 1)]
MORE = [(1, 1, 0, 1), (2, 1, 1, 1), (3, 2, 1, 1), (3, 1, 2, 2), (4, 2, 1, 1), (5, 1, 2, 1), (6, 1, 3, 1),
        (7, 2, 3, 1), ((3, 5), (2, 1), (1, 2), 1), (9, 1, 4, 1), (11, 2, 5, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, options_of", [
    *itertools.product((F16, BF16, F32, F64), OPTIONS), *((F16, options) for options in MORE)], ids=str)
def test_as_accurate_as_torch(dtype, options_of):
    kernel, *options = pairs(*options_of)
    geometry = Geometry(*options)
    named = dict(zip(("stride", "padding", "dilation"), geometry, strict=True))
    for channels, *size in SHAPES if options_of in OPTIONS else FEWER_SHAPES:
        if min(geometry.output_size(size, kernel)) > 0:
            x = images(2, channels, *size, dtype=dtype, device="cuda")
            weight, bias = (torch.randn(shape, device="cuda").to(dtype) for shape in (
                (channels, 1, *kernel), (channels,)))
            check_in_norm(frt.depthwise_conv2d, (x, weight, bias, "silu"), named)
            y, _ = check_in_norm(torch.no_grad()(frt.depthwise_conv2d), (x, weight, bias, "silu"), named,
                                 torch.no_grad()(frt.depthwise_conv2d.reference))
            assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, taps", [(BF16, 61), (F32, 121), (F64, 49)], ids=str)
def test_long_rows_of_taps(dtype, taps):
    x = images(2, 32, 5, 130, dtype=dtype, device="cuda")
    weight = torch.randn(32, 1, 1, taps, device="cuda").to(dtype)
    check_in_norm(frt.depthwise_conv2d, (x, weight), {"padding": (0, taps // 2)})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_turns_one_by_one_give_the_same_bits(dtype, monkeypatch):
    cases = [(images(2, c, 9, 11, dtype=dtype, device="cuda"),
              *(torch.randn(shape, device="cuda").to(dtype) for shape in ((c, 1, k, k), (c,))), stride)
             for c, k, stride in itertools.product((32, 130), (3, 5), (1, 2))]

    def run():
        for cached in (cut, convolution_kernel, depthwise_kernels._planned_forward):
            cached.cache_clear()
        with torch.no_grad():
            return [frt.depthwise_conv2d(x, weight, bias, "silu", padding=weight.shape[2] // 2, stride=stride)
                    for x, weight, bias, stride in cases]

    together = run()
    monkeypatch.setattr(depthwise_strips, "CHUNKS_TOGETHER", ())
    for ours, (x, weight, bias, stride), other in zip(together, cases, run(), strict=True):
        assert_same_bits(ours, other)
        check_in_norm(torch.no_grad()(frt.depthwise_conv2d), (x, weight, bias, "silu"),
                      {"padding": weight.shape[2] // 2, "stride": stride},
                      torch.no_grad()(frt.depthwise_conv2d.reference))
    for cached in (cut, convolution_kernel, depthwise_kernels._planned_forward):
        cached.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("shape, k, stride", [
    ((4, 96, 57, 112), 3, 1), ((4, 96, 57, 112), 3, 2), ((3, 192, 56, 30), 7, 1), ((8, 64, 28, 28), 7, 2),
    ((2, 66, 200, 9), 5, 1)], ids=str)
def test_large_images(shape, k, stride):
    x = images(*shape, dtype=F16, device="cuda")
    weight = torch.randn(shape[1], 1, k, k, device="cuda").to(F16)
    out, grads = check_in_norm(frt.depthwise_conv2d, (x, weight), {"padding": k // 2, "stride": stride})
    again = check_in_norm(frt.depthwise_conv2d, (x, weight), {"padding": k // 2, "stride": stride})
    assert_same_bits(out, again[0])
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.gpu
def test_two_runs_give_the_same_bits():
    x = images(4, 96, 57, 60, dtype=BF16, device="cuda").requires_grad_()
    weight = torch.randn(96, 1, 5, 5, device="cuda").to(BF16).requires_grad_()
    y = frt.depthwise_conv2d(x, weight, padding=2)
    grad = torch.randn_like(y)
    first, second = (torch.autograd.grad(y, (x, weight), grad, retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_views_and_odd_addresses(dtype):
    wide = images(2, 12, 9, 10, dtype=dtype, device="cuda")
    weight = torch.randn(6, 1, 3, 3, device="cuda").to(dtype)
    for x in (wide[:, :6], wide[:, 1:7], wide[:, 6:, 1:, 2:], wide[:, :6, ::2], wide[:, :6].flip(3)):
        check_in_norm(frt.depthwise_conv2d, (x, weight), {"padding": 1})


@pytest.mark.gpu
def test_a_graph_repeats_it():
    x, weight = (images(*s, dtype=F16, device="cuda") for s in ((2, 32, 14, 14), (32, 1, 3, 3)))
    bias = torch.randn(32, device="cuda").to(F16)
    expected = frt.depthwise_conv2d(x, weight, bias, "gelu", padding=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = frt.depthwise_conv2d(x, weight, bias, "gelu", padding=1)
    graph.replay()
    assert_same_bits(y, expected)
