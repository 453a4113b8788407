"""Softmax along any dimension, with masks and dropout: results, gradients of any order, what is refused."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from checking import (
    BF16,
    F16,
    F32,
    F64,
    VIEWS,
    assert_as_accurate,
    assert_same_bits,
    captured,
    check,
    derivatives,
    dtypes,
)
from torch.testing import assert_close

import fusionrt as frt
from fusionrt import library, row_fusion
from fusionrt.counted import kept as kept_numbers
from fusionrt.rehearsal import collecting
from fusionrt.runtime import launch

INF = float("inf")
BOTH = pytest.mark.parametrize("op", [frt.softmax, frt.log_softmax], ids=lambda op: op.__name__)


def randn(*shape, device="cpu", dtype=F32):
    return torch.randn(shape, dtype=F64).mul(2).to(device, dtype)


def same_as_torch(op, x, extra=0.0, **options):
    """As accurate as the reference, result and gradients; where nothing passes, zeros or -inf."""
    tensors = {k: v for k, v in options.items() if torch.is_tensor(v) and v.is_floating_point()}
    fixed = {k: v for k, v in options.items() if k not in tensors}
    names = list(tensors)

    def call(function):
        return lambda x, *more: function(x, **dict(zip(names, more, strict=True)), **fixed)

    def of_reference(x, *more):
        y = call(op.reference)(x, *more)
        # Rows that are masked entirely have no gradient, which NaN times 0 would not be.
        return torch.where(y.isnan(), 0.0 if op is frt.softmax else -INF, y)

    magnitudes = functools.partial(terms, call(op.reference))
    return check(call(op), (x, *tensors.values()), reference=of_reference, magnitudes=magnitudes, extra=extra)


def terms(function, args, kwargs, grad_output):
    """What is added up in the gradient of each operand, expanded; and about how wrong its terms may be."""
    full = [a.detach().expand(grad_output.shape).clone().requires_grad_() for a in args]
    y = function(*full)
    grads = torch.autograd.grad(y, full, torch.where(y.isfinite(), grad_output, 0))
    return [(g.nan_to_num().abs() + grad_output.abs()).sum_to_size(a.shape)
            for g, a in zip(grads, args, strict=True)]


# --- accuracy


@pytest.mark.covering(1)
@dtypes
@BOTH
@pytest.mark.parametrize("shape", [(5, 2), (3, 4, 7), (4, 1023), (3, 1025), (33, 64)], ids=str)
def test_results_and_gradients(op, shape, dtype, device):
    same_as_torch(op, randn(*shape, dtype=dtype, device=device))


@pytest.mark.covering(1)
@BOTH
@pytest.mark.parametrize("columns", [262_144, 1_000_003])
def test_long_rows(op, columns, device):
    same_as_torch(op, randn(2, columns, device=device))


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("shape, dtype", [((600, 32_768), BF16), ((600, 65_528), BF16), ((300, 65_536), F32),
                                          ((40, 262_144), F32), ((40, 250_000), F32),
                                          ((80, 262_144), BF16)], ids=str)
def test_many_long_rows(op, shape, dtype):
    """The L2 is asked for later rows, but for none beyond the last."""
    same_as_torch(op, randn(*shape, device="cuda", dtype=dtype))


@pytest.mark.covering(1)
@BOTH
@pytest.mark.parametrize("dim, dtype", [
    *((dim, F32) for dim in (0, 1, 2, -2, -3)), *((0, dtype) for dtype in (F16, BF16, F64))], ids=str)
def test_every_dimension(op, dim, dtype, device):
    same_as_torch(op, randn(5, 6, 7, dtype=dtype, device=device), dim=dim)


@pytest.mark.covering(1)
@BOTH
@pytest.mark.parametrize("dim", [1, 2, 3, 0])
def test_channels_last(op, dim, device):
    x = randn(2, 6, 5, 4, device=device).to(memory_format=torch.channels_last)
    assert op(x, dim).is_contiguous(memory_format=torch.channels_last)
    same_as_torch(op, x, dim=dim)


@BOTH
@pytest.mark.parametrize("scale", [0.125, 3, -1.5, 0.0])
def test_scaled_by_a_number(op, scale, device):
    same_as_torch(op, randn(6, 33, device=device), scale=scale)


@pytest.mark.parametrize("size", [(), (64, 1), (33,), (64, 33)], ids=str)
def test_scaled_by_a_tensor(size, device):
    same_as_torch(frt.softmax, randn(64, 33, device=device), scale=randn(*size, device=device))


# --- masks


def some(*shape, device="cpu"):
    """Three in four pass, and of the first two rows none and one."""
    passed = torch.rand(shape, device=device) < 0.75
    if passed.dim() > 1 and shape[-2] > 1:
        passed[..., 0, :] = False
        passed[..., 1, :] = False
        passed[..., 1, -1] = True
    return passed


MASKS = {"full": (2, 3, 5, 9), "of queries and keys": (5, 9), "of keys": (2, 1, 1, 9), "of queries": (5, 1),
         "one row": (9,), "one": ()}


@pytest.mark.covering(1)
@BOTH
@pytest.mark.parametrize("size, dtype", [*((size, F32) for size in MASKS), ("full", BF16), ("of keys", BF16)],
                         ids=str)
def test_boolean_masks(op, size, dtype, device):
    x = randn(2, 3, 5, 9, device=device, dtype=dtype)
    same_as_torch(op, x, mask=some(*MASKS[size], device=device), scale=0.5)


@pytest.mark.covering(1)
@BOTH
@pytest.mark.parametrize("size", MASKS.values(), ids=MASKS)
def test_added_masks_and_their_gradients(op, size, device):
    same_as_torch(op, randn(2, 3, 5, 9, device=device), mask=randn(*size, device=device), scale=0.5)


@pytest.mark.covering(1)
@BOTH
@pytest.mark.parametrize("shape", [(4, 4), (3, 2, 5, 9), (7, 3), (6, 1), (1, 6), (2, 1000, 300)], ids=str)
def test_causal(op, shape, device):
    """Row i of R sees the columns up to i + C - R: the last row sees all, the first R - C see nothing."""
    x = randn(*shape, device=device)
    y, _ = same_as_torch(op, x, causal=True)
    hidden = ~torch.ones(shape[-2:], dtype=torch.bool).tril(shape[-1] - shape[-2]).expand(shape).to(device)
    assert torch.equal(y[hidden], torch.full_like(y[hidden], 0.0 if op is frt.softmax else -INF))


def test_causal_with_a_mask(device):
    x, mask = randn(2, 3, 8, 8, device=device), some(2, 1, 8, 8, device=device)
    same_as_torch(frt.softmax, x, mask=mask, causal=True)
    same_as_torch(frt.softmax, x, mask=randn(8, 8, device=device), causal=True)


@BOTH
def test_scores_of_the_least_numbers_are_no_masked_ones(op, device):
    least = torch.finfo(F32).min
    x = torch.tensor([[least, least, 5.0], [least, 2.0, 3.0], [4.0, least, 1.0]], device=device)
    passed = torch.tensor([True, True, False], device=device)
    above = torch.ones(3, 3, dtype=torch.bool, device=device).triu(1)
    for options, hidden in (({"mask": passed}, ~passed), ({"causal": True}, above)):
        leaf, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y = op(leaf, **options)
        expected = getattr(torch, op.__name__)(theirs.masked_fill(hidden, -INF), -1)
        assert_close(y, expected)
        g = torch.randn_like(y).masked_fill(hidden, 0)
        assert_close(*(torch.autograd.grad(a, b, g)[0] for a, b in ((y, leaf), (expected, theirs))))


def test_rows_of_the_least_numbers_beside_what_causality_hides(device):
    x, mask = randn(2, 9, 9, device=device), torch.zeros(9, 9, device=device)
    mask[:4], mask[4, :3] = torch.finfo(F32).min, -INF
    found = frt.softmax(x, mask=mask, causal=True)
    hidden = torch.ones(9, 9, dtype=torch.bool, device=device).triu(1) | (mask == -INF)
    assert_close(found, torch.softmax((x + mask.clamp(min=-1e30)).masked_fill(hidden, -INF), -1))


@pytest.mark.covering(1)
@BOTH
@pytest.mark.parametrize("dim", [0, 1])
def test_a_mask_along_another_dimension(op, dim, device):
    mask = some(7, 6, device=device) if dim else randn(4, 1, 6, device=device)
    same_as_torch(op, randn(4, 7, 6, device=device), dim=dim, mask=mask)


def test_rows_without_any_column_are_zeros_and_have_no_gradient(device):
    x = randn(3, 5, device=device).requires_grad_()
    mask = torch.tensor([True, False, True], device=device)[:, None]
    y = frt.softmax(x, mask=mask)
    assert torch.equal(y[1], torch.zeros(5, device=device))
    (grad,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert torch.equal(grad[1], torch.zeros(5, device=device))
    assert grad[0].any()
    y = frt.log_softmax(x, mask=mask)
    assert torch.equal(y[1], torch.full((5,), -INF, device=device))
    (grad,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert torch.equal(grad[1], torch.zeros(5, device=device))


@pytest.mark.parametrize("hidden", [float("nan"), INF, -INF, 3e38])
def test_what_is_masked_has_no_influence(hidden, device):
    x = randn(4, 6, device=device)
    mask = torch.ones(4, 6, dtype=torch.bool, device=device)
    mask[:, 2] = False
    expected = torch.softmax(x.masked_fill(~mask, -INF), -1)
    x[:, 2] = hidden
    x.requires_grad_()
    y = frt.softmax(x, mask=mask)
    assert_close(y, expected)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    assert grad.isfinite().all()
    assert torch.equal(grad[:, 2], torch.zeros(4, device=device))


# --- special values


@BOTH
@pytest.mark.parametrize("repeat", [1, 25], ids=["short rows", "long rows"])
def test_special_values(op, repeat, device):
    nan = float("nan")
    x = torch.tensor([[1.0, nan, 2, 3], [INF, 0, 1, 2], [-INF, 0, 1, 2], [-INF] * 4, [INF, -INF, 0, 1],
                      [1e37] * 4, [3e38, -3e38, 1, 0], [1e-40, 2e-40, -1e-40, 0], [0.1] * 4, [nan] * 4,
                      [INF] * 4, [-0.0, 0, -0.0, 0], [100, -100, 0, 1]]).to(device).repeat(1, repeat)
    expected = op.reference(x)
    assert_close(op(x), expected, equal_nan=True, atol=0, rtol=1e-6)
    mask = torch.ones_like(x, dtype=torch.bool)
    assert_close(op(x, mask=mask), expected, equal_nan=True, atol=0, rtol=1e-6)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_near_certain_classes_keep_their_small_loss(dtype, device):
    x = torch.tensor([[9.0, 0.0, 0.5], [0.0, 12.0, 1.0]], device=device).to(dtype)
    assert_as_accurate(frt.log_softmax(x), x.log_softmax(-1), x.double().log_softmax(-1), near=x.double())


@BOTH
def test_small_shapes(op, device):
    assert op(torch.empty(0, 7, device=device)).shape == (0, 7)
    assert op(torch.empty(3, 0, device=device)).shape == (3, 0)
    one = torch.full((3, 1), 5.0, device=device)
    assert torch.equal(op(one), op.reference(one))
    number = torch.tensor(5.0, device=device, requires_grad=True)
    assert torch.equal(op(number, 0), op.reference(number, 0))
    assert torch.autograd.grad(op(number), number)[0] == 0


# --- derivatives


OPTIONS = {"plain": {}, "scaled": {"scale": 0.5}, "masked": {"mask": torch.rand(4, 5) < 0.6},
           "causal": {"causal": True}, "epilogue": {"epilogue": frt.gelu}, "first dimension": {"dim": 0},
           "all": {"scale": 0.5, "mask": torch.rand(4, 5) < 0.8, "causal": True, "epilogue": lambda y: y * y}}


def finite(y):
    return torch.where(y.isfinite(), y, 0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("op, name", [  # what stands before and after is the same for the logarithm
    *((frt.softmax, name) for name in ("plain", "first dimension", "all")),
    *((frt.log_softmax, name) for name in ("plain", "all")),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in (  # parts of "all", or softmax has shown it
        *((frt.softmax, name) for name in ("scaled", "masked", "causal", "epilogue")),
        *((frt.log_softmax, name) for name in ("masked", "first dimension"))))])
def test_gradcheck(op, name):
    options = OPTIONS[name]
    if op is frt.log_softmax and name == "all":
        options = {**options, "epilogue": None}
    x = torch.randn(2, 4, 5, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: finite(op(x, **options)), x)
    assert torch.autograd.gradgradcheck(lambda x: finite(op(x, **options)), x)


@BOTH
def test_second_derivatives_of_mask_and_scale(op):
    args = [torch.randn(s, dtype=F64) for s in ((2, 3, 5), (3, 1), (3, 5))]
    ours, torchs = (derivatives(lambda x, scale, mask, f=f: f(x, scale=scale, mask=mask), args)
                    for f in (op, op.reference))
    assert_close(ours, torchs)


def test_two_backward_calls_give_the_same_bits_and_nothing_is_overwritten(device):
    x = randn(300, 1000, device=device).requires_grad_()
    for options in ({}, {"causal": True}, {"dim": 0}, {"epilogue": frt.sigmoid}):
        y = frt.softmax(x, **options)
        g, before = torch.randn_like(y), (x.clone(), y.clone())
        a, b = (torch.autograd.grad(y, x, g, retain_graph=True)[0] for _ in range(2))
        assert_same_bits(a, b)
        assert_same_bits(x, before[0])
        assert_same_bits(y, before[1])


def test_the_backward_pass_reads_the_result():
    x = torch.randn(4, 8, requires_grad=True)
    mask = torch.rand(4, 8) < 0.5
    for options in ({}, {"scale": 0.5}, {"mask": mask}, {"causal": True}, {"mask": mask, "causal": True}):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, k=kept: k.append(t) or t, lambda t: t):
            y = frt.softmax(x, **options)
        assert [t.data_ptr() for t in kept] == [y.data_ptr()]


@pytest.mark.parametrize("columns", [256, 4096, 131_072])
def test_one_launch_each_way(columns):
    x = torch.empty(512, columns, device="meta", dtype=BF16, requires_grad=True)
    mask = torch.empty(512, columns, device="meta", dtype=torch.bool)
    with_options = functools.partial
    for call in (frt.softmax, with_options(frt.softmax, scale=2.0, mask=mask), frt.log_softmax,
                 with_options(frt.softmax, epilogue=frt.relu), with_options(frt.attention_dropout, p=0.1)):
        with collecting() as forward:
            y = call(x)
        with collecting() as backward:
            torch.autograd.grad(y, x, torch.empty_like(y))
        assert [len(launch.sources(p)) for p in forward] == [len(launch.sources(p)) for p in backward] == [1]


# --- epilogues


@pytest.mark.parametrize(
    "epilogue", [frt.silu, "silu", torch.sqrt, lambda y: y * 2 + 1], ids=["op", "name", "torch", "plain"])
def test_epilogues(epilogue, device):
    plain = torch.nn.functional.silu if epilogue in (frt.silu, "silu") else epilogue
    check(functools.partial(frt.softmax, epilogue=epilogue), (randn(6, 70, device=device),),
          reference=lambda x: plain(torch.softmax(x, -1)))


# --- dropout


@pytest.mark.parametrize("options", [{}, {"causal": True, "scale": 0.5}], ids=["plain", "causal"])
def test_attention_dropout(options, device):
    x = randn(4, 200, 256, device=device).requires_grad_()
    torch.manual_seed(3)
    y = frt.attention_dropout(x, 0.25, **options)
    torch.manual_seed(3)
    assert_same_bits(y, frt.attention_dropout(x, 0.25, **options))
    torch.manual_seed(3)
    kept = frt.attention_dropout(torch.ones_like(x), 0.25, softmax=False) != 0
    assert abs(kept.double().mean().item() - 0.75) < 0.01
    expected = torch.where(kept, frt.softmax.reference(x, **options) / 0.75, 0)
    assert_close(y, expected, atol=1e-7, rtol=1e-5)
    g = torch.randn_like(y)
    found, again, torchs = (torch.autograd.grad(out, x, g, retain_graph=True)[0] for out in (y, y, expected))
    assert_same_bits(found, again)
    assert_close(found, torchs, atol=1e-7, rtol=1e-4)


def test_attention_dropout_that_drops_nothing_or_everything(device):
    x = randn(6, 70, device=device)
    assert_same_bits(frt.attention_dropout(x, 0.0), frt.softmax(x))
    assert_same_bits(frt.attention_dropout(x, 0.5, False), frt.softmax(x))
    assert torch.equal(frt.attention_dropout(x, 0.5, False, softmax=False), x)
    assert torch.equal(frt.attention_dropout(x, 1.0), torch.zeros_like(x))


def test_second_derivative_of_attention_dropout_has_the_same_mask():
    def seeded(x):
        torch.manual_seed(5)
        return frt.attention_dropout(x, 0.5, causal=True)

    x = torch.randn(4, 5, dtype=F64, requires_grad=True)
    assert torch.autograd.gradgradcheck(seeded, x)


# --- layouts


@pytest.mark.covering(1)
@pytest.mark.parametrize("view", VIEWS)
@BOTH
def test_layouts(op, view, device):
    x = VIEWS[view](torch.randn(6, 10, 14, device=device))
    same_as_torch(op, x)
    if view == "permuted":
        same_as_torch(op, x, causal=True)


# --- other callers


def test_causal_positions_are_kept_but_not_while_a_graph_is_made():
    kept_numbers.cache_clear()
    x = torch.randn(4, 6)
    for _ in range(3):
        frt.softmax(x, causal=True)
    assert kept_numbers.cache_info().misses == 1
    with torch.inference_mode():
        frt.softmax(torch.randn(5, 7), causal=True)
    x = torch.randn(5, 7, requires_grad=True)
    y = frt.softmax(x, causal=True, epilogue=frt.relu)  # saves them
    y.sum().backward()
    with torch._subclasses.fake_tensor.FakeTensorMode():
        frt.softmax(torch.randn(9, 11), causal=True)
    assert kept_numbers.cache_info().misses == 2


def test_kept_numbers_begin_where_vectors_do(device):
    for start, stop in ((0, 7), (99, 100), (-3, 5), (106, 4000), (-5000, -4990)):
        found = kept_numbers(start, stop, torch.zeros(1, device=device).device)
        assert found.tolist() == list(range(start, stop)) and found.data_ptr() % 16 == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic, device):
    def function(x, mask, bias):
        y = frt.softmax(x, scale=0.5, mask=mask, causal=True)
        y = y + frt.softmax(x, 1, epilogue=lambda y: y * 2) + frt.attention_dropout(x, 0.5, False, mask=bias)
        return y + frt.log_softmax(x * y)

    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
    for n in (4, 6):
        x, bias = (torch.randn(s, device=device, requires_grad=True) for s in ((2, n, 8), (8,)))
        mask = some(n, 8, device=device)
        found, expected = (f(x, mask, bias) for f in (compiled, function))
        assert_close(found, expected)
        grads = [torch.autograd.grad(out.square().sum(), (x, bias)) for out in (found, expected)]
        for a, b in zip(*grads, strict=True):
            assert_close(a, b)


def test_opcheck():
    x, mask = torch.randn(3, 5, dtype=F64, requires_grad=True), torch.rand(3, 5) < 0.5
    last = torch.tensor([[2], [3], [4]], dtype=torch.int32)
    frt.softmax(x, scale=0.5, mask=mask, causal=True)
    params = "x", "mask", "last", "number"
    operator = next(run.operator for key, run in row_fusion._made.items() if key[:2] == ("softmax", params))
    args = x, mask, last, 0.5
    torch.library.opcheck(library.overload(operator, args), args)


def test_numpy():
    x = np.random.default_rng(0).standard_normal((2, 4, 6), dtype=np.float32)
    mask = x[:1] > -1
    for options in ({}, {"dim": 1}, {"mask": mask}, {"causal": True}, {"mask": x[0], "dim": 0}):
        y = frt.softmax(x, **options)
        assert isinstance(y, np.ndarray)
        as_tensors = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
        np.testing.assert_allclose(y, frt.softmax(torch.from_numpy(x), **as_tensors).numpy())
    assert isinstance(frt.attention_dropout(x, 0.5), np.ndarray)


@pytest.mark.gpu
def test_cupy():
    cupy = pytest.importorskip("cupy")
    x = cupy.random.RandomState(0).standard_normal((4, 6))
    y = frt.softmax(x, 0, mask=x > -1)
    assert isinstance(y, cupy.ndarray)
    e = cupy.exp(x) * (x > -1)
    cupy.testing.assert_allclose(y, e / e.sum(0, keepdims=True))


@pytest.mark.gpu
def test_graphs_replay_forward_and_backward():
    x = torch.randn(64, 256, device="cuda", requires_grad=True)

    def step():
        y = frt.softmax(x, scale=0.5, causal=True, epilogue=frt.silu)
        return y, *torch.autograd.grad(y.square().sum(), x)

    graph, found = captured(step)
    with torch.no_grad():
        x.normal_()
    graph.replay()
    for a, b in zip(found, step(), strict=True):
        assert_same_bits(a, b)


def test_names_of_older_libraries():
    assert frt.kernels.attention.softmax is frt.softmax.cuda
    assert frt.kernels.attention_dropout is frt.attention_dropout.cuda
    assert frt.ops.softmax_cpu is frt.softmax.cpu


# --- what is refused


X = torch.randn(4, 16)


@dataclasses.dataclass
class Power:
    p: int

    def __call__(self, y):
        return frt.abs(y) ** self.p


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: frt.softmax(X, 2), IndexError, "softmax: dim must be in [-2, 2), got 2"),
    (lambda: frt.softmax(X, -1, torch.int32), TypeError,
     "softmax: dtype must be None or one of torch.float16, torch.bfloat16, torch.float32, torch.float64, got "
     "torch.int32"),
    (lambda: frt.softmax([1.0]), TypeError, "softmax: x must be a tensor or an array, got list"),
    (lambda: frt.softmax(X.long()), TypeError,
     "softmax: x must be a floating-point tensor, got one of torch.int64"),
    (lambda: frt.softmax(X, mask=torch.ones(4, 16, dtype=torch.int64)), TypeError,
     "softmax: mask must be boolean (True lets a score pass) or floating-point (added to the scores), got "
     "torch.int64"),
    (lambda: frt.softmax(X, mask=torch.ones(3, 4, 16)), ValueError,
     "softmax: mask must broadcast to the shape of x, (4, 16), got (3, 4, 16)"),
    (lambda: frt.log_softmax(X, mask=torch.ones(8)), ValueError,
     "log_softmax: mask must broadcast to the shape of x, (4, 16), got (8,)"),
    (lambda: frt.softmax(X, mask=0.5), TypeError, "softmax: mask must be a tensor, got float"),
    (lambda: frt.softmax(X, scale="large"), TypeError,
     "softmax: scale must be a tensor or a number, got str"),
    (lambda: frt.softmax(X, 0, causal=True), ValueError,
     "softmax: causal needs x of at least two dimensions and the last one as dim, got x of shape (4, 16) and "
     "another dim"),
    (lambda: frt.softmax(X[0], causal=True), ValueError,
     "softmax: causal needs x of at least two dimensions and the last one as dim, got x of shape (16,)"),
    (lambda: frt.softmax(X, epilogue=3), TypeError,
     "softmax: epilogue must be None, a name, or a function of one traced value, got int"),
    (lambda: frt.softmax(X, epilogue=Power(3)), TypeError,
     "softmax: epilogue must be hashable, as kernels are known by it, got one of Power (of a dataclass write "
     "frozen=True)"),
    (lambda: frt.attention_dropout(X, 1.5), ValueError,
     "attention_dropout: p must be a probability in [0, 1], got 1.5"),
    (lambda: frt.attention_dropout(X, softmax=False, causal=True), ValueError,
     "attention_dropout: scale, mask and causal need softmax=True"),
    (lambda: frt.softmax.cuda(X), TypeError, "softmax: x must be a CUDA tensor, got one on cpu"),
])
def test_errors(call, error, text):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == text


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_a_dimension_is_needed(op):
    with pytest.raises(TypeError, match=f"{op}: dim must be an integer, got None"):
        getattr(frt, op)(torch.ones(3), None)


def test_masks_and_causality_in_one_program(device):
    """Their gradients have the same text: torch must know them for different ops."""
    x, mask = torch.randn(4, 5, device=device), torch.tensor([True, False, True, True, False], device=device)
    kinds = ({"causal": True}, {"mask": mask}, {"mask": torch.randn(5, device=device)}, {"scale": 2.0})
    for options in kinds:
        found = torch.func.grad(lambda v, options=options: frt.softmax(v, **options).pow(2).sum())(x)
        leaf = x.clone().requires_grad_()
        frt.softmax(leaf, **options).pow(2).sum().backward()
        assert_close(found, leaf.grad)


def test_arrays_beside_tensors():
    """Tensors decide what comes out, as they may need a gradient."""
    x, scale = torch.randn(3, 4), torch.tensor(2.0, requires_grad=True)
    for op in (frt.softmax, frt.log_softmax):
        found = op(x.numpy(), scale=scale)
        assert isinstance(found, torch.Tensor)
        found.pow(2).sum().backward()
        assert_close(found, op(x, scale=2.0))
    assert isinstance(frt.softmax(x.numpy(), mask=np.ones((3, 4), bool)), np.ndarray)
    with pytest.raises(TypeError, match="attention_dropout: scores must be a tensor or an array, got str"):
        frt.attention_dropout("a", training=False, softmax=False)


def test_numpys_scalars_beside_tensors():
    """One that may be a number is one, others are arrays of one element."""
    x = torch.randn(3, 4)
    assert_close(frt.softmax(x, mask=np.float32(1), scale=np.float32(2)), torch.softmax(2 * x + 1, -1))
    assert_close(frt.softmax(x, mask=np.bool_(True)), torch.softmax(x, -1))
    with pytest.raises(ValueError, match=r"group_norm: weight must have one value a channel"):
        frt.group_norm(x, 2, np.float32(1))
