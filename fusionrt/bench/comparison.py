"""`compare_implementations`: several ways to compute one thing, side by side."""

from __future__ import annotations

import csv
import functools
import io
import math
import numbers
import re
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from fusionrt.arguments import as_count
from fusionrt.bench import accuracy, memory, profile, traffic
from fusionrt.bench.kernel import (
    Inputs,
    Measurement,
    benchmark_kernel,
    check_functions,
    copied,
    split_inputs,
)
from fusionrt.bench.results import NOISE
from fusionrt.bench.sampling import VariantError, naming
from fusionrt.bench.timing import LARGE
from fusionrt.errors import one_line
from fusionrt.files import whole, write

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]
Function = Callable[..., Any]


class _Column(NamedTuple):
    key: str
    title: str
    text: Callable[[Any], str]


def _microseconds(us: float) -> str:
    return f"{us:,.0f}" if us >= 1000 else f"{us:.4g}"


_COLUMNS = (
    _Column("name", "", str),
    _Column("size", "size", str),
    _Column("elements", "elements", "{:,}".format),
    _Column("us", "µs", _microseconds),
    _Column("host_us", "host µs", _microseconds),
    _Column("spread", "noise", "{:.1%}".format),
    _Column("speedup", "speed-up", "{:.2f}×".format),
    _Column("TB/s", "TB/s", "{:.2f}".format),
    _Column("GB/s", "GB/s", "{:.4g}".format),
    _Column("of_copy", "of copy", "{:.2f}".format),
    _Column("peak_bytes", "memory MB", lambda n: f"{n / 1e6:.4g}"),
    _Column("allocations", "allocations", str),
    _Column("launches", "kernels", "{:g}".format),
    _Column("max_abs", "worst error", "{:.2g}".format),
    _Column("ulp_max", "ulp", "{:.3g}".format),
    _Column("outside", "wrong", str),
    _Column("error", "error", str),
)


@dataclass(frozen=True, repr=False)
class Comparison:
    """Rows of a comparison: print it, look at `rows`, write it down, draw it.

    Keys of a row; what does not apply is absent:

    * name, elements (of the largest argument), size (in a sweep), error (why there is no time)
    * us, host_us, spread: median device time (wall time on a CPU), dispatch time, noise; method: in words
    * speedup: the baseline's time / this one's, above 1 is faster; within_noise: the difference is none
    * bytes, TB/s (GB/s on a CPU), of_copy: least traffic, the rate, its part of what a copy reaches
    * unfused_bytes, unfused_launches, bound: of torch's separate ops; bytes / least bytes is the most that
      fusion can gain where memory decides
    * peak_bytes, allocations: memory beyond the arguments, the result included (see `memory`)
    * launches: kernels, copies and fills on the GPU
    * max_abs, max_rel, ulp_max, outside: worst errors (infinite where a NaN or an infinity differs), elements
      beyond the tolerances; accuracy: all of it
    """

    title: str
    baseline: str
    rows: list[Row]
    notes: list[str]    # in a sweep, on the last size
    measurements: dict[tuple[str, Any], Measurement] = field(default_factory=dict)  # (name, size or None)

    def __getitem__(self, name: str) -> Row:
        """The row of an implementation: in a sweep, of the largest size."""
        found = [row for row in self.rows if row["name"] == name]
        if not found:
            raise KeyError(f"{name!r}; there are {', '.join(dict.fromkeys(r['name'] for r in self.rows))}")
        return max(reversed(found), key=_magnitude)

    # -- as text -----------------------------------------------------------------------------------

    def __rich__(self) -> Table:
        from rich.markup import escape
        from rich.table import Table
        table = Table(title=escape(self.title) or None, caption=escape("\n".join(self.notes)),
                      caption_justify="left")
        columns, cells = self._cells()
        for i, title in enumerate(columns):
            table.add_column(title, justify="right" if i else "left")
        for line in cells:
            table.add_row(*map(escape, line))
        return table

    def __str__(self) -> str:
        from rich.console import Console
        text = io.StringIO()
        Console(file=text, width=240).print(self)
        return text.getvalue().rstrip("\n")

    __repr__ = __str__

    def to_markdown(self) -> str:
        """A table of GitHub's kind, notes below."""
        columns, cells = self._cells()
        lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *cells]
        table = "\n".join(f"| {' | '.join(_on_one_line(c) for c in line)} |" for line in lines)
        return "\n\n".join([table, *map(_on_one_line, self.notes)])

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """Without the columns that no row has, and without a size that is the same in all of them."""
        one_size = len({row["elements"] for row in self.rows}) == 1
        used = [c for c in _COLUMNS if any(row.get(c.key) is not None for row in self.rows)
                and not (c.key == "elements" and one_size)]
        return [c.title for c in used], [[_cell(row, c) for c in used] for row in self.rows]

    # -- as files ----------------------------------------------------------------------------------

    def to_json(self, path: str | Path) -> None:
        """Rows, every sample, and where and when they were measured."""
        from fusionrt.bench import results
        taken = [{"size": size, **m.as_dict()} for (_, size), m in self.measurements.items()]
        content = {"benchmark": self.title, "date": time.strftime("%Y-%m-%d", time.gmtime()),
                   "machine": results.machine(), "versions": results.versions(), "baseline": self.baseline,
                   "notes": self.notes, "rows": self.rows, "measurements": taken}
        write(path, f"{results.dumps(content, indent=1)}\n")

    def to_csv(self, path: str | Path) -> None:
        """A line a row, in the units of `rows`."""
        keys = list(dict.fromkeys(key for row in self.rows for key in row if key != "accuracy"))
        with whole(path) as file, file.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, keys, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(self.rows)

    def plot(self, path: str | Path) -> None:
        """Bars for one size, lines for several; PNG, SVG or PDF by the ending. Needs matplotlib."""
        from fusionrt.bench import plot
        sizes = {row.get("size") for row in self.rows}
        (plot.bars if len(sizes) == 1 else plot.lines)(self.rows, path, self.title)


