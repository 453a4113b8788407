"""Numbers of GPU kernels without a GPU: their text compiled as C++, their threads fibers of one CPU thread.

The runtime plans, packs parameters and launches as ever; what would ask a GPU or its driver asks `Machine`.

    with emulation(machine, monkeypatch) as gpu:
        gpu.run(function)    # `function()`, in a thread in which tensors of the CPU count as a GPU's

Plans are made for that thread alone, as what the package knows of calls it keeps by thread; machine code, in
which they settle, launches by `Machine` as well. Faults that end
a launch: a pack that is not aligned, an access beside a tensor, lanes that wait for others in vain, an
instruction that cuda.h does not have.

Not emulated: blocks that wait for each other (cooperative launches, clusters), tensor cores, the copy engine,
launches that overlap, races within a warp, the accuracy of approximate instructions, time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import fusionrt
from fusionrt import rehearsal, settling
from fusionrt.op import Operator
from fusionrt.runtime import arrivals, launch, native, plan_text, scratch
from fusionrt.runtime import device as cuda

from .machine import ARCHITECTURE, NUMBER, KernelFault, Machine, missing

__all__ = ["KernelFault", "Machine", "emulation", "missing"]
MULTIPROCESSORS = 46  # no number that anything is cut for
_here = threading.local()


def is_on() -> bool:
    """Whether this thread's tensors are the emulated GPU's."""
    return getattr(_here, "is_on", False)


class Emulated:
    """The GPU that a test sees."""

    def __init__(self, machine: Machine) -> None:
        self.guarded, self.launched = machine.memory.guarded, machine.launched

    def run(self, function: Callable[[], Any]) -> Any:
        def called() -> Any:
            _here.is_on = True
            return function()

        self.launched.clear()
        with ThreadPoolExecutor(1) as fresh:
            return fresh.submit(called).result()


@contextlib.contextmanager
def emulation(machine: Machine, patch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """All is as it was when `patch` is undone."""
    _import_everything()
    _patch_driver(machine, patch)
    _patch_torch(machine, patch)
    _patch_operators(patch)
    yield Emulated(machine)


@functools.cache
def _import_everything() -> None:
    """A module that is imported later would keep what it finds in the place of the runtime's functions."""
    for folder in ("runtime", "ops", "data", "optim"):
        package = importlib.import_module(f"fusionrt.{folder}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"fusionrt.{folder}.{module.name}")


def _patch_everywhere(patch: pytest.MonkeyPatch, made: dict[Any, Any]) -> None:
    """`made` in the place of functions, also where they were imported by name."""
    found = {id(function): other for function, other in made.items()}
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == fusionrt.__name__]:
        for name, value in list(vars(module).items()):
            if id(value) in found:
                patch.setattr(module, name, found[id(value)])


def _patch_driver(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    answers = {
        cuda.driver: machine, cuda.architecture: ARCHITECTURE, cuda.multiprocessors: MULTIPROCESSORS,
        cuda.has_dependent_launches: False, cuda.has_clusters: False, cuda.clusters_on: False,
        cuda.device_count: 1, cuda.allow: None, cuda.bind_context: None, cuda.raw_stream: 0,
        cuda.shared_bytes: (0, 0)}  # of which kernels whose blocks wait for each other need some
    _patch_everywhere(patch, {
        **{asked: lambda *_, answer=answer: answer for asked, answer in answers.items()},
        cuda.function: lambda *args, **more: machine.function(*args, **more),
        cuda.memory: machine.memory_of_process, cuda.zeros: machine.memory_of_process})
    patch.setattr(native, "_driver", machine.addresses)
    patch.setattr(arrivals, "_free", {})
    patch.setattr(scratch, "_pieces", {})
    patch.setattr(plan_text, "empty_strided", machine.memory.empty_strided)


def _patch_torch(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "current_device", lambda: NUMBER)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    real: Any = torch.Tensor.is_cuda
    patch.setattr(torch.Tensor, "is_cuda", property(lambda t: is_on() or real.__get__(t)))
    for name in ("empty", "empty_like"):  # by which structured ops allocate
        patch.setattr(torch, name, _guarding(machine, getattr(torch, name)))


def _guarding(machine: Machine, real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = real(*args, **kwargs)
        if not is_on() or made.device.type != "cpu" or not made.numel():
            return made
        return machine.memory.empty_strided(made.shape, made.stride(), made.dtype)

    return allocate


def _patch_operators(patch: pytest.MonkeyPatch) -> None:
    real_type, real_compile = rehearsal.device_type, Operator.compile

    def device_type(tensor: torch.Tensor) -> str:
        found = real_type(tensor)
        return "cuda" if is_on() and found == "cpu" else found

    def compile(op: Operator, args: Any, shape: Any, problem: Any, outputs: Any, alignment: int) -> Any:
        tensor = next(a for a in args if isinstance(a, torch.Tensor))
        if not is_on() or tensor.device.type != "cpu":
            return real_compile(op, args, shape, problem, outputs, alignment)
        return launch.build(launch.Call(problem, outputs, len(args), NUMBER), alignment, op.misaligned)

    _patch_everywhere(patch, {real_type: device_type})
    patch.setattr(Operator, "compile", compile)
    patch.setattr(settling, "SETTLED_AFTER", math.inf)  # unless a test wants machine code
