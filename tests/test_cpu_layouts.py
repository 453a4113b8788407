"""On a CPU: rows that lie across memory, of which a task has columns of its own; elements that lie apart."""

import pytest
import torch
from checking import BF16, F32, F64, check, check_in_norm, lost
from torch.nn import functional as F

import fusionrt as frt
from fusionrt.cpu import abreast, columns, pointwise, rows
from fusionrt.rehearsal import collecting

OPS = {name: getattr(torch, name) for name in ("sum", "mean", "amax", "var", "logsumexp", "argmax")}
dtypes = pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
# Shapes of memory, the order in which it is seen, and the dimension that is reduced.
ACROSS = {"first": ((16, 40_000), (0, 1), 0), "middle": ((5, 16, 9000), (0, 1, 2), 1),
          "narrow": ((64, 33, 257), (0, 1, 2), 1), "two apart": ((3, 20, 4, 5000), (0, 1, 2, 3), (0, 2)),
          "seen otherwise": ((6, 128, 16, 64), (0, 2, 1, 3), 2)}


def seen(shape, order, dtype):
    return torch.randn(shape).to(dtype).permute(order)


def served(op, x, dim):
    with collecting("cpu") as needed:
        getattr(frt, op)(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), dim)
    return [columns.serves(p) for p in needed]


def test_many_columns_are_shared_out_and_few_are_not():
    assert served("sum", torch.empty(16, 40_000), 0) == [True]
    assert served("sum", torch.empty(4096, 1024), 0) == [False]
    assert served("sum", torch.empty(16, 40_000), 1) == [False]


@pytest.mark.covering(1)
@dtypes
@pytest.mark.parametrize("where", ACROSS)
@pytest.mark.parametrize("op", OPS)
def test_reductions(op, where, dtype):
    shape, order, dim = ACROSS[where]
    x = seen(shape, order, dtype)
    if op == "argmax":
        dim = dim if isinstance(dim, int) else dim[0]
        assert torch.equal(frt.argmax(x, dim), x.argmax(dim))
        return
    extra = lost(x.double().abs().sum(dim), dtype) if op in ("sum", "mean") else 0.0
    check(lambda x: getattr(frt, op)(x, dim), (x,), reference=lambda x: OPS[op](x, dim), extra=extra)


@pytest.mark.parametrize("op", ["sum", "mean", "var"])
def test_the_same_bits_by_any_number_of_threads(op):
    x, before, found = torch.randn(16, 40_000), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(getattr(frt, op)(x, 0))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_special_values_stay_in_their_columns():
    x = torch.zeros(16, 40_000)
    x[3, 5], x[4, 6], x[5, 7] = float("nan"), float("inf"), -float("inf")
    assert torch.equal(frt.amax(x, 0), x.amax(0)) or torch.equal(frt.amax(x, 0).isnan(), x.amax(0).isnan())
    assert torch.equal(frt.sum(x, 0).isnan(), x.sum(0).isnan())
    assert torch.equal(frt.sum(x, 0).nan_to_num(), x.sum(0).nan_to_num())


@pytest.mark.covering(1)
@dtypes
@pytest.mark.parametrize("dim", [0, 1])
def test_softmax_across_memory(dim, dtype):
    x = torch.randn(16, 9, 4500).to(dtype)
    check(lambda x: frt.softmax(x, dim), (x,), reference=lambda x: torch.softmax(x, dim))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("shape", "dim"), [
    ((40, 2100), 0), ((3, 19, 70, 31), 1), ((4, 37, 5, 130), 2), ((1, 9, 700), 1)], ids=str)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@dtypes
def test_gradients_of_columns_in_the_cache(op, shape, dim, dtype):
    x = torch.randn(shape).to(dtype)
    for t in (x, x.transpose(0, -1).contiguous().transpose(0, -1)):
        check(lambda x: getattr(frt, op)(x, dim), (t,), reference=lambda x: getattr(torch, op)(x, dim))


def in_one(shape, dim, memory_format=torch.contiguous_format, op=frt.softmax):
    """Of the kernels of a gradient: whether they are one, and elements follow in it."""
    x = torch.empty(shape, device="meta", requires_grad=True).contiguous(memory_format=memory_format)
    y = op(x, dim)
    with collecting("cpu") as needed:
        torch.autograd.grad(y, x, torch.empty_like(y))
    return any(p.then is not None for p in needed)


