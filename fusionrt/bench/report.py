"""A result file as one self-contained HTML page: no script, font or picture comes from anywhere else.

    report.write(json.load(file), "report.html")

What `content` may hold is said in `fusionrt.bench.results`; a `command` in it is shown as the way to run the
benchmark again. All that it says is escaped. Style and script of the page are in `report.html` beside this
file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from string import Template
from typing import Any

from fusionrt.bench import charts, findings
from fusionrt.bench.results import NOISE, Row, cell, within_noise
from fusionrt.files import whole

TEMPLATE = Path(__file__).with_name("report.html")
NARROWLY, CLEARLY = "▽", "▼"
SETTINGS = ("op", "dtype", "direction", "elements")
QUOTED, QUOTED_AS = re.compile("`([^`]+)`"), r"<code>\1</code>"
SHOWN = 25  # rows that lose, before the others are folded away


def write(content: Mapping[str, Any], path: str | Path) -> None:
    """Write the page of a loaded result file.

    Raises:
        TypeError: `content` is no result file: a dict with a list of dicts under `rows`.
    """
    rows = findings.content_rows(content, "write")
    good = findings.measured(rows)
    parts = [("Bandwidth", _bandwidth(good, content.get("ceilings") or {})),
             ("Against the rivals", _ratios(good)), ("Where we lose", _losing(good)),
             ("Not measured", _not_measured(content)), ("All rows", _all_rows(rows)),
             ("Method", _method(content)), ("Machine and versions", _machine(content))]
    filled = page(escape(_title(content)), _heading(content), " ".join(_summary(rows, good)),
                  {name: body for name, body in parts if body}, _notices(content))
    with whole(path) as file:
        file.write_text(filled, encoding="utf-8")


def page(title: str, heading: str, summary: str, sections: Mapping[str, str], notices: str = "",
         footer: str = "Written by fusionrt.bench. Every figure comes from one result file.") -> str:
    """A page in this style, of HTML that is escaped already. `sections`: name -> body."""
    keys = {name: name.lower().replace(" ", "-") for name in sections}
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=title, heading=heading, notices=notices, summary=summary, footer=footer,
        contents="".join(f'<li><a href="#{key}">{name}</a></li>' for name, key in keys.items()),
        sections="".join(f'<section id="{keys[name]}"><h2>{name}</h2>{body}</section>'
                         for name, body in sections.items()))


# -- the head --------------------------------------------------------------------------------------

def _names(content: Mapping[str, Any]) -> tuple[str, str, str]:
    """What was measured, on what, and when."""
    what = str(content.get("benchmark") or "Benchmark").replace("_", " ")
    what = " ".join(word.upper() if word in ("cpu", "gpu") else word for word in what.split())
    return what[:1].upper() + what[1:], findings.place(content) or "an unnamed machine", str(
        content.get("date") or "no date")


def _title(content: Mapping[str, Any]) -> str:
    what, place, date = _names(content)
    return f"{what} on {place}, {date}"


def _heading(content: Mapping[str, Any]) -> str:
    what, place, date = map(escape, _names(content))
    return f'<h1>{what} <span class="on">on {place}</span></h1><p class="date">Measured {date}</p>'


def _notices(content: Mapping[str, Any]) -> str:
    said = [] if content.get("complete", True) else ["This run was interrupted: rows are missing."]
    said += ["A quick run of a few rows, not the whole benchmark."] if content.get("quick") else []
    said += [str(note) for note in content.get("notes") or []]
    return "".join(f'<p class="notice">{escape(text)}</p>' for text in said)


def _summary(rows: Sequence[Row], good: Sequence[Row]) -> list[str]:
    """Sentences, every figure of them computed from the rows."""
    if not rows:
        return ["The file has no rows: nothing was measured."]
    failed = sum("error" in row for row in rows)
    said = [_first_sentence(rows, good)]
    fractions = [f for row in good if (f := findings.number(row, "of_copy")) is not None]
    if fractions:
        low, high, middle = (f"{100 * pick(fractions):.0f} %" for pick in (min, max, median))
        span = f"<b>{low}</b>" if low == high else f"<b>{low}</b> to <b>{high}</b>"
        said.append(f"They reach {span} of the bandwidth of a plain copy of about as many bytes; "
                    f"the median is <b>{middle}</b>.")
    said += [_against(good, rival) for rival in findings.rivals(good)]
    if failed:
        said.append(f"<b>{_rows(failed)}</b> failed; the errors are below.")
    return said


def _first_sentence(rows: Sequence[Row], good: Sequence[Row]) -> str:
    if not good:
        return f"<b>{_rows(len(rows))}</b>, none of them with the time of an op."
    kinds = [list(dict.fromkeys(str(r[key]) for r in good if r.get(key))) for key in ("dtype", "direction")]
    ops = len({findings.op_name(row) for row in good})
    described = [f"{ops} {'op' if ops == 1 else 'ops'}", *(escape(_listed(kind)) for kind in kinds if kind)]
    return f"<b>{_rows(len(good))}</b>: {'; '.join(described)}."


def _against(good: Sequence[Row], rival: str) -> str:
    """A result below 1 counts as lost, however close it is; how many are close is said."""
    name, of = escape(findings.rival_name(rival)), len(findings.compared(good, rival))
    lost = findings.losses(good, rival)
    if not lost:
        return f"Against {name} no row of {of} is slower."
    clearly = sum(ratio < findings.CLOSE for ratio, _ in lost)
    noisy = sum(within_noise(row, f"vs_{rival}") for _, row in lost)
    return (f'Against {name} <b class="lost">{len(lost)} of {of} rows {"is" if len(lost) == 1 else "are"} '
            f"slower</b>, {clearly or 'none'} of them by more than 5 %"
            + (f", {noisy} by less than the measurement's noise." if noisy else "."))


def _rows(n: int) -> str:
    return f"{n} row" if n == 1 else f"{n} rows"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# -- bandwidth -------------------------------------------------------------------------------------

def _bandwidth(good: Sequence[Row], ceilings: Mapping[str, Sequence[Row]]) -> str:
    copies = list(ceilings.get("copy") or [])
    rates, fractions = charts.rates(good, copies), charts.fractions(good)
    found = ""
    if rates:
        found += (f'<p>Each mark is a row: the bytes that its op has to move at least, divided by its time, '
                  f"against those bytes. {_ceiling(copies)}</p>{rates}")
    if fractions:
        found += ("<h3>Op by op</h3><p>The same rates as fractions of the copy bandwidth. "
                  "The line at 1 is the copy, which writes half of its bytes; an op may write less."
                  f"</p>{fractions}")
    return found


def _ceiling(copies: Sequence[Row]) -> str:
    rates = [rate for row in copies if (rate := findings.rate(row))]
    if not rates:
        return "The file has no measured copy bandwidth to compare with."
    unit, scale = findings.rate_unit(rates)
    low, high = (cell(pick(rates) / scale) for pick in (min, max))
    return (f"The line is the best copy of about as many bytes, measured in the same run: "
            f"{low if low == high else f'{low} to {high}'} {unit}.")


# -- rivals ----------------------------------------------------------------------------------------

def _ratios(good: Sequence[Row]) -> str:
    """A table a rival: an op (and size) a line, a dtype and direction a column."""
    rivals = findings.rivals(good)
    if not rivals:
        return ""
    tables = "".join(_ratio_table(good, rival) for rival in rivals)
    return ("<p>How many times as long the rival takes: above 1 we are faster. "
            f'<b class="sign">{NARROWLY}</b> marks a row that loses by at most 5 %, '
            f'<b class="sign">{CLEARLY}</b> one that loses by more, {NOISE} a difference that is smaller '
            f"than one of the spreads. A dash: not measured.</p>{tables}")


def _ratio_table(good: Sequence[Row], rival: str) -> str:
    found = findings.compared(good, rival)
    columns: dict[tuple[str, str], None] = {}
    ops: dict[str, dict[str, dict[tuple[str, str], str]]] = {}  # op, size, column
    sized = findings.several_sizes([row for _, row in found])
    for _, row in found:
        column = str(row.get("direction", "")), str(row.get("dtype", ""))
        columns[column] = None
        lines = ops.setdefault(findings.op_name(row), {})
        cells = lines.setdefault(_elements(row)[1] if sized else "", {})
        # Two rows of one setting, measured for different tables: both are shown.
        cells[column] = f"{cells.get(column, '')} {_ratio(row, rival)}".strip()
    directions = list(dict.fromkeys(direction for direction, _ in columns))
    ordered = sorted(columns, key=lambda column: directions.index(column[0]))
    body = "".join(f"<tbody>{_lines_of(op, lines, ordered, sized)}</tbody>" for op, lines in ops.items())
    name = escape(findings.rival_name(rival))
    head = _two_headers(["Op", *(["Elements"] if sized else [])], ordered)
    return f"<h3>{name}</h3>{_boxed(f'ratios to {name}', head + body)}"


def _lines_of(op: str, lines: Mapping[str, Mapping[tuple[str, str], str]],
              columns: Sequence[tuple[str, str]], sized: bool) -> str:
    """An op, once; its sizes, one below the other."""
    first = f'<th scope="rowgroup" rowspan="{len(lines)}"><code>{escape(op)}</code></th>'
    found = ""
    for size, cells in lines.items():
        found += f"<tr>{first}{f'<td>{size}</td>' if sized else ''}"
        found += "".join(f"<td>{cells.get(column, _DASH)}</td>" for column in columns) + "</tr>"
        first = ""
    return found


def _two_headers(head: Sequence[str], columns: Sequence[tuple[str, str]]) -> str:
    """Directions above, each over its dtypes."""
    spans = Counter(direction for direction, _ in columns)
    first = "".join(f'<th rowspan="2" scope="col">{name}</th>' for name in head)
    upper = "".join(f'<th colspan="{n}" scope="colgroup" class="group">{escape(direction)}</th>'
                    for direction, n in spans.items())
    lower = "".join(f'<th scope="col">{escape(dtype)}</th>' for _, dtype in columns)
    return f"<thead><tr>{first}{upper}</tr><tr>{lower}</tr></thead>"


_DASH = '<span class="none">–</span>'


def _ratio(row: Row, rival: str) -> str:
    """Losing is said by a sign and by words as well as by colour."""
    ratio = row[f"vs_{rival}"]
    text = (NOISE if within_noise(row, f"vs_{rival}") else "") + findings.ratio_text(ratio)
    if ratio >= 1:
        return f'<span class="{"won" if ratio > 1 / findings.CLOSE else "level"}">{text}</span>'
    how, sign = ("clearly", CLEARLY) if ratio < findings.CLOSE else ("narrowly", NARROWLY)
    return (f'<span class="lost {how}"><i aria-hidden="true">{sign}</i><i class="said">slower: </i>{text}'
            "</span>")


def _losing(good: Sequence[Row]) -> str:
    """Every row that loses against some rival, the worst first."""
    found = sorted(((ratio, rival, row) for rival in findings.rivals(good)
                    for ratio, row in findings.losses(good, rival)), key=lambda one: one[0])
    if not found:
        return "<p>No row is slower than a rival.</p>" if findings.rivals(good) else ""
    columns = ("Op", "Dtype", "Direction", "Elements", "Rival", "Ratio", "Our µs", "Their µs", "Our spread",
               "Their spread", "Bound")
    lines = [(*_settings(row), _text(findings.rival_name(rival)), (ratio, _ratio(row, rival)),
              _figure(row, "us"), _figure(row, f"{rival}_us"), _figure(row, "spread", percent=True),
              _figure(row, f"{rival}_spread", percent=True), _bound(row))
             for ratio, rival, row in found]
    shown = _table("rows that lose", columns, lines[:SHOWN])
    rest = lines[SHOWN:]
    folded = "" if not rest else (
        f"<details><summary>{len(rest)} more, from {findings.ratio_text(found[SHOWN][0])} on</summary>"
        f"{_table('more rows that lose', columns, rest)}</details>")
    return ("<p>Spread is the interquartile range over the median: a difference that is smaller is noise "
            f"({NOISE}). The bound is what the unfused chain moves over what the op has to: fusion can gain "
            "no more where memory decides.</p>"
            f"{shown}{folded}")


# -- rows ------------------------------------------------------------------------------------------

def _not_measured(content: Mapping[str, Any]) -> str:
    found = ""
    if absent := findings.absent(content):
        found += "<h3>Absent</h3><ul>" + "".join(
            f"<li><b>{escape(name)}</b>: {escape(why)}{f' ({_rows(n)})' if n else ''}</li>"
            for (name, why), n in absent.items()) + "</ul>"
    if faults := findings.faults(content["rows"]):
        lines = [(*_settings(row), _text(error)) for error, row in faults]
        columns = ("Op", "Dtype", "Direction", "Elements", "Error")
        found += f"<h3>Failed</h3>{_table('rows that failed', columns, lines, 'errors')}"
    return found


def _all_rows(rows: Sequence[Row]) -> str:
    """As the file has them, folded; a click on a heading sorts them."""
    rows = [row for row in rows if "error" not in row and "absent" not in row]
    if not rows:
        return ""
    columns = [key for key in dict.fromkeys([*SETTINGS, *(key for row in rows for key in row)])
               if any(row.get(key) is not None for row in rows) and not key.endswith(("_error", "_absent"))]
    lines = [[_exact(row, key) for key in columns] for row in rows]
    table = _table("all rows", [escape(key) for key in columns], lines, "sortable")
    unfolded = "" if findings.measured(rows) else " open"  # nothing above has shown them
    return f"<details{unfolded}><summary>{_rows(len(rows))} as the file has them</summary>{table}</details>"


Cell = tuple[float | None, str]  # the number to sort by, if it is one; HTML


def _settings(row: Row) -> tuple[Cell, ...]:
    return (_code(row.get("op") or row.get("name") or row.get("what")), _text(row.get("dtype")),
            _text(row.get("direction")), _elements(row))


def _exact(row: Row, key: str) -> Cell:
    """Every digit of the file."""
    number = findings.number(row, key)
    if number is None:
        return (_code if key == "op" else _text)(row.get(key))
    return number, f"{row[key]:,}" if isinstance(row[key], int) else repr(row[key])


def _figure(row: Row, key: str, percent: bool = False) -> Cell:
    number = findings.number(row, key)
    return number, _DASH if number is None else f"{100 * number:.1f} %" if percent else cell(number)


def _bound(row: Row) -> Cell:
    bound = findings.bound(row)
    return bound, _DASH if bound is None else f"{cell(bound)}×"


def _elements(row: Row) -> Cell:
    number = findings.number(row, "elements")
    return number, _DASH if number is None else findings.count(int(number))


def _text(value: Any) -> Cell:
    return None, _DASH if value is None else escape(str(value))


def _code(value: Any) -> Cell:
    return None, _DASH if value is None else f"<code>{escape(str(value))}</code>"


def _table(label: str, columns: Sequence[str], lines: Sequence[Sequence[Cell]], style: str = "sortable"
           ) -> str:
    """Columns of numbers stand right. `columns` are HTML, like the cells."""
    numeric = [any(line[k][0] is not None for line in lines) for k in range(len(columns))]
    head = "".join(f'<th scope="col"{_left(not number)}>{name}</th>'
                   for name, number in zip(columns, numeric, strict=True))
    body = "".join(f"<tr>{''.join(_td(*one, numeric[k]) for k, one in enumerate(line))}</tr>"
                   for line in lines)
    return _boxed(label, f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>", style)


def _td(number: float | None, html: str, numeric: bool) -> str:
    value = "" if number is None else f' data-v="{number!r}"'
    return f"<td{_left(not numeric)}{value}>{html}</td>"


def _left(yes: bool) -> str:
    return ' class="text"' if yes else ""


def _boxed(label: str, table: str, style: str = "ratios") -> str:
    """Scrolls inside its own box, by keyboard too."""
    return (f'<div class="box" tabindex="0" role="region" aria-label="{label}">'
            f'<table class="{style}">{table}</table></div>')


# -- where and how ---------------------------------------------------------------------------------

def _method(content: Mapping[str, Any]) -> str:
    paragraphs = str(content.get("method") or "The file does not say how it was measured.").split("\n\n")
    told = "".join(f"<p>{QUOTED.sub(QUOTED_AS, escape(text))}</p>" for text in paragraphs)
    command = content.get("command")
    if not command and content.get("benchmark"):
        command = f"python -m benchmarks.{content['benchmark']}"
    again = f"<pre><code>{escape(str(command))}</code></pre>" if command else \
        "<p>The file does not say by which command.</p>"
    return f"{told}<h3>To reproduce</h3>{again}"


def _machine(content: Mapping[str, Any]) -> str:
    return definitions(*(content.get(part) or {} for part in ("machine", "versions")))


def definitions(*lists: Mapping[str, Any]) -> str:
    """Names with their values, a list for each mapping that has some."""
    return "".join(f'<dl>{"".join(_entry(str(key), value) for key, value in entries.items())}</dl>'
                   for entries in lists if entries)


def _entry(key: str, value: Any) -> str:
    if value is None:
        return ""
    name = key.upper() if key in ("cpu", "gpu") else key.replace("_", " ")
    return f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>"
