"""Norms, with what stands before and after them: results, gradients of any order, and what is refused."""

import functools

import numpy as np
import pytest
import torch
from checking import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    VIEWS,
    accumulated,
    assert_as_accurate,
    assert_same_bits,
    captured,
    check,
    derivatives,
    evaluate,
    lost,
)
from torch.nn import functional as F
from torch.testing import assert_close

import fusionrt as frt
from fusionrt import library, reference, row_fusion
from fusionrt.op_names import OPS
from fusionrt.rehearsal import collecting
from fusionrt.runtime import launch

EPS = 1e-5


class spelled:
    """The formulas, for weights that may be of full shape."""

    @staticmethod
    def layer_norm(x, shape, weight=1, bias=0, eps=EPS, *, residual=0, epilogue=lambda y: y):
        dims = tuple(range(-len(shape), 0))
        total = x + residual
        centered = total - total.mean(dims, keepdim=True)
        return epilogue(centered * (centered.square().mean(dims, keepdim=True) + eps).rsqrt() * weight + bias)

    @staticmethod
    def rms_norm(x, shape, weight=1, eps=1e-6, *, weight_offset=0, residual=0, epilogue=lambda y: y):
        dims = tuple(range(-len(shape), 0))
        total = x + residual
        scale = (total.square().mean(dims, keepdim=True) + eps).rsqrt()
        return epilogue(total * scale * (weight + weight_offset))

    @classmethod
    def layer_norm_relu(cls, *args):
        return cls.layer_norm(*args, epilogue=torch.relu)

    @classmethod
    def layer_norm_gelu(cls, *args):
        return cls.layer_norm(*args, epilogue=F.gelu)

    @classmethod
    def rms_norm_gelu(cls, x, weight, eps, weight_offset):
        return cls.rms_norm(x, x.shape[-1:], weight, eps, weight_offset=weight_offset, epilogue=F.gelu)

    @classmethod
    def add_norm(cls, x, residual, weight, bias):
        return cls.layer_norm(x, x.shape[-1:], weight, bias, residual=residual), x + residual

    @classmethod
    def add_rms_norm(cls, x, residual, weight, eps):
        return cls.rms_norm(x, x.shape[-1:], weight, eps, residual=residual), x + residual


def rms_norm_gelu(of, x, w):
    if of is spelled:
        return of.rms_norm_gelu(x, w, 1e-6, 1)
    return of.rms_norm_gelu(x, w, 1e-6, weight_offset=1)


# Calls of ours, of the reference, of the formulas; the letters say what has x's shape, and what a row's (w).
CASES = {
    "layer_norm": ("xww", lambda of, x, w, b: of.layer_norm(x, x.shape[-1:], w, b)),
    "layer_norm of a residual": (
        "xwwx", lambda of, x, w, b, r: of.layer_norm(x, x.shape[-1:], w, b, residual=r)),
    "layer_norm, no bias": ("xw", lambda of, x, w: of.layer_norm(x, x.shape[-1:], w)),
    "layer_norm, no weight": ("x", lambda of, x: of.layer_norm(x, x.shape[-1:])),
    "layer_norm_relu": ("xww", lambda of, x, w, b: of.layer_norm_relu(x, x.shape[-1:], w, b)),
    "layer_norm_gelu": ("xww", lambda of, x, w, b: of.layer_norm_gelu(x, x.shape[-1:], w, b)),
    "rms_norm": ("xw", lambda of, x, w: of.rms_norm(x, x.shape[-1:], w, 1e-6)),
    "rms_norm of a residual": ("xwx", lambda of, x, w, r: of.rms_norm(x, x.shape[-1:], w, 1e-6, residual=r)),
    "rms_norm, no weight": ("x", lambda of, x: of.rms_norm(x, x.shape[-1:], eps=1e-6)),
    "rms_norm_gelu": ("xw", rms_norm_gelu),
    "add_norm": ("xxww", lambda of, x, r, w, b: of.add_norm(x, r, w, b)[0]),
    "add_rms_norm": ("xxw", lambda of, x, r, w: of.add_rms_norm(x, r, w, 1e-6)[0]),
}


