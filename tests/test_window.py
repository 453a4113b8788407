"""sliding_window against torch's own reductions of every window, in float64."""

import functools

import numpy as np
import pytest
import torch

from fusionrt.data import sliding_window, window_gpu
from fusionrt.data.window_rows import Request, Rows
from fusionrt.runtime import compiler

OPS = ("sum", "mean", "min", "max", "var", "std")
ops = pytest.mark.parametrize("op", OPS)
# An ulp of float32 and what sums in float64 lose; the rounding of 16-bit results; float64's own sums.
TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 4e-3, torch.float32: 1.3e-7, torch.float64: 1e-12}


def ends(window, padding):
    named = {"valid": (0, 0), "same": ((window - 1) // 2, window // 2), "causal": (window - 1, 0)}
    return named[padding] if isinstance(padding, str) else padding


def reduced(values, op, correction=1):
    if op in ("min", "max"):
        return getattr(values, f"a{op}")(-1)
    if op in ("var", "std"):
        n = values.shape[-1] - correction
        squares = (values - values.mean(-1, keepdim=True)).square().sum(-1) / max(n, 0)
        return squares.sqrt() if op == "std" else squares
    return getattr(values, op)(-1)


def by_definition(x, window, op, dim=-1, stride=1, padding="valid", min_periods=1, correction=1):
    x, (left, right) = x.double().movedim(dim, -1), ends(window, padding)
    n, results = x.shape[-1], []
    for first in range(-left, n + right - window + 1, stride):
        values = x[..., max(0, first):min(n, first + window)]
        result = reduced(values, op, correction)
        results.append(result if values.shape[-1] >= min_periods else torch.full_like(result, torch.nan))
    return torch.stack(results, -1).movedim(-1, dim)


def by_unfold(x, window, op, dim=-1):
    return reduced(x.double().unfold(dim, window, 1), op)


def assert_near(ours, exact, dtype):
    tolerance = TOLERANCE[dtype]
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=0.1 * tolerance, equal_nan=True)


def numbers(shape, dtype, device, mean=10.0):
    return (torch.randn(shape, dtype=torch.float64) * 3 + mean).to(dtype).to(device)


@pytest.mark.covering(1)
@ops
@pytest.mark.parametrize("window", [1, 2, 5, 16, 33])
@pytest.mark.parametrize(("dtype", "shape", "dim"), [
    (torch.float32, (41,), 0), (torch.float32, (3, 50), -1), (torch.float32, (2, 40, 5), 1),
    (torch.float32, (33, 70), 0), (torch.float16, (2, 50), 1), (torch.bfloat16, (33, 6), 0),
    (torch.float64, (2, 50), 1), (torch.float64, (33, 6), 0)], ids=str)
def test_every_window_is_reduced(device, op, dtype, shape, dim, window):
    x = numbers(shape, dtype, device)
    for padding in ("valid", "same", "causal", (window // 2, window - 1), (window // 2, 0)):
        for stride, least in ((1, 1), (3, 2)):
            options = {"dim": dim, "stride": stride, "padding": padding, "min_periods": min(least, window)}
            exact = by_definition(x, window, op, **options)
            assert_near(sliding_window(x, window, op, **options), exact, dtype)


@pytest.mark.covering(1)
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [34, 64, 341, 4096, 4097])
@pytest.mark.parametrize("padding", ["valid", "same", "causal", (5, 200)], ids=str)
def test_windows_of_hundreds_on_a_cpu(op, dtype, window, padding):
    """Several parts of a row, the first and the last of which reach beyond it."""
    x = numbers((2, 9_001), dtype, "cpu")
    if padding == (5, 200) and window < 200:
        padding = (5, window - 1)
    options = {"padding": padding, "min_periods": window // 2}
    assert_near(sliding_window(x, window, op, **options), by_definition(x, window, op, **options), dtype)


AROUND_A_TILE = [7, 1000, 1025, 2047, 2048, 2049, 2050, 4500, 6000]


@pytest.mark.covering(1)
@ops
@pytest.mark.parametrize(("device", "dtype", "window"), [  # tiles are a GPU's
    *(pytest.param("cpu", torch.float32, w) for w in AROUND_A_TILE if w % 2 == 0),
    *(pytest.param("cuda", dtype, w, marks=pytest.mark.gpu)
      for dtype in (torch.float32, torch.bfloat16) for w in AROUND_A_TILE)], ids=str)
def test_windows_around_the_size_of_a_tile(device, op, dtype, window):
    x = numbers((2, 6001), dtype, device)
    assert_near(sliding_window(x, window, op), by_unfold(x, window, op), dtype)
    y = numbers((6001, 3), dtype, device)
    assert_near(sliding_window(y, window, op, dim=0), by_unfold(y, window, op, dim=0), dtype)


@pytest.mark.covering(1)
@ops
@pytest.mark.parametrize("columns", [2, 8, 31, 64, 100])
def test_windows_over_outer_dimensions(device, op, columns):
    x = numbers((2, 700, columns), torch.float32, device)
    for window in (2, 9, 64, 65, 129, 130, 500, 700):
        assert_near(sliding_window(x, window, op, dim=1), by_unfold(x, window, op, dim=1), torch.float32)


@ops
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 300_000), (300_000, 2), (60_000, 40)])
def test_long_windows_on_a_gpu(op, shape):
    dim = 1 if shape[0] == 1 else 0
    x = numbers(shape, torch.float32, "cuda")
    n = x.shape[dim]
    for window in (n // 3, n - 5):  # several levels of folds
        y = sliding_window(x, window, op, dim=dim, stride=1000)
        exact = [reduced(x.double().movedim(dim, -1)[..., k:k + window], op)
                 for k in range(0, n - window + 1, 1000)]
        assert_near(y.movedim(dim, -1), torch.stack(exact, -1), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gradients_of_long_windows_on_a_gpu_are_those_of_a_cpu(dtype):
    """Which of equal elements an extreme is: there are few different ones."""
    for shape, dim, window in (((2, 90_001), 1, 40_003), ((9001, 5), 0, 4000), ((3, 20_000), 1, 3001)):
        x, found = torch.randint(-3, 4, shape).to(dtype), []
        for device in ("cpu", "cuda"):
            leaf = x.detach().clone().to(device).requires_grad_()
            sliding_window(leaf, window, "max", dim=dim, padding="causal").sum().backward()
            found.append(leaf.grad.cpu())
        assert torch.equal(*found)


@pytest.mark.gpu
@pytest.mark.slow
def test_more_elements_than_32_bits_count():
    x = torch.full((2049, 2**20), 0.5, dtype=torch.bfloat16, device="cuda")
    x[-1, -3:] = 4
    assert sliding_window(x, 4, "sum")[-1, -4:].tolist() == [2.0, 5.5, 9.0, 12.5][:4]
    assert float(sliding_window(x, 4, "max")[-1, -1]) == 4.0


@pytest.mark.parametrize(("op", "dtype", "inner", "window"), [
    ("mean", torch.float32, 1, 64), ("std", torch.float32, 1, 8), ("max", torch.bfloat16, 1, 4096),
    ("mean", torch.float32, 2048, 64), ("std", torch.float32, 2048, 512), ("std", torch.bfloat16, 2048, 64)],
    ids=str)
def test_registers_suffice(op, dtype, inner, window):
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    rows = Rows(16, 65536, inner, 65536 * inner, inner)
    kernel = window_gpu.plan(Request(op, window, 1, 0, 0, 1, 1.0), rows, dtype, False, True).kernel
    entry, _ = compiler.cubin(kernel.text, kernel.stem, "sm_90", kernel.name)
    assert not any(entry.metadata[key] for key in ("stack", "spills", "warnings"))


def test_layouts_keep_their_order_of_dimensions(device):
    base = numbers((4, 6, 10, 12), torch.float32, device)
    layouts = [base.to(memory_format=torch.channels_last), base.transpose(1, 3), base[:, ::2], base[..., 1:],
               base[..., ::2], base[:1].expand(3, 6, 10, 12), base[:, :, 1:, :], base.permute(3, 0, 2, 1)]
    for x in layouts:
        for dim in range(4):
            before = x.clone()
            y = sliding_window(x, 3, "mean", dim=dim)
            assert_near(y, by_definition(x, 3, "mean", dim), torch.float32)
            assert torch.equal(x, before)
    x = layouts[0]
    assert sliding_window(x, 3, dim=1).is_contiguous(memory_format=torch.channels_last)
    assert sliding_window(base.to(torch.bfloat16)[..., 1:], 3).is_contiguous()


@pytest.mark.covering(1)
@ops
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_what_leaves_the_window_leaves_nothing_behind(device, op, value):
    x = numbers((2, 900), torch.float32, device)
    x[0, 400] = value
    for window in (5, 300):
        y, exact = sliding_window(x, window, op), by_unfold(x, window, op)
        touched = torch.zeros(901 - window, dtype=torch.bool, device=device)
        touched[400 - window + 1:401] = True
        assert_near(y[:, ~touched], exact[:, ~touched], torch.float32)
        if op in ("var", "std"):
            assert (y[0, touched].isnan() | y[0, touched].isinf()).all() or value == 3e38
        else:
            assert_near(y[0, touched], exact[0, touched].float().double(), torch.float32)


@pytest.mark.parametrize("mean", [1e3, 1e6])
def test_data_far_from_zero_keeps_its_variance(device, mean):
    x = numbers((2, 5000), torch.float32, device, mean)
    x[1, 2500:] -= mean  # and a step
    for window in (4, 100, 3000):
        for op in ("var", "std"):
            y, exact = sliding_window(x, window, op), by_unfold(x, window, op)
            torch.testing.assert_close(y.double(), exact, rtol=2e-7, atol=0)
    constant = torch.full((3000,), 1234.567, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        assert not sliding_window(constant.to(dtype), 50, "var").any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_an_outlier_costs_windows_no_accuracy(device, dtype):
    x = numbers((1, 30_000), dtype, device, 0)
    x[0, 15_000] = 700
    for window in (9, 300, 3000, 14_000):
        y = sliding_window(x, window, "var", stride=7)
        exact = [reduced(x.double()[:, k:k + window], "var") for k in range(0, 30_001 - window, 7)]
        assert_near(y, torch.stack(exact, -1), dtype)


def test_correction_and_few_elements(device):
    x = numbers((6, 40), torch.float64, device)
    for correction in (0, 1, 2.5):
        y = sliding_window(x, 7, "var", padding="same", correction=correction)
        assert_near(y, by_definition(x, 7, "var", padding="same", correction=correction), torch.float64)
    assert sliding_window(x, 5, "var", padding="causal")[:, 0].isnan().all()
    assert not sliding_window(x, 5, "var", padding="causal", correction=0)[:, 0].any()
    assert sliding_window(x, 1, "std").isnan().all()


def test_pandas_names_mean_the_same(device):
    """The values are those of pandas.Series(range(6)).rolling(4, ...).sum()."""
    x = torch.arange(6, dtype=torch.float64, device=device)
    nan = torch.nan

    def equal(values, **options):
        expected = torch.tensor(values, dtype=torch.float64, device=device)
        torch.testing.assert_close(sliding_window(x, 4, "sum", **options), expected, equal_nan=True)

    equal([nan, nan, nan, 6, 10, 14], padding="causal", min_periods=4)
    equal([0, 1, 3, 6, 10, 14], padding="causal")
    equal([nan, nan, 6, 10, 14, nan], padding=(2, 1), min_periods=4)  # center=True


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("shape", "dim"), [((3, 40), -1), ((2, 30, 5), 1)], ids=str)
@pytest.mark.parametrize(("op", "window", "padding", "stride", "least"), [
    *((op, *case) for op in OPS for case in ((4, "valid", 1, 1), (5, "same", 3, 1), (28, "causal", 2, 6))),
    *((op, 1, "valid", 2, 1) for op in OPS if op not in ("var", "std"))])
def test_gradients(device, op, dtype, shape, dim, window, padding, stride, least):
    x = numbers(shape, dtype, device, 100.0).requires_grad_()
    options = {"dim": dim, "stride": stride, "padding": padding, "min_periods": least, "correction": 0}
    y, exact = sliding_window(x, window, op, **options), by_definition(x, window, op, **options)
    kept = exact.detach().isfinite() & (exact.detach() != 0)
    grad = torch.randn_like(y)
    ours, = torch.autograd.grad(y[kept], x, grad[kept])
    picked = exact[kept]
    if op == "std":  # before the root, whose derivative at 0 would spread as NaN
        picked = by_definition(x, window, "var", **options)[kept].sqrt()
    theirs, = torch.autograd.grad(picked, x, grad[kept].double())
    tolerance = 1e-9 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


@ops
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_gradients_of_16_bit_tensors(device, op, dtype):
    x = numbers((3, 60), dtype, device, 1.0).requires_grad_()
    wide = x.detach().double().requires_grad_()
    grad = torch.randn(3, 54, device=device).to(dtype)
    ours, = torch.autograd.grad(sliding_window(x, 7, op), x, grad)
    theirs, = torch.autograd.grad(sliding_window(wide, 7, op), wide, grad.double())
    assert ours.dtype == dtype
    tolerance = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=4 * tolerance)


@ops
def test_second_derivatives(device, op):
    x = torch.randn(2, 9, dtype=torch.float64, device=device, requires_grad=True)
    function = functools.partial(sliding_window, window=4, op=op, stride=2)
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


def test_the_gradient_of_an_extreme_goes_to_the_first_one(device):
    x = torch.tensor([1.0, 5, 5, 2, float("nan"), 3], device=device, requires_grad=True)
    torch.autograd.backward(sliding_window(x, 3, "max"), torch.tensor([1.0, 2, 4, 8], device=device))
    assert x.grad.tolist() == [0, 3, 0, 0, 12, 0]
    x = torch.full((40,), float("-inf"), device=device, requires_grad=True)
    sliding_window(x, 7, "max").sum().backward()
    assert x.grad.tolist() == [1] * 34 + [0] * 6


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gradients_of_an_extreme_may_be_changed_in_place(device, dim):
    """They are no views, which of an autograd.Function torch refuses to change."""
    x = torch.randn(4, 5, 3, device=device).permute(2, 0, 1).requires_grad_()

    def second(times):
        extremes = sliding_window(x, 2, "max", dim=dim)
        (grad,) = torch.autograd.grad(extremes.square().sum(), x, create_graph=True)
        assert grad.stride() == x.stride()
        return torch.autograd.grad(times(grad).sum(), x)

    torch.testing.assert_close(second(lambda grad: grad.mul_(2.0)), second(lambda grad: grad * 2.0))


def test_gradients_repeat_bit_by_bit_and_flow_from_any_layout(device):
    x = numbers((50, 300), torch.float32, device)
    for op in OPS:
        found = []
        for leaf in (x.clone(), x.clone(), x.t().contiguous().t()):
            leaf.requires_grad_()
            sliding_window(leaf, 100, op, dim=1).square().sum().backward()
            found.append(leaf.grad)
        assert torch.equal(found[0], found[1])
        torch.testing.assert_close(found[0], found[2], rtol=1e-5, atol=1e-4)


@ops
def test_torch_compile_and_func(device, op):
    x = numbers((2, 30), torch.float32, device)

    def function(x):
        return sliding_window(x, 5, op, padding="same") * 2

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.testing.assert_close(compiled(leaf), function(other))
    compiled(leaf).sum().backward()
    function(other).sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)
    torch.testing.assert_close(torch.func.grad(lambda x: function(x).sum())(x), other.grad)
    torch.testing.assert_close(torch.func.vmap(function)(x), function(x))


