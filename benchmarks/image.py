"""Image preprocessing against torchvision's v2 functions and against torch's own interpolate.

Batches of uint8 images (N, H, W, C) in memory become normalised float32 (N, C, 224, 224), antialiased. Cases:
`resize`; `evaluate` (shorter side to 256, centre of 224); `crop` (a random box of each image resized, half of
them flipped); `train` (that and four colour adjustments in a random order). Rivals take the same images and
the same parameters. In `crop` and `train` these differ from image to image, which torchvision serves one
image at a time (`torchvision`); as a bound on what it could do, `torchvision_batch` gives all images the
first one's parameters in one call.

GPU: ours is device time from CUDA graphs, rivals' is device time of calls issued one after the other, since
some of them copy from the host; input sets rotate. `wall_us` is what a user waits for a call among many. The
fraction of the copy bandwidth counts the boxes' bytes read once and results written once. CPU: wall time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import script
from fusionrt.bench import ceilings, sampling, timing
from fusionrt.bench.results import kind, why
from fusionrt.data import RandomParameters, image_preprocess, random_parameters
from fusionrt.data.samples import ADJUSTMENTS

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = 224
GPU_BATCHES = ((64, 1024, 1024), (256, 375, 500), (64, 224, 224))
CPU_BATCHES = ((8, 1024, 1024), (16, 375, 500), (16, 224, 224))
CASES = ("resize", "evaluate", "crop", "train")
COLUMNS = ("case", "images", "height", "width", "us", "TB/s", "GB/s", "of_copy", "wall_us", "torchvision_us",
           "vs_torchvision", "torchvision_batch_us", "vs_torchvision_batch", "torch_us", "vs_torch",
           "wall_vs_torchvision", "spread", "error")
Call = Callable[[], object]


def main() -> None:
    options = script.parser(__doc__).parse_args()
    device = "cuda" if kind() == "gpu" else "cpu"
    run = script.results(f"image-{kind()}", __doc__, options)
    try:
        from torchvision.transforms.v2 import functional
    except (ImportError, RuntimeError) as error:  # or its build and torch's do not fit each other
        functional = None
        run.absent("torchvision", why(error))
    batches = GPU_BATCHES if device == "cuda" else CPU_BATCHES
    for batch in batches[:1] if options.quick else batches:
        for case in CASES:
            if case == "evaluate" and batch[1] < 256:
                continue
            measured = _on_gpu if device == "cuda" else _on_cpu
            run.add(case=case, images=batch[0], height=batch[1], width=batch[2],
                    **measured(run, case, batch, functional))
            timing.release() if device == "cuda" else None
    run.finish(COLUMNS)


def _parameters(case: str, images: torch.Tensor) -> RandomParameters | None:
    if case not in ("crop", "train"):
        return None
    jitter = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1} if case == "train" else {}
    return random_parameters(images, **jitter, generator=torch.Generator().manual_seed(0))  # type: ignore


def _ours(case: str, images: torch.Tensor, drawn: RandomParameters | None) -> Any:
    options = {"resize": 256} if case == "evaluate" else {} if drawn is None else drawn._asdict()
    return image_preprocess(images, SIZE, mean=MEAN, std=STD, **options)


def _torchvisions(case: str, images: torch.Tensor, drawn: RandomParameters | None, functional: Any,
                  together: bool = False) -> Any:
    images = images.permute(0, 3, 1, 2)

    def normalised(x: torch.Tensor) -> torch.Tensor:
        return functional.normalize(functional.to_dtype(x, torch.float32, scale=True), list(MEAN), list(STD))

    if drawn is None:
        resized = functional.resize(images, [256] if case == "evaluate" else [SIZE, SIZE], antialias=True)
        return normalised(functional.center_crop(resized, [SIZE, SIZE]))
    if together:
        return normalised(_augmented(images, drawn, 0, functional))
    return normalised(torch.stack([_augmented(x, drawn, k, functional) for k, x in enumerate(images)]))


def _augmented(image: torch.Tensor, drawn: RandomParameters, k: int, functional: Any) -> Any:
    assert drawn.boxes is not None and drawn.flip is not None
    image = functional.resized_crop(image, *drawn.boxes[k].tolist(), [SIZE, SIZE], antialias=True)
    image = functional.horizontal_flip(image) if drawn.flip[k] else image
    for which in () if drawn.order is None else drawn.order[k].tolist():
        name = ADJUSTMENTS[which]
        image = getattr(functional, f"adjust_{name}")(image, getattr(drawn, name)[k].item())
    return image


def _torchs(images: torch.Tensor) -> torch.Tensor:
    """`resize` without torchvision."""
    mean, std = (torch.tensor(v).view(3, 1, 1).to(images.device, non_blocking=True) for v in (MEAN, STD))
    floats = images.permute(0, 3, 1, 2).float().div_(255)
    resized = torch.nn.functional.interpolate(floats, (SIZE, SIZE), mode="bilinear", antialias=True)
    return resized.sub_(mean).div_(std)


def _rivals(case: str, images: torch.Tensor, drawn: RandomParameters | None, functional: Any
            ) -> dict[str, Call]:
    rivals: dict[str, Call] = {}
    if functional is not None:
        call = functools.partial(_torchvisions, case, images, drawn, functional)
        rivals["torchvision"] = call
        if drawn is not None:
            rivals["torchvision_batch"] = functools.partial(call, together=True)
    if case == "resize":
        rivals["torch"] = functools.partial(_torchs, images)
    return rivals


def _bytes(images: torch.Tensor, drawn: RandomParameters | None) -> int:
    """Of the boxes and of the results."""
    whole = drawn is None or drawn.boxes is None
    read = images.numel() if whole else 3 * int(drawn.boxes[:, 2:].prod(1).sum())
    return read + 4 * len(images) * 3 * SIZE * SIZE


def _on_gpu(run: Any, case: str, batch: tuple[int, int, int], functional: Any) -> dict[str, Any]:
    first = torch.randint(0, 256, (*batch, 3), dtype=torch.uint8, device="cuda")
    drawn = _parameters(case, first)
    nbytes = _bytes(first, drawn)
    sets = [first, *(first.flip(0) for _ in range(timing.n_sets(nbytes) - 1))]
    with timing.stream():
        ours = [functools.partial(_ours, case, sets[k % len(sets)], drawn) for k in range(4 * len(sets))]
        time = timing.replayed({"": ours})[""]
        rate = run.ceiling("copy", ceilings.copy(nbytes))
        row: dict[str, Any] = {"us": time.us, "spread": time.spread, "TB/s": nbytes / time.us / 1e6,
                               "of_copy": nbytes / time.us / 1e6 / rate}
        rivals = _rivals(case, first, drawn, functional)
        for name, call in rivals.items():
            taken = sampling.issued({"": [call] * 2}, rounds=5)[""]
            row |= {f"{name}_us": taken.us, f"vs_{name}": taken.us / time.us}
        walls = timing.bursts({"ours": ours[0], **rivals}, calls=5, rounds=5)
    row["wall_us"] = walls["ours"].wall.us
    if "torchvision" in walls:
        row["wall_vs_torchvision"] = walls["torchvision"].wall.us / walls["ours"].wall.us
    return row


def _on_cpu(run: Any, case: str, batch: tuple[int, int, int], functional: Any) -> dict[str, Any]:
    images = torch.randint(0, 256, (*batch, 3), dtype=torch.uint8)
    drawn = _parameters(case, images)
    rivals = _rivals(case, images, drawn, functional)
    times = timing.cpu({"ours": functools.partial(_ours, case, images, drawn), **rivals}, rounds=9)
    ours, nbytes = times["ours"], _bytes(images, drawn)
    row: dict[str, Any] = {"us": ours.us, "spread": ours.spread, "GB/s": nbytes / ours.us / 1e3}
    for name in rivals:
        row |= {f"{name}_us": times[name].us, f"vs_{name}": times[name].us / ours.us}
    return row


if __name__ == "__main__":
    main()
