"""Cross-entropy of rows of logits."""

import math

import numpy as np
import pytest
import torch
from checking import BF16, DTYPES, F16, F32, F64, assert_same_bits, check, evaluate, lost, needs_nvrtc, wide
from torch.nn import functional as F

import fusionrt as frt
from fusionrt import reference
from fusionrt.graph import toposort
from fusionrt.ops import cross_entropy_rows
from fusionrt.ops.cross_entropy import FEWEST_ROWS
from fusionrt.primitives import REDUCTION
from fusionrt.rehearsal import collecting
from fusionrt.runtime import compiler, launch

REDUCTIONS = ("none", "mean", "sum")
reductions = pytest.mark.parametrize("reduction", REDUCTIONS)
KINDS = ("classes", "probabilities")
kinds = pytest.mark.parametrize("kind", KINDS)


def targets(kind, x):
    n_classes = x.shape[x.dim() > 1]
    if kind == "probabilities":
        return torch.randn(x.shape, dtype=F64, device=x.device).softmax(min(1, x.dim() - 1)).to(x.dtype)
    shape = x.shape[:1] + x.shape[2:] if x.dim() > 1 else ()
    target = torch.randint(n_classes, shape, device=x.device)
    if target.numel() > 2:
        target.view(-1)[2] = -100
    return target


def logits(shape, dtype, device):
    return (torch.randn(shape, dtype=F64, device=device) * 2).to(dtype)


def compare(x, target, **options):
    """A loss may lose what float32 loses in its terms, and a sum of losses what a sum does."""
    exact = reference.cross_entropy(wide(x), wide(target), **{k: wide(v) for k, v in options.items()})
    size = exact.abs() if options.get("reduction") != "sum" else exact.abs() + x.double().abs().amax()
    return check(frt.cross_entropy, (x, target), options, extra=lost(size.nan_to_num(), x.dtype))


# --- accuracy


@pytest.mark.covering(2)
@pytest.mark.parametrize("reduction, dtype", [  # a sum is a mean times a number
    *((reduction, dtype) for reduction in ("none", "mean") for dtype in DTYPES), ("sum", F32)], ids=str)
@kinds
@pytest.mark.parametrize("shape", [(33, 65), (3, 7, 5)], ids=str)
def test_results_and_gradients(kind, reduction, shape, dtype, device):
    x = logits(shape, dtype, device)
    compare(x, targets(kind, x), reduction=reduction)


OPTIONS = [
    {"label_smoothing": 0.1},
    {"z_loss": 0.01},
    {"softcap": 3.0},
    {"weight": True},
    {"weight": True, "label_smoothing": 0.2, "z_loss": 0.01, "softcap": 5.0},
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("options", "shape", "dtype"), [
    *((options, (33, 65), BF16) for options in OPTIONS), *((options, (3, 7, 5), F32) for options in OPTIONS),
    (OPTIONS[-1], (33, 65), F64)], ids=str)
@kinds
def test_options(kind, options, shape, dtype, device):
    x = logits(shape, dtype, device)
    if "weight" in options:
        options = options | {"weight": (torch.rand(shape[1], device=device) + 0.5).to(dtype)}
    compare(x, targets(kind, x), **options)


@pytest.mark.covering(1)
@pytest.mark.parametrize("columns", [2, 1023, 1025, 4096, 4104, 8200, 262_144])  # of a piece 4096 or 2048
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_widths(columns, dtype, device):
    x = logits((3, columns), dtype, device)
    for kind in KINDS:
        compare(x, targets(kind, x), label_smoothing=0.1)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.0}], ids=str)
@kinds
def test_one_class(kind, options, device):
    """Whose loss is 0, and whose gradient is that but for rounding errors of 1."""
    x = torch.randn(5, 1, device=device)
    target = (
        torch.ones_like(x) if kind == "probabilities" else torch.zeros(5, dtype=torch.int64, device=device)
    )
    out, (grad,) = evaluate(frt.cross_entropy, (x,), {"target": target, "reduction": "none"} | options)
    assert (out == 0).all()
    assert grad.abs().max() <= 2.0**-23


