"""Losses of single elements, and sums over everything, which they are made of."""

import functools
import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from checking import BF16, DTYPES, F32, F64, assert_same_bits, check, derivatives, evaluate, lost, wide

import fusionrt as frt
from fusionrt import reference
from fusionrt.definition import SCALAR
from fusionrt.expr import cast, exp
from fusionrt.fusion import fuse_named

LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "bce_with_logits", "kl_div")
REDUCTIONS = ("none", "mean", "sum")
losses = pytest.mark.parametrize("name", LOSSES)
reductions = pytest.mark.parametrize("reduction", REDUCTIONS)
pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")


def arguments(name, shape, dtype, device):
    x, y = (torch.randn(shape, dtype=F64, device=device) for _ in range(2))
    if name == "bce_with_logits":
        return (x * 3).to(dtype), torch.rand_like(x).to(dtype)
    if name == "kl_div":
        return x.log_softmax(-1).to(dtype), (x + y / 4).softmax(-1).to(dtype)
    return (x * 2).to(dtype), (y * 2).to(dtype)


def compare(name, args, **options):
    """A sum may lose what sums of float32 lose."""
    if name == "kl_div":  # a difference of two logarithms, which may cancel
        x, y = map(wide, args)
        p, log_p = (y.exp(), y) if options.get("log_target") else (y, y.log())
        each = p * (log_p.abs() + x.abs())
    else:
        each = getattr(frt, name).reference(*map(wide, args), **options | {"reduction": "none"}).abs()
    size = {"none": each, "sum": each.sum()}.get(options["reduction"], each.mean())
    return check(getattr(frt, name), args, options, extra=lost(size, args[0].dtype))


def cases():
    """Every dtype; sums, which are means times a number, and single elements in float32 alone."""
    for name, reduction, dtype in itertools.product(LOSSES, REDUCTIONS, DTYPES):
        if reduction != "sum" or dtype == F32:
            yield from ((name, reduction, shape, dtype) for shape in ((33, 65), (5, 1023)))
        if dtype == F32 and name != "kl_div":  # there is no softmax of nothing
            yield name, reduction, (), dtype


@pytest.mark.covering(2)
@pytest.mark.parametrize("name, reduction, shape, dtype", cases(), ids=str)
def test_results_and_gradients(name, reduction, shape, dtype, device):
    compare(name, arguments(name, shape, dtype, device), reduction=reduction)


OPTIONS = {
    "smooth_l1_loss": [{"beta": b} for b in (0.0, 0.1, 3.0)],
    "huber_loss": [{"delta": d} for d in (0.1, 3.0)],
    "kl_div": [
        {"log_target": True},
        {"reduction": "batchmean"},
        {"log_target": True, "reduction": "batchmean"},
    ],
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
@pytest.mark.parametrize(("name", "options"), [(n, o) for n in OPTIONS for o in OPTIONS[n]], ids=str)
def test_options(name, options, dtype, device):
    x, y = arguments(name, (33, 65), dtype, device)
    compare(name, (x, y.log() if options.get("log_target") else y), **{"reduction": "mean"} | options)


@pytest.mark.covering(1)
@reductions
@pytest.mark.parametrize("weighted, dtype", [
    *(((True, True), dtype) for dtype in DTYPES), ((True, False), F32), ((False, True), F32)], ids=str)
def test_weights_of_bce(weighted, reduction, dtype, device):
    x, y = arguments("bce_with_logits", (33, 65), dtype, device)
    weight, pos_weight = (
        torch.rand(33, 1, device=device).to(dtype),
        torch.rand(65, device=device).to(dtype) * 3,
    )
    options = {"reduction": reduction} | {
        k: v for k, v, w in zip(("weight", "pos_weight"), (weight, pos_weight), weighted, strict=True) if w
    }
    compare("bce_with_logits", (x, y), **options)


@pytest.mark.covering(1)
@reductions
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(33, 65), (33, 1), (65,), ()], ids=str)
@pytest.mark.parametrize("name, options", [("mse_loss", {}), ("l1_loss", {}), ("huber_loss", {"delta": 0.7})])
def test_weights(name, options, shape, dtype, reduction, device):
    options = options | {"reduction": reduction}
    x, y = arguments(name, (33, 65), dtype, device)
    compare(name, (x, y), **options, weight=torch.rand(shape, dtype=F64, device=device).to(dtype))
    few = tuple({33: 3, 65: 5}.get(n, n) for n in shape)
    args = [*arguments(name, (3, 5), F64, device), torch.rand(few, dtype=F64, device=device)]
    torch.testing.assert_close(*(derivatives(lambda x, y, w, f=f: f(x, y, **options, weight=w), args)
                                 for f in (getattr(frt, name), getattr(reference, name))))


