"""The generated parts of README.md and BENCHMARKS.md: `<!-- table: NAME -->` ... `<!-- end -->`.

Every figure comes from a file of `benchmarks/results`; where there is none, the table says so. A
test compares both documents with what `render` makes of them.
"""

from __future__ import annotations

import inspect
import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.families import FAMILIES
from benchmarks.script import FOLDER, ROOT
from fusionrt.bench import results
from fusionrt.bench.results import Row, cell, span

DOCUMENTS = README, BENCHMARKS = ROOT / "README.md", ROOT / "BENCHMARKS.md"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOT_MEASURED = "Not measured yet."
SWEEP = tuple(1 << k for k in (13, 17, 20, 24, 29))  # the sizes that tables show
LOST = 0.97  # times a rival takes as long: below that it wins, by more than runs differ
COMPARED = ("rows-gpu", "rivals-gpu", "pointwise_large-gpu", "pointwise_sweep-gpu", "catalogue-gpu",
            "launch_overhead-gpu", "pointwise_cpu", "catalogue-cpu")


def render(text: str, folder: Path = FOLDER) -> str:
    """The text with every marked block filled anew; KeyError for a table that is not known."""
    return BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]](folder)}\n{found[3]}", text)


def load(folder: Path, name: str) -> Row | None:
    """A result file; None if there is none, or only that of a quick run, or of an interrupted one whose notes
    do not say what it lacks."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return None
    content = results.load(path)
    return content if (content["complete"] or content["notes"]) and not content["quick"] else None


def measured(name: str) -> Callable[[Callable[[list[Row]], str]], Callable[[Path], str]]:
    """A table of the rows of one result file, with a line that says where they were measured."""
    def declare(make: Callable[[list[Row]], str]) -> Callable[[Path], str]:
        def table(folder: Path) -> str:
            content = load(folder, name)
            if content is None:
                return NOT_MEASURED
            return f"{make(content['rows'])}\n\n{_where(content, name)}"
        return table
    return declare


def _where(content: Row, name: str) -> str:
    machine, versions = content["machine"], content["versions"]
    place = machine["gpu"] or f"{machine['cpu']}, {machine['torch_threads']} threads"
    parts = [place, f"torch {versions['torch']}", f"fusionrt {versions['fusionrt']}"]
    if versions.get("driver"):
        parts.insert(1, f"driver {versions['driver']}")
    for ceiling, rows in content["ceilings"].items():
        parts.append(f"{ceiling} {span(rows)}")
    failed = sum("error" in row for row in content["rows"])
    parts += [f"{rival} absent ({reason})" for rival, reason in content.get("absent", {}).items()]
    parts += [*([] if content["complete"] else ["**incomplete**"]), *content.get("notes", [])]
    parts += [f"rows that failed: {failed}"] if failed else []
    return f"*{', '.join(parts)}; {content['date']}; `benchmarks/results/{name}.json`.*"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _times(value: float | None) -> str:
    """How many times as long a rival takes; bold where it is faster than we are."""
    if value is None:
        return "–"
    text = f"{cell(float(value))}×"
    return f"**{text}**" if value < LOST else text


def _rivals(rows: Iterable[Row], stem: str = "") -> list[str]:
    """Those that some row has a figure of."""
    return list(dict.fromkeys(key.removeprefix(f"{stem}vs_") for row in rows for key in row
                              if key.startswith(f"{stem}vs_")))


def _count(n: int) -> str:
    """4096 Ki as 4 Mi; decimal numbers as 5 M."""
    for unit, size in (("Mi", 1 << 20), ("Ki", 1 << 10), ("M", 10**6), ("K", 10**3)):
        if n >= size and n % (size // (10 if unit == "M" else 1)) == 0:
            return f"{n / size:g} {unit}"
    return str(n)


# -- ops -------------------------------------------------------------------------------------------

def ops(folder: Path) -> str:
    """From the catalogue: call, and the first line of the docstring."""
    from fusionrt.catalogue import OPS
    lines = ["| op | computes |", "| --- | --- |"]
    for module, title in FAMILIES.items():
        members = {n: op for n, op in OPS.items() if op.__module__.endswith(f".{module}")}
        lines.append(f"| **{title}** | |")
        for name, op in sorted(members.items()):
            first = (inspect.getdoc(op) or "").split("\n")[0].replace("|", "\\|")
            lines.append(f"| `{name}({_parameters(op)})` | {first} |")
    return "\n".join(lines)


def _parameters(op: Any) -> str:
    """Names and defaults, without annotations."""
    plain = [p.replace(annotation=p.empty) for p in inspect.signature(op).parameters.values()]
    return str(inspect.Signature(plain))[1:-1]


# -- GPU -------------------------------------------------------------------------------------------

@measured("pointwise_large-gpu")
def pointwise_large(rows: list[Row]) -> str:
    """An op a row; fraction of the copy bandwidth, and times eager takes as long."""
    found = {(r["op"], r["dtype"], r["direction"]): r for r in rows if "error" not in r}
    wanted = [(d, w) for d in ("float32", "bfloat16", "float16") for w in ("forward", "backward")]

    def one(op: str, dtype: str, direction: str) -> str:
        row = found.get((op, dtype, direction))
        return f"{row['of_copy']:.2f} ({_times(row['vs_eager'])})" if row else "–"

    return markdown(["op", *(f"{dtype} {direction}" for dtype, direction in wanted)],
                    [[f"`{op}`", *(one(op, *w) for w in wanted)]
                     for op in dict.fromkeys(row["op"] for row in rows)])


def _rows_large(rows: list[Row]) -> str:
    """As pointwise_large, by the width of the rows."""
    large = [r for r in rows if r["table"] == "large" and "error" not in r]
    widths = list(dict.fromkeys(r["columns"] for r in large))
    lines: dict[tuple[str, str, str], dict[int, str]] = {}
    for r in large:
        line = lines.setdefault((f"`{r['op']}`", r["dtype"], r["direction"]), {})
        line[r["columns"]] = f"{r['of_copy']:.2f} ({_times(r['vs_eager'])})"
    return markdown(["op", "dtype", "direction", *map(_count, widths)],
                    [[*head, *(line.get(w, "–") for w in widths)] for head, line in lines.items()])


@measured("rows-gpu")
def rows_small(rows: list[Row]) -> str:
    """What users wait for, at matrices of 2048 × 2048 and 512 × 1024."""
    small = [r for r in rows if r["table"] == "small"]
    return _compared(small, ("op", "dtype", "direction"), ("elements",), "wall_")


@measured("pointwise_large-gpu")
def against_compile(rows: list[Row]) -> str:
    return _compared([r for r in rows if r.get("vs_compile")], ("op", "dtype"), ("direction",))


@measured("pointwise_sweep-gpu")
def pointwise_sweep(rows: list[Row]) -> str:
    shown = [r for r in rows if r["table"] == "sweep" and r["elements"] in SWEEP]
    return _compared(shown, ("op", "dtype"), ("elements",))


@measured("pointwise_sweep-gpu")
def sweep_host(rows: list[Row]) -> str:
    shown = [r for r in rows if "host_us" in r and r["elements"] == SWEEP[0]]
    return _compared(shown, ("op",), ("dtype",), "host_")


@measured("pointwise_sweep-gpu")
def three_way_device(rows: list[Row]) -> str:
    return _three_way(rows, "")


@measured("pointwise_sweep-gpu")
def three_way_wall(rows: list[Row]) -> str:
    return _three_way(rows, "wall_")


def _three_way(rows: list[Row], stem: str) -> str:
    """One below the other: the two ops have their own sizes."""
    shown = [r for r in rows if r["table"] == "three-way"]
    return _compared(shown, ("op", "elements"), ("dtype",), stem)


def _compared(rows: list[Row], down: Sequence[str], across: Sequence[str], stem: str = "") -> str:
    """Our microseconds, and how many times as long the rivals take."""
    def key(row: Row, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(_count(row[n]) if n == "elements" else f"`{row[n]}`" if n == "op" else row[n]
                     for n in names)

    rows = [r for r in rows if "error" not in r]
    rivals = _rivals(rows, stem)
    cells = {(key(r, down), key(r, across)): f"{cell(float(r[f'{stem}us']))} "
             f"({', '.join(_times(r.get(f'{stem}vs_{name}')) for name in rivals)})" for r in rows}
    columns = list(dict.fromkeys(key(r, across) for r in rows))
    lines = list(dict.fromkeys(key(r, down) for r in rows))
    return markdown([f"{' '.join(down)}: µs ({', '.join(rivals)})", *(" ".join(c) for c in columns)],
                    [[" ".join(line), *(cells.get((line, c), "–") for c in columns)]
                     for line in lines])


def _summary(rows: list[Row], names: Sequence[str]) -> str:
    """Medians over the ops, the worst of them, and how many are slower than eager torch."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if "error" not in row:
            key = tuple(_count(row[n]) if n == "elements" else row[n] for n in names)
            groups.setdefault(key, []).append(row)

    def middle_and_worst(group: list[Row], figure: str, say: Callable[[float], str]) -> str:
        worst = min(group, key=lambda row: row[figure])
        return f"{say(statistics.median(r[figure] for r in group))}, {say(worst[figure])} `{worst['op']}`"

    return markdown([" ".join(names), "ops", "of a copy: median, lowest", "times eager: median, lowest",
                     "slower than eager"],
                    [[" ".join(key), str(len(group)), middle_and_worst(group, "of_copy", cell),
                      middle_and_worst(group, "vs_eager", _times),
                      str(sum(r["vs_eager"] < LOST for r in group))] for key, group in groups.items()])


