"""Index tensors of a call, and the error that one of their values is out of range.

A GPU is not waited for: its kernel reports such an index (kernels_src/indices.cuh) without reading there, and
`deferred` raises when the report has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fusionrt import deferred


class Indices(NamedTuple):
    """The name of an argument, its values, and the number of rows that they choose from."""

    name: str
    values: torch.Tensor | None
    rows: int


def check_dtype(op: str, name: str, values: torch.Tensor) -> None:
    if values.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: {name} must be of dtype int32 or int64, got {values.dtype}")


def check(op: str, indices: Sequence[Indices]) -> None:
    """Raise IndexError for one out of range: of tensors on a CPU."""
    for name, values, rows in indices:
        if values is None or not values.numel() or values.is_meta:
            continue
        least, most = (int(v) for v in torch.aminmax(values))
        if least < 0 or most >= rows:
            raise IndexError(_message(op, name, rows, least if least < 0 else most))


def fault_of(device: torch.device) -> torch.Tensor:
    """Where a kernel reports to."""
    return torch.zeros((), dtype=torch.int64, device=device)


def check_later(op: str, fault: torch.Tensor, indices: Sequence[Indices]) -> None:
    """Raise what a kernel reported when it is known; `indices` in the order of its arguments 1, 2, 3."""
    known = [(name, rows) for name, _, rows in indices]  # the values are not kept alive

    def message(report: int) -> str:
        folded = report >> 2
        return _message(op, *known[(report & 3) - 1], folded >> 1 ^ -(folded & 1))

    deferred.check(fault, message)


def _message(op: str, name: str, rows: int, index: int) -> str:
    return f"{op}: {name} must be in [0, {rows}), got {index}"
