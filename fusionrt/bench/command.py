"""The command `fusionrt bench`: options, what is asked of the suite, what is shown and written."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fusionrt.terminal import (
    Output,
    console,
    device_option,
    for_users,
    found_device,
    progress_bar,
    scaled,
)

if TYPE_CHECKING:
    from fusionrt.bench.results import Results
    from fusionrt.bench.suite import Cell

METHOD = """Every op in turn on random data, in rows of 4096, ours and the rivals' taking turns.

On a GPU: device time from replayed CUDA graphs; calls below 16 MB meet a warm L2 (`cache`), larger ones
rotate their input sets; up to 1 Mi elements also the host's time of a call (`host_us`) and a user's
(`wall_us`) in bursts. On a CPU: wall time of a call. `of_copy`: the fraction of the rate of a copy of as
many bytes, measured in the same run. Written by `fusionrt bench`."""
PLOTS = (".png", ".svg", ".pdf")


class Names(click.ParamType):
    """A list with commas; `there_are()` says what there is, if any name is not."""

    name = "names"

    def __init__(self, what: str, there_are: Callable[[], Sequence[str]]) -> None:
        self.what, self.there_are = what, there_are

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        names = [name.strip() for name in value.split(",") if name.strip()]
        known = self.there_are()
        for name in names:
            if name not in known:
                self.fail(f"no {self.what} {name!r}; there are {', '.join(known)}", param, ctx)
        if not names:
            self.fail(f"no {self.what} given; there are {', '.join(known)}", param, ctx)
        return list(dict.fromkeys(names))


class Sizes(click.ParamType):
    """64K,1M,5000000: elements."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        sizes = []
        for text in value.split(","):
            size = scaled(text)
            if not size:
                self.fail(f"{text.strip()!r} is not a number of elements such as 64K, 1M or 5000000",
                          param, ctx)
            sizes.append(size)
        return sizes


