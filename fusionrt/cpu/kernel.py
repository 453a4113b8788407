"""A CPU kernel of a text of its own: what is no expression."""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusionrt import rehearsal
from fusionrt.cpu import compiler, signature, team, threads
from fusionrt.cpu.calling import pays
from fusionrt.cpu.signature import Signature
from fusionrt.dtypes import element_of
from fusionrt.properties import kept_property
from fusionrt.texts import Lines


class Kernel:
    """`body`, indented by four, says what is done on [start, stop) of a range, which several threads share,
    in the words of `memory.scope(accuracy)`. What it is given it knows by name:

        Kernel("scale", '''
            for i in range(start, stop):
                x[i] *= factor
        ''', pointers={"x": "float32"}, scalars=("factor",))

    and is called as kernel(device, size, kernel.given(x=x.data_ptr(), factor=0.5)).

    Pointers have the dtype of what lies there; without one ("") they are addresses. Scalars are acc_t.
    `before`: what the text defines before the function. It may be called twice with parts that it has to
    leave independent of each other. Make each once (functools.cache).
    """

    def __init__(self, name: str, body: str, accuracy: str = "float32", *, pointers: Mapping[str, str],
                 integers: Sequence[str] = (), scalars: Sequence[str] = (), before: str = "") -> None:
        self.name, self.accuracy = name, accuracy
        takes = Signature(tuple(pointers), tuple(integers), tuple(scalars))
        read = {name: f"{element_of(dtype)}_at({{}})" for name, dtype in pointers.items() if dtype}
        read |= dict.fromkeys(scalars, "acc_t({})")
        known = [f"{name} = {read.get(name, '{}').format(place)}" for name, place in takes.places().items()]
        parts = before.strip("\n"), signature.function(known) + body.strip("\n")
        self.text = "\n\n".join(filter(None, parts)) + "\n"
        self._integers_at, self._scalars_at = takes.begins
        lines, names = Lines(), ", ".join(itertools.chain(*takes))
        form = struct.Struct(takes.format)
        lines.lines = [f"made = {lines.name(ctypes.c_char * form.size)}()",
                       f"{lines.name(form.pack_into)}(made, 0, {names})", "return made"]
        self.given: Callable[..., Any] = lines.function([names])

    @kept_property
    def _function(self) -> compiler.Function:
        return compiler.function(self.text, self.accuracy, self.name)

    def __call__(self, device: torch.device, size: int, given: Any, *, grain: int = 1, work: int = 1
                 ) -> None:
        """Over [0, size), by torch's number of threads where size * work reaches some 30,000 elementary
        steps; parts begin at multiples of `grain`. `given`: by the method of this name. For the meta device
        note only what would be compiled."""
        if device.type == "meta":
            rehearsal.note(rehearsal.Source(self.text, self.accuracy, self.name))
            return
        run, first = self._function, ctypes.addressof(given)
        addresses = first, first + self._integers_at, first + self._scalars_at
        if not pays(size * work) or torch.get_num_threads() == 1:
            run(addresses, 0, size)
        elif team.usable():
            team.run(run.address, run.scratch, addresses, size, grain)
        else:
            threads.run(lambda start, stop: run(addresses, start, stop), size, True, grain)