def test_which_gradients_are_one_kernel():
    assert in_one((512, 8192), 0) and in_one((8, 19, 128, 256), 1)
    assert in_one((4, 64, 64, 256), 3, torch.channels_last)
    assert not in_one((512, 8192), 0, op=frt.log_softmax)  # whose sum is of one operand alone
    # Of so long rows no columns are kept; of few columns tasks would be too few.
    assert not in_one((100_000, 64), 0)
    assert not in_one((8192, 40), 0)


def out_and_gradient(function, x):
    x = x.detach().requires_grad_()
    out = function(x)
    return out, *torch.autograd.grad(out, x, torch.arange(out.numel()).view(out.shape).to(x.dtype) % 7)


@pytest.mark.covering(1)
@dtypes
@pytest.mark.parametrize("step", [2, 3])
def test_elements_that_lie_apart(step, dtype):
    x, w, b = torch.randn(37, 1100 * step).to(dtype)[:, ::step], *(torch.randn(1100).to(dtype) for _ in "wb")
    target = torch.randint(0, 1100, (37,))
    for function in (frt.gelu, lambda x: frt.bias_gelu(x, b), lambda x: frt.swish_multiply(x, x.flip(0)),
                     lambda x: frt.softmax(x, -1), lambda x: frt.cross_entropy(x, target, reduction="none")):
        found = [out_and_gradient(function, t) for t in (x, x.contiguous())]
        assert all(map(torch.equal, *found))
    torch.testing.assert_close(frt.layer_norm(x, (1100,), w, b), F.layer_norm(x, (1100,), w, b))
    torch.testing.assert_close(frt.layer_norm(x.t(), (37,)), F.layer_norm(x.t(), (37,)))


@pytest.mark.parametrize(("step", "op", "expected"), [(2, frt.gelu, True), (1, frt.gelu, False),
                                                      (2, frt.relu, False)])
def test_what_is_fetched_into_a_buffer(step, op, expected):
    with collecting("cpu") as needed:
        op(torch.empty(64, 128, device="meta")[:, ::step])
    assert [bool(pointwise.fetched(p)) for p in needed] == [expected]


def test_rows_of_elements_that_lie_apart_are_fetched():
    with collecting("cpu") as needed:
        frt.softmax(torch.empty(64, 128, device="meta")[:, ::2], -1)
        frt.softmax(torch.empty(64, 2 * rows.TURNED_COLUMNS + 4, device="meta")[:, ::2], -1)
    assert [bool(rows.turned(p)) for p in needed] == [True, False]


def test_drawn_numbers_are_those_of_neighbours():
    x = torch.rand(64, 2048)[:, ::2]
    torch.manual_seed(3)
    apart = frt.gelu_dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(apart, frt.gelu_dropout(x.contiguous(), 0.5))


@pytest.mark.covering(1)
@dtypes
@pytest.mark.parametrize(("shape", "groups"), [
    ((4, 64, 40, 40), 16), ((2, 96, 30, 31), 3), ((3, 40, 50, 20), 40)])
