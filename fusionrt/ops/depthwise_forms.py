"""Depthwise convolutions as their kernels see them: geometry, what follows, what a kernel is compiled for and
launched with. Images are (N, C, H, W) with channels as neighbours in memory.

A kernel convolves a source into a result: the input into the output, or grad_output into grad_input. For
grad_weight the input is the source, and grad_output the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusionrt.dtypes import SIGNIFICANT_BITS, acc_of
from fusionrt.expr import Expr, argument
from fusionrt.graph import emit, toposort
from fusionrt.laid import address
from fusionrt.runtime.device import MULTIPROCESSORS
from fusionrt.runtime.source import ITEMSIZE, Field, definitions, device_function, members, pointer

Tensor = torch.Tensor
Pair = tuple[int, int]


class Geometry(NamedTuple):
    """Of a convolution, for rows and columns."""

    stride: Pair
    padding: Pair
    dilation: Pair

    def output_size(self, size: Sequence[int], kernel: Sequence[int]) -> Pair:
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
    turns: int = 0               # of a thread, where all are under way together


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


def window(form: Form, columns: int) -> int:
    """Pixels of the source that so many neighbouring results depend on."""
    kw, stride = form.kernel[1], form.stride[1]
    if form.transposed:
        return (columns - 1) // stride + (kw - 1) // stride + 1
    return (columns - 1) * stride + kw


def constants(form: Form) -> list[str]:
    """Lines of a kernel's prologue."""
    (kh, kw), (sh, sw) = form.kernel, form.stride
    return definitions(scalar_t=f"{form.dtype}_t", KH=kh, KW=kw, TAPS=kh * kw, STRIDE_H=sh, STRIDE_W=sw,
                       VEC=form.vec, TRANSPOSED=form.transposed, FLIPPED=form.flipped)


def rounds(blocks: int, together: int) -> list[int]:
    """Of a GPU whose multiprocessors hold so many blocks: how many each has, in one round after the other."""
    full, rest = divmod(blocks, MULTIPROCESSORS * together)
    return [together] * full + ([-(-rest // MULTIPROCESSORS)] if rest else [])


def operands(finish: Finish, step: bool = False) -> list[Field]:
    """The first fields of a kernel that convolves; `step` as in `stride_fields`."""
    return [pointer("scalar_t", "x"), pointer("scalar_t", "weight"),
            pointer("scalar_t", "out", const=False), pointer("scalar_t", "residual"),
            *(pointer(f"{dtype}_t", f"channel{k}") for k, dtype in enumerate(finish.channels)),
            *stride_fields("x", "out", step=step)]


def epilogue(finish: Finish) -> list[str]:
    """`Channels`, `know` (a template, as it stands before the parameters), `finish`. What follows from values
    of the channel alone is computed once."""
    elements = [n for n in toposort([finish.root]) if not n.uniform]
    border = list(dict.fromkeys(a for n in (*elements, finish.root) for a in (*n.args, n)
                                if isinstance(a, Expr) and a.uniform and a.op != "const"))
    known, values = emit(border, "const auto {} = {};")
    names = {n: f"channels.u{k}[v]" for k, n in enumerate(border)}
    return [*definitions(RESIDUAL=finish.residual), "struct Channels {",
            *(f"    acc_t u{k}[VEC];" for k in range(len(border))), "};",
            "template <typename P> __device__ __forceinline__ Channels know(const P& p, int c) {",
            "    Channels channels;",
            "#pragma unroll", "    for (int v = 0; v < VEC; ++v) {",
            *(f"        const acc_t channel{k} = to_acc(p.channel{k}[c + v]);"
              for k in range(len(finish.channels))),
            *("        " + line for line in known),
            *(f"        channels.u{k}[v] = {value};" for k, value in enumerate(values)),
            "    }", "    return channels;", "}",
            *device_function("acc_t finish(const Channels& channels, int v, acc_t value, acc_t residual)",
                             finish.root, names)]


def arithmetic(dtype: str) -> dict[str, Any]:
    return {"acc": acc_of(dtype), "significant_bits": SIGNIFICANT_BITS[dtype]}


# -- images ----------------------------------------------------------------------------------------

class Strides(NamedTuple):
    """From an image, a row, a column to the next."""

    batch: int
    row: int
    column: int


class Images(NamedTuple):
    """Two images: what they have in common, strides of the one that is read and of the one that is written
    (for the gradient of the weights read as well), what divides all addresses (bytes, 16 at most)."""

    dtype: str
    batch: int
    channels: int
    source: Strides
    result: Strides
    alignment: int

    def unit(self, most: int) -> int:
        """Neighbouring channels that can be accessed together."""
        return math.gcd(most, self.channels, *self.source, *self.result,
                        self.alignment // ITEMSIZE[self.dtype])


def alignment(*tensors: Tensor | None) -> int:
    low = 16
    for tensor in tensors:
        low |= address(tensor)
    return low & -low


def strides_of(strides: Sequence[int]) -> Strides:
    """Of a tensor's."""
    return Strides(strides[0], strides[2], strides[3])


def dense_strides(channels: int, size: Pair) -> Strides:
    return Strides(size[0] * size[1] * channels, size[1] * channels, channels)


# -- what kernels are given: fields, and their values by name ------------------------------------------

def stride_fields(*images: str, step: bool = False) -> list[Field]:
    """`step`: also from a row to the next of the same residue."""
    return members("long long", *(f"{image}_{dim}" for image in images
                                  for dim in (*Strides._fields, *["step"] * step)))


def stride_values(rows: Line | None = None, **images: Strides) -> dict[str, int]:
    """With `rows` those of `step`."""
    found: dict[str, int] = {}
    for image, strides in images.items():
        step = {} if rows is None else {"step": strides.row * rows.step}
        found |= {f"{image}_{dim}": n for dim, n in {**strides._asdict(), **step}.items()}
    return found


SIZES = ("channels", "source_rows", "source_columns", "result_rows", "result_columns", "source_top",
         "source_left", "result_top", "result_left", "dilation_h", "dilation_w")


def size_values(images: Images, rows: Line, columns: Line) -> dict[str, int]:
    """Of SIZES."""
    return {"channels": images.channels,
            "source_rows": rows.source, "source_columns": columns.source,
            "result_rows": rows.result, "result_columns": columns.result,
            "source_top": rows.source_first, "source_left": columns.source_first,
            "result_top": rows.result_first, "result_left": columns.result_first,
            "dilation_h": rows.step, "dilation_w": columns.step}
