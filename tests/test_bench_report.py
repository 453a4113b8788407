"""The report page: what it says is what the result file says."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from bench_content import RESULTS, content, load, row, sweep

from fusionrt.bench import charts, findings, plot, report
from fusionrt.bench.results import within_noise

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Element:
    def __init__(self, tag="", attributes=()):
        self.tag, self.attributes, self.children = tag, dict(attributes), []

    def walk(self):
        for child in self.children:
            if isinstance(child, Element):
                yield child
                yield from child.walk()

    def find(self, tag, style=None, **attributes):
        return [e for e in self.walk() if e.tag == tag
                and (style is None or style in e.attributes.get("class", "").split())
                and all(e.attributes.get(k) == v for k, v in attributes.items())]

    @property
    def text(self):
        found = "".join(c if isinstance(c, str) else c.text for c in self.children)
        return re.sub(r"\s+", " ", found)


class Page(HTMLParser):
    """As a tree; a tag that closes what was not opened fails the test."""

    def __init__(self, text):
        super().__init__()
        self.source, self.root = text, Element()
        self.open = [self.root]
        self.feed(text)
        self.close()
        assert self.open == [self.root], [e.tag for e in self.open]

    def handle_starttag(self, tag, attrs):
        self.open[-1].children.append(made := Element(tag, attrs))
        if tag not in VOID:
            self.open.append(made)

    def handle_startendtag(self, tag, attrs):
        self.open[-1].children.append(Element(tag, attrs))

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag

    def handle_data(self, data):
        self.open[-1].children.append(data)

    def section(self, key):
        (found,) = self.root.find("section", id=key)
        return found

    def table(self, label):
        (box,) = self.root.find("div", **{"aria-label": label})
        return [[cell for cell in line.walk() if cell.tag in ("td", "th")] for line in box.find("tr")]


@pytest.fixture
def page(tmp_path):
    def make(found):
        report.write(found, tmp_path / "report.html")
        return Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    return make


# -- the page: figures -----------------------------------------------------------------------------

FILES = sorted(path.stem for path in RESULTS.glob("*.json"))
REASONS = ("_error", "_absent")  # of rivals, which the page says once


@pytest.mark.parametrize("name", FILES)
def test_all_rows_have_every_digit_of_the_file(name, page):
    found = load(name)
    head, *lines = page(found).table("all rows")
    keys = [cell.text for cell in head]
    kept = [r for r in found["rows"] if "error" not in r and "absent" not in r]
    assert len(lines) == len(kept) > 0
    for line, source in zip(lines, kept, strict=True):
        for key, cell in zip(keys, line, strict=True):
            value = source.get(key)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                assert float(cell.attributes["data-v"]) == value == float(cell.text.replace(",", ""))
            else:
                assert cell.text == ("–" if value is None else str(value))
        assert {k for k, v in source.items() if v is not None and not k.endswith(REASONS)} <= set(keys)


@pytest.mark.parametrize("name", ["pointwise_large-gpu", "pointwise_cpu"])
def test_ratio_tables_equal_the_file(name, page):
    found = load(name)
    made = page(found)
    for rival in ("eager", "compile"):
        label = f"ratios to {findings.rival_name(rival)}"
        upper, lower, *lines = made.table(label)
        groups = [c for c in upper if "group" in c.attributes.get("class", "")]
        directions = [c.text for c in groups for _ in range(int(c.attributes["colspan"]))]
        columns = list(zip(directions, (c.text for c in lower), strict=True))
        sized, shown, op = len(upper) - len(groups) == 2, {}, None
        for line in lines:
            cells = list(line)
            op = cells.pop(0).text if cells[0].tag == "th" else op
            size = cells.pop(0).text if sized else None
            for column, cell in zip(columns, cells, strict=True):
                if cell.text != "–":
                    shown[(op, size, *column)] = cell
        expected = {(r["op"], findings.count(r["elements"]) if sized else None, r["direction"], r["dtype"]):
                    r for r in found["rows"] if f"vs_{rival}" in r}
        assert shown.keys() == expected.keys()
        for key, row_ in expected.items():
            ratio, noise = row_[f"vs_{rival}"], "≈" * within_noise(row_, f"vs_{rival}")
            assert shown[key].text.removeprefix("▼slower: ").removeprefix("▽slower: ") == \
                noise + findings.ratio_text(ratio)
            assert bool(shown[key].find("span", "lost")) == (ratio < 1), key


@pytest.mark.parametrize("name", ["pointwise_large-gpu", "pointwise_cpu"])
def test_summary_is_computed_from_the_rows(name, page):
    found = load(name)
    rows = found["rows"]
    (summary,) = page(found).root.find("p", "summary")
    fractions = [r["of_copy"] for r in rows]
    assert summary.text.startswith(f"{len(rows)} rows: {len({r['op'] for r in rows})} ops; ")
    assert f"{100 * min(fractions):.0f} % to {100 * max(fractions):.0f} % of the bandwidth" in summary.text
    for rival in ("eager", "compile"):
        ratios = [r[f"vs_{rival}"] for r in rows if f"vs_{rival}" in r]
        lost, clearly = sum(v < 1 for v in ratios), sum(v < 0.95 for v in ratios)
        noisy = sum(r.get(f"vs_{rival}", 1) < 1 and within_noise(r, f"vs_{rival}") for r in rows)
        many = f"{lost} of {len(ratios)} rows are slower, {clearly or 'none'} of them by more than 5 %" + (
            f", {noisy} by less than the measurement's noise." if noisy else ".")
        few = f"1 of {len(ratios)} rows is slower" if lost else f"no row of {len(ratios)} is slower."
        said = many if lost > 1 else few
        assert f"Against {findings.rival_name(rival)} {said}" in summary.text


def test_title_says_what_on_what_and_when(page):
    (title,) = page(load("pointwise_large-gpu")).root.find("head")[0].find("title")
    assert re.fullmatch(r"Pointwise large on NVIDIA H200, \d{4}-\d\d-\d\d", title.text)
    on_a_cpu = load("pointwise_cpu")
    (heading,) = page(on_a_cpu).root.find("h1")
    assert heading.text == f"Pointwise CPU on {on_a_cpu['machine']['cpu']}"
    beside_a_gpu = content({"op": "f", "us": 1.0, "GB/s": 3.0}, benchmark="ops")
    assert page(beside_a_gpu).root.find("h1")[0].text == "Ops on a CPU"


def test_every_row_is_a_mark_at_its_place(page):
    rows = [row(), row(op="mish", us=50.0, of_copy=0.5, **{"TB/s": 2.0})]
    chart, strips = page(content(*rows)).section("bandwidth").find("svg", "chart")
    x, y = charts.size_axis([1 << 28, 1 << 30]), charts.rate_axis([4.0265e12, 2e12, 4.09e12, 4.24e12])
    marks = [m.attributes for m in chart.find("use")]
    assert [(m["x"], m["y"]) for m in marks] == [
        (f"{100 * x(3 << 27):.2f}%", f"{charts.HEIGHT * (1 - y(v)):.1f}") for v in (4.0265e12, 2e12)]
    places = [float(m.attributes["x"].removesuffix("%")) for m in strips.find("use")]
    ceiling = next(float(e.attributes["x1"].removesuffix("%")) for e in strips.find("line", "ceiling"))
    zero = next(float(e.attributes["x1"].removesuffix("%")) for e in strips.find("line", "grid"))
    step = (ceiling - zero) / (1 - float(strips.find("text", "tick")[0].text))
    assert places == pytest.approx([ceiling - step * 0.03, ceiling - step * 0.5], abs=0.02)
    assert "100 µs · 4.03 TB/s · 0.97 of a copy · 1.90× eager torch" in marks_text(chart)[0]


def test_one_copy_is_a_line_across(page):
    copy = [{"bytes": 1 << 28, "us": 65.6, "TB/s": 4.09}]
    chart = page(content(row(), ceilings={"copy": copy})).section("bandwidth").find("svg", "chart")[0]
    (line,) = chart.find("line", "ceiling")
    assert (line.attributes["x1"], line.attributes["x2"]) == ("0.00%", "100.00%")
    assert line.attributes["y1"] == line.attributes["y2"]


def marks_text(chart):
    return [title.text for title in chart.find("title")]


def test_a_sweep_is_a_panel_an_op_with_joined_marks(page):
    section = page(sweep()).section("bandwidth")
    panels = section.find("figure", "panel")
    assert panels[0].find("figcaption")[0].text == "add_relu forward"
    assert len(panels[0].find("use")) == 16
    assert len(panels[0].find("line", "joined")) == 14


# -- the page: what loses, fails, is absent --------------------------------------------------------

@pytest.mark.parametrize(("ratio", "text", "how"), [
    (0.58, "▼slower: 0.58×", "clearly"), (0.96, "▽slower: 0.96×", "narrowly"),
    (0.999, "▽slower: 0.999×", "narrowly"), (0.99996, "▽slower: 0.99996×", "narrowly"),
    (1.0, "1.00×", None), (14.3, "14.3×", None)])
def test_a_losing_row_is_marked_by_more_than_colour(ratio, text, how, page):
    made = page(content(row(vs_eager=ratio, spread=0.0)))
    cell = made.table("ratios to eager torch")[2][1]
    assert cell.text == text
    assert [s.attributes["class"] for s in cell.find("span", "lost")] == ([f"lost {how}"] if how else [])


@pytest.mark.parametrize(("ratio", "spreads", "text"), [
    (0.9, (0.0, 0.2), "▼slower: ≈0.90×"), (0.9, (0.2, 0.0), "▼slower: ≈0.90×"), (1.05, (0.1, 0.0), "≈1.05×"),
    (1.5, (0.1, 0.2), "1.50×")])
def test_a_difference_that_is_noise_is_marked(ratio, spreads, text, page):
    made = page(content(row(vs_eager=ratio, spread=spreads[0], eager_spread=spreads[1])))
    assert made.table("ratios to eager torch")[2][1].text == text


def test_a_row_that_loses_has_its_bound(page):
    made = page(content(row(vs_eager=0.9, bytes=400, unfused_bytes=1000), row(vs_eager=0.8)))
    assert [line[-1].text for line in made.table("rows that lose")] == ["Bound", "–", "2.50×"]


def test_rows_that_lose_are_listed_worst_first(page):
    rows = [row(vs_eager=0.9, vs_compile=0.5, eager_us=90.0, compile_us=50.0), row(op="mish", vs_eager=1.2),
            row(op="geglu", vs_eager=0.7, eager_us=70.0)]
    _, *lines = page(content(*rows)).table("rows that lose")
    assert [[line[k].text.split(" ")[-1] for k in (0, 4, 5, 7)] for line in lines] == [
        ["add_relu", "torch.compile", "0.50×", "50.0"], ["geglu", "torch", "0.70×", "70.0"],
        ["add_relu", "torch", "0.90×", "90.0"]]


def test_many_losing_rows_are_all_there(page):
    made = page(content(*(row(op=f"op{k}", vs_eager=0.5 + k / 1000) for k in range(40))))
    listed = made.table("rows that lose")[1:] + made.table("more rows that lose")[1:]
    assert [line[0].text for line in listed] == [f"op{k}" for k in range(40)]


def test_nothing_lost_is_said(page):
    made = page(content(row()))
    assert "No row is slower than a rival." in made.section("where-we-lose").text
    assert "Against eager torch no row of 1 is slower." in made.root.text


def test_rows_that_failed_show_their_error(page):
    failed = {"op": "mish", "dtype": "float32", "elements": 8, "error": "OutOfMemoryError: 80 GB"}
    made = page(content(row(compile_error="RuntimeError: no Triton"), failed))
    _, *lines = made.table("rows that failed")
    assert [(line[0].text, line[-1].text) for line in lines] == [
        ("add_relu", "torch.compile: RuntimeError: no Triton"), ("mish", "OutOfMemoryError: 80 GB")]
    assert "1 row failed" in made.root.find("p", "summary")[0].text
    assert len(made.table("all rows")) == 2


def test_rows_with_errors_only(page):
    made = page(content({"op": "mish", "error": "boom"}, {"op": "elu", "error": "bang"}))
    assert "2 rows, none of them with the time of an op. 2 rows failed" in made.root.text
    assert [line[-1].text for line in made.table("rows that failed")[1:]] == ["boom", "bang"]
    assert not made.root.find("section", id="bandwidth")


def test_absent_rivals_are_absent_and_never_zero(page):
    gone = "liger-kernel is not installed"
    made = page(content(row(liger_absent=gone), row(op="mish", liger_absent=gone), row(op="elu"),
                        absent={"liger": gone, "apex": "no GPU"}, notes=["measured on a busy host"]))
    assert [e.text for e in made.section("not-measured").find("li")] == [
        f"liger-kernel: {gone} (2 rows)", "apex: no GPU"]
    assert [e.text for e in made.root.find("p", "notice")] == ["measured on a busy host"]
    assert not made.root.find("div", **{"aria-label": "ratios to liger-kernel"})


def test_no_rows(page):
    made = page(content())
    assert "The file has no rows: nothing was measured." in made.root.text
    assert [s.attributes["id"] for s in made.root.find("section")] == ["method", "machine-and-versions"]


def test_only_rows(page):
    """A file with nothing but rows, and those with nothing but op and time."""
    made = page({"rows": [{"op": "f", "us": 3.0}, {"op": "g", "us": float("nan")}, {"op": "h", "us": None}]})
    assert "1 row: 1 op." in made.root.text
    assert "The file does not say how it was measured." in made.root.text
    assert len(made.table("all rows")) == 4


@pytest.mark.parametrize("key", ["us", "TB/s", "bytes", "elements", "of_copy", "spread", "vs_eager"])
def test_figures_without_bounds(key, page):
    copies = [{"bytes": 1e300, "TB/s": 1e-300}, {"bytes": 1, "TB/s": 1e70}]
    for value in (10**400, 1e300, 1e-300, -1e300, 1e70):
        made = page(content(row(), row(**{key: value}), row(us=1e-300, **{"TB/s": 1e300}),
                            ceilings={"copy": copies}))
        assert len(made.table("all rows")) == 4


@pytest.mark.parametrize("fraction", [1.0, 0.02, 3.7])
def test_axes_of_a_single_row(fraction, page):
    places = [float(mark.attributes["x"].removesuffix("%")) for mark in page(content(
        row(of_copy=fraction), ceilings={})).section("bandwidth").find("svg", "chart")[1].find("use")]
    assert len(places) == 1
    assert 0 <= places[0] <= 100


def test_interrupted_and_quick_runs_say_so(page):
    said = [e.text for e in page(content(row(), complete=False, quick=True)).root.find("p", "notice")]
    assert said == ["This run was interrupted: rows are missing.",
                    "A quick run of a few rows, not the whole benchmark."]


def test_how_to_reproduce(page):
    def commands(**more):
        return [e.text for e in page(content(row(), **more)).section("method").find("pre")]

    command = "fusionrt bench add_relu --json a.json"
    assert commands(command=command) == [command]
    assert commands() == ["python -m benchmarks.pointwise_large"]
    assert commands(benchmark=None) == []


# -- the page: safe and self-contained -------------------------------------------------------------

EVIL = '<script>alert("$1")</script>\'"&${x}'


def test_all_text_of_the_data_is_escaped(page):
    bad = row(op=EVIL, dtype=EVIL, direction=EVIL, vs_eager=0.5, eager_error=EVIL, **{EVIL: EVIL})
    bad |= {f"vs_{EVIL}": 0.5, f"{EVIL}_absent": EVIL}
    made = page(content(bad, {**bad, "error": EVIL}, benchmark=EVIL, date=EVIL, method=EVIL, command=EVIL,
                        notes=[EVIL], absent={EVIL: EVIL}, machine={"gpu": EVIL, EVIL: EVIL},
                        versions={EVIL: EVIL}))
    assert len(made.root.find("script")) == 1
    assert "alert" not in made.root.find("script")[0].text
    assert made.source.count("<script>") == 1
    assert EVIL in made.table("all rows")[1][0].text
    plain = page(content(row(vs_eager=0.5, liger_absent="x"), {"op": "f", "error": "x"}))
    assert {e.tag for e in made.root.walk()} <= {e.tag for e in plain.root.walk()}
    assert not [name for e in made.root.walk() for name in e.attributes if name.startswith("on")]


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_loaded_from_elsewhere(name, page):
    made = page(load(name))
    assert "http://" not in made.source.replace("http://www.w3.org", "")
    assert not re.search(r"https://|url\(|@import|src=", made.source)
    links = [e.attributes[k] for e in made.root.walk() for k in ("href", "src") if k in e.attributes]
    assert links
    assert all(link.startswith("#") or link == "data:," for link in links)
    ids = {e.attributes["id"] for e in made.root.walk() if "id" in e.attributes}
    assert {link[1:] for link in links if link.startswith("#")} <= ids


@pytest.mark.parametrize(("bad", "came"), [
    ([], "list"), (None, "NoneType"), ({"row": []}, r"dict with \['row'\]"),
    ({"rows": ["a"]}, r"dict with \['rows'\]")])
def test_what_is_no_result_file(bad, came, tmp_path):
    for function in (report.write, plot.from_results):
        with pytest.raises(TypeError, match=f"{function.__name__}: content must be a loaded result file, a "
                           f"dict with a list of dicts under 'rows', got {came}"):
            function(bad, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_neither_torch_nor_matplotlib_is_imported():
    code = ("import sys; from fusionrt.bench import report, plot, charts, findings; "
            "print({'torch', 'matplotlib', 'numpy'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# -- in a browser ----------------------------------------------------------------------------------

# (selector, least contrast): text as WCAG AA asks for, marks and lines as graphics.
TEXT = ("h1", "h1 .on", ".date", ".summary", ".summary .lost", "nav a", "h2", "p", ".legend li", "figcaption",
        "thead th", "td", "td .lost", "td .level", "summary", "dt", "pre code", "footer")
CONTRAST = """([selector, property]) => {
  const shine = c => { const [r, g, b] = c.map(v => v / 255).map(
    v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const read = text => text.match(/[\\d.]+/g).map(Number);
  return [...document.querySelectorAll(selector)].slice(0, 200).map(element => {
    const front = shine(read(getComputedStyle(element)[property]).slice(0, 3));
    let behind = element, paper;
    do { paper = read(getComputedStyle(behind).backgroundColor); behind = behind.parentElement; }
    while (paper.length === 4 && paper[3] === 0);
    const back = shine(paper.slice(0, 3));
    return (Math.max(front, back) + .05) / (Math.min(front, back) + .05);
  });
}"""
OVERLAPS = """() => [...document.querySelectorAll("svg.chart")].flatMap(chart => {
  const boxes = [...chart.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
  const found = boxes.filter(([, a]) => a.width && (a.left < 0 || a.right > innerWidth));
  boxes.forEach(([, a], k) => boxes.slice(k + 1).forEach(([, b], j) => {
    if (a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom)
      found.push([boxes[k], boxes[k + 1 + j]]);
  }));
  return found.map(f => JSON.stringify(f));
})"""


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install "
                              "playwright && playwright install chromium")
    with api.sync_playwright() as running:
        installed = Path(running.chromium.executable_path)
        path = str(installed) if installed.exists() else shutil.which("chromium")
        if path is None:
            pytest.skip("no browser: playwright install chromium")
        started = running.chromium.launch(executable_path=path)
        yield started
        started.close()


@pytest.fixture(params=[(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")],
                ids=lambda p: f"{p[0]}-{p[1]}")
def window(request, browser):
    """A page, and what it said and asked for."""
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    opened, said = context.new_page(), []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda asked: None if asked.url.startswith(("file:", "data:")) else
              said.append(asked.url))
    yield opened, said
    context.close()


def everything():
    """A long op, an error, an absent rival, a sweep of more ops than are shown at once."""
    rows = [{**r, "op": f"{op}_of_a_rather_long_name", "vs_eager": 0.8} for op in "abcdefghijklmn"
            for r in sweep()["rows"]]
    return content(*rows, {"op": "mish", "error": "x" * 300}, absent={"liger": "not installed"},
                   notes=["n" * 200])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FILES, "sweep", "everything", "empty"])
def test_in_a_browser(name, window, tmp_path):
    opened, said = window
    made = {"sweep": sweep, "everything": everything, "empty": content}
    report.write(made[name]() if name in made else load(name), tmp_path / "report.html")
    opened.goto((tmp_path / "report.html").as_uri())
    opened.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert opened.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    assert opened.evaluate(OVERLAPS) == []
    for selector in TEXT:
        assert all(ratio >= 4.5 for ratio in opened.evaluate(CONTRAST, [selector, "color"])), selector
    for selector, property in ((".mark", "color"), (".ceiling", "stroke")):
        assert all(ratio >= 3 for ratio in opened.evaluate(CONTRAST, [selector, property])), selector
    assert said == []


@pytest.mark.slow
def test_tooltips_and_sorting(window, tmp_path):
    opened, said = window
    report.write(load("pointwise_large-gpu"), tmp_path / "report.html")
    opened.goto((tmp_path / "report.html").as_uri())
    # The mark on top at its place; others may lie below it.
    opened.locator(".strips .mark").last.hover(force=True)
    assert re.search(r"\w+ float\d+ .* µs · .* of a copy", opened.locator("#tip").inner_text())
    box = opened.locator("#tip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= opened.viewport_size["width"]
    opened.locator("summary", has_text="as the file has them").click()
    table = opened.locator("[aria-label='all rows']")
    microseconds = sorted(r["us"] for r in load("pointwise_large-gpu")["rows"])
    at = table.locator("thead th").all_inner_texts().index("us")
    for _ in range(2):
        table.locator("thead button").nth(at).click()
        shown = table.evaluate(f"t => [...t.querySelectorAll('tbody tr')].map(r => +r.cells[{at}].dataset.v)")
        assert shown == microseconds
        microseconds.reverse()
    assert said == []