def _on_one_line(text: str) -> str:
    """As a cell of a Markdown table: `<lambda>` would vanish as a tag."""
    return re.sub(r"[\\|<&]", r"\\\g<0>", " ".join(text.splitlines()))


def _magnitude(row: Row) -> Any:
    """Of a row among those of a sweep."""
    size = row.get("size")
    return size if isinstance(size, numbers.Real) else row["elements"]


def _cell(row: Row, column: _Column) -> str:
    value = row.get(column.key)
    if value is None:
        return "–"
    return (NOISE if column.key == "speedup" and row.get("within_noise") else "") + column.text(value)


def compare_implementations(
        implementations: Mapping[str, Function], args: Any = (), kwargs: Mapping[str, Any] | None = None, *,
        reference: Function | str | None = None, baseline: str | None = None,
        sizes: Iterable[Any] | None = None, least_bytes: int | Callable[..., int] | None = None,
        warmup: int = 10, repeat: int = 100, cold: bool | None = None, graph: bool = False,
        device: str | torch.device | None = None, details: bool = True, title: str = "") -> Comparison:
    """Measure functions that compute the same thing, taking turns: time, memory, kernels, accuracy.

    implementations:  name -> function.
    args, kwargs:     what each is called with, as `inputs` of `benchmark_kernel`. With `sizes`, a function
                      of a size that returns the arguments.
    reference:        the unfused formula in torch, without side effects, or the name of an implementation.
                      Evaluated in float64 it is what errors are measured against; its own ops are the
                      unfused chain. Without it neither is known. Random results have no reference. Python's
                      numbers count as float64, or int64; a list of them is one array.
    baseline:         the implementation that the others' speed-up refers to; default: the first.
    sizes:            for a sweep.
    least_bytes:      what a call must move at least, or a function of its arguments; default: every argument
                      read once, every result written once.
    details:          memory and kernels as well, which take a profile of each.
    warmup, repeat, cold, graph, device: as in `benchmark_kernel`.

    An implementation that raises gets a row that says so; what the reference raises is raised. One that
    writes into its arguments does so at every call, and the others are measured on what it leaves: have it
    write into tensors of its own. Raises ValueError and TypeError for arguments that do not fit.

        found = compare_implementations({"eager": f, "fused": g}, (x, bias), reference=f)
        print(found)
        found.to_json("found.json"), found.plot("found.png")
        compare_implementations({"eager": f, "fused": g}, lambda n: (torch.randn(n),), sizes=(1024, 1 << 20))
    """
    sizes = list(sizes) if isinstance(sizes, Iterable) else sizes
    known = _checked(implementations, args, reference, baseline, sizes, least_bytes, title)
    run = _Run(dict(implementations), reference, known, least_bytes, details, device,
               {"warmup": warmup, "repeat": repeat, "cold": cold, "graph": graph})
    found = Comparison(title, known, [], [])
    for size in [None] if sizes is None else sizes:
        positional, named = split_inputs(args if size is None else args(size))
        run.add(found, positional, {**named, **(kwargs or {})}, size)
    return found


