"""README.md and BENCHMARKS.md say what the catalogue and the result files say."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks import run, script, tables  # noqa: E402
from benchmarks.families import POINTWISE, members  # noqa: E402
from fusionrt.catalogue import OPS  # noqa: E402


def shown(document):
    return re.findall(r"<!-- table: (\w+) -->", document.read_text())


@pytest.mark.parametrize("document", tables.DOCUMENTS, ids=lambda path: path.name)
def test_documents_are_what_would_be_generated(document):
    text = document.read_text()
    assert tables.render(text) == text, "run `make report`"
    assert len(set(shown(document))) == len(shown(document)) > 0


def test_every_table_is_shown():
    # The ops are no figures; what a call costs is cut short in README.md.
    assert sorted([*shown(tables.BENCHMARKS), "launch_calls", "ops"]) == sorted(tables.TABLES)
    assert set(shown(tables.README)) < set(tables.TABLES)


def test_the_table_of_benchmarks_names_them_all():
    lines = re.findall(r"^\| `(\w+)` \|.*\| (\w+) \|$", (ROOT / "benchmarks/README.md").read_text(), re.M)
    assert dict(lines) == {name: {"gpu, cpu": "both"}.get(kinds, kinds.upper())
                           for name, kinds in run.BENCHMARKS.items()}


def test_every_op_has_its_rows():
    table = tables.ops(script.FOLDER)
    assert [name for name in OPS if f"`{name}(" not in table] == []
    content = tables.load(script.FOLDER, "pointwise_large-gpu")
    if content is not None:
        benchmarked = {row["op"] for row in content["rows"]}
        assert [name for name in members(POINTWISE) if name not in benchmarked] == []


def write(folder, name, rows, **more):
    content = {"complete": True, "quick": False, "date": "2026-01-02", "ceilings": {
        "copy": [{"bytes": 1 << 28, "us": 65.6, "TB/s": 4.09}, {"bytes": 1 << 32, "TB/s": 4.27}]},
        "machine": {"gpu": "a GPU", "cpu": "a CPU", "torch_threads": 2},
        "versions": {"torch": "2", "fusionrt": "1", "driver": "3"}, "notes": [], "rows": rows, **more}
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
    assert tables.TABLES["against_compile"](tmp_path).count("**0.95×**") == 1, "a losing row stays"
    text = "a\n<!-- table: startup_cpu -->\nold\n<!-- end -->\nz"
    assert tables.render(text, tmp_path) == text.replace("old", tables.NOT_MEASURED)


@pytest.mark.parametrize("state", [{"complete": False}, {"quick": True}])
def test_partial_runs_do_not_count(tmp_path, state):
    write(tmp_path, "pointwise_large-gpu", [row()], **state)
    assert tables.TABLES["pointwise_large"](tmp_path) == tables.NOT_MEASURED


def test_what_a_partial_run_lacks_is_said(tmp_path):
    write(tmp_path, "pointwise_large-gpu", [row()], complete=False, notes=["a part of the ops"])
    table = tables.TABLES["pointwise_large"](tmp_path)
    assert "`add_relu`" in table and "**incomplete**, a part of the ops; " in table


@pytest.mark.parametrize(("name", "file", "made", "expected"), [
    ("against_compile", "pointwise_large-gpu", row(),
     "| `add_relu` bfloat16 | 100 (1.90×, **0.95×**) |"),
    ("pointwise_sweep", "pointwise_sweep-gpu", row(table="sweep", elements=1 << 20),
     "| `add_relu` bfloat16 | 100 (1.90×, **0.95×**) |"),
    ("sweep_host", "pointwise_sweep-gpu",
     row(table="sweep", elements=1 << 13, host_us=5.5, host_vs_eager=2.0),
     "| `add_relu` | 5.50 (2.00×) |"),
    ("three_way_device", "pointwise_sweep-gpu", row(table="three-way", elements=500_000),
     "| `add_relu` 500 K | 100 (1.90×, **0.95×**) |"),
    ("three_way_wall", "pointwise_sweep-gpu",
     row(table="three-way", elements=50_000_000, wall_us=7.0, wall_vs_eager=3, wall_vs_compile=1.5),
     "| `add_relu` 50 M | 7.00 (3.00×, 1.50×) |"),
    ("launch_overhead", "launch_overhead-gpu",
     {"call": "torch.add", "group": "forward", "host_us": 6.1, "vs_torch.add": 1.0},
     "| torch.add | forward | 6.10 | 1.00 | – |"),
    ("startup_gpu", "startup-gpu",
     {"what": "x", "cache": "warm", "ms": 90.0, "import_fusionrt": 1.0, "own_modules": 60.0,
      "third_party": 10.0, "first_call": 19.0}, "| x | warm | 90.0 | 61.0 | 10.0 | 19.0 |"),
    ("startup_cpu", "startup-cpu", {"what": "Triton", "cache": None, "absent": "no GPU"},
     "| Triton | – | absent: no GPU | – | – | – |"),
    ("summary_gpu", "pointwise_large-gpu", row(), "| bfloat16 forward | 1 | 0.98, 0.98 `add_relu` | "
     "1.90×, 1.90× `add_relu` | 0 |"),
    ("summary_cpu", "pointwise_cpu", row(elements=1 << 20, vs_eager=0.5),
     "| bfloat16 1 Mi forward | 1 | 0.98, 0.98 `add_relu` | **0.50×**, **0.50×** `add_relu` | 1 |"),
    ("catalogue_cpu", "catalogue-cpu", row(elements=1 << 16),
     "| `add_relu` forward | 100 (1.90×, **0.95×**) |"),
    ("warmup_gpu", "warmup_time-gpu",
     {"arch": "sm_90", "ops": "all", "cache": "cold", "seconds": 20.0, "compiled": 3, "present": 1, "MB": 1.5,
      "jobs": 8}, "| sm_90 | all | cold | 20.0 | 4 | 1.50 | 8 |"),
    ("pointwise_cpu", "pointwise_cpu", row(elements=16 << 20),
     "| `add_relu` forward | 100 (1.90×, **0.95×**) |"),
])
def test_tables(tmp_path, name, file, made, expected):
    write(tmp_path, file, [made])
    assert expected in tables.TABLES[name](tmp_path).splitlines()


def test_what_is_lost_is_listed_worst_first(tmp_path):
    assert tables.lost(tmp_path) == tables.NOT_MEASURED
    write(tmp_path, "pointwise_large-gpu", [
        row(elements=1 << 20, host_vs_eager=0.5), row(elements=1 << 20, op="mish", vs_compile=0.98),
        {"op": "gelu", "error": "OutOfMemoryError"}], absent={"liger": "not installed"})
    write(tmp_path, "launch_overhead-gpu", [
        {"group": "both", "call": call, "host_us": us, "vs_torch.add": 0.1} for call, us in (
            ("torch.add", 9.0), ("relu(add) eager", 4.0), ("fusionrt.add_relu", 5.0))])
    lines = tables.lost(tmp_path).splitlines()
    assert [line for line in lines if line.startswith("| `")] == [
        "| `add_relu` | bfloat16 | 1 Mi | forward | eager | host | **0.50×** |",
        "| `add_relu` | bfloat16 | 1 Mi | forward | compile | call | **0.95×** |",
        "| `add_relu` | float32 | 4 Ki | both | eager | host | **0.80×** |"]
    assert [line for line in lines if "comparisons" in line] == ["2 of 5 comparisons:", "1 of 1 comparisons:"]
    (place,) = (line for line in lines if "pointwise_large-gpu.json" in line)
    assert "liger absent (not installed), rows that failed: 1; 2026-01-02" in place
