"""Result files: those of the repository, and made-up ones."""

import json
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def row(**more):
    return {"op": "add_relu", "dtype": "bfloat16", "direction": "forward", "elements": 1 << 26,
            "bytes": 3 << 27, "us": 100.0, "TB/s": 4.0265, "of_copy": 0.97, "spread": 0.002,
            "eager_us": 190.0, "vs_eager": 1.9, **more}


def content(*rows, **more):
    return {"benchmark": "pointwise_large", "complete": True, "quick": False, "date": "2026-01-02",
            "machine": {"gpu": "a GPU", "cpu": "a CPU", "cores": 2},
            "versions": {"torch": "2.9", "triton": None}, "method": "By `events`.\n\nTwice.",
            "ceilings": {"copy": [{"bytes": 1 << 28, "us": 65.6, "TB/s": 4.09},
                                  {"bytes": 1 << 30, "us": 253.0, "TB/s": 4.24}]},
            "notes": [], "rows": list(rows), **more}


def sweep():
    return content(*(row(elements=1 << k, bytes=6 << k, us=2 + (1 << k) / 5e5, dtype=dtype,
                         **{"TB/s": (6 << k) / (2 + (1 << k) / 5e5) / 1e6}, vs_compile=1.5)
                     for dtype in ("float32", "bfloat16") for k in range(13, 28, 2)))