def test_other_arrays_go_in_and_out():
    x = np.random.default_rng(0).normal(size=(3, 50))
    y = sliding_window(x, 6, "max")
    assert isinstance(y, np.ndarray)
    assert np.array_equal(y, np.lib.stride_tricks.sliding_window_view(x, 6, -1).max(-1))


def test_any_number_of_threads_gives_the_same_bits():
    x = numbers((3, 50_000), torch.float32, "cpu")
    threads = torch.get_num_threads()
    try:
        for op in ("sum", "std", "min"):
            torch.set_num_threads(1)
            one = sliding_window(x, 1000, op)
            torch.set_num_threads(2)
            assert torch.equal(one, sliding_window(x, 1000, op))
    finally:
        torch.set_num_threads(threads)


def test_empty(device):
    assert sliding_window(torch.empty(3, 0, device=device), 4, padding="causal").shape == (3, 0)
    assert sliding_window(torch.empty(0, 9, device=device), 4, "std").shape == (0, 6)
    assert sliding_window(torch.empty(3, 0, device=device), 4).shape == (3, 0)


X = torch.zeros(3, 10)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: sliding_window([1.0], 2), TypeError, "x must be a tensor or an array, got list"),
    (lambda: sliding_window(X.int(), 2), TypeError,
     r"x must be of a floating dtype \(torch.float16, .*\), got torch.int32: cast it first"),
    (lambda: sliding_window(X.to_sparse(), 2), TypeError, "x must be a dense tensor, got torch.sparse_coo"),
    (lambda: sliding_window(X, 2, "median"), ValueError,
     "op must be one of sum, mean, min, max, var, std, got 'median'"),
    (lambda: sliding_window(X, 11), ValueError, "window must be at most 10, dim 1 with its padding, got 11"),
    (lambda: sliding_window(X, 2, correction=np.nan), ValueError, "correction must be finite, got nan"),
    (lambda: sliding_window(X, 0), ValueError, "window must be at least 1, got 0"),
    (lambda: sliding_window(X, 2.0), TypeError, r"window must be an integer, got 2\.0"),
    (lambda: sliding_window(X, 2, dim=2), IndexError, r"dim must be in \[-2, 2\), got 2"),
    (lambda: sliding_window(X[0, 0], 2), IndexError, r"dim must be in \[0, 0\), got -1"),
    (lambda: sliding_window(X, 2, stride=0), ValueError, "stride must be at least 1, got 0"),
    (lambda: sliding_window(X, 2, min_periods=3), ValueError, "min_periods must be at most window, 2, got 3"),
    (lambda: sliding_window(X, 2, padding="full"), ValueError,
     r"padding must be one of valid, same, causal or \(left, right\), got 'full'"),
    (lambda: sliding_window(X, 2, padding=(0, 2)), ValueError,
     r"padding must be two ints from 0 to window - 1, 1, got \(0, 2\)"),
    (lambda: sliding_window(X[:, :1].expand(3, 2**30), 2), ValueError,
     r"x.shape\[dim\] \+ 2 \* window must be at most 2\*\*30, got 1073741824 and 2"),
])
def test_errors_say_what_was_expected(call, error, message):
    with pytest.raises(error, match=f"sliding_window: {message}"):
        call()


