"""Kernels over rows on the CPU: norms, softmax, losses, by operators made here from their expressions."""

import itertools

import pytest
import torch
from checking import assert_as_accurate, assert_same_bits, check, derivatives, evaluate, lost, wide
from torch.nn import functional as F

from fusionrt.cpu import rows, team, threads
from fusionrt.expr import argument, cast, exp, log, node, normcdf, random_bits, row_mean, row_sum, where
from fusionrt.op import Operator
from fusionrt.rehearsal import collecting
from fusionrt.row_op import RowOperator
from fusionrt.rowwise import (
    is_column,
    log_softmax,
    rms_scale,
    row_max,
    softmax,
    softmax_terms,
    standardize,
    taken,
    up_to_column,
)

X, SECOND, THIRD = (argument(f"a{k}") for k in range(3))
NUMBERS = [argument(f"a{k}", uniform=True) for k in range(4)]
EPS = 1e-5


def standardized(row_dims):
    y, mean, rstd = standardize(X, NUMBERS[3])
    return RowOperator("layer_norm", ["x", "weight", "bias", "eps"], [y * SECOND + THIRD, mean, rstd], None,
                       {3}, row_dims=row_dims)


def operator(name, root, params=("x",), uniform=()):
    return RowOperator(name, params, [root], None, uniform)


MOST, TOTAL = softmax_terms(X)
LAYER_NORM, GROUP_NORM = standardized(1), standardized(2)
RMS_NORM = operator("rms_norm", rms_scale(X, NUMBERS[2])[0] * SECOND, ("x", "weight", "eps"), {2})
SOFTMAX = operator("softmax", softmax(X)[0])
LOG_SOFTMAX = operator("log_softmax", log_softmax(X)[0])
LOGSUMEXP = operator("logsumexp", MOST + log(TOTAL))
CROSS_ENTROPY = operator("cross_entropy", log(TOTAL) - (taken(X, NUMBERS[1]) - MOST), ("x", "target"), {1})
SUM, MEAN, MAX = (operator(*one) for one in (("sum", row_sum(X)), ("mean", row_mean(X)), ("max", row_max(X))))


def accumulated_in(x):
    """As an output of one value a row is."""
    return x if x.dtype == torch.float64 else x.float()


OPS = {
    "layer_norm": (lambda x, w, b: LAYER_NORM(x, w, b, EPS)[0],
                   lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b)),
    "rms_norm": (lambda x, w: RMS_NORM(x, w, EPS), lambda x, w: F.rms_norm(x, x.shape[-1:], w, EPS)),
    "softmax": (SOFTMAX, lambda x: x.softmax(-1)),
    "log_softmax": (LOG_SOFTMAX, lambda x: x.log_softmax(-1)),
    "logsumexp": (LOGSUMEXP, lambda x: accumulated_in(x).logsumexp(-1, keepdim=True)),
    "cross_entropy": (CROSS_ENTROPY, lambda x, t: -accumulated_in(x).log_softmax(-1).gather(-1, t)),
    "sum": (SUM, lambda x: accumulated_in(x).sum(-1, keepdim=True)),
    "mean": (MEAN, lambda x: accumulated_in(x).mean(-1, keepdim=True)),
    "max": (MAX, lambda x: accumulated_in(x).amax(-1, keepdim=True)),
}
ops = pytest.mark.parametrize("name", OPS)


def arguments(name, shape, dtype=torch.float32):
    x = torch.randn(shape, dtype=torch.float64).mul(2).to(dtype)
    n_weights = {"layer_norm": 2, "rms_norm": 1}.get(name, 0)
    weights = [torch.randn(shape[-1:]).to(dtype) for _ in range(n_weights)]
    targets = [torch.randint(shape[-1], (*shape[:-1], 1))] if name == "cross_entropy" else []
    return (x, *weights, *targets)


def of_norms(reference):
    """What is added up in the gradient of a weight: nothing else is summed to a smaller shape."""
    def magnitudes(args, kwargs, grad_output):
        with torch.no_grad():
            y = reference(args[0], torch.ones_like(args[1]), *(torch.zeros_like(b) for b in args[2:]))
        terms = [grad_output, grad_output * y, grad_output][:len(args)]
        return [t.abs().sum_to_size(a.shape) for t, a in zip(terms, args, strict=True)]

    return magnitudes


