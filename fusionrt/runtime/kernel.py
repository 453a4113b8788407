"""A kernel of a template of its own: what is no expression, such as an optimizer's step or a gather."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusionrt import rehearsal
from fusionrt.properties import kept_property
from fusionrt.runtime import device as cuda
from fusionrt.runtime.source import Field, Params, arithmetic, assemble, definitions


class Kernel:
    """kernels_src/`stem`.cu for one kind of call; make each once (functools.cache), as it owns its text.

    The template's entry is `stem` and takes `Params`, whose members are `fields`, 8-byte ones first.
    `constants` are the lines that this specialisation puts before it; BLOCK, the threads of a block, is one.
    `cluster`: blocks of a cluster, where the template declares them. `reads_first`: see `source.arithmetic`.

        scale = Kernel("scale", "scale", [pointer("float32_t", "x", const=False), *members("float", "by")])
        scale(x.device, -(-x.numel() // scale.block), x.data_ptr(), 2.0)
    """

    def __init__(self, name: str, stem: str, fields: Sequence[Field], constants: Sequence[str] = (), *,
                 acc: str = "float32", significant_bits: int = 24, block: int = 256,
                 cluster: int = 1, reads_first: bool = False) -> None:
        self.name, self.stem, self.block, self.cluster = name, stem, block, cluster
        self.fields, self.params = tuple(fields), Params(fields)
        self.text = assemble(stem, arithmetic(acc, significant_bits, reads_first), [
            *definitions(BLOCK=block), *constants, self.params.declaration])
        self._functions: dict[tuple[int, int], int] = {}

    def __call__(self, device: torch.device, grid: int | tuple[int, int], *values: Any, shared: int = 0
                 ) -> None:
        """Launch `grid` blocks on the device's current stream, `values` being those of the fields, with so
        many bytes of shared memory. For the meta device note only what would be compiled."""
        if device.type == "meta":
            rehearsal.note(rehearsal.Source(self.text, self.stem, self.name))
        else:
            self.launch(cuda.index_of(device), grid, self.packed(*values), shared)

    @kept_property
    def _names(self) -> list[str]:
        return [field.name for field in self.fields]

    def planned(self, **values: Any) -> tuple[Any, ...]:
        """What a plan knows: values of the last fields, given by name, as its calls pass them after those of
        the first fields, such as addresses. A divisor is given as the number that it is."""
        first = max(0, len(self.fields) - len(values))
        names = self._names[first:]
        if set(names) != values.keys():
            raise TypeError(f"{self.name}: the last {len(values)} fields of {self.stem} are "
                            f"{', '.join(names)}, got {', '.join(values)}")
        found: list[Any] = []
        for field, name in zip(self.fields[first:], names, strict=True):
            # Most are one number, and some ops come here in each call.
            found += (values[name],) if len(field.format) == 1 else field.packed(values[name])
        return tuple(found)

    def packed(self, *values: Any) -> bytes:
        """The parameters, of the values of the fields."""
        try:
            return self.params.packer.pack(*values)
        except OverflowError:
            return self.params.packer.pack(*self.params.converted(*values))

    def launch(self, device: int, grid: int | tuple[int, int], packed: bytes, shared: int = 0) -> None:
        """With parameters that are packed."""
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.launch(device, grid, packed, shared)
            return
        cuda.bind_context(device)  # threads come and go: autograd's
        function = self._functions.get((device, shared))
        if function is None:
            function = cuda.function(self.text, self.stem, device, self.name)
            cuda.allow(function, shared, self.cluster)
            self._functions[device, shared] = function
        x, y = grid if isinstance(grid, tuple) else (grid, 1)
        pointers, stream = (ctypes.c_char_p * 1)(packed), cuda.raw_stream(device)  # copied by the launch
        if cuda.has_dependent_launches(device) and stream and torch.cuda.is_current_stream_capturing():
            cuda.DependentLaunch(function, (x, y), self.block, shared, pointers)(stream)
        else:
            cuda.driver().launchKernel(function, x, y, 1, self.block, 1, 1, shared, stream,
                                       ctypes.addressof(pointers), 0)


class Launch(NamedTuple):
    """A launch of one kind of call. `values`: of the last fields, as `Kernel.planned` has them."""

    kernel: Kernel
    grid: int | tuple[int, int]
    values: tuple[Any, ...]
    shared: int = 0   # bytes

    def __call__(self, device: torch.device, *first: Any) -> None:
        """`first`: what this call alone knows, of the first fields."""
        self.kernel(device, self.grid, *first, *self.values, shared=self.shared)
