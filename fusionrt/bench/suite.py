"""A sweep: ops × sizes × dtypes × directions, ours and the rivals', one row each.

On a GPU: device time from replayed CUDA graphs (`fusionrt.bench.timing.replayed`), for small sizes also what
a call costs the host (`host_us`) and a user who waits at the end of a burst (`wall_us`). On a CPU: the wall
time of a call. A row's keys: op, dtype, elements, direction, bytes, us and its spread, the rate (TB/s or
GB/s), its fraction of a copy of as many bytes (`of_copy`), and for each rival RIVAL_us and vs_RIVAL, how many
times as long it takes (above 1: we are faster), or RIVAL_absent or RIVAL_error, which say why there is none;
with eager also what its chain of kernels moves (`unfused_bytes`, `unfused_launches`) and `bound`, the most
that fusion can gain where memory decides.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

import fusionrt
from fusionrt.bench import ceilings, rivals, sampling, timing, traffic
from fusionrt.bench.case import FORWARD, Case, least_bytes
from fusionrt.bench.results import Results, Row, why
from fusionrt.bench.rivals import Rival
from fusionrt.catalogue import COLUMNS

OURS = "fusionrt"
HOST_UP_TO = 1 << 20  # elements: above, the device takes longer than the host
SETTINGS = ("op", "dtype", "elements", "direction")
FIGURES = ("us", "spread", "TB/s", "GB/s", "of_copy")
Progress = Callable[[int, int, str], object]  # cells done, cells in all, the present one


@dataclass(frozen=True)
class Cell:
    """One op, dtype and size; a row for each direction that the op has. `labels` are put into its rows."""

    op: str
    dtype: str
    elements: int
    directions: Sequence[str] = (FORWARD,)
    against: Sequence[str] = ("eager",)
    columns: int = COLUMNS
    labels: Mapping[str, Any] = field(default_factory=dict)
    host: bool | None = None  # host and wall time of a call too; None: up to HOST_UP_TO elements

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.elements}"


def run(cells: Sequence[Cell], into: Results, device: str = "cuda", progress: Progress | None = None) -> None:
    """Measure all cells; what fails becomes a row with an `error`. Compiles our kernels beforehand."""
    _announce([name for cell in cells for name in cell.against], into, device)
    _warm_up(cells, device)
    measured: set[str] = set()
    with timing.stream() if device == "cuda" else contextlib.nullcontext():
        for done, cell in enumerate(cells):
            if progress is not None:
                progress(done, len(cells), str(cell))
            _measure(cell, into, device, measured)
            if device == "cuda":
                timing.release()
    if progress is not None:
        progress(len(cells), len(cells), "done")


def _announce(names: Sequence[str], into: Results, device: str) -> None:
    """Say once in the file which of the rivals are absent, and whether the CPU had other work."""
    load = into.content["machine"]["load_at_start"] or 0
    if device == "cpu" and load > 0.5:
        into.note(f"the load of the last minute was {load}: if that was not an earlier benchmark but still "
                  "goes on, the figures are not to be trusted")
    for rival in rivals.choose(names):
        reason = rival.missing(device)
        if reason is not None:
            into.absent(rival.name, reason)


def _warm_up(cells: Sequence[Cell], device: str) -> None:
    """On all cores. What does not compile is an error of its rows."""
    backward = any(set(cell.directions) - {FORWARD} for cell in cells)
    fusionrt.warmup("native" if device == "cuda" else "cpu", ops=sorted({cell.op for cell in cells}),
                    dtypes=sorted({cell.dtype for cell in cells}), backward=backward)


def _measure(cell: Cell, into: Results, device: str, measured: set[str]) -> None:
    """Unless it is in `measured`, as sizes differ that come to the same inputs."""
    row = {**cell.labels, "op": cell.op, "dtype": cell.dtype, "elements": cell.elements}
    try:
        case = prepared(cell, device)
        row["elements"] = case.elements
        if not case.scales:
            into.note(f"{cell.op}'s inputs have one size, {case.elements} elements")
        same = repr(replace(cell, elements=case.elements))
        if same in measured:
            return
        measured.add(same)
        directions = [d for d in cell.directions if d == FORWARD or case.differentiable]
    except Exception as error:
        into.add(**row, error=why(error))
        return
    found = _present(cell.against, case)
    host = case.elements <= HOST_UP_TO if cell.host is None else cell.host
    for direction in directions:
        try:
            its = figures(case, direction, found, into, host)
        except Exception as error:  # one row less; it says why
            its = {"error": why(error)}
        into.add(**row, direction=direction, **its)


def prepared(cell: Cell, device: str) -> Case:
    """With so many input sets that large ones leave the L2 between two calls.

    Raises MemoryError for more than the device holds: on a CPU the system might end the process instead."""
    nbytes, holds = least_bytes(cell.op, cell.dtype, cell.elements, cell.columns), _memory(device)
    if nbytes > holds:
        raise MemoryError(f"inputs and results are {nbytes / 1e9:,.0f} GB, the memory has "
                          f"{holds / 1e9:,.0f} GB")
    sets = timing.n_sets(nbytes) if device == "cuda" else 1
    return Case(cell.op, cell.dtype, cell.elements, device, sets, cell.columns)


def _memory(device: str) -> float:
    if device == "cuda":
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf


class Present(NamedTuple):
    """The rivals of a case, found once: its directions share what torch.compile makes."""

    functions: dict[str, tuple[Rival, Callable[..., Any]]]
    absent: Row  # RIVAL_absent, RIVAL_error


def _present(names: Sequence[str], case: Case) -> Present:
    rivals.fresh_compilers()
    found = Present({}, {})
    for rival in rivals.choose(names):
        try:
            reason = rival.missing(case.device)
            function = None if reason else rival.find(case.op)
        except Exception as error:  # of its import
            found.absent[f"{rival.name}_error"] = why(error)
            continue
        if function is None:
            found.absent[f"{rival.name}_absent"] = reason or "it has no such op"
        else:
            found.functions[rival.name] = rival, function
    return found


def figures(case: Case, direction: str, present: Present, into: Results, host: bool) -> Row:
    """The row of a case, without what the case says itself."""
    nbytes, on_gpu = case.traffic(direction), case.device == "cuda"
    n = max(timing.n_calls(nbytes), len(case.inputs)) if on_gpu else 1
    variants, apart, found = _variants(case, direction, present, n)
    if on_gpu:
        times = timing.replayed(variants)
        if apart:
            times |= sampling.issued(apart)
        ceiling = into.ceiling("copy", ceilings.copy(nbytes))
        found["cache"] = "warm" if len(case.inputs) == 1 else "cold"
    else:
        times = timing.cpu({name: calls[0] for name, calls in variants.items()},
                           rounds=21 if case.elements <= HOST_UP_TO else 7)
        ceiling = into.ceiling("copy", ceilings.cpu_copy(nbytes))
    unit, scale = ("TB/s", 1e6) if on_gpu else ("GB/s", 1e3)
    rate = nbytes / times[OURS].us / scale
    row = {"bytes": nbytes, "MB": round(nbytes / (1 << 20), 2), **ratios(times), unit: round(rate, 4),
           "of_copy": round(rate / ceiling, 4), **found}
    if "eager" in variants:
        chain = traffic.unfused(variants["eager"][0])
        row |= {"unfused_bytes": chain.bytes, "unfused_launches": chain.launches,
                "bound": round(chain.bytes / nbytes, 2)}
    if host and on_gpu:
        row |= _of_the_host({**variants, **apart}, direction)
    return row


Calls = dict[str, list[timing.Call]]


def _variants(case: Case, direction: str, present: Present, n: int) -> tuple[Calls, Calls, Row]:
    """Calls of ours and of the rivals; those that no graph can hold, apart; what to say of the others."""
    variants, apart, found = {OURS: case.calls(case.op, direction, n)}, Calls(), dict(present.absent)
    for name, (rival, function) in present.functions.items():
        try:
            calls = case.calls(function, direction, n, rival.overwrites)
            calls[0]()
        except Exception as error:
            found[f"{name}_error"] = why(error)
            continue
        alone = case.device == "cuda" and case.name in rival.synchronises
        (apart if alone else variants)[name] = calls
        if alone:
            found[f"{name}_by"] = "calls issued one by one"
    return variants, apart, found


def ratios(times: Mapping[str, timing.Time], stem: str = "") -> Row:
    """Everyone's time with its spread, and how many times as long as ours the others' are."""
    ours = times[OURS]
    found: Row = {f"{stem}us": ours.us, f"{stem}spread": ours.spread}
    for name, theirs in times.items():
        if name != OURS:
            found |= {f"{stem}{name}_us": theirs.us, f"{stem}{name}_spread": theirs.spread,
                      f"{stem}vs_{name}": round(theirs.us / ours.us, 3)}
    return found


def _of_the_host(variants: Mapping[str, Sequence[timing.Call]], direction: str) -> Row:
    # A backward pass takes ten times as long, and several places in the launch queue.
    burst, rounds = (timing.BURST, 21) if direction == FORWARD else (timing.BURST // 3, 7)
    bursts = timing.bursts({name: calls[0] for name, calls in variants.items()}, burst, rounds)
    return {**ratios({name: one.host for name, one in bursts.items()}, "host_"),
            **ratios({name: one.wall for name, one in bursts.items()}, "wall_")}
