"""The command `fusionrt convert`: models by name, converted, validated, measured and saved."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from fusionrt.errors import one_line
from fusionrt.terminal import console, device_option, for_users, found_device, progress_bar

SUMMARY = "conversion_summary.json"
KINDS = (".safetensors", ".json", ".html")  # of a model's files
Row = dict[str, Any]


class Wanted(NamedTuple):
    """What is done with each model."""

    device: str
    dtype: str
    batch: int
    random_init: bool
    validate: bool
    save_path: Path | None


@click.command(short_help="Convert models, prove it right, measure the gain.")
@click.argument("more", nargs=-1, metavar="")
@click.option("--models", "--model", "models", multiple=True, metavar="NAME ...",
              help="Names of --list-models, or such as timm:resnet26d.")
@click.option("--list-models", is_flag=True, help="List the models by name, and convert nothing.")
@click.option("--save-path", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
              help="Write weights (safetensors), facts (JSON) and a page about each model, and a summary.")
@device_option
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), default="float32",
              show_default=True, help="Of weights and images.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
              help="Images or sequences a call.")
@click.option("--random-init", is_flag=True, help="Random weights: nothing is downloaded.")
@click.option("--no-validate", is_flag=True, help="Do not compare results with the original's.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def convert(more: tuple[str, ...], models: tuple[str, ...], list_models: bool, save_path: Path | None,
            device: str | None, dtype: str, batch: int, random_init: bool, no_validate: bool,
            as_json: bool) -> None:
    """Convert models, prove that they compute the same, measure what they gain.

    The exit status is 1 when a model could not be converted.

    \b
        fusionrt convert --models resnet50 bert-base-uncased --save-path converted --device cuda
    """
    if list_models:
        _show_models(as_json)
        return
    names = _names([*models, *more])
    wanted = Wanted(found_device(device), dtype, batch, random_init, not no_validate, save_path)
    if save_path is not None:
        _check_folder(save_path, names)
    rows: list[Row] = []
    with progress_bar("importing torch", hidden=as_json) as progress:
        def step(name: str, stage: int, doing: str) -> None:
            if progress is not None:
                progress(3 * len(rows) + stage, 3 * len(names), f"{doing} {name}")

        for name in names:
            rows.append(_one(name, wanted, step))
    from fusionrt.bench.results import dumps
    from fusionrt.files import write
    if save_path is not None:
        with for_users(OSError):
            write(save_path / SUMMARY, dumps(rows, indent=1) + "\n")
    if as_json:
        click.echo(dumps(rows))
    else:
        _show_summary(rows, save_path)
    if any("error" in row for row in rows):
        raise SystemExit(1)


def _names(given: Sequence[str]) -> list[str]:
    """Separated by spaces or commas, each once; all of them known."""
    from fusionrt.convert import registry
    names = list(dict.fromkeys(name for words in given for name in words.split(",") if name))
    if not names:
        raise click.UsageError("no model given: --models NAME ..., or --list-models to see which there are")
    for name in names:
        try:
            registry.find(name)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--models") from error
    return names


def _check_folder(folder: Path, names: Sequence[str]) -> None:
    """Before anything is converted."""
    from fusionrt.convert import registry
    from fusionrt.files import why_not_writable
    if registry.missing("safetensors"):
        raise click.ClickException("--save-path needs safetensors: pip install 'fusionrt[models]'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(f"{folder} cannot be written: {error.strerror}",
                                 param_hint="--save-path") from error
    for file in (folder / SUMMARY, *(_stem(folder, name, kind) for name in names for kind in KINDS)):
        fault = why_not_writable(file)
        if fault is not None:
            raise click.BadParameter(f"{file} cannot be written: {fault}", param_hint="--save-path")


def _stem(folder: Path, name: str, kind: str = "") -> Path:
    """What the names of a model's files begin with, or one of them."""
    return folder / (re.sub(r"[^\w.-]+", "-", name) + kind)


