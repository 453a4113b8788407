"""How long modules take, measured in turns."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch.nn import Module

from fusionrt.bench import timing
from fusionrt.convert.inputs import Inputs

BUDGET = 0.5e6  # us of one module's calls on a GPU; on a CPU a little more


def call(module: Module, inputs: Inputs) -> timing.Call:
    """With arguments of its own: a cache grows by every call."""
    args, kwargs = inputs.fresh()
    return functools.partial(module, *args, **kwargs)


def device_of(module: Module) -> torch.device:
    tensors = [*module.parameters(), *module.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


def times(modules: Mapping[str, Module], inputs: Inputs) -> dict[str, float]:
    """Microseconds a call, taking turns: of a call on a CPU, of calls that follow each other on a GPU."""
    calls = {name: call(module, inputs) for name, module in modules.items()}
    for one in calls.values():
        one()
    if any(device_of(module).type == "cuda" for module in modules.values()):
        longest = max(t.us for t in timing.latency(calls, rounds=3).values())
        n = max(2, min(timing.BURST, int(BUDGET / 7 / longest)))
        return {name: burst.wall.us for name, burst in timing.bursts(calls, n, rounds=7).items()}
    longest = max(t.us for t in timing.cpu(calls, rounds=1, uncounted=0).values())
    rounds = max(3, min(15, int(BUDGET * 4 / 3 / longest)))
    return {name: t.us for name, t in timing.cpu(calls, rounds, uncounted=min(0.02, longest / 1e6)).items()}
