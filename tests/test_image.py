"""Image preprocessing against its formulas in float64, torchvision's where that is there, and errors."""

import enum
import functools
import importlib.util
import math

import model_zoo
import numpy as np
import pytest
import torch
from checking import assert_same_bits, needs_nvrtc
from torch.nn import functional as F

from fusionrt.data import image_preprocess, random_parameters
from fusionrt.data.image import Recipe
from fusionrt.data.image_gpu import _kernel as gpu_kernel
from fusionrt.data.samples import ADJUSTMENTS
from fusionrt.rehearsal import collecting
from fusionrt.runtime import compiler

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TOLERANCE = 1e-6  # of values in [0, 1]; float32 is 6e-8 there, and a sum of up to 1,400 takes some more
JITTER = {"brightness": torch.tensor([1.3, 0.7, 1.0]), "contrast": torch.tensor([0.6, 1.4, 1.1]),
          "saturation": torch.tensor([0.3, 1.8, 1.0]), "hue": torch.tensor([0.1, -0.4, 0.5]),
          "order": torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])}
BOXES = torch.tensor([[0, 0, 60, 80], [7, 11, 33, 21], [59, 79, 1, 1]])
FLIPS = torch.tensor([True, False, True])


def pixels(*shape, device="cpu"):
    return torch.randint(0, 256, shape, dtype=torch.uint8).to(device)


# --- the formulas


def grey(image):
    if image.shape[0] == 1:
        return image
    return (0.2989 * image[0] + 0.587 * image[1] + 0.114 * image[2]).unsqueeze(0)


def turned(image, turn):
    """The six sectors of the colour circle, one after the other."""
    if image.shape[0] == 1:
        return image
    r, g, b = image
    value, least = image.amax(0), image.amin(0)
    span = torch.where(value == least, 1, value - least)
    sector = torch.where(value == r, (g - b) / span,
                         torch.where(value == g, 2 + (b - r) / span, 4 + (r - g) / span))
    hue = 6 * ((sector / 6 + 1 + turn) % 1)
    saturation = torch.where(value == least, 0, span / torch.where(value == 0, 1, value))
    number, f = hue.floor() % 6, hue - hue.floor()
    p, q, t = (value * (1 - saturation * x) for x in (1, f, 1 - f))
    colours = [(value, t, p), (q, value, p), (p, value, t), (p, q, value), (t, p, value), (value, p, q)]
    return torch.stack([sum(torch.where(number == k, colour[c], 0) for k, colour in enumerate(colours))
                        for c in range(3)])


def adjusted(image, name, factor):
    if name == "brightness":
        return (image * factor).clamp(0, 1)
    if name == "hue":
        return turned(image, factor)
    other = grey(image).mean() if name == "contrast" else grey(image)
    return (factor * image + (1 - factor) * other).clamp(0, 1)


def expected(image, size, *, box=None, resized=None, interpolation="bilinear", antialias=True, flip=False,
             order=(0, 1, 2, 3), **factors):
    """Of one image (C, H, W), in float64, not normalised."""
    is_bytes = image.dtype == torch.uint8
    image = image.cpu().double() / (255 if is_bytes else 1)
    if box is not None:
        top, left, height, width = box
        image = image[:, top:top + height, left:left + width]
    resized = resized or size
    image = F.interpolate(image[None], resized, mode=interpolation, antialias=antialias)[0]
    if is_bytes and interpolation == "bicubic":
        image = image.clamp(0, 1)
    top, left = (round((r - s) / 2) for r, s in zip(resized, size, strict=True))
    image = image[:, top:top + size[0], left:left + size[1]]
    image = image.flip(-1) if flip else image
    for k in order:
        if ADJUSTMENTS[k] in factors:
            image = adjusted(image, ADJUSTMENTS[k], factors[ADJUSTMENTS[k]])
    return image


def of_each(options, k):
    """The k-th image's share of what is given for each."""
    names = {"boxes": "box"}
    return {names.get(name, name): value[k].tolist() if torch.is_tensor(value) else value
            for name, value in options.items() if value is not None}


def check(images, size, options, *, layout="NHWC", tolerance=TOLERANCE, **fixed):
    """`options` go to both, `fixed` to ours alone."""
    ours = image_preprocess(images, size, layout=layout, **options, **fixed)
    for k, image in enumerate(images):
        image = image if layout == "NCHW" else image.permute(2, 0, 1)
        error = (ours[k].cpu().double() - expected(image, size, **of_each(options, k))).abs().max()
        assert error <= tolerance, f"image {k}: off by {error:.3g}"
    return ours


