"""What all benchmarks share besides the measuring: options, where it ran, the result file."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
Row = dict[str, Any]


def kind() -> str:
    import torch
    return "gpu" if torch.cuda.is_available() else "cpu"


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="result file; default: its own of "
                      "benchmarks/results, and none for a part of the rows")
    made.add_argument("--quick", action="store_true", help="a few rows")
    return made


def need_gpu() -> None:
    if kind() != "gpu":
        raise SystemExit("this benchmark needs a CUDA GPU")


class Results:
    """Written after every row, so that an interrupted run leaves what it has, and says so."""

    def __init__(self, name: str, doc: str | None, options: argparse.Namespace,
                 partly: bool = False) -> None:
        default = None if options.quick or partly else FOLDER / f"{name}.json"
        self.path: Path | None = options.json or default
        self.rows: list[Row] = []
        self.content: dict[str, Any] = {
            "benchmark": name.removesuffix("-gpu").removesuffix("-cpu"), "complete": False,
            "quick": options.quick, "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": machine(), "versions": versions(), "method": (doc or "").strip(),
            "ceilings": {}, "notes": [], "rows": self.rows}

    def ceiling(self, name: str, measured: Row) -> float:
        """Note a ceiling once; its rate (the first key with a unit)."""
        known = self.content["ceilings"].setdefault(name, [])
        if measured not in known:
            known.append(measured)
        return float(next(value for key, value in measured.items() if key.endswith("/s")))

    def note(self, text: str) -> None:
        if text not in self.content["notes"]:
            self.content["notes"].append(text)
            print("note:", text, flush=True)

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}"
                        for k, v in row.items() if v is not None), flush=True)
        self._write()

    def finish(self, columns: Sequence[str]) -> None:
        self.content["complete"] = True
        self._write()
        print(f"\n{table(self.rows, columns)}")
        for name, measured in self.content["ceilings"].items():
            print(f"ceiling {name}: {span(measured)}")
        for text in self.content["notes"]:
            print("note:", text)
        print(f"wrote {self.path}" if self.path else "no file written (--json FILE)")

    def _write(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            body = ",\n".join("  " + json.dumps(row) for row in self.rows)
            head = json.dumps({**self.content, "rows": []}, indent=1).removesuffix('"rows": []\n}')
            self.path.write_text(f'{head}"rows": [\n{body}\n]}}\n')


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    cells = [list(columns), *([cell(row.get(c)) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(text.rjust(w) if i else text.ljust(w) for i, (text, w) in
                               enumerate(zip(line, widths, strict=True))) for line in cells)


def span(ceilings: Sequence[Row]) -> str:
    """Lowest and highest rate: `4.09 to 4.27 TB/s`."""
    unit = next(key for key in ceilings[0] if key.endswith("/s"))
    low, high = (cell(pick(row[unit] for row in ceilings)) for pick in (min, max))
    return f"{low if low == high else f'{low} to {high}'} {unit}"


def cell(value: Any) -> str:
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


# -- where -----------------------------------------------------------------------------------------

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
    found: Row = {"fusionrt": fusionrt.__version__,
                  "commit": _said("git", "describe", "--always", "--dirty"),
                  "python": platform.python_version(), "torch": torch.__version__}
    for name in ("cupy-cuda12x", "cupy-cuda13x", "numba", "llvmlite", "triton", "nvidia-cuda-nvrtc",
                 "nvidia-cuda-nvrtc-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if torch.cuda.is_available():
        found["driver"] = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found


def _said(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True,
                              cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.split("\n")[0].strip() or None
