"""`fuse`: what a user's function may do, and what the call accepts and returns."""

import copy
import functools
import math
import pickle
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import fusionrt as frt
from fusionrt.cpu import compiler as cpu_compiler
from fusionrt.op import Operator


@frt.fuse
def gate(x, y):
    """A gate."""
    return frt.sigmoid(x) * y + 0.5 * x


@frt.fuse
def scaled(x, scale: float = 2.0, *, shift=0.0):
    return x * scale + shift


def new(*shape, device="cpu", dtype=torch.float32):
    return torch.randn(shape, device=device, dtype=dtype)


# --- what a function may do -----------------------------------------------------------------------


def test_values_and_gradients(device):
    x, y = new(33, 17, device=device).requires_grad_(), new(17, device=device).requires_grad_()
    ours, theirs = gate(x, y), torch.sigmoid(x) * y + 0.5 * x
    assert_close(ours, theirs)
    grad_output = torch.randn_like(ours)
    assert_close(
        torch.autograd.grad(ours, (x, y), grad_output),
        torch.autograd.grad(theirs, (x, y), grad_output),
        rtol=1e-5,
        atol=1e-5,
    )
    assert (gate.__name__, gate.__doc__, gate.__module__) == ("gate", "A gate.", __name__)


def test_a_name_is_heard_beside_the_function_and_alone():
    for named in (frt.fuse(lambda x: -x, name="negated"), frt.fuse(name="negated")(lambda x: -x)):
        assert named.__name__ == named.operator.name == "negated"


def test_several_outputs(device):
    @frt.fuse
    def parts(x, y):
        return frt.exp(x), x * y, x > y, frt.cast(x, "int8"), 1.0

    x, y = (new(33, 17, device=device).requires_grad_() for _ in range(2))
    out = parts(x, y)
    assert isinstance(out, tuple)
    assert [o.dtype for o in out] == [
        torch.float32,
        torch.float32,
        torch.bool,
        torch.int8,
        torch.float32,
    ]
    assert [o.requires_grad for o in out] == [True, True, False, False, False]
    for ours, theirs in zip(
        out, (x.exp(), x * y, x > y, x.to(torch.int8), torch.ones_like(x)), strict=True
    ):
        assert_close(ours, theirs)
    (grad,) = torch.autograd.grad(out[1].sum(), x)  # the other outputs have no gradient coming in
    assert_close(grad, y)
    out = parts(x, y)
    assert_close(torch.autograd.grad(out[0].sum() + out[1].sum(), (x, y)), (x.exp() + y, x))


def test_the_same_output_twice(device):
    twice = frt.fuse(lambda x: (frt.tanh(x), frt.tanh(x)))
    x = new(17, device=device).requires_grad_()
    a, b = twice(x)
    assert torch.equal(a, b)
    (grad,) = torch.autograd.grad(a.sum() + 2 * b.sum(), x)
    assert_close(grad, 3 * (1 - x.tanh() ** 2), rtol=1e-5, atol=1e-6)
    out, argument = frt.fuse(lambda x: (x * 2, x))(x)
    assert_close(argument, x)
    assert_close(torch.autograd.grad((out + argument).sum(), x)[0], torch.full_like(x, 3))


def test_a_list_of_outputs_is_a_tuple():
    assert isinstance(frt.fuse(lambda x: [x, -x])(new(3)), tuple)


def test_numbers_change_without_a_compilation(device, monkeypatch):
    plans, built = [], []
    plan, build = Operator._plan, cpu_compiler.build
    monkeypatch.setattr(
        Operator, "_plan", lambda self, *a: plans.append(self.name) or plan(self, *a)
    )
    monkeypatch.setattr(cpu_compiler, "build", lambda *a: built.append(a[2]) or build(*a))
    x = new(33, 17, device=device)
    assert_close(scaled(x, 0.5), x * 0.5)
    before = len(plans), len(built)
    for value in (0.25, -1.5, 1e-3, math.pi):
        assert_close(scaled(x, value), x * value)
        assert_close(scaled(x, value, shift=value), x * value + value)
    assert (len(plans), len(built)) == before
    assert_close(scaled(x, 3), x * 3)
    assert_close(scaled(x, True, shift=False), x)
    assert_close(scaled(x), x * 2)
    assert len(built) == before[1]  # another type of number: another plan, the same kernel