def arguments(name, shape, dtype=F32, device="cpu"):
    sizes = {"x": shape, "w": shape[-1:]}
    return [torch.randn(sizes[kind], dtype=F64).mul(2).to(device, dtype) for kind in CASES[name][0]]


def check_case(name, args, again=None):
    call = CASES[name][1]
    formula = functools.partial(call, spelled)
    with torch.no_grad():  # the terms of a result; an epilogue lets no more through
        wide = [a.double() for a in args]
        weights = [a.abs() for a, kind in zip(wide, CASES[name][0], strict=True) if kind == "w"]
        size = formula(*wide).abs() + sum(weights)
    return check(functools.partial(call, frt), args, reference=functools.partial(call, reference),
                 magnitudes=functools.partial(accumulated, formula), extra=lost(size, args[0].dtype),
                 again=again)


# --- accuracy


# Every case in one dtype; what differs most in all four.
IN_ALL_DTYPES = "layer_norm", "layer_norm of a residual", "rms_norm", "rms_norm_gelu"
OF_DTYPES = [(name, dtype) for name in CASES for dtype in DTYPES
             if name in IN_ALL_DTYPES or dtype == F32]


@pytest.mark.covering(2)
@pytest.mark.parametrize(("name", "dtype"), OF_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(67, 17), (3, 4, 7), (4, 1023), (33, 64)], ids=str)
def test_results_and_gradients(name, shape, dtype, device):
    of_case = functools.partial(arguments, name, shape, dtype, device)
    check_case(name, of_case(), again=of_case)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("columns", [262_144, 1_000_003])