@measured("pointwise_large-gpu")
def summary_gpu(rows: list[Row]) -> str:
    return _summary(rows, ("dtype", "direction"))


@measured("pointwise_cpu")
def summary_cpu(rows: list[Row]) -> str:
    return _summary(rows, ("dtype", "elements", "direction"))


def lost(folder: Path) -> str:
    """Every comparison that a rival wins, of all result files."""
    parts = []
    for name in COMPARED:
        content = load(folder, name)
        if content is None:
            continue
        compared = list(_comparisons(content["rows"]))
        found = sorted((one for one in compared if one[0] < LOST), key=lambda one: one[0])
        head = ["op", "dtype", "elements", "direction", "faster", "time", "times as long as ours"]
        parts += [f"{len(found)} of {len(compared)} comparisons:",
                  markdown(head, [[*words, _times(ratio)] for ratio, words in found]), _where(content, name)]
    return "\n\n".join(parts) or NOT_MEASURED


def _comparisons(rows: list[Row]) -> Iterator[tuple[float, list[str]]]:
    """How many times as long a rival takes, and what the two were."""
    for stem, time in (("", "call"), ("host_", "host"), ("wall_", "wall")):
        for row in rows:
            for rival in _rivals([row], stem) if "op" in row else ():
                yield row[f"{stem}vs_{rival}"], [
                    f"`{row['op']}`", row["dtype"], _count(row["elements"]), row.get("direction", "forward"),
                    rival, time]
    for before, row in itertools.pairwise(rows):  # of launch_overhead: eager stands before ours
        if before.get("call", "").endswith(" eager") and row["call"].startswith("fusionrt."):
            name = row["call"].removeprefix("fusionrt.")
            yield before["host_us"] / row["host_us"], [f"`{name}`", "float32", "4 Ki", row["group"],
                                                       "eager", "host"]


