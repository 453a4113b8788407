"""Compare a run with an earlier one: which rows became slower than noise explains.

A time is allowed to grow by `fail_on` and by half of both rows' spreads (a spread is the interquartile range
over the median, so half of it is how far a usual sample lies off): a noisy pair must differ by more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fusionrt.bench import findings
from fusionrt.bench.results import Row, cell, table

IDENTITY = ("table", "op", "dtype", "elements", "direction")  # two rows with the same are one measurement
TIMES = {"us": "spread", "host_us": "host_spread"}            # a row's times, and where their spread stands
COLUMNS = (*IDENTITY, "time", "before", "now", "change", "allowed", "verdict")


@dataclass(frozen=True)
class Change:
    """One time of one row, in both runs. `verdict`: ok, slower, within the spread (over the limit, but no
    further than the noise), failed (it has an error now, or no number)."""

    row: Row
    time: str
    before: float
    now: float | None
    spread: float   # half of both rows', as a fraction
    limit: float
    verdict: str

    @property
    def guilty(self) -> bool:
        return self.verdict in ("slower", "failed")

    def cells(self) -> Row:
        change = None if self.now is None else f"{self.now / self.before - 1:+.1%}"
        return {**{name: self.row.get(name) for name in IDENTITY}, "time": self.time,
                "before": cell(self.before), "now": cell(self.now), "change": change,
                "allowed": f"{self.limit:.1%} + {self.spread:.1%} spread", "verdict": self.verdict}


def percentage(text: str) -> float:
    """`10%` as 0.1. Raises ValueError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if found is None:
        raise ValueError(f"{text!r} is not a percentage such as 10%")
    return float(found[1]) / 100


def compare(now: Sequence[Row], before: Sequence[Row], fail_on: float) -> list[Change]:
    """The times that both runs have, and those that fail only now; a row of one run alone is left out."""
    earlier = {_identity(row): row for row in before}
    return [change for row in now if (known := earlier.get(_identity(row))) is not None
            for change in _changes(row, known, fail_on)]


def _identity(row: Row) -> tuple[Any, ...]:
    return tuple(str(row.get(name)) for name in IDENTITY)


def _changes(row: Row, known: Row, fail_on: float) -> Iterator[Change]:
    for time, spread in TIMES.items():
        before, now = findings.positive(known, time), findings.number(row, time)
        if before is None or (row.get(time) is None and "error" not in row):
            continue
        noise = sum(findings.positive(one, spread) or 0.0 for one in (row, known)) / 2
        yield Change(row, time, before, now, noise, fail_on, _verdict(before, now, fail_on, noise))


def _verdict(before: float, now: float | None, limit: float, noise: float) -> str:
    if now is None:
        return "failed"
    growth = now / before - 1
    return "ok" if growth <= limit else "slower" if growth > limit + noise else "within the spread"


def report(changes: Sequence[Change], now: dict[str, Any], before: dict[str, Any]) -> str:
    """What a person reads: the rows in question as a table, how many there are, and where machines differ."""
    shown = [change for change in changes if change.verdict != "ok"]
    lines = [table([change.cells() for change in shown], COLUMNS)] if shown else []
    lines += _differences(now, before)
    rows, alone = len(now["rows"]), len(now["rows"]) - len({id(change.row) for change in changes})
    if alone:
        lines.append(f"note: {alone} of {rows} rows have no time in the baseline")
    counts = {verdict: sum(c.verdict == verdict for c in changes)
              for verdict in ("slower", "failed", "within the spread")}
    said = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n) or "none slower"
    date = before.get("date", "an unknown date")
    last = f"{len(changes)} times compared with the baseline of {date}"
    return "\n".join([*lines, f"{last}: {said}" if changes else last])


def _differences(now: dict[str, Any], before: dict[str, Any]) -> Iterator[str]:
    for part, names in (("machine", ("gpu", "cpu", "torch_threads")), ("versions", ("torch", "driver"))):
        for name in names:
            ours, theirs = (content.get(part, {}).get(name) for content in (now, before))
            if ours != theirs:
                yield f"note: another {name.replace('_', ' ')} than the baseline's: {ours}, there {theirs}"
