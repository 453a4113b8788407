"""Implementations beside each other: times, accuracy, what a comparison refuses."""

import csv
import json
import math
import time

import numpy as np
import pytest
import torch

from fusionrt import bench
from fusionrt.bench import results

CPU = torch.device("cpu")


def chain(x, b):
    return torch.relu(x + b)


@pytest.fixture
def inputs():
    return torch.randn(64, 256), torch.randn(256)


def test_what_is_not_a_number_is_no_small_error(inputs):
    found = bench.compare_implementations(
        {"eager": chain, "lost": lambda x, b: torch.where(x > 0, chain(x, b), math.nan)}, inputs,
        reference=chain, repeat=1)
    lost = found["lost"]
    assert (lost["max_abs"], lost["ulp_max"]) == (math.inf, math.inf)
    assert lost["outside"] == lost["accuracy"]["nan"] == (inputs[0] <= 0).sum()


def coarse(x, b):
    return torch.relu(x.half() + b.half()).float()


def failing(x, b):
    raise RuntimeError("out of | luck")


@pytest.fixture(scope="module")
def compared():
    return bench.compare_implementations(
        {"eager": chain, "coarse": coarse, "failing": failing, "idle": lambda x, b: time.sleep(0.02) or x},
        (torch.randn(64, 256), torch.randn(256)), reference=chain, repeat=3, title="relu(x + b)")


def test_a_comparison_has_all_of_it(compared):
    n, m = 64 * 256 * 4, 256 * 4
    assert [row["name"] for row in compared.rows] == ["eager", "coarse", "failing", "idle"]
    eager = compared["eager"]
    assert eager["speedup"] == 1.0
    assert not eager["within_noise"]
    assert eager["bytes"] == 2 * n + m
    assert eager["GB/s"] == pytest.approx((2 * n + m) / eager["us"] / 1e3)
    assert (eager["unfused_bytes"], eager["unfused_launches"]) == (4 * n + m, 2)
    assert eager["bound"] == (4 * n + m) / (2 * n + m)
    assert (eager["peak_bytes"], eager["allocations"]) == (2 * n, 2)
    assert eager["outside"] == 0
    assert eager["ulp_max"] >= 0.5
    assert "launches" not in eager    # the CPU has none
    assert compared["coarse"]["outside"] > 0
    assert compared["coarse"]["accuracy"]["dtype"] == "float32"
    assert compared["idle"]["speedup"] < 0.5
    assert compared["failing"]["error"] == "RuntimeError: out of | luck"
    assert "us" not in compared["failing"]
    assert set(compared.measurements) == {(name, None) for name in ("eager", "coarse", "idle")}
    assert eager["method"] == compared.measurements["eager", None].method
    with pytest.raises(KeyError, match="'none'; there are eager, coarse"):
        compared["none"]


def test_a_comparison_prints(compared):
    text = str(compared)
    for part in ("relu(x + b)", "eager", "speed-up", "1.00×", "noise", "RuntimeError: out of | luck",
                 "A call moves 0.1321 MB at least", "Unfused: 2 ops (add, relu) move 0.2632 MB"):
        assert part in text
    assert "elements" not in text    # one size
    lines = compared.to_markdown().splitlines()
    assert lines[0].startswith("|  | µs | noise | speed-up |")
    assert lines[1].startswith("| --- | ---: |")
    assert "RuntimeError: out of \\| luck" in lines[4]