@measured("launch_overhead-gpu")
def launch_calls(rows: list[Row]) -> str:
    return _launches([r for r in rows if r["group"] != "parts"])


@measured("launch_overhead-gpu")
def launch_overhead(rows: list[Row]) -> str:
    return _launches(rows)


def _launches(rows: list[Row]) -> str:
    return markdown(["call", "group", "host µs", "of a torch.add", "latency µs"],
                    [[r["call"], r["group"], cell(r["host_us"]), cell(r["vs_torch.add"]),
                      cell(r.get("latency_us"))] for r in rows])


# -- both ------------------------------------------------------------------------------------------

def _startup(rows: list[Row]) -> str:
    def line(r: Row) -> list[str]:
        if "absent" in r:
            return [r["what"], cell(r["cache"]), f"absent: {r['absent']}", "–", "–", "–"]
        own = r["own_modules"] + r["import_fusionrt"] if "own_modules" in r else None
        return [r["what"], cell(r["cache"]), cell(r["ms"]), cell(own), cell(r.get("third_party")),
                cell(r.get("first_call"))]

    return markdown(["fresh process", "cache", "ms", "imports of ours", "of others", "first call"],
                    [line(row) for row in rows])


def _warmup(rows: list[Row]) -> str:
    return markdown(["architecture", "ops", "cache", "seconds", "kernels", "MB", "threads"],
                    [[r["arch"], r["ops"], r["cache"], cell(r["seconds"]),
                      str(r["compiled"] + r["present"]), cell(r["MB"]), str(r["jobs"])]
                     for r in rows if "error" not in r])