# --- resampling

SIZES = [((37, 53), (13, 17)), ((20, 31), (40, 70)), ((64, 48), (64, 48)), ((150, 301), (9, 7)),
         ((5, 3), (33, 65)), ((1, 1), (4, 4)), ((12, 700), (5, 2)), ((256, 256), (56, 56))]


@pytest.mark.covering(1)
@pytest.mark.parametrize("antialias", [True, False], ids=["antialias", "plain"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resampling(interpolation, antialias, device):
    for source, size in SIZES:
        options = {"interpolation": interpolation, "antialias": antialias}
        check(pixels(2, *source, 3, device=device), size, options, tolerance=2 * TOLERANCE)


def test_an_interpolation_of_an_enumeration(device):
    """As torchvision's InterpolationMode is one."""
    mode = enum.Enum("InterpolationMode", {"BICUBIC": "bicubic", "NEAREST": "nearest"})
    images = pixels(2, 31, 45, 3, device=device)
    assert torch.equal(image_preprocess(images, 9, interpolation=mode.BICUBIC),
                       image_preprocess(images, 9, interpolation="bicubic"))
    with pytest.raises(ValueError, match="'bilinear' or 'bicubic', got 'nearest'"):
        image_preprocess(images, 9, interpolation=mode.NEAREST)


def test_an_image_of_the_right_size_is_only_converted(device):
    images = pixels(2, 31, 45, 3, device=device)
    assert torch.equal((image_preprocess(images, (31, 45)) * 255).round(), images.permute(0, 3, 1, 2).float())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32], ids=str)
def test_boxes_that_are_not_resized(dtype, device):
    """One kernel of its own: cut out, flipped, adjusted, normalised."""
    images = pixels(3, 37, 51, 3, device=device)
    images = images if dtype == torch.uint8 else (images / 255).to(dtype)
    boxes = torch.tensor([[0, 0, 20, 35], [17, 16, 20, 35], [3, 11, 20, 35]])
    bits = {"mean": MEAN, "std": STD, "interpolation": "bicubic", "antialias": False}
    for options in ({"flip": FLIPS}, JITTER):
        ours = check(images, (20, 35), {"boxes": boxes, **options}, tolerance=4 * TOLERANCE)
        planar = images.permute(0, 3, 1, 2).contiguous()
        assert_same_bits(image_preprocess(planar, (20, 35), layout="NCHW", boxes=boxes, **options), ours)
        # Beside a box that is resized, others go through the filters, whose weights are 1.
        mixed = torch.cat([boxes[:2], torch.tensor([[0, 0, 37, 51]])])
        one, other = (image_preprocess(images, (20, 35), boxes=b, **options, **bits) for b in (boxes, mixed))
        assert_same_bits(one[:2], other[:2])


def test_the_centre_of_what_was_resized(device):
    images = pixels(2, 61, 80, 3, device=device)
    for resize, resized in ((30, (30, 39)), ((35, 31), (35, 31))):
        ours = image_preprocess(images, (21, 24), resize=resize)
        theirs = [expected(i.permute(2, 0, 1), (21, 24), resized=resized) for i in images]
        assert (ours.cpu().double() - torch.stack(theirs)).abs().max() < TOLERANCE
    centre = image_preprocess(images, (21, 25), boxes="center")
    assert_same_bits(centre, image_preprocess(images[:, 20:41, 28:53], (21, 25)))  # 27.5 rounds to even


def test_boxes_and_flips_for_each_image(device):
    check(pixels(3, 60, 80, 3, device=device), (33, 40), {"boxes": BOXES, "flip": FLIPS})
    images = pixels(3, 60, 80, 3, device=device)
    one = image_preprocess(images, 20, boxes=(1, 2, 30, 40), flip=True)
    each = image_preprocess(images, 20, boxes=torch.tensor([[1, 2, 30, 40]] * 3), flip=[True] * 3)
    assert_same_bits(one, each)


# --- colour


def test_colour_adjustments_in_any_order(device):
    # Hue has a factor of 6 and a quotient more.
    check(pixels(3, 60, 80, 3, device=device), (33, 40), {"boxes": BOXES, "flip": FLIPS, **JITTER},
          tolerance=4 * TOLERANCE)


