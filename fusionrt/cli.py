"""The command `fusionrt`. Whatever is heavy is imported by the command that needs it."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

import click

import fusionrt
from fusionrt.terminal import Output, console, for_users, progress_bar, scaled

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rich.text import Text

    from fusionrt.precompile import Summary
    from fusionrt.runtime.cache import Info

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


class _Commands(click.Group):
    """`bench`, `convert` and `new-op` have files of their own: they are imported when someone looks at
    them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "bench", "convert", "new-op"])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "bench":
            from fusionrt.bench.command import bench
            return bench
        if cmd_name == "convert":
            from fusionrt.convert.command import convert
            return convert
        if cmd_name == "new-op":
            from fusionrt.new_op import new_op
            return new_op
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(fusionrt.__version__, prog_name="fusionrt")
def main() -> None:
    """Fused GPU kernels: begin an op, tend the cache, convert models, examine the installation, measure.

    The exit status is 0 where all went well, 1 where something failed or was found wrong, and 2 where the
    command line is: an unknown option or name, a value that does not fit, a file that is not there or cannot
    be written.
    """


# -- warmup ----------------------------------------------------------------------------------------

@main.command()
@click.option("--arch", default="native", show_default=True, metavar="NAMES",
              help="native (visible GPUs, or the CPU), all (every GPU's), cpu, or sm_80,sm_90,...")
@click.option("--ops", metavar="NAMES", help="Only these ops, or all.  [default: all; with --module none]")
@click.option("--dtypes", metavar="NAMES",
              help="Of these dtypes, or all, with float64.  [default: float32,bfloat16,float16]")
@click.option("--columns", metavar="NUMBERS", help="Lengths of the last dimension.  [default: 4096]")
@click.option("--rows", metavar="NUMBERS", help="How many rows calls have, beside thousands: 1,64.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compile on so many threads.")
@click.option("--module", metavar="NAMES",
              help="Modules with fused functions of your own: all of these, or with --ops those it names.")
@click.option("--no-backward", is_flag=True, help="For inference: no gradients.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def warmup(arch: str, ops: str | None, dtypes: str | None, columns: str | None, rows: str | None,
           jobs: int | None, module: str | None, no_backward: bool, as_json: bool) -> None:
    """Compile kernels into the cache; needs no GPU.

    The exit status is 1 when a kernel could not be compiled.
    """
    if module is not None:
        _search_working_directory()
    import numpy  # noqa: F401  before torch, which imports it from C++ and there drops a Ctrl-C
    with for_users(ValueError, status=2), progress_bar("looking for kernels", hidden=as_json) as progress:
        from fusionrt.precompile import COLUMNS
        from fusionrt.precompile import warmup as run
        summary = run(arch, ops, dtypes, jobs, module, not no_backward, progress,
                      COLUMNS if columns is None else columns, rows)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(summary)))
    else:
        _show_summary(summary)
    if summary.failed:
        raise SystemExit(1)


def _search_working_directory() -> None:
    """As `python -m` does: a script of pip's has its own directory there instead."""
    import sys
    from pathlib import Path
    sys.path.insert(0, str(Path.cwd()))


def _show_summary(summary: Summary) -> None:
    from rich.table import Table
    table = Table()
    values = {"compiled": summary.compiled, "already there": summary.present,
              "failed": len(summary.failed), "seconds": f"{summary.seconds:.1f}",
              "bytes": f"{summary.bytes:,}"}
    for column in values:
        table.add_column(column, justify="right")
    table.add_row(*map(str, values.values()))
    console().print(table)
    for line in summary.failures:
        click.echo(f"failed: {line}", err=True)


# -- cache -----------------------------------------------------------------------------------------

@main.group()
def cache() -> None:
    """Look at the kernel cache, tidy it, carry it to another machine."""


def _look() -> None:
    """Before a directory that cannot be read is said to be empty."""
    from fusionrt.runtime import cache
    with for_users(OSError):
        cache.look()


def _where() -> str:
    from fusionrt.runtime import cache
    folder = cache.directory()
    return "the memory of this process" if folder is None else str(folder)


def _everywhere() -> str:
    """What is read: the directory that is written to as well, and the others."""
    from fusionrt.runtime import cache
    return ", ".join([_where(), *(f"{folder} (read-only)" for folder in cache.read_only_directories())])


@cache.command()
def path() -> None:
    """Print the directory of the cache."""
    click.echo(_folder())


def _folder() -> Path:
    from fusionrt.runtime import cache
    folder = cache.directory()
    if folder is None:
        raise click.ClickException("there is no directory for the cache; fusionrt doctor says why")
    return folder


@cache.command("list")
def list_() -> None:
    """List the kernels, the last used ones first."""
    from rich.table import Table

    from fusionrt.runtime import cache
    _look()
    infos = sorted(cache.entries(), key=lambda info: -info.last_used)
    if not infos:
        click.echo(f"no kernels in {_everywhere()}")
        return
    table = Table("kernel", "arch")
    for column in ("size", "registers", "age"):
        table.add_column(column, justify="right")
    for info in infos:
        kernel, arch, registers = (_plain(info.metadata.get(name, "")) for name in (
            "kernel", "arch", "registers"))
        table.add_row(kernel, arch, _size(info.size), registers, _age(time.time() - info.last_used))
    console().print(table)
    for where, sizes in _by_place(infos).items():
        click.echo(f"{len(sizes)} kernels, {_size(sum(sizes))} in {where}")


