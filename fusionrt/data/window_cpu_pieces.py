"""Rolling sums and extremes of some hundred elements on a CPU: from those of four neighbours, of four such
pieces, and so on, each a walk over a part of the row that stays in the cache, many results at a time.

The scans of `window_cpu` wait for one addition after the other; here a result takes three operations for each
power of four in the window, and three more at most, which vectors do. Sums are in float64. What lies outside
the row counts as 0, or as the least number. The number of elements is a part of the kernel's text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from fusionrt.cpu.kernel import Kernel
from fusionrt.data.window_rows import LOADS, Request, Rows
from fusionrt.dtypes import name_of

MOST = 4096         # elements of a window; of more, scans are faster
PIECES = 4          # of a power that make the next one (of 2 and 8: up to a third slower)
CHUNK = 1 << 12     # results of a task, or twice the window

Join = Callable[[list[str]], str]

_TEXT = """
    chunks = -(-results // chunk)
    tasks = outer * chunks
    for part in range(start, stop):
        pieces = {scratch}_at(scratch + part * slab)
        found = {scratch}_at(scratch + part * slab + {size} * (chunk + {window}))
        for task in range(part, tasks, parts):
            row, first = task // chunks, task % chunks * chunk
            many = min(chunk, results - first)
            begin, size = first - left, many + {window} - 1
            low, high = min(max(-begin, 0), size), max(min(n - begin, size), 0)
            for c in range(low):
                pieces[c] = {least}
            source = row * outer_step + begin
            for c in range(low, high):
                pieces[c] = {element}
            for c in range(max(low, high), size):
                pieces[c] = {least}
{steps}
            to = row * results + first
            if begin >= 0 and begin + size <= n:
                for c in range(many):
                    out[to + c] = store_{name}(acc_t({whole}))
            else:
                for c in range(many):
                    have = min(begin + c + {window}, n) - max(begin + c, 0)
                    r = where(have < min_periods, nan, {part})
                    out[to + c] = store_{name}(acc_t(r))
"""


def serves(request: Request, rows: Rows) -> bool:
    return (rows.inner == 1 and request.stride == 1 and rows.step == 1 and request.window <= MOST
            and request.op in ("sum", "mean", "min", "max"))


def _sum_steps(window: int) -> list[str]:
    """`found` takes as many pieces of each power as its digit says, the smallest first; then those grow."""
    lines, power, at, before = list[str](), 1, 0, list[str]()
    while True:
        digit = window // power % PIECES
        if digit:
            terms = [*before, *(f"pieces[c + {at + j * power}]" for j in range(digit))]
            lines += ["for c in range(many):", f"    found[c] = {' + '.join(terms)}"]
            at, before = at + digit * power, ["found[c]"]
        if window < power * PIECES:
            return lines
        lines += _grown(power, window, " + ".join)
        power *= PIECES


def _extreme_steps(window: int, op: str) -> list[str]:
    """Extremes may be taken of pieces that overlap."""
    def join(terms: list[str]) -> str:
        return functools.reduce(lambda a, b: f"{op}imum({a}, {b})", terms)

    lines, power = [], 1
    while window >= power * PIECES:
        lines += _grown(power, window, join)
        power *= PIECES
    places = [min(j * power, window - power) for j in range(-(-window // power))]
    return [*lines, "for c in range(many):", f"    found[c] = {join([f'pieces[c + {k}]' for k in places])}"]


def _grown(power: int, window: int, join: Join) -> list[str]:
    """Pieces of the next power, in the place of those that they are made of."""
    terms = [f"pieces[c + {j * power}]" for j in range(PIECES)]
    return [f"for c in range(many + {window - PIECES * power}):", f"    pieces[c] = {join(terms)}"]


@functools.cache
def kernel(op: str, dtype: torch.dtype, window: int) -> Kernel:
    name, extreme = name_of(dtype), op in ("min", "max")
    element = LOADS.get(dtype, "{}").format("x[source + c]")
    scratch = "float64" if not extreme or dtype == torch.float64 else "float32"
    steps = _extreme_steps(window, op) if extreme else _sum_steps(window)
    mean = op == "mean"
    text = _TEXT.format(
        name=name, window=window, scratch=scratch,
        size=8 if scratch == "float64" else 4, least={"min": "inf", "max": "-inf"}.get(op, "0.0"),
        element=element if extreme else f"float64_of({element})",
        steps="\n".join(" " * 12 + line for line in steps),
        whole=f"found[c] * {1 / window!r}" if mean else "found[c]",
        part="found[c] / float64_of(have)" if mean else "found[c]")
    return Kernel(f"sliding_window {op} of {window}", text, "float64",
                  pointers={"x": name, "out": name, "scratch": ""},
                  integers=(*Rows._fields, "results", "left", "min_periods", "chunk", "parts", "slab"))


def roll(request: Request, x: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
    """Into `out`."""
    results = request.results(rows.n)
    chunk = max(1, min(max(CHUNK, 2 * request.window), results))
    tasks = rows.outer * -(-results // chunk)
    parts, slab = min(tasks, torch.get_num_threads()), 8 * (2 * chunk + request.window) + 64
    scratch = torch.empty(parts * slab, dtype=torch.uint8, device=x.device)
    made = kernel(request.op, x.dtype, request.window)
    made(x.device, parts, made.given(
        x=x.data_ptr(), out=out.data_ptr(), scratch=scratch.data_ptr(), **rows._asdict(), results=results,
        left=request.left, min_periods=request.min_periods, chunk=chunk, parts=parts, slab=slab),
        work=max(1, rows.outer * results // max(parts, 1)))