class Percentage(click.ParamType):
    name = "percentage"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from fusionrt.bench.baseline import percentage
        try:
            return percentage(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _dtypes() -> list[str]:
    from fusionrt.bench.case import DTYPES
    return list(DTYPES)


def _rivals() -> list[str]:
    from fusionrt.bench.rivals import RIVALS
    return list(RIVALS)


@click.command(short_help="Measure ops beside eager torch and other rivals.")
@click.argument("ops", nargs=-1, metavar="[OP ...]")
@click.option("--list", "only_list", is_flag=True, help="List ops, dtypes and rivals, and measure nothing.")
@click.option("--sizes", type=Sizes(), default="64K,1M,16M", show_default=True, metavar="SIZES",
              help="Elements: 64K, 1M, 5000000.")
@click.option("--dtypes", type=Names("dtype", _dtypes), default="float32,bfloat16", show_default=True,
              metavar="NAMES")
@click.option("--backward", is_flag=True, help="The backward pass too, and forward and backward in one.")
@click.option("--against", type=Names("rival", _rivals), default="eager", show_default=True, metavar="NAMES",
              help="eager, compile, compile-max, liger, ... (--list); those that are absent are named.")
@device_option
@click.option("--json", "json_file", type=Output(), metavar="FILE", help="Write the rows, after each one.")
@click.option("--plot", "plot_file", type=Output(), metavar="FILE", help="Draw them (.png, .svg, .pdf).")
@click.option("--html", "html_file", type=Output(), metavar="FILE", help="Write a page about them.")
@click.option("--baseline", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Compare with the rows of an earlier --json FILE; warns if it has none of them.")
@click.option("--fail-on", type=Percentage(), metavar="PERCENT",
              help="With --baseline: the exit status is 1 if a row is slower by more, beyond its spread, or "
                   "none can be compared.")
def bench(ops: tuple[str, ...], only_list: bool, sizes: list[int], dtypes: list[str], backward: bool,
          against: list[str], device: str | None, json_file: Path | None, plot_file: Path | None,
          html_file: Path | None, baseline: Path | None, fail_on: float | None) -> None:
    """Measure ops against the rivals that are installed; all ops by default.

    The exit status is 1 when a row fails, or is slower than --baseline and --fail-on allow.

    \b
        fusionrt bench bias_gelu --sizes 1M,16M --against eager,compile --html report.html
    """
    if fail_on is not None and baseline is None:
        raise click.UsageError("--fail-on needs --baseline FILE, which says what is slower")
    _check_files(json_file, plot_file, html_file)
    device = found_device(device)
    if only_list:
        _show(device)
        return
    with for_users(OSError, ValueError):
        from fusionrt.bench import results
        earlier = None if baseline is None else results.load(baseline)
        cells = _cells(_known(ops), sizes, dtypes, backward, against)
        run = results.Results(f"ops-{'gpu' if device == 'cuda' else 'cpu'}", METHOD, json_file,
                              command=_command(ops, sizes, dtypes, backward, against, device), say=click.echo)
        _measure(run, cells, device)
        _write(run.content, plot_file, html_file)
    slower = earlier is not None and _compare(run.content, earlier, fail_on)
    failed = sum("error" in row for row in run.rows)
    if failed:
        click.echo(f"{failed} of {len(run.rows)} rows failed", err=True)
    if failed or slower:
        raise SystemExit(1)


def _check_files(json_file: Path | None, plot_file: Path | None, html_file: Path | None) -> None:
    """Before anything is measured."""
    written = [file.resolve() for file in (json_file, plot_file, html_file) if file is not None]
    if len({*written}) < len(written):
        raise click.UsageError("--json, --plot and --html must be different files")
    if plot_file is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise click.ClickException("--plot needs matplotlib: pip install 'fusionrt[bench]'")
        if plot_file.suffix.lower() not in PLOTS:
            raise click.BadParameter(f"{plot_file} must end in one of {', '.join(PLOTS)}",
                                     param_hint="--plot")


def _known(ops: Sequence[str]) -> list[str]:
    from fusionrt.catalogue import OPS
    from fusionrt.op_names import ALIASES
    chosen = [ALIASES.get(name, name) for name in ops]
    for name in chosen:
        if name not in OPS:
            raise click.BadParameter(f"no op {name!r}; there are {', '.join(sorted(OPS))}", param_hint="OP")
    return list(dict.fromkeys(chosen)) or list(OPS)


def _cells(ops: Sequence[str], sizes: Sequence[int], dtypes: Sequence[str], backward: bool,
           against: Sequence[str]) -> list[Cell]:
    from fusionrt.bench.case import BACKWARD, BOTH, FORWARD
    from fusionrt.bench.suite import Cell
    directions = (FORWARD, BACKWARD, BOTH) if backward else (FORWARD,)
    return [Cell(op, dtype, size, directions, against) for op in ops for dtype in dtypes
            for size in dict.fromkeys(sizes)]


def _command(ops: Sequence[str], sizes: Sequence[int], dtypes: Sequence[str], backward: bool,
             against: Sequence[str], device: str) -> str:
    """That which measures the same rows again."""
    words = ["fusionrt", "bench", *ops, "--sizes", ",".join(map(str, sizes)), "--dtypes", ",".join(dtypes),
             *["--backward"] * backward, "--against", ",".join(against), "--device", device]
    return " ".join(words)


def _measure(run: Results, cells: Sequence[Cell], device: str) -> None:
    from fusionrt.bench import suite
    with progress_bar("compiling kernels") as progress:
        if progress is not None:
            run.say = _silence  # the bar instead of rows
        suite.run(cells, run, device, progress)
    run.say = click.echo
    there = [name for name in cells[0].against if name not in run.content["absent"]]
    rivals = [f"{stem}{name}{end}" for name in there for stem, end in
              (("vs_", ""), ("host_vs_", ""), ("", "_absent"), ("", "_error"))]
    run.finish((*suite.SETTINGS, *suite.FIGURES, "host_us", *rivals, "bound", "error"))


def _silence(text: str) -> None:
    pass


def _write(content: dict[str, Any], plot_file: Path | None, html_file: Path | None) -> None:
    if plot_file is not None:
        from fusionrt.bench import plot
        plot.from_results(content, plot_file)
        click.echo(f"wrote {plot_file}")
    if html_file is not None:
        from fusionrt.bench import report
        report.write(content, html_file)
        click.echo(f"wrote {html_file}")


def _compare(content: dict[str, Any], earlier: dict[str, Any], fail_on: float | None) -> bool:
    """Say what became slower; whether that is too much."""
    from fusionrt.bench import baseline
    changes = baseline.compare(content["rows"], earlier["rows"], 0.0 if fail_on is None else fail_on)
    click.echo(baseline.report(changes, content, earlier))
    if not changes:
        text = "the baseline has no time of these rows, and nothing was compared"
        if fail_on is not None:
            raise click.ClickException(f"--fail-on: {text}")
        click.echo(f"Warning: {text}", err=True)
    return fail_on is not None and any(change.guilty for change in changes)


def _show(device: str) -> None:
    from rich.table import Table

    from fusionrt.bench.case import DTYPES
    from fusionrt.bench.rivals import RIVALS
    from fusionrt.catalogue import OPS
    click.echo(f"ops: {', '.join(sorted(OPS))}\n\ndtypes: {', '.join(DTYPES)}\n\nrivals on {device}:")
    table = Table("name", "what", "here")
    for rival in RIVALS.values():
        reason = rival.missing(device)
        table.add_row(rival.name, rival.what, "present" if reason is None else f"absent: {reason}")
    console().print(table)