def cancels(name, x, *weights):
    """The magnitudes of what is added up in a result."""
    if name == "layer_norm":
        w, b = (t.double().abs() for t in weights)
        return F.layer_norm(x.double(), x.shape[-1:], eps=EPS).abs() * w + b
    return x.double().abs().sum(-1, keepdim=True) * {"sum": 1, "mean": 1 / x.shape[-1]}.get(name, 0)


def compare(name, args):
    function, reference = OPS[name]
    if name in ("logsumexp", "cross_entropy"):
        return compare_losses(function, reference, args)
    magnitudes = of_norms(reference) if "norm" in name else lambda args, *_: [args[0].abs()]
    extra = lost(cancels(name, *args), args[0].dtype)
    return check(function, args, reference=reference, magnitudes=magnitudes, extra=extra)


def compare_losses(function, reference, args):
    """Their gradients go through the maximum, whose derivative cancels but for rounding errors of 1."""
    exact, gradients = evaluate(reference, [wide(a) for a in args])
    found, (gradient,) = evaluate(function, args)
    assert_as_accurate(found, reference(*args), exact, near=exact)
    dtype = args[0].dtype
    atol = 1e-14 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(gradient, gradients[0].to(dtype), rtol=4 * torch.finfo(dtype).eps, atol=atol)


def text(op, *args):
    with collecting("cpu") as problems:
        op(*(a.to("meta") if torch.is_tensor(a) else a for a in args))
    (problem,) = problems
    return rows.generate(problem)


# --- accuracy


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@ops
@pytest.mark.parametrize("shape", [(5, 2), (3, 4, 7), (4, 1023), (3, 1025)], ids=str)
def test_results_and_gradients(name, shape, dtype):
    compare(name, arguments(name, shape, dtype))


@pytest.mark.parametrize("name", [name for name in OPS if name != "layer_norm"])
def test_one_column(name):
    compare(name, arguments(name, (3, 1)))


def test_a_layer_norm_of_one_column_is_its_bias():
    x, w, b = (a.requires_grad_() for a in arguments("layer_norm", (3, 1)))
    y = LAYER_NORM(x, w, b, EPS)[0]
    assert torch.equal(y, b.expand(3, 1))
    found = torch.autograd.grad(y.sum(), (x, w, b))
    assert [g.flatten().tolist() for g in found] == [[0, 0, 0], [0], [3]]


@pytest.mark.covering(1)
@ops
@pytest.mark.parametrize("columns", [262_144, 1_000_003])
def test_long_rows(name, columns):
    compare(name, arguments(name, (1, columns)))


@pytest.mark.parametrize("columns", [1000, 1_000_003])
@pytest.mark.parametrize("offset", [0.0, 1.0, 1000.0])
def test_sums_lose_no_more_than_torchs(columns, offset):
    x = torch.rand(3, columns) + offset
    exact, torchs = x.double().sum(-1, keepdim=True), x.sum(-1, keepdim=True)
    assert_as_accurate(SUM(x), torchs, exact)
    assert (SUM(x) - exact).abs().max() <= 2 * torch.finfo(torch.float32).eps * exact.max()


@pytest.mark.parametrize("columns", [1000, 4096, 10_000, 65_536])
def test_sums_whose_terms_cancel_are_as_near_as_torchs(columns):
    x = torch.randn(64, columns)
    exact = x.double().sum(-1)
    ours, torchs = ((found - exact).square().mean().sqrt() for found in (SUM(x)[:, 0], torch.stack(
        [row.sum() for row in x])))
    assert ours <= 1.5 * torchs


