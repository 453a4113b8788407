"""What the rows of a result file say: rates, sizes, rivals, rows that lose, rows that failed.

Nothing is measured or drawn here; the page and the figures read the rows through these functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fusionrt.bench.results import Row, cell

Panels = dict[str, list[Row]]

RIVALS = {"eager": "eager torch", "compile": "torch.compile", "compile-max": "torch.compile, max-autotune",
          "liger": "liger-kernel"}
SWEEP = 3   # sizes from which on a series is a line
PANELS = 6  # more of them are not looked at
LARGEST = 1e75  # products of a few figures are finite
CLOSE = 0.95  # above it a row that loses does so by little


def number(row: Mapping[str, Any], key: str) -> float | None:
    """The figure, or None where there is none: no such key, no number, none that can be computed with."""
    value = row.get(key)
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and -LARGEST < value < LARGEST
    return float(value) if good else None  # type: ignore[arg-type]


def positive(row: Mapping[str, Any], key: str) -> float | None:
    """The figure if it is above zero, and so has a place on a logarithmic axis."""
    value = number(row, key)
    return value if value and value > 1 / LARGEST else None


def content_rows(content: Any, caller: str) -> list[Row]:
    """The rows of a loaded result file; TypeError for anything else."""
    rows = content.get("rows") if isinstance(content, Mapping) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        came = f"{type(content).__name__} with {sorted(map(str, content))}" if isinstance(content, Mapping) \
            else type(content).__name__
        raise TypeError(f"{caller}: content must be a loaded result file, a dict with a list of dicts under "
                        f"'rows', got {came}")
    return rows


def measured(rows: Iterable[Row]) -> list[Row]:
    """Rows that say how many microseconds an op took."""
    return [r for r in rows if "error" not in r and "op" in r and positive(r, "us")]


def op_name(row: Row) -> str:
    return str(row["op"])


def place(content: Mapping[str, Any]) -> str | None:
    """The name of what was measured, GPU or CPU: rows of a CPU have GB/s, those of a GPU TB/s."""
    machine = content.get("machine") or {}
    on_cpu = any("GB/s" in row for row in content["rows"])
    name = machine.get("cpu") if on_cpu else machine.get("gpu") or machine.get("cpu")
    return str(name) if name else None


# -- rates and sizes -------------------------------------------------------------------------------

UNITS = {"TB/s": 1e12, "GB/s": 1e9}


def rate(row: Row) -> float | None:
    """Bytes a second, above zero: as the row says, otherwise its bytes by its time; or None."""
    for unit, scale in UNITS.items():
        if value := positive(row, unit):
            return value * scale
    nbytes, us = positive(row, "bytes"), positive(row, "us")
    return nbytes / us * 1e6 if nbytes and us else None


def rate_unit(rates: Iterable[float]) -> tuple[str, float]:
    """The unit in which the highest of them reads best, and its size."""
    return ("TB/s", 1e12) if max(rates, default=0) >= 1e12 else ("GB/s", 1e9)


def count(n: int) -> str:
    """4194304 as 4 Mi; decimal numbers as 5 M."""
    for unit, size in (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10), ("M", 10**6), ("K", 10**3)):
        if n >= size and n % (size // (10 if unit == "M" else 1)) == 0:
            return f"{n / size:g} {unit}"
    return str(n)


def ratio_text(ratio: float) -> str:
    """`1.90×`. A row that loses never reads 1.00: there is a third decimal then, or a fourth."""
    text = cell(ratio)
    decimals = 3
    while ratio < 1 <= float(text) and decimals < 7:
        text, decimals = f"{ratio:.{decimals}f}", decimals + 1
    return f"{text}×"


# -- series and panels -----------------------------------------------------------------------------

def series(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Rows of one op, dtype and direction, by size."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        key = (op_name(row), str(row.get("dtype", "")), str(row.get("direction", "")))
        found.setdefault(key, []).append(row)
    return {key: sorted(members, key=lambda r: number(r, "elements") or 0) for key, members in found.items()}


def is_sweep(rows: Iterable[Row]) -> bool:
    """Whether some op was measured at three sizes or more."""
    return any(len({r.get("elements") for r in members}) >= SWEEP for members in series(rows).values())


def several_sizes(rows: Iterable[Row]) -> bool:
    return any(len({r.get("elements") for r in members}) > 1 for members in series(rows).values())


def by_direction(rows: Sequence[Row]) -> Panels:
    """A panel a direction; a direction and a size where ops were measured at a few sizes; where there are
    many, each op's largest."""
    sized: Panels = {}
    for row in rows:
        sized.setdefault(f"{row.get('direction', '')}, {size(row)}".removeprefix(", "), []).append(row)
    largest: Panels = {}
    for (_, _, direction), members in series(rows).items():
        largest.setdefault(direction, []).append(members[-1])
    if not several_sizes(rows) or len(sized) > PANELS:
        return largest
    return {name: sized[name] for direction in largest for name in sized
            if str(sized[name][0].get("direction", "")) == direction}


def size(row: Row) -> str:
    elements = number(row, "elements")
    return "size not given" if elements is None else f"{count(int(elements))} elements"


# -- rivals ----------------------------------------------------------------------------------------

def rivals(rows: Iterable[Row]) -> list[str]:
    """What follows `vs_` in the rows' keys, where at least one row has a figure: `eager`, `compile`."""
    return list(dict.fromkeys(key.removeprefix("vs_") for row in rows for key in row
                              if key.startswith("vs_") and number(row, key) is not None))


def rival_name(rival: str) -> str:
    return RIVALS.get(rival, rival)


def compared(rows: Iterable[Row], rival: str) -> list[tuple[float, Row]]:
    """(times that the rival takes as long, row), of the rows that it ran in."""
    return [(ratio, row) for row in rows if (ratio := number(row, f"vs_{rival}")) is not None]


def bound(row: Row) -> float | None:
    """What fewer bytes than the unfused chain's can gain at most."""
    chain, least = positive(row, "unfused_bytes"), positive(row, "bytes")
    return chain / least if chain and least else None


def losses(rows: Iterable[Row], rival: str) -> list[tuple[float, Row]]:
    """The rows in which the rival is faster, the worst first."""
    return sorted(((v, r) for v, r in compared(rows, rival) if v < 1), key=lambda found: found[0])


def faults(rows: Iterable[Row]) -> list[tuple[str, Row]]:
    """(error, row) of rows that failed, and (`liger-kernel: error`, row) of rivals that failed in a row."""
    return [(str(value) if key == "error" else f"{rival_name(key.removesuffix('_error'))}: {value}", row)
            for row in rows for key, value in row.items()
            if value and (key == "error" or key.endswith("_error"))]


def absent(content: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """(what was not there, why): in how many rows. The file says it of a rival (`absent`), a row of a rival
    (`liger_absent`) or of itself (`absent`)."""
    found = Counter({(rival_name(str(name)), str(why)): 0
                     for name, why in (content.get("absent") or {}).items()})
    for row in content["rows"]:
        own = str(row.get("what") or row.get("op") or row.get("name") or "row")
        found.update((own if key == "absent" else rival_name(key.removesuffix("_absent")), str(value))
                     for key, value in row.items() if value and (key == "absent" or key.endswith("_absent")))
    return dict(found)