def test_another_size_is_the_same_cpu_kernel(monkeypatch):
    x = new(33, 17)
    gate(x, x[0])
    monkeypatch.setattr(cpu_compiler, "build", lambda *a: pytest.fail("compiled"))
    for shape in [(5, 9), (1000, 3), (2, 7)]:
        x = new(*shape)
        assert_close(gate(x, x[0]), torch.sigmoid(x) * x[0] + 0.5 * x)


def test_tensors_for_numbers_and_numbers_for_tensors(device):
    x, scale = new(33, 17, device=device), new(17, device=device).requires_grad_()
    out = scaled(x, scale)
    assert_close(out, x * scale)
    assert_close(torch.autograd.grad(out.sum(), scale)[0], x.sum(0), rtol=1e-5, atol=1e-4)
    assert_close(gate(x, 0.25), torch.sigmoid(x) * 0.25 + 0.5 * x)
    assert_close(gate(2, x), torch.sigmoid(torch.tensor(2.0)).item() * x + 1)
    assert_close(gate(x, torch.tensor(0.25, device=device)), gate(x, 0.25))


def test_helpers_and_fused_inside_fused(device):
    def swish(x):
        return x * frt.sigmoid(x)

    @frt.fuse
    def both(x, y):
        return swish(gate(x, y)) + scaled(x, shift=y) + frt.gelu(y) + frt.bias_relu(x, y)

    x, y = (new(33, 17, device=device).requires_grad_() for _ in range(2))
    g = torch.sigmoid(x) * y + 0.5 * x
    theirs = (
        torch.nn.functional.silu(g) + x * 2 + y + torch.nn.functional.gelu(y) + torch.relu(x + y)
    )
    ours = both(x, y)
    assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert_close(
        torch.autograd.grad(ours.sum(), (x, y)),
        torch.autograd.grad(theirs.sum(), (x, y)),
        rtol=1e-5,
        atol=1e-5,
    )


def test_functions_of_torch_inside(device):
    @frt.fuse
    def torches(x, y):
        return (
            torch.sigmoid(x)
            + torch.tanh(torch.maximum(x, y))
            + torch.where(x > 0, y, torch.exp(x))
            + torch.clamp(x, -1, 1) * torch.abs(y)
            - torch.rsqrt(y * y + 1)
            + x.__abs__()
        )

    x, y = (new(33, 17, device=device) for _ in range(2))
    assert_close(torches(x, y), torches.function(x, y), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", [
    F.relu, F.silu, F.gelu, functools.partial(F.gelu, approximate="tanh"), F.mish, F.softplus, F.hardswish,
    functools.partial(F.leaky_relu, negative_slope=0.3), F.elu, nn.SiLU(), nn.GELU("tanh"), nn.ELU(0.5),
    nn.LeakyReLU(0.2), nn.Softplus(2, 3), nn.ReLU6(),
    nn.Hardsigmoid(), nn.Hardtanh(-0.5, 2)])
