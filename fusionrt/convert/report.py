"""What is said of a conversion: as text, as JSON, as a page."""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fusionrt.convert.stats import COUNTS, Record, conversion_stats
from fusionrt.files import write

if TYPE_CHECKING:
    from rich.console import Group

TITLES = {"linear_relu": "linear + relu", "linear_gelu": "linear + gelu", "conv_bn_relu": "conv + bn + relu",
          "layernorm_relu": "layer norm + relu", "linear_activation": "linear + activation",
          "conv_bn": "conv + bn, other activations or none", "conv_activation": "conv + activation",
          "rotary": "rotary embedding"}


class Table(NamedTuple):
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """Print it, or `as_dict`, `to_json`, `to_html`. What was not measured is None, and not shown."""

    record: Record

    # -- in words ------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        return f"{self.record.model}, {self.record.dtype or 'no parameters'}, {self.record.device}"

    @property
    def summary(self) -> list[str]:
        record, found = self.record, []
        if not record.graphs and record.verdict is None:
            return ["Nothing has been captured yet: the module has not been called, or Dynamo finds no "
                    "graph in it."]
        if not record.graphs:
            return ["No graph was captured: Dynamo finds none in this module, which runs as it is.",
                    f"Validation: {record.verdict}."]
        total = _plural(sum(record.counts.values()), "replacement")
        before, after = sum(g.graph_before for g in record.graphs), sum(g.graph_after for g in record.graphs)
        found.append(f"{total} in {_plural(len(record.graphs), 'graph')}: {before} calls became {after}.")
        if record.gain is not None:
            found.append(f"{record.gain.speedup_achieved:.2f} times as fast as before with "
                         f"{record.gain.inputs}.")
        found.append(f"Validation: {record.verdict or 'none'}.")
        return [*found, *(f"Undone: {key} ({why})." for key, why in record.rolled_back.items())]

    @property
    def tables(self) -> list[Table]:
        """Those that have rows: what was replaced, what was gained."""
        return [table for table in (self._replaced(), self._gained()) if table.rows]

    def _replaced(self) -> Table:
        counts = self.record.counts
        names = [*COUNTS.values(), *(name for name in counts if name not in COUNTS.values())]
        return Table(("replaced", "how many"), [(TITLES.get(name, name.replace("_", " ")), str(counts[name]))
                                                for name in names if counts[name]])

    def _gained(self) -> Table:
        gain, head = self.record.gain, ("a call", "before", "after")
        if gain is None:
            return Table(head, [])
        rows = [("time, µs", f"{gain.us_before:,.0f}", f"{gain.us_after:,.0f}"),
                ("memory at its peak, MB", f"{gain.peak_memory_before / 1e6:,.1f}",
                 f"{gain.peak_memory_after / 1e6:,.1f}")]
        if gain.kernels_before is not None and gain.kernels_after is not None:
            rows.append(("kernels", f"{gain.kernels_before:g}", f"{gain.kernels_after:g}"))
        return Table(head, rows)

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.markup import escape as plain
        from rich.table import Table as RichTable
        shown: list[Any] = [plain(self.title)]
        for table in self.tables:
            rich = RichTable(*table.head)
            for column in rich.columns[1:]:
                column.justify = "right"
            for row in table.rows:
                rich.add_row(*map(plain, row))
            shown.append(rich)
        return Group(*shown, *map(plain, self.summary))

    def __str__(self) -> str:
        from rich.console import Console
        text = io.StringIO()
        Console(file=text, width=110).print(self)
        return text.getvalue().rstrip("\n")

    __repr__ = __str__

    # -- as files ------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        from fusionrt.bench import results
        record = self.record
        return {"model": record.model, "device": record.device, "dtype": record.dtype,
                "date": time.strftime("%Y-%m-%d", time.gmtime()), "stats": conversion_stats(record),
                "counts": dict(record.counts), "passes": list(record.options.passes),
                "excluded": sorted(record.options.excluded), "rolled_back": record.rolled_back,
                "replacements": [key for graph in record.graphs for key in graph.replacements],
                "validation": None if record.verdict is None else dataclasses.asdict(record.verdict),
                "benchmark": None if record.gain is None else dataclasses.asdict(record.gain),
                "seconds": record.seconds, "versions": results.versions(), "machine": results.machine()}

    def to_json(self, path: str | Path) -> None:
        from fusionrt.bench.results import dumps
        write(path, dumps(self.as_dict(), indent=1) + "\n")

    def to_html(self, path: str | Path) -> None:
        """A page that needs nothing besides itself."""
        from fusionrt.bench import report
        found = self.as_dict()
        parts = {"Gains and replacements": "".join(map(_html, self.tables)),
                 "Every replacement": _list(found["replacements"]),
                 "Machine and versions": report.definitions(found["machine"], found["versions"])}
        where = escape(f"on {self.record.device}, {self.record.dtype}")
        page = report.page(
            title=escape(f"Conversion of {self.title}"),
            heading=f'<h1>{escape(self.record.model)} <span class="on">{where}</span></h1>'
                    f'<p class="date">Converted {found["date"]}</p>',
            summary=escape(" ".join(self.summary)), sections={k: body for k, body in parts.items() if body},
            footer="Written by fusionrt.convert.")
        write(path, page)


def _plural(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"


def _html(table: Table) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        left, *right = map(escape, row)
        return (f'<tr><{tag} class="text">{left}</{tag}>' + "".join(f"<{tag}>{c}</{tag}>" for c in right)
                + "</tr>")

    body = "".join(cells(row, "td") for row in table.rows)
    return (f'<div class="box"><table class="ratios"><thead>{cells(table.head, "th")}</thead>'
            f"<tbody>{body}</tbody></table></div>")


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li><code>{escape(line)}</code></li>' for line in lines)}</ul>" if lines else ""