@measured("pointwise_cpu")
def pointwise_cpu(rows: list[Row]) -> str:
    return _compared(rows, ("op", "direction"), ("dtype", "elements"))


def _catalogue(rows: list[Row]) -> str:
    return _compared(rows, ("op", "direction"), ("dtype", "elements"))


def _listed(*columns: str) -> Callable[[list[Row]], str]:
    """Every row as it stands, in these columns; `vs_` those say how many times as long others take."""
    def one(row: Row, name: str) -> str:
        value = row.get(name)
        if "vs_" in name:
            return _times(value)
        return "–" if value is None else f"`{value}`" if name in ("op", "optimizer") else cell(value)

    def listed(rows: list[Row]) -> str:
        return markdown([name.replace("_", " ") for name in columns],
                        [[one(row, name) for name in columns] for row in rows if "error" not in row])

    return listed


TABLES: dict[str, Callable[[Path], str]] = {
    "ops": ops, "summary_gpu": summary_gpu, "summary_cpu": summary_cpu, "lost": lost,
    "pointwise_large": pointwise_large, "rows_small": rows_small,
    "against_compile": against_compile,
    "pointwise_sweep": pointwise_sweep, "sweep_host": sweep_host,
    "three_way_device": three_way_device, "three_way_wall": three_way_wall,
    "launch_overhead": launch_overhead, "launch_calls": launch_calls,
    "new_shapes": measured("new_shapes-gpu")(_listed(
        "op", "direction", "first_us", "second_us", "known_us", "vs_eager", "known_vs_eager", "vs_compile",
        "known_vs_compile")),
    "startup_gpu": measured("startup-gpu")(_startup),
    "startup_cpu": measured("startup-cpu")(_startup),
    "rows_large": measured("rows-gpu")(_rows_large),
    "rivals": measured("rivals-gpu")(_listed(
        "op", "dtype", "rows", "columns", "direction", "us", "of_copy", "vs_eager", "vs_compile", "vs_liger",
        "vs_apex", "vs_transformer-engine", "wall_us", "wall_vs_eager", "wall_vs_compile", "wall_vs_liger")),
    "warmup_gpu": measured("warmup_time-gpu")(_warmup), "warmup_cpu": measured("warmup_time-cpu")(_warmup),
    "optimizers": measured("optimizers-gpu")(_listed(
        "model", "optimizer", "dtype", "options", "device_us", "of_copy", "vs_torch_device", "wall_us",
        "vs_torch_wall", "latency_us", "vs_torch_latency", "state")),
    "embedding": measured("embedding-gpu")(_listed(
        "op", "variant", "dtype", "layout", "tokens", "columns", "direction", "us", "of_copy", "vs_eager")),
    "reductions": measured("reductions-gpu")(_listed(
        "op", "dtype", "reduced", "us", "of_read", "vs_eager")),
    "layouts": measured("layouts-gpu")(_listed(
        "layout", "op", "dtype", "direction", "us", "of_copy", "vs_eager")),
    "layouts_cpu": measured("layouts-cpu")(_listed(
        "layout", "op", "direction", "us", "GB/s", "vs_eager", "spread")),
    "channel_norms": measured("channel_norms-gpu")(_listed(
        "op", "dtype", "memory", "shape", "direction", "us", "of_copy", "vs_eager")),
    "linear_cross_entropy": measured("linear_cross_entropy-gpu")(_listed(
        "tokens", "width", "vocabulary", "us", "vs_eager", "peak_MB", "memory")),
    "gemm": measured("gemm-gpu")(_listed(
        "M", "N", "K", "case", "dtype", "us", "TFLOP/s", "of_cublas", "vs_eager", "vs_pass", "vs_epilogue",
        "vs_compile", "chosen")),
    "linear": measured("linear-gpu")(_listed(
        "m", "k", "n", "activation", "way", "us", "share", "vs_eager", "vs_compile", "vs_best")),
    "ffn": measured("ffn-gpu")(_listed(
        "kind", "activation", "dropout", "tokens", "width", "hidden", "us", "vs_eager", "vs_compile",
        "peak_MB", "recompute_peak_MB", "eager_peak_MB", "compile_peak_MB")),
    "attention": measured("attention-gpu")(_listed(
        "table", "variant", "dtype", "length", "dim", "causal", "direction", "way", "us", "TFLOP/s",
        "vs_best", "vs_default", "vs_flex")),
    "convolution": measured("convolution-gpu")(_listed(
        "table", "layer", "dtype", "memory", "direction", "us", "of_copy", "vs_eager", "vs_compile")),
    "transformer_block": measured("transformer_block-gpu")(_listed(
        "model", "direction", "us", "vs_eager", "vs_compile", "launches", "eager_launches", "memory_MB",
        "eager_memory_MB", "of_matmul")),
    "models": measured("models-gpu")(_listed(
        "model", "precision", "batch", "us", "vs_eager", "vs_compile", "vs_reduce", "of_floor", "kernels",
        "eager_kernels", "undone")),
    "models_startup": measured("models_startup-gpu")(_listed(
        "model", "variant", "cache", "ms", "of_compile")),
    "models_training": measured("models_training-gpu")(_listed(
        "model", "batch", "us", "vs_eager", "vs_compile", "MB", "of_eager_MB")),
    "models_cpu": measured("models-cpu")(_listed("model", "batch", "us", "vs_eager", "spread", "undone")),
    "image_gpu": measured("image-gpu")(_listed(
        "case", "images", "height", "width", "us", "of_copy", "vs_torchvision", "vs_torchvision_batch",
        "vs_torch", "wall_us")),
    "image_cpu": measured("image-cpu")(_listed(
        "case", "images", "height", "width", "us", "vs_torchvision", "vs_torchvision_batch", "vs_torch")),
    "window_gpu": measured("window-gpu")(_listed(
        "case", "op", "dtype", "window", "direction", "us", "of_copy", "vs_unfold")),
    "window_cpu": measured("window-cpu")(_listed(
        "case", "op", "dtype", "window", "us", "vs_unfold", "vs_pool", "vs_pandas")),
    "rows_cpu": measured("rows_cpu")(_listed("op", "direction", "us", "of_copy", "vs_eager", "spread")),
    "pointwise_cpu": pointwise_cpu,
    "catalogue_gpu": measured("catalogue-gpu")(_catalogue),
    "catalogue_cpu": measured("catalogue-cpu")(_catalogue)}