def test_mean_and_rstd_of_16_bit_rows_are_float32():
    x = torch.randn(5, 100).bfloat16()
    _, mean, rstd = LAYER_NORM(x, torch.ones(100), torch.zeros(100), EPS)
    assert mean.dtype == rstd.dtype == torch.float32
    assert mean.shape == rstd.shape == (5, 1)
    exact = x.double()
    torch.testing.assert_close(mean, exact.mean(-1, keepdim=True).float(), atol=1e-7, rtol=1e-6)
    expected = (exact.var(-1, correction=0, keepdim=True) + EPS).rsqrt().float()
    torch.testing.assert_close(rstd, expected, atol=0, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_another_dtype(dtype):
    """16-bit rows with float32 weights: the result is that of float32, rounded once."""
    x, w, b = torch.randn(33, 65).to(dtype), torch.randn(65, requires_grad=True), torch.randn(65)
    x.requires_grad_()
    y = LAYER_NORM(x, w, b, EPS)[0]
    theirs = F.layer_norm(x.float(), (65,), w, b)
    assert y.dtype == dtype
    assert_as_accurate(y, theirs.to(dtype), F.layer_norm(x.double(), (65,), w.double(), b.double()))
    g = torch.randn(33, 65).to(dtype)
    found, expected = (torch.autograd.grad(out, (x, w), g.to(out.dtype)) for out in (y, theirs))
    assert [f.dtype for f in found] == [dtype, torch.float32]
    for ours, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torchs, atol=1e-4, rtol=torch.finfo(ours.dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_near_certain_classes_keep_their_small_loss(dtype):
    """The logarithm of a sum that is hardly more than one."""
    x = torch.tensor([[9.0, 0.0, 0.5], [0.0, 12.0, 1.0]]).to(dtype)
    assert_as_accurate(LOG_SOFTMAX(x), x.log_softmax(-1), x.double().log_softmax(-1), near=x.double())


# --- gradients of any order


@ops
def test_derivatives(name):
    args = arguments(name, (3, 5), torch.float64)
    torch.testing.assert_close(*(derivatives(f, args) for f in OPS[name]))


def test_derivatives_of_statistics():
    def formula(x, w, b):
        return (F.layer_norm(x, (5,), w, b, EPS), x.mean(-1, keepdim=True),
                (x.var(-1, correction=0, keepdim=True) + EPS).rsqrt())

    args = arguments("layer_norm", (3, 5), torch.float64)
    torch.testing.assert_close(*(derivatives(f, args) for f in (lambda *a: LAYER_NORM(*a, EPS), formula)))


def test_ties_share_the_gradient_of_a_maximum():
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], requires_grad=True)
    MAX(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[0, 0.5, 0.5], [1 / 3] * 3]))


# --- layouts


def views():
    x = torch.randn(6, 10, 14, dtype=torch.float64).float()
    return {"transposed": x.transpose(1, 2), "every other": x[..., ::2], "from the second": x[:, :, 1:],
            "rows apart": x[:, ::3], "permuted": x.permute(2, 0, 1), "outermost": x.permute(1, 2, 0),
            "broadcast rows": x[:, :1].expand(6, 9, 14), "broadcast columns": x[..., :1].expand(6, 10, 8),
            "one row": x[0, 0], "mirrored in memory": x.permute(2, 1, 0)}


@pytest.mark.covering(1)
@pytest.mark.parametrize("view", views())
@pytest.mark.parametrize("name", ["layer_norm", "cross_entropy"])
def test_layouts(name, view):
    x = views()[view]
    compare(name, (x, *arguments(name, tuple(x.shape))[1:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 5, 40), (2, 1025, 16), (1, 7, 33), (2, 17000, 3)], ids=str)
def test_rows_side_by_side(shape, dtype, monkeypatch):
    """Over the dimension before the last: rows are turned over, unless they are too long."""
    monkeypatch.setattr(RowOperator, "_lie_across", lambda *_: False, raising=False)
    x, scale = arguments("softmax", shape, dtype)[0], torch.rand(shape[0], 1, shape[2]).to(dtype)
    op = operator("scaled_softmax", softmax(X)[0] * NUMBERS[1], ("x", "scale"), {1})
    found = op(x.transpose(1, 2), scale.transpose(1, 2)).transpose(1, 2)
    assert found.is_contiguous()
    assert_as_accurate(found, x.softmax(1) * scale, x.double().softmax(1) * scale, near=x.double())
    assert ("first_row" in text(SOFTMAX, x.transpose(1, 2))) == (shape[1] < 17000)


def test_one_operand_lies_across():
    x, y = torch.randn(50, 300, requires_grad=True), torch.randn(300, 50).t()
    op = operator("softmax_plus", softmax(X)[0] + SECOND, ("x", "y"))
    assert "a1_memory" in text(op, x, y)
    assert "a0_memory" not in text(op, x, y)
    torch.testing.assert_close(op(x, y), x.softmax(-1) + y)
    found, expected = (torch.autograd.grad(f(x), x, y)[0] for f in (SOFTMAX, lambda x: x.softmax(-1)))
    torch.testing.assert_close(found, expected)


