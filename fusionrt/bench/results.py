"""Where a benchmark ran, and the file that its rows go to.

A result file is JSON: `benchmark`, `date`, `machine`, `versions`, `method` (in words), `command` (that ran
it), `ceilings` (what a copy reached in this run), `absent` (rivals that were not there, with the reason),
`notes`, `complete` (false: interrupted), `quick` (a few rows only), `rows`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fusionrt.errors import one_line
from fusionrt.files import write

Row = dict[str, Any]
NOISE = "≈"  # before a ratio: nothing can be said of it
PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "numba", "llvmlite", "triton", "nvidia-cuda-nvrtc",
            "nvidia-cuda-nvrtc-cu12", "liger-kernel", "apex", "transformer-engine", "torchvision", "timm",
            "transformers")


class Results:
    """Rows as they come. The file, if there is one, is written after each: an interrupted run leaves what
    it has, and says so. `say` gets a line for every row and note, and the table at the end.

        run = Results("softmax-gpu", __doc__, Path("softmax-gpu.json"))
        run.add(op="softmax", dtype="bfloat16", us=12.5)
        run.finish(("op", "dtype", "us"))
    """

    def __init__(self, name: str, method: str | None = None, path: Path | None = None, *,
                 command: str | None = None, quick: bool = False,
                 say: Callable[[str], object] = print) -> None:
        self.path, self.rows, self.say = path, list[Row](), say
        self.content: dict[str, Any] = {
            "benchmark": name.removesuffix("-gpu").removesuffix("-cpu"), "complete": False, "quick": quick,
            "date": time.strftime("%Y-%m-%d", time.gmtime()), "machine": machine(), "versions": versions(),
            "method": (method or "").strip(), "command": command, "ceilings": {}, "absent": {}, "notes": [],
            "rows": self.rows}

    def ceiling(self, name: str, measured: Row) -> float:
        """Note a ceiling once; its rate (the first key with a unit)."""
        known = self.content["ceilings"].setdefault(name, [])
        if measured not in known:
            known.append(measured)
        return float(next(value for key, value in measured.items() if key.endswith("/s")))

    def absent(self, name: str, reason: str) -> None:
        """A rival that has no row anywhere."""
        if name not in self.content["absent"]:
            self.content["absent"][name] = reason
            self.say(f"{name} is absent: {reason}")

    def note(self, text: str) -> None:
        if text not in self.content["notes"]:
            self.content["notes"].append(text)
            self.say(f"note: {text}")

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        self.say("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}"
                            for k, v in row.items() if v is not None))
        self._write()

    def finish(self, columns: Sequence[str]) -> None:
        self.content["complete"] = True
        self._write()
        text = table(self.rows, columns)
        self.say(f"\n{text}")
        if NOISE in text:
            self.say(f"{NOISE}: the difference is smaller than one of the spreads")
        for name, measured in self.content["ceilings"].items():
            self.say(f"ceiling {name}: {span(measured)}")
        for rival, reason in self.content["absent"].items():
            self.say(f"{rival} is absent: {reason}")
        for text in self.content["notes"]:
            self.say(f"note: {text}")
        self.say(f"wrote {self.path}" if self.path else "no file written (--json FILE)")

    def _write(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            body = ",\n".join("  " + dumps(row) for row in self.rows)
            head = dumps({**self.content, "rows": []}, indent=1).removesuffix('"rows": []\n}')
            write(self.path, f'{head}"rows": [\n{body}\n]}}\n')


def dumps(tree: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: what it has no words for is text. So are NaN and infinities, which others
    refuse as Python writes them; `load` turns them back."""
    return json.dumps(_replaced(tree, _as_text), indent=indent, default=str, allow_nan=False)


def load(path: Path) -> dict[str, Any]:
    """A result file. Raises ValueError for a file that is none."""
    try:
        content = _replaced(json.loads(path.read_text(encoding="utf-8")), _as_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a result file: {error}") from error
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f'{path} is not a result file: it has no list of "rows"')
    for part in ("machine", "versions"):
        if not isinstance(content.get(part, {}), dict):
            raise ValueError(f'{path} is not a result file: "{part}" is {content[part]!r}')
    return dict(content)


def _replaced(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(tree, Mapping):
        return {key: _replaced(value, leaf) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_replaced(value, leaf) for value in tree]
    return leaf(tree)


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _as_number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


def within_noise(row: Row, ratio: str) -> bool:
    """Whether a figure such as `vs_eager` or `wall_vs_compile` differs from 1 by less than one of the spreads
    of the two times, as far as the row has them."""
    stem, vs, rival = ratio.partition("vs_")
    value, spreads = row.get(ratio), [row.get(f"{stem}spread"), row.get(f"{stem}{rival}_spread")]
    numbers = [s for s in spreads if isinstance(s, (int, float))]
    return bool(vs) and isinstance(value, (int, float)) and abs(value - 1) < max(numbers, default=0)


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """As text. A column that no row has is left out."""
    columns = [c for c in columns if any(row.get(c) is not None for row in rows)]
    cells = [columns, *([(NOISE if within_noise(row, c) else "") + cell(row.get(c)) for c in columns]
                        for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(text.rjust(w) if i else text.ljust(w) for i, (text, w) in
                               enumerate(zip(line, widths, strict=True))) for line in cells)


def span(ceilings: Sequence[Row]) -> str:
    """Lowest and highest rate: `4.09 to 4.27 TB/s`."""
    unit = next(key for key in ceilings[0] if key.endswith("/s"))
    low, high = (cell(pick(row[unit] for row in ceilings)) for pick in (min, max))
    return f"{low if low == high else f'{low} to {high}'} {unit}"


def cell(value: Any) -> str:
    """Three digits of a number, – for None."""
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


def why(error: Exception) -> str:
    """An error as one short line of a result file: the first of those that led to each other."""
    while isinstance(error.__context__, Exception):
        error = error.__context__
    return one_line(error)[:200]


# -- where -----------------------------------------------------------------------------------------

def kind() -> str:
    """Of this machine: gpu or cpu."""
    import torch
    return "gpu" if torch.cuda.is_available() else "cpu"


def machine() -> Row:
    import torch
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    affinity = getattr(os, "sched_getaffinity", None)
    return {"gpu": gpu, "cpu": _cpu_model(),
            "cores": len(affinity(0)) if affinity else os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "load_at_start": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None}


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> Row:
    import torch

    import fusionrt
    found: Row = {"fusionrt": fusionrt.__version__, "commit": _commit(),
                  "python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if torch.cuda.is_available():
        found["driver"] = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found


def _commit() -> str | None:
    """Of this checkout; an installed package has none, though it may lie in someone else's."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    return _said("git", "-C", str(root), "describe", "--always", "--dirty")


def _said(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.split("\n")[0].strip() or None