def test_long_rows(name, columns, device):
    check_case(name, arguments(name, (2, columns), device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_norm", "layer_norm_gelu"])
@pytest.mark.parametrize("shape, dtype", [
    ((20_000, 520), BF16), ((17_000, 776), F32), ((16_400, 1_032), BF16), ((2_000, 1_032), F32),
    ((2_000, 4_104), BF16), ((700, 8_200), BF16), ((300, 16_384), F32), ((500, 20_000), BF16),
    ((600, 16_384), F32), ((600, 32_768), BF16), ((600, 65_528), BF16), ((150, 131_072), BF16),
    ((600, 32_768), F32), ((300, 65_536), F32), ((150, 100_000), F32), ((150, 131_072), F32),
    ((40, 245_760), F32), ((40, 262_144), F32), ((80, 262_144), BF16)], ids=str)
def test_many_long_rows(name, shape, dtype):
    """More rows than teams: places in shared memory, parts of rows and their barriers are used again, and the
    L2 is asked for later rows, but for none beyond the last."""
    check_case(name, arguments(name, shape, dtype, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("columns", [4096, 16_384, 65_536])
def test_rows_at_odd_addresses(columns, dtype):
    """Where packs are single elements sums over rows do not fit into the kernel, and are not left out."""
    def arguments_at_odd_addresses():
        return [torch.empty(a.numel() + 1, dtype=dtype, device="cuda")[1:].view_as(a).copy_(a)
                for a in arguments("layer_norm", (32, columns), dtype, "cuda")]

    check_case("layer_norm", arguments_at_odd_addresses(), again=arguments_at_odd_addresses)


@pytest.mark.parametrize("op", [frt.layer_norm, frt.rms_norm])
@pytest.mark.parametrize("shape", [(4, 5), (3, 4, 5), (1,)], ids=str)
def test_several_dimensions_are_normalised(op, shape, device):
    x, w = torch.randn(2, *shape, device=device), torch.randn(shape, device=device)
    formula = functools.partial(getattr(spelled, op.__name__), eps=EPS)
    if shape != (1,):
        check(op, (x, shape, w), {"eps": EPS}, magnitudes=lambda args, kwargs, g: accumulated(
            lambda x, w: formula(x, shape, w), (args[0], args[2]), {}, g), extra=1e-6)
    assert_close(op(x, list(shape), w, eps=EPS), op(x, w, eps=EPS))
    if len(shape) == 1:
        assert_close(op(x, shape[0], w, eps=EPS), op(x, w, eps=EPS))


def test_eps_of_rms_norm_is_torchs(device):
    for dtype in (F16, BF16, F32, F64):
        x = torch.full((1, 64), 1e-4 if dtype != F64 else 1e-8, dtype=dtype, device=device)
        assert_close(frt.rms_norm(x, 64), F.rms_norm(x, (64,)))
    assert_close(torch.from_numpy(frt.rms_norm(x.cpu().numpy(), 64)), F.rms_norm(x.cpu(), (64,)))


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("shape", [(33, 65), (90, 20_000)], ids=str)
def test_weights_of_another_dtype(shape, dtype, device):
    """16-bit rows with float32 weights: the result is that of float32, rounded once."""
    row = shape[1:]
    x, w, b, g = (torch.randn(s, device=device) for s in (shape, row, row, shape))
    x, g = x.to(dtype), g.to(dtype)
    y, found = evaluate(frt.layer_norm, (x, row, w, b), grad_output=g)
    theirs, expected = evaluate(F.layer_norm, (x.float(), row, w, b), grad_output=g)
    assert y.dtype == dtype
    assert_as_accurate(y, theirs.to(dtype), F.layer_norm(x.double(), row, w.double(), b.double()))
    assert [f.dtype for f in found] == [dtype, F32, F32]
    for ours, torchs in zip(found, expected, strict=True):
        assert_close(ours, torchs.to(ours.dtype), atol=1e-4, rtol=torch.finfo(ours.dtype).eps)


def test_gelu_by_tanh(device):
    x, w, b = (torch.randn(s, device=device) for s in ((8, 32), (32,), (32,)))
    for op, args in ((frt.layer_norm_gelu, (x, (32,), w, b)), (frt.rms_norm_gelu, (x, w, 1e-6))):
        kwargs = {"approximate": "tanh"}
        assert_close(op(*args, **kwargs), op.reference(*args, **kwargs), atol=2e-6, rtol=2e-6)
        assert not torch.equal(op(*args, **kwargs), op(*args))


# --- derivatives


def doubles(*shapes):
    return [torch.randn(s, dtype=F64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("name", [
    "layer_norm_relu", "rms_norm_gelu",  # and as much with fewer operands:
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("layer_norm, no bias", "rms_norm, no weight"))])
def test_second_derivatives(name):
    args = arguments(name, (3, 5), F64)
    assert_close(*(derivatives(functools.partial(CASES[name][1], of), args) for of in (frt, reference)))


def test_two_backward_calls_give_the_same_bits(device):
    for name in CASES:
        args = [a.requires_grad_() for a in arguments(name, (300, 1000), device=device)]
        y = CASES[name][1](frt, *args)
        g = torch.randn_like(y)
        for a, b in zip(*(torch.autograd.grad(y, args, g, retain_graph=True) for _ in range(2)), strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("columns", [256, 4096, 16384])
def test_one_launch_forward_and_at_most_two_backward(columns):
    def kernels(op, *args, **kwargs):
        with collecting() as forward:
            out = op(*args, **kwargs)
        outputs = out if isinstance(out, tuple) else (out,)
        inputs, seeds = [a for a in args if torch.is_tensor(a)], [torch.empty_like(o) for o in outputs]
        with collecting() as backward:
            torch.autograd.grad(outputs, inputs, seeds)
        return [sum(len(launch.sources(p)) for p in problems) for problems in (forward, backward)]

    x, r, w, b = (torch.empty(s, device="meta", dtype=torch.bfloat16, requires_grad=True)
                  for s in ((2048, columns), (2048, columns), (columns,), (columns,)))
    for call in ((frt.layer_norm, x, (columns,), w, b), (frt.add_norm, x, r, w, b),
                 (frt.rms_norm, x, (columns,), w), (frt.dropout_add_layer_norm, x, r, w, b, 0.1)):
        found = kernels(*call)
        assert found[0] == 1
        assert found[1] <= 2


# --- dropout


def test_dropout_before_a_norm(device):
    x, r = (torch.randn(200, 256, device=device, requires_grad=True) for _ in range(2))
    w, b = (torch.randn(256, device=device, requires_grad=True) for _ in range(2))
    torch.manual_seed(3)
    y, total = frt.dropout_add_layer_norm(x, r, w, b, 0.25, return_sum=True)
    torch.manual_seed(3)
    expected = frt.dropout_add(x, r, 0.25)
    assert_same_bits(total, expected)
    theirs = F.layer_norm(expected, (256,), w, b)
    assert_close(y, theirs, atol=2e-6, rtol=1e-5)
    g = torch.randn_like(y)
    found, again, expected = (torch.autograd.grad(out, (x, r, w, b), g, retain_graph=True)
                              for out in (y, y, theirs))
    for ours, other, torchs in zip(found, again, expected, strict=True):
        assert_same_bits(ours, other)
        assert_close(ours, torchs, atol=2e-5, rtol=1e-4)
    assert abs((found[0] == 0).double().mean().item() - 0.25) < 0.01


def test_dropout_that_drops_nothing_or_everything(device):
    x, r, w = (torch.randn(s, device=device) for s in ((4, 64), (4, 64), (64,)))
    plain = frt.layer_norm(x, 64, w, residual=r)
    assert_same_bits(frt.dropout_add_layer_norm(x, r, w, p=0.0), plain)
    assert_same_bits(frt.dropout_add_layer_norm(x, r, w, None, 0.5, False), plain)
    assert_same_bits(frt.layer_norm(x, 64, w, residual=r, dropout_p=0.9, training=False), plain)
    assert_close(frt.dropout_add_layer_norm(x, r, w, p=1.0), F.layer_norm(r, (64,), w))
    assert not torch.equal(frt.rms_norm(x, 64, dropout_p=0.5), frt.rms_norm(x, 64, dropout_p=0.5))


@pytest.mark.slow
def test_second_derivative_of_dropout_has_the_same_mask():
    x, r, w = doubles((3, 5), (3, 5), (5,))

    def seeded(*args):
        torch.manual_seed(5)
        return frt.dropout_add_layer_norm(*args, p=0.5)

    assert torch.autograd.gradgradcheck(seeded, (x, r, w))


# --- epilogues


@frt.fuse
def twice_its_sine(y):
    return 2 * frt.sin(y)


# An epilogue, and what it does to tensors.
EPILOGUES = {"an op": (frt.relu, torch.relu), "another": (frt.gelu_tanh, reference.gelu_tanh),
             "torch's": (torch.sigmoid, torch.sigmoid), "by name": ("relu", torch.relu),
             "fused": (twice_its_sine, lambda y: 2 * y.sin()), "plain": (lambda y: y * y + 1,) * 2}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("op", [frt.layer_norm, frt.rms_norm])
def test_epilogues(op, name, device):
    def arguments():
        return torch.randn(6, 70, device=device), torch.randn(70, device=device)

    epilogue, plain = EPILOGUES[name]

    def formula(x, w):
        return getattr(spelled, op.__name__)(x, (70,), w, eps=EPS, epilogue=plain)

    check(lambda x, w: op(x, 70, w, eps=EPS, epilogue=epilogue), arguments(),
          reference=lambda x, w: op.reference(x, (70,), w, eps=EPS, epilogue=plain),
          magnitudes=functools.partial(accumulated, formula), extra=2e-6, again=arguments)


@pytest.mark.parametrize("narrow, wide", [(BF16, F32), (F16, F32), (F32, F64)], ids=str)
@pytest.mark.parametrize("op", [frt.add_norm, frt.add_rms_norm])
def test_a_wider_residual_decides_the_dtype(op, narrow, wide, device):
    """As in torch's sum: a stream of float32 that branches of 16 bits are added to keeps its digits."""
    x, r, w = (torch.randn(*s, device=device).to(d).requires_grad_() for s, d in (
        ((6, 70), narrow), ((6, 70), wide), ((70,), wide)))
    found, expected = op(x, r, w), op.reference(x, r, w)
    assert [t.dtype for t in found] == [t.dtype for t in expected] == [wide, wide]
    assert_close(found, tuple(expected))
    assert op(r, x, w)[1].dtype == wide
    grads = torch.randn_like(r), torch.randn_like(r)
    ours, theirs = (torch.autograd.grad(out, (x, r, w), grads) for out in (found, expected))
    assert [g.dtype for g in ours] == [narrow, wide, wide]
    assert_close(ours, theirs)


def test_numbers_that_an_epilogue_captures_are_those_of_its_first_call():
    """In all kernels, whichever are made when: those of training and of evaluation compute the same."""
    factor = 2.0

    def scaled(y):
        return y * factor

    x = torch.ones(4, 5)
    calls = [lambda x: frt.softmax(x, epilogue=scaled).sum(-1),
             lambda x: frt.linear_activation(x, x, None, scaled),
             lambda x: frt.layer_norm(x, (5,), None, x[0], epilogue=scaled)]
    calls[0](x.clone().requires_grad_())
    factor = 5.0
    for call, expected in zip(calls, (2.0, 10.0, 2.0), strict=True):
        for recorded in (False, True):
            assert call(x.clone().requires_grad_(recorded)).unique().item() == pytest.approx(expected)


def test_equal_epilogues_make_one_operator():
    x = torch.randn(4, 8)
    before = len(row_fusion._made)
    for _ in range(3):
        frt.layer_norm(x, 8, epilogue=lambda y: y * 0.123)
    assert len(row_fusion._made) == before + 1


# --- layouts


# On equal columns x has no influence on a layer norm, and torch's gradient is rounding errors.
@pytest.mark.covering(1)
@pytest.mark.parametrize("name, view", [
    *(("layer_norm", view) for view in VIEWS if view != "broadcast columns"), ("add_norm", "transposed"),
    ("add_norm", "broadcast rows"), ("add_norm", "permuted"), ("rms_norm", "transposed"),
    ("rms_norm", "broadcast columns")])
def test_layouts(name, view, device):
    x = VIEWS[view](torch.randn(6, 10, 14, device=device))
    check_case(name, [x, *arguments(name, tuple(x.shape), device=device)[1:]])


def test_channels_of_channels_last(device):
    x = torch.randn(2, 6, 5, 4, device=device).to(memory_format=torch.channels_last)
    w = torch.randn(6, device=device)
    y = frt.layer_norm(x.permute(0, 2, 3, 1), 6, w).permute(0, 3, 1, 2)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert_close(y, F.layer_norm(x.permute(0, 2, 3, 1), (6,), w).permute(0, 3, 1, 2))


def test_no_rows(device):
    x, w = (torch.randn(s, device=device, requires_grad=True) for s in ((0, 7), (7,)))
    for y in (frt.layer_norm(x, 7, w), frt.rms_norm(x, 7, w), frt.add_norm(x, x, w)[0]):
        assert y.shape == (0, 7)
        grads = torch.autograd.grad(y.sum(), (x, w))
        assert grads[0].shape == (0, 7)
        assert torch.equal(grads[1], torch.zeros(7, device=device))


def test_rows_of_one(device):
    x, w, b = (torch.randn(s, device=device, requires_grad=True) for s in ((3, 1), (1,), (1,)))
    y = frt.layer_norm(x, 1, w, b)
    assert torch.equal(y, b.expand(3, 1))
    assert [g.flatten().tolist() for g in torch.autograd.grad(y.sum(), (x, w, b))] == [[0, 0, 0], [0], [3]]
    assert_close(frt.rms_norm(x, 1, w), F.rms_norm(x, (1,), w))


# --- special values


@pytest.mark.parametrize("repeat", [1, 25], ids=["short rows", "long rows"])
def test_special_values(repeat, device):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1.0, nan, 2, 3], [inf, 0, 1, 2], [-inf] * 4, [inf, -inf, 0, 1], [1e18, 2e18, 0, 1],
                      [1e-40, 2e-40, -1e-40, 0], [0.1] * 4, [nan] * 4, [100, -100, 0, 1]])
    x = x.to(device).repeat(1, repeat)
    n = x.shape[-1]
    assert_close(frt.layer_norm(x, n), spelled.layer_norm(x, (n,)), equal_nan=True, atol=1e-5, rtol=1e-5)
    large = torch.tensor([[1e37] * 4, [3e38, -3e38, 1, 0]], device=device).repeat(1, repeat)
    for rows_of in (x, large):
        assert_close(frt.rms_norm(rows_of, n), F.rms_norm(rows_of, (n,)), equal_nan=True)
    assert torch.equal(frt.layer_norm(large[:1], n), torch.zeros(1, n, device=device))  # the sum overflows


def test_constant_rows_have_no_variance(device):
    x = torch.tensor([[0.1], [3.0], [1e-3]], device=device).expand(3, 1000).contiguous().requires_grad_()
    y, mean, rstd = frt.layer_norm(x, 1000, return_stats=True)
    assert y.abs().max() < 1e-4
    assert_close(mean, x[:, :1].detach(), atol=0, rtol=1e-6)
    assert_close(rstd, torch.full((3, 1), EPS**-0.5, device=device), atol=0, rtol=1e-5)
    (grad,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert grad.isfinite().all()


# --- other callers


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic, device):
    def function(x, r, w, b):
        y, total = frt.add_norm(x, r, w, b, epilogue=frt.relu)
        y = frt.dropout_add_layer_norm(y, total, w, b, 0.5, training=False)
        return frt.rms_norm_gelu(frt.layer_norm(y, x.shape[-1:], epilogue=lambda y: y * 2), w)

    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
    for n in (4, 6):
        args = [torch.randn(s, device=device, requires_grad=True) for s in ((n, 8), (n, 8), (8,), (8,))]
        found, expected = compiled(*args), function(*args)
        assert_close(found, expected)
        grads = [torch.autograd.grad(out.square().sum(), args) for out in (found, expected)]
        for a, b in zip(*grads, strict=True):
            assert_close(a, b)


def test_opcheck():
    x, r, w, b = doubles((3, 5), (3, 5), (5,), (5,))
    frt.add_norm(x, r, w, b)
    params = "x", "weight", "bias", "residual", "eps"
    operator = next(run.operator for key, run in row_fusion._made.items() if key[:2] == ("add_norm", params))
    args = x, w, b, r, EPS
    torch.library.opcheck(library.overload(operator, args), args)


def test_numpy():
    x, r, w = (np.random.default_rng(0).standard_normal(s, dtype=np.float32) for s in ((4, 6), (4, 6), (6,)))
    y, total = frt.add_norm(x, r, w)
    assert isinstance(y, np.ndarray) and isinstance(total, np.ndarray)
    np.testing.assert_allclose(total, x + r, rtol=1e-6)
    expected = F.layer_norm(torch.from_numpy(x + r), (6,), torch.from_numpy(w)).numpy()
    np.testing.assert_allclose(y, expected, atol=1e-6, rtol=1e-5)
    x, w = frt.rms_norm_gelu(x, w), frt.rms_norm_gelu(torch.from_numpy(x), torch.from_numpy(w))
    np.testing.assert_array_equal(x, w.numpy())


@pytest.mark.gpu
def test_cupy():
    cupy = pytest.importorskip("cupy")
    numbers = cupy.random.RandomState(0)
    x, w = numbers.standard_normal((4, 6)), numbers.standard_normal(6)
    y = frt.layer_norm(x, 6, w)
    assert isinstance(y, cupy.ndarray)
    expected = (x - x.mean(1, keepdims=True)) / cupy.sqrt(x.var(1, keepdims=True) + EPS) * w
    cupy.testing.assert_allclose(y, expected, atol=1e-12)


@pytest.mark.gpu
def test_graphs_replay_forward_and_backward():
    args = [torch.randn(s, device="cuda", requires_grad=True) for s in ((64, 256), (64, 256), (256,), (256,))]

    def step():
        y, total = frt.add_norm(*args)
        return (y, total, *torch.autograd.grad(y.sum() + total.square().sum(), args))

    graph, found = captured(step)
    with torch.no_grad():
        args[0].normal_()
    graph.replay()
    for a, b in zip(found, step(), strict=True):
        assert_same_bits(a, b)


def test_names_of_older_libraries():
    x, w, b = torch.randn(4, 8), torch.randn(8), torch.randn(8)
    assert torch.equal(frt.ops.fused_layer_norm_relu(x, (8,), w, b), frt.layer_norm_relu(x, (8,), w, b))
    assert torch.equal(frt.ops.fused_layer_norm_add(x, x, w, b)[0], frt.add_norm(x, x, w, b)[0])
    assert frt.ops.fused_add_norm is frt.add_norm
    assert frt.ops.fused_dropout_add_layernorm is frt.dropout_add_layer_norm
    assert frt.kernels.fusion.layer_norm_relu is frt.kernels.fused_layer_norm_relu is frt.layer_norm_relu.cuda
    assert frt.ops.rms_norm_cpu is frt.rms_norm.cpu


# --- what is refused


X, W = torch.randn(4, 16), torch.randn(16)


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: frt.layer_norm(X, (8,), W), ValueError,
     "layer_norm: normalized_shape must be the last dimensions of x, got (8,) for x of shape (4, 16)"),
    (lambda: frt.layer_norm(X, ()), ValueError,
     "layer_norm: normalized_shape must be the last dimensions of x, got () for x of shape (4, 16)"),
    (lambda: frt.rms_norm(X, (2, 4, 16)), ValueError,
     "rms_norm: normalized_shape must be the last dimensions of x, got (2, 4, 16) for x of shape (4, 16)"),
    (lambda: frt.layer_norm(X, 16, X), ValueError,
     "layer_norm: weight must be a tensor of shape (16,), got shape (4, 16)"),
    (lambda: frt.layer_norm(X, 16, W, 0.5), ValueError,
     "layer_norm: bias must be a tensor of shape (16,), got float"),
    (lambda: frt.layer_norm(X, W, W), ValueError,
     "layer_norm: normalized_shape must be numbers where a weight is given, got a tensor"),
    (lambda: frt.add_norm(X, W), ValueError,
     "add_norm: residual must be a tensor of shape (4, 16), got shape (16,)"),
    (lambda: frt.rms_norm(X, 16, return_sum=True), ValueError, "rms_norm: return_sum needs a residual"),
    (lambda: frt.rms_norm(X, 16, weight_offset=2), ValueError,
     "rms_norm: weight_offset must be 0 or 1, got 2"),
    (lambda: frt.layer_norm(3.0, 16), TypeError, "layer_norm: x must be a tensor or an array, got float"),
    (lambda: frt.layer_norm(X.long(), 16), TypeError,
     "layer_norm: x must be a floating-point tensor, got one of torch.int64"),
    (lambda: frt.layer_norm(X, 16, dropout_p=1.5), ValueError,
     "layer_norm: dropout_p must be a probability in [0, 1], got 1.5"),
    (lambda: frt.dropout_add_layer_norm(X, X, p=-1), ValueError,
     "dropout_add_layer_norm: p must be a probability in [0, 1], got -1"),
    (lambda: frt.layer_norm(X, 16, epilogue="rely"), ValueError,
     "layer_norm: epilogue must be None, a function of one traced value, or one of "
     + ", ".join(OPS["activations"]) + ", got 'rely'"),
    (lambda: frt.layer_norm(X, 16, epilogue=[frt.relu]), TypeError,
     "layer_norm: epilogue must be None, a name, or a function of one traced value, got list"),
    (lambda: frt.layer_norm(X, 16, epilogue=torch.nn.PReLU()), TypeError,
     "layer_norm: epilogue must be None, a name, a function of one traced value or a module without "
     "parameters, got a PReLU"),
    (lambda: frt.layer_norm(X, 16, epilogue=lambda y: "y"), TypeError,
     "layer_norm: epilogue must give one traced value, got str"),
    (lambda: frt.layer_norm_gelu(X, 16, approximate="erf"), ValueError,
     "layer_norm_gelu: approximate must be 'none' or 'tanh', got 'erf'"),
    (lambda: frt.rms_norm_gelu(X, torch.ones(16), torch.ones(16)), ValueError,
     "rms_norm_gelu: eps must be a number, or a tensor with one value a row, got one of shape (16,)"),
    (lambda: frt.layer_norm(X, 16, eps=None), TypeError,
     "layer_norm: eps must be a tensor, an array or a number, got NoneType"),
    (lambda: frt.layer_norm.cuda(X, 16), TypeError, "layer_norm: x must be a CUDA tensor, got one on cpu"),
])
def test_errors(call, error, text):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == text