def test_result_has_the_layout_of_the_input():
    x = torch.randn(2, 6, 5, 4).to(memory_format=torch.channels_last)
    assert SOFTMAX(x).is_contiguous(memory_format=torch.channels_last)
    assert_as_accurate(SOFTMAX(x), x.softmax(-1), x.double().softmax(-1))


@pytest.mark.parametrize("strided", [False, True])
def test_rows_of_two_dimensions(strided):
    """Groups of channels with weights a channel: two dimensions that cannot be merged."""
    x = torch.randn(3, 8, 10, 2 if strided else 1)[..., 0].requires_grad_()
    w, b = (torch.randn(4, 2, 1, requires_grad=True) for _ in range(2))
    y, mean, _ = GROUP_NORM(x.view(3, 4, 2, 10) if not strided else x.unflatten(1, (4, 2)), w, b, EPS)
    expected = F.group_norm(x, 4, w.flatten(), b.flatten())
    torch.testing.assert_close(y.flatten(1, 2), expected, atol=2e-6, rtol=2e-6)
    assert mean.shape == (3, 4, 1, 1)
    g = torch.randn_like(expected)
    found = torch.autograd.grad(y, (x, w, b), g.view_as(y))
    for ours, torchs in zip(found, torch.autograd.grad(expected, (x, w, b), g), strict=True):
        torch.testing.assert_close(ours, torchs, atol=2e-5, rtol=2e-5)


def test_scratch_of_rows_of_two_dimensions():
    """A softmax over both, whose exponentials are kept, of a tensor with a weight that keeps them apart."""
    op = RowOperator("softmax_of_two", ["x", "weight"], [softmax(X * SECOND)[0]], row_dims=2)
    x, w = torch.randn(3, 5, 7), torch.randn(5, 1)
    torch.testing.assert_close(op(x, w), (x * w).flatten(1).softmax(1).view_as(x))


def test_no_rows():
    for shape in ((0, 7), (3, 0)):
        assert SOFTMAX(torch.randn(shape)).shape == shape
    assert LOGSUMEXP(torch.randn(0, 7)).shape == (0, 1)


# --- columns


@pytest.mark.parametrize("target_dtype", [torch.int64, torch.int32, torch.float32])
def test_taken_is_zero_outside_of_the_row(target_dtype):
    op = operator("taken", taken(X, NUMBERS[1]), ("x", "target"), {1})
    x = torch.randn(6, 5)
    target = torch.tensor([0, 4, -1, 5, -100, 2]).to(target_dtype)[:, None]
    expected = torch.stack([x[0, 0], x[1, 4], *torch.zeros(3), x[5, 2]])[:, None]
    assert torch.equal(op(x, target), expected)
    assert torch.equal(op(x, 3), x[:, 3:4])


def test_taken_of_strided_and_of_two_dimensions():
    op = RowOperator("taken_of_two", ["x", "y", "target"], [taken(X, NUMBERS[2]) + 0 * row_sum(SECOND)], None,
                     {2}, row_dims=2)
    x, target = torch.randn(4, 3, 10)[..., ::2], torch.tensor([0, 14, 7, 15])
    found = op(x, torch.ones(3, 1), target.view(4, 1, 1)).flatten()
    flat = x.flatten(1)
    assert torch.equal(found, torch.stack([flat[0, 0], flat[1, 14], flat[2, 7], torch.zeros(())]))


@pytest.mark.parametrize("columns", [7, (1 << 24) + 3])
def test_columns_are_compared_as_integers(columns):
    """Beyond 2^24 float32 has no odd numbers."""
    at = operator("at", cast(where(is_column(NUMBERS[1]), 1, 0), "uint8"), ("x", "target"), {1})
    up_to = operator("up_to", row_sum(where(up_to_column(NUMBERS[1]), 1, 0) + 0 * X), ("x", "target"), {1})
    x = torch.zeros(1, dtype=torch.float16).expand(1, columns)
    target = torch.tensor([[columns - 2]])
    assert at(x, target).nonzero().tolist() == [[0, columns - 2]]
    assert up_to(x, target).item() == torch.tensor(columns - 1.0).item()


