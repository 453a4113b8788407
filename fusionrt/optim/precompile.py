"""The kernels that optimizers of usual options need, for a warm-up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from fusionrt.optim import kernels
from fusionrt.optim.adam import Adam, AdamW
from fusionrt.optim.kernels import Kind
from fusionrt.optim.lion import Lion
from fusionrt.optim.quantised import SMALLEST
from fusionrt.optim.sgd import SGD
from fusionrt.rehearsal import Source

USUAL: tuple[tuple[Any, dict[str, Any]], ...] = (  # a class, options
    (AdamW, {}), (Adam, {}), (SGD, {}), (SGD, {"momentum": 0.9}), (SGD, {"momentum": 0.9, "nesterov": True}),
    (Lion, {}))
HALF = ("float16", "bfloat16")


def kinds(dtypes: Iterable[str], state_dtypes: Sequence[Any] = (None,)) -> Iterator[Kind]:
    """Those of `USUAL`, with master weights too for 16 bits, of `clip_grad_norm_` and of `ema_update_`."""
    for dtype in dtypes:
        param = torch.nn.Parameter(torch.empty(SMALLEST, dtype=getattr(torch, dtype), device="cpu"))
        for rule, options in USUAL:
            for state_dtype in state_dtypes if dtype != "float64" else (None,):
                for master in (False, True) if dtype in HALF else (False,):
                    made = rule([param], **options, state_dtype=state_dtype, master_weights=master)
                    yield made._kind(made.param_groups[0], param, "parameter")[0]
        yield Kind("SCALE", dtype, dtype)
        yield Kind("AVERAGE", dtype, dtype)
        if dtype in HALF:
            yield Kind("AVERAGE", "float32", dtype)


def gpu_kernels(dtypes: Iterable[str], state_dtypes: Sequence[Any] = (None,)) -> list[Any]:
    """Each once."""
    dtypes = list(dtypes)
    found = {norm_kernel.text: norm_kernel for norm_kernel in map(kernels.norm_kernel, dtypes)}
    for kind in kinds(dtypes, state_dtypes):
        made = [kernels.step_kernel(kind)]
        if kind.rule != "AVERAGE":
            made.append(kernels.prepare_kernel(kind, maximize=False))
        found |= {kernel.text: kernel for kernel in made}
    return list(found.values())


def sources(device_type: str, dtypes: Iterable[str]) -> list[Source]:
    """What fusionrt.warmup compiles: for "cuda" or "cpu"."""
    if device_type == "cuda":
        return [Source(kernel.text, kernel.stem, kernel.name) for kernel in gpu_kernels(dtypes)]
    dtypes = list(dtypes)
    found = [kernels.cpu_norm(dtype) for dtype in dtypes]
    for kind in kinds(dtypes):
        found.append(kernels.cpu_step(kind))
        if kind.rule != "AVERAGE":
            found.append(kernels.cpu_prepare(kind))
    return [Source(kernel.text, kernel.accuracy, kernel.name) for kernel in dict.fromkeys(found)]