@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch's take no weight")
@pytest.mark.parametrize("name", ["mse_loss", "l1_loss"])
def test_a_weighted_mean_is_torchs(name, device):
    x, y = arguments(name, (3, 5), F32, device)
    for weight in (x.abs(), (4 * x).int(), x > 0, x - 5):
        found = getattr(frt, name)(x, y, weight=weight)
        torch.testing.assert_close(found, getattr(torch.nn.functional, name)(x, y, weight=weight))
    many = torch.full((300, 300), 200.0, dtype=torch.float16, device=device)  # whose sum float16 has not
    assert getattr(frt, name)(many, 0 * many, weight=many) == {"mse_loss": 40000, "l1_loss": 200}[name]
    assert getattr(frt, name)(x[:0], y[:0], weight=x[:0]).isnan()


def test_a_number_as_weight_of_huber(device):
    x, y = arguments("huber_loss", (3, 5), F64, device)
    torch.testing.assert_close(frt.huber_loss(x, y, weight=0.5), frt.huber_loss(x, y) / 2)
    torch.testing.assert_close(frt.huber_loss(x, y, "mean", 1.0, x.abs()),
                               (torch.nn.functional.huber_loss(x, y, reduction="none") * x.abs()).mean())


def test_bce_near_certainty(device):
    """What is left of a loss is not lost in a difference of large numbers."""
    x = torch.tensor([30.0, -30, 80, -80, 0, 1e4, -1e4], device=device)
    for y in (torch.zeros_like(x), torch.ones_like(x)):
        for weights in ({}, {"pos_weight": torch.tensor(2.0, device=device)}):
            found = frt.bce_with_logits(x, y, reduction="none", **weights)
            exact = reference.bce_with_logits(x.double(), y.double(), reduction="none", **weights)
            exact = torch.where(
                y == (x > 0),
                torch.nn.functional.softplus(-x.double().abs())
                * torch.where(x > 0, weights.get("pos_weight", 1.0), 1.0),
                exact,
            )
            torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


@losses
def test_derivatives(name, device):
    args = arguments(name, (3, 5), F64, device)
    for reduction in REDUCTIONS:
        torch.testing.assert_close(*(derivatives(functools.partial(f, reduction=reduction), args)
                                     for f in (getattr(frt, name), getattr(reference, name))))


@pytest.mark.slow
def test_derivatives_of_weights(device):
    args = [
        *arguments("bce_with_logits", (3, 5), F64, device),
        *(torch.rand(s, dtype=F64, device=device) + 0.5 for s in ((3, 1), (5,))),
    ]
    function = lambda x, y, w, p: frt.bce_with_logits(x, y, w, "sum", p)  # noqa: E731
    assert torch.autograd.gradcheck(function, [a.requires_grad_() for a in args])
    assert torch.autograd.gradgradcheck(function, args)


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])
def test_gradients_at_special_values(name, device):
    inf, nan = math.inf, math.nan
    x = torch.tensor([0.0, 1, -1, inf, -inf, nan, 1e37, 3e38, 1e-40, 2], device=device)
    y = torch.tensor([0.0, 0, 0, 0, 0, 0, 0, -3e38, 0, nan], device=device)
    (out, grads), (theirs, expected) = (
        evaluate(f, (x, y), {"reduction": "none"}) for f in (getattr(frt, name), getattr(reference, name))
    )
    torch.testing.assert_close(out, theirs, equal_nan=True)
    for ours, torchs in zip(grads, expected, strict=True):
        # torch: NaN has the gradient 1, of sign(NaN) or of a comparison that is false
        known = ~(x.isnan() | y.isnan())
        torch.testing.assert_close(ours[known], torchs[known], equal_nan=True)