@pytest.mark.parametrize("name", ADJUSTMENTS)
def test_one_adjustment(name, device):
    images = pixels(3, 20, 21, 3, device=device)
    images[0, :5] = images[0, :5, :, :1]  # grey
    images[1, :3], images[1, 3:6] = 0, 255
    check(images, (20, 21), {name: JITTER[name]}, tolerance=4 * TOLERANCE)


def test_grey_images_have_brightness_and_contrast_only(device):
    options = {name: JITTER[name] for name in ADJUSTMENTS}
    check(pixels(3, 20, 35, 1, device=device), (15, 33), options)


# --- layouts, dtypes, kinds of input


def test_layouts(device):
    images = pixels(3, 37, 53, 3, device=device)
    truth = image_preprocess(images, (13, 17))
    assert_same_bits(image_preprocess(images, (13, 17), out_layout="NHWC").permute(0, 3, 1, 2), truth)
    channels_last = images.permute(0, 3, 1, 2)
    assert_same_bits(image_preprocess(channels_last, (13, 17), layout="NCHW"), truth)
    check(channels_last.contiguous(), (13, 17), {"flip": FLIPS}, layout="NCHW")


def test_addresses_that_are_no_multiple_of_a_word(device):
    memory = pixels(2 * 37 * 51 * 3 + 3, device=device)
    for start in range(4):
        check(memory[start:][:2 * 37 * 51 * 3].view(2, 37, 51, 3), (13, 17), {})
    check(pixels(3, 37, 51, 4, device=device), (13, 17), {})
    check(pixels(3, 37, 51, 4, device=device)[..., :3], (13, 17), {})  # not without gaps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_floating_images(dtype, device):
    images = torch.rand(2, 40, 301, 3).to(device, dtype)
    check(images, (12, 13), {})
    assert image_preprocess(images * 10, 20).max() > 5  # not clamped


def test_dtypes_of_numpys_and_by_name(device):
    images = torch.randint(0, 256, (2, 9, 11, 3), dtype=torch.uint8, device=device)
    expected = image_preprocess(images, 4, dtype=torch.float16)
    for dtype in (np.float16, np.dtype("float16"), "float16"):
        assert_same_bits(image_preprocess(images, 4, dtype=dtype), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_in_16_bits_are_rounded_once(dtype, device):
    images = pixels(2, 37, 51, 3, device=device)
    layout = "NHWC" if dtype == torch.float16 else "NCHW"
    wide = image_preprocess(images, 16, mean=MEAN, std=STD, out_layout=layout)
    ours = image_preprocess(images, 16, mean=MEAN, std=STD, out_layout=layout, dtype=dtype)
    assert_same_bits(ours, wide.to(dtype))


def test_normalisation(device):
    images = pixels(2, 20, 30, 3, device=device)
    plain = image_preprocess(images, 16).double()
    mean, std = (torch.tensor(v, dtype=torch.float64, device=device).view(3, 1, 1) for v in (MEAN, STD))
    ours = image_preprocess(images, 16, mean=MEAN, std=STD)
    assert (ours.double() - (plain - mean) / std).abs().max() < 1e-6
    assert torch.equal(image_preprocess(images, 16, mean=torch.tensor(MEAN), std=list(STD)), ours)
    assert (image_preprocess(images, 16, mean=0.5, std=0.5).double() - (2 * plain - 1)).abs().max() < 1e-6


def test_a_list_of_images_of_any_sizes(device):
    images = [pixels(h, w, 3, device=device) for h, w in ((30, 41), (77, 20), (9, 9))]
    options = {"flip": FLIPS, **JITTER}
    together = check(images, (16, 19), options, tolerance=4 * TOLERANCE)
    for k, image in enumerate(images):
        one = {name: value[k] for name, value in options.items()}
        assert_same_bits(image_preprocess(image, (16, 19), **one), together[k])


def test_more_images_than_a_launch_takes(device):
    images = pixels(130, 9, 10, 3, device=device)
    factors = {"contrast": torch.rand(130) + 0.5, "brightness": torch.rand(130)}
    check(images, (4, 5), factors, tolerance=2 * TOLERANCE)


def test_calls_again_see_what_changed(device):
    """Of batches of one size what each image goes through is remembered, but not what tensors held."""
    first, second = pixels(2, 9, 12, 3, device=device), pixels(2, 9, 12, 3, device=device)
    flip = torch.tensor([True, False])
    for images in (first, second):
        assert_same_bits(image_preprocess(images, (4, 5)), image_preprocess(list(images), (4, 5)))
        assert_same_bits(image_preprocess(images, 4, resize=6, flip=True),
                         image_preprocess(list(images), 4, resize=6, flip=[True, True]))
        found = image_preprocess(images, (9, 12), flip=flip)
        flip.logical_not_()
        assert_same_bits(image_preprocess(images, (9, 12), flip=flip), found.flip(-1))


def test_no_images(device):
    assert image_preprocess(pixels(0, 9, 10, 3, device=device), 4).shape == (0, 3, 4, 4)


def test_numpy_arrays():
    image = pixels(30, 41, 3)
    ours = image_preprocess([image.numpy(), image.numpy()], 16)
    for mixed in ([image, image.numpy()], [image.numpy(), image]):
        assert isinstance(image_preprocess(mixed, 16), torch.Tensor)
    assert isinstance(ours, np.ndarray)
    assert_same_bits(torch.from_numpy(ours), image_preprocess([image, image], 16))


def test_results_do_not_depend_on_threads():
    images, threads = pixels(5, 60, 80, 3), torch.get_num_threads()
    one = {name: value[0] for name, value in JITTER.items()}
    try:
        found = [torch.set_num_threads(n) or image_preprocess(images, 48, **one) for n in (1, 2, 3)]
    finally:
        torch.set_num_threads(threads)
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])