def test_activations_of_torch_inside(device, activation):
    x, y = (new(33, 17, device=device).mul_(3).requires_grad_() for _ in range(2))
    ours, (a, b) = frt.fuse(lambda x, y: activation(x) * y)(x, y), (t.detach().double() for t in (x, y))
    theirs = activation(a.requires_grad_()) * b.requires_grad_()
    assert_close(ours.double(), theirs, rtol=2e-6, atol=2e-6)
    grads = torch.autograd.grad(ours.sum(), (x, y))
    assert_close([g.double() for g in grads], torch.autograd.grad(theirs.sum(), (a, b)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("epilogue", [F.silu, nn.GELU("tanh"), functools.partial(F.elu, alpha=0.5)])
def test_activations_of_torch_as_epilogues(device, epilogue):
    x = new(8, 65, device=device)
    assert_close(frt.layer_norm(x, (65,), epilogue=epilogue), epilogue(F.layer_norm(x, (65,))),
                 rtol=1e-5, atol=1e-5)
    assert_close(frt.softmax(x, -1, epilogue=epilogue), epilogue(x.softmax(-1)), rtol=1e-5, atol=1e-6)


def test_random_draws(device):
    @frt.fuse
    def noisy(x):
        return frt.where(frt.kept(0.5), x, 0), frt.where(frt.kept(0.5), x, 0)

    @frt.fuse
    def outer(x):
        return (*noisy(x), frt.where(frt.kept(0.25), x, 0))

    x = torch.ones(2**16, device=device)
    a, b, c = outer(x)
    for mask, p in ((a, 0.5), (b, 0.5), (c, 0.75), (a * b, 0.25)):  # each draws bits of its own
        assert abs(mask.mean().item() - p) < 0.02
    with pytest.raises(frt.TraceError, match="kept: only inside a fused function"):
        frt.kept(0.5)


def _keeping(p):
    return lambda x: frt.where(frt.kept(p), x, 0)


def test_draws_of_no_probability(device):
    """As constants they are refused; arguments below 0 and NaN keep all, those above 1 drop all."""
    for p in (math.nan, -0.1, math.inf):
        with pytest.raises(ValueError, match=rf"kept: p must be a probability in \[0, 1\], got {p}"):
            frt.fuse(_keeping(p))
    noisy = frt.fuse(lambda x, p: frt.where(frt.kept(p), x, 0))
    ones = torch.ones(1000, device=device)
    for p in (math.nan, -math.inf, -1e30, -1.5, 0.0):
        assert noisy(ones, p).all()
    for p in (1.0, 1.5, 40000.0, 1e30, math.inf):
        assert not noisy(ones, p).any()


def test_defaults_and_keywords(device):
    x = new(33, 17, device=device)
    alone = frt.fuse(lambda x, /, y, *, z=1.0: x + y * z)
    assert_close(alone(x, y=x, z=2.0), x * 3)
    with pytest.raises(TypeError, match="positional-only"):
        alone(x=x, y=x)
    assert_close(scaled(x), x * 2)
    assert_close(scaled(scale=3.0, x=x, shift=1), x * 3 + 1)
    assert_close(gate(y=x, x=x * 2), gate(x * 2, x))
    for args, kwargs, text in [
        ((x, 1.0, 2.0), {}, "positional"),
        ((), {}, "missing"),
        ((x,), {"no": 1}, "no"),
    ]:
        with pytest.raises(TypeError, match=text):
            scaled(*args, **kwargs)


def test_names_of_arguments_are_free(device):
    """No name that the generated code uses is taken."""

    @frt.fuse
    def plan(type, plan, acc_t, where, i, self, args, a1):
        return type - plan * 2 + acc_t * 3 - where * 4 + i * 5 - self * 6 + args * 7 - a1 * 8

    args = [new(5, device=device) for _ in range(8)]
    assert_close(plan(*args), plan.function(*args), rtol=1e-4, atol=1e-4)
    assert_close(plan(*args), plan.function(*args), rtol=1e-4, atol=1e-4)
    named = frt.fuse(name="a name")(lambda x: x + 1)
    assert_close(named(args[0]), args[0] + 1)


def test_names_of_arguments_under_a_debugger(device):
    """Which reads and writes back what is local."""
    @frt.fuse
    def total(x, _frt_known, /, _frt_check, *, _frt_run=2.0):
        return x + _frt_known * 3 + _frt_check * 5 + _frt_run

    def tracer(frame, event, arg):
        assert frame.f_locals is not None
        return tracer

    x = new(5, device=device)
    expected = total.function(x, x * 2, x * 4)
    before = sys.gettrace()
    for watching in (None, tracer):
        for _ in range(3):
            sys.settrace(watching)
            try:
                found = total(x, x * 2, _frt_check=x * 4)
            finally:
                sys.settrace(before)
            assert_close(found, expected)
    with pytest.raises(TypeError, match="'_frt_check'"):
        total(x, x)
    with pytest.raises(TypeError, match="positional"):
        total(x, x, x, x)


def test_a_function_of_numbers_alone_and_unused_arguments(device):
    x, y = new(3, 5, device=device).requires_grad_(), new(5, device=device).requires_grad_()
    out = frt.fuse(lambda x, y: x * 2)(x, y)
    assert_close(out, x * 2)
    grads = torch.autograd.grad(out.sum(), (x, y), allow_unused=True)
    assert_close(grads[0], torch.full_like(x, 2))
    assert grads[1] is None or not grads[1].any()
    assert_close(frt.fuse(lambda x: 3.0)(x), torch.full_like(x, 3))


# --- results --------------------------------------------------------------------------------------


def test_comparisons_give_bools(device):
    x = new(33, 17, device=device)
    above = frt.fuse(lambda x, y: (x > y) & ~(x > 2) | (y == 0))
    y = new(17, device=device)
    assert_close(above(x, y), (x > y) & ~(x > 2) | (y == 0))
    assert (
        above(
            torch.arange(6, device=device), torch.zeros((), dtype=torch.int32, device=device)
        ).dtype
        == torch.bool
    )
    assert not above(x.requires_grad_(), y).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "int32"])
