"""Which tensors a launch serves, as its kernels read it: addresses, sizes, and the chunks of work."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fusionrt.rehearsal import device_type

CHUNK = 4096     # elements a block takes: four of float32 a thread, four times
CAPACITY = 448   # tensors of a launch: their gradients' addresses are launch parameters, 4 KB at most
CPU_SCALARS = ("factor", "decay", "size", "correction", "skip")  # in float64
# Bytes of a `Scalars` in kernels_src/optimizer.cuh, and of a CPU's.
SCALARS = {"float32": 32, "float64": 48, "cpu": 8 * len(CPU_SCALARS)}


class Row(NamedTuple):
    """One tensor: the struct `Tensor` of kernels_src/optimizer.cuh. Addresses of what is not there are 0."""

    param: int
    step: int
    numel: int
    position: int = 0
    state0: int = 0
    state1: int = 0
    state2: int = 0
    scale0: int = 0
    scale1: int = 0
    scale2: int = 0
    master: int = 0


class Table:
    """At most CAPACITY rows in the memory of their device."""

    def __init__(self, device: torch.device, rows: Sequence[Row]) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("fusionrt.optim: the table of the tensors cannot be made while a CUDA graph "
                               "is being captured; take one step with the same parameters before the capture")
        chunks = [torch.stack([torch.full((n,), t, device="cpu"), torch.arange(n, device="cpu")], dim=1)
                  for t, n in enumerate(-(-row.numel // CHUNK) for row in rows)]
        self.device, self.n_tensors = device, len(rows)
        self.tensors = torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)
        self.chunks = torch.cat(chunks).to(torch.int32).to(device)
        self.n_chunks = len(self.chunks)
        self.is_of_cpu = device_type(self.tensors) == "cpu"
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.work = sum(row.numel for row in rows) // max(1, self.n_chunks)  # of a chunk, on average


_captured: set[Table] = set()  # a graph that replays reads them


def hold(table: Table) -> None:
    """For a launch on the current stream: its memory is nobody else's before that has read it."""
    if table.stream is None:
        return
    if torch.cuda.is_current_stream_capturing():
        _captured.add(table)
    stream = torch.cuda.current_stream(table.device)
    if stream != table.stream:
        for part in (table.tensors, table.chunks):
            part.record_stream(stream)


def shared_table(device: torch.device, addresses: tuple[int, ...] | None, numels: tuple[int, ...]) -> Table:
    """For tensors without state; without `addresses` they are the launch's gradients themselves."""
    table = _kept(device, addresses, numels)
    hold(table)
    return table


@functools.lru_cache(maxsize=64)
def _kept(device: torch.device, addresses: tuple[int, ...] | None, numels: tuple[int, ...]) -> Table:
    addresses = addresses or (0,) * len(numels)
    return Table(device, [Row(p, 0, n) for p, n in zip(addresses, numels, strict=True)])
