"""`fusionrt bench`: what it measures, what it says of rivals and baselines, its exit status."""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch.nn import functional as F

from fusionrt.bench import baseline, case, results, rivals, suite, timing
from fusionrt.bench.case import BACKWARD, BOTH, FORWARD, Case
from fusionrt.catalogue import COLUMNS, OPS, ROWS
from fusionrt.cli import main
from fusionrt.files import why_not_writable

SMALL = ("--sizes", "4K", "--dtypes", "float32", "--device", "cpu")
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here looks at how good a figure is."""
    monkeypatch.setattr(timing, "cpu", functools.partial(timing.cpu, uncounted=0.001))


def call(*words: object) -> Result:
    """The command in this process; a traceback is never an answer."""
    result = CliRunner().invoke(main, ["bench", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def quiet(name: str = "test", path: Path | None = None) -> results.Results:
    return results.Results(name, "", path, say=lambda text: None)


def declare(monkeypatch: pytest.MonkeyPatch, name: str, function, example) -> None:
    """An op of the catalogue for this test, without kernels of its own."""
    def op(*args):
        return function(*args)

    op.__name__, op.example, op.reference = name, example, function
    monkeypatch.setitem(OPS, name, op)


# --- what the command says


def test_help_imports_nothing_heavy() -> None:
    code = ("import sys; from fusionrt.cli import main\n"
            "try: main(['bench', '--help'], prog_name='fusionrt')\n"
            "except SystemExit: print([m for m in ('torch', 'numpy', 'matplotlib') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith("Usage: fusionrt bench [OPTIONS] [OP ...]")
    assert done.stdout.endswith("\n[]\n"), done.stderr


def test_list() -> None:
    result = call("--list", "--device", "cpu")
    assert result.exit_code == 0
    assert f"ops: {', '.join(sorted(OPS))}\n" in result.stdout
    assert "dtypes: float32, bfloat16, float16, float64\n" in result.stdout
    lines = {line.split()[1]: line for line in result.stdout.splitlines() if line.startswith("│")}
    assert list(lines) == list(rivals.RIVALS)
    assert "present" in lines["eager"]
    assert "absent: " in lines["liger"]


@pytest.mark.parametrize(("words", "message"), [
    (("nope",), "Invalid value for OP: no op 'nope'; there are add_mul_add, "),
    (("--dtypes", "int3"), "no dtype 'int3'; there are float32, bfloat16, float16, float64"),
    (("--dtypes", ","), "no dtype given; there are float32, "),
    (("--against", "eager,aten"), "no rival 'aten'; there are eager, compile, compile-max, liger, apex, "),
    (("--sizes", "1M,3X"), "'3X' is not a number of elements such as 64K, 1M or 5000000"),
    (("--sizes", "0"), "'0' is not a number of elements"),
    (("--sizes", f"1M,{10**30}"), f"'{10**30}' is not a number of elements such as 64K, 1M or 5000000"),
    (("--sizes", "9" * 5000), "9' is not a number of elements such as 64K, 1M or 5000000"),
    (("--fail-on", "10%"), "--fail-on needs --baseline FILE"),
    (("--fail-on", "10"), "'10' is not a percentage such as 10%"),
    (("--fail-on", "-3%"), "'-3%' is not a percentage such as 10%"),
    (("--baseline", "no_such.json"), "File 'no_such.json' does not exist"),
    (("--plot", "f.txt"), "Invalid value for --plot: f.txt must end in one of .png, .svg, .pdf"),
    (("--json", "f.html", "--html", "./f.html"), "--json, --plot and --html must be different files"),
    (("--json", "/"), "Invalid value for '--json': / cannot be written: it is a folder"),
    (("--json", f"{'n' * 300}.json"), "n.json cannot be written: File name too long"),
    (("--json", "no/such/f.json"), "no/such/f.json cannot be written: there is no folder no/such"),
    (("--html", "no/such/f.html"), "no/such/f.html cannot be written: there is no folder no/such"),
    (("--plot", "no/such/f.png"), "no/such/f.png cannot be written: there is no folder no/such"),
])
def test_refuses(words: tuple[str, ...], message: str) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refuses_a_gpu_that_is_not_there() -> None:
    assert "--device: there is no CUDA GPU; fusionrt doctor says why" in call("--device", "cuda").stderr


@pytest.mark.parametrize("text", ["no JSON", "[1]", '{"rows": [1]}', '{"rows": [], "machine": 3}',
                                  pytest.param("[" * 10**6, id="nested")])
def test_refuses_a_baseline_that_is_no_result_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "earlier.json"
    file.write_text(text)
    result = call("add_relu", "--baseline", file)
    assert result.exit_code == 1
    assert f"{file} is not a result file" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="it has no /proc")
def test_where_nothing_can_be_written_is_known_before_anything_is_measured(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "run", lambda *args: pytest.fail("it measured"))
    for option, name in (("--json", "f.json"), ("--html", "f.html"), ("--plot", "f.png")):
        result = call("add_relu", *SMALL, option, f"/proc/self/{name}")
        assert result.exit_code == 2
        assert f"/proc/self/{name} cannot be written: " in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such links")
def test_a_question_leaves_no_trace(tmp_path: Path) -> None:
    """Neither in a folder nor in a file, and none who reads a pipe sees it end."""
    (tmp_path / "old.json").write_text("{}")
    (tmp_path / "astray.json").symlink_to(tmp_path / "no" / "such.json")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    found = [why_not_writable(tmp_path / name) for name in ("old.json", "new.json", "pipe", "astray.json")]
    assert found == [None, None, None, f"there is no folder {tmp_path / 'no'}"]
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "old.json").read_text() == "{}"


def test_a_run_is_written_and_compared(tmp_path: Path) -> None:
    now, earlier = tmp_path / "now.json", tmp_path / "earlier.json"
    result = call("fused_add_relu", *SMALL, "--backward", "--against", "eager,liger", "--json", now)
    assert result.exit_code == 0, result.output
    content = json.loads(now.read_text())
    assert content["complete"]
    assert content["command"] == ("fusionrt bench fused_add_relu --sizes 4096 --dtypes float32 --backward "
                                  "--against eager,liger --device cpu")
    assert [row["direction"] for row in content["rows"]] == [FORWARD, BACKWARD, BOTH]
    for row in content["rows"]:
        assert (row["op"], row["dtype"], row["elements"]) == ("add_relu", "float32", 4096)
        assert row["us"] > 0
        assert row["vs_eager"] == pytest.approx(row["eager_us"] / row["us"], abs=1e-3)
        assert row["GB/s"] == pytest.approx(row["bytes"] / row["us"] / 1e3, abs=1e-3)
        assert 0 < row["of_copy"] < 100
        assert "liger_us" not in row
        assert row["liger_absent"] == content["absent"]["liger"]
    assert content["rows"][0]["bytes"] == 3 * 4096 * 4
    assert [content["rows"][0][key] for key in ("unfused_bytes", "unfused_launches", "bound")] == [
        5 * 4096 * 4, 2, 1.67]
    assert f"liger is absent: {content['absent']['liger']}" in result.stdout

    def compared(factor: float, *more: str) -> Result:
        rows = [{**row, "us": row["us"] * factor} for row in content["rows"]]
        earlier.write_text(json.dumps({**content, "rows": rows}))
        return call("add_relu", *SMALL, "--baseline", earlier, *more)

    slower = compared(1e-6, "--fail-on", "10%")
    assert slower.exit_code == 1
    assert "1 times compared with the baseline" in slower.stdout
    (line,) = (line for line in slower.stdout.splitlines() if line.endswith(" slower") and "add_relu" in line)
    assert "10.0% + " in line
    assert compared(1e-6).exit_code == 0, "without --fail-on it only says so"
    quicker = compared(1e3, "--fail-on", "10%")
    assert (quicker.exit_code, quicker.stdout.splitlines()[-1][-13:]) == (0, ": none slower")
    earlier.write_text(json.dumps({**content, "rows": []}))
    nothing = call("add_relu", *SMALL, "--baseline", earlier, "--fail-on", "10%")
    assert nothing.exit_code == 1 and "--fail-on: the baseline has no time of these rows" in nothing.stderr
    nothing = call("add_relu", *SMALL, "--baseline", earlier)
    assert nothing.exit_code == 0
    assert nothing.stderr == "Warning: the baseline has no time of these rows, and nothing was compared\n"
    assert "none slower" not in nothing.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such links")
def test_result_files_behind_links(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "file.json")
    quiet("linked", tmp_path / "link.json").add(op="first")
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "file.json").read_text())["rows"] == [{"op": "first"}]
    quiet("nowhere", Path("/dev/null")).add(op="first")
    assert not Path("/dev/null").is_file()


def test_a_result_file_that_cannot_be_written_is_no_failure_of_the_op(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(self: results.Results) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results.Results, "_write", full)
    result = call("add_relu", *SMALL, "--json", tmp_path / "f.json")
    assert result.exit_code == 1 and "No space left on device" in result.stderr
    assert "error=" not in result.stdout


def half(path: Path, text: str, encoding: str | None = None) -> None:
    """What write_text() does on a full disk."""
    with path.open("w") as file:
        file.write(text[:len(text) // 2])
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_rows_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = quiet("full", tmp_path / "rows.json")
    run.add(op="first")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'rows.json'}'"):
            run.add(op="second")
    assert [row["op"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == ["first"]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_a_full_disk_leaves_the_page_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("the earlier one")
    monkeypatch.setattr(Path, "write_text", half)
    result = call("add_relu", *SMALL, "--html", page)
    assert (result.exit_code, result.stderr) == (1, f"Error: {page}: No space left on device\n")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["the earlier one"]


def test_a_row_that_fails_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(x):
        raise RuntimeError("no such luck")

    declare(monkeypatch, "broken", broken, lambda make: (make(ROWS, COLUMNS),))
    result = call("broken", "add_relu", *SMALL, "--json", tmp_path / "f.json")
    assert result.exit_code == 1
    assert "1 of 2 rows failed" in result.stderr
    first, second = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert (first["op"], first["error"]) == ("broken", "RuntimeError: no such luck")
    assert second["us"] > 0


@pytest.mark.parametrize("op", ["add_relu", "embedding_position", "linear_cross_entropy"])
def test_more_than_the_memory_holds_is_an_error_of_its_row(op: str) -> None:
    result = call(op, "--sizes", "4K,900000000G", "--dtypes", "float32", "--device", "cpu")
    assert result.exit_code == 1
    assert "1 of 2 rows failed" in result.stderr
    assert re.search(r"error=MemoryError: inputs and results are [\d,]{11,} GB, the memory has \d+ GB\n",
                     result.stdout), result.stdout


def test_plot_and_page_get_the_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fusionrt.bench import plot, report
    got = []

    def show(content, path):
        got.append((content["rows"][0]["op"], path))

    monkeypatch.setattr(plot, "from_results", show)
    monkeypatch.setattr(report, "write", show)
    files = tmp_path / "a.png", tmp_path / "a.html"
    result = call("add_relu", *SMALL, "--plot", files[0], "--html", files[1])
    assert result.exit_code == 0, result.output
    assert got == [("add_relu", files[0]), ("add_relu", files[1])]


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    result = call("add_relu", "quantize_int8", "--sizes", "64K,64M", "--dtypes", "bfloat16", "--backward",
                  "--against", "eager,compile", "--json", file)
    assert result.exit_code == 0, result.output
    rows = {(r["op"], r["elements"], r["direction"]): r for r in json.loads(file.read_text())["rows"]}
    assert len(rows) == 8
    small, large = rows["add_relu", 64 << 10, FORWARD], rows["add_relu", 64 << 20, FORWARD]
    assert small["cache"] == "warm"
    assert small["host_us"] > 0
    assert large["cache"] == "cold"
    assert "host_us" not in large
    assert 0.5 < large["of_copy"] < 1.2
    assert all(r["vs_compile"] > 0 for r in rows.values())


# --- baselines


def changes(now: dict, before: dict, limit: float = 0.1) -> list[tuple[str, str]]:
    same = {"op": "gelu", "dtype": "float32", "elements": 1, "direction": FORWARD}
    return [(c.time, c.verdict) for c in baseline.compare([{**same, **now}], [{**same, **before}], limit)]


def test_a_row_must_be_slower_by_more_than_its_noise() -> None:
    before = {"us": 100.0, "spread": 0.04, "host_us": 5.0}
    assert changes({"us": 109.0, "spread": 0.02}, before) == [("us", "ok")]
    assert changes({"us": 112.0, "spread": 0.02}, before) == [("us", "within the spread")]
    assert changes({"us": 114.0, "spread": 0.02}, before) == [("us", "slower")]
    assert changes({"us": 114.0, "spread": 0.2}, before) == [("us", "within the spread")]
    assert changes({"us": 50.0, "host_us": 7.0}, before) == [("us", "ok"), ("host_us", "slower")]
    assert changes({"error": "OutOfMemoryError"}, before) == [("us", "failed"), ("host_us", "failed")]
    assert changes({"us": 200.0, "elements": 2}, before) == [], "another row"


@pytest.mark.parametrize(("now", "before", "expected"), [
    ({"us": 200.0, "spread": float("nan")}, {"us": 100.0}, [("us", "slower")]),
    ({"us": 200.0}, {"us": 100.0, "spread": "wide"}, [("us", "slower")]),
    ({"us": float("nan")}, {"us": 100.0}, [("us", "failed")]),
    ({"us": 100.0}, {"us": float("nan")}, []), ({"us": 100.0}, {"us": "fast", "host_us": [1]}, []),
    ({"us": 100.0}, {"us": 10**400}, []), ({"us": 100.0}, {"us": 50.0, "op": ["gelu"]}, [])])
def test_figures_that_are_no_numbers(now: dict, before: dict, expected: list) -> None:
    assert changes(now, before) == expected


def test_a_report_names_rows_and_machines() -> None:
    row = {"op": "gelu", "dtype": "float32", "elements": 1, "direction": FORWARD, "us": 100.0, "spread": 0.04}
    found = baseline.compare([{**row, "us": 130.0}], [row], 0.1)
    text = baseline.report(found, {"machine": {"gpu": "B"}, "rows": [found[0].row, {}, {}]},
                           {"machine": {"gpu": "A"}, "date": "2026-01-02"})
    assert "gelu  float32" in text
    assert "+30.0%  10.0% + 4.0% spread" in text
    assert "note: another gpu than the baseline's: B, there A" in text
    assert "note: 2 of 3 rows have no time in the baseline" in text
    assert text.endswith("1 times compared with the baseline of 2026-01-02: 1 slower")


# --- cases


def test_inputs_have_the_cases_rows_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ROWS != COLUMNS, "or nothing tells a vector of a row from one of a column"
    declare(monkeypatch, "loss", F.cross_entropy, lambda make: (
        make(ROWS, COLUMNS), make(ROWS, dtype=torch.int64, high=COLUMNS), make(COLUMNS)))
    made = Case("loss", "bfloat16", 100 * 32, "cpu", sets=2, columns=32)
    logits, target, weight = made.inputs[0]
    assert (logits.shape, target.shape, weight.shape) == ((100, 32), (100,), (32,))
    assert (logits.dtype, target.dtype) == (torch.bfloat16, torch.int64)
    assert 0 <= target.min() <= target.max() < 32
    assert made.traffic(FORWARD) == 2 * 3200 + 8 * 100 + 2 * 32 + 2
    assert len(made.calls(made.op, FORWARD, 3)) == 3
    assert Case("relu", "float32", 10, "cpu").inputs[0][0].shape == (1, 10), "no more columns than elements"


def test_ops_with_several_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum and product, and a whole number that has no gradient."""
    declare(monkeypatch, "several", lambda x, y: (x + y, (x > y).to(torch.int8), x * y),
            lambda make: (make(ROWS, COLUMNS), make(ROWS, COLUMNS)))
    made = Case("several", "float32", 1 << 14, "cpu")
    n = made.elements
    assert made.traffic(FORWARD) == (4 * 4 + 1) * n
    # two incoming gradients, x and y, two results
    assert made.traffic(BACKWARD) == 6 * 4 * n
    for direction in (BACKWARD, BOTH):
        x, y = made.inputs[0]
        first, second = made._seeds
        grads = made.calls(made.op, direction)[0]()
        torch.testing.assert_close(grads, (first + second * y, first + second * x))
    into = quiet()
    suite.run([suite.Cell("several", "float32", 1 << 12, (FORWARD, BACKWARD, BOTH))], into, "cpu")
    assert [row.get("error") for row in into.rows] == [None] * 3
    assert all(row["vs_eager"] > 0 for row in into.rows)


