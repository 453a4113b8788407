"""The parameters of a group that one launch updates: of one device and the same dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusionrt import guards
from fusionrt.laid import is_lazy
from fusionrt.optim import state as states
from fusionrt.optim.kernels import Kind
from fusionrt.optim.state import Format
from fusionrt.optim.table import Table

_EMPTY = 1  # torch's address of no elements is 0, that of an absent gradient: their steps count as in torch


class Member(NamedTuple):
    """A parameter with its place among all of the optimizer, by which errors and random numbers know it."""

    param: torch.Tensor
    state: dict[str, Any]
    position: int
    name: str


class WiderGradient(Exception):
    """Of float32, where those of 16 bits were expected: it takes another kernel, or would be rounded."""


class Bucket:
    """At most CAPACITY of them. The table is of now: a parameter or state that moves needs another bucket."""

    def __init__(self, owner: str, group: dict[str, Any], kind: Kind, form: Format, members: Sequence[Member]
                 ) -> None:
        self.owner, self.group, self.kind, self.members = owner, group, kind, members
        self.device = members[0].param.device
        rows = [states.row(m.param, m.state, form, m.position) for m in members]
        self.table = Table(self.device, rows)
        self._dtype: torch.dtype = getattr(torch, kind.grad)
        self._expected = [(m.param.shape, m.param.stride()) for m in members]
        self._guard: guards.Check | None = None  # true for gradients as usual
        self._versions = self._now()

    def gradients(self) -> tuple[list[int], list[torch.Tensor]]:
        """Their addresses, 0 for those that are None, and copies of those of another layout: keep them."""
        grads: list[Any] = [member.param.grad for member in self.members]
        if self._guard is not None and self._guard(*grads):  # a third of the time
            return [grad.data_ptr() or _EMPTY for grad in grads], []
        copies = []
        for k, (grad, (shape, stride)) in enumerate(zip(grads, self._expected, strict=True)):
            # A gradient without strides, a sparse one, raises.
            if grad is not None and (grad.layout is not torch.strided or grad.dtype is not self._dtype
                                     or grad.shape != shape or grad.stride() != stride or is_lazy(grad)):
                grads[k] = self._converted(k, grad)
                copies.append(grads[k])
        if not copies and all(grad is not None for grad in grads):
            self._guard = guards.guard(*grads)
        return [0 if grad is None else grad.data_ptr() or _EMPTY for grad in grads], copies

    def follow(self) -> None:
        """Master weights, the parameters that were written since the last step (a checkpoint was loaded)."""
        for member, seen, now in zip(self.members, self._versions, self._now(), strict=False):
            if seen != now:
                states.follow(member.param, member.state[states.MASTER])

    def written(self, addresses: Sequence[int]) -> None:
        """Tell autograd, which knows of no launch, that a step wrote the parameters with a gradient."""
        stepped = [m.param for m, address in zip(self.members, addresses, strict=True) if address]
        torch.autograd.graph.increment_version(stepped)
        self._versions = self._now()

    def _now(self) -> list[int]:
        """How often autograd knows each to have been written, where it matters."""
        return [m.param._version for m in self.members] if self.kind.master else []

    def _converted(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        param, name = self.members[index].param, self.members[index].name
        if grad.layout is not torch.strided:
            raise RuntimeError(f"{self.owner}: the gradient of {name} is sparse ({grad.layout}), expected a "
                               "dense one; make it so with sparse=False of its embedding, or use "
                               "torch.optim's")
        if grad.dtype == torch.float32 and self._dtype.itemsize == 2:
            raise WiderGradient
        return states.as_dense_as(param, grad, self._dtype)