def test_ignored_rows_and_other_indices(device):
    x, target = logits((33, 65), F32, device), torch.randint(65, (33,), device=device)
    weight = torch.rand(65, device=device)
    for ignore_index in (3, -1, 1000):
        target[::4] = ignore_index
        for reduction in REDUCTIONS:
            _, (grad,) = compare(x, target, ignore_index=ignore_index, weight=weight, reduction=reduction)
            assert (grad[::4] == 0).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_integer_dtypes(dtype, device):
    x, target = logits((33, 65), F32, device), torch.randint(65, (33,), device=device)
    assert_same_bits(frt.cross_entropy(x, target.to(dtype)), frt.cross_entropy(x, target))


def test_near_certain_classes_keep_their_small_loss(device):
    x = torch.tensor([[9.0, 0.0, 0.5], [0.0, 15.0, 1.0]], device=device)
    target = torch.tensor([0, 1], device=device)
    found, exact = (
        f(x.to(d), target, reduction="none")
        for f, d in ((frt.cross_entropy, F32), (reference.cross_entropy, F64))
    )
    torch.testing.assert_close(found, exact.float(), rtol=0, atol=2.0**-23)


def test_losses_of_16_bit_logits_are_rounded_once(device):
    """After they were summed."""
    x, target = logits((1000, 65), BF16, device), torch.randint(65, (1000,), device=device)
    for reduction in ("mean", "sum"):
        exact = reference.cross_entropy(x.double(), target, reduction=reduction)
        assert frt.cross_entropy(x, target, reduction=reduction) == exact.to(BF16)


@kinds
def test_a_single_row(kind, device):
    x = logits((7,), F32, device)
    for reduction in REDUCTIONS:
        out, _ = compare(x, targets(kind, x), reduction=reduction)
        assert out.shape == ()
    assert_same_bits(
        frt.cross_entropy(x, torch.tensor([3], device=device)),
        frt.cross_entropy(x, torch.tensor(3, device=device)),
    )


def test_autocast_gives_float32(device):
    x, target = logits((33, 65), BF16, device).requires_grad_(), torch.randint(65, (33,), device=device)
    with torch.autocast(device, dtype=BF16):
        for reduction in REDUCTIONS:
            out = frt.cross_entropy(x, target, reduction=reduction)
            assert out.dtype == F32
            torch.testing.assert_close(
                out, reference.cross_entropy(x.double(), target, reduction=reduction).float()
            )
    assert torch.autograd.grad(out.sum(), x)[0].dtype == BF16


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_weights_of_another_dtype(dtype, device):
    x, target = logits((33, 65), dtype, device), torch.randint(65, (33,), device=device)
    weight = torch.rand(65, device=device)
    out = frt.cross_entropy(x, target, weight)
    assert out.dtype == dtype
    assert out == reference.cross_entropy(x.double(), target, weight.double()).to(dtype)


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", [3, 3000])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_wider_weights_and_probabilities(reduction, rows, device):
    """NumPy's are float64 unless told: with classes the result has the logits' dtype in any case."""
    x, target = logits((rows, 7), F32, device), torch.randint(7, (rows,), device=device)
    weight = torch.rand(7, dtype=F64, device=device) + 0.5
    probabilities = torch.rand(rows, 7, dtype=F64, device=device).softmax(-1)
    for args in ((target, weight), (probabilities,)):
        for leaf in (x, x.clone().requires_grad_()):
            out = frt.cross_entropy(leaf, *args, reduction=reduction)
            assert out.dtype == (F32 if len(args) == 2 else F64)
            torch.testing.assert_close(out, F.cross_entropy(
                x.double(), *args, reduction=reduction).to(out.dtype), rtol=2e-6, atol=2e-6)
        grad, = torch.autograd.grad(out.sum(), leaf)
        expected = x.double().requires_grad_()
        F.cross_entropy(expected, *args, reduction=reduction).sum().backward()
        torch.testing.assert_close(grad, expected.grad.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtypes", [(BF16, F32, None), (F32, BF16, None), (BF16, F16, BF16), (F16, F64, None),
                                    (BF16, BF16, F32), (BF16, F32, F64)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0}], ids=str)