def test_a_computed_column():
    op = operator("causal", where(up_to_column(NUMBERS[1] + 2), X, -float("inf")), ("x", "row"), {1})
    x = torch.randn(5, 6)
    rows_of = torch.arange(5.0)[:, None]
    assert torch.equal(op(x, rows_of), torch.where(torch.arange(6) <= rows_of + 2, x, -torch.inf))


def test_a_column_is_one_value_a_row():
    op = operator("varying", where(is_column(SECOND), X, 0), ("x", "target"))
    with pytest.raises(TypeError, match="varying: a column must be one value a row"):
        op(torch.randn(3, 4), torch.arange(4))


def test_taken_is_of_an_argument():
    op = operator("doubled", taken(2 * X, NUMBERS[1]), ("x", "target"), {1})
    with pytest.raises(TypeError, match=r"doubled: taken\(\) reads a tensor argument, got an expression"):
        op(torch.randn(3, 4), 1)


# --- special values


def special_rows():
    inf, nan = float("inf"), float("nan")
    return torch.tensor([[1.0, nan, 2, 3], [inf, 0, 1, 2], [-inf, 0, 1, 2], [-inf] * 4, [inf, -inf, 0, 1],
                         [1e37] * 4, [3e38, -3e38, 0, 0], [1e-40, 2e-40, -1e-40, 0], [0.1] * 4, [nan] * 4,
                         [inf] * 4, [-0.0, 0, -0.0, 0], [100, -100, 0, 1]])


@pytest.mark.parametrize("repeat", [1, 25], ids=["short rows", "long rows"])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp", "sum", "mean", "max"])
def test_special_values(name, repeat):
    x = special_rows().repeat(1, repeat)
    if name == "logsumexp":  # an infinite maximum is its formula's NaN
        x = x[(x != torch.inf).all(-1)]
    function, reference = OPS[name]
    torch.testing.assert_close(function(x), reference(x), equal_nan=True, atol=0, rtol=1e-6)


