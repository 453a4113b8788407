"""What runs inside a call: device time per kernel, and what the compiler made of our own kernels."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity
from torch.utils import _pytree as pytree

from fusionrt.rehearsal import collecting
from fusionrt.runtime import compiler, launch
from fusionrt.runtime import device as cuda

OUTSIDE = "outside of torch's ops: fused kernels, Python"


class KernelTime(NamedTuple):
    """A kernel, copy or fill on a GPU; on a CPU an op of torch's, without the ops that it calls, or what
    takes time beside them."""

    name: str
    us: float         # in all, a call of the function
    launches: float   # a call of the function


def kernels(call: Callable[[], object], device: torch.device, calls: int = 10) -> list[KernelTime]:
    """What `call` runs, the longest first, by torch's profiler. It should have been warmed up.

    Sees every kernel of the process, whoever launched it, and so everything that other threads run.

        for kernel in kernels(lambda: model(x), torch.device("cuda")): print(kernel)
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        _start_profiler()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(calls):
            with contextlib.nullcontext() if on_gpu else torch.profiler.record_function(OUTSIDE):
                call()
        if on_gpu:
            torch.cuda.synchronize(device)
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    found = [KernelTime(e.key, (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / calls,
                        e.count / calls)
             for e in profiler.key_averages()
             if e.device_type == wanted and (e.key == OUTSIDE or not getattr(e, "is_user_annotation", False))]
    return sorted((k for k in found if k.us > 0), key=lambda k: -k.us)


@functools.cache
def _start_profiler() -> None:
    """The first profile of a process may miss kernels that run while CUPTI starts."""
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]):
        torch.zeros(1, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()


def launches(call: Callable[[], object], device: torch.device) -> float | None:
    """Kernels, copies and fills that a call runs on a GPU; None on a CPU, where nobody counts them."""
    if device.type != "cuda":
        return None
    return sum(kernel.launches for kernel in kernels(call, device, calls=4))


# -- our own kernels ---------------------------------------------------------------------------------

class Resources(NamedTuple):
    """What a compiled kernel takes, from the log of its compilation."""

    kernel: str
    entry: str
    arch: str
    block: int         # threads
    registers: int     # a thread
    shared: int        # bytes a block
    local: int         # bytes of stack a thread, spilled registers among them
    spills: int        # bytes stored
    occupancy: float   # warps an SM can hold of this kernel / warps that it can hold at all


def resources(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None,
              arch: str | None = None, backward: bool = False) -> list[Resources]:
    """The kernels that a call of one of our ops, or of a fused function, needs; it is not run.

    What is not in the kernel cache is compiled, which needs no GPU. `arch`: as "sm_90"; default: the
    current GPU's. `backward`: the gradient's kernels too, for those arguments that require one.

    Raises ValueError for a function that is not ours, and without `arch` where there is no GPU.

        resources(fusionrt.bias_gelu, (x, bias), arch="sm_90")[0].registers
    """
    if arch is None:
        if not torch.cuda.is_available():
            raise ValueError("resources: there is no GPU; say for which arch, for instance 'sm_90'")
        arch = cuda.architecture(torch.cuda.current_device())
    args, more = pytree.tree_map(_meta, (tuple(args), dict(kwargs or {})))
    with collecting("cuda", compiler.has_clusters(arch)) as problems:
        out = function(*args, **more)
        if backward:
            results = [t for t in pytree.tree_leaves(out) if t.requires_grad]
            torch.autograd.backward(results, [torch.empty_like(t) for t in results])
    if not problems:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(f"resources: {name} runs no kernel of ours; an op or a fused function is expected")
    return [_compiled(source.text, source.entry, arch, problem.name)
            for problem in problems for source in launch.sources(problem)]


def _meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta",
                               requires_grad=value.requires_grad)


def _compiled(text: str, entry: str, arch: str, name: str) -> Resources:
    log = compiler.cubin(text, entry, arch, name)[0].metadata
    declared = re.search(r"constexpr int BLOCK = (\d+)", text)
    if declared is None:
        raise ValueError(f"resources: the text of {name} declares no BLOCK")
    block = int(declared[1])
    return Resources(name, entry, arch, block, log["registers"], log["shared"], log["stack"], log["spills"],
                     occupancy(arch, block, log["registers"], log["shared"]))


class _Limits(NamedTuple):
    """Of one SM: CUDA C++ Programming Guide, technical specifications per compute capability."""

    warps: int
    blocks: int
    shared: int     # KiB
    reserved: int   # bytes of shared memory a block that the driver takes


_LIMITS = {"sm_75": _Limits(32, 16, 64, 0), "sm_80": _Limits(64, 32, 164, 1024),
           "sm_86": _Limits(48, 16, 100, 1024), "sm_89": _Limits(48, 24, 100, 1024),
           "sm_90": _Limits(64, 32, 228, 1024), "sm_100": _Limits(64, 32, 228, 1024),
           "sm_103": _Limits(64, 32, 228, 1024), "sm_120": _Limits(48, 24, 100, 1024)}
REGISTERS, REGISTER_UNIT, SHARED_UNIT, SCHEDULERS = 65536, 256, 128, 4


def occupancy(arch: str, block: int, registers: int, shared: int = 0) -> float:
    """Fraction of an SM's warps that blocks of `block` threads can fill: warps, blocks, registers
    (given out by the warp, in units of 256) and shared memory are what there is little of.

    Raises ValueError for an architecture whose limits are not known.

        occupancy("sm_90", block=256, registers=64)    # 0.5
    """
    if arch.rstrip("af") not in _LIMITS:
        raise ValueError(f"occupancy: no limits of {arch!r} are known; there are {', '.join(_LIMITS)}")
    limits, warps = _LIMITS[arch.rstrip("af")], -(-block // 32)
    held = [limits.warps // warps, limits.blocks]
    if registers:
        by_registers = REGISTERS // _round_up(32 * registers, REGISTER_UNIT)
        held.append(by_registers // SCHEDULERS * SCHEDULERS // warps)
    if shared or limits.reserved:
        held.append(limits.shared * 1024 // _round_up(shared + limits.reserved, SHARED_UNIT))
    return min(held) * warps / limits.warps


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
