"""From a loaded kernel to a Python callable of an operator's arguments, written as straight text.

Everything that is the same in each call lies ready in memory: between two products of matrices, which leave
nothing of the interpreter in a processor's caches, a list comprehension costs 5 us, a call of a function 10.
That memory belongs to the callable, and the callable to one thread, as the kernel reads it without the
interpreter's lock.
"""

import ctypes
import functools
import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fusionrt import settling
from fusionrt.cpu import pages, team, threads
from fusionrt.cpu.compiler import Function
from fusionrt.cpu.signature import Signature
from fusionrt.problem import Output, Problem
from fusionrt.texts import Lines


class Arguments:
    """Of a kernel, in memory: addresses and numbers of each call, integers of all calls but for a few."""

    def __init__(self, pointers: Sequence[str], integers: Mapping[str, int], scalars: Sequence[str]) -> None:
        self.signature = Signature(tuple(pointers), tuple(integers), tuple(scalars))
        self.integers_at, self.scalars_at = self.signature.begins
        self.memory = ctypes.create_string_buffer(self.scalars_at + 8 * len(scalars))
        first = ctypes.addressof(self.memory)
        self.addresses = first, first + self.integers_at, first + self.scalars_at
        self.pack_pointers = struct.Struct(f"={len(pointers)}Q").pack_into
        self.pack_scalars = struct.Struct(f"={len(scalars)}d").pack_into
        struct.pack_into(f"={len(integers)}q", self.memory, self.integers_at, *integers.values())

    def place(self, integer: str) -> int:
        """The byte that it begins at."""
        return self.integers_at + 8 * self.signature.integers.index(integer)

    def put(self, integer: str, value: int) -> None:
        struct.pack_into("=q", self.memory, self.place(integer), value)

    def integers_now(self) -> dict[str, int]:
        names = self.signature.integers
        return dict(zip(names, struct.unpack_from(f"={len(names)}q", self.memory, self.integers_at),
                        strict=True))


def pays(elements: int) -> bool:
    """Whether several threads are worth while for so many additions."""
    return elements >= (team if team.usable() else threads).SERIAL_BELOW


