"""The parameters of a group that one launch updates: of one device and the same dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusionrt.optim import state as states
from fusionrt.optim.kernels import Kind
from fusionrt.optim.state import Format
from fusionrt.optim.table import Table


class Member(NamedTuple):
    """A parameter with its place among all of the optimizer, by which errors and random numbers know it."""

    param: torch.Tensor
    state: dict[str, Any]
    position: int
    name: str


class Bucket:
    """At most CAPACITY of them. The table is of now: a parameter or state that moves needs another bucket."""

    def __init__(self, owner: str, group: dict[str, Any], kind: Kind, form: Format, members: Sequence[Member]
                 ) -> None:
        self.owner, self.group, self.kind, self.members = owner, group, kind, members
        self.device = members[0].param.device
        rows = [states.row(m.param, m.state, form, m.position) for m in members]
        self.table = Table(self.device, rows)
        self._expected = [(m.param, m.param.dtype, m.param.shape, m.param.stride()) for m in members]

    def gradients(self) -> tuple[list[int], list[torch.Tensor]]:
        """Their addresses, 0 for those that are None, and copies of those of another layout: keep them."""
        addresses: list[int] = []
        copies: list[torch.Tensor] = []
        for param, dtype, shape, stride in self._expected:
            grad = param.grad
            if grad is None:
                addresses.append(0)
                continue
            # A gradient without strides, a sparse one, raises.
            if (grad.layout is not torch.strided or grad.dtype is not dtype or grad.shape != shape
                    or grad.stride() != stride):
                grad = self._converted(len(addresses), grad)
                copies.append(grad)
            addresses.append(grad.data_ptr())
        return addresses, copies

    def with_gradients(self, addresses: Sequence[int]) -> list[torch.Tensor]:
        """The parameters that a step writes, which autograd must be told as it knows of no launch."""
        return [m.param for m, address in zip(self.members, addresses, strict=True) if address]

    def _converted(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        param, name = self.members[index].param, self.members[index].name
        if grad.layout is not torch.strided:
            raise RuntimeError(f"{self.owner}: the gradient of {name} is sparse ({grad.layout}), expected a "
                               "dense one; make it so with sparse=False of its embedding, or use "
                               "torch.optim's")
        return states.as_dense_as(param, grad, param.dtype)