def test_a_comparison_writes_files(compared, tmp_path):
    compared.to_json(tmp_path / "c.json")
    content = json.loads((tmp_path / "c.json").read_text())
    assert content["rows"] == json.loads(json.dumps(compared.rows))
    assert [len(m["samples"]) for m in content["measurements"]] == [3, 3, 3]
    assert content["versions"]["torch"] == torch.__version__
    compared.to_csv(tmp_path / "c.csv")
    with (tmp_path / "c.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["eager", "coarse", "failing", "idle"]
    assert float(rows[0]["us"]) == compared["eager"]["us"]
    assert rows[2]["us"] == ""


@pytest.fixture(scope="module")
def swept():
    return bench.compare_implementations(
        {"chain": chain, "nested": lambda x, b: torch.clamp(x + b, min=0)},
        lambda rows: (torch.randn(rows, 32), torch.randn(32)), sizes=(4, 16), reference="chain",
        least_bytes=lambda x, b: x.nbytes, baseline="nested", repeat=2, details=False)


def test_a_sweep(swept):
    assert [(row["name"], row["size"], row["elements"]) for row in swept.rows] == [
        ("chain", 4, 128), ("nested", 4, 128), ("chain", 16, 512), ("nested", 16, 512)]
    assert [row["bytes"] for row in swept.rows] == [512, 512, 2048, 2048]
    assert swept["nested"]["speedup"] == 1.0
    assert swept["chain"]["elements"] == 512
    assert "peak_bytes" not in swept.rows[0]
    assert set(swept.measurements) == {(name, size) for name in ("chain", "nested") for size in (4, 16)}
    assert "elements" in str(swept)
    assert "Size 16. A call moves 0.002048 MB at least" in str(swept)


@pytest.mark.parametrize("fixture", ["compared", "swept"])
def test_a_comparison_is_drawn(request, fixture, tmp_path):
    pytest.importorskip("matplotlib")
    request.getfixturevalue(fixture).plot(tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_work_in_place_is_compared_on_copies():
    x = torch.ones(100)
    found = bench.compare_implementations(
        {"in place": lambda x: x.mul_(2), "other": lambda x: x * 2}, (x,), reference="other", repeat=1,
        warmup=0, details=False)
    assert [row["max_abs"] for row in found.rows] == [0, 0]


class _Handle:
    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")


@pytest.mark.parametrize("reference", ["in place", "other"])
@pytest.mark.parametrize("make", [
    lambda: (torch.ones(100, requires_grad=True) * 1, None),    # part of an autograd graph
    lambda: (torch.ones(100, dtype=torch.float64), None),       # which is exact already
    lambda: (torch.ones(100), _Handle()), lambda: (np.ones(100), _Handle())],
    ids=["graph", "float64", "handle", "numpy"])
def test_each_implementation_sees_the_inputs_as_they_were(make, reference):
    def doubled(x, handle):
        x *= 2
        return x

    found = bench.compare_implementations(
        {"in place": doubled, "other": lambda x, handle: x * 2}, make(), reference=reference, repeat=1,
        warmup=0, details=False)
    assert [row.get("max_abs") for row in found.rows] == [0, 0], found


def test_of_a_reference_in_numpy_no_chain_is_known():
    x = np.ones(100, np.float32)
    found = bench.compare_implementations({"tanh": np.tanh}, (x,), reference=np.tanh, repeat=1, warmup=0)
    assert not {"unfused_bytes", "unfused_launches", "bound"} & set(found["tanh"])
    assert found["tanh"]["bytes"] == 800 and "Unfused" not in str(found)


def test_names_of_several_lines_are_one_row_of_markdown():
    found = bench.compare_implementations({"two\nlines": abs}, (-1,), repeat=1, warmup=0, details=False)
    assert found.to_markdown().splitlines()[2].startswith("| two lines | ")


def test_what_looks_like_a_tag_stays_in_markdown():
    found = bench.compare_implementations({"<b>": lambda: 1}, (-1,), repeat=1, warmup=0, details=False)
    assert r"| \<b> |" in found.to_markdown()
    assert r"\<lambda>() takes 0 positional" in found.to_markdown()


def test_json_has_no_infinities(tmp_path):
    found = bench.compare_implementations({"off": lambda x: x + 1}, (torch.zeros(2, dtype=torch.float64),),
                                          reference=lambda x: x, repeat=1, details=False)
    assert found["off"]["ulp_max"] == math.inf
    found.to_json(tmp_path / "c.json")
    content = json.loads((tmp_path / "c.json").read_text(), parse_constant=pytest.fail)
    assert content["rows"][0]["ulp_max"] == "inf"
    assert results.load(tmp_path / "c.json")["rows"][0]["ulp_max"] == math.inf


def test_a_result_file_has_no_infinities(tmp_path):
    run = results.Results("odd", "", tmp_path / "r.json", say=lambda text: None)
    run.ceiling("copy", {"TB/s": math.inf})
    run.add(op="f", us=math.nan, times=[-math.inf, np.float64("inf"), 1.0], shape=torch.Size([2]),
            dtype=torch.int8)
    written = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert written["rows"] == [{"op": "f", "us": "nan", "times": ["-inf", "inf", 1.0], "shape": [2],
                                "dtype": "torch.int8"}]
    content = results.load(tmp_path / "r.json")
    assert content["ceilings"] == {"copy": [{"TB/s": math.inf}]}
    assert math.isnan(content["rows"][0]["us"])
    assert content["rows"][0]["times"] == [-math.inf, math.inf, 1.0]


def test_a_module_is_a_reference_in_float64():
    modules = {name: torch.nn.Linear(64, 4) for name in ("a", "b")}
    modules["b"].load_state_dict(modules["a"].state_dict())
    rows = bench.compare_implementations(modules, (torch.randn(64, 64),), reference="a", repeat=2)
    assert all(0 < rows[name]["ulp_max"] < 1e4 for name in modules)
    assert modules["a"].weight.dtype == torch.float32


def test_keywords_and_no_reference():
    row = bench.compare_implementations({"softmax": torch.softmax}, (torch.ones(4, 4),), {"dim": 0},
                                        repeat=2)["softmax"]
    assert row["us"] > 0
    assert "ulp_max" not in row
    assert "bound" not in row
    assert row["bytes"] == 128


@pytest.mark.parametrize(("arguments", "error", "text"), [
    (({},), TypeError, "must be a mapping of names to functions"),
    (([print],), TypeError, "must be a mapping of names to functions"),
    (({"a": print}, (), None, "b"), ValueError, "reference 'b' is no implementation; there are a"),
    (({"a": print}, (), None, None, "b"), ValueError, "baseline 'b' is no implementation"),
    (({"a": print}, (), None, None, None, (1, 2)), TypeError, "sizes go with args that are a function"),
    (({"a": print}, lambda n: n), TypeError, "sizes go with args that are a function"),
    (({"a": print}, lambda n: n, None, None, None, ()), ValueError, r"sizes must be a list of .*, got \[\]"),
    (({"a": print}, lambda n: n, None, None, None, 5), ValueError, "sizes must be a list of one .*, got 5"),
    (({"a": 3}, ()), TypeError, "compare_implementations: a must be a function, got int"),
    (({"a": print}, (), None, 3), TypeError, "reference must be a function or the name of an implementation"),
    (({"a": print}, (), None, None, 3), ValueError, "baseline 3 is no implementation; there are a"),
    (({"a": print}, abs, None, None, None, [1, [2]]), TypeError, r"sizes must be .* tuples, got \[2\]"),
    (({"a": print}, abs, None, None, None, [None]), TypeError, "sizes must be .* tuples, got None"),
    (({"a": print}, (), None, None, None, None, None, 5), TypeError, "title must be text, got 5"),
    (({"a": print}, (), None, None, None, None, -5), ValueError, "least_bytes must be at least 0, got -5"),
    (({"a": print}, (), None, None, None, None, 1.5), TypeError, "least_bytes must be an integer, got 1.5"),
    (({"a": abs}, (-1,), None, None, None, None, lambda n: n), ValueError, "least_bytes .* 0, got -1"),
])
def test_comparisons_refuse(arguments, error, text):
    names = ("implementations", "args", "kwargs", "reference", "baseline", "sizes", "least_bytes", "title")
    with pytest.raises(error, match=text):
        bench.compare_implementations(**dict(zip(names, arguments, strict=False)))


def test_what_the_reference_raises_is_raised(inputs):
    with pytest.raises(bench.VariantError, match="variant 'reference' raised RuntimeError: out of"):
        bench.compare_implementations({"chain": chain}, inputs, reference=failing)


def test_a_reference_of_numbers_is_compared():
    x = torch.ones(4, dtype=torch.float64)
    found = bench.compare_implementations(
        {"sum": lambda x: x.sum().item(), "off": lambda x: 5.0, "all": lambda x: x.sum(),
         "shape": lambda x: x}, (x,), reference=lambda x: sum(x.tolist()), repeat=1, details=False)
    assert [row.get("outside") for row in found.rows] == [0, 1, 0, None]
    assert "must have one shape, got (4,) and ()" in found["shape"]["error"]


@pytest.mark.parametrize("nothing", [None, "mean", (), object()])
def test_a_reference_that_returns_nothing_to_compare_is_refused(inputs, nothing):
    with pytest.raises(TypeError, match="reference must return tensors, arrays or numbers, got "
                                        f"{type(nothing).__name__}$"):
        bench.compare_implementations({"chain": chain}, inputs, reference=lambda x, b: nothing)


def test_a_result_of_another_shape_is_an_error_row(inputs):
    found = bench.compare_implementations({"chain": chain, "part": lambda x, b: x[:2]}, inputs,
                                          reference=chain, repeat=1, details=False)
    assert "must have one shape, got (2, 256) and (64, 256)" in found["part"]["error"]
    assert "us" in found["chain"]