def test_probabilities_of_another_dtype(dtypes, reduction, options, device):
    """The result has the promoted dtype of all, as torch's; each gradient that of its operand."""
    x, q, weight = (None if dtype is None else torch.rand(shape, device=device).to(dtype).requires_grad_()
                    for dtype, shape in zip(dtypes, ((9, 33), (9, 33), (33,)), strict=True))
    leaves = [t for t in (x, q, weight) if t is not None]
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, q, weight)]
    exact = reference.cross_entropy(*wide, reduction=reduction, **options)
    torchs = F.cross_entropy(x, q, weight, reduction=reduction)
    for of in (leaves, leaves[:1], []):  # some ways are those of logits that alone need a gradient, or none
        given = [t if t is None or any(t is leaf for leaf in of) else t.detach() for t in (x, q, weight)]
        found = frt.cross_entropy(*given, reduction=reduction, **options)
        assert found.dtype == torchs.dtype
        eps = torch.finfo(found.dtype).eps
        torch.testing.assert_close(found.double(), exact, rtol=8 * eps, atol=8 * eps)
        if not of:
            continue
        grad = torch.rand_like(found)
        grads = torch.autograd.grad(found, of, grad)
        expected = torch.autograd.grad(exact, [t for t in wide if t is not None][:len(of)], grad.double(),
                                       retain_graph=True)
        for leaf, ours, truth in zip(of, grads, expected, strict=True):
            assert ours.dtype == leaf.dtype
            eps = max(torch.finfo(leaf.dtype).eps, torch.finfo(found.dtype).eps)
            torch.testing.assert_close(ours.double(), truth, rtol=8 * eps, atol=2 * eps)


# --- derivatives


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [((4, 5), {}), ((2, 5, 3), {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0})],
    ids=str,
)
@kinds
def test_derivatives(kind, options, shape, device):
    x = logits(shape, F64, device).requires_grad_()
    target = targets(kind, x.detach())
    weight = (torch.rand(5, dtype=F64, device=device) + 0.5).requires_grad_()
    constant = target.detach()
    operands = (x, weight) if kind == "classes" else (x, weight, target.requires_grad_())
    for reduction, args in (("mean", (x,)), ("mean", operands), ("none", operands), ("sum", (x,))):

        def function(x, weight=None, target=constant):
            return frt.cross_entropy(x, target, weight, reduction=reduction, **options)  # noqa: B023

        assert torch.autograd.gradcheck(function, args, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, args, fast_mode=True)


@needs_nvrtc
def test_derivatives_of_one_gradient_compile():
    """Their second pass uses what the first one found, not what that was computed from."""
    x, weight, v = (torch.empty(*shape, dtype=F64, device="meta", requires_grad=True)
                    for shape in ((4, 5), (5,), (4, 5)))
    with collecting("cuda") as needed:
        loss = frt.cross_entropy(x, torch.empty(4, dtype=torch.int64, device="meta"), weight)
        of_x, _ = torch.autograd.grad(loss, (x, weight), create_graph=True)
        torch.autograd.grad((of_x * v).sum(), (x, weight))
    for problem in needed:
        for source in launch.sources(problem):
            assert compiler.build(source.text, source.entry, "sm_90", problem.name)


def test_batched_gradients(device):
    x, target = logits((4, 5), F64, device).requires_grad_(), torch.randint(5, (4,), device=device)
    for reduction in ("none", "mean"):
        out, expected = (
            f(x, target, reduction=reduction) for f in (frt.cross_entropy, reference.cross_entropy)
        )
        g = torch.randn(3, *out.shape, dtype=F64, device=device)
        ours, theirs = (torch.autograd.grad(o, x, g, is_grads_batched=True)[0] for o in (out, expected))
        torch.testing.assert_close(ours, theirs)


def test_transforms(device):
    x, target = logits((4, 5), F64, device), torch.randint(5, (4,), device=device)
    for transform in (torch.func.grad, torch.func.jacrev):
        ours, theirs = (
            transform(lambda x: f(x, target))(x)  # noqa: B023
            for f in (frt.cross_entropy, reference.cross_entropy)
        )
        torch.testing.assert_close(ours, theirs)