@pytest.mark.parametrize("repeat", [1, 25], ids=["short rows", "long rows"])
def test_special_values_of_norms(repeat):
    x = special_rows().repeat(1, repeat)
    w, b = torch.ones(x.shape[-1]), torch.zeros(x.shape[-1])
    centered = x - x.double().mean(-1, keepdim=True).float()  # a sum in float32 may overflow
    expected = centered * (centered.square().mean(-1, keepdim=True) + EPS).rsqrt()
    torch.testing.assert_close(LAYER_NORM(x, w, b, EPS)[0], expected, equal_nan=True, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(RMS_NORM(x, w, EPS), F.rms_norm(x, x.shape[-1:], w, EPS), equal_nan=True)


@pytest.mark.parametrize("columns", [3, 64, 1000, 4097])
def test_a_nan_anywhere_is_the_maximum(columns):
    for at in {0, columns // 2, columns - 1}:
        x = torch.randn(2, columns)
        x[1, at] = -torch.tensor(float("nan"))
        found = MAX(x).flatten()
        assert found[0] == x[0].max()
        assert found[1].isnan()


def test_constant_rows_have_no_variance():
    x = torch.tensor([[0.1], [3.0], [1e-3]]).expand(3, 1000)
    y, mean, rstd = LAYER_NORM(x.contiguous(), torch.ones(1000), torch.zeros(1000), EPS)
    assert y.abs().max() < 1e-4
    torch.testing.assert_close(mean, x[:, :1], atol=0, rtol=1e-6)
    torch.testing.assert_close(rstd, torch.full((3, 1), EPS**-0.5), atol=0, rtol=1e-5)


# --- random numbers


KEPT = where(node("kept", random_bits(0), NUMBERS[1]), X, 0)


@pytest.mark.parametrize("shape", [(100, 7), (3, 512), (5, 1000), (2, 5000), (300, 1023)], ids=str)
def test_masks_are_those_of_pointwise_kernels(shape):
    pointwise = Operator("mask", ["x", "p"], [KEPT])
    over_rows = RowOperator("mask_of_rows", ["x", "p"], [KEPT + 0 * row_sum(X)], None, {1})
    x = torch.rand(shape) + 1
    torch.manual_seed(5)
    expected = pointwise(x, 0.5)
    torch.manual_seed(5)
    assert torch.equal(over_rows(x, 0.5), expected)


def test_several_streams_in_several_passes():
    """Dropout before and after a softmax: the same masks in every walk, in the result and in its gradient."""
    after = node("kept", random_bits(1), NUMBERS[1])
    op = RowOperator("dropouts", ["x", "p"], [where(after, softmax(KEPT)[0], 0)], None, {1})
    masks = Operator("masks", ["x", "p"], [KEPT, where(after, X, 0)])
    x = (torch.rand(65, 301) + 1).requires_grad_()
    torch.manual_seed(7)
    y = op(x, 0.25)
    torch.manual_seed(7)
    before, behind = (m != 0 for m in masks(x.detach(), 0.25))
    expected = (x * before).softmax(-1) * behind
    torch.testing.assert_close(y, expected)
    g = torch.randn_like(y)
    found, wanted = (torch.autograd.grad(out, x, g)[0] for out in (y, expected))
    torch.testing.assert_close(found, wanted, atol=1e-7, rtol=1e-4)


# --- threads


def everything():
    """Results and gradients, with and without scratch, of more elements than one thread takes."""
    torch.manual_seed(3)
    x = torch.randn(301, 1000, requires_grad=True)
    w, b = torch.randn(1000, requires_grad=True), torch.randn(1000, requires_grad=True)
    dropped = RowOperator("dropped_softmax", ["x", "p"], [softmax(KEPT)[0]], None, {1})
    outputs = [LAYER_NORM(x, w, b, EPS)[0], SOFTMAX(x), LOGSUMEXP(x), dropped(x, 0.5), SOFTMAX(x.t())]
    return [t for out in outputs for t in (out.detach(), *torch.autograd.grad(out.square().sum(), x))]


def test_the_number_of_threads_does_not_change_a_bit(monkeypatch):
    assert 301 * 1000 > threads.SERIAL_BELOW
    before, found = torch.get_num_threads(), []
    try:
        for n, usable in itertools.product((1, 2, 3, 8), (True, False)):
            torch.set_num_threads(n)
            if not usable:
                monkeypatch.setattr(team, "usable", lambda: False)
            found.append(everything())
            monkeypatch.undo()
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert_same_bits(a, b)


def test_fewer_rows_than_threads():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        x = torch.randn(5, 100_000)
        assert_as_accurate(SOFTMAX(x), x.softmax(-1), x.double().softmax(-1))
    finally:
        torch.set_num_threads(before)


# --- text


def test_exponentials_of_a_softmax_are_computed_once():
    found = text(SOFTMAX, torch.randn(4, 8))
    assert found.count(" exp(") == 1
    assert found.count("for j in range") == 3


def test_what_is_costly_is_computed_once():
    gelu = X * normcdf(X)
    op = operator("norm_of_gelu", rms_scale(gelu, NUMBERS[1])[0] + exp(gelu), ("x", "eps"), {1})
    x = torch.randn(4, 8)
    assert text(op, x, EPS).count(" normcdf(") == 1
    expected = F.gelu(x)
    torch.testing.assert_close(op(x, EPS), F.rms_norm(expected, (8,), eps=EPS) + expected.exp())


@pytest.mark.parametrize("columns", [9, 13, 31, 50])
def test_bits_do_not_depend_on_what_lies_beside_a_row(columns, monkeypatch):
    """Kept exponentials that begin right behind the row."""
    usual, bits = torch.empty, {}
    for gap in (0, 64, 192, 8192):
        pool = usual(1 << 16, dtype=torch.uint8)
        row = pool[1024:1024 + 4 * columns].view(torch.float32).view(1, columns)
        behind = 1024 + -(-4 * columns // 64) * 64 + gap
        row.copy_(torch.linspace(-3, 2, columns))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *size, pool=pool, behind=behind, **more: pool[
                behind:behind + size[0]] if more.get("dtype") == torch.uint8 else usual(*size, **more))
            fresh = operator(f"softmax_{gap}", softmax(X)[0])
            bits[gap] = fresh(row)
    for gap in bits:
        assert_same_bits(bits[gap], bits[8192])