def _checked(implementations: Mapping[str, Function], args: Any, reference: Function | str | None,
             baseline: str | None, sizes: Iterable[Any] | None, least: object,
             title: object) -> str:
    """The baseline's name."""
    if not isinstance(implementations, Mapping) or not implementations:
        raise TypeError("compare_implementations: implementations must be a mapping of names to functions, "
                        f"got {implementations!r}")
    unnamed = [key for key in implementations if not isinstance(key, str)]
    if unnamed:
        raise TypeError("compare_implementations: names of implementations must be strings, got "
                        f"{unnamed[0]!r}")
    if not (reference is None or isinstance(reference, str)) and not callable(reference):
        raise TypeError("compare_implementations: reference must be a function or the name of an "
                        f"implementation, got {type(reference).__name__}")
    check_functions("compare_implementations", implementations)
    for what, name in (("reference", reference), ("baseline", baseline)):
        named = isinstance(name, str) or (what == "baseline" and name is not None)
        if named and name not in implementations:
            raise ValueError(f"compare_implementations: {what} {name!r} is no implementation; there are "
                             f"{', '.join(implementations)}")
    if (sizes is not None) != callable(args):
        raise TypeError("compare_implementations: sizes go with args that are a function of a size, got "
                        f"sizes={sizes!r} and args of type {type(args).__name__}")
    if sizes is not None and (not isinstance(sizes, list) or not sizes):
        raise ValueError(f"compare_implementations: sizes must be a list of one size at least, got {sizes!r}")
    for size in sizes or ():
        if size is None or not isinstance(size, Hashable):
            raise TypeError(f"compare_implementations: sizes must be numbers, text or tuples, got {size!r}")
    if not isinstance(title, str):
        raise TypeError(f"compare_implementations: title must be text, got {title!r}")
    if not (least is None or callable(least)):
        as_count("compare_implementations", "least_bytes", least)
    return next(iter(implementations)) if baseline is None else baseline