@pytest.mark.covering(1)
@reductions
@kinds
def test_same_bits_every_time(kind, reduction, device):
    x = logits((301, 1000), F32, device).requires_grad_()
    target = targets(kind, x.detach())
    first, again = (frt.cross_entropy(x, target, reduction=reduction) for _ in range(2))
    assert_same_bits(first, again)
    g = torch.randn_like(first)
    (a,) = torch.autograd.grad(first, x, g, retain_graph=True)
    for other in (first, again):
        assert_same_bits(a, *torch.autograd.grad(other, x, g))


def test_one_kernel_each_way():
    """Reads the logits, the target and two values a row; writes the gradient."""
    kernel = cross_entropy_rows.gradient_of(("input", "target", "ignore_index"), False, True, False)
    assert kernel.operator.params == (
        "input", "target", "ignore_index", "output1", "output2", "grad_output0", "count")
    assert len(kernel.operator.outputs) == 1
    assert not [n for n in toposort(kernel.operator.outputs) if n.primitive.of_row == REDUCTION]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_one_launch_forward(reduction, needs_gradient):
    """The last block of the kernel over the logits reduces the losses, if they are very few."""
    def launches(rows, **options):
        x = torch.empty(rows, 64, device="meta", requires_grad=needs_gradient)
        with collecting("cuda") as needed:
            frt.cross_entropy(x, torch.empty(rows, device="meta", dtype=torch.int64), reduction=reduction,
                              **options)
        return [source for problem in needed for source in launch.sources(problem)]

    assert len(launches(512)) == len(launches(1, weight=torch.empty(64, device="meta"))) == 1
    assert "arrived" in launches(512)[0].params.declaration
    assert len(launches(FEWEST_ROWS + 1)) == 2


# --- layouts and edges


def layouts(device):
    x = torch.randn(6, 10, 14, device=device)
    return {
        "transposed": x[0].T,
        "every other": x[0, :, ::2],
        "unaligned": x.flatten()[1:57].view(7, 8),
        "expanded rows": x[0, :1].expand(9, 14),
        "expanded classes": x[0, :, :1].expand(10, 5),
        "rows apart": x[:, 0],
        "images": x[:, :, None],
        "channels_last": x[None, :3].to(memory_format=torch.channels_last),
        "permuted": x.permute(2, 0, 1),
    }


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", layouts("cpu"))
@kinds
def test_layouts(layout, kind, device):
    x = layouts(device)[layout]
    compare(x, targets(kind, x), label_smoothing=0.1)
    assert (
        evaluate(frt.cross_entropy, (x, targets("classes", x)))[1][0].stride() == torch.empty_like(x).stride()
    )


def test_no_rows(device):
    x = torch.empty(0, 5, device=device, requires_grad=True)
    for target in (torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, 5, device=device)):
        assert frt.cross_entropy(x, target).isnan()
        assert frt.cross_entropy(x, target, reduction="sum") == 0
        assert frt.cross_entropy(x, target, reduction="none").shape == (0,)
        assert torch.autograd.grad(frt.cross_entropy(x, target), x)[0].shape == (0, 5)


@pytest.mark.parametrize("weighted", [False, True])
def test_all_rows_ignored(weighted, device):
    x = torch.randn(4, 5, device=device, requires_grad=True)
    target = torch.full((4,), -100, device=device)
    weight = torch.rand(5, device=device) if weighted else None
    for reduction in REDUCTIONS:
        ours, theirs = (
            f(x, target, weight, reduction=reduction) for f in (frt.cross_entropy, reference.cross_entropy)
        )
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        ours, theirs = (torch.autograd.grad(o.sum(), x)[0] for o in (ours, theirs))
        torch.testing.assert_close(ours.nan_to_num(), theirs.nan_to_num())