@pytest.mark.parametrize("op", ["var", "std"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_windows_that_nobody_wants_have_no_gradient(op, device):
    x = torch.randn(10, device=device, requires_grad=True)
    for min_periods in (1, 3):
        found = sliding_window(x, 3, op, padding="causal", min_periods=min_periods)[2:]
        expected = getattr(x.unfold(0, 3, 1), op)(-1)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)))


def test_padding_is_two_numbers():
    with pytest.raises(ValueError, match="padding must be two ints from 0 to window - 1, 1, got 1"):
        sliding_window(X, 2, padding=1)


@pytest.mark.parametrize("op", ["max", "min", "std"])
def test_gradients_outside_of_vmap(device, op):
    """Within it nobody sees that one will be needed."""
    x = torch.randn(4, 10, device=device)

    def ours(x):
        return torch.vmap(lambda row: sliding_window(row, 3, op))(x).square().sum()

    def theirs(x):
        windows = x.unfold(-1, 3, 1)
        return {"max": windows.amax, "min": windows.amin, "std": windows.std}[op](-1).square().sum()

    expected = torch.func.grad(theirs)(x)
    torch.testing.assert_close(torch.func.grad(ours)(x), expected)
    x.requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(ours(x), x)[0], expected)


@ops
def test_windows_of_one_lie_as_compiled_programs_are_told(op):
    """Where x is sliced, and its dimensions are in another order."""
    more = {"correction": 0} if op in ("var", "std") else {}

    def function(x):
        return sliding_window(x, 1, op, dim=1, **more).flatten() * 2

    for x in (torch.randn(8, 6, 4).permute(2, 1, 0), torch.randn(8, 12, 4).permute(2, 1, 0)[:, ::2]):
        for needs in (False, True):
            x = x.detach().requires_grad_(needs)
            torch.testing.assert_close(torch.compile(function, backend="aot_eager")(x), function(x))


