"""Image preprocessing on a CPU: the formulas of kernels_src/image.cu, a row of a result at a time.

Of the source rows that a row of the result needs, weighted by the vertical filter, one row is made, then the
horizontal filter applied to it, of which an image has one table. Colours are adjusted in planes of a row.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fusionrt.cpu.kernel import Kernel
from fusionrt.data.samples import ADJUSTMENTS, PLACES

if TYPE_CHECKING:
    from fusionrt.data.image import Recipe

# The columns of the table of numbers; in the text below {data} is an image's own, and so on.
NUMBERS = ("data", *PLACES)
TASKS = 8  # a thread: images need different time

# What one position of a result reads: the first source position, weights that sum to 1, and how many.
TAPS = '''
@inline
def filter(x):
    x = abs_(x)
{filter}


@inline
def fill_taps(weights, position, resized, box):
    """Returns the first position; `weights` get three zeros more than there are taps."""
    center = (np.float64(position) + 0.5) * np.float64(box) / np.float64(resized)
    stretch = max(np.float64(box) / np.float64(resized), 1.0) if {antialias} else 1.0
    low = np.int64(floor(center + 0.5 - {support} * stretch))
    high = np.int64(floor(center + 0.5 + {support} * stretch)) if {antialias} else low + 2 * {support}
    first, last = min(max(low, 0), box - 1), min(max(high - 1, 0), box - 1)
    for t in range(last - first + 4):
        weights[t] = np.float32(0)
    if {antialias}:
        low, high = first, last + 1
    total = 0.0
    for t in range(low, high):
        total += filter((np.float64(t) + 0.5 - center) / stretch)
    for t in range(low, high):
        weight = filter((np.float64(t) + 0.5 - center) / stretch) / total
        weights[min(max(t, 0), box - 1) - first] += np.float32(weight)
    return first, last - first + 1
'''
LINEAR = "    return max(1.0 - x, 0.0)"
CUBIC = '''    a = -0.5 if {antialias} else -0.75
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    return (((x - 5.0) * x + 8.0) * x - 4.0) * a if x < 2.0 else 0.0'''

RESAMPLE = '''
@inline
def sum_rows(row, source, stride, weights, count, start, stop):
    """row[start:stop] of `count` source rows, four or two at a time: a weight of zero fills up."""
    for t in range(0, count, 4):
        a = {pixel}_at(source + t * stride)
        b = {pixel}_at(source + min(t + 1, count - 1) * stride)
        c = {pixel}_at(source + min(t + 2, count - 1) * stride)
        d = {pixel}_at(source + min(t + 3, count - 1) * stride)
        u, v, w, x = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        if t == 0 and count > 2:
            for i in range(start, stop):
                row[i] = fma(u, {load}(a[i]), fma(v, {load}(b[i]), fma(w, {load}(c[i]), x * {load}(d[i]))))
        elif t == 0:
            for i in range(start, stop):
                row[i] = fma(u, {load}(a[i]), v * {load}(b[i]))
        elif count - t > 2:
            for i in range(start, stop):
                row[i] = fma(u, {load}(a[i]), fma(v, {load}(b[i]), fma(w, {load}(c[i]),
                                                                       fma(x, {load}(d[i]), row[i]))))
        else:
            for i in range(start, stop):
                row[i] = fma(u, {load}(a[i]), fma(v, {load}(b[i]), row[i]))


@inline
def sum_columns(pixels, row, weights, firsts, counts, limit, width):
    for x in range(width):
        w, first, count = x * limit, firsts[x] * {interleaved}, counts[x]
{zeros}
        for t in range(count):
            weight = weights[w + t]
{sums}
            first += {interleaved}
{results}


@inline
def fill_columns(weights, firsts, counts, limit, numbers, width):
    for x in range(width):
        taps = float32_at(weights + 4 * x * limit)
        firsts[x], counts[x] = fill_taps(taps, {offset_x} + x, {resized_width}, {box_width})
'''

ADJUST = '''
@inline
def saturated(x):
    return where(x < np.float32(0), np.float32(0), where(x > np.float32(1), np.float32(1), x))


@inline
def grey(pixels, width, x):
    return {grey}


@inline
def brighten(pixels, width, factor):
    for i in range({channels} * width):
        pixels[i] = saturated(pixels[i] * factor)


@inline
def saturate(pixels, width, factor):
    rest = np.float32(1) - factor
    for x in range(width):
        with_ = rest * grey(pixels, width, x)
        for c in range({channels}):
            pixels[c * width + x] = saturated(factor * pixels[c * width + x] + with_)


@inline
def contrast(pixels, width, factor, mean):
    with_ = (np.float32(1) - factor) * mean
    for i in range({channels} * width):
        pixels[i] = saturated(factor * pixels[i] + with_)


@inline
def turn_hue(pixels, width, turn):
    zero, one, two, four, six = np.float32(0), np.float32(1), np.float32(2), np.float32(4), np.float32(6)
    for x in range(width):
        r, g, b = pixels[x], pixels[width + x], pixels[2 * width + x]
        most, least = where(r > g, r, g), where(r < g, r, g)
        most, least = where(b > most, b, most), where(b < least, b, least)
        is_grey = most == least
        inverse = one / where(is_grey, one, most - least)
        sector = where(most == r, (g - b) * inverse,
                       where(most == g, two + (b - r) * inverse, four + (r - g) * inverse))
        h = sector / six + one + turn
        h = (h - floor(h)) * six
        i = floor(h)
        s = where(is_grey, zero, (most - least) / where(is_grey, one, most))
        f = s * (h - i)
        i = where(i == six, zero, i)
        p, q = saturated((one - s) * most), saturated((one - f) * most)
        t = saturated((one - s + f) * most)
        second, third, fifth = i == one, i == two, i == four
        fourth, sixth = i == np.float32(3), i == np.float32(5)
        first = i == zero
        pixels[x] = where(first, most, where(second, q, where(fifth, t, where(sixth, most, p))))
        pixels[width + x] = where(first, t, where(fourth, q, where(second, most, where(third, most, p))))
        pixels[2 * width + x] = where(third, t, where(sixth, q, where(fourth, most, where(fifth, most, p))))


@inline
def adjust(pixels, width, order, factors, mean):
    on = {begins}
    for k in range(4):
        which = (order >> (2 * k)) & 3
        if {stops} and which == 1:
            break
        on = on or which == 1
        if on and (order >> (8 + which)) & 1:
{adjustments}
'''

STORE = '''
@inline
def store(at, sample, y, pixels, height, width, flip, scales, shifts):
    for c in range({channels}):
        scale, shift = scales[c], shifts[c]
        out = {result}_at(at + {size} * {place})
        if flip:
            for x in range(width):
                out[{step} * (width - 1 - x)] = {to_result}(pixels[c * width + x] * scale + shift)
        else:
            for x in range(width):
                out[{step} * x] = {to_result}(pixels[c * width + x] * scale + shift)
'''

# Both stages share the rows of all results among tasks.
FROM_SOURCE = '''
    for task in range(start, stop):
        own = scratch + task * share
        firsts, counts = int64_at(own), int64_at(own + 8 * width)
        planes = own + 16 * width
        weights = planes + 4 * {channels} * width
        down = float32_at(weights + 4 * width * limit)
        row = float32_at(weights + 4 * (width + 1) * limit)
        pixels = float32_at(planes)
        seen = -1
        for k in range(rows * task // tasks, rows * (task + 1) // tasks):
            sample = k // height
            y = k - sample * height
            numbers = int64_at(table + sample * 8 * {columns})
            if sample != seen:
                fill_columns(weights, firsts, counts, limit, numbers, width)
                seen = sample
            first, count = fill_taps(down, {offset_y} + y, {resized_height}, {box_height})
            begin, end = firsts[0], firsts[width - 1] + counts[width - 1]
            stride = {width} * {bytes}
            for plane in range({planes}):
                line = plane * {height} + {top} + first
                source = {data} + line * stride + {left} * {bytes}
                sum_rows(row, source, stride, down, count, begin * {interleaved}, end * {interleaved})
                sum_columns(float32_at(planes + 4 * plane * width), row, float32_at(weights), firsts, counts,
                            limit, width)
            adjust(pixels, width, {order}, float32_at(factors + sample * 16), np.float32(0))
{finish}
'''
FINISH = "            store(out, sample, y, pixels, height, width, {flip} != 0, scales, shifts)"
LEAVE = '''            kept = float32_at(between + 4 * k * {channels} * width)
            for i in range({channels} * width):
                kept[i] = pixels[i]
            total = 0.0
            for x in range(width):
                total += grey(pixels, width, x)
            sums[k] = total'''
FROM_BETWEEN = '''
    for task in range(start, stop):
        seen, mean = -1, np.float32(0)
        for k in range(rows * task // tasks, rows * (task + 1) // tasks):
            sample = k // height
            y = k - sample * height
            numbers = int64_at(table + sample * 8 * {columns})
            if sample != seen:
                total = 0.0
                for i in range(sample * height, sample * height + height):
                    total += sums[i]
                seen, mean = sample, np.float32(total / (height * width))
            pixels = float32_at(between + 4 * k * {channels} * width)
            adjust(pixels, width, {order}, float32_at(factors + sample * 16), mean)
            store(out, sample, y, pixels, height, width, {flip} != 0, scales, shifts)
'''
CALLS = {"brightness": "brighten(pixels, width, factors[0])",
         "contrast": "contrast(pixels, width, factors[1], mean)",
         "saturation": "saturate(pixels, width, factors[2])", "hue": "turn_hue(pixels, width, factors[3])"}
GREY = ("np.float32(0.2989) * pixels[x] + np.float32(0.587) * pixels[width + x] "
        "+ np.float32(0.114) * pixels[2 * width + x]")
WHOLE, FIRST, SECOND = range(3)


@functools.cache
def _kernel(recipe: Recipe, stage: int) -> Kernel:
    n = recipe.channels
    interleaved = 1 if recipe.planar else n
    pixel = {"uint8": "uint8", "float32": "float32"}.get(recipe.source, "uint16")
    unit = "a{0}" if recipe.source != "uint8" else (
        "saturated(a{0} * np.float32(1 / 255))" if recipe.cubic else "a{0} * np.float32(1 / 255)")
    channels = range(interleaved)
    found = {
        "antialias": recipe.antialias, "support": 2 if recipe.cubic else 1, "channels": n,
        "interleaved": interleaved, "planes": n if recipe.planar else 1, "pixel": pixel,
        "load": "np.float32" if recipe.source == "uint8" else f"load_{recipe.source}",
        "bytes": interleaved * {"uint8": 1, "float32": 4}.get(recipe.source, 2),
        "result": "float32" if recipe.result == "float32" else "uint16",
        "size": 4 if recipe.result == "float32" else 2, "to_result": f"store_{recipe.result}",
        "place": f"((sample * {n} + c) * height + y) * width" if recipe.result_planar
        else f"((sample * height + y) * width * {n} + c)", "step": 1 if recipe.result_planar else n,
        "zeros": "\n".join(f"        a{c} = np.float32(0)" for c in channels),
        "sums": "\n".join(f"            a{c} = fma(weight, row[first + {c}], a{c})" for c in channels),
        "results": "\n".join(f"        pixels[{c} * width + x] = {unit.format(c)}" for c in channels),
        "grey": GREY if n == 3 else "pixels[x]",
        "begins": stage != SECOND, "stops": stage == FIRST, "columns": len(NUMBERS),
        "adjustments": _adjustments(recipe, stage),
        **{name: f"numbers[{k}]" for k, name in enumerate(NUMBERS)}}
    found["filter"] = (CUBIC if recipe.cubic else LINEAR).format(**found)
    found["finish"] = (LEAVE if stage == FIRST else FINISH).format(**found)
    functions = (TAPS, ADJUST, STORE) if stage == SECOND else (TAPS, ADJUST, STORE, RESAMPLE)
    return Kernel(
        f"image_preprocess_{stage}", (FROM_BETWEEN if stage == SECOND else FROM_SOURCE).format(**found),
        before="".join(part.format(**found) for part in functions), pointers={
            "table": "", "factors": "", "out": "", "between": "", "scratch": "", "sums": "float64",
            "scales": "float32", "shifts": "float32"},
        integers=("height", "width", "rows", "tasks", "limit", "share"))


def _adjustments(recipe: Recipe, stage: int) -> str:
    names = ("brightness", "saturation", "hue") if recipe.channels == 3 else ("brightness",)
    names = (*names, "contrast") if stage == SECOND else names
    return "\n".join(f"            if which == {ADJUSTMENTS.index(name)}:\n                {CALLS[name]}"
                     for name in names if recipe.adjusts) or "            pass"


def run(recipe: Recipe, rows: Any, out: torch.Tensor, size: tuple[int, int],
        affine: tuple[list[float], list[float]]) -> None:
    """`rows`: the images' table. Fills `out`."""
    height, width = size
    lines = len(rows) * height
    tasks = min(lines, TASKS * torch.get_num_threads())
    numbers = np.stack([rows[name].astype(np.int64) for name in NUMBERS], 1)
    factors = np.ascontiguousarray(np.stack([rows[name] for name in ADJUSTMENTS], 1))
    between = torch.empty(lines * recipe.channels * width if recipe.contrast else 0,
                          dtype=torch.float32, device="cpu")
    sums = torch.empty(lines if recipe.contrast else 0, dtype=torch.float64, device="cpu")
    limit, share = _scratch(recipe, rows, width)
    scratch = torch.empty(tasks * share, dtype=torch.uint8, device="cpu")
    scales, shifts = (np.array(values, np.float32) for values in affine)
    for stage in (FIRST, SECOND) if recipe.contrast else (WHOLE,):
        kernel = _kernel(recipe, stage)
        kernel(out.device, tasks, kernel.given(
            table=numbers.ctypes.data, factors=factors.ctypes.data, out=out.data_ptr(),
            between=between.data_ptr(), scratch=scratch.data_ptr(), sums=sums.data_ptr(),
            scales=scales.ctypes.data, shifts=shifts.ctypes.data, height=height, width=width, rows=lines,
            tasks=tasks, limit=limit, share=share), work=max(1, out.numel() // tasks))


def _scratch(recipe: Recipe, rows: Any, width: int) -> tuple[int, int]:
    """The most taps of a position, and the bytes that a task needs."""
    stretch = 1.0
    if recipe.antialias:
        stretch = max(1.0, *(float((rows[f"box_{side}"] / rows[f"resized_{side}"]).max())
                             for side in ("height", "width")))
    taps = math.ceil((4 if recipe.cubic else 2) * stretch) + 6
    row = int(rows["box_width"].max()) * (1 if recipe.planar else recipe.channels)
    size = 16 * width + 4 * (recipe.channels * width + (width + 1) * taps + row)
    return taps, -(-size // 64) * 64