def _by_place(infos: Iterable[Info]) -> dict[str, list[int]]:
    """The sizes of what there is in each directory, and in the memory of this process."""
    from fusionrt.runtime import cache
    found: dict[str, list[int]] = {}
    read_only: dict[str, list[int]] = {}
    for info in infos:
        folder = None if info.path is None else info.path.parent
        if folder in (None, cache.directory()):
            found.setdefault(str(folder or "the memory of this process"), []).append(info.size)
        else:
            read_only.setdefault(f"{folder} (read-only)", []).append(info.size)
    return found | read_only


def _plain(value: object) -> Text:
    """What a file says, for a terminal: no markup, and nothing that a terminal obeys."""
    from rich.text import Text
    return Text("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value)))


@cache.command()
def verify() -> None:
    """Read every entry; the exit status is 1 when one is damaged."""
    from fusionrt.runtime import cache
    _look()
    damaged = cache.verify()
    for file, reason in damaged:
        click.echo(f"{file}: {reason}")
    sound = sum(1 for _ in cache.entries())
    click.echo(f"{sound} sound, {len(damaged)} damaged in {_everywhere()}")
    if damaged:
        raise SystemExit(1)


class _Bytes(click.ParamType):
    """500M, 2G, 1000000."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = scaled(str(value).strip().upper().removesuffix("B"))
        if found is None:
            self.fail(f"{value!r} is not a size such as 500M, 2G or 1000000", param, ctx)
        return found


@cache.command(short_help="Drop the least recently used kernels beyond a size.")
@click.option("--max-bytes", type=_Bytes(), default="2G", show_default=True, metavar="SIZE",
              help="What may stay: 500M, 2G, 1000000.")
def prune(max_bytes: int) -> None:
    """Drop the kernels that were not used for longest until the rest fits."""
    from fusionrt.runtime import cache
    _look()
    with for_users(OSError):
        click.echo(f"dropped {cache.prune(max_bytes)} kernels from {_where()}")


@cache.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(yes: bool) -> None:
    """Remove every kernel, but not those of read-only directories."""
    from fusionrt.runtime import cache
    _look()
    if not yes:
        click.confirm(f"Remove all kernels from {_where()}?", abort=True)
    with for_users(OSError):
        click.echo(f"removed {cache.clear()} kernels from {_where()}")


@cache.command()
@click.argument("file", type=Output())
def export(file: Path) -> None:
    """Write every sound kernel into the archive FILE.

    The exit status is 1 when a damaged one is left out.
    """
    from fusionrt.runtime import archive
    _look()
    with for_users(OSError):
        done = archive.export_to(file)
    for path, reason in done.left_out:
        click.echo(f"left out: {path}: {reason}", err=True)
    more = f", {len(done.left_out)} left out" if done.left_out else ""
    # Of a pipe or a device, what is printed may be read as a part of the archive.
    click.echo(f"wrote {done.written} kernels to {file}{more}", err=not file.is_file())
    if done.left_out:
        raise SystemExit(1)


@cache.command("import", short_help="Take over the kernels of an archive that you trust.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
def import_(file: str) -> None:
    """Take over the kernels of the archive FILE: only of one whose maker you trust.

    The exit status is 1 when a kernel of it is refused.
    """
    from fusionrt.runtime import archive
    _folder()  # an import into this process's memory would be of no use
    _look()
    with for_users(OSError, ValueError):
        done = archive.import_from(file)
    for name, reason in done.refused:
        plain = name if name.isprintable() else repr(name)  # its maker may not be trusted
        click.echo(f"refused: {plain}: {reason}", err=True)
    click.echo(f"imported {done.imported} kernels into {_where()}, {done.present} already there, "
               f"{len(done.refused)} refused")
    if done.refused:
        raise SystemExit(1)


def _size(size: int) -> str:
    return f"{size / 1024:.1f} K" if size < 1 << 20 else f"{size / (1 << 20):.1f} M"


def _age(seconds: float) -> str:
    steps = (("d", 86400), ("h", 3600), ("min", 60))
    return next((f"{seconds / n:.0f} {unit}" for unit, n in steps if seconds >= n), "now")


# -- doctor ----------------------------------------------------------------------------------------

@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(as_json: bool) -> None:
    """Examine driver, packages and cache, and say what to do.

    The exit status is 1 when there is a problem; warnings do not count.
    """
    from fusionrt.diagnosis import doctor as examine
    report = examine()
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    else:
        from rich.markup import escape
        where = console()
        for check in report.checks:
            colour = _COLOURS[check.status]
            where.print(f"[{colour}]{check.status:8}[/] [bold]{escape(check.name)}[/]: "
                          f"{escape(check.detail)}", highlight=False, soft_wrap=True)
            if check.cure:
                where.print(f"         {escape(check.cure)}", highlight=False, soft_wrap=True)
        where.print(report.summary)
    if not report.ok:
        raise SystemExit(1)