@pytest.mark.parametrize("shape", [(1, 5, 1, 3), (1, 5, 1, 1), (4, 1, 6)], ids=str)
def test_compiled_for_sizes_that_vary_where_some_are_one(shape):
    """Dimensions of equal strides are told apart by sizes, which a compiler compares as symbols."""
    def function(x, window):
        return sliding_window(x, window, "sum", dim=-1, padding="causal")

    x = torch.randn(shape)
    run = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(run(x, 1), function(x, 1))


NAN = float("nan")


@pytest.mark.parametrize("op", ["sum", "mean", "var", "std"])
@pytest.mark.parametrize(("x", "options"), [
    ([1.0, 2, 4, NAN, 3, 5, 1], {"stride": 4}), ([NAN, 1.0, 2, 4, 3], {"padding": (1, 0), "stride": 3})])
def test_a_nan_that_no_counted_window_reads_has_no_gradient(device, op, x, options):
    grads, x = [], torch.tensor(x, device=device)
    counted = ~sliding_window(x, 3, op, min_periods=3, **options).isnan()
    for values in (x, x.nan_to_num()):
        leaf = values.clone().requires_grad_()
        y = sliding_window(leaf, 3, op, min_periods=3, **options)
        grads.append(torch.autograd.grad(y[counted].sum(), leaf)[0])
    assert grads[0].isfinite().all()
    torch.testing.assert_close(*grads)
