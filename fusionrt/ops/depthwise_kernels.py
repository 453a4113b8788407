"""The kernels of depthwise convolutions, kernels_src/depthwise.cu and depthwise_backward.cu: specialised,
their
work cut into blocks, launched. Images are (N, C, H, W) with channels as neighbours in memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusionrt.expr import Expr, argument, emit, toposort
from fusionrt.runtime import accumulators
from fusionrt.runtime.kernel import Kernel
from fusionrt.runtime.source import ITEMSIZE, Field, magic, pointer

Tensor = torch.Tensor
Pair = tuple[int, int]
BLOCK = 128
LANES = 32                  # threads side by side along the channels, at most
MOST_TAPS, MOST_DOUBLE_TAPS = 121, 49  # of a kernel whose taps are written out, by the registers there are
MOST_REGISTERS = 230        # by the estimate below: with all 255 the compiler would begin to spill
STRIDES = (1, 2)
# Of a large GPU: how work is cut depends on shapes alone, as sums do.
MULTIPROCESSORS, LOAD_CYCLES = 132, 800


class Geometry(NamedTuple):
    """Of a convolution, for rows and columns."""

    stride: Pair
    padding: Pair
    dilation: Pair

    def result(self, size: Sequence[int], kernel: Sequence[int]) -> Pair:
        rows, columns = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(
            size, kernel, *self, strict=True))
        return rows, columns


class Finish(NamedTuple):
    """The epilogue: `root` in the arguments `value`, `channel0`, ... (uniform: one value a channel; of the
    dtypes `channels`) and, if `residual`, `residual`."""

    root: Expr
    channels: tuple[str, ...] = ()
    residual: bool = False


VALUE, RESIDUAL = argument("value"), argument("residual")
PLAIN = Finish(VALUE)


def channel(k: int) -> Expr:
    return argument(f"channel{k}", True)


class Form(NamedTuple):
    """What a kernel is compiled for."""

    dtype: str
    kernel: Pair
    stride: Pair
    vec: int
    columns: int
    transposed: bool = False
    flipped: bool = False


class Line(NamedTuple):
    """A dimension: sizes of source and result, the step between neighbours, the result's elements (of
    TRANSPOSED: groups of them) of one residue, and where the first one and its first tap are."""

    source: int
    result: int
    step: int
    units: int
    source_first: int
    result_first: int


def line_of(source: int, result: int, kernel: int, stride: int, padding: int, dilation: int, transposed: bool
            ) -> Line:
    if not transposed:
        return Line(source, result, dilation, -(-result // dilation), -padding, 0)
    beyond = padding % stride
    return Line(source, result, 1, -(-(result + beyond) // stride),
                padding // stride - (kernel - 1) // stride, -beyond)


class Cut(NamedTuple):
    """How the work is shared: `lanes` of a slice of the channels; tasks are strips of columns, of a residue
    of
    columns, of chunks of rows, of a residue of rows, of images."""

    lanes: int
    slices: int
    columns: int
    strips: int
    chunk: int
    chunks: int
    tasks: int

    @property
    def blocks(self) -> int:
        return self.slices * -(-self.tasks // (BLOCK // self.lanes))


def lanes_of(channels: int, vec: int) -> Pair:
    """Lanes and slices: slices of about the same size."""
    vectors = -(-channels // vec)
    slices = -(-vectors // LANES)
    return -(-vectors // slices), slices


@functools.lru_cache(1024)
def cut(batch: int, channels: int, rows: Line, columns: Line, form: Form, widths: tuple[int, ...],
        groups: int = 0) -> Cut:
    """The cut that seems fastest. `groups`: blocks of a slice that share all its tasks, where it is fixed."""
    lanes, slices = lanes_of(channels, form.vec)
    group = form.stride[1] if form.transposed else 1
    before = (form.kernel[0] - 1) // form.stride[0]
    found: list[tuple[float, Cut]] = []
    for width in widths:
        strips = -(-columns.units * group // width)
        for chunks in range(1, max(1, min(64, rows.units // max(1, before))) + 1):
            chunk = -(-rows.units // chunks)
            chunks = -(-rows.units // chunk)
            made = Cut(lanes, slices, width, strips, chunk, chunks,
                       batch * strips * chunks * rows.step * columns.step)
            turns = chunk + (before if chunks > 1 else before / 4)  # rows outside of the image take no time
            if groups:
                turns *= -(-made.tasks // (groups * (BLOCK // lanes)))
            found.append((turns * cycles(form, width, groups * slices or made.blocks), made))
    return min(found, key=lambda pair: pair[0])[1]


def cycles(form: Form, width: int, blocks: int) -> float:
    """Estimate of what a turn of all blocks takes: instructions, where blocks that share a multiprocessor
    have
    more of these than a load takes time."""
    kw, (sh, sw), taps = form.kernel[1], form.stride, math.prod(form.kernel)
    if form.transposed:
        products, window, results = taps * width // sw, width // sw + kw // sw, width * sh
    else:
        products, window, results = taps * width, sh * ((width - 1) * sw + kw), width
    # Each multiprocessor has four schedulers and one path to the weights in its memory.
    instructions = max(form.vec * products + 5 * (window + results) + taps + 40,
                       4 * form.vec * taps if form.vec * taps > 20 else 0)
    full, rest = divmod(blocks, MULTIPROCESSORS * resident(form))
    together = [resident(form)] * full + ([-(-rest // MULTIPROCESSORS)] if rest else [])
    return float(sum(max(LOAD_CYCLES, n * instructions) for n in together))


def resident(form: Form) -> int:
    """Blocks that share a multiprocessor."""
    return 4 if math.prod(form.kernel) <= 9 else 3 if math.prod(form.kernel) <= 25 else 2


# -- what a kernel is given ------------------------------------------------------------------------

_SIZES = ("channels", "lanes", "source_rows", "source_columns", "result_rows", "result_columns",
          "source_top", "source_left", "result_top", "result_left", "dilation_h", "dilation_w",
          "source_step", "result_step", "units", "chunk")
_COUNTS = ("tasks", "groups")
_DIVISORS = ("slices", "strips", "residues_w", "chunks", "residues_h")


def _constants(form: Form) -> list[str]:
    (kh, kw), (sh, sw) = form.kernel, form.stride
    return [f"using scalar_t = {form.dtype}_t;",
            f"constexpr int KH = {kh}, KW = {kw}, STRIDE_H = {sh}, STRIDE_W = {sw};",
            f"constexpr int VEC = {form.vec}, COLUMNS = {form.columns}, LANES = {LANES};",
            *(f"constexpr bool {name} = {str(on).lower()};" for name, on in (
                ("TRANSPOSED", form.transposed), ("FLIPPED", form.flipped)))]


def _fields(pointers: Sequence[Field], strides: Sequence[str]) -> list[Field]:
    return [*pointers, *(Field(f"long long {name}", "q") for name in strides),
            *(Field(f"int {name}", "i") for name in _SIZES),
            *(Field(f"unsigned {name}", "I") for name in _COUNTS),
            *(Field(f"Divisor {name}", "III") for name in _DIVISORS)]


def _sizes(channels: int, rows: Line, columns: Line, plan: Cut, groups: int, steps: Pair) -> list[int]:
    """Values of _SIZES, _COUNTS and _DIVISORS. `steps`: elements from a pixel to the next of the same
    residue."""
    return [channels, plan.lanes, rows.source, columns.source, rows.result, columns.result, rows.source_first,
            columns.source_first, rows.result_first, columns.result_first, rows.step, columns.step, *steps,
            rows.units, plan.chunk, plan.tasks, groups,
            *(n for by in (plan.slices, plan.strips, columns.step, plan.chunks, rows.step)
              for n in magic(by))]


def _arithmetic(dtype: str) -> dict[str, Any]:
    return {"acc": "float64" if dtype == "float64" else "float32",
            "significant_bits": {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}[dtype]}


# -- convolution, and the gradient of its source -----------------------------------------------------

@functools.cache
def convolving(form: Form, finish: Finish) -> Kernel:
    pointers = [pointer("scalar_t", "x"), pointer("scalar_t", "weight"),
                pointer("scalar_t", "out", const=False), pointer("scalar_t", "residual"),
                *(pointer(f"{dtype}_t", f"channel{k}") for k, dtype in enumerate(finish.channels))]
    strides = ("x_batch", "x_row", "x_column", "out_batch", "out_row", "out_column")
    return Kernel("depthwise_conv2d", "depthwise", _fields(pointers, strides),
                  [*_constants(form), *_epilogue(finish)], block=BLOCK, **_arithmetic(form.dtype))


def _epilogue(finish: Finish) -> list[str]:
    """`Channels`, `know` (a template, as it stands before the parameters), `finish`. What follows from values
    of the channel alone is computed once."""
    elements = [n for n in toposort([finish.root]) if not n.uniform]
    border = list(dict.fromkeys(a for n in (*elements, finish.root) for a in (*n.args, n)
                                if isinstance(a, Expr) and a.uniform and a.op != "const"))
    known, values = emit(border, "const auto {} = {};")
    names = {n: f"channels.u{k}[v]" for k, n in enumerate(border)}
    lines, (result,) = emit([finish.root], "const auto {} = {};", names)
    return [f"constexpr bool RESIDUAL = {str(finish.residual).lower()};", "struct Channels {",
            *(f"    acc_t u{k}[VEC];" for k in range(len(border))), "};",
            "template <typename P> __device__ __forceinline__ Channels know(const P& p, int c) {",
            "    Channels channels;",
            "#pragma unroll", "    for (int v = 0; v < VEC; ++v) {",
            *(f"        const acc_t channel{k} = to_acc(p.channel{k}[c + v]);"
              for k in range(len(finish.channels))),
            *("        " + line for line in known),
            *(f"        channels.u{k}[v] = {value};" for k, value in enumerate(values)),
            "    }", "    return channels;", "}",
            "__device__ __forceinline__ acc_t finish(const Channels& channels, int v, acc_t value, "
            "acc_t residual) {",
            *("    " + line for line in lines), f"    return {result};", "}"]


def convolve(x: Tensor, weight: Tensor, geometry: Geometry, finish: Finish = PLAIN,
             channels: Sequence[Tensor] = (), residual: Tensor | None = None) -> Tensor:
    """The result, finished; `residual` has its shape and layout."""
    size = geometry.result(x.shape[2:], weight.shape[2:])
    out = _image(x, size)
    if out.numel():
        lines = [line_of(n, m, k, s, p, d, False) for n, m, k, s, p, d in zip(
            x.shape[2:], size, weight.shape[2:], *geometry, strict=True)]
        form = _form(x, weight, geometry.stride, [x, out, *([] if residual is None else [residual])])
        _launch(form, x, weight, out, lines[0], lines[1], finish, channels, residual)
    return out


def source_gradient(grad: Tensor, weight: Tensor, geometry: Geometry, size: Sequence[int]) -> Tensor:
    """That of an x of `size` rows and columns, of the result's."""
    out = _image(grad, size)
    if not grad.numel() or not out.numel():
        return out.zero_()
    kernel, strided = weight.shape[2:], geometry.stride != (1, 1)
    if strided:
        lines = [line_of(n, m, k, s, p, 1, True) for n, m, k, s, p in zip(
            grad.shape[2:], size, kernel, geometry.stride, geometry.padding, strict=True)]
    else:
        lines = [line_of(n, m, k, 1, d * (k - 1) - p, d, False) for n, m, k, p, d in zip(
            grad.shape[2:], size, kernel, geometry.padding, geometry.dilation, strict=True)]
    form = _form(grad, weight, geometry.stride, [grad, out])._replace(transposed=strided, flipped=not strided)
    _launch(form, grad, weight, out, lines[0], lines[1])
    return out


