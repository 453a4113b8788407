"""Rolling windows on a CPU: van Herk's scans over segments of window - 1 elements, in float64. Windows of few
elements are those of `window_cpu_few`, sums and extremes of some hundred those of `window_cpu_pieces`.

A task takes some segments of one row, or of neighbouring rows ("columns") whose elements are neighbours in
memory: the reversed scan of a segment goes to scratch, the scan of what follows it is joined to that.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from fusionrt.cpu.kernel import Kernel
from fusionrt.data import window_cpu_few, window_cpu_pieces
from fusionrt.data.window_rows import LOADS, Request, Rows
from fusionrt.dtypes import name_of
from fusionrt.laid import address

COLUMNS = 64        # of a task
WINDOWS = 1 << 12   # of a task, at least


class Family(NamedTuple):
    """Lines of the kernel. `v` is an element, `at` its place, `C0`... what is known of those so far, `T0`...
    the same of a tail; `n_tail`, `n_head` are numbers of elements, 1 / n_tail is `by_tail`."""

    start: tuple[str, ...]     # of C0, C1 ...
    refresh: str               # of them, every 256 elements
    tail: tuple[str, ...]      # the element before, joined
    head: tuple[str, ...]      # the element after, joined
    result: tuple[str, ...]


_WELFORD = ("d = v - C0", "C0 += d * by", "C1 += d * (v - C0)")
# Sums in two parts: the error grows with 256 + n / 256 additions, not with n.
_TOTAL = Family(("0.0", "0.0"), "C0, C1 = C0 + C1, 0.0", ("C1 += v",), ("C1 += v",),
                ("r = (T0 + T1) + (C0 + C1)",))


def _extreme(largest: bool, indexed: bool) -> Family:
    least, than, choose = ("-inf", ">", "maximum") if largest else ("inf", "<", "minimum")
    if not indexed:
        return Family((least,), "", (f"C0 = {choose}(C0, v)",), (f"C0 = {choose}(C0, v)",),
                      (f"r = {choose}(T0, C0)",))
    before, after = f"(v {than}= C0) | (v != v)", f"(v {than} C0) | ((v != v) & (C0 == C0)) | (C1 < 0)"
    return Family((least, "-1.0"), "",
                  (f"new = {before}", "C0, C1 = where(new, v, C0), where(new, float64_of(at), C1)"),
                  (f"new = {after}", "C0, C1 = where(new, v, C0), where(new, float64_of(at), C1)"),
                  (f"new = (C0 {than} T0) | ((C0 != C0) & (T0 == T0)) | (T1 < 0)", "r = where(new, C0, T0)",
                   "i = where(new, C1, T1)"))


def family(op: str, indexed: bool) -> Family:
    if op in ("min", "max"):
        return _extreme(op == "max", indexed)
    if op == "sum":
        return _TOTAL
    if op == "mean":
        return _TOTAL._replace(result=(*_TOTAL.result, "r /= count"))
    moments = ("d = C0 - T0", "r = (T1 + C1 + d * d * weight) / freedom", "r = sqrt(r)")
    return Family(("0.0", "0.0"), "", _WELFORD, _WELFORD, moments if op == "std" else moments[:2])


_INTEGERS = (*Rows._fields, "results", "dense", "left", "window", "stride", "min_periods", "width", "group",
             "tasks", "parts", "slab")
_TEXT = """
    blocks, groups, segment = -(-inner // width), -(-dense // group), window - 1
    for part in range(start, stop):
        tails = float64_at(scratch + part * slab)
        carry = float64_at(scratch + part * slab + {size} * 8 * window * width)
        for task in range(part, tasks, parts):
            column, row = task % blocks * width, task // blocks // groups
            first = task // blocks % groups * group
            last, columns = min(first + group, dense), min(width, inner - column)
            source, target = row * outer_step + column, row * results * inner + column
            result = -(-first // stride)
            while first < last:
                {each}:
{reset}
                by, n_tail, k = 0.0, 0, segment
                {each}:
{keep}
                low, high = max(left - first, 0), min(n + left - first, segment)  # elements of the row
                for k in range(high - 1, low - 1, -1):
                    n_tail += 1
                    by = {by_tail}
                    {each}:
                        v, at = float64_of({load_tail}), first + k - left
{tail}
{refresh_tail}
                    if k < last - first or k == low:
                        {each}:
{keep_at}
                {each}:
{reset}
                n_head = 0
                for k in range(min(segment, last - first)):
                    at = first + k + segment - left
                    if at >= 0 and at < n:
                        n_head += 1
                        by = {by_head}
                        {each}:
                            v = float64_of({load_head})
{head}
{refresh_head}
                    if first + k == result * stride:
                        begin = first + k - left
                        whole = min(begin + window, n) - max(begin, 0)
                        count, n_tail = float64_of(whole), max(whole - n_head, 0)
                        freedom = max(count - correction, 0.0)
                        weight = float64_of(n_tail) * float64_of(n_head) / count
                        missing = whole < min_periods
                        to = target + result * inner
                        k_tail = max(k, low) if k < high and low < high else segment
                        {each}:
{result}
                        result += 1
                first += segment
"""


def _spelled(lines: tuple[str, ...], indent: int, single: bool, size: int, place: str = "k") -> str:
    text = "\n".join(" " * indent + line for line in lines if line) or " " * indent + "pass"
    for k in range(size):
        text = text.replace(f"C{k}", f"carry{k}" if single else f"carry[{k} * width + c]")
        text = text.replace(f"T{k}", f"tails[({place} * {size} + {k}) * width + c]")
    return text


@functools.cache
def kernel(op: str, dtype: torch.dtype, indexed: bool, single: bool) -> Kernel:
    """`single`: of one column, which a task then keeps in registers."""
    name, parts = name_of(dtype), family(op, indexed)
    size, moments = len(parts.start), op in ("var", "std")
    spelled = functools.partial(_spelled, single=single, size=size)
    each = "for c in range(1)" if single else "for c in range(columns)"
    refresh = ("if {} & 255 == 0:", f"    {each}:", f"        {parts.refresh}") if parts.refresh else ()
    store = [f"out[to + c] = store_{name}(acc_t(where(missing, nan, r)))"]
    if indexed:
        store.append("index[to + c] = cast_int32(where(missing, -1.0, i))")
    keep = tuple(f"T{k} = C{k}" for k in range(size))
    text = _TEXT.format(
        size=size, each=each,
        reset=spelled(tuple(f"C{k} = {value}" for k, value in enumerate(parts.start)), 20),
        by_tail="1.0 / float64_of(n_tail)" if moments else "0.0",
        by_head="1.0 / float64_of(n_head)" if moments else "0.0",
        load_tail=LOADS.get(dtype, "{}").format("x[source + (first + k - left) * step + c]"),
        load_head=LOADS.get(dtype, "{}").format("x[source + at * step + c]"),
        tail=spelled(parts.tail, 24), head=spelled(parts.head, 28),
        refresh_tail=spelled(tuple(line.format("k") for line in refresh), 20),
        refresh_head=spelled(tuple(line.format("k") for line in refresh), 24),
        keep=spelled(keep, 20), keep_at=spelled(keep, 28),
        result=spelled((*parts.result, *store), 28, place="k_tail"))
    return Kernel(f"sliding_window {op}", text, "float64",
                  pointers={"x": name, "out": name, "index": "int32", "scratch": ""},
                  integers=_INTEGERS, scalars=("correction",))


def roll(request: Request, x: torch.Tensor, rows: Rows, out: torch.Tensor, index: torch.Tensor | None
         ) -> None:
    """Into `out`, and the places of extremes into `index`."""
    if index is None and window_cpu_few.serves(request, rows):
        window_cpu_few.roll(request, x, rows, out)
        return
    if index is None and window_cpu_pieces.serves(request, rows):
        window_cpu_pieces.roll(request, x, rows, out)
        return
    segment, width, dense = request.window - 1, min(rows.inner, COLUMNS), request.dense(rows.n)
    group = -(-max(WINDOWS // width, 1) // segment) * segment
    tasks = rows.outer * -(-rows.inner // width) * -(-dense // group)
    parts = min(tasks, torch.get_num_threads())
    size = len(family(request.op, index is not None).start)
    slab = 8 * size * width * (request.window + 1) + 64  # tails, none of them, one carry
    scratch = torch.empty(parts * slab, dtype=torch.uint8, device=x.device)
    made = kernel(request.op, x.dtype, index is not None, rows.inner == 1)
    made(x.device, parts, made.given(
        x=x.data_ptr(), out=out.data_ptr(), index=address(index), scratch=scratch.data_ptr(),
        **rows._asdict(), results=request.results(rows.n), dense=dense, left=request.left,
        window=request.window, stride=request.stride, min_periods=request.min_periods, width=width,
        group=group, tasks=tasks, parts=parts, slab=slab, correction=request.correction),
        work=max(1, rows.outer * rows.inner * dense // max(parts, 1)))
