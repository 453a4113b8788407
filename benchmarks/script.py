"""What the scripts share: their options, and the result file that they write."""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import sys
from pathlib import Path

from fusionrt.bench.results import Results, kind

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).parent / "results"


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, allow_abbrev=False,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="result file; default: its own of benchmarks/results, and "
                      "none for a part of the rows")
    made.add_argument("--quick", action="store_true", help="a few rows")
    return made


def need_gpu() -> None:
    if kind() != "gpu":
        raise SystemExit("this benchmark needs a CUDA GPU")


def results(name: str, doc: str | None, options: argparse.Namespace, partly: bool = False) -> Results:
    default = None if options.quick or partly else FOLDER / f"{name}.json"
    arguments = [a for a in sys.argv[1:] if not a.startswith("--json=")]
    if "--json" in arguments:  # where the file lay says nothing of what is in it
        at = arguments.index("--json")
        del arguments[at:at + 2]
    command = shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *arguments])
    return Results(name, doc, options.json or default, command=command, quick=options.quick,
                   say=functools.partial(print, flush=True))


def compile_here() -> None:
    """torch.compile in this process: Inductor's workers, of which each imports torch, would take the cores
    from what is measured."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def names(text: str | None) -> list[str]:
    """Of a list with commas."""
    return [name for name in (text or "").split(",") if name]