class Division:
    """Of a range among threads: OpenMP's, or a pool's where there are none."""

    def __init__(self, run: Function, arguments: Arguments, size: int, grain: int, parallel: bool) -> None:
        self.kernel, self.arguments, self.is_parallel = run, arguments, parallel
        self.size, self.grain, self.threads, self.chunk, self.tasks = size, grain, 0, size, 1
        self.job: team.Job | None = None

    def by(self, n_threads: int) -> None:
        self.threads, self.chunk = n_threads, -(-self.size // (n_threads * self.grain)) * self.grain
        self.tasks = -(-self.size // self.chunk)
        if "chunk" in self.arguments.signature.integers:
            self.arguments.put("chunk", self.chunk)
        if self.job is None and n_threads > 1 and team.usable():
            self.job = team.Job(*team.answers(), self.kernel.address, self.kernel.scratch,
                                *self.arguments.addresses, self.size)
        if self.job is not None:
            self.job.chunk = self.chunk

    def run(self) -> None:
        if self.job is not None and team.usable():
            self.job(self.threads)
        else:
            threads.run(self._part, self.tasks, self.threads > 1, grain=1)

    def _part(self, first: int, last: int) -> None:
        for t in range(first, last):
            self.kernel(self.arguments.addresses, t * self.chunk, min((t + 1) * self.chunk, self.size))


class Memory(NamedTuple):
    """That nobody but the kernel sees."""

    name: str
    size: int          # elements
    dtype: torch.dtype
    each: bool = False  # so many for each task


class PlanText(Lines):
    """The body of the callable, and what its names refer to."""

    def __init__(self, problem: Problem, results: Sequence[Output], run: Function, arguments: Arguments
                 ) -> None:
        super().__init__(pack_pointers=arguments.pack_pointers, pack_scalars=arguments.pack_scalars,
                         memory=arguments.memory, call=run.call)
        self.problem, self.results, self.kernel, self.arguments = problem, results, run, arguments
        self.returned: list[str] = []
        self.of_kernel: list[Memory] = []
        self.is_launch_alone = not any(pages.is_large(r.shape, r.strides, r.dtype) for r in results)
        for k, result in enumerate(results):
            self.returned.append(f"out{k}" if result.into is None else f"a{result.into}")
            self.is_launch_alone &= result.into is None
            if result.into is None:
                self.scope[f"new{k}"] = pages.allocator(result.shape, result.strides, result.dtype)
                self.lines.append(f"out{k} = new{k}()")
        operands = [*(o.name for o in problem.inputs), *self.returned]
        self.pointers = {name: f"{operand}.data_ptr()" for name, operand in zip(
            arguments.signature.pointers, operands, strict=False)}  # what follows is scratch

    def draw(self) -> None:
        """Random numbers, the last argument of the callable, as the integers `seed` and `offset`."""
        self.scope |= {"random": _random, "pack_random": struct.Struct("=2Q").pack_into}
        self.lines.append(f"pack_random(memory, {self.arguments.place('seed')}, *random(rng))")

    def divide(self, size: int, parallel: bool, grain: int) -> None:
        """[0, size) is worked on by all threads if it is `parallel`, in chunks of multiples of `grain`. A
        kernel that wants to know how long they are has an integer `chunk`.

        From here on the text knows `division`: its chunk, and how many there are (tasks)."""
        self.division = Division(self.kernel, self.arguments, size, grain, parallel)
        self.scope |= {"division": self.division, "n_threads": torch.get_num_threads}
        if parallel:
            self.lines.append("if n_threads() != division.threads: division.by(n_threads())")
        else:
            self.division.by(1)

    def scratch(self, size: int, places: Mapping[str, int]) -> None:
        """Memory of `size` bytes for each task; pointers are the `places` within the first one's."""
        self.scope["scratch_of"] = functools.partial(torch.empty, dtype=torch.uint8, device="cpu")
        self.of_kernel.append(Memory("scratch", size, torch.uint8, each=True))
        self.lines.append(f"scratch = scratch_of({self.name(size)} * division.tasks)")
        self.pointers |= {name: f"scratch.data_ptr() + {place}" for name, place in places.items()}

    def memory_of_tasks(self, size: int) -> None:
        """Of so many float64 numbers, known as `own`."""
        self.scope["own_memory"] = functools.partial(torch.empty, size, dtype=torch.float64, device="cpu")
        self.of_kernel.append(Memory("own", size, torch.float64))
        self.lines.append("own = own_memory()")

    def launch_tasks(self, tasks: int, kept: Mapping[int, int], buffers: Sequence[str] = (), size: int = 0,
                     joins: bool = False) -> None:
        """Each has memory of its own for the sums of some results, `kept[k]` numbers of result k, which are
        added up in the end, if there are several or a single one `joins`, and for `buffers` of `size` bytes.
        """
        self.is_launch_alone &= not kept
        ends = list(itertools.accumulate((tasks * n for n in kept.values()), initial=0))
        self.memory_of_tasks(ends[-1] + tasks * len(buffers) * size // 8)
        for k, place in zip(kept, ends, strict=False):
            self.pointers[self.problem.outputs[k].name] = f"own.data_ptr() + {8 * place}"
        self.pointers |= {name: f"own.data_ptr() + {8 * ends[-1] + k * tasks * size}"
                          for k, name in enumerate(buffers)}
        self.launch()
        if kept and (tasks > 1 or joins):
            self.launch_alone(tasks, tasks + 1)
        for k, place in zip(kept, ends, strict=False):
            result = self.results[k]
            seen = f"own.as_strided({', '.join(map(self.name, (result.shape, result.walk_strides, place)))})"
            self.lines.append(f"{self.returned[k]}.copy_({seen})")

    def launch(self) -> None:
        known, d = {"row_size": float(self.problem.row_size)}, self.division
        takes = self.arguments.signature
        self.addresses = [self.pointers[name] for name in takes.pointers]
        self.numbers: list[str | float] = [known.get(name, name) for name in takes.scalars]
        self.lines.append(f"pack_pointers(memory, 0, {', '.join(map(self.spelled, self.addresses))})")
        if self.numbers:
            numbers = ", ".join(map(self.spelled, self.numbers))
            self.lines.append(f"pack_scalars(memory, {self.arguments.scalars_at}, {numbers})")
        if d.threads:  # one, always
            self.launch_alone(0, d.size)
        else:
            self.lines.append("division.run()")

    def launch_alone(self, start: int, stop: int) -> None:
        """For a part of the range, after `launch`, with what it was given."""
        given = (self.kernel.scratch, self.kernel.scratch, *self.arguments.addresses, start, stop)
        self.lines.append(f"call({', '.join(map(self.name, given))})")

    def compile(self, n_args: int, another: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """`another` does all this again: see `Lines.function`."""
        names = [f"a{k}" for k in range(n_args)] + ["rng"] * self.problem.draws
        self.lines.append("return " + ", ".join(self.returned))
        made = self.function(names, another=another)
        if not self.is_launch_alone:
            return made
        return settling.prepare_settling(made, lambda: self._machine_code(made, names))

    def _machine_code(self, general: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
        from fusionrt.cpu.settled import machine_code  # which most processes do not call

        results = dict(zip(self.returned, self.results, strict=True))
        return machine_code(general, names, results, self.of_kernel, self.division, self.addresses,
                            bool(self.problem.streams), self.numbers)


def _random(rng: tuple[int, int, torch.Tensor | None]) -> tuple[int, int]:
    seed, offset = rng[:2] if rng[2] is None else rng[2].tolist()
    return seed % 2**64, offset % 2**64
