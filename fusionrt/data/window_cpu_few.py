"""Rolling windows of few elements on a CPU: each result from its elements, many at a time, in float64.

Of rows whose elements are neighbours the results beside each other are a vector; otherwise those of
neighbouring rows ("columns") are. The number of elements is a part of the kernel's text.
"""

from __future__ import annotations

import functools

import torch

from fusionrt.cpu.kernel import Kernel
from fusionrt.data.window_rows import LOADS, Request, Rows
from fusionrt.dtypes import name_of

# Elements of a window; more are faster by scans. Of neighbours in rows, of columns.
MOST = {"sum": (32, 16), "mean": (32, 16), "min": (32, 16), "max": (32, 16), "var": (24, 12), "std": (24, 12)}
CHUNK = 1 << 12  # results of a task, about

_TEXT = """
    chunks = -(-results // chunk)
    for task in range(start, stop):
        row, i = task // chunks, task % chunks * chunk
        last = min(i + chunk, results)
        while i < last:
            begin = i * stride - left
            low, high = max(-begin, 0), min({window}, n - begin)
            at, to = row * outer_step + begin * step, (row * results + i) * inner
            count = float64_of(high - low)
            freedom = max(count - correction, 0.0)
            if high - low == {window}:
                columns = {columns}
                for c in range(columns):
{whole}
                    out[to + c] = {store}
                i += {advance}
            else:
                for c in range(inner):
                    r = {start}
                    for k in range(low, high):
                        v = {element}
                        r = {joined}
{rest}
                    r = where(high - low < min_periods, nan, r)
                    out[to + c] = {store}
                i += 1
"""


def serves(request: Request, rows: Rows) -> bool:
    single = rows.inner == 1
    if single and (request.stride > 1 or rows.step != 1):
        return False
    return 1 < request.window <= MOST[request.op][not single]


@functools.cache
def kernel(op: str, dtype: torch.dtype, window: int, single: bool) -> Kernel:
    name = name_of(dtype)
    extreme = op in ("min", "max")
    element = LOADS.get(dtype, "{}") if extreme else f"float64_of({LOADS.get(dtype, '{}')})"
    values = [f"v{k}" for k in range(window)]
    whole = [f"{v} = {element.format(f'x[at + {k} * step + c]')}" for k, v in enumerate(values)]
    joined = f"{op}imum(r, v)" if extreme else "r + v"
    whole.append("r = " + (functools.reduce(lambda a, b: f"{op}imum({a}, {b})", values) if extreme else
                           " + ".join(values)))
    ends = {"mean": ["r /= count"], "var": ["r /= freedom"],
            "std": ["r /= freedom", "r = sqrt(r)"]}.get(op, [])
    rest = []
    if op in ("var", "std"):
        whole += ["m = r / count", "r = " + " + ".join(f"({v} - m) * ({v} - m)" for v in values)]
        rest = ["m, r = r / count, 0.0", "for k in range(low, high):",
                f"    d = {element.format('x[at + k * step + c]')} - m", "    r += d * d"]
    lines = functools.partial(_indented, 20)
    text = _TEXT.format(
        window=window,
        columns=f"min(last, n - {window - 1} + left) - i" if single else "inner",
        advance="columns" if single else "1", whole=lines([*whole, *ends]), store=f"store_{name}(acc_t(r))",
        start={"min": "inf", "max": "-inf"}.get(op, "0.0"), element=element.format("x[at + k * step + c]"),
        joined=joined, rest=lines([*rest, *ends] or ["pass"]))
    return Kernel(f"sliding_window {op} of {window}", text, "float64", pointers={"x": name, "out": name},
                  integers=(*Rows._fields, "results", "left", "stride", "min_periods", "chunk"),
                  scalars=("correction",))


def _indented(indent: int, lines: list[str]) -> str:
    return "\n".join(" " * indent + line for line in lines)


def roll(request: Request, x: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
    """Into `out`."""
    results = request.results(rows.n)
    single, chunk = rows.inner == 1, max(1, CHUNK // rows.inner)
    made = kernel(request.op, x.dtype, request.window, single)
    made(x.device, rows.outer * -(-results // chunk), made.given(
        x=x.data_ptr(), out=out.data_ptr(), **rows._asdict(), results=results, left=request.left,
        stride=request.stride, min_periods=request.min_periods, chunk=chunk, correction=request.correction),
        work=chunk * rows.inner * request.window)
