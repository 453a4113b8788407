"""A kernel over several cores by the OpenMP threads that torch's own operators use.

They spin for a while after each parallel region, so that a hand-over costs 2 us where waking a Python
thread costs 30 to 50. A dozen lines of LLVM stand between OpenMP's calling convention and the kernels'.

GNU OpenMP's threads do not survive a fork, and a forked child's first region hangs or aborts:
`usable` is false there, and wherever torch does not bring GNU OpenMP along. torch's own operators hang there
as well, unless they are `torch_alone`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fusionrt.cpu.signature import Signature
from fusionrt.forks import in_child, without_exec
from fusionrt.properties import kept_property

SERIAL_BELOW = 1 << 15  # elements, as torch's: 4 us of additions, where handing over costs 2

forked = ctypes.c_int32(without_exec())  # also before this module was imported; machine code looks at it


def _note_fork() -> None:
    forked.value = True


in_child(_note_fork)


def usable() -> bool:
    return not forked.value and _parallel() is not None


@contextlib.contextmanager
def torch_alone() -> Iterator[None]:
    """torch's operators by one thread where a fork has lost the others, for which they would wait."""
    threads = torch.get_num_threads()
    if not forked.value or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_QUESTIONS = ("omp_get_thread_num", "omp_get_num_threads")


@functools.cache
def _parallel() -> Any:
    """GOMP_parallel(function, data, threads, flags) of the library that torch loaded."""
    process = ctypes.CDLL(None)
    if not all(hasattr(process, name) for name in ("GOMP_parallel", *_QUESTIONS)):
        return None
    parallel = process.GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


def parallel_address() -> int:
    return ctypes.cast(_parallel(), ctypes.c_void_p).value or 0


@functools.cache
def answers() -> tuple[int, ...]:
    """Where the team's threads ask, as a job begins."""
    process = ctypes.CDLL(None)
    return tuple(ctypes.cast(getattr(process, q), ctypes.c_void_p).value or 0 for q in _QUESTIONS)


class Job(ctypes.Structure):
    """kernel(scratch, scratch, pointers, integers, scalars, start, stop) over chunks of a range, by a team of
    threads."""

    _fields_ = (*((name, ctypes.c_void_p) for name in (
                    *_QUESTIONS, "kernel", "scratch", *Signature._fields)),
                *((name, ctypes.c_int64) for name in ("size", "chunk")))

    @kept_property
    def _start(self) -> Callable[[int, int], None]:
        return functools.partial(_parallel(), member(), ctypes.addressof(self))

    def __call__(self, threads: int) -> None:
        self._start(threads, 0)


def run(kernel: int, scratch: int, addresses: Sequence[int], size: int, grain: int) -> None:
    """A job over [0, size) that comes once, by torch.get_num_threads()."""
    threads = torch.get_num_threads()
    Job(*answers(), kernel, scratch, *addresses, size, -(-size // (threads * grain)) * grain)(threads)


@functools.cache
def member() -> int:
    """Address of void member(Job *job): chunks of the range for one thread of the team.

    A team may be smaller than was asked for, hence the loop over chunks.
    """
    from llvmlite import ir

    from fusionrt.runtime import llvm
    i32, i64, void = ir.IntType(32), ir.IntType(64), ir.VoidType()
    asks, kernel_type = ir.FunctionType(i32, []), ir.FunctionType(i32, [i64] * 7)
    module = ir.Module("fusionrt_team")
    function = ir.Function(module, ir.FunctionType(void, [i64.as_pointer()]), "member")
    entry, loop, body, done = (function.append_basic_block(n) for n in ("entry", "loop", "body", "done"))
    b = ir.IRBuilder(entry)
    places = {name: getattr(Job, name).offset // 8 for name, *_ in Job._fields_}
    job = {name: b.load(b.gep(function.args[0], [ir.Constant(i64, k)])) for name, k in places.items()}
    number, count = (b.zext(b.call(b.inttoptr(job[q], asks.as_pointer()), []), i64) for q in _QUESTIONS)
    size, chunk = job["size"], job["chunk"]
    first = b.mul(number, chunk)
    b.branch(loop)
    b.position_at_end(loop)
    start = b.phi(i64)
    start.add_incoming(first, entry)
    b.cbranch(b.icmp_signed("<", start, size), body, done)
    b.position_at_end(body)
    end = b.add(start, chunk)
    stop = b.select(b.icmp_signed("<", end, size), end, size)
    b.call(b.inttoptr(job["kernel"], kernel_type.as_pointer()),
           [job["scratch"], job["scratch"], *(job[name] for name in Signature._fields), start, stop])
    start.add_incoming(b.add(start, b.mul(count, chunk)), body)
    b.branch(loop)
    b.position_at_end(done)
    b.ret_void()
    return llvm.compiled(str(module), "member", effort=0)