@pytest.mark.gpu
def test_on_another_stream_and_in_a_graph():
    images = pixels(3, 60, 80, 3, device="cuda")
    truth = image_preprocess(images, 32, **JITTER)
    with torch.cuda.stream(torch.cuda.Stream()):
        ours = image_preprocess(images, 32, **JITTER)
    torch.cuda.synchronize()
    assert_same_bits(ours, truth)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = image_preprocess(images, 32, **JITTER)
    images.copy_(images.flip(0))
    graph.replay()
    assert_same_bits(replayed, image_preprocess(images, 32, **JITTER))


# --- random parameters

DRAWN = {"brightness": 0.4, "contrast": (0.5, 0.9), "saturation": 2.0, "hue": 0.1}


def seeded(seed=7):
    return torch.Generator().manual_seed(seed)


def test_parameters_repeat_with_the_seed():
    images = [pixels(h, 40, 3) for h in (20, 30, 50)]
    once, again, other = (random_parameters(images, **DRAWN, generator=seeded(s)) for s in (7, 7, 8))
    for a, b in zip(once, again, strict=True):
        assert_same_bits(a, b)
    assert not torch.equal(once.boxes, other.boxes)
    torch.manual_seed(3)
    first = random_parameters(images)
    assert not torch.equal(first.boxes, random_parameters(images).boxes)
    torch.manual_seed(3)
    assert torch.equal(first.boxes, random_parameters(images).boxes)


def test_parameters_feed_the_op_and_its_formula(device):
    images = pixels(4, 45, 60, 3, device=device)
    drawn = random_parameters(images, **DRAWN, generator=seeded())
    check(images, (24, 20), drawn._asdict(), tolerance=4 * TOLERANCE)


def test_boxes_are_distributed_as_torchvisions():
    """Area and ratio as they are asked for, the place anywhere in the image."""
    n, height, width = 20000, 300, 400
    boxes = random_parameters(torch.empty(n, height, width, 3, device="meta"), scale=(0.1, 0.3),
                              ratio=(0.5, 2.0), generator=seeded()).boxes.double()
    top, left, h, w = boxes.unbind(1)
    assert ((top >= 0) & (left >= 0) & (top + h <= height) & (left + w <= width)).all()
    area, ratio = h * w / (height * width), (w / h).log2()
    for values, low, high, step in ((area, 0.1, 0.3, 3e-3), (ratio, -1, 1, 2e-2)):
        # Uniform: mean and standard deviation within five of their own, the ends within a pixel's step.
        assert values.min() > low - step and values.max() < high + step
        assert abs(values.mean() - (low + high) / 2) < 5 * (high - low) / math.sqrt(12 * n) + step / 10
        assert abs(values.std() * math.sqrt(12) / (high - low) - 1) < 5 / math.sqrt(2 * n)
    for start, free in ((top, height - h), (left, width - w)):
        place = (start + 0.5) / (free + 1)
        assert abs(place.mean() - 0.5) < 5 / math.sqrt(12 * n)


