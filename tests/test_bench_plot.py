"""The figures: what they say is what the rows say."""

import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from bench_content import content, load, row, sweep

from fusionrt import bench
from fusionrt.bench import plot

IMPLEMENTATIONS = [{"name": "fusionrt", "elements": 1 << 26, "us": 127.5, "TB/s": 4.2},
                   {"name": "eager torch", "elements": 1 << 26, "us": 317.0},
                   {"name": "torch.compile", "elements": 1 << 26, "error": "no Triton"}]


def drawn(path):
    """Text of an SVG whose letters are text, and its number of paths."""
    tree = ET.parse(path)
    texts = ["".join(e.itertext()).strip() for e in tree.iter() if e.tag.endswith("}text")]
    return texts, sum(e.tag.endswith("}path") for e in tree.iter())


@pytest.fixture
def letters():
    """Text stays text in SVG files, so that a test can read it."""
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        yield


@pytest.fixture
def figures(monkeypatch):
    pytest.importorskip("matplotlib")
    seen = []
    monkeypatch.setattr(plot, "_save", lambda figure, path, title: seen.append(figure))
    return seen


def test_bars(letters, tmp_path):
    plot.bars(IMPLEMENTATIONS, tmp_path / "bars.svg", "bias_gelu")
    texts, paths = drawn(tmp_path / "bars.svg")
    for text in ("bias_gelu, 64 Mi elements", "fusionrt", "eager torch", "torch.compile",
                 "128 µs, 4.20 TB/s", "317 µs", "failed: no Triton"):
        assert text in texts
    assert paths > 5


def test_lines(letters, tmp_path):
    rows = [{"name": name, "elements": 1 << k, "us": (1 << k) * scale}
            for name, scale in (("fusionrt", 1e-3), ("eager", 2e-3)) for k in (20, 13, 26)]
    plot.lines(rows, tmp_path / "lines.svg", "A sweep")
    texts, _ = drawn(tmp_path / "lines.svg")
    assert {"A sweep", "fusionrt", "eager", "1 Mi", "elements", "µs a call"} <= set(texts)


def test_axes_of_lines_are_logarithmic(figures):
    plot.lines([{"name": "f", "elements": 1 << k, "us": 2.0**k} for k in (3, 1, 2)], "unused")
    (axes,) = figures[0].axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [[2, 2], [4, 4], [8, 8]]


@pytest.mark.parametrize(("sizes", "places", "labels"), [
    ((64, 8, 16), [8, 16, 64], None), (((64, 8), (8, 64)), [1, 2], ["(64, 8)", "(8, 64)"]),
    ((0, 1), [1, 2], ["0", "1"])])
def test_a_sweep_at_one_number_of_elements_goes_by_its_sizes(sizes, places, labels, figures):
    found = bench.compare_implementations({"a": abs, "b": abs}, lambda size: (-5,), sizes=sizes, repeat=1,
                                          warmup=0, device="cpu")
    found.plot("unused")
    (axes,) = figures[0].axes
    assert axes.get_xlabel() == "size"
    assert [line.get_xdata().tolist() for line in axes.lines] == [places] * 2
    assert axes.get_xscale() == ("linear" if labels else "log")
    if labels:
        assert [label.get_text() for label in axes.get_xticklabels()] == labels
    assert found["b"]["size"] == (64 if 64 in sizes else sizes[-1])


def test_a_sweep_that_failed_is_drawn_without_lines(tmp_path):
    pytest.importorskip("matplotlib")
    plot.lines([{"name": "a", "elements": 1 << k, "error": "boom"} for k in (3, 5)], tmp_path / "f.svg")
    assert (tmp_path / "f.svg").stat().st_size > 3000


def test_dollars_in_names_are_dollars(letters, tmp_path):
    name = r"f$\no$"
    rows = [{"name": name, "elements": 1 << k, "us": 2.0} for k in (3, 5)]
    made = row(op=name, dtype=name, direction=name, **{f"vs_{name}": 2.0})
    for draw, given in ((plot.lines, rows), (plot.bars, rows), (plot.from_results, content(made)),
                        (plot.from_results, content(*({**made, "elements": 1 << k} for k in range(3))))):
        draw(given, tmp_path / "f.svg", *[name] * (draw is not plot.from_results))
        assert sum(name in text for text in drawn(tmp_path / "f.svg")[0]) >= 2


