"""Image preprocessing on a GPU: kernels_src/image.cu, once, or in two stages where contrast needs a mean."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from fusionrt.data.samples import DECLARATION, ROW
from fusionrt.laid import address
from fusionrt.runtime.kernel import Kernel
from fusionrt.runtime.source import Field, definitions, members, pointer

if TYPE_CHECKING:
    from fusionrt.data.image import Recipe

LAUNCH = 64          # images: their rows of the table are launch parameters, of which there are 4 KB
TILE, WARPS = 32, 8  # pixels of a row, which are one warp's; rows of a block
PER_THREAD = 4       # pixels, in the second stage
WHOLE, FIRST, SECOND = range(3)


@functools.cache
def _kernel(recipe: Recipe, stage: int) -> Kernel:
    constants = definitions(
        pixel_t=f"{recipe.source}_t", output_t=f"{recipe.result}_t", CHANNELS=recipe.channels, STAGE=stage,
        PER_THREAD=PER_THREAD, PLANAR=recipe.planar, OUT_PLANAR=recipe.result_planar, RESIZES=recipe.resizes,
        CUBIC=recipe.cubic, ANTIALIAS=recipe.antialias, ADJUSTS=recipe.adjusts)
    return Kernel(
        f"image_preprocess_{('whole', 'first', 'second')[stage]}", "image",
        [Field(f"Sample samples[{LAUNCH}]", f"{ROW.itemsize * LAUNCH}s"),
         pointer(f"{recipe.result}_t", "out", const=False), pointer("float", "between", const=False),
         pointer("float", "sums", const=False),
         Field("float scale[4]", "ffff"), Field("float shift[4]", "ffff"),
         *members("int", "height", "width", "tiles")],
        [*constants, DECLARATION], block=32 * WARPS)


def run(recipe: Recipe, rows: Any, out: torch.Tensor, size: tuple[int, int],
        affine: tuple[list[float], list[float]]) -> None:
    """`rows`: the images' table. Fills `out`."""
    height, width = size
    area, tiles = height * width, -(-width // TILE)
    count = min(LAUNCH, len(rows)) if recipe.contrast else 0  # one launch's: the next one follows it
    between = torch.empty(count * area * recipe.channels, dtype=torch.float32, device=out.device)
    sums = torch.empty(count * height * tiles, dtype=torch.float32, device=out.device)
    by_rows, by_pixels = tiles * -(-height // WARPS), -(-area // (32 * WARPS * PER_THREAD))
    stages = ((FIRST, by_rows), (SECOND, by_pixels)) if recipe.contrast else ((WHOLE, by_rows),)
    kernels = [(_kernel(recipe, stage), blocks) for stage, blocks in stages]
    scale, shift = affine
    values = kernels[0][0].planned(scale=scale, shift=shift, height=height, width=width, tiles=tiles)
    for at in range(0, len(rows), LAUNCH):
        part = rows[at:at + LAUNCH]
        for kernel, blocks in kernels:
            kernel(out.device, (blocks, len(part)), part.tobytes(), address(out[at]), address(between),
                   address(sums), *values)
