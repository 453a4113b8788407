"""Figures as files, by matplotlib (`pip install fusionrt[bench]`): PNG, SVG or PDF by the name's ending.

    plot.bars([{"name": "fusionrt", "elements": 1 << 26, "us": 127.5}, ...], "one_size.png")
    plot.lines([{"name": "fusionrt", "elements": 1 << 13, "us": 2.1}, ...], "sweep.svg")
    plot.from_results(json.load(file), "results.png")

No display is needed, and no setting of matplotlib's is changed: figures are made without pyplot.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionrt.bench import findings
from fusionrt.bench.results import Row, cell
from fusionrt.files import whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2166ac", "#b35806", "#762a83", "#00766c", "#a50f55", "#5f6368")  # for colour-blind eyes too
MARKERS = ("o", "s", "D", "^", "v", "P")
STROKES = ("-", "--", ":")
OURS = "fusionrt"
Styles = dict[str, tuple[int, int]]


def bars(rows: Sequence[Row], path: str | Path, title: str = "") -> None:
    """One size: a horizontal bar a row, its time in microseconds (and rate) at its end.

    Args:
        rows: dicts with `name`, `us` and perhaps `elements` and `TB/s` or `GB/s`. Rows with an `error` are
            named without a bar.
        path: the file; its ending says the format.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no rows, or one without `name` or `us`.
    """
    _check("bars", rows, ("name", "us"))
    figure = _figure(7.5, 1.1 + 0.36 * len(rows))
    axes = figure.add_subplot()
    times = [findings.number(row, "us") or 0.0 for row in rows]
    axes.barh(range(len(rows)), times, height=0.62, color=COLOURS[0])
    for y, (row, us) in enumerate(zip(rows, times, strict=True)):
        axes.annotate(_plain(_says(row)), (us, y), xytext=(5, 0), textcoords="offset points", va="center",
                      size=9)
    axes.set_yticks(range(len(rows)), [_plain(row["name"]) for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, max(times) * 1.3 or 1)  # room for the text at the longest bar's end
    axes.set_xlabel("µs a call (less is better)")
    _quiet(axes, "x")
    sizes = list(dict.fromkeys(findings.size(row) for row in rows if "elements" in row))
    _save(figure, path, ", ".join(filter(None, (title, *sizes[:1] * (len(sizes) == 1)))))


def lines(rows: Sequence[Row], path: str | Path, title: str = "") -> None:
    """A sweep: a line a name, microseconds against size or elements, both axes logarithmic.

    Args:
        rows: dicts with `name`, `us` and `size` (or `elements`), in any order; sizes that are no numbers
            stand side by side. Rows with an `error` leave a gap.
        path: the file; its ending says the format.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no rows, or one without `name`, `us` or a size.
    """
    key = "size" if any("size" in row for row in rows) else "elements"
    _check("lines", rows, ("name", key, "us"))
    figure = _figure(7.5, 4.8)
    axes = figure.add_subplot()
    placed, labels = _placed(rows, key)
    _lines(axes, placed)
    if labels:
        axes.set_xscale("linear")
        axes.set_xticks(range(1, len(labels) + 1), labels)
    axes.set_ylabel("µs a call")
    axes.set_xlabel(key)
    axes.legend(frameon=False, fontsize=9)
    _save(figure, path, title)


def from_results(content: Mapping[str, Any], path: str | Path) -> None:
    """The figure of a loaded result file: a sweep as lines, an op a panel; otherwise bars of the fraction
    of the copy bandwidth (of microseconds where the rows have none), rivals as strokes beside them.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: `content` is no result file.
        ValueError: it has no row with `op` and `us`.
    """
    rows = findings.measured(given := findings.content_rows(content, "from_results"))
    if not rows:
        raise ValueError(f"from_results: nothing to draw, none of {len(given)} rows has 'op' and 'us'")
    figure = _sweep(rows) if findings.is_sweep(rows) else _catalogue(rows)
    named = (content.get("benchmark"), findings.place(content), content.get("date"))
    _save(figure, path, ", ".join(str(part) for part in named if part))


# -- a whole result file ---------------------------------------------------------------------------

def _sweep(rows: Sequence[Row]) -> Figure:
    """A panel an op and direction; a line a dtype and implementation."""
    panels: findings.Panels = {}
    for (op, dtype, direction), members in findings.series(r for r in rows if r.get("elements")).items():
        taken = panels.setdefault(f"{op} {direction}".strip(), [])
        for row in members:
            times = {OURS: row["us"]} | {r: row["us"] * v for r in findings.rivals([row])
                                         for v, _ in findings.compared([row], r)}
            taken += [{"name": _line_name(who, dtype), "us": us, "elements": row["elements"]}
                      for who, us in times.items()]
    across = min(3 if len(panels) <= 12 else 5, len(panels))
    down = math.ceil(len(panels) / across)
    figure = _figure(4.6 * across, 3.6 * down + 0.6)
    styles = _styles(rows)
    for k, (title, taken) in enumerate(panels.items()):
        axes = figure.add_subplot(down, across, k + 1)
        _lines(axes, taken, styles)
        axes.set_title(_plain(title), loc="left", size=10)
        axes.set_ylabel("µs" if k % across == 0 else "")
    _legend(figure)
    return figure


def _line_name(who: str, dtype: str) -> str:
    return f"{findings.rival_name(who)} {dtype}".strip()


def _styles(rows: Sequence[Row]) -> Styles:
    """Line name -> (colour, stroke): a colour an implementation, a stroke a dtype, in every panel."""
    dtypes = list(dict.fromkeys(str(row.get("dtype", "")) for row in rows))
    return {_line_name(who, dtype): (i, k) for i, who in enumerate((OURS, *findings.rivals(rows)))
            for k, dtype in enumerate(dtypes)}


def _catalogue(rows: Sequence[Row]) -> Figure:
    """A panel a direction (and size); an op a group of bars, one a dtype."""
    value = "of_copy" if all(findings.number(row, "of_copy") is not None for row in rows) else "us"
    panels = findings.by_direction(rows)
    ops = list(dict.fromkeys(findings.op_name(row) for row in rows))
    dtypes = list(dict.fromkeys(str(row.get("dtype", "")) for row in rows))
    figure = _figure(2 + 3.6 * len(panels), 1.8 + len(ops) * (0.12 + 0.13 * len(dtypes)))
    first = None
    for k, (title, taken) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), k + 1, sharey=first)
        first = first or axes
        _groups(axes, taken, value, ops, dtypes)
        axes.set_title(_plain(title), loc="left", size=10)
        axes.tick_params(labelleft=axes is first)
        axes.set_xlabel("fraction of the copy bandwidth" if value == "of_copy" else "µs a call")
    _legend(figure, dtypes)
    return figure


def _groups(axes: Axes, rows: Sequence[Row], value: str, ops: Sequence[str], dtypes: Sequence[str]) -> None:
    height = 0.8 / len(dtypes)
    for k, dtype in enumerate(dtypes):
        mine = [row for row in rows if str(row.get("dtype", "")) == dtype]
        at = [ops.index(findings.op_name(row)) + (k - (len(dtypes) - 1) / 2) * height for row in mine]
        axes.barh(at, [row[value] for row in mine], height=height * 0.92, color=COLOURS[k % len(COLOURS)],
                  label=_plain(dtype or OURS))
        for j, rival in enumerate(findings.rivals(rows)):
            drawn = [(y, row[value] * ratio if value == "us" else row[value] / ratio)
                     for y, row in zip(at, mine, strict=True) for ratio, _ in findings.compared([row], rival)
                     if ratio > 0]
            axes.plot([x for _, x in drawn], [y for y, _ in drawn], ("|", "x", "+", ".", "1", "2")[j % 6],
                      color="#1c1e21", markersize=5, label=_plain(findings.rival_name(rival)))
    if value == "of_copy":
        axes.axvline(1, color="#1c1e21", linewidth=1, linestyle="--", label="copy")
    axes.set_yticks(range(len(ops)), list(map(_plain, ops)))
    axes.set_ylim(len(ops) - 0.4, -0.6)
    axes.set_xlim(left=0)
    _quiet(axes, "x")


# -- shared by the figures -------------------------------------------------------------------------

def _lines(axes: Axes, rows: Sequence[Row], styles: Styles | None = None) -> None:
    names = list(dict.fromkeys(str(row["name"]) for row in rows))
    for name, (colour, stroke) in (styles or {name: (k, k // 6) for k, name in enumerate(names)}).items():
        mine = sorted((row for row in rows if str(row["name"]) == name), key=lambda r: r["elements"])
        if mine:
            axes.plot([row["elements"] for row in mine],
                      [findings.positive(row, "us") or math.nan for row in mine], color=COLOURS[colour % 6],
                      marker=MARKERS[(colour + stroke) % 6], linestyle=STROKES[stroke % 3], markersize=4,
                      linewidth=1.4, label=_plain(name))
    axes.set_xscale("log", base=2)
    if any(findings.positive(row, "us") for row in rows):  # matplotlib has no logarithms of nothing
        axes.set_yscale("log")
    _quiet(axes, "both")
    axes.xaxis.set_major_formatter(lambda n, _: findings.count(round(n)) if n >= 1 else f"{n:g}")


def _placed(rows: Sequence[Row], key: str) -> tuple[list[Row], list[str]]:
    """The rows with their places on the axis as `elements`; the ticks' labels where sizes are no numbers."""
    places = {row[key]: _place(row[key]) for row in rows}
    labels = [] if all(places.values()) else [_plain(size) for size in places]
    if labels:
        places = {size: float(k) for k, size in enumerate(places, 1)}
    return [{**row, "elements": places[row[key]]} for row in rows], labels