def _launch(form: Form, x: Tensor, weight: Tensor, out: Tensor, rows: Line, columns: Line,
            finish: Finish = PLAIN, channels: Sequence[Tensor] = (), residual: Tensor | None = None) -> None:
    plan = cut(x.shape[0], x.shape[1], rows, columns, form, widths_of(form))
    form = form._replace(columns=plan.columns)
    steps = columns.step * x.stride(3), columns.step * out.stride(3)
    convolving(form, finish)(
        x.device, plan.blocks, *(_address(t) for t in (x, weight, out, residual, *channels)),
        *_strides(x), *_strides(out), *_sizes(x.shape[1], rows, columns, plan, 1, steps))


def widths_of(form: Form) -> tuple[int, ...]:
    """Columns that a thread may have: as many as registers allow."""
    if form.transposed:
        return (4, 2) if form.dtype == "float64" else (8, 4, 2)
    return (4, 2, 1) if form.dtype == "float64" or form.stride[1] > 1 else (8, 7, 4, 2, 1)


def _form(x: Tensor, weight: Tensor, stride: Pair, images: Sequence[Tensor]) -> Form:
    kernel = weight.shape[2], weight.shape[3]
    return Form(_name(x), kernel, stride, _vector(images, math.prod(kernel), 49), 0)