def special_rows(device):
    inf, nan = math.inf, math.nan
    return torch.tensor(
        [
            [1.0, nan, 2, 3],
            [-inf, 0, 1, 2],
            [0, -inf, 1, 2],
            [-inf] * 4,
            [1e37] * 4,
            [inf, 0, 1, 2],
            [3e38, -3e38, 1, 0],
            [1e-40, 2e-40, -1e-40, 0],
            [nan] * 4,
            [100, -100, 0, 1],
        ],
        device=device,
    )


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_special_values(label_smoothing, at, device):
    x = special_rows(device)
    target = torch.full((len(x),), at, device=device)
    options = {"label_smoothing": label_smoothing, "reduction": "none"}
    (ours, (grad,)), (theirs, (expected,)) = (
        evaluate(f, (x, target), options) for f in (frt.cross_entropy, reference.cross_entropy)
    )
    torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad, expected, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_arrays():
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((33, 65)).astype(np.float32), rng.integers(65, size=33)
    found = frt.cross_entropy(x, target, reduction="none")
    assert isinstance(found, np.ndarray)
    expected = np.log(np.exp(x).sum(-1)) - x[np.arange(33), target]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert isinstance(frt.cross_entropy(torch.from_numpy(x), target), torch.Tensor)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "reduction": "none"}, {"weight": True}], ids=str
)
def test_compiled(options, dynamic, device):
    torch.compiler.reset()  # each way to call is a graph of its own
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(frt.cross_entropy, fullgraph=True, dynamic=dynamic, backend=backend)
    for shape in ((33, 65), (17, 12), (3, 7, 5)):
        x = logits(shape, F32, device)
        target = targets("classes", x)
        options = options | ({"weight": torch.rand(shape[1], device=device)} if "weight" in options else {})
        (out, grads), (expected, theirs) = (
            evaluate(f, (x, target), options) for f in (compiled, frt.cross_entropy)
        )
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(grads[0], theirs[0])


def test_incoming_gradients_lie_otherwise(device):
    """The plan of the backward pass is that of the last one where it fits."""
    x, target = logits((7, 19), F64, device).requires_grad_(), torch.randint(19, (7,), device=device)
    of_all = torch.randn(7, 2, dtype=F64, device=device)
    for incoming in (of_all[:, 0], of_all[:, 0].clone(), of_all[:1, 1].expand(7), of_all[:, 1]) * 2:
        found, = torch.autograd.grad(frt.cross_entropy(x, target, reduction="none"), x, incoming)
        expected = torch.nn.functional.cross_entropy(x, target, reduction="none")
        torch.testing.assert_close(found, *torch.autograd.grad(expected, x, incoming))


def test_classes_that_float32_does_not_tell_apart(device):
    x, target = torch.zeros(1, (1 << 24) + 2, device=device), torch.tensor([(1 << 24) + 1], device=device)
    with pytest.raises(ValueError, match=r"cross_entropy: input must have at most 2\^24 classes unless"):
        frt.cross_entropy(x, target)
    x = x.double()
    x[0, -1] = 20
    torch.testing.assert_close(frt.cross_entropy(x, target), torch.nn.functional.cross_entropy(x, target))


# --- errors


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda x, t: frt.cross_entropy(x, t, reduction="avg"),
            ValueError,
            "cross_entropy: reduction must be 'mean', 'sum' or 'none', got 'avg'",
        ),
        (
            lambda x, t: frt.cross_entropy(x, t, label_smoothing=1.5),
            ValueError,
            r"cross_entropy: label_smoothing must be in \[0, 1\], got 1.5",
        ),
        (
            lambda x, t: frt.cross_entropy(x, t, softcap=0.0),
            ValueError,
            "softcap must be positive and finite, or None, got 0.0",
        ),
        (
            lambda x, t: frt.cross_entropy(x, t[:3]),
            ValueError,
            r"cross_entropy: target must have the shape \(4,\) for classes and an input of the shape "
            r"\(4, 5\), got \(3,\)",
        ),
        (
            lambda x, t: frt.cross_entropy(x, x[0]),
            ValueError,
            r"target must have the shape of input, \(4, 5\), for probabilities of classes, got \(5,\)",
        ),
        (
            lambda x, t: frt.cross_entropy(x, x, ignore_index=2),
            ValueError,
            "ignore_index is for a target of classes, got 2 with probabilities",
        ),
        (lambda x, t: frt.cross_entropy(x, t > 2), TypeError, "target must hold integers .* got torch.bool"),
        (
            lambda x, t: frt.cross_entropy(x, t, x[0, :3]),
            ValueError,
            r"weight must have one value for each of the 5 classes, got shape \(3,\)",
        ),
        (lambda x, t: frt.cross_entropy(x[:, :0], t), ValueError, "input must have at least one class"),
        (lambda x, t: frt.cross_entropy([1.0], t), TypeError, "input must be a tensor or an array, got list"),
        (lambda x, t: frt.cross_entropy(t[:, None], t), TypeError, "input must be a floating-point tensor"),
    ],
)
def test_errors(call, kind, message):
    with pytest.raises(kind, match=message):
        call(torch.rand(4, 5), torch.zeros(4, dtype=torch.int64))