def _place(size: object) -> float | None:
    return findings.positive({"size": float(size)}, "size") if isinstance(size, numbers.Real) else None


def _plain(text: object) -> str:
    """Not read as TeX, whose mistakes are errors."""
    return str(text).replace("$", r"\$")


def _says(row: Row) -> str:
    us = findings.number(row, "us")
    if us is None:
        return f"failed: {str(row.get('error', 'no time'))[:60]}"
    known = [f"{cell(float(row[unit]))} {unit}" for unit in findings.UNITS if row.get(unit)]
    return ", ".join([f"{cell(us)} µs", *known[:1]])


def _check(function: str, rows: Sequence[Row], needed: Sequence[str]) -> None:
    if not rows:
        raise ValueError(f"{function}: rows is empty, nothing to draw")
    for row in rows:
        if missing := [k for k in needed if k not in row and not (k == "us" and "error" in row)]:
            raise ValueError(f"{function}: a row needs {', '.join(needed)}, "
                             f"got {sorted(row)} without {', '.join(missing)}")


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib, which is not installed: "
                          "pip install fusionrt[bench]") from error
    return Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")


def _quiet(axes: Axes, grid: Any) -> None:
    axes.grid(True, axis=grid, color="#d9d9d4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def _legend(figure: Figure, first: Sequence[str] = ()) -> None:
    """One for all panels, below them."""
    found = {label: handle for axes in figure.axes
             for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    found = {label: found[label] for label in [*(n for n in map(_plain, first) if n in found), *found]}
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=4, frameon=False,
                  fontsize=9)


def _save(figure: Figure, path: str | Path, title: str) -> None:
    """A figure without pyplot takes the canvas of the format; Agg for pixels."""
    if title:
        figure.suptitle(_plain(title), x=0.01, ha="left", size=11, weight="bold")
    path = Path(path)
    if not path.suffix:
        path = path.with_suffix(".png")  # matplotlib's own default
    with whole(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix("."))
