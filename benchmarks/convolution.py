"""Depthwise convolutions of channels_last images, and convolutions with norm and relu on ResNet-50's shapes.

Batch 32. Device time, on input sets in rotation, from CUDA graphs; `issued` are backward passes that cannot
be captured and were timed one by one. Rows of table `depthwise`: float16, the convolution alone (backward:
gradients of image and weight), and at inference with batch norm and silu; `of_copy` is the fraction of what a
copy of as many bytes reaches, counting every operand and every result once. Rows of table `conv_bn_relu`:
inference (statistics given, no gradient), and of a training step the forward pass and the backward pass
(image, weight, norm); with a residual where ResNet-50 has one. The rivals are eager torch (cuDNN, in its
default mode) and, in some float16 rows, torch.compile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import fusionrt
from benchmarks import script
from fusionrt.bench import ceilings, sampling, timing
from fusionrt.bench.results import Results, why

BATCH = 32
IMAGES = ((96, 112), (192, 56), (384, 28), (576, 14), (576, 7))    # channels, rows and columns
KERNELS, STRIDES = (3, 5, 7), (1, 2)
# Channels in and out, kernel, stride, rows and columns of x, whether a residual is added.
LAYERS = ((3, 64, 7, 2, 224, False), (64, 64, 3, 1, 56, False), (64, 256, 1, 1, 56, True),
          (128, 128, 3, 2, 56, False), (512, 128, 1, 1, 28, False), (256, 256, 3, 1, 14, False),
          (256, 1024, 1, 1, 14, True), (512, 512, 3, 1, 7, False), (512, 2048, 1, 1, 7, True))
DTYPES, MEMORIES = ("float16", "bfloat16", "float32"), ("channels_last", "contiguous")
MOST_CALLS = 20  # in a graph
COLUMNS = ("table", "layer", "dtype", "memory", "direction", "MB", "us", "TB/s", "of_copy", "eager_us",
           "vs_eager", "vs_compile", "spread", "issued", "error")
Function = Callable[..., Any]


class Made(NamedTuple):
    """One input set."""

    ours: Function
    eager: Function             # of `args`, to be compiled as well
    args: Sequence[Any]
    leaves: list[torch.Tensor]  # what has gradients


class Case(NamedTuple):
    labels: dict[str, Any]
    nbytes: int
    make: Callable[[], Made]
    compiles: bool = False


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--table", choices=("depthwise", "conv_bn_relu"), help="only this one")
    options = parser.parse_args()
    script.need_gpu()
    tables = {"depthwise": _depthwise, "conv_bn_relu": _conv_bn_relu}
    run = script.results("convolution-gpu", __doc__, options, options.table is not None)
    cases = [case for name, made in tables.items() if options.table in (None, name) for case in made()]
    with timing.stream():
        for case in cases[::11] if options.quick else cases:
            try:
                _measure(case, run)
            except Exception as error:
                run.add(**case.labels, error=why(error))
            timing.release()
    run.finish(COLUMNS)


def _measure(case: Case, run: Results) -> None:
    made = [case.make() for _ in range(timing.n_sets(case.nbytes))]
    n = max(len(made), min(MOST_CALLS, timing.n_calls(case.nbytes)))
    backward = case.labels["direction"].endswith("backward")
    times, issued = _timed({
        name: [_call(functions[i % len(made)], made[i % len(made)].leaves, backward) for i in range(n)]
        for name, functions in _variants(case, made).items()}, backward)
    ours, eager = times["ours"].us, times["eager"].us
    figures: dict[str, Any] = {"vs_compile": round(times["compile"].us / ours, 3)} if case.compiles else {}
    figures |= {"issued": True} if issued else {}
    if case.labels["table"] == "depthwise":
        rate = case.nbytes / ours / 1e6
        ceiling = run.ceiling("copy", ceilings.copy(case.nbytes))
        figures |= {"TB/s": round(rate, 4), "of_copy": round(rate / ceiling, 4)}
    run.add(**case.labels, bytes=case.nbytes, MB=round(case.nbytes / (1 << 20), 2), us=ours, eager_us=eager,
            vs_eager=round(eager / ours, 3), spread=times["ours"].spread, **figures)


def _timed(variants: dict[str, list[timing.Call]], backward: bool) -> tuple[dict[str, timing.Time], bool]:
    """And whether the calls had to be issued one by one."""
    try:
        return timing.replayed(variants), False
    except RuntimeError:
        if not backward:
            raise
        return sampling.issued(variants), True


def _variants(case: Case, made: Sequence[Made]) -> dict[str, list[Function]]:
    found = {"ours": [one.ours for one in made],
             "eager": [functools.partial(one.eager, *one.args) for one in made]}
    if case.compiles:
        torch.compiler.reset()  # it stops compiling a function that it met with too many shapes
        compiled = torch.compile(made[0].eager, dynamic=False)
        found["compile"] = [functools.partial(compiled, *one.args) for one in made]
    return found


def _call(function: Function, leaves: list[torch.Tensor], backward: bool) -> timing.Call:
    if not backward:
        return function if leaves else torch.no_grad()(function)
    out = function()
    return functools.partial(torch.autograd.grad, out, leaves, torch.randn_like(out), retain_graph=True)


def _image(channels: int, size: int, dtype: str, memory: str = "channels_last") -> torch.Tensor:
    layout = torch.channels_last if memory == "channels_last" else torch.contiguous_format
    x = torch.randn(BATCH, channels, size, size, device="cuda")
    return x.to(getattr(torch, dtype), memory_format=layout)


def _norm(channels: int) -> list[torch.Tensor]:
    """running_mean, running_var, weight, bias"""
    mean, var, weight, bias = (torch.randn(channels, device="cuda") for _ in range(4))
    return [mean, var.abs() + 0.5, weight, bias]


def _result(size: int, k: int, stride: int) -> int:
    return (size + 2 * (k // 2) - k) // stride + 1


# -- depthwise -------------------------------------------------------------------------------------

def _depthwise() -> Iterator[Case]:
    for channels, size in IMAGES:
        for k in KERNELS:
            for stride in STRIDES:
                x, y = (2 * BATCH * channels * n * n for n in (size, _result(size, k, stride)))
                layer = f"{channels}×{size}×{size}, {k}×{k}" + (f" /{stride}" if stride > 1 else "")
                for direction, nbytes in (("forward", x + y), ("backward", 2 * x + y), ("norm, silu", x + y)):
                    labels = {"table": "depthwise", "layer": layer, "dtype": "float16",
                              "memory": "channels_last", "direction": direction}
                    make = functools.partial(_make_depthwise, channels, size, k, stride, direction)
                    yield Case(labels, nbytes, make, direction == "norm, silu" and (k, stride) == (3, 1))


def _make_depthwise(channels: int, size: int, k: int, stride: int, direction: str) -> Made:
    x, weight = _image(channels, size, "float16"), torch.randn(channels, 1, k, k, device="cuda").half()
    leaves = [x.requires_grad_(), weight.requires_grad_()] if direction == "backward" else []
    if direction != "norm, silu":
        return Made(lambda: fusionrt.depthwise_conv2d(x, weight, stride=stride, padding=k // 2), F.conv2d,
                    (x, weight, None, stride, k // 2, 1, channels), leaves)
    norm = _norm(channels)
    return Made(lambda: fusionrt.conv2d_bn_act(x, weight, None, *norm, activation="silu", stride=stride,
                                               padding=k // 2, groups=channels),
                _eager_silu, (x, weight, norm, stride, k // 2, channels), [])


def _eager_silu(x: torch.Tensor, weight: torch.Tensor, norm: Sequence[torch.Tensor], stride: int,
                padding: int,
                groups: int) -> torch.Tensor:
    return F.silu(F.batch_norm(F.conv2d(x, weight, None, stride, padding, 1, groups), *norm), inplace=True)


# -- dense -----------------------------------------------------------------------------------------

def _conv_bn_relu() -> Iterator[Case]:
    for number, layer in enumerate(LAYERS):
        for dtype in DTYPES:
            for memory in MEMORIES:
                for direction in ("inference", "training forward", "training backward"):
                    labels = {"table": "conv_bn_relu", "layer": _name(layer), "dtype": dtype,
                              "memory": memory,
                              "direction": direction}
                    compiles = (dtype, memory) == ("float16", "channels_last") and number % 2 == 1
                    yield Case(labels, _bytes(layer) * getattr(torch, dtype).itemsize,
                               functools.partial(_make_conv, layer, dtype, memory, direction),
                               compiles)


Layer = tuple[int, int, int, int, int, bool]


def _name(layer: Layer) -> str:
    c, out, k, stride, size, residual = layer
    by = f" /{stride}" if stride > 1 else ""
    return f"{c}→{out}, {k}×{k}{by}, {size}×{size}" + (", residual" if residual else "")


def _bytes(layer: Layer) -> int:
    """Elements of the images."""
    c, out, k, stride, size, residual = layer
    return BATCH * (c * size ** 2 + (2 if residual else 1) * out * _result(size, k, stride) ** 2)


def _make_conv(layer: Layer, dtype: str, memory: str, direction: str) -> Made:
    c, out, k, stride, size, with_residual = layer
    training = direction != "inference"
    x = _image(c, size, dtype, memory)
    weight = (torch.randn(out, c, k, k, device="cuda") / (c * k * k) ** 0.5).to(x.dtype)
    if memory == "channels_last":
        weight = weight.to(memory_format=torch.channels_last)
    norm = _norm(out)
    if direction == "training backward":  # each variant's forward pass would update the others' statistics
        norm[:2] = [None, None]
    residual = _image(out, _result(size, k, stride), dtype, memory) if with_residual else None
    leaves = [x, weight, *norm[2:], *([] if residual is None else [residual])] if training else []
    for leaf in leaves:
        leaf.requires_grad_()
    return Made(lambda: fusionrt.conv2d_bn_act(x, weight, None, *norm, residual=residual, stride=stride,
                                               padding=k // 2, training=training),
                _eager_relu, (x, weight, norm, residual, stride, k // 2, training), leaves)


def _eager_relu(x: torch.Tensor, weight: torch.Tensor, norm: Sequence[torch.Tensor],
                residual: torch.Tensor | None,
                stride: int, padding: int, training: bool) -> torch.Tensor:
    y = F.batch_norm(F.conv2d(x, weight, None, stride, padding), *norm, training)
    return F.relu(y if residual is None else y.add_(residual), inplace=True)


if __name__ == "__main__":
    main()