def test_targets_that_are_zero_have_no_divergence(device):
    """0 log 0 is 0; the derivative by the target is left finite."""
    x = torch.tensor([-1.0, -2.0], device=device, requires_grad=True)
    y = torch.tensor([0.0, 1.0], device=device, requires_grad=True)
    out = frt.kl_div(x, y, "none")
    torch.testing.assert_close(out, reference.kl_div(x, y, reduction="none"))
    gx, gy = torch.autograd.grad(out.sum(), (x, y))
    torch.testing.assert_close(gx, -y.detach())
    assert gy.isfinite().all()


@losses
def test_no_elements(name, device):
    args = [torch.empty(0, 4, device=device, requires_grad=True) for _ in range(2)]
    function = getattr(frt, name)
    assert function(*args).isnan()
    assert function(*args, reduction="sum") == 0
    assert function(*args, reduction="none").shape == (0, 4)
    grads = torch.autograd.grad(function(*args), args)
    assert [g.shape for g in grads] == [(0, 4)] * 2


def layouts(device):
    x = torch.randn(6, 10, 14, device=device)
    return {
        "transposed": x.transpose(0, 2),
        "every other": x[..., ::2],
        "unaligned": x.flatten()[1:],
        "expanded": x[:, :1].expand(6, 9, 14),
        "channels_last": x[None].to(memory_format=torch.channels_last),
    }


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", layouts("cpu"))
@reductions
def test_layouts(layout, reduction, device):
    x = layouts(device)[layout]
    compare("mse_loss", (x, torch.randn(x.shape, device=device)), reduction=reduction)


