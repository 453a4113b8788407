"""What the commands of `fusionrt` share: how they write, what they take, how they fail."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from fusionrt.precompile import Progress

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
device_option = click.option("--device", type=click.Choice(["cuda", "cpu"]),
                             help="[default: cuda where there is a GPU]")


def found_device(chosen: str | None) -> str:
    """Of `device_option`."""
    import torch
    there = torch.cuda.is_available()
    if chosen == "cuda" and not there:
        raise click.BadParameter("there is no CUDA GPU; fusionrt doctor says why", param_hint="--device")
    return chosen or ("cuda" if there else "cpu")


def console() -> Console:
    from rich.console import Console
    made = Console()
    return made if made.is_terminal else Console(width=200)  # nothing folded in a pipe


@contextlib.contextmanager
def progress_bar(first: str, hidden: bool = False) -> Iterator[Progress | None]:
    """A bar on a terminal, nothing elsewhere. `first`: what it says before the first step."""
    where = console()
    if hidden or not where.is_terminal:
        yield None
        return
    from rich import progress
    columns = ("{task.description}", progress.BarColumn(), progress.MofNCompleteColumn(),
               progress.TimeRemainingColumn())
    # No refreshing thread: it would disturb what is measured.
    with progress.Progress(*columns, console=where, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(first, total=None)
        yield lambda done, total, name: bar.update(
            task, completed=done, total=total, description=name, refresh=True)


@contextlib.contextmanager
def for_users(*expected: type[Exception], status: int = 1) -> Iterator[None]:
    """What users can cause is said in one line, without a traceback. `status`: 2 where the command line is
    the cause."""
    try:
        yield
    except BrokenPipeError:  # click's: whoever read has enough
        raise
    except expected as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename:
            text = f"{error.filename}: {error.strerror}"
        raise (click.UsageError if status == 2 else click.ClickException)(text) from error


def scaled(text: str) -> int | None:
    """64K as 65536; None for what is no number, or one that nothing has so many of."""
    found = re.fullmatch(r"(\d{1,18})([KMG]?)", text.strip().upper())
    return None if found is None else int(found[1]) * _UNITS[found[2]]


class Output(click.ParamType):
    """A file to write, of which is asked before the work whose results it will hold."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from fusionrt.files import why_not_writable
        fault = why_not_writable(value)
        if fault is not None:
            self.fail(f"{value} cannot be written: {fault}", param, ctx)
        return Path(value)
