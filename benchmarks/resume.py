"""Sweeps that may be cut short: the next call keeps the rows of the result file and goes on from there."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence

from fusionrt.bench.results import Results, Row, load


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="every row, not only the representative ones")
    add_resume(parser, 90)


def add_resume(parser: argparse.ArgumentParser, seconds: float) -> None:
    parser.add_argument("--resume", action="store_true", help="go on with the rows that the file lacks")
    parser.add_argument("--seconds", type=float, default=seconds,
                        help="begin no row after that (default: %(default)s)")


def remaining(run: Results, cells: Sequence[Row], options: argparse.Namespace,
              prepare: Callable[[Sequence[Row]], object] | None = None) -> Iterator[Row]:
    """The cells, each the settings of a row, that the file has no row of, until time is up, which begins
    after `prepare` has seen them. A row that failed counts as none."""
    if options.resume and run.path is not None and run.path.exists():
        for row in load(run.path)["rows"]:
            if "error" not in row:
                run.add(**row)
    todo = [cell for cell in cells if not any(cell.items() <= row.items() for row in run.rows)]
    if prepare is not None:
        prepare(todo)
    start = time.perf_counter()
    for done, cell in enumerate(todo):
        if time.perf_counter() - start > options.seconds:
            run.note(f"{len(todo) - done} rows are left: --resume goes on")
            return
        yield cell


def is_complete(run: Results, cells: Sequence[Row]) -> bool:
    return all(any(cell.items() <= row.items() for row in run.rows) for cell in cells)