def test_groups_of_few_channels_side_by_side(shape, groups, dtype):
    x = torch.randn(shape).to(dtype, memory_format=torch.channels_last)
    w, b = (torch.randn(shape[1]).to(dtype) for _ in "wb")
    check_in_norm(lambda x, w, b: frt.group_norm(x, groups, w, b), (x, w, b),
                  reference=lambda x, w, b: F.group_norm(x, groups, w, b))
    check_in_norm(lambda x, r: frt.group_norm(x, groups, residual=r, epilogue=frt.silu), (x, x.flip(0)),
                  reference=lambda x, r: F.silu(F.group_norm(x, groups) + r))
    with collecting("cpu") as needed:
        frt.group_norm(torch.empty_strided(shape, x.stride(), dtype=dtype, device="meta"), groups)
    assert any(p.inner > 1 for p in needed) == (shape[1] // groups > 1)


def test_second_derivatives_of_groups_side_by_side():
    x = torch.randn(2, 8, 70, 70, dtype=F64).to(memory_format=torch.channels_last).requires_grad_()
    found = []
    for norm in (frt.group_norm, F.group_norm):
        first, = torch.autograd.grad((norm(x, 4) ** 3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad((first ** 2).sum(), x)[0])
    torch.testing.assert_close(*found)


@pytest.mark.covering(1)
@dtypes
@pytest.mark.parametrize("columns", [2, 3, 7, 16, 17])
def test_a_bias_of_short_rows(columns, dtype):
    """What repeats from row to row of very few elements goes into a buffer."""
    x, w, b = torch.randn(20_001, columns).to(dtype), *(torch.randn(columns).to(dtype) for _ in "wb")
    for op, args in ((frt.bias_gelu, (x, b)), (frt.bias_relu, (x, b)), (frt.scale_bias_sigmoid, (x, w, b))):
        wide = args[0].flatten(), *(t.repeat(20_001) for t in args[1:])  # where nothing repeats
        assert torch.equal(op(*args).flatten(), op(*wide))
        with collecting("cpu") as needed:
            op(*(torch.empty(t.shape, dtype=dtype, device="meta") for t in args))
        assert [bool(pointwise.repeated(p)) for p in needed] == [columns <= pointwise.SHORT_ROW]


@pytest.mark.covering(1)
@dtypes
@pytest.mark.parametrize(("rows", "columns", "each"), [
    (20_480, 7, 128), (9300, 33, 31), (4096, 40, 16), (640, 2, 320), (60, 5, 60), (20_479, 7, 1), (40, 3, 1),
    (4096, 41, 1)])
def test_gradients_of_short_rows(rows, columns, each, dtype):
    """Sums over rows side by side, of one task and of several."""
    x, grad = (torch.randn(rows, columns).to(dtype) for _ in "xg")
    w, b = (torch.randn(columns).to(dtype) for _ in "wb")
    for op, args in ((frt.bias_gelu, (x, b)), (frt.bias_relu, (x, b)), (frt.scale_bias_sigmoid, (x, w, b))):
        leaves, exact = ([t.to(d).requires_grad_() for t in args] for d in (dtype, F64))
        found = torch.autograd.grad(op(*leaves), leaves, grad)
        truth = torch.autograd.grad(op.reference(*exact), exact, grad.double())
        for ours, true in zip(found, truth, strict=True):
            terms = 1 if true.dim() > 1 else rows if dtype == F64 else rows ** 0.5
            limit = 4 * torch.finfo(dtype).eps * (true.abs().max() + terms)
            assert (ours.double() - true).abs().max() <= limit
        with collecting("cpu") as needed:
            of_meta = [torch.empty(t.shape, dtype=dtype, device="meta", requires_grad=True) for t in args]
            op(*of_meta).backward(torch.empty(x.shape, dtype=dtype, device="meta"))
        assert max(abreast.side_by_side(p).abreast for p in needed) == each


@dtypes
@pytest.mark.parametrize(("shape", "each"), [((130, 33), 26), ((4, 130, 33), 26), ((20_480, 7), 128)])
def test_gradients_of_a_bias_that_read_it_alone(shape, each, dtype):
    """Rows side by side, several of them read together: of the bias memory has one row."""
    bent = frt.fuse(lambda x, b: x + frt.where(b > 0.5, b * b, 0))
    x, grad = (torch.randn(shape).to(dtype) for _ in "xg")
    b = torch.randn(shape[-1]).to(dtype).requires_grad_()
    found, = torch.autograd.grad(bent(x, b), b, grad)
    truth = torch.where(b > 0.5, 2 * b.double(), 0) * grad.double().flatten(0, -2).sum(0)
    rows = grad.numel() / shape[-1]
    limit = 4 * torch.finfo(dtype).eps * (truth.abs().max() + (rows if dtype == F64 else rows ** 0.5))
    assert (found.double() - truth).abs().max() <= limit
    with collecting("cpu") as needed:
        of_meta = [torch.empty(t.shape, dtype=dtype, device="meta", requires_grad=True) for t in (x, b)]
        bent(*of_meta).backward(torch.empty(shape, dtype=dtype, device="meta"))
    assert max(abreast.side_by_side(p).abreast for p in needed) == each