def test_boxes_that_do_not_fit_fall_back_to_the_centre():
    wide, tall, square = (random_parameters(torch.empty(h, w, 3), scale=(2.0, 3.0)).boxes.tolist()[0]
                          for h, w in ((30, 100), (100, 30), (50, 50)))
    assert (wide, tall, square) == ([0, 30, 30, 40], [30, 0, 40, 30], [0, 0, 50, 50])


def test_boxes_have_a_pixel_at_the_least():
    row, column = (random_parameters(torch.empty(h, w, 3), ratio=ratio).boxes.tolist()[0]
                   for h, w, ratio in ((1, 9, (0.2, 0.4)), (9, 1, (2.5, 5.0))))
    assert (row, column) == ([0, 4, 1, 1], [4, 0, 1, 1])


def test_factors_flips_and_orders():
    n = 6000
    drawn = random_parameters(torch.empty(n, 4, 4, 3), **DRAWN, flip=0.25, generator=seeded())
    ranges = {"brightness": (0.6, 1.4), "contrast": (0.5, 0.9), "saturation": (0, 3), "hue": (-0.1, 0.1)}
    for name, (low, high) in ranges.items():
        values = (getattr(drawn, name) - low) / (high - low)
        assert 0 <= values.min() < 0.01 and 0.99 < values.max() <= 1
    assert abs(drawn.flip.double().mean() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / n)
    counts = (drawn.order * torch.tensor([64, 16, 4, 1])).sum(1).unique(return_counts=True)[1]
    assert len(counts) == 24 and (counts - n / 24).abs().max() < 5 * math.sqrt(n / 24)
    assert random_parameters(torch.empty(2, 4, 4, 3), scale=None)[2:] == (None,) * 5


# --- torchvision itself

has_torchvision = pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="no torchvision")


def torchvisions(image, size, drawn, k, functional):
    """The pipeline on one image (C, H, W), floating or uint8."""
    image = functional.resized_crop(image, *drawn.boxes[k].tolist(), list(size), antialias=True)
    image = functional.horizontal_flip(image) if drawn.flip[k] else image
    for which in drawn.order[k].tolist():
        name = ADJUSTMENTS[which]
        image = getattr(functional, f"adjust_{name}")(image, getattr(drawn, name)[k].item())
    return functional.normalize(functional.to_dtype(image, torch.float32, scale=True), list(MEAN), list(STD))


@has_torchvision
@pytest.mark.parametrize("is_bytes", [False, True], ids=["float", "uint8"])
def test_against_torchvision(is_bytes, device):
    model_zoo.torchvision()
    from torchvision.transforms.v2 import functional
    images = pixels(4, 145, 160, 3, device=device)
    drawn = random_parameters(images, **{**DRAWN, "contrast": 0.4, "saturation": 0.4}, generator=seeded())
    ours = image_preprocess(images, (64, 72), mean=MEAN, std=STD, **drawn._asdict())
    for k, image in enumerate(images.permute(0, 3, 1, 2)):
        source = image if is_bytes else functional.to_dtype(image, torch.float32, scale=True)
        theirs = torchvisions(source, (64, 72), drawn, k, functional)
        steps = (ours[k] - theirs).abs() * torch.tensor(STD, device=device).view(3, 1, 1) * 255
        if is_bytes:  # it rounds five times; a hue's sector may change for colours that are nearly grey
            assert steps.mean() < 2 and steps.quantile(0.999) < 16
        else:
            assert steps.quantile(0.999) < 1e-2 and steps.max() < 0.5


# --- kernels


