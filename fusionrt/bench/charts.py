"""The charts of the report page: inline SVG whose horizontal positions are percentages.

So a chart is as wide as its place and its text keeps its size, on a phone too. Colours are classes that the
page's style sheet fills for light and dark; every dtype has a shape of its own beside its colour.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from fusionrt.bench import findings
from fusionrt.bench.results import Row, cell

HEIGHT = 260   # of a plot of rates, in CSS pixels
LINE = 24      # of an op in a strip
LABEL = 22     # characters of an op's name beside its strip
MARKS = 4      # shapes and colours in the style sheet; a fifth dtype takes the first again
OPEN = 12      # panels of a sweep; where there are more of them, they are folded below one a direction
FROM = 0.6     # the axis of fractions starts there or below: small differences are to look small
LOG_FROM = 8   # the ratio of highest to lowest rate from which on their axis is logarithmic


class Axis(NamedTuple):
    low: float
    high: float
    log: bool
    ticks: list[float]

    def __call__(self, value: float) -> float:
        """The place of a value, from 0 to 1."""
        low, high = (self.low, self.high) if not self.log else (math.log(self.low), math.log(self.high))
        return ((math.log(value) if self.log else value) - low) / (high - low)


def size_axis(values: Sequence[float]) -> Axis:
    """Bytes, logarithmic, with at most five ticks at powers of two."""
    low, high = (math.log2(pick(values)) for pick in (min, max))
    margin = max(0.6, (high - low) * 0.06)
    low, high = low - margin, high + margin
    inside = range(math.ceil(low), math.floor(high) + 1)
    step = max(1, -(-len(inside) // 5))
    return Axis(2**low, 2**high, True, [2.0**k for k in inside[::step]])


def rate_axis(values: Sequence[float]) -> Axis:
    """Rates: from zero, logarithmic where they differ much."""
    low, high = min(values), max(values)
    if high / low < LOG_FROM:
        return linear_axis(0, high)
    low, high = low / 1.3, high * 1.3
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**k for k in decades for m in (1, 2, 5)]
    if len(decades) > 4:
        ticks = [10.0**k for k in decades]
    return Axis(low, high, True, [t for t in ticks if low <= t <= high])


def linear_axis(low: float, high: float) -> Axis:
    """Round ticks, three to six of them; from zero unless all values are far from it."""
    low = 0 if low < high / 3 or low == high else low
    step = 10.0 ** math.floor(math.log10(high - low or high))
    step *= next(m for m in (0.2, 0.25, 0.5, 1, 2) if (high - low) / (step * m) < 5)
    first, top = math.floor(low / step + 1e-9), high + (high - low) * 0.06  # 0.6 / 0.1 is 5.999…
    return Axis(first * step, top, False, [k * step for k in range(first, math.floor(top / step) + 1)])


# -- marks -----------------------------------------------------------------------------------------

def dtypes(rows: Iterable[Row]) -> dict[str, int]:
    """dtype -> its mark."""
    return {d: k % MARKS for k, d in enumerate(dict.fromkeys(str(r.get("dtype", "")) for r in rows))}


def legend(marks: Mapping[str, int], ceiling: bool) -> str:
    shown = [f'<li><svg class="key" aria-hidden="true">{_mark(k, "50%", 8)}</svg>'
             f'{escape(dtype or "rows")}</li>' for dtype, k in marks.items()]
    if ceiling:
        shown.append('<li><svg class="key wide" aria-hidden="true"><line class="ceiling" x1="0" x2="100%" '
                     'y1="8" y2="8"/></svg>copy, measured in the same run</li>')
    return f'<ul class="legend">{"".join(shown)}</ul>'


def _mark(kind: int, x: str, y: float, title: str = "") -> str:
    text = f"<title>{escape(title)}</title>" if title else ""
    return f'<use href="#mark{kind}" class="mark c{kind}" x="{x}" y="{y:.1f}">{text}</use>'


def describe(row: Row) -> str:
    """A row as the text that a pointer on its mark shows."""
    found = findings.rate(row)
    unit, scale = findings.rate_unit([found or 0])
    parts = [f"{findings.op_name(row)} {row.get('dtype', '')} {row.get('direction', '')}".strip(),
             findings.size(row), f"{cell(float(row['us']))} µs"]
    parts += [f"{cell(found / scale)} {unit}"] if found else []
    fraction = findings.number(row, "of_copy")
    parts += [f"{fraction:.2f} of a copy"] if fraction is not None else []
    parts += [f"{findings.ratio_text(v)} {findings.rival_name(r)}"
              for r in findings.rivals([row]) for v, _ in findings.compared([row], r)]
    return " · ".join(parts)


def _text(x: str, y: float, text: str, anchor: str = "middle", style: str = "tick") -> str:
    return f'<text class="{style}" x="{x}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}%"


# -- rates against bytes ---------------------------------------------------------------------------

class Field(NamedTuple):
    """What the panels of rates share."""

    x: Axis
    y: Axis
    copies: list[tuple[float, float]]  # bytes, rate
    marks: Mapping[str, int]

    def place(self, nbytes: float, rate: float) -> tuple[str, float]:
        return _percent(self.x(nbytes)), HEIGHT * (1 - self.y(rate))


def rates(rows: Sequence[Row], ceilings: Sequence[Row]) -> str:
    """Small multiples that share their axes: achieved rate against bytes, the copy's rate as a line. A panel
    a direction; for a sweep a panel an op and direction. Empty where no row has bytes."""
    rows = [r for r in rows if findings.rate(r) and findings.positive(r, "bytes")]
    if not rows:
        return ""
    field = _field(rows, ceilings)
    directions: findings.Panels = {}
    ops: findings.Panels = {}
    for (op, _, direction), members in findings.series(rows).items():
        directions.setdefault(direction or "all rows", []).extend(members)
        ops.setdefault(f"{op} {direction}".strip(), []).extend(members)
    if not findings.is_sweep(rows):
        shown = _panels(directions, field)
    elif len(ops) <= OPEN:
        shown = _panels(ops, field)
    else:
        shown = (f"{_panels(directions, field)}<details><summary>Each op by itself</summary>"
                 f"{_panels(ops, field)}</details>")
    return legend(field.marks, bool(field.copies)) + shown


def _field(rows: Sequence[Row], ceilings: Sequence[Row]) -> Field:
    copies = sorted((float(c["bytes"]), rate) for c in ceilings
                    if (rate := findings.rate(c)) and findings.positive(c, "bytes"))
    x = size_axis([*(float(r["bytes"]) for r in rows), *(nbytes for nbytes, _ in copies)])
    if len(copies) == 1:  # a line across
        copies = [(end, rate) for end in (x.low, x.high) for _, rate in copies]
    achieved = [rate for r in rows if (rate := findings.rate(r))]
    return Field(x, rate_axis([*achieved, *(rate for _, rate in copies)]), copies, dtypes(rows))


def _panels(panels: findings.Panels, field: Field) -> str:
    drawn = "".join(_panel(name, _rates(rows, field)) for name, rows in panels.items())
    return f'<div class="panels">{drawn}</div>'


def _panel(name: str, body: str) -> str:
    return f'<figure class="panel"><figcaption>{escape(name)}</figcaption>{body}</figure>'


def _rates(rows: Sequence[Row], field: Field) -> str:
    unit, scale = findings.rate_unit([field.y.high])
    drawn = [_text("-8", -10, unit, "end")]
    for tick in field.y.ticks:
        y = field.place(field.x.low, tick)[1]
        drawn.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(_text("-8", y + 4, f"{tick / scale:g}", "end"))
    drawn += [_text(_percent(field.x(tick)), HEIGHT + 18, _bytes(tick)) for tick in field.x.ticks]
    drawn.append(_path([field.place(*copy) for copy in field.copies], "ceiling"))
    joined = findings.is_sweep(rows)
    for (_, dtype, _), members in findings.series(rows).items():
        kind = field.marks[dtype]
        places = [field.place(float(r["bytes"]), findings.rate(r) or 0) for r in members]
        drawn.append(_path(places, f"joined c{kind}") if joined else "")
        drawn += [_mark(kind, *place, describe(row)) for place, row in zip(places, members, strict=True)]
    return (f'<svg class="chart" width="100%" height="{HEIGHT}" role="img" '
            f'aria-label="achieved rate against bytes, {len(rows)} rows">{"".join(drawn)}</svg>')


def _path(places: Sequence[tuple[str, float]], style: str) -> str:
    """Lines from point to point: SVG's own path knows no percentages."""
    return "".join(f'<line class="{style}" x1="{a}" y1="{b:.1f}" x2="{c}" y2="{d:.1f}"/>'
                   for (a, b), (c, d) in itertools.pairwise(places))


