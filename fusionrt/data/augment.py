"""Random crops, flips and colours as plain numbers, to be fed to `image_preprocess` or to anything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fusionrt.arguments import as_float
from fusionrt.array import is_foreign
from fusionrt.data.samples import ADJUSTMENTS, check_sides

Range = float | tuple[float, float] | None
ATTEMPTS = 10  # at a box that lies in the image, as in torchvision


class RandomParameters(NamedTuple):
    """Of N images, on the CPU: arguments of `image_preprocess`. None: not asked for."""

    boxes: torch.Tensor | None       # (N, 4) int64: top, left, height, width
    flip: torch.Tensor | None        # (N,) bool
    brightness: torch.Tensor | None  # (N,) float64, as the others
    contrast: torch.Tensor | None
    saturation: torch.Tensor | None
    hue: torch.Tensor | None
    order: torch.Tensor | None       # (N, 4) int64: permutations of the four adjustments


def random_parameters(images: Any, *, layout: str = "NHWC", scale: tuple[float, float] | None = (0.08, 1.0),
                      ratio: tuple[float, float] = (3 / 4, 4 / 3), flip: float = 0.5,
                      brightness: Range = None, contrast: Range = None, saturation: Range = None,
                      hue: Range = None, generator: torch.Generator | None = None) -> RandomParameters:
    """Parameters for each of `images`, of which only the shapes count (see `image_preprocess` for `layout`).

    boxes: area uniform in `scale` times the image's, logarithm of width / height uniform in that of `ratio`,
    rounded; the first of 10 that fits in the image, or else the largest centred one of an allowed ratio.
    `scale` None: no boxes. `flip`: the probability. `brightness`, `contrast`, `saturation`: uniform in a
    range, or x for [max(0, 1 - x), 1 + x]; `hue`: in a range, or x for [-x, x], within [-0.5, 0.5]; None
    leaves one out. With any of them, a random order for each image.
    All numbers come from one draw of `generator`, torch's default one for the CPU unless given: the same seed
    gives the same parameters, whatever the images' device.
    Raises ValueError for a range that is none.
    Source: RandomResizedCrop, RandomHorizontalFlip and ColorJitter of torchvision.transforms.v2, whose
    distributions these are, for each image by itself; the random numbers are taken in another order.

        random_parameters(photos, scale=(0.2, 1), brightness=0.4, hue=0.1, generator=torch.Generator())
    """
    sizes = _sizes(images, layout)
    ranges = {name: _range(name, value) for name, value in
              zip(ADJUSTMENTS, (brightness, contrast, saturation, hue), strict=True)}
    if not 0 <= as_float("random_parameters", "flip", flip) <= 1:
        raise ValueError(f"random_parameters: flip must be a probability, got {flip!r}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"random_parameters: generator must be a torch.Generator or None, got {generator!r}")
    numbers = torch.rand(len(sizes), 4 * ATTEMPTS + 9, dtype=torch.float64, generator=generator,
                         device="cpu").numpy()
    tries, rest = numbers[:, :4 * ATTEMPTS].reshape(-1, ATTEMPTS, 4), numbers[:, 4 * ATTEMPTS:]
    boxes = None
    if scale is not None:
        allowed = _interval("scale", scale, 0.0, math.inf), _interval("ratio", ratio, 1e-9, math.inf)
        boxes = torch.from_numpy(_boxes(sizes, *allowed, tries))
    factors = {name: None if given is None else
               torch.from_numpy(given[0] + (given[1] - given[0]) * rest[:, k])
               for k, (name, given) in enumerate(ranges.items())}
    order = None if all(f is None for f in factors.values()) else torch.from_numpy(rest[:, 5:9].argsort(1))
    return RandomParameters(boxes, torch.from_numpy(rest[:, 4] < flip), **factors, order=order)


def _sizes(images: Any, layout: str) -> Any:
    """(height, width) of each image."""
    planar = layout in ("NCHW", "CHW")
    if not planar and layout not in ("NHWC", "HWC"):
        raise ValueError(f"random_parameters: layout must be one of NHWC, HWC, NCHW, CHW, got {layout!r}")
    found = []
    for one in images if isinstance(images, Sequence) else [images]:
        if not hasattr(one, "shape") and not is_foreign(one):
            raise TypeError("random_parameters: images must be tensors or arrays, got "
                            f"{type(one).__name__}")
        shape = tuple(one.shape if hasattr(one, "shape") else np.asarray(one).shape)  # a picture of Pillow's
        if len(shape) not in (3, 4):
            raise ValueError(f"random_parameters: images must be of 3 or 4 dimensions, got the shape {shape}")
        size = shape[-2:] if planar else shape[-3:-1]
        check_sides("random_parameters", size)
        found += [size] * (shape[0] if len(shape) == 4 else 1)
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def _interval(name: str, value: Any, low: float, high: float) -> tuple[float, float]:
    if not (isinstance(value, Sequence) and len(value) == 2
            and all(hasattr(v, "__float__") for v in value) and low <= value[0] <= value[1] <= high
            and value[1] < math.inf):
        end = "inf)" if high == math.inf else f"{high:g}]"
        raise ValueError(f"random_parameters: {name} must be (low, high) in [{low:g}, {end}, got {value!r}")
    return float(value[0]), float(value[1])


def _range(name: str, value: Range) -> tuple[float, float] | None:
    if value is None:
        return None
    centre, low, high = (0.0, -0.5, 0.5) if name == "hue" else (1.0, 0.0, math.inf)
    if not isinstance(value, Sequence) and hasattr(value, "__float__") and not getattr(value, "ndim", 0):
        value = float(value)
        if not 0 <= value < math.inf:
            raise ValueError(f"random_parameters: {name} must be finite and not negative, got {value!r}")
        value = (max(centre - value, 0.0) if centre else -value, centre + value)
    return _interval(name, value, low, high)


def _boxes(sizes: Any, scale: tuple[float, float], ratio: tuple[float, float], tries: Any) -> Any:
    heights, widths = sizes[:, :1], sizes[:, 1:]
    area = heights * widths * (scale[0] + (scale[1] - scale[0]) * tries[..., 0])
    logs = math.log(ratio[0]), math.log(ratio[1])
    aspect = np.exp(logs[0] + (logs[1] - logs[0]) * tries[..., 1])
    width, height = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (width > 0) & (width <= widths) & (height > 0) & (height <= heights)
    chosen = np.arange(len(sizes)), fits.argmax(1)
    width, height = width[chosen].astype(np.int64), height[chosen].astype(np.int64)
    free = sizes - np.stack([height, width], 1)
    corners = np.floor(tries[chosen][:, 2:] * (free + 1)).astype(np.int64)
    boxes = np.concatenate([corners, np.stack([height, width], 1)], 1)
    centred = _largest(sizes, ratio)
    return np.where(fits.any(1, keepdims=True), boxes, centred)


def _largest(sizes: Any, ratio: tuple[float, float]) -> Any:
    """The largest centred boxes of an allowed ratio, a pixel wide and high at the least."""
    height, width = sizes[:, 0], sizes[:, 1]
    box_height = np.where(width < height * ratio[0], np.rint(width / ratio[0]).astype(np.int64), height)
    box_width = np.where(width > height * ratio[1], np.rint(height * ratio[1]).astype(np.int64), width)
    box = np.stack([box_height, box_width], 1).clip(1)
    return np.concatenate([(sizes - box) // 2, box], 1)