def recipes():
    every = {"source": "uint8", "result": "float32", "channels": 3, "planar": False, "result_planar": True,
             "resizes": True, "cubic": False, "antialias": True, "adjusts": False, "contrast": False}
    both = {"adjusts": True, "contrast": True}
    for more in ({}, both, {"resizes": False}, {"resizes": False, "planar": True, **both},
                 {"planar": True, "cubic": True, **both},
                 {"source": "float16", "channels": 4, "antialias": False, "result": "bfloat16"},
                 {"source": "float32", "cubic": True, "result_planar": False, "adjusts": True}):
        yield Recipe(**{**every, **more})


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_kernels_do_not_spill(arch):
    for recipe in recipes():
        for stage in (1, 2) if recipe.contrast else (0,):
            kernel = gpu_kernel(recipe, stage)
            found = compiler.build(kernel.text, kernel.stem, arch, kernel.name).metadata
            assert (found["spills"], found["stack"]) == (0, 0), (recipe, stage)
            assert kernel.params.packer.size <= 4096  # of launch parameters


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_meta_tensors_list_the_kernels(kind):
    images = torch.empty(100, 64, 64, 3, dtype=torch.uint8, device="meta")
    with collecting(kind) as needed:
        out = image_preprocess(images, 32, contrast=1.5)
    assert out.shape == (100, 3, 32, 32) and len({source.text for source in needed}) == 2


# --- what is refused

