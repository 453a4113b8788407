"""Reductions over any dimensions, and what is built of them, against torch in float64."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from checking import BF16, DTYPES, F32, assert_as_accurate, assert_same_bits, check, evaluate, lost, make

import fusionrt as frt
from fusionrt.cpu import threads

NAMES = (
    "sum",
    "mean",
    "sum_squared",
    "mean_abs",
    "amax",
    "amin",
    "var",
    "std",
    "norm",
    "logsumexp",
    "row_reduce",
)
SUMS = {"sum": lambda x: x, "mean": lambda x: x, "mean_abs": torch.abs, "row_reduce": lambda x: x}
names = pytest.mark.parametrize("name", NAMES)
DIMS = (None, 0, 1, 2, -1, (0, 1), (0, 2), (-1, -2), [0, 1, 2])


def cancels(name, x, dim):
    """The magnitudes of what is added up in a sum of signed numbers."""
    if name not in SUMS:
        return 0.0
    dims = tuple(range(x.dim())) if dim is None else dim
    return (torch.mean if "mean" in name else torch.sum)(x.double().abs(), dims)


def compare(name, x, dim, **more):
    op = getattr(frt, name)
    return check(
        op,
        (x,),
        {"dim": dim, **more},
        magnitudes=lambda args, *_: [args[0].abs()],
        extra=lost(cancels(name, x, dim), x.dtype) if not more.get("keepdim") else 0.0,
    )


# --- accuracy and shapes


@pytest.mark.covering(1)
@names
@pytest.mark.parametrize("dim", DIMS, ids=str)
def test_any_dimensions(name, dim, device):
    x = make((5, 6, 7), torch.float64, device).requires_grad_()
    op = getattr(frt, name)
    for keepdim in (False, True):
        found, expected = op(x, dim=dim, keepdim=keepdim), op.reference(x, dim=dim, keepdim=keepdim)
        grad = torch.randn_like(expected)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y, x, grad)[0] for y in (found, expected)))


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype, dim", [
    *((dtype, 0) for dtype in DTYPES), (BF16, -1), (F32, -1), (F32, (0, 2))], ids=str)
@names
def test_accuracy(name, dtype, dim, device):
    compare(name, make((33, 9, 130), dtype, device), dim)


@pytest.mark.covering(1)
@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_a_function_of_the_elements(op, dim, device):
    def cubes(v):
        return abs(v) * v * v

    x = make((17, 65), torch.float32, device)
    exact = frt.row_reduce.reference(x.double(), dim, cubes, op)
    torchs = frt.row_reduce.reference(x, dim, cubes, op)
    assert_as_accurate(
        frt.row_reduce(x, dim, cubes, op), torchs, exact, extra=lost(cubes(x.double().abs()).sum(), x.dtype)
    )
    x = x.double().requires_grad_()
    found = [
        torch.autograd.grad(f(x, dim, cubes, op).square().sum(), x)[0]
        for f in (frt.row_reduce, frt.row_reduce.reference)
    ]
    torch.testing.assert_close(*found)


def test_a_fused_function_of_the_elements(device):
    x = torch.randn(64, 33, device=device)
    torch.testing.assert_close(frt.row_reduce(x, 0, frt.relu, "max"), x.relu().amax(0))
    torch.testing.assert_close(frt.row_reduce(x, 1, torch.exp), x.exp().sum(1))


@pytest.mark.parametrize(
    "map, plain",
    [
        ("relu", torch.relu),
        (torch.nn.GELU("tanh"), torch.nn.GELU("tanh")),
        (torch.nn.LeakyReLU(0.3), torch.nn.LeakyReLU(0.3)),
        (torch.nn.functional.silu, torch.nn.functional.silu),
        (torch.nn.Identity(), lambda x: x),
    ],
    ids=["name", "module", "module with a number", "function", "identity"],
)
def test_a_map_may_be_what_an_epilogue_may_be(map, plain, device):
    x = torch.randn(9, 40, dtype=torch.float64, device=device, requires_grad=True)
    for op in ("sum", "max"):
        found, expected = frt.row_reduce(x, 1, map, op), frt.row_reduce.reference(x, 1, plain, op)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), x)[0] for y in (found, expected)))
    leaky = torch.nn.LeakyReLU(0.3)  # whose number may change
    for slope in (0.3, 0.7):
        leaky.negative_slope = slope
        torch.testing.assert_close(frt.row_reduce(x, 1, leaky), leaky(x).sum(1))
    compiled = torch.compile(lambda x: frt.row_reduce(x, 1, "relu"), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), x.relu().sum(1))


@pytest.mark.covering(1)
@pytest.mark.parametrize("p", [1, 2, math.inf, 2.0])
@pytest.mark.parametrize("dim", [None, 0, -1])
def test_norms(p, dim, device):
    compare("norm", make((30, 41), torch.float32, device), dim, p=p)


@pytest.mark.parametrize("correction", [0, 1, 2.5, 7, 8])
def test_corrections(correction, device):
    x = torch.randn(3, 7, dtype=torch.float64, device=device)
    for name in ("var", "std"):
        op = getattr(frt, name)
        with pytest.warns(UserWarning) if correction >= 7 else _nothing():
            expected = op.reference(x, -1, correction)
        torch.testing.assert_close(op(x, -1, correction), expected, equal_nan=True)


def test_corrections_as_torch_takes_them(device):
    x = torch.randn(3, 7, dtype=torch.float64, device=device)
    for name in ("var", "std"):
        op, torchs = getattr(frt, name), getattr(torch, name)
        torch.testing.assert_close(op(x, -1, None), torchs(x, -1, correction=None))
        torch.testing.assert_close(op(x, -1, correction=None, keepdim=True), torchs(x, -1, keepdim=True))
        for unbiased in (False, True):  # torch's older third argument
            torch.testing.assert_close(op(x, -1, unbiased), torchs(x, -1, unbiased))
        with pytest.raises(TypeError, match=f"{name}: correction must be a number, got 'no'"):
            op(x, -1, "no")


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *args):
        return None


@pytest.mark.covering(1)
@names
@pytest.mark.parametrize("dim", [(1,), -1], ids=str)
def test_gradients_of_any_order(name, dim, device):
    op, x = getattr(frt, name), torch.randn(3, 4, 2, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: op(x, dim=dim), x)
    assert torch.autograd.gradgradcheck(lambda x: op(x, dim=dim), x)


# --- layouts


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 3),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "strided": lambda x: x[:, ::2, 1:, ::3],
    "flipped order": lambda x: x.permute(3, 2, 1, 0),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name, dim", [
    # Sums and moments along everything; a maximum and a softmax's sum go the same ways.
    *itertools.product(("sum", "var"), (None, 1, (2, 3), (0, 2, 3))),
    *itertools.product(("amax", "logsumexp"), (1, (2, 3)))], ids=str)
def test_layouts(name, dim, layout, device):
    compare(name, LAYOUTS[layout](torch.randn(4, 6, 9, 16, device=device)), dim)


@pytest.mark.gpu
def test_pointers_that_are_not_aligned():
    x = torch.randn(1 + 64 * 128, device="cuda")[1:].view(64, 128)
    for dim in (None, 0, 1):
        for name in NAMES:
            compare(name, x, dim)


def test_a_sums_gradient_takes_no_memory(device):
    x = torch.randn(64, 32, device=device, requires_grad=True)
    for dim in (None, 0, 1):
        for name in ("sum", "mean"):
            (grad,) = torch.autograd.grad(getattr(frt, name)(x, dim).sum(), x)
            (expected,) = torch.autograd.grad(getattr(torch, name)(x, dim).sum(), x)
            assert torch.equal(grad, expected)
            assert 0 in grad.stride()


# --- edges


@pytest.mark.covering(1)
@names
@pytest.mark.parametrize(
    "shape, dim", [((4, 1), -1), ((1, 5), 0), ((1, 1), None), ((), None), ((), -1), ((3,), 0)]
)
def test_few_elements(name, shape, dim, device):
    x = torch.randn(shape, device=device)
    op = getattr(frt, name)
    more = {"correction": 0} if name in ("var", "std") else {}
    torch.testing.assert_close(op(x, dim=dim, **more), op.reference(x, dim=dim, **more))


EMPTY = {
    "sum": 0.0,
    "mean": math.nan,
    "sum_squared": 0.0,
    "mean_abs": math.nan,
    "var": math.nan,
    "std": math.nan,
    "norm": 0.0,
    "logsumexp": -math.inf,
    "row_reduce": 0.0,
}


@pytest.mark.parametrize("name", EMPTY)
def test_of_no_elements(name, device):
    op = getattr(frt, name)
    x = torch.ones(3, 0, device=device, requires_grad=True)
    out = op(x, dim=1)
    assert out.tolist() == pytest.approx([EMPTY[name]] * 3, nan_ok=True)
    assert torch.autograd.grad(out.sum(), x)[0].shape == (3, 0)
    assert op(x, dim=0, keepdim=True).shape == (1, 0)
    assert op(x).tolist() == pytest.approx(EMPTY[name], nan_ok=True)


@pytest.mark.parametrize("name", ["amax", "amin", "argmax", "argmin"])
def test_no_maximum_of_nothing(name):
    with pytest.raises(
        IndexError,
        match=rf"{name}: a dimension that is reduced must not be empty, got x of "
        r"shape \(3, 0\)",
    ):
        getattr(frt, name)(torch.ones(3, 0), 1)
    assert getattr(frt, name)(torch.ones(3, 0), 0).shape == (0,)


@pytest.mark.covering(1)
@pytest.mark.parametrize("columns", [255, 257, 262_144, 1_000_003])
@pytest.mark.parametrize("name", ["sum", "var", "amax", "logsumexp", "norm"])
def test_long(name, columns, device):
    x = torch.randn(2, columns, device=device)
    compare(name, x, -1)
    compare(name, x.t().contiguous(), 0)
    compare(name, x, None)


@pytest.mark.parametrize("columns", [2, 24, 64, 200, 256, 392])
def test_narrow_rows(columns, device):
    """Several to a warp, whose last ones are not there; many have blocks of their own kind."""
    for dtype, rows in ((torch.bfloat16, 20_011 if device == "cuda" else 301), (torch.float32, 301)):
        x = make((rows, columns), dtype, device)
        for name in ("sum", "var", "logsumexp"):
            compare(name, x, -1)
        assert torch.equal(frt.argmax(x, -1), torch.argmax(x, -1))


@pytest.mark.parametrize("columns", [300_000, 2_000_000])
def test_few_long_rows(columns, device):
    """A cluster each, or a whole device."""
    x = torch.randn(3, columns if device == "cuda" else columns // 8, device=device)
    for name in ("sum", "logsumexp"):
        compare(name, x, -1)
        compare(name, x[:1], -1)


@pytest.mark.slow
@pytest.mark.gpu
def test_a_hundred_million_rows():
    x = torch.randn(100_000_000, 4, device="cuda", dtype=torch.bfloat16)
    for name in ("sum", "amax"):
        assert torch.equal(getattr(frt, name)(x, -1), getattr(torch, name)(x.float(), -1).bfloat16())
    assert torch.equal(frt.argmax(x, -1), x.argmax(-1))


@pytest.mark.slow
@pytest.mark.gpu
def test_more_than_2_31_elements():
    x = torch.ones(2**31 + 1024, device="cuda", dtype=torch.int8).to(torch.float16)
    assert frt.mean(x).item() == 1
    assert frt.sum(x.view(-1, 1024), 0).float().div(2**21 + 1).sub(1).abs().max().isinf()  # beyond float16
    assert torch.equal(frt.amax(x.view(1024, -1), 0), torch.ones_like(x[: 2**21 + 1]))


SPECIAL = {
    "NaN": [1, math.nan, 2],
    "inf": [1, math.inf, 2],
    "-inf": [-math.inf] * 3,
    "both": [math.inf, -math.inf, 0],
    "large": [1e37, -1e37, 3e37],
    "tiny": [1e-40, 3e-40, -1e-45],
    "equal": [0.1] * 3,
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", SPECIAL)
@names
def test_special_values(name, kind, device):
    row = torch.tensor(SPECIAL[kind], device=device)
    op = getattr(frt, name)
    for x, dim in ((row.repeat(4, 9), -1), (row.repeat(9).view(-1, 1).repeat(1, 4).contiguous(), 0)):
        assert_as_accurate(op(x, dim=dim), op.reference(x, dim=dim), op.reference(x.double(), dim=dim))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("value", [0.1, 1e4, 1e30])
def test_equal_elements_have_no_variance(dim, value, device):
    for dtype in (torch.float32, torch.bfloat16):
        assert not frt.var(torch.full((300, 500), value, dtype=dtype, device=device), dim).any()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("offset", [0.0, 100.0, 1e4])
def test_variance_far_from_0(dim, offset, device):
    x = torch.randn(1024, 512, device=device) + offset
    x[0] += 100  # what comes first is not typical
    compare("var", x, dim)


def test_equal_maxima_share_the_gradient(device):
    x = torch.tensor([[2.0, 1, 2, 0], [3, 3, 3, 3]], device=device, requires_grad=True)
    for dim in (0, 1, None):
        for name in ("amax", "amin"):
            grads = [
                torch.autograd.grad(f(x, dim).sum(), x)[0]
                for f in (getattr(frt, name), getattr(frt, name).reference)
            ]
            assert torch.equal(*grads)


@names
def test_two_calls_give_the_same_bits(name, device):
    x = torch.randn(1000, 700, device=device)
    for dim in (0, 1, None):
        first = evaluate(getattr(frt, name), (x,), {"dim": dim})
        second = evaluate(getattr(frt, name), (x,), {"dim": dim})
        assert_same_bits(first[0], second[0])
        assert_same_bits(first[1][0], second[1][0])


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch):
    x = torch.randn(700, 900)
    before = [frt.sum(x, dim) for dim in (0, 1, None)]
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for dim, one in zip((0, 1, None), before, strict=True):
            assert_same_bits(frt.sum(x, dim), one)
    finally:
        torch.set_num_threads(count)
    assert threads.SERIAL_BELOW < x.numel()


# --- calls


def test_arrays():
    x = np.random.default_rng(0).normal(size=(6, 7)).astype(np.float32)
    out = frt.sum(x, 0)
    assert isinstance(out, np.ndarray)
    np.testing.assert_allclose(out, x.sum(0), rtol=1e-5)
    np.testing.assert_array_equal(frt.argmax(x, 1), x.argmax(1))
    np.testing.assert_allclose(frt.logsumexp(x), np.log(np.exp(x).sum()), rtol=1e-5)


ERRORS = [
    (lambda x: frt.sum(x, 2), IndexError, r"sum: dim must be in \[-2, 2\), got 2"),
    (lambda x: frt.argmin(x, -3), IndexError, r"argmin: dim must be in \[-2, 2\), got -3"),
    (lambda x: frt.mean(x, (0, -2)), ValueError, r"mean: dim names a dimension twice, got \(0, -2\)"),
    (lambda x: frt.amax(x, "0"), TypeError, "amax: dim must be None, an int or ints, got '0'"),
    (lambda x: frt.argmax(x, (0, 1)), TypeError, r"argmax: dim must be None or an int, got \(0, 1\)"),
    (lambda x: frt.sum(3.0), TypeError, "sum: x must be a tensor or an array, got float"),
    (
        lambda x: frt.var(x.int(), 0),
        TypeError,
        "var: x must be a floating-point tensor, got one of torch.int32",
    ),
    (
        lambda x: frt.mean(x.int()[:0], 0),
        TypeError,
        "mean: x must be a floating-point tensor, got one of torch.int32",
    ),
    (lambda x: frt.sum(x, dtype=torch.int32), TypeError, "sum: dtype must be None or one of torch.float16, "
     "torch.bfloat16, torch.float32, torch.float64, got torch.int32"),
    (lambda x: frt.mean(x, dtype="wide"), TypeError, "mean: dtype must be None or one of .*, got 'wide'"),
    (lambda x: frt.mean(x, dtype="sum"), TypeError, "mean: dtype must be None or one of .*, got 'sum'"),
    (lambda x: frt.norm(x, [1]), TypeError, r"norm: p must be a number, got \[1\]"),
    (lambda x: frt.norm(x, "fro"), TypeError, "norm: p must be a number, got 'fro'"),
    (lambda x: frt.norm(x, None), TypeError, "norm: p must be a number, got None"),
    (lambda x: frt.norm(x, math.nan), ValueError, "norm: p must be a number, got nan"),
    (lambda x: frt.norm(x, True), TypeError, "norm: p must be a number, got True"),
    (lambda x: frt.norm(x, 1, True), TypeError, "norm: dim must be None, an int or ints, got True"),
    (
        lambda x: frt.row_reduce(x, 0, None, "median"),
        ValueError,
        "row_reduce: op must be one of sum, mean, max, min, got 'median'",
    ),
    (
        lambda x: frt.row_reduce(x, 0, 2),
        TypeError,
        "row_reduce: map must be None, a name, or a function of one traced value, got int",
    ),
    (
        lambda x: frt.row_reduce(x, 0, "cube"),
        ValueError,
        "row_reduce: map must be None, a function of one traced value, or one of .*relu.*, got 'cube'",
    ),
    (
        lambda x: frt.row_reduce(x, 0, torch.nn.PReLU()),
        TypeError,
        "row_reduce: map must be None, a name, a function of one traced value or a module without "
        "parameters, got a PReLU",
    ),
]


@pytest.mark.parametrize("call, kind, text", ERRORS, ids=[text[:30] for _, _, text in ERRORS])
def test_errors(call, kind, text):
    with pytest.raises(kind, match=text):
        call(torch.randn(3, 4))


def test_inside_torch_compile():
    def function(x):
        return frt.sum(x, 0).sin() + frt.var(x, 0) * frt.amax(x)

    x = torch.randn(20, 30, requires_grad=True)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for f in (compiled, compiled):
        torch.testing.assert_close(f(x), function(x))
    torch.testing.assert_close(*(torch.autograd.grad(f(x).sum(), x)[0] for f in (compiled, function)))


def test_other_names():
    x = torch.randn(5, 6)
    assert torch.equal(frt.ops.reduce_sum_squared(x, 0), frt.sum_squared(x, 0))
    assert torch.equal(frt.ops.reduce_mean_abs(x), frt.mean_abs(x))
    assert torch.equal(frt.ops.sum_squared_cpu(x), frt.sum_squared(x))
    with pytest.raises(TypeError, match="must be a CUDA tensor"):
        frt.kernels.reduction.sum_squared(x)


def test_the_gradient_of_a_maximum_that_is_nan(device):
    x = torch.tensor([[math.nan, 1.0, 2.0], [1.0, 1.0, 0.0]], device=device, requires_grad=True)
    for name in ("amax", "amin"):
        found, expected = (torch.autograd.grad(f(x, 1).sum(), x)[0]
                           for f in (getattr(frt, name), getattr(torch, name)))
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("scale", [1e20, 1e-30, 1e37, 1e-22, 1.0, 0.0])
def test_the_gradient_of_a_deviation_whose_square_is_out_of_range(scale, device):
    x = (torch.tensor([[1.0, 0.0, 2.0]] * 5, device=device) * scale).requires_grad_()
    found, expected = (torch.autograd.grad(f(x, 1).sum(), x)[0] for f in (frt.std, torch.std))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["norm", "std"])
def test_second_derivatives_where_the_first_is_0(name, device):
    x = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 4.0]], device=device, requires_grad=True)
    g = torch.ones(2, device=device, requires_grad=True)
    first, = torch.autograd.grad(getattr(frt, name)(x, dim=1), x, g, create_graph=True)
    of_x, of_g = torch.autograd.grad((first * torch.tensor([1.0, 2.0, 3.0], device=device)).sum(), (x, g))
    assert not of_x[0].any()
    assert of_g[0] == 0
    assert of_x.isfinite().all() and of_g[1] > 0


def test_what_is_refused_is_refused_after_a_call_that_is_equal():
    x = torch.randn(2, 3)
    frt.sum(x, (0, 1))
    for dim in ((0, 1.0), (False, True)):
        with pytest.raises(TypeError, match=re.escape(f"sum: dim must be None, an int or ints, got {dim}")):
            frt.sum(x, dim)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dim", [-1, 0, None])
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("function", [frt.exp, frt.sigmoid, frt.tanh, frt.gelu], ids=lambda f: f.__name__)
def test_extremes_of_functions_of_16_bits(function, op, dim, device):
    """Their gradients find again, in another kernel, what the first one has stored."""
    x = torch.randn(16, 20, device=device).bfloat16()
    grads = []
    for t in (x, x.float()):
        leaf = t.clone().requires_grad_()
        frt.row_reduce(leaf, dim, function, op).sum().backward()
        grads.append(leaf.grad.float())
    torch.testing.assert_close(*grads, rtol=0.02, atol=0.02)
