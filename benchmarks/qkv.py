"""qkv_heads on a GPU: bias, rotation and layout of a linear layer's output, against torch's unfused formulas.

Device time a call, on input sets in rotation; the fraction is of what a copy of as many bytes reaches in the
same run, counting the least: the packed tensor once and q, k, v once, the bias, and where they are given
both tables; backward the same, with the gradient of the bias in the place of the bias.

16 Ki positions of 32 heads of q and `kv_heads` of k and v, each 128 columns wide. `variant`: `bias` alone;
`tables` of cosines and sines in the dtype of the operands, and angles that are `computed`, without and with
a bias.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

import fusionrt
from benchmarks import script
from benchmarks.work import Made, Work, measure
from fusionrt import reference

BATCH, LENGTH, HEADS, DIM = 4, 4096, 32, 128
VARIANTS = ("bias", "tables", "computed", "tables and bias", "computed and bias")
COLUMNS = ("op", "variant", "dtype", "kv_heads", "direction", "MB", "us", "TB/s", "of_copy", "vs_eager",
           "spread", "error")


def main() -> None:
    options = script.parser(__doc__).parse_args()
    script.need_gpu()
    run = script.results("qkv-gpu", __doc__, options)
    cells = list(_cells())
    measure(cells[::4] if options.quick else cells, run)
    run.finish(COLUMNS)


def _cells() -> Iterator[Work]:
    for dtype in ("bfloat16", "float32"):
        itemsize = getattr(torch, dtype).itemsize
        for kv_heads in (8, 32):
            width = (HEADS + 2 * kv_heads) * DIM
            for variant in VARIANTS:
                nbytes = 2 * itemsize * BATCH * LENGTH * width
                nbytes += itemsize * width if "bias" in variant else 0
                nbytes += itemsize * LENGTH * DIM if "tables" in variant else 0
                labels = {"op": "qkv_heads", "variant": variant, "dtype": dtype, "kv_heads": kv_heads}
                yield Work(labels, dict.fromkeys(("forward", "backward"), nbytes),
                           functools.partial(_make, dtype, kv_heads, variant))


def _make(dtype: str, kv_heads: int, variant: str) -> Made:
    width = (HEADS + 2 * kv_heads) * DIM
    qkv, bias = (torch.randn(*shape, width, device="cuda").to(getattr(torch, dtype)).requires_grad_()
                 for shape in ((BATCH, LENGTH), ()))
    frequencies = 10000.0 ** -(torch.arange(0, DIM, 2, device="cuda") / DIM)
    angles = torch.arange(LENGTH, device="cuda")[:, None] * frequencies
    tables = {"cos": angles.cos().to(qkv.dtype), "sin": angles.sin().to(qkv.dtype)}
    of_bias = {"bias": bias} if "bias" in variant else {}
    rotation = {} if variant == "bias" else tables
    of_ours = {"base": 10000.0} if "computed" in variant else rotation
    return Made(functools.partial(fusionrt.qkv_heads, qkv, HEADS, kv_heads, **of_bias, **of_ours),
                functools.partial(reference.qkv_heads, qkv, HEADS, kv_heads, **of_bias, **rotation),
                [qkv, *of_bias.values()])


if __name__ == "__main__":
    main()