PHOTO = torch.zeros(8, 9, 3)
good = functools.partial(image_preprocess, torch.zeros(2, 8, 9, 3, dtype=torch.uint8))


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: image_preprocess("photo.jpg", 4), TypeError, r"images must be tensors or arrays, got str"),
    (lambda: image_preprocess(None, 4), TypeError, r"images must be a tensor, an array, or a list"),
    (lambda: image_preprocess([], 4), ValueError, r"at least one image"),
    (lambda: image_preprocess(torch.zeros(8, 9), 4), ValueError, r"of 3 dimensions.*got the shape \(8, 9\)"),
    (lambda: image_preprocess([torch.zeros(1, 8, 9, 3)], 4), ValueError, r"of 3 dimensions in a list"),
    (lambda: image_preprocess(torch.zeros(8, 9, 3, dtype=torch.int32), 4), TypeError, r"uint8.*got int32"),
    (lambda: image_preprocess(torch.zeros(3, 8, 9), 4), ValueError, r"in dimension -1.*\(1, 3, 8, 9\)"),
    (lambda: image_preprocess(torch.zeros(0, 9, 3), 4), ValueError, r"1 to 65535 pixels, got \(0, 9\)"),
    (lambda: image_preprocess([torch.zeros(4, 4, 3), torch.zeros(4, 4, 3).byte()], 4), ValueError,
     r"one dtype on one device, got float32 on cpu and uint8 on cpu"),
    (lambda: image_preprocess(torch.zeros(8, 9, 3, requires_grad=True), 4), ValueError, r"no gradient here"),
    (lambda: good(0), ValueError, r"size must be .*got 0"),
    (lambda: good((4, 5, 6)), ValueError, r"size must be"),
    (lambda: good(4, layout="HW"), ValueError, r"layout must be one of NHWC.*got 'HW'"),
    (lambda: good(4, interpolation="nearest"), ValueError, r"'bilinear' or 'bicubic', got 'nearest'"),
    (lambda: good(4, dtype=np.float64), ValueError, r"dtype must be torch.float16.*got torch.float64"),
    (lambda: good(4, dtype=torch.float64), ValueError, r"dtype must be torch.float16.*got torch.float64"),
    (lambda: good(4, boxes=(0, 0, 9, 9)), ValueError, r"image 0 is 8 x 9, and.*\(0, 0, 9, 9\) does not"),
    (lambda: good(4, boxes=(0, 0, 0, 3)), ValueError, r"does not lie in it"),
    (lambda: good(4, boxes=(2**63 - 1, 0, 2, 4)), ValueError, r"does not lie in it"),
    (lambda: good(4, boxes=(1, 2, 3)), ValueError, r"boxes must be 4 numbers or of the shape \(2, 4\)"),
    (lambda: good(4, boxes="middle"), ValueError, r"'center' or numbers, got 'middle'"),
    (lambda: good(12, boxes="center"), ValueError, r"size: image 0 is 8 x 9"),
    (lambda: good(4, boxes="center", resize=6), ValueError, r"unresized: leave it out with resize"),
    (lambda: good(7, resize=6), ValueError, r"at least the size \(7, 7\).*got \(6, 6\) for image 0"),
    (lambda: good(4, flip=[True] * 3), ValueError, r"flip must be a bool or of the shape \(2,\)"),
    (lambda: good(4, flip=0.5), ValueError, "flip must be True or False, got 0.5"),
    (lambda: good(4, boxes=(0.7, 0.9, 3, 3)), ValueError, "boxes must be whole numbers, got"),
    (lambda: good(True), ValueError, r"size must be a number of pixels or \(height, width\), .* got True"),
    (lambda: good(4, brightness=-1.0), ValueError, r"brightness must be finite and not negative, got -1"),
    (lambda: good(4, hue=0.6), ValueError, r"hue must be in \[-0.5, 0.5\], got 0.6"),
    (lambda: good(4, contrast=[1.0, math.nan]), ValueError, r"contrast must be finite"),
    (lambda: good(4, hue=0.1, order=(0, 0, 1, 2)), ValueError, r"permutations of 0, 1, 2, 3"),
    (lambda: good(4, std=(1.0, 0.0, 1.0)), ValueError, r"std must be positive"),
    (lambda: good(4, std=math.inf), ValueError, r"std must be positive and finite, got inf"),
    (lambda: good(4, std=1e-300), ValueError, r"1 / std and mean / std must be at most 3.403e\+38, got"),
    (lambda: good(4, mean=1e300), ValueError, r"1 / std and mean / std must be at most .* got mean=1e\+300"),
    (lambda: good(4, antialias="False"), TypeError, "antialias must be True or False, got 'False'"),
    (lambda: random_parameters(torch.zeros(1, 0, 4, 3)), ValueError,
     r"random_parameters: images must have sides of 1 to 65535 pixels, got \(0, 4\)"),
    (lambda: good(4, mean=(1.0, 0.0)), ValueError, r"mean must be a number or 3 of them"),
    (lambda: image_preprocess(torch.zeros(8, 9, 4), 4, hue=0.1), ValueError, r"hue needs images of 1 or 3"),
    (lambda: random_parameters(torch.zeros(8, 9)), ValueError, r"3 or 4 dimensions, got the shape \(8, 9\)"),
    (lambda: random_parameters(PHOTO, scale=(0.9, 0.1)), ValueError, r"scale must be \(low, high\)"),
    (lambda: random_parameters(PHOTO, hue=0.7), ValueError, r"hue must be \(low, high\) in \[-0.5, 0.5\]"),
    (lambda: random_parameters(PHOTO, brightness=-0.1), ValueError,
     r"random_parameters: brightness must be finite and not negative, got -0.1"),
    (lambda: random_parameters(PHOTO, hue=math.inf), ValueError, "hue must be finite and not negative"),
    (lambda: random_parameters(PHOTO, contrast=torch.tensor([0.5, 1.0])), ValueError,
     r"contrast must be \(low, high\) in \[0, inf\), got tensor"),
    (lambda: random_parameters(PHOTO, contrast=(0.5, math.inf)), ValueError,
     r"in \[0, inf\), got \(0.5, inf\)"),
    (lambda: good(4, contrast=1e39), ValueError, r"contrast must be at most 3.40282e\+38, got 1e\+39"),
    (lambda: good(4, mean=math.nan), ValueError, "mean must be finite, got nan"),
    (lambda: good(4, brightness="a"), TypeError, "image_preprocess: brightness must be of numbers, got 'a'"),
    (lambda: good(4, flip=[[1], [2, 3]]), TypeError, r"flip must be of numbers, got \[\[1\]"),
    (lambda: good(4, mean=("a", 1)), TypeError, r"mean must be of numbers, got \('a', 1\)"),
    (lambda: good(4, out_layout=[]), ValueError, r"image_preprocess: out_layout must be one of .*, got \[\]"),
    (lambda: random_parameters(None), TypeError, r"images must be tensors or arrays, got NoneType"),
    (lambda: random_parameters(PHOTO, scale=(None, 1)), ValueError, r"scale must be \(low, high\)"),
    (lambda: random_parameters(PHOTO, flip="a"), TypeError, "flip must be a number, got 'a'"),
    (lambda: random_parameters(PHOTO, generator=1), TypeError, r"generator must be a torch.Generator or"),
    (lambda: torch.vmap(lambda x: image_preprocess(x, 4))(torch.zeros(2, 8, 9, 3)), NotImplementedError,
     r"image_preprocess: torch.func's transforms \(vmap, grad\) of images are not implemented; give"),
    (lambda: random_parameters(PHOTO, flip=2), ValueError, r"flip must be a probability, got 2"),
])
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()
