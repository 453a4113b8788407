"""What each image of a batch is to go through, as a table: a row is what kernels know of one image."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

ADJUSTMENTS = ("brightness", "contrast", "saturation", "hue")  # in the order of their numbers
LARGEST = 65535  # pixels: places and sizes are 16 bits wide, so that 64 rows fit into a launch's parameters
PLACES = ("height", "width", "top", "left", "box_height", "box_width", "resized_height", "resized_width",
           "offset_y", "offset_x", "flip", "order")
# The box lies in the image, which has height and width; resized it has the resized size, and the result
# begins at the offset in that. `order`: two bits for each adjustment, the first one lowest, and above these
# four bits for those that there are: one kernel serves any of them.
ROW = np.dtype([("data", "u8"), *((name, "u2") for name in PLACES), *((name, "f4") for name in ADJUSTMENTS)])
DECLARATION = ("struct Sample { unsigned long long data; unsigned short " + ", ".join(PLACES) + "; float "
               + ", ".join(ADJUSTMENTS) + "; };")


class Images(NamedTuple):
    """Source images without gaps, of one dtype, device and number of channels."""

    tensors: Sequence[torch.Tensor]      # what has to live until the kernels have run
    addresses: Any
    heights: Any
    widths: Any
    channels: int
    planar: bool                         # channels first

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype


class Geometry(NamedTuple):
    """Where results come from: the arguments of `image_preprocess` of these names."""

    size: tuple[int, int]
    boxes: Any
    resize: int | tuple[int, int] | None
    flip: Any


def table(images: Images, geometry: Geometry, factors: dict[str, Any], order: Any) -> tuple[Any, bool]:
    """The rows, and whether any image is resized. `factors`: values of the ADJUSTMENTS or None. Raises
    ValueError for what does not fit."""
    count, asked = len(images.addresses), (geometry, tuple(factors.values()), order)
    if len(images.tensors) == 1 and count and is_key(asked):  # of one size, and asked of all alike
        kept, resizes = _kept_rows(count, int(images.heights[0]), int(images.widths[0]), *asked)
        rows = kept.copy()
    else:
        rows, resizes = _rows(count, images.heights, images.widths, *asked)
    rows["data"] = images.addresses
    return rows, resizes


def is_key(value: Any) -> bool:
    """Of numbers and words alone: a tensor can be a key as well, but its elements may change."""
    return all(map(is_key, value)) if isinstance(value, tuple) else type(value) in _KEYS


_KEYS = {bool, int, float, str, type(None)}


def _rows(count: int, heights: Any, widths: Any, geometry: Geometry, factors: tuple[Any, ...], order: Any
          ) -> tuple[Any, bool]:
    """All but the addresses."""
    rows = np.zeros(count, ROW)
    rows["height"], rows["width"] = heights, widths
    boxes = _boxes(np.stack([rows["height"], rows["width"]], 1).astype(np.int64), geometry)
    for name, column in zip(("top", "left", "box_height", "box_width"), boxes.T, strict=True):
        rows[name] = column
    resized = _resized(boxes, geometry)
    for axis, (name, offset) in enumerate((("resized_height", "offset_y"), ("resized_width", "offset_x"))):
        free = resized[:, axis] - geometry.size[axis]
        rows[name], rows[offset] = resized[:, axis], np.rint(free / 2)  # half to even, as torchvision
    rows["flip"] = _of_each("flip", geometry.flip, len(rows), bool)
    given = 0
    for k, (name, factor) in enumerate(zip(ADJUSTMENTS, factors, strict=True)):
        if factor is not None:
            given |= 1 << k
            rows[name] = _factor(name, factor, len(rows))
    rows["order"] = (_order(order, len(rows)) << np.arange(0, 8, 2)).sum(1) | given << 8
    return rows, bool((boxes[:, 2:] != resized).any())


LARGEST_FACTOR = float(np.finfo(np.float32).max)  # as the kernels have it
_kept_rows = functools.lru_cache(64)(_rows)


def check_sides(op: str, sides: Sequence[int]) -> None:
    """Of an image."""
    if not 1 <= min(sides) <= max(sides) <= LARGEST:
        raise ValueError(f"{op}: images must have sides of 1 to {LARGEST} pixels, got {tuple(sides)}")


def array(op: str, name: str, value: Any) -> Any:
    """Of numbers, whatever holds them."""
    try:
        found = np.asarray(value)
    except ValueError:  # of unequal lengths
        found = np.asarray(None)
    if found.dtype.kind not in "biuf" or found.dtype.itemsize > 8:
        raise TypeError(f"{op}: {name} must be of numbers, got {value!r}"[:200])
    return found


def _of_each(name: str, value: Any, count: int, dtype: Any, shape: tuple[int, ...] = ()) -> Any:
    """One value for all images, or one for each."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype == torch.bfloat16 else value  # which NumPy has not
    values = array("image_preprocess", name, value)
    if values.shape not in (shape, (count, *shape)):
        one = f"{shape[0]} numbers" if shape else "a number" if dtype is not bool else "a bool"
        raise ValueError(f"image_preprocess: {name} must be {one} or of the shape {(count, *shape)} for so "
                         f"many images, got the shape {values.shape}")
    with np.errstate(invalid="ignore"):  # what is no whole number is refused below
        found = values.astype(dtype)
    if dtype is not np.float64 and (found != values).any():
        kind = "True or False" if dtype is bool else "whole numbers"
        raise ValueError(f"image_preprocess: {name} must be {kind}, got {values.tolist()}"[:200])
    return np.broadcast_to(found, (count, *shape))


