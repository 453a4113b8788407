"""Images into a network's input: crop, resize, flip, colour, normalisation, dtype and layout in one pass."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fusionrt import rehearsal
from fusionrt.arguments import is_int
from fusionrt.array import check_dense, is_foreign, to_torch
from fusionrt.data import image_cpu, image_gpu
from fusionrt.data.samples import (
    ADJUSTMENTS,
    LARGEST,
    LARGEST_FACTOR,
    Geometry,
    Images,
    array,
    check_sides,
    is_key,
    table,
)
from fusionrt.dtypes import as_torchs, name_of
from fusionrt.laid import in_memory
from fusionrt.watching import no_transforms

DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)  # of sources; all but uint8 of results
LAYOUTS = {"NHWC": False, "HWC": False, "NCHW": True, "CHW": True}    # to whether channels come first


class Recipe(NamedTuple):
    """What the kernels are made for, the same for all images of a call."""

    source: str
    result: str
    channels: int
    planar: bool
    result_planar: bool
    resizes: bool   # any image, by what follows
    cubic: bool
    antialias: bool
    adjusts: bool   # some of the ADJUSTMENTS
    contrast: bool  # that one, which needs two stages


def image_preprocess(images: Any, size: int | tuple[int, int], *, layout: str = "NHWC", boxes: Any = None,
                     resize: int | tuple[int, int] | None = None, interpolation: Any = "bilinear",
                     antialias: bool = True, flip: Any = False, brightness: Any = None, contrast: Any = None,
                     saturation: Any = None, hue: Any = None, order: Any = None, mean: Any = None,
                     std: Any = None, dtype: Any = torch.float32, out_layout: str = "NCHW") -> Any:
    """(adjust(flip(resize(crop(image)))) - mean) / std of a batch, in one pass over the images.

    `images`: a tensor (N, H, W, C) or (H, W, C), with `layout` "NCHW" (N, C, H, W) or (C, H, W), or a list
    of single images of any sizes; uint8, or floating numbers in [0, 1]. 1 to 4 channels, 1 or 3 for colour
    adjustments; sides of at most 65535 pixels. Also CUDA tensors and arrays of NumPy and CuPy.
    Result: (N, C, *size) in `dtype` (float32, float16 or bfloat16, of torch or NumPy or by name), or without
    N for a single tensor; `out_layout` "NHWC" puts channels last (permuted to NCHW that is torch's
    channels_last).

    In this order, whatever is given for all images or for each, with a first dimension of N:
    * `boxes`: (top, left, height, width) of what is used, (N, 4), or "center" for a box of the result's size.
    * `resize`: the size (height, width), or of the shorter side, that a box is resized to before the centre
      of `size` is taken; by default a box is resized to `size`. `interpolation`: "bilinear" or "bicubic",
      or torchvision's InterpolationMode of these.
    * `flip`: bool, left to right.
    * `brightness`, `contrast`, `saturation`: factors, not negative; `hue`: turns in [-0.5, 0.5]; in the
      `order` of a permutation of (0, 1, 2, 3), which are these four. None leaves an adjustment out.
    * uint8 is divided by 255; `mean`, `std`: numbers, or one for each channel.

    `random_parameters` draws boxes, flips and adjustments; the same ones give the same result.
    Sources: torch.nn.functional.interpolate, torchvision.transforms.v2 (RandomResizedCrop, Resize and
    CenterCrop, ColorJitter, Normalize) after ToDtype(float32, scale=True): nothing is rounded on the way.
    Torchvision's results for uint8 images differ by what it rounds: up to a step of 1/255 when it resizes and
    a step and a half in each adjustment; of noise made larger, bicubic ones by some twenty steps. As there, a
    bicubic result of uint8 images is clamped to [0, 1].
    Contrast needs the mean of the image: then a second kernel finishes what the first one left in float32.
    No gradient. On a GPU one launch serves 64 images, and nothing waits for the device unless parameters lie
    on one. Call it outside of torch.compile.
    Raises TypeError or ValueError for what does not fit.

        image_preprocess(photos, 224, resize=256, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
        image_preprocess(photos, 224, **random_parameters(photos, brightness=0.4)._asdict())
    """
    planar, result_planar = _layout("layout", layout), _layout("out_layout", out_layout)
    tensors, single, restore = _tensors(images)
    sources = _sources(tensors, planar)
    interpolation = getattr(interpolation, "value", interpolation)  # of an enumeration, as torchvision's is
    if interpolation not in ("bilinear", "bicubic"):
        raise ValueError("image_preprocess: interpolation must be 'bilinear' or 'bicubic', got "
                         f"{interpolation!r}")
    if not isinstance(antialias, bool):
        raise TypeError(f"image_preprocess: antialias must be True or False, got {antialias!r}")
    dtype = as_torchs(dtype)
    if dtype not in DTYPES[1:]:
        raise ValueError(f"image_preprocess: dtype must be torch.float16, torch.bfloat16 or "
                         f"torch.float32, got {dtype!r}")
    geometry = Geometry(_size("size", size), boxes, _resize(resize), flip)
    given = dict(zip(ADJUSTMENTS, (brightness, contrast, saturation, hue), strict=True))
    adjusted = [name for name, value in given.items() if value is not None]
    if adjusted and sources.channels not in (1, 3):
        raise ValueError(f"image_preprocess: {adjusted[0]} needs images of 1 or 3 channels, got "
                         f"{sources.channels}")
    _check_boxes(boxes, resize)
    rows, resizes = table(sources, geometry, given, order)
    recipe = Recipe(name_of(sources.dtype), name_of(dtype), sources.channels, sources.planar, result_planar,
                    resizes, resizes and interpolation == "bicubic", antialias or not resizes,
                    bool(adjusted), contrast is not None)
    out = _result(sources, geometry.size, dtype, result_planar)
    run = image_cpu.run if rehearsal.device_type(out) == "cpu" else image_gpu.run
    if out.numel():
        run(recipe, rows, out, geometry.size, _affine(sources.channels, mean, std))
    return restore(out[0] if single else out)


def _layout(argument: str, value: str) -> bool:
    if not isinstance(value, str) or value not in LAYOUTS:
        raise ValueError(f"image_preprocess: {argument} must be one of {', '.join(LAYOUTS)}, got {value!r}")
    return LAYOUTS[value]


def _size(argument: str, value: Any) -> tuple[int, int]:
    pair = (value, value) if is_int(value) else tuple(value) if isinstance(value, Sequence) else ()
    if len(pair) != 2 or not all(is_int(n) and 0 < n <= LARGEST for n in pair):
        raise ValueError(f"image_preprocess: {argument} must be a number of pixels or (height, width), in "
                         f"[1, {LARGEST}], got {value!r}")
    return pair


def _resize(value: Any) -> int | tuple[int, int] | None:
    if value is None:
        return None
    if not is_int(value):
        return _size("resize", value)
    if not 0 < value <= LARGEST:
        raise ValueError(f"image_preprocess: resize must be in [1, {LARGEST}], got {value}")
    return int(value)


def _check_boxes(boxes: Any, resize: Any) -> None:
    if isinstance(boxes, str):
        if boxes != "center":
            raise ValueError(f"image_preprocess: boxes must be 'center' or numbers, got {boxes!r}")
        if resize is not None:
            raise ValueError("image_preprocess: boxes='center' takes the centre unresized: leave it out with "
                             "resize, of whose result the centre is taken anyway")


def _tensors(images: Any) -> tuple[list[torch.Tensor], bool, Any]:
    """The images (or batches) as torch tensors, whether it is one image alone, and what results become."""
    whole = isinstance(images, torch.Tensor) or is_foreign(images)
    if not whole and not isinstance(images, Sequence):
        raise TypeError(f"image_preprocess: images must be a tensor, an array, or a list of them, got "
                        f"{type(images).__name__}")
    found, restores = list[torch.Tensor](), list[Any]()
    for one in [images] if whole else images:
        if is_foreign(one):
            one, restore = to_torch(one, "image_preprocess", "images")
            restores.append(restore)
        elif not isinstance(one, torch.Tensor):
            raise TypeError(f"image_preprocess: images must be tensors or arrays, got {type(one).__name__}")
        no_transforms("image_preprocess", "images", one)
        check_dense("image_preprocess", "images", one)
        found.append(one)
    if not found:
        raise ValueError("image_preprocess: images must have at least one image, got an empty list")
    allowed = (3, 4) if whole else (3,)
    for tensor in found:
        if tensor.dim() not in allowed:
            kind = "of 3 dimensions, or of 4 for a batch" if whole else "of 3 dimensions in a list"
            raise ValueError(f"image_preprocess: images must be {kind}, got the shape {tuple(tensor.shape)}")
    foreign = len(restores) == len(found)  # beside tensors a result is one
    return found, whole and found[0].dim() == 3, restores[-1] if foreign else lambda result: result


def _sources(tensors: Sequence[torch.Tensor], planar: bool) -> Images:
    """Checked, and without gaps; channels that lie last in memory are read as they lie."""
    first = tensors[0]
    batches = [in_memory(t if t.dim() == 4 else t.unsqueeze(0)) for t in tensors]
    channels = batches[0].shape[1 if planar else 3]
    for batch in batches:
        if batch.dtype not in DTYPES:
            raise TypeError(f"image_preprocess: images must be uint8, float16, bfloat16 or float32, got "
                            f"{name_of(batch.dtype)}")
        if (batch.dtype, batch.device) != (first.dtype, first.device):
            kinds = " and ".join(f"{name_of(t.dtype)} on {t.device}" for t in (first, batch))
            raise ValueError(f"image_preprocess: images must be of one dtype on one device, got {kinds}")
        if batch.requires_grad and torch.is_grad_enabled():
            raise ValueError("image_preprocess: images get no gradient here: detach them")
        if not 1 <= batch.shape[1 if planar else 3] == channels <= 4:
            raise ValueError(f"image_preprocess: images must have the same 1 to 4 channels in dimension "
                             f"{(1 if planar else 3) - 4}, got the shape {tuple(batch.shape)}")
    seen = [batch.movedim(1, 3) if planar else batch for batch in batches]  # as (N, H, W, C)
    planar = not all(s.is_contiguous() for s in seen) and all(s.movedim(3, 1).is_contiguous() for s in seen)
    held = [s if planar or s.is_contiguous() else s.contiguous() for s in seen]
    for s in held:
        if len(s):
            check_sides("image_preprocess", s.shape[1:3])
    addresses, heights, widths = map(np.concatenate, zip(*map(_of_batch, held), strict=True))
    return Images(held, addresses, heights, widths, channels, planar)


def _of_batch(batch: torch.Tensor) -> tuple[Any, Any, Any]:
    """Of each image its address, its height and its width."""
    count, height, width, _ = batch.shape
    start, step = 0 if batch.is_meta else batch.data_ptr(), batch.stride(0) * batch.element_size()
    return start + np.arange(count, dtype=np.uint64) * np.uint64(step), np.full(count, height), np.full(
        count, width)


def _result(sources: Images, size: tuple[int, int], dtype: torch.dtype, planar: bool) -> torch.Tensor:
    shape = (sources.channels, *size) if planar else (*size, sources.channels)
    return torch.empty((len(sources.addresses), *shape), dtype=dtype, device=sources.device)


def _affine(channels: int, mean: Any, std: Any) -> tuple[list[float], list[float]]:
    """(x - mean) / std as x scale + shift."""
    asked = tuple(tuple(value) if isinstance(value, list) else value for value in (mean, std))
    return (_kept_affine if is_key(asked) else _new_affine)(channels, *asked)


def _new_affine(channels: int, mean: Any, std: Any) -> tuple[list[float], list[float]]:
    means, stds = _of_channels("mean", mean, 0.0, channels), _of_channels("std", std, 1.0, channels)
    if not all(math.isfinite(m) for m in means):
        raise ValueError(f"image_preprocess: mean must be finite, got {mean!r}")
    if not all(0 < s < math.inf for s in stds):
        raise ValueError(f"image_preprocess: std must be positive and finite, got {std!r}")
    scales, shifts = [1 / s for s in stds], [-m / s for m, s in zip(means, stds, strict=True)]
    if max(map(abs, (*scales, *shifts))) > LARGEST_FACTOR:
        raise ValueError(f"image_preprocess: 1 / std and mean / std must be at most {LARGEST_FACTOR:.4g}, "
                         f"got mean={mean!r} and std={std!r}")
    return scales, shifts


_kept_affine = functools.lru_cache(64)(_new_affine)


def _of_channels(argument: str, value: Any, default: float, channels: int) -> list[float]:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    values = array("image_preprocess", argument, default if value is None else value)
    if values.shape not in ((), (1,), (channels,)):
        raise ValueError(f"image_preprocess: {argument} must be a number or {channels} of them, one for each "
                         f"channel, got {value!r}")
    return [float(v) for v in np.broadcast_to(values, (channels,))]
