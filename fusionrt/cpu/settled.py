"""A call of a kernel in machine code, like a GPU's (runtime/native.py), where there is nothing else to do:
what is launched is the kernel itself, by one thread or by the team (kernels_src/run_cpu.ll)."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fusionrt.cpu import pages, team
from fusionrt.runtime import llvm, native, source
from fusionrt.runtime.plan import Allocated, Launched, Plan

if TYPE_CHECKING:
    from fusionrt.cpu.calling import Division, Memory
    from fusionrt.problem import Output


class Job(team.Job):
    """What kernels_src/run_cpu.ll runs: by GOMP_parallel and what a thread of the team does; of one thread
    these are absent. Integers and scalars begin so many bytes behind a call's addresses."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("parallel", "member")),
                *((name, ctypes.c_uint32) for name in ("threads", "integers_at", "scalars_at")),
                ("forked", ctypes.c_void_p))


def machine_code(general: Callable[..., Any], arguments: Sequence[str], results: Mapping[str, Output],
                 of_kernel: Sequence[Memory], division: Division, pointers: Sequence[str], draws: bool,
                 numbers: Sequence[str | float]) -> Callable[..., Any]:
    """`general`, for as many threads as there are now. `pointers` and `numbers`: of the kernel, as text;
    whether it `draws` random numbers, whose seed and offset are of each call."""
    now = torch.get_num_threads()
    if division.is_parallel and division.threads != now:
        division.by(now)
    if division.tasks > 1 and not team.usable():
        return general
    integers: dict[str, Any] = division.arguments.integers_now()
    if draws:
        integers |= {"seed": native.SEED, "offset": native.OFFSET}
    formats = "Q" * len(pointers) + "q" * len(integers) + "d" * len(numbers)
    params = source.Params([source.Field("", format) for format in formats])
    allocated = [Allocated(name, r.shape, r.strides, r.dtype) for name, r in results.items()]
    allocated += [Allocated(m.name, (m.size * (division.tasks if m.each else 1),), (1,), m.dtype)
                  for m in of_kernel]
    job = _job(division)
    launched = Launched(ctypes.addressof(job), 0, 0, 0, 0, params, [*pointers, *integers.values(), *numbers],
                        len(allocated), owned=job)
    return native.machine_code(Plan(
        general, arguments, allocated, list(results), [launched], 0, threading.get_ident(),
        {"empty": pages.empty_strided}, still=(torch.get_num_threads, now) if division.is_parallel else None,
        driver=(_run(), None)))


def _job(division: Division) -> Job:
    kernel, arguments, several = division.kernel, division.arguments, division.tasks > 1
    job = Job(*(team.answers() if several else ()), kernel=kernel.address, scratch=kernel.scratch,
              size=division.size, chunk=division.chunk, threads=division.threads if several else 1,
              integers_at=arguments.integers_at, scalars_at=arguments.scalars_at)
    if several:
        job.parallel, job.member = team.parallel_address(), team.member()
        job.forked = ctypes.addressof(team.forked)
    return job


@functools.cache
def _run() -> int:
    return llvm.compiled(source.template("run_cpu.ll"), "run_cpu")