def _factor(name: str, value: Any, count: int) -> Any:
    values = _of_each(name, value, count, np.float64)
    low, high = (-0.5, 0.5) if name == "hue" else (0.0, LARGEST_FACTOR)
    wrong = values[~((values >= low) & (values <= high))]
    if len(wrong):
        allowed = ("in [-0.5, 0.5]" if name == "hue" else
                   f"at most {high:g}" if high < wrong[0] < math.inf else "finite and not negative")
        raise ValueError(f"image_preprocess: {name} must be {allowed}, got {wrong[0]:g}")
    return values


def _order(order: Any, count: int) -> Any:
    orders = _of_each("order", range(4) if order is None else order, count, np.int64, (4,))
    if not (np.sort(orders, axis=1) == np.arange(4)).all():
        raise ValueError(f"image_preprocess: order must have permutations of 0, 1, 2, 3 "
                         f"({', '.join(ADJUSTMENTS)}), got {orders.tolist()[0]}")
    return orders


def _boxes(sizes: Any, geometry: Geometry) -> Any:
    if geometry.boxes is None:
        return np.concatenate([np.zeros_like(sizes), sizes], 1)
    if isinstance(geometry.boxes, str):  # "center"
        corners = np.rint((sizes - geometry.size) / 2).astype(np.int64)
        boxes = np.concatenate([corners, np.broadcast_to(geometry.size, sizes.shape)], 1)
    else:
        boxes = _of_each("boxes", geometry.boxes, len(sizes), np.int64, (4,))
    bad = (boxes[:, :2] < 0).any(1) | (boxes[:, 2:] < 1).any(1) | (boxes[:, :2] > sizes - boxes[:, 2:]).any(1)
    if bad.any():
        k = int(bad.argmax())
        what = "boxes" if not isinstance(geometry.boxes, str) else "size"
        raise ValueError(f"image_preprocess: {what}: image {k} is {sizes[k][0]} x {sizes[k][1]}, and the box "
                         f"(top, left, height, width) {tuple(map(int, boxes[k]))} does not lie in it")
    return boxes


def _resized(boxes: Any, geometry: Geometry) -> Any:
    """The sizes (height, width) that boxes are resized to, of which the results are the centres."""
    if geometry.resize is None:
        return np.broadcast_to(geometry.size, (len(boxes), 2))
    if isinstance(geometry.resize, int):  # the shorter side; the other one is rounded down, as in torchvision
        heights, widths = boxes[:, 2], boxes[:, 3]
        shorter = np.minimum(heights, widths)
        resized = np.stack([heights * geometry.resize // shorter, widths * geometry.resize // shorter], 1)
    else:
        resized = np.broadcast_to(geometry.resize, (len(boxes), 2))
    if (resized < geometry.size).any() or (resized > LARGEST).any():
        k = int(((resized < geometry.size) | (resized > LARGEST)).any(1).argmax())
        raise ValueError(f"image_preprocess: resize must give images of at least the size {geometry.size}, "
                         f"at most {LARGEST} pixels a side, got {tuple(map(int, resized[k]))} for image {k}")
    return resized
