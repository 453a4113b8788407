"""README.md says what the catalogue and the result files say."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks import results, tables  # noqa: E402
from fusionrt import ops  # noqa: E402, F401
from fusionrt.catalogue import OPS  # noqa: E402


def test_readme_is_what_would_be_generated():
    text = tables.README.read_text()
    assert tables.render(text) == text, "run `make report`"


def test_every_table_is_in_the_readme():
    found = re.findall(r"<!-- table: (\w+) -->", tables.README.read_text())
    assert sorted(found) == sorted(tables.TABLES)


def test_every_op_has_its_rows():
    table = tables.ops(results.FOLDER)
    assert [name for name in OPS if f"`{name}(" not in table] == []
    content = tables.load(results.FOLDER, "pointwise_large-gpu")
    if content is not None:
        benchmarked = {row["op"] for row in content["rows"]}
        assert [name for name in OPS if name not in benchmarked] == []


def write(folder, name, rows, **more):
    content = {"complete": True, "quick": False, "date": "2026-01-02", "ceilings": {
        "copy": [{"bytes": 1 << 28, "us": 65.6, "TB/s": 4.09}, {"bytes": 1 << 32, "TB/s": 4.27}]},
        "machine": {"gpu": "a GPU", "cpu": "a CPU", "torch_threads": 2},
        "versions": {"torch": "2", "fusionrt": "1", "driver": "3"}, "rows": rows, **more}
    (folder / f"{name}.json").write_text(json.dumps(content))


def row(**more):
    return {"op": "add_relu", "dtype": "bfloat16", "direction": "forward", "us": 100.4, "TB/s": 4.0,
            "of_copy": 0.978, "vs_eager": 1.9, "vs_compile": 0.95, **more}


def test_figures_come_from_the_files(tmp_path):
    write(tmp_path, "pointwise_large-gpu", [row(), row(op="mish", error="OutOfMemoryError")])
    table = tables.TABLES["pointwise_large"](tmp_path)
    assert "| `add_relu` | – | – | 0.98 (1.90×) | – | – | – |" in table
    assert "*a GPU, driver 3, torch 2, fusionrt 1, copy 4.09 to 4.27 TB/s, " \
        "rows that failed: 1; " in table
    assert tables.TABLES["against_compile"](tmp_path).count("0.95×") == 1, "a losing row stays"
    text = "a\n<!-- table: startup_cpu -->\nold\n<!-- end -->\nz"
    assert tables.render(text, tmp_path) == text.replace("old", tables.NOT_MEASURED)


@pytest.mark.parametrize("state", [{"complete": False}, {"quick": True}])
def test_partial_runs_do_not_count(tmp_path, state):
    write(tmp_path, "pointwise_large-gpu", [row()], **state)
    assert tables.TABLES["pointwise_large"](tmp_path) == tables.NOT_MEASURED


@pytest.mark.parametrize(("name", "file", "made", "expected"), [
    ("against_compile", "pointwise_large-gpu", row(),
     "| `add_relu` bfloat16 | 100 (1.90×, 0.95×) |"),
    ("pointwise_sweep", "pointwise_sweep-gpu", row(table="sweep", elements=1 << 20),
     "| `add_relu` bfloat16 | 100 (1.90×, 0.95×) |"),
    ("sweep_host", "pointwise_sweep-gpu",
     row(table="sweep", elements=1 << 13, host_us=5.5, host_vs_eager=2.0),
     "| `add_relu` | 5.50 (2.00×, –) |"),
    ("three_way_device", "pointwise_sweep-gpu", row(table="three-way", elements=500_000),
     "| `add_relu` 500 K | 100 (1.90×, 0.95×) |"),
    ("three_way_wall", "pointwise_sweep-gpu",
     row(table="three-way", elements=50_000_000, wall_us=7.0, wall_vs_eager=3, wall_vs_compile=1.5),
     "| `add_relu` 50 M | 7.00 (3.00×, 1.50×) |"),
    ("launch_overhead", "launch_overhead-gpu",
     {"call": "torch.add", "group": "forward", "host_us": 6.1, "vs_torch.add": 1.0},
     "| torch.add | forward | 6.10 | 1.00 | – |"),
    ("startup_gpu", "startup-gpu",
     {"what": "x", "cache": "warm", "ms": 90.0, "import_fusionrt": 1.0, "own_modules": 60.0,
      "third_party": 10.0, "first_call": 19.0}, "| x | warm | 90.0 | 61.0 | 10.0 | 19.0 |"),
    ("warmup", "warmup_time-gpu",
     {"arch": "sm_90", "cache": "cold", "seconds": 20.0, "compiled": 3, "present": 1, "MB": 1.5,
      "jobs": 8}, "| sm_90 | cold | 20.0 | 4 | 1.50 | 8 |"),
    ("pointwise_cpu", "pointwise_cpu", row(elements=16 << 20),
     "| `add_relu` forward | 100 (1.90×, 0.95×) |"),
])
def test_tables(tmp_path, name, file, made, expected):
    write(tmp_path, file, [made])
    assert expected in tables.TABLES[name](tmp_path).splitlines()