def _one(name: str, wanted: Wanted, step: Callable[[str, int, str], None]) -> Row:
    """The row of a model; what fails becomes a row with an `error`."""
    from fusionrt.convert.registry import ModelUnavailable
    from fusionrt.convert.validate import ValidationError
    try:
        return _converted(name, wanted, step)
    except (ModelUnavailable, ValidationError, OSError) as error:
        return {"name": name, "error": str(error)}
    except Exception as error:  # one model less; it says why
        return {"name": name, "error": one_line(error)}


def _converted(name: str, wanted: Wanted, step: Callable[[str, int, str], None]) -> Row:
    import torch

    from fusionrt.convert import registry
    from fusionrt.convert.model import ModelConverter
    from fusionrt.convert.save import save_converted
    step(name, 0, "building")
    model = registry.build(name, wanted.random_init).to(wanted.device, getattr(torch, wanted.dtype))
    inputs = registry.example_inputs(name, model, wanted.batch, wanted.device)
    step(name, 1, "converting")
    converter = ModelConverter(wanted.validate)
    fast = converter.convert_model(model, example_inputs=inputs.kwargs or inputs.args)
    report = converter.report()
    row: Row = {"name": name, "batch": wanted.batch, "parameters": sum(p.numel() for p in model.parameters()),
                **report.as_dict()}
    if wanted.save_path is not None:
        step(name, 2, "saving")
        page = _stem(wanted.save_path, name, ".html")
        files = [*save_converted(fast, _stem(wanted.save_path, name)), page]
        report.to_html(page)
        row["files"] = [str(file) for file in files]
    return row


# -- what is shown ---------------------------------------------------------------------------------

def _show_models(as_json: bool) -> None:
    from fusionrt.convert import registry
    if as_json:
        click.echo(json.dumps([{"name": name, "family": entry.family, "package": entry.package,
                                "installed": not registry.missing(entry.package),
                                "weights": entry.published} for name, entry in registry.MODELS.items()]))
        return
    from rich.markup import escape
    from rich.table import Table
    table = Table("family", "model", "package", "here", "weights")
    before = ""
    for name, entry in registry.MODELS.items():
        here = "absent: pip install 'fusionrt[models]'" if registry.missing(entry.package) else "installed"
        table.add_row("" if entry.family == before else entry.family, name, entry.package, escape(here),
                      "published" if entry.published else "random only")
        before = entry.family
    console().print(table)
    click.echo(f"Any other model of {', '.join(registry.PACKAGES)}: PACKAGE:NAME, as timm:resnet26d.")


def _show_summary(rows: Sequence[Row], save_path: Path | None) -> None:
    from rich.markup import escape
    from rich.table import Table
    table = Table("model", title="Conversion summary")
    for title in ("parameters", "replaced", "kernels", "speed-up", "error / original's", "seconds"):
        table.add_column(title, justify="right")
    table.add_column("validation")
    for row in rows:
        if "error" not in row:
            table.add_row(escape(row["name"]), *_figures(row), escape(_validation(row)))
    if table.rows:
        console().print(table)
    for row in rows:
        for key, why in row.get("rolled_back", {}).items():
            click.echo(f"{row['name']}: undone: {key} ({why})")
        if "error" in row:
            click.echo(f"failed: {row['name']}: {row['error']}", err=True)
    if save_path is not None:
        files = sum(len(row.get("files", ())) for row in rows)
        click.echo(f"wrote {files} files and {SUMMARY} to {save_path}")


def _figures(row: Row) -> list[str]:
    stats, verdict = row["stats"], row["validation"] or {}
    errors = [verdict.get(key) for key in ("error", "own_error")]
    kernels = [stats["kernels_before"], stats["kernels_after"]]
    return [f"{row['parameters'] / 1e6:.1f} M", str(stats["total_replaced"]),
            "–" if None in kernels else f"{kernels[0]:g} → {kernels[1]:g}",
            f"{stats['speedup_achieved']:.2f}×",
            "–" if None in errors else f"{errors[0]:.1e} / {errors[1]:.1e}", f"{row['seconds']:.1f}"]


def _validation(row: Row) -> str:
    return "none" if row["validation"] is None else str(row["validation"]["reason"])