def _vector(images: Sequence[Tensor], taps: int, most: int) -> int:
    """Channels of a thread: two, with so many taps at most; more would want too many registers."""
    if images[0].dtype == torch.float64 or taps > most:
        return 1
    itemsize = images[0].itemsize
    sizes = [images[0].shape[1], *(n for t in images for n in _strides(t))]
    return math.gcd(2, *sizes, *(_address(t) // itemsize for t in images))


# -- the gradient of the weights ---------------------------------------------------------------------

@functools.cache
def weighing(form: Form) -> Kernel:
    pointers = [pointer("scalar_t", "x"), pointer("scalar_t", "grad"),
                pointer("acc_t", "partials", const=False)]
    strides = ("x_batch", "x_row", "x_column", "grad_batch", "grad_row", "grad_column")
    fields = [Field(f.declaration.replace("result_step", "grad_step"), f.format)
              for f in _fields(pointers, strides)]
    return Kernel("depthwise_conv2d_backward", "depthwise_backward", fields, _constants(form), block=BLOCK,
                  **_arithmetic(form.dtype))


@functools.cache
def adding(dtype: str) -> Kernel:
    fields = [pointer("acc_t", "partials"), pointer("out_t", "out", const=False),
              Field("unsigned long long chunks", "Q"), Field("unsigned long long kept", "Q"),
              Field("int side", "i")]
    return Kernel("depthwise_conv2d_backward", "sum_partials", fields,
                  ["using index_t = unsigned long long;", f"using out_t = {dtype}_t;"],
                  block=accumulators.BLOCK, **_arithmetic(dtype))


def weight_gradient(grad: Tensor, x: Tensor, geometry: Geometry, kernel: Sequence[int]) -> Tensor:
    channels = x.shape[1]
    out = torch.empty((channels, 1, *kernel), dtype=x.dtype, device=x.device)
    if not grad.numel() or not out.numel():
        return out.zero_()
    rows, columns = (line_of(n, m, k, s, p, d, False) for n, m, k, s, p, d in zip(
        x.shape[2:], grad.shape[2:], kernel, *geometry, strict=True))
    taps = math.prod(kernel)
    vec = _vector((x, grad), taps, 49 if x.itemsize == 2 else 25)
    form = Form(_name(x), (kernel[0], kernel[1]), geometry.stride, vec, 0)
    slices = lanes_of(channels, form.vec)[1]
    groups = max(1, 2 * MULTIPROCESSORS // slices)
    plan = cut(x.shape[0], channels, rows, columns, form, widths_of_gradient(form), groups)
    groups = min(groups, -(-plan.tasks // (BLOCK // plan.lanes)))
    acc = torch.promote_types(x.dtype, torch.float32)
    partials = torch.empty(groups * channels * taps, dtype=acc, device=x.device)
    steps = columns.step * x.stride(3), columns.step * grad.stride(3)
    weighing(form._replace(columns=plan.columns))(
        x.device, plan.slices * groups, *map(_address, (x, grad, partials)), *_strides(x), *_strides(grad),
        *_sizes(channels, rows, columns, plan, groups, steps))
    kept = channels * taps
    adding(form.dtype)(x.device, accumulators.blocks(kept, groups), _address(partials), _address(out), groups,
                       kept, accumulators.side(kept, groups))
    return out


def widths_of_gradient(form: Form) -> tuple[int, ...]:
    """Columns that a thread may have beside sums of all taps, rows of the gradient, a window of x, and both
    of
    the next turn."""
    (kh, kw), (sh, sw), words = form.kernel, form.stride, -(-form.vec * ITEMSIZE[form.dtype] // 4)
    held = (kh - 1) // sh + 1

    def registers(columns: int) -> int:
        window = (columns - 1) * sw + kw
        numbers = form.vec * (kh * kw + held * columns + window)
        return numbers * (2 if form.dtype == "float64" else 1) + words * (sh * window + columns) + 40

    widths = (8, 7, 4) if form.stride == (1, 1) else (4,)
    return tuple(n for n in widths if registers(n) <= MOST_REGISTERS) or (2,)


# -- tensors -----------------------------------------------------------------------------------------

def _image(like: Tensor, size: Sequence[int]) -> Tensor:
    return torch.empty((*like.shape[:2], *size), dtype=like.dtype, device=like.device,
                       memory_format=torch.channels_last)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_meta else tensor.data_ptr()


def _strides(image: Tensor) -> list[int]:
    """From an image, a row, a column to the next."""
    return [image.stride(k) for k in (0, 2, 3)]