def test_numbers_in_tensors():
    """As torch takes them; one may be written to between calls."""
    x, target, smoothing = torch.randn(4, 5), torch.arange(4), torch.tensor(0.1)
    for k in (1, 2):
        found = frt.cross_entropy(x, target, ignore_index=torch.tensor(k), label_smoothing=smoothing)
        exact = reference.cross_entropy(x, target, ignore_index=k, label_smoothing=smoothing.item())
        torch.testing.assert_close(found, exact)
        smoothing += 0.2


@reductions
@pytest.mark.parametrize("wrong", [5, -1, 2**40])
def test_classes_out_of_range(wrong, reduction):
    x, target = torch.randn(4, 5), torch.tensor([0, wrong, -100, wrong])
    with pytest.raises(
        IndexError,
        match=rf"cross_entropy: target must be in \[0, 5\) or ignore_index \(-100\), got 2 "
        rf"other values such as {wrong}",
    ):
        frt.cross_entropy(x, target, reduction=reduction)


@pytest.mark.covering(1)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [1 << 24, (1 << 24) + 2, 2**31 - 1, -(1 << 24), -(1 << 40)])
def test_classes_beside_a_large_number_to_ignore(reduction, ignored):
    """What float32 rounds to it is out of range, or is not ignored."""
    x, options = torch.randn(4, 5), {"ignore_index": ignored, "reduction": reduction}
    for wrong in (ignored - 1, ignored + 1, -1):
        target = torch.tensor([1, ignored, wrong, 0])
        with pytest.raises(IndexError):
            frt.cross_entropy(x, target, **options)
        with pytest.raises(IndexError):
            frt.linear_cross_entropy(x, torch.eye(5), target, **options)
    for target in (torch.tensor([1, ignored, 2, ignored]), torch.tensor([1, 2, 3, 4])):
        leaf, alike = x.clone().requires_grad_(), x.clone().requires_grad_()
        for _ in range(2):  # the second call finds what the first one has chosen
            found = frt.cross_entropy(leaf, target, **options)
            expected = torch.nn.functional.cross_entropy(alike, target, **options)
            torch.testing.assert_close(found, expected)
            found.sum().backward()
            expected.sum().backward()
        torch.testing.assert_close(leaf.grad, alike.grad)


def test_one_row_of_probabilities():
    hidden, weight, target = torch.randn(8), torch.randn(5, 8), torch.softmax(torch.randn(5), 0)
    found = frt.linear_cross_entropy(hidden, weight, target)
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(weight @ hidden, target))


@pytest.mark.parametrize("shape", [(4, 8), (4, 8, 3)])
def test_losses_of_rows_may_be_written_to(shape, device):
    """As by whoever masks them."""
    x = torch.randn(shape, device=device, requires_grad=True)
    target = torch.randint(8, (shape[0], *shape[2:]), device=device)
    grads = []
    for function in (frt.cross_entropy, torch.nn.functional.cross_entropy):
        loss = function(x, target, reduction="none")
        loss *= 2
        loss[1] = 0
        grads.append(torch.autograd.grad(loss.sum(), x)[0])
    torch.testing.assert_close(*grads)