def _bytes(n: float) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:g} {unit}"
    return f"{n:g} B"


# -- fractions of the copy, op by op ---------------------------------------------------------------

def fractions(rows: Sequence[Row]) -> str:
    """A line an op, a mark a dtype, at the fraction of the copy bandwidth; a panel a direction (and size).
    Empty where no row has `of_copy`."""
    rows = [r for r in rows if findings.number(r, "of_copy") is not None]
    if not rows:
        return ""
    marks = dtypes(rows)
    values = [float(r["of_copy"]) for r in rows]
    x = linear_axis(min(FROM, *values), max(1.0, *values))
    room = max(len(_short(findings.op_name(r))) for r in rows)
    drawn = [_panel(name or "all rows", _strips(taken, marks, x, room))
             for name, taken in findings.by_direction(rows).items()]
    return f'{legend(marks, True)}<div class="panels">{"".join(drawn)}</div>'


def _strips(rows: Sequence[Row], marks: Mapping[str, int], x: Axis, room: int) -> str:
    """`room`: characters of the longest label. Dtypes stand a little above each other: they often agree."""
    ops = list(dict.fromkeys(findings.op_name(r) for r in rows))
    height, apart = LINE * len(ops), min(6.0, 18 / len(marks))

    def vertical(value: float, style: str) -> str:
        at = _percent(x(value))
        return f'<line class="{style}" x1="{at}" x2="{at}" y1="0" y2="{height}"/>'

    body = "".join(vertical(t, "grid") + _text(_percent(x(t)), height + 16, f"{t:g}") for t in x.ticks)
    for k, op in enumerate(ops):
        y = LINE * (k + 0.5)
        body += _text("-10", y + 4, _short(op), "end", "op")
        body += f'<line class="grid faint" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>'
    body += vertical(1.0, "ceiling")
    order = {dtype: (k - (len(marks) - 1) / 2) * apart for k, dtype in enumerate(marks)}
    for row in rows:
        dtype, line = str(row.get("dtype", "")), ops.index(findings.op_name(row)) + 0.5
        body += _mark(marks[dtype], _percent(x(float(row["of_copy"]))), LINE * line + order[dtype],
                      describe(row))
    return (f'<svg class="chart strips" style="--label:{room}" height="{height}" role="img" '
            f'aria-label="fraction of the copy bandwidth by op, {len(rows)} rows">{body}</svg>')


def _short(op: str) -> str:
    return op if len(op) <= LABEL else f"{op[:LABEL - 1]}…"