def test_least_bytes_are_those_of_the_case() -> None:
    for op in ("bias_gelu", "quantize_int8"):
        exact = Case(op, "bfloat16", 1 << 15, "cpu").traffic(FORWARD)
        assert case.least_bytes(op, "bfloat16", 1 << 15) == exact


def test_inputs_of_one_size_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, "fixed", lambda x, y: x + y, lambda make: (make(30, 50), make(50)))
    into = quiet()
    suite.run([suite.Cell("fixed", "float32", n) for n in (1 << 10, 1 << 12)], into, "cpu")
    assert [row["elements"] for row in into.rows] == [1500]
    assert into.content["notes"][-1] == "fixed's inputs have one size, 1500 elements"
    assert case.least_bytes("fixed", "float32", 1 << 20) == 4 * (2 * 1500 + 50)
    columns_alone = quiet()
    suite.run([suite.Cell("relu", "float32", n) for n in (4096, 5000)], columns_alone, "cpu")
    assert [row["elements"] for row in columns_alone.rows] == [4096]


def test_what_an_example_detaches_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as running statistics, which torch does not differentiate by."""
    def scaled(x: torch.Tensor, by: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        assert not by.requires_grad
        return x * by + bias

    declare(monkeypatch, "scaled", scaled, lambda make: (
        make(ROWS, COLUMNS), make(COLUMNS).detach().abs(), make(COLUMNS)))
    made = Case("scaled", "float32", 1 << 13, "cpu")
    assert [g.shape for g in made.calls(made.op, BOTH)[0]()] == [(2, 4096), (4096,)]
    assert made.traffic(BACKWARD) == 4 * (2 * made.elements + 2 * 4096)  # by; gradients in, of x, of bias


# --- rivals


def liger(monkeypatch: pytest.MonkeyPatch, **functions) -> None:
    """As if liger-kernel were there, with these functions."""
    module = types.ModuleType("liger_kernel.transformers.functional")
    for name, function in {"liger_swiglu": None, "liger_geglu": None, **functions}.items():
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    there = dataclasses.replace(rivals.RIVALS["liger"], missing=lambda device: None)
    monkeypatch.setitem(rivals.RIVALS, "liger", there)


def test_a_rival_that_is_there_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    liger(monkeypatch, liger_swiglu=lambda a, b: F.silu(a) * b)
    into, seen = quiet(), []
    cells = [suite.Cell(op, "float32", 1 << 12, against=("liger",)) for op in ("swish_multiply", "mul_tanh")]
    suite.run(cells, into, "cpu", lambda done, total, name: seen.append((done, total, name)))
    found, missing = into.rows
    assert found["liger_us"] > 0
    assert "liger_absent" not in found
    assert missing["liger_absent"] == "it has no such op"
    assert "liger_us" not in missing
    assert seen == [(0, 2, "swish_multiply float32 4096"), (1, 2, "mul_tanh float32 4096"), (2, 2, "done")]


def test_a_rival_that_fails_leaves_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(a, b):
        raise ValueError("unsupported")

    liger(monkeypatch, liger_swiglu=fails)
    into = quiet()
    suite.run([suite.Cell("swish_multiply", "float32", 1 << 12, against=("eager", "liger"))], into, "cpu")
    assert into.rows[0]["liger_error"] == "ValueError: unsupported"
    assert into.rows[0]["vs_eager"] > 0


def test_a_rival_that_overwrites_gets_copies() -> None:
    def careless(a, b):
        a.zero_()
        return a * b

    made = Case("swish_multiply", "float32", 1 << 12, "cpu")
    before = made.inputs[0][0].clone()
    made.calls(careless, FORWARD, overwrites=True)[0]()
    torch.testing.assert_close(made.inputs[0][0], before, rtol=0, atol=0)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("rival", ["apex", "transformer-engine", "liger"])
def test_norms_of_libraries_take_what_ours_take(op: str, rival: str, monkeypatch: pytest.MonkeyPatch
                                                ) -> None:
    """With torch's functions and modules in the libraries' place."""
    apex = types.ModuleType("apex.normalization.fused_layer_norm")
    apex.fused_layer_norm_affine = lambda x, weight, bias, shape, eps: F.layer_norm(
        x, shape, weight, bias, eps)
    apex.fused_rms_norm_affine = lambda x, weight, shape, eps: F.rms_norm(x, shape, weight, eps)
    engine = types.ModuleType("transformer_engine.pytorch")
    engine.LayerNorm, engine.RMSNorm = torch.nn.LayerNorm, torch.nn.RMSNorm
    functional = types.ModuleType("liger_kernel.transformers.functional")
    functional.liger_swiglu = functional.liger_geglu = None
    functional.liger_layer_norm = lambda x, weight, bias, eps: F.layer_norm(x, bias.shape, weight, bias, eps)
    functional.liger_rms_norm = lambda x, weight, eps, in_place: F.rms_norm(x, weight.shape, weight, eps)
    for module in (apex, engine, functional):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    args = Case(op, "float32", 1 << 12, "cpu").inputs[0]
    tensors = [a.requires_grad_() for a in args if isinstance(a, torch.Tensor)]
    results = [function(*args) for function in (rivals.RIVALS[rival].find(OPS[op]), OPS[op])]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(r, tensors, torch.ones_like(r)) for r in results))


# --- files


def test_an_interrupted_run_leaves_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "f.json"
    into = quiet("softmax-cpu", file)
    into.add(op="softmax", us=1.5)
    into.absent("apex", "apex is not installed")
    into.add(op="softmax", us=2.5)
    content = results.load(file)
    assert (content["benchmark"], content["complete"]) == ("softmax", False)
    assert content["rows"] == [{"op": "softmax", "us": 1.5}, {"op": "softmax", "us": 2.5}]
    assert content["absent"] == {"apex": "apex is not installed"}
    into.finish(("op", "us"))
    assert results.load(file)["complete"]


def test_the_template_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import template
    file = tmp_path / "t.json"
    monkeypatch.setattr(sys, "argv", ["template", "--quick", "--json", str(file)])
    monkeypatch.setattr(template, "SIZES", (1 << 12,))
    template.main()
    content = results.load(file)
    assert content["complete"]
    assert {row["op"] for row in content["rows"]} == set(template.OPS)
    assert not any("error" in row for row in content["rows"])
