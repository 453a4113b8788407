"""Exponential moving averages of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusionrt.arguments import as_float, as_tensors
from fusionrt.cpu.team import torch_alone
from fusionrt.dtypes import FLOATS, name_of
from fusionrt.laid import is_lazy
from fusionrt.optim import kernels
from fusionrt.optim.kernels import Coefficients, Kind
from fusionrt.optim.state import is_dense
from fusionrt.optim.table import CAPACITY, shared_table


@torch._disable_dynamo
@torch.no_grad()
def ema_update_(averages: Iterable[torch.Tensor], values: Iterable[torch.Tensor], decay: float) -> None:
    """average = decay average + (1 - decay) value, for all pairs in one launch for each pair of dtypes.

    The averages of torch.optim.swa_utils.get_ema_multi_avg_fn; they may be wider than the values, such as
    float32 averages of bfloat16 parameters. Integers, as batch norm's counter, are copied. Raises ValueError
    if a pair differs in shape or device, or `decay` is outside of [0, 1], TypeError for what is no tensor and
    for complex values of real averages.

        fusionrt.optim.ema_update_(shadow.parameters(), model.parameters(), 0.999)
    """
    decay = as_float("ema_update_", "decay", decay)
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"ema_update_: decay must be in [0, 1], got {decay}")
    chosen: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    averages = as_tensors("ema_update_", "averages", averages)
    values = as_tensors("ema_update_", "values", values)
    if len(averages) != len(values):
        raise ValueError(f"ema_update_: averages and values must be as many, got {len(averages)} and "
                         f"{len(values)}")
    for index, (average, value) in enumerate(zip(averages, values, strict=True)):
        if value.is_complex() and not average.is_complex():
            raise TypeError(f"ema_update_: pair {index} has an average of {average.dtype} and a value of "
                            f"{value.dtype}, whose imaginary part would be lost")
        if average.shape != value.shape or average.device != value.device:
            raise ValueError(f"ema_update_: pair {index} must agree, got an average of shape "
                             f"{tuple(average.shape)} on {average.device} and a value of shape "
                             f"{tuple(value.shape)} on {value.device}")
        if _fits(average, value):
            chosen.setdefault((average.device, average.dtype, value.dtype), []).append((average, value))
        else:
            others.append((average, value))
    for average, value in others:
        _by_torch(average, value, decay)
    for (_, of_average, of_value), pairs in chosen.items():
        kind = Kind("AVERAGE", name_of(of_average), name_of(of_value))
        for start in range(0, len(pairs), CAPACITY):
            _launch(kind, pairs[start:start + CAPACITY], decay)
        torch.autograd.graph.increment_version([average for average, _ in pairs])


def get_ema_multi_avg_fn(decay: float = 0.999) -> Callable[..., None]:
    """What torch.optim.swa_utils.AveragedModel takes as `multi_avg_fn`, as torch's function of that name.

        averaged = AveragedModel(model, multi_avg_fn=fusionrt.optim.get_ema_multi_avg_fn(0.999))
    """
    decay = as_float("get_ema_multi_avg_fn", "decay", decay)
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"get_ema_multi_avg_fn: decay must be in [0, 1], got {decay}")

    def update(averaged: Iterable[torch.Tensor], current: Iterable[torch.Tensor], num_averaged: Any) -> None:
        ema_update_(averaged, current, decay)

    return update


def _fits(average: torch.Tensor, value: torch.Tensor) -> bool:
    return (average.dtype in FLOATS and value.dtype in FLOATS and average.device.type in ("cpu", "cuda")
            and (average.dtype == torch.float64 or value.dtype != torch.float64)
            and average.stride() == value.stride() and not (is_lazy(average) or is_lazy(value))
            and (average.is_contiguous() or is_dense(average))
            and not is_traceable_wrapper_subclass(average) and not is_traceable_wrapper_subclass(value))


@torch_alone()
def _by_torch(average: torch.Tensor, value: torch.Tensor, decay: float) -> None:
    if average.is_floating_point() or average.is_complex():
        average.lerp_(value.to(average.dtype), 1 - decay)
    else:
        average.copy_(value)


def _launch(kind: Kind, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], decay: float) -> None:
    table = shared_table(pairs[0][0].device, tuple(average.data_ptr() for average, _ in pairs),
                         tuple(average.numel() for average, _ in pairs))
    coefficients = Coefficients(beta1=decay, weight1=1 - decay)
    kernels.step(table, kind, [value.data_ptr() for _, value in pairs], coefficients)
