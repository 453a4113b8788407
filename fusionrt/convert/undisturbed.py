"""Runs of modules that leave no trace."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from fusionrt.convert.contents import contents, restore
from fusionrt.convert.random_states import everybodys


@contextlib.contextmanager
def undisturbed(*modules: Module, unwritten: set[int] | None = None) -> Iterator[list[Tensor]]:
    """Run modules in evaluation mode without gradients, and leave no trace: parameters and buffers (which are
    yielded), attributes, training flags and random generators are as before afterwards. What is written to
    sparse and nested tensors, and to those of types that run operators themselves, stays.

    unwritten: ids of parameters to which nothing is written, of which then no copies are made; those that a
    run has left alone are added. Forward may write by means that count no version: numbers are compared.
    """
    known = set[int]() if unwritten is None else unwritten
    parts = list({id(m): m for module in modules for m in module.modules()}.values())
    before = contents([*map(vars, parts), {"": everybodys()}])
    state = [t for t in before.tensors if is_plain(t) and id(t) not in known]
    kept = _kept(state)
    with torch.no_grad():
        try:
            for module in modules:
                module.eval()
            yield state
        finally:
            for container, its in before.held:
                restore(container, its)
            for generator, its, set_state in before.generators:
                set_state(generator, its)
            written = [one.tensor for one in kept if one.put_back()]
    known.update({id(t) for t in state if isinstance(t, Parameter)} - set(map(id, written)))


class _Kept(NamedTuple):
    """A tensor, the memory it lies in, and a copy of what that holds."""

    tensor: Tensor
    memory: Tensor
    numbers: Tensor

    def put_back(self) -> bool:
        """Whether it had other memory (`p.data = ...`) or other numbers."""
        t, memory, numbers = self
        moved = _place(t) != _place(memory)
        if moved:
            t.data = memory
            if not t.is_inference():
                torch.autograd.graph.increment_version(t)
        changed = not _equal(memory.to(numbers.device), numbers)
        if changed:
            once = tuple(slice(1 if step == 0 else None) for step in t.stride())  # copy_ expands nothing
            with torch.inference_mode(t.is_inference()), torch.no_grad():
                t[once].copy_(numbers[once])
        return moved or changed


def _kept(state: list[Tensor]) -> list[_Kept]:
    """Copies lie on the host where on a GPU the run might need their room."""
    sizes = Counter[torch.device]()
    for t in state:
        sizes[t.device] += t.nbytes
    full = [device for device, size in sizes.items()
            if device.type == "cuda" and size > torch.cuda.mem_get_info(device)[0] // 2]
    return [_Kept(t, t.detach(), t.detach().cpu() if t.device in full else t.detach().clone()) for t in state]


def is_plain(t: Tensor) -> bool:
    """Whether it lies in memory that can be compared and copied."""
    return (t.layout == torch.strided and not t.is_nested and not t.is_meta
            and type(t).__torch_dispatch__ is Tensor.__torch_dispatch__)


def _place(t: Tensor) -> tuple[object, ...]:
    return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype


def _equal(a: Tensor, b: Tensor) -> bool:
    """As torch.equal, for which one NaN is not another."""
    try:
        return torch.equal(a, b) or bool(((a == b) | (a != a) & (b != b)).all())
    except RuntimeError:  # of a dtype that torch does not compare: float4's, complex32
        return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))
