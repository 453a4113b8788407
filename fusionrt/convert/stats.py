"""What a conversion did and what it gained: counted and measured, None where it was not."""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from typing import Any

import torch
from torch.nn import Module

from fusionrt.bench import memory, profile
from fusionrt.convert.capture import Found, Options
from fusionrt.convert.inputs import Inputs
from fusionrt.convert.speed import call, device_of, times
from fusionrt.convert.undisturbed import undisturbed
from fusionrt.convert.validate import Verdict

# Key of conversion_stats -> what the passes call it.
COUNTS = {"linear_relu_replaced": "linear_relu", "linear_gelu_replaced": "linear_gelu",
          "conv_bn_relu_replaced": "conv_bn_relu", "layernorm_relu_replaced": "layernorm_relu",
          "attention_replaced": "attention", "norm_replaced": "norm",
          "pointwise_clusters": "pointwise_cluster"}
MEASURED = ("kernels_before", "kernels_after", "peak_memory_before", "peak_memory_after", "speedup_achieved")


@dataclasses.dataclass(frozen=True)
class Gain:
    """Kernels (with copies and fills) a call on a GPU; bytes at the peak of a call beyond what there was
    before, the memory that CUDA graphs keep included; us of a call among calls that follow each other."""

    kernels_before: float | None
    kernels_after: float | None
    peak_memory_before: int
    peak_memory_after: int
    us_before: float
    us_after: float
    inputs: str

    @property
    def speedup_achieved(self) -> float:
        return self.us_before / self.us_after


@dataclasses.dataclass
class Record:
    """Of one conversion: what a report shows, and what is kept beside saved weights."""

    model: str
    options: Options
    device: str
    dtype: str
    graphs: list[Found] = dataclasses.field(default_factory=list)
    verdict: Verdict | None = None
    rolled_back: dict[str, str] = dataclasses.field(default_factory=dict)   # what was undone, and why
    gain: Gain | None = None
    seconds: float = 0.0   # that converting and validating took

    @property
    def counts(self) -> Counter[str]:
        return sum((Counter(found.counts) for found in self.graphs), Counter())


def conversion_stats(record: Record) -> dict[str, Any]:
    """Counts are None before anything was captured, the rest where it was not measured."""
    counts = record.counts if record.graphs else None
    stats: dict[str, Any] = {key: None if counts is None else counts[name] for key, name in COUNTS.items()}
    stats["total_replaced"] = None if counts is None else counts.total()
    return {**stats, **{key: getattr(record.gain, key, None) for key in MEASURED}}


def measure(original: Module, converted: Module, inputs: Inputs, held: int = 0) -> Gain:
    """Both in evaluation mode without gradients, on one device. `held`: `held_by_graphs` before there was a
    converted module."""
    with undisturbed(original, converted):
        calls = {"original": call(original, inputs), "converted": call(converted, inputs)}
        device = device_of(converted)
        for one in calls.values():
            for _ in range(3):  # what is compiled or captured once
                one()
        graphs = max(0, held_by_graphs(device) - held)
        kernels = [profile.launches(one, device) for one in calls.values()]
        peaks = [memory.measure(one, device).peak for one in calls.values()]
        taken = times({"original": original, "converted": converted}, inputs)
    return Gain(kernels[0], kernels[1], peaks[0], peaks[1] + graphs, taken["original"], taken["converted"],
                inputs.describe())


def held_by_graphs(device: torch.device) -> int:
    """Bytes of the private pools of CUDA graphs: while a graph lives, what it needs is not given back."""
    if device.type != "cuda":
        return 0
    gc.collect()
    return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot()
               if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0))