def test_casts_to_integers(name, dtype, device):
    """Toward zero, saturating, NaN becomes 0: stored at once, or within an expression."""
    limits = torch.iinfo(getattr(torch, name))
    x = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30, 3e9, -3e9, 7e4, -7e4, 300.0, -300.0,
                      127.9, -128.9, 128.0, 255.5, 0.99, -0.99, 2.5, -2.5, -0.0], dtype=dtype)
    expected = x.double().nan_to_num(0, math.inf, -math.inf).clamp(limits.min, limits.max).trunc()
    for scale, function in (1, lambda x: frt.cast(x, name)), (0.5, lambda x: frt.cast(x, name) * 0.5):
        out = frt.fuse(function)(x.to(device)).double().cpu()
        assert_close(out, expected * scale, rtol=6e-8, atol=0)


@pytest.mark.parametrize(
    "name", ["float16", "bfloat16", "float32", "int8", "uint8", "int16", "int32", "int64", "bool"]
)
def test_an_outermost_cast_decides_the_dtype(name, device):
    x = (new(33, 17, device=device) * 50).clamp(0, 100)
    assert_close(frt.fuse(lambda x: frt.cast(x, name))(x), x.to(getattr(torch, name)))


def test_integers_in(device):
    n = torch.arange(-5, 6, device=device)
    out = frt.fuse(lambda n: frt.cast(n * 0.5, torch.float32))(n)
    assert_close(out, n * 0.5)
    mixed = frt.fuse(lambda n, x: n * x)
    assert mixed(n, new(1, device=device)).dtype == torch.float32
    assert_close(mixed(n > 0, torch.full((11,), 2.0, device=device)), (n > 0) * 2.0)


def test_numpy():
    x, y = np.random.default_rng(0).normal(size=(2, 33, 17)).astype(np.float32)
    out = gate(x, y)
    assert isinstance(out, np.ndarray)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, 1 / (1 + np.exp(-x)) * y + 0.5 * x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gate(x, 0.5), 0.5 / (1 + np.exp(-x)) + 0.5 * x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gate(x.T, y.T), out.T, rtol=1e-6)
    np.testing.assert_allclose(
        gate(x[:, ::-1].copy(), y[0, ::-1].copy()), gate(x, y[0])[:, ::-1], rtol=1e-6
    )
    frozen = x.copy()
    frozen.flags.writeable = False
    np.testing.assert_array_equal(gate(frozen, y), out)
    assert isinstance(frt.relu(np.float32(2)), np.ndarray)
    whole = frt.fuse(lambda x: (x > 0, frt.cast(x, "int8")))(x)
    np.testing.assert_array_equal(whole[0], x > 0)
    np.testing.assert_array_equal(whole[1], x.astype(np.int8))
    np.testing.assert_array_equal(frt.relu(np.array([], np.float64)), np.array([], np.float64))


def test_negative_strides_of_numpy():
    x = np.linspace(-1, 1, 9, dtype=np.float32)
    np.testing.assert_array_equal(frt.relu(x[::-1]), np.maximum(x[::-1], 0))


def test_zero_dimensions(device):
    x = torch.tensor(0.5, device=device, requires_grad=True)
    out = gate(x, 2.0)
    assert out.shape == ()
    assert_close(out, torch.sigmoid(x) * 2 + 0.5 * x)
    assert torch.autograd.grad(out, x)[0].shape == ()


@pytest.mark.gpu
def test_cupy():
    cupy = pytest.importorskip("cupy")
    x = cupy.linspace(-1, 1, 1023, dtype=cupy.float32)
    out = gate(x, x)
    assert isinstance(out, cupy.ndarray)
    np.testing.assert_allclose(out.get(), gate(x.get(), x.get()), rtol=1e-5, atol=1e-6)


