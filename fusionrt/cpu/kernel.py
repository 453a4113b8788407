"""A CPU kernel of a text of its own: what is no expression."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import torch

from fusionrt import rehearsal
from fusionrt.cpu import compiler, team, threads
from fusionrt.cpu.calling import pays


class Kernel:
    """`text` is a function in the words of `memory.scope(accuracy)`:

        def kernel(pointers, integers, scalars, start, stop):
            x = float32_at(pointers[0])
            for i in range(start, stop):
                x[i] *= acc_t(scalars[0])

    It works on [start, stop) of a range, which several threads share; it may be called twice with parts that
    it has to leave independent of each other. Make each once (functools.cache).
    """

    def __init__(self, name: str, text: str, accuracy: str = "float32") -> None:
        self.name, self.text, self.accuracy = name, text, accuracy

    @functools.cached_property
    def _function(self) -> compiler.Function:
        return compiler.function(self.text, self.accuracy, self.name)

    def __call__(self, device: torch.device, size: int, pointers: Sequence[int], integers: Sequence[int] = (),
                 scalars: Sequence[float] = (), *, grain: int = 1, work: int = 1) -> None:
        """Over [0, size), by torch's number of threads where size * work reaches some 30,000 elementary
        steps; parts begin at multiples of `grain`. For the meta device note only what would be compiled."""
        if device.type == "meta":
            rehearsal.note(rehearsal.Source(self.text, self.accuracy, self.name))
            return
        run = self._function
        arguments = (struct.pack(f"={len(pointers)}Q", *pointers),
                     struct.pack(f"={len(integers)}q", *integers), struct.pack(f"={len(scalars)}d", *scalars))
        parallel = pays(size * work) and torch.get_num_threads() > 1
        if parallel and team.usable():
            team.run(run.address, run.scratch, arguments, size, grain)
        else:
            threads.run(lambda start, stop: run(*arguments, start, stop), size, parallel, grain)