def test_broadcast_operands_warn(device):
    x, y = (
        torch.randn(5, 1, device=device, requires_grad=True),
        torch.randn(7, device=device, requires_grad=True),
    )
    with pytest.warns(
        UserWarning, match=r"mse_loss: target has shape \(7,\) and input \(5, 1\): they broadcast"
    ):
        out = frt.mse_loss(x, y)
    expected = (x - y).square().mean()
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(*(torch.autograd.grad(o, (x, y)) for o in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_mixed_dtypes(device):
    x, y = torch.randn(33, 65, device=device).bfloat16(), torch.randint(0, 2, (33, 65), device=device)
    for target in (y, y.bool(), y.double()):
        out = frt.bce_with_logits(x, target)
        assert out.dtype == torch.promote_types(BF16, target.dtype)
        torch.testing.assert_close(out, reference.bce_with_logits(x.double(), y.double()).to(out.dtype))


@pytest.mark.covering(1)
@losses
@reductions
def test_same_bits_every_time(name, reduction, device):
    args = [a.requires_grad_() for a in arguments(name, (301, 1000), F32, device)]
    first, again = (getattr(frt, name)(*args, reduction=reduction) for _ in range(2))
    assert_same_bits(first, again)
    g = torch.randn_like(first)
    for a, b in zip(*(torch.autograd.grad(o, args, g) for o in (first, again)), strict=True):
        assert_same_bits(a, b)


def test_arrays():
    x, y = (np.random.default_rng(0).standard_normal((33, 65)).astype(np.float32) for _ in range(2))
    for reduction, expected in {"mean": ((x - y) ** 2).mean(), "none": (x - y) ** 2}.items():
        found = frt.mse_loss(x, y, reduction)
        assert isinstance(found, np.ndarray)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert isinstance(frt.mse_loss(x, torch.from_numpy(y)), torch.Tensor)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamic", [False, True])
@losses
def test_compiled(name, dynamic, device):
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(getattr(frt, name), fullgraph=True, dynamic=dynamic, backend=backend)
    for shape in ((33, 65), (17, 12)):
        args = arguments(name, shape, F32, device)
        (out, grads), (expected, theirs) = (
            evaluate(f, args, {"reduction": "mean"}) for f in (compiled, getattr(frt, name))
        )
        torch.testing.assert_close(out, expected)
        for a, b in zip(grads, theirs, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda x: frt.mse_loss(x, x, "avg"),
            ValueError,
            "mse_loss: reduction must be 'mean', 'sum' or 'none', got 'avg'",
        ),
        (
            lambda x: frt.l1_loss(x, x[:3]),
            ValueError,
            r"l1_loss: input and target must broadcast, got \(4, 5\) and \(3, 5\)",
        ),
        (
            lambda x: frt.mse_loss(x, "y"),
            TypeError,
            "mse_loss: target must be a tensor, an array or a number, got str",
        ),
        (lambda x: frt.huber_loss(x, x, delta=0), ValueError, "huber_loss: delta must be positive, got 0"),
        (
            lambda x: frt.smooth_l1_loss(x, x, beta=-1),
            ValueError,
            "smooth_l1_loss: beta must be at least 0, got -1",
        ),
        (
            lambda x: frt.bce_with_logits(x, x[0]),
            ValueError,
            r"bce_with_logits: target must have the shape of input, \(4, 5\), got \(5,\)",
        ),
        (
            lambda x: frt.bce_with_logits(x, x, torch.ones(2, 4, 5)),
            ValueError,
            r"bce_with_logits: weight must broadcast to the shape of input, \(4, 5\), got \(2, 4, 5\)",
        ),
        (
            lambda x: frt.mse_loss(x, x, weight=0.5),
            TypeError,
            "mse_loss: weight must be a tensor or an array, got float",
        ),
        (
            lambda x: frt.huber_loss(x, x, weight=x[:, :2]),
            ValueError,
            r"huber_loss: weight must broadcast to the shape of input, \(4, 5\), got \(4, 2\)",
        ),
        (lambda x: frt.kl_div(x, x, "average"), ValueError, "kl_div: reduction must be"),
    ],
)
def test_errors(call, kind, message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(kind, match=message):
            call(torch.rand(4, 5))


# --- sums over everything


def test_a_formula_summed_to_a_scalar(device):
    total = fuse_named(lambda x, w: x * exp(w), "total", SCALAR)
    x, w = torch.randn(33, 17, 9, device=device), torch.randn(17, 1, device=device)
    check(
        total,
        (x, w),
        reference=lambda x, w: (x * w.exp()).sum(),
        extra=lost((x * w.exp()).abs().sum().double(), F32),
        magnitudes=lambda args, *_: [a.abs() for a in args],
    )
    args = [a[:3, :4].double().requires_grad_() for a in (x[:, :, 0], w[:4].T)]
    assert torch.autograd.gradcheck(total, args)
    assert torch.autograd.gradgradcheck(total, args)


def test_a_count(device):
    count = fuse_named(lambda x: cast(x > 0, "int64"), "count", SCALAR)
    x = torch.randn(1000, 1003, device=device)
    assert count(x).dtype == torch.int64
    assert count(x) == (x > 0).sum()


@pytest.mark.parametrize("name", ["huber_loss", "smooth_l1_loss", "mse_loss", "l1_loss"])
def test_derivatives_at_nan_and_infinity(name, device):
    x = torch.tensor([math.nan, 1.0, -3.0, 0.2, math.inf, -math.inf, 0.0], device=device, requires_grad=True)
    found, expected = (torch.autograd.grad(f(x, torch.zeros_like(x), reduction="sum"), x)[0]
                       for f in (getattr(frt, name), getattr(torch.nn.functional, name)))
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "name", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "bce_with_logits", "kl_div"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_wants_float32(name, reduction, device):
    x, y = (torch.rand(64, 33, device=device).to(BF16) for _ in range(2))
    x.requires_grad_()
    with torch.autocast(device, dtype=BF16):
        found = getattr(frt, name)(x, y, reduction=reduction)
    expected = getattr(frt, name)(x.float(), y.float(), reduction=reduction)
    assert found.dtype == F32
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    torch.testing.assert_close(*(torch.autograd.grad(r, x, grad)[0] for r in (found, expected)), rtol=1e-2,
                               atol=1e-5)
    assert getattr(frt, name)(x, y, reduction=reduction).dtype == BF16


@pytest.mark.parametrize("kinds", [(BF16, F64), (F64, BF16), (torch.int64, BF16)], ids=str)
@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "smooth_l1_loss"])
def test_autocast_of_two_dtypes(name, kinds, device):
    args = [torch.randint(0, 2, (8, 33), device=device).to(dtype) for dtype in kinds]
    with torch.autocast(device, dtype=BF16):
        found, expected = (getattr(module, name)(*args) for module in (frt, torch.nn.functional))
    torch.testing.assert_close(found, expected)