# --- pickles --------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(17))
        self.gate, self.act = gate, frt.gelu

    def forward(self, x):
        return self.act(self.gate(x, self.weight))


def test_pickle_and_deepcopy():
    assert pickle.loads(pickle.dumps(gate)) is gate
    assert copy.deepcopy(gate) is gate
    for function in (frt.bias_gelu, frt.abs, frt.round, frt.where):
        assert pickle.loads(pickle.dumps(function)) is function
    net, x = Net(), new(33, 17)
    expected = net(x)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(x), expected)
        other(x).sum().backward()
        assert other.weight.grad.any()
    assert net.weight.grad is None


@pytest.mark.parametrize(
    ("function", "reference"),
    [
        (lambda x: torch.clamp(x, min=-0.5, max=1.0), lambda x: x.clamp(-0.5, 1)),
        (lambda x: torch.clamp(x, None, 0.5), lambda x: x.clamp(max=0.5)),
        (lambda x: frt.clamp(x, min=0.25), lambda x: x.clamp(min=0.25)),
        (lambda x: F.relu(x), F.relu),
        (lambda x: torch.round(torch.add(x, x, alpha=1), decimals=0), lambda x: torch.round(x + x)),
        (lambda x: np.float64(2) ** x, lambda x: 2**x),
        (lambda x: math.ceil(x) + math.trunc(x), lambda x: x.ceil() + x.trunc()),
        (lambda x: frt.where(True & (x > 0), x, 0), lambda x: torch.where(x > 0, x, 0)),
        (functools.partial(lambda x, k: x * k, k=2), lambda x: x * 2),
    ],
)
def test_what_can_be_traced(function, reference):
    x = torch.tensor([-2.5, -0.75, 0.0, 0.3, 0.8, 3.5, math.nan], requires_grad=True)
    y, expected = frt.fuse(function)(x), reference(x)
    assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    assert_close(torch.autograd.grad(y.sum(), x)[0][:-1], torch.autograd.grad(expected.sum(), x)[0][:-1])


def test_what_belongs_to_an_op_is_pickled_by_name():
    for function in (frt.add_relu.cpu, frt.add_relu.cuda, frt.add_relu.reference, frt.layer_norm.cpu):
        assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.parametrize("name", ["_known", "_run", "_check", "_general", "_local", "_type", "_errors",
                                  "_is_compiling", "_forward_ad", "TypeError", "AttributeError", "entry"])
def test_parameters_of_any_name(name):
    function = eval(f"lambda {name}, b, scale=2.0: {name} * b * scale")
    fused, x, y = frt.fuse(function), torch.randn(5), torch.randn(5)
    for _ in range(4):
        torch.testing.assert_close(fused(x, y), x * y * 2)


def test_options_that_are_false():
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])
    bounded = frt.fuse(lambda a: torch.clamp(a, min=False, max=1))
    torch.testing.assert_close(bounded(x), x.clamp(0, 1))
    torch.testing.assert_close(frt.fuse(lambda a: torch.nn.functional.relu(a, inplace=False))(x), x.relu())
    with pytest.raises(frt.TraceError):
        frt.fuse(lambda a: torch.nn.functional.relu(a, inplace=True))(x)


def test_long_chains():
    def root(x):
        y = x
        for _ in range(500):
            y = 0.5 * (y + x / y)
        return y

    x = torch.rand(5) + 0.5
    assert_close(frt.fuse(root)(x), x.sqrt())


def test_ops_that_look_at_their_arguments_take_traced_values(device):
    x = torch.randn(4, 8, device=device)
    q = frt.quantize_int8(x, 0.05)
    prelu = frt.fuse(lambda x, alpha: frt.prelu_bias(x, alpha, 0.1))
    torch.testing.assert_close(prelu(x, 0.25), frt.prelu_bias(x, 0.25, 0.1))
    dequantize = frt.fuse(lambda q, scale: frt.dequantize_int8(q, scale, 3.0))
    torch.testing.assert_close(dequantize(q, 0.05), frt.dequantize_int8(q, 0.05, 3.0))
    found = []
    for drop in (frt.fuse(lambda x, p: frt.gelu_dropout(x, p)), frt.gelu_dropout):
        torch.manual_seed(0)
        found.append(drop(x, 0.5))
    torch.testing.assert_close(*found)