class _Run(NamedTuple):
    implementations: dict[str, Function]
    reference: Function | str | None
    baseline: str
    least: int | Callable[..., int] | None
    details: bool
    device: str | torch.device | None
    timing: dict[str, Any]

    def add(self, found: Comparison, args: tuple[Any, ...], kwargs: dict[str, Any], size: Any) -> None:
        """The rows of one size."""
        where = traffic.device_of((args, kwargs), self.device)
        elements = max((t.numel() for t in traffic.tensors((args, kwargs))), default=0)
        key = {"elements": elements} if size is None else {"elements": elements, "size": size}
        rows: dict[str, Row] = {name: {"name": name, **key} for name in self.implementations}
        least = self._results(rows, args, kwargs)
        times = self._times(rows, args, kwargs, where, least)
        for name, measured in times.items():
            rows[name] |= _time_row(measured, times.get(self.baseline))
            if self.details:
                call = functools.partial(self.implementations[name], *args, **kwargs)
                rows[name] |= _details(call, where)
        notes = _methods(times)
        self._add_traffic(rows, notes, args, kwargs, where, least)
        found.rows.extend({k: v for k, v in row.items() if v is not None} for row in rows.values())
        found.notes[:] = notes if size is None else [f"Size {size}. {note}" for note in notes]
        found.measurements.update({(name, size): m for name, m in times.items()})

    def _formula(self) -> Function | None:
        if isinstance(self.reference, str):
            return self.implementations[self.reference]
        return self.reference

    def _results(self, rows: dict[str, Row], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Call each once, see how accurate it is, or what it raises; the least bytes of a call."""
        formula, exact, least = self._formula(), None, 0
        if formula is not None:
            with naming("reference"):
                exact = accuracy.exactly(formula, *_own((args, kwargs)))
            if not accuracy.comparable(exact):
                raise TypeError("compare_implementations: reference must return tensors, arrays or numbers, "
                                f"got {type(exact).__name__}")
        for name, function in self.implementations.items():
            try:
                own, named = _own((args, kwargs))
                result = function(*own, **named)
                if formula is not None:
                    rows[name] |= _accuracy_row(accuracy.of_results(result, exact))
                least = least or traffic.least_bytes((args, kwargs), result)
            except Exception as error:
                rows[name]["error"] = one_line(error)
        if callable(self.least):
            return as_count("compare_implementations", "least_bytes", self.least(*args, **kwargs))
        return least if self.least is None else self.least

    def _times(self, rows: dict[str, Row], args: tuple[Any, ...], kwargs: dict[str, Any],
               where: torch.device, least: int) -> dict[str, Measurement]:
        options = dict(self.timing)
        if options["cold"] is None and where.type == "cuda":
            options["cold"] = least >= LARGE
        working = {name: f for name, f in self.implementations.items() if "error" not in rows[name]}
        while working:
            try:
                return _benchmark(working, args, kwargs, where, options)
            except VariantError as error:
                rows[error.variant]["error"] = one_line(error.__cause__ or error)
                del working[error.variant]
        return {}

    def _add_traffic(self, rows: dict[str, Row], notes: list[str], args: tuple[Any, ...],
                     kwargs: dict[str, Any], where: torch.device, least: int) -> None:
        if not least:
            return
        unit, scale = ("TB/s", 1e6) if where.type == "cuda" else ("GB/s", 1e3)
        ceiling = traffic.copy_rate(least, where) * 1e6 / scale
        notes.append(f"A call moves {least / 1e6:.4g} MB at least; a copy of as much reaches "
                     f"{ceiling:.4g} {unit}.")
        extra: Row = {"bytes": least}
        formula = self._formula()
        chain = None if formula is None else traffic.unfused(formula, args, kwargs)
        if chain is not None and chain.ops:  # of another library's formula none is seen
            extra |= {"unfused_bytes": chain.bytes, "unfused_launches": chain.launches,
                      "bound": chain.bound(least)}
            notes.append(f"Unfused: {chain.launches} ops ({', '.join(chain.ops[:8])}"
                         f"{', ...' if len(chain.ops) > 8 else ''}) move {chain.bytes / 1e6:.4g} MB, "
                         f"{extra['bound']:.2f} times as much.")
        for row in rows.values():
            row |= extra
            if "us" in row:
                row[unit] = least / row["us"] / scale
                row["of_copy"] = row[unit] / ceiling


def _own(inputs: Inputs) -> Inputs:
    """For a function that may work in place. What cannot be copied together is copied one by one."""
    found = copied(inputs)
    return pytree.tree_map(_own_one, inputs) if found is None else found


def _own_one(value: Any) -> Any:
    found = copied(value)
    if found is None:  # a tensor of an autograd graph, as its clone will be; or a handle, which stays
        return value.clone() if isinstance(value, torch.Tensor) else value
    return found


def _benchmark(functions: Mapping[str, Function], args: tuple[Any, ...], kwargs: dict[str, Any],
               where: torch.device, options: dict[str, Any]) -> dict[str, Measurement]:
    """`benchmark_kernel` takes positional or keyword arguments; with both, one tuple carries them."""
    if not kwargs:
        return benchmark_kernel(functions, args, device=where, **options)

    def unpacking(function: Function) -> Function:
        return lambda positional, named: function(*positional, **named)

    return benchmark_kernel({name: unpacking(f) for name, f in functions.items()}, (args, kwargs),
                            device=where, **options)


def _methods(times: Mapping[str, Measurement]) -> list[str]:
    """How they were measured; one line for those that were measured alike."""
    alike: dict[str, list[str]] = {}
    for name, measured in times.items():
        alike.setdefault(measured.method, []).append(name)
    return [f"{', '.join(names)}: {method}." for method, names in alike.items()]


def _time_row(measured: Measurement, baseline: Measurement | None) -> Row:
    row: Row = {"us": measured.median, "host_us": measured.host, "spread": measured.spread,
                "method": measured.method}
    if baseline is not None:
        row["speedup"] = baseline.median / measured.median
        noise = max(measured.spread, baseline.spread)
        row["within_noise"] = measured is not baseline and abs(row["speedup"] - 1) < noise
    return row


def _details(call: Callable[[], Any], where: torch.device) -> Row:
    taken = memory.measure(call, where)
    return {"peak_bytes": taken.peak, "allocations": taken.allocations,
            "launches": profile.launches(call, where)}


def _accuracy_row(found: accuracy.Accuracy | None) -> Row:
    if found is None:
        return {}
    lost = found.nan or found.inf  # beside which the worst of the others would look like the result's
    worst = {name: math.inf if lost else getattr(found, name) for name in ("max_abs", "max_rel", "ulp_max")}
    return {**worst, "outside": found.outside, "accuracy": found.as_dict()}