def test_a_rival_that_took_no_time_has_no_place(figures):
    plot.from_results(content(row(vs_eager=0.0), row(op="gelu", vs_eager=0.5)), "unused")
    (axes,) = figures[0].axes
    assert [line.get_xydata().tolist() for line in axes.lines if line.get_label() == "eager torch"] == [
        [[1.94, 1.0]]]


def test_bars_have_the_lengths_of_the_file(figures):
    found = load("pointwise_large-gpu")
    plot.from_results(found, "unused")
    lengths = sorted(bar.get_width() for axes in figures[0].axes for bar in axes.patches)
    assert lengths == sorted(r["of_copy"] for r in found["rows"])


@pytest.mark.parametrize("name", ["pointwise_large-gpu", "pointwise_cpu"])
def test_figure_of_one_size(name, letters, tmp_path):
    found = load(name)
    plot.from_results(found, tmp_path / "figure.svg")
    texts, _ = drawn(tmp_path / "figure.svg")
    assert {"fraction of the copy bandwidth", "copy", "eager torch", *(r["op"] for r in found["rows"])} <= \
        set(texts)


def test_figure_of_a_sweep(letters, tmp_path):
    plot.from_results(sweep(), tmp_path / "figure.svg")
    texts, _ = drawn(tmp_path / "figure.svg")
    assert {"add_relu forward", "fusionrt float32", "torch.compile bfloat16", "8 Ki"} <= set(texts)


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_formats_without_a_display_or_a_changed_setting(ending, magic, tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.delenv("DISPLAY", raising=False)
    before = dict(matplotlib.rcParams)
    plot.bars(IMPLEMENTATIONS, tmp_path / f"figure.{ending}")
    written = (tmp_path / f"figure.{ending}").read_bytes()
    assert written.startswith(magic)
    assert len(written) > 3000
    assert dict(matplotlib.rcParams) == before


def test_a_figure_that_fails_midway_leaves_the_earlier_one(tmp_path, monkeypatch):
    backend = pytest.importorskip("matplotlib.backends.backend_svg")
    (tmp_path / "figure.svg").write_text("the earlier one")

    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backend.RendererSVG, "finalize", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'figure.svg'}'"):
        plot.bars(IMPLEMENTATIONS, tmp_path / "figure.svg")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["the earlier one"]


def test_a_name_without_an_ending_gets_one(tmp_path):
    pytest.importorskip("matplotlib")
    plot.bars(IMPLEMENTATIONS, tmp_path / "figure")
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]


def test_pyplot_is_not_imported(tmp_path):
    pytest.importorskip("matplotlib")
    code = ("import sys; from fusionrt.bench import plot; "
            "plot.bars([{'name': 'f', 'us': 1.0}], sys.argv[1]); print('matplotlib.pyplot' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "figure.png"], capture_output=True,
                          text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("draw", [
    lambda path: plot.bars(IMPLEMENTATIONS, path), lambda path: plot.lines(IMPLEMENTATIONS, path),
    lambda path: plot.from_results(content(row()), path)], ids=["bars", "lines", "from_results"])
def test_missing_matplotlib(draw, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"need matplotlib.*pip install fusionrt\[bench\]"):
        draw(tmp_path / "figure.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("function", "rows", "message"), [
    (plot.bars, [], "bars: rows is empty, nothing to draw"),
    (plot.lines, [], "lines: rows is empty, nothing to draw"),
    (plot.bars, [{"us": 1.0}], r"bars: a row needs name, us, got \['us'\] without name"),
    (plot.lines, [{"name": "f", "us": 1.0}], "lines: a row needs name, elements, us, .* without elements")])
def test_rows_that_cannot_be_drawn(function, rows, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        function(rows, tmp_path / "figure.png")


def test_a_file_without_figures_cannot_be_drawn(tmp_path):
    with pytest.raises(ValueError, match="from_results: nothing to draw, none of 1 rows has 'op' and 'us'"):
        plot.from_results(content({"op": "mish", "error": "boom"}), tmp_path / "figure.png")


def test_a_fraction_that_rounds_to_nothing_is_one(monkeypatch):
    drawn = []
    monkeypatch.setattr(plot, "_groups", lambda axes, rows, value, *rest: drawn.append(value))
    for of_copy in (0.0, 0.5, None):
        plot._catalogue([row(of_copy=0.9), row(op="gelu", of_copy=of_copy)])
    assert drawn == ["of_copy", "of_copy", "us"]
