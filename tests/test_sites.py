"""Calls that are made again (sites.Sites, dispatch.front): a short way for equal calls, and no others."""

import pytest
import torch
from checking import frames
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.testing import assert_close

import fusionrt as frt
from fusionrt import settling
from fusionrt.dispatch import front
from fusionrt.sites import Sites

ROWS, COLUMNS = 6, 16


def asked(op):
    """What the op's entry function remembers in this thread."""
    return op.__globals__["_frt_local"].__dict__.get("last")


@pytest.fixture
def x(device):
    return torch.randn(ROWS, COLUMNS, device=device)


def call(*args, **options):
    return args, options


def of_layer_norm(w):
    return [call(COLUMNS), call(COLUMNS, w), call(COLUMNS, w, w), call(COLUMNS, w, w, 0.5),
            call((ROWS, COLUMNS)), call(COLUMNS, epilogue=frt.relu), call(COLUMNS, epilogue=frt.silu),
            call(COLUMNS, return_stats=True), call(COLUMNS, residual=w.expand(ROWS, COLUMNS)), call(COLUMNS)]


def of_rms_norm(w):
    return [call(COLUMNS, w), call(w), call(COLUMNS, w, weight_offset=1), call(COLUMNS, w, 0.5),
            call(COLUMNS, w)]


def of_add_norm(w):
    residual = w.expand(ROWS, COLUMNS)
    return [call(residual, w, w), call(residual), call(residual, w, w, 0.5)]


def of_softmax(w):
    return [call(), call(0), call(scale=2.0), call(scale=w), call(mask=w), call(mask=w > 0),
            call(causal=True), call(-1), call(epilogue=frt.tanh), call(-1, torch.float64),
            call(-1, torch.float16), call()]


def of_cross_entropy(w):
    t = torch.arange(ROWS, device=w.device)
    return [call(t), call(t, w.abs()), call(t, None, 3), call(t, reduction="sum"), call(t, reduction="none"),
            call(t, label_smoothing=0.1), call(t, softcap=3.0), call(t)]


def of_linear(w):
    weight, residual = torch.outer(w, w), w.expand(ROWS, COLUMNS)
    return [call(weight), call(weight, w), call(weight, w, "relu"), call(weight, w, frt.silu),
            call(weight, w, "relu", residual=residual), call(weight, None, "relu", training=False),
            call(weight, w)]


def of_ffn(w):
    weight = torch.outer(w, w)
    return [call(weight, w, weight, w), call(weight, w, weight, None), call(weight, None, weight, w),
            call(weight, w, weight, w, "relu"), call(weight, w, weight, w, recompute=True)]


def of_mlp(w):
    weight = torch.outer(w, w)
    return [call(weight, weight, weight), call(weight, None, weight[:, :8]),
            call(weight, weight, weight, gate_bias=w), call(weight, weight, weight, down_bias=w)]


# Of each op calls that differ in one thing from the one before: what was remembered would be another result.
CALLS = {
    frt.layer_norm: of_layer_norm, frt.rms_norm: of_rms_norm, frt.add_norm: of_add_norm,
    frt.softmax: of_softmax, frt.log_softmax: of_softmax, frt.cross_entropy: of_cross_entropy,
    frt.sum: lambda w: [call(), call(0), call(0, True), call(1), call((0, 1)), call([0, 1]), call(),
                       call(1, dtype=torch.float64), call(1, dtype=torch.float16), call(1)],
    frt.var: lambda w: [call(-1), call(-1, 0), call(-1, 0.0), call(-1, 2), call(-1, 1, True)],
    frt.norm: lambda w: [call(2, -1), call(1, -1), call(float("inf"), -1), call(2, -1, keepdim=True),
                         call(3, -1), call(-1, -1), call(4.5, -1), call(3.0, -1),
                         call(3, -1, dtype=torch.float64)],
    frt.linear_activation: of_linear, frt.ffn: of_ffn, frt.swiglu_mlp: of_mlp,
    frt.linear_gelu: lambda w: [call(torch.outer(w, w)), call(torch.outer(w, w), approximate="tanh")],
    frt.row_reduce: lambda w: [call(-1), call(-1, frt.relu), call(-1, frt.silu), call(-1, None, "max"),
                              call(-1, "gelu"), call(-1, torch.nn.ReLU())],
}


@pytest.mark.parametrize(("op", "calls"), CALLS.items(), ids=[op.__name__ for op in CALLS])
def test_other_calls_in_between(op, calls, x):
    """Each call, again and after all others, gives the bits of one in a thread that remembers nothing."""
    w = torch.randn(COLUMNS, device=x.device)
    listed = calls(w)
    expected = []
    for args, options in listed:
        op.__globals__["_frt_local"].__dict__.clear()
        op.__globals__["_frt_sites"].known.clear()
        expected.append(op(x, *args, **options))
    for _ in range(2):
        for (args, options), first in zip(listed, expected, strict=True):
            for _ in range(2):
                assert_close(op(x, *args, **options), first, rtol=0, atol=0)


def test_a_class_to_ignore_is_an_integer_each_time(x):
    target = torch.arange(ROWS, device=x.device)
    for _ in range(3):
        frt.cross_entropy(x, target, ignore_index=1)
        for wrong in (True, 1.0):
            with pytest.raises(TypeError, match="ignore_index must be an integer"):
                frt.cross_entropy(x, target, ignore_index=wrong)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("op", "call"), {
    "layer_norm": lambda x: frt.layer_norm(x, COLUMNS), "softmax": frt.softmax, "sum": frt.sum,
    "linear_relu": lambda x: frt.linear_relu(x, torch.ones(2, COLUMNS), None),
    "cross_entropy": lambda x: frt.cross_entropy(x, x),
    "attention_score": lambda x: frt.attention_score(x, x)}.items())
def test_nested_tensors(op, call):
    """Which have no sizes, and of which torch speaks of an internal error."""
    with pytest.raises(TypeError, match=f"{op}: .* must be a dense tensor, got a nested one"):
        call(torch.nested.nested_tensor([torch.randn(rows, COLUMNS) for rows in (2, 3)]))


def test_what_is_equal_may_still_be_refused(x):
    for _ in range(3):
        frt.layer_norm(x, COLUMNS), frt.softmax(x, 1), frt.sum(x, 1)
        for call in (lambda: frt.layer_norm(x, float(COLUMNS)), lambda: frt.softmax(x, 1.0),
                     lambda: frt.softmax(x, True), lambda: frt.sum(x, 1.0), lambda: frt.sum(x, True)):
            with pytest.raises(TypeError, match="must be"):
                call()


@pytest.mark.parametrize("op", [
    frt.relu, lambda x: frt.add_relu(x, x), lambda x: frt.bias_gelu(x, x[0]), lambda x: frt.leaky_relu(x, .5),
    lambda x: frt.layer_norm(x, x.shape[-1:]), frt.softmax, lambda x: frt.sum(x, -1)])
def test_shapes_in_turn(op, x, monkeypatch):
    """As a model has them: each is known again at once, whichever was the last."""
    monkeypatch.setattr(settling, "SETTLED_AFTER", 1)
    inputs = [torch.randn(rows, columns, device=x.device) for rows in (3, 5) for columns in (16, 24)]
    inputs += [inputs[0].double(), inputs[0].clone().requires_grad_()]
    expected = [op(each) for each in inputs]
    for _ in range(4):
        for each, wanted in zip(inputs, expected, strict=True):
            assert_close(op(each), wanted, rtol=0, atol=0)
    for each in inputs:
        assert {"_resume", "__call__", "find"}.isdisjoint(frames(lambda each=each: op(each)))


@pytest.mark.parametrize("op", [frt.gelu, lambda x: frt.layer_norm(x, COLUMNS), frt.softmax])
def test_lengths_that_were_met_before_take_the_short_way(op, device):
    """Long before they settle: as those of sequences, of which few are met a hundred times."""
    inputs = [torch.randn(n, COLUMNS, device=device) for n in range(2, 9)]
    for each in inputs * 3:  # of an op's first numbers nothing is kept at once
        op(each)
    for each in inputs:
        assert {"_resume", "__call__", "find"}.isdisjoint(frames(lambda each=each: op(each)))


def test_calls_in_turns_that_differ_where_keys_do_not_look(x, monkeypatch):
    """A residual with or without a gradient, of other strides; numbers: each is planned once."""
    sites, planned = frt.layer_norm.__globals__["_frt_sites"], []
    keep = sites.keep
    monkeypatch.setattr(sites, "keep", lambda *args: planned.append(args) or keep(*args))
    residual = torch.randn_like(x)
    residuals = [residual, residual.clone().requires_grad_(), residual.t().contiguous().t()]
    for _ in range(4):
        for residual in residuals:
            for eps in (0.125, 0.25):
                assert_close(frt.layer_norm(x, COLUMNS, eps=eps, residual=residual),
                             F.layer_norm(x + residual, (COLUMNS,), eps=eps))
    # Numbers that no call had are not kept at once.
    assert len(planned) == len(residuals) * 2


@pytest.mark.parametrize("shape", [tuple, torch.Size], ids=["tuple", "torch.Size"])
def test_a_shape_that_equals_another_is_known_again(x, shape, monkeypatch):
    """That of x.shape[-1:], or of (self.dim,), is another object in each call; one of floats is refused."""
    def made():
        return shape([COLUMNS])

    monkeypatch.setattr(settling, "SETTLED_AFTER", 1)
    [frt.layer_norm(x, made()) for _ in range(4)]
    assert asked(frt.layer_norm) is not None
    with pytest.raises(TypeError, match="must be"):
        frt.layer_norm(x, (float(COLUMNS),))
    frt.layer_norm(x, made()), frt.layer_norm(x, made())
    monkeypatch.setitem(frt.layer_norm.__globals__, "_frt_general", None)
    assert_close(frt.layer_norm(x, made()), F.layer_norm(x, (COLUMNS,)))


def test_options_that_may_change_are_not_remembered(x, monkeypatch):
    monkeypatch.setattr(settling, "SETTLED_AFTER", 1)
    [frt.sum(x, 1) for _ in range(4)]
    assert asked(frt.sum) is not None
    dims, before = [0], asked(frt.sum)
    assert frt.sum(x, dims).shape == (COLUMNS,) and asked(frt.sum) is before
    dims.append(1)
    assert frt.sum(x, dims).shape == ()
    frt.layer_norm(x, torch.ones(COLUMNS, device=x.device))
    assert asked(frt.layer_norm) is None or torch.Tensor not in map(type, asked(frt.layer_norm))


def test_numbers_of_a_module_may_change(x, monkeypatch):
    monkeypatch.setattr(settling, "SETTLED_AFTER", 1)
    weight, module = torch.eye(COLUMNS, device=x.device), torch.nn.LeakyReLU(0.1)
    for slope in (0.1, 0.5):
        module.negative_slope = slope
        for _ in range(4):
            assert_close(frt.linear_activation(x, weight, None, module), F.leaky_relu(x, slope))
            assert_close(frt.ffn(x, weight, None, weight, None, module), F.leaky_relu(x, slope))


def test_gradients_are_recorded_where_they_are(x):
    w = torch.randn(COLUMNS, device=x.device, requires_grad=True)
    for _ in range(3):
        assert frt.layer_norm(x, COLUMNS, w).requires_grad
        with torch.no_grad():
            assert not frt.layer_norm(x, COLUMNS, w).requires_grad
        assert not frt.layer_norm(x, COLUMNS, w.detach()).requires_grad
        grad, = torch.autograd.grad(frt.layer_norm(x, COLUMNS, w).sum(), w)
        assert_close(grad, F.layer_norm(x, (COLUMNS,)).sum(0))


def test_tensors_of_another_kind(x):
    for _ in range(2):
        for other in (x, x.double(), x[:3], x.t().contiguous().t(), x[:, :8].contiguous(), x[None]):
            assert_close(frt.softmax(other), torch.softmax(other, -1))
            assert_close(frt.layer_norm(other, other.shape[-1:]), F.layer_norm(other, other.shape[-1:]))


def test_dropouts_draw_anew(x):
    r = torch.zeros_like(x)
    first, second = (frt.dropout_add_layer_norm(x, r, p=0.5) for _ in range(2))
    assert not torch.equal(first, second)


def test_what_another_op_was_told_is_not_taken(x):
    """An op that asks by way of another one, for other tensors of the same kind."""
    sites = Sites()

    def of(x):
        return sites.find((), (x,)) or sites.keep((), (x,), lambda x: x + 1)

    def doubled(x):
        twice = 2 * x
        return of(twice)(twice)

    for op in (front(doubled, sites, "x"), front(lambda x: of(x)(x), sites, "x")):
        assert all(torch.equal(op(x), 2 * x + 1 if op.__name__ == "doubled" else x + 1) for _ in range(3))


def test_settles_where_it_is(x, monkeypatch):
    monkeypatch.setattr(settling, "SETTLED_AFTER", 2)
    sites, made = Sites(), []

    def run(x):
        return "first"

    def settled():
        made.append(lambda x: "settled")
        return made[-1]

    def op(x):
        return (sites.find((), (x,)) or sites.keep((), (x,), settling.prepare_settling(run, settled)))(x)

    op = front(op, sites, "x")
    assert [op(x) for _ in range(6)] == ["first"] * 3 + ["settled"] * 3
    assert len(made) == 1


def test_tensors_in_the_place_of_numbers(x):
    eps = torch.tensor(1e-5, device=x.device)
    for _ in range(3):
        assert not frt.layer_norm(x, COLUMNS, None, None, eps).requires_grad
    eps.requires_grad_()
    assert frt.layer_norm(x, COLUMNS, None, None, eps).requires_grad
    eps.data = torch.tensor(0.5, dtype=torch.float64, device=x.device)
    assert_close(frt.layer_norm(x, COLUMNS, None, None, eps), F.layer_norm(x, (COLUMNS,), None, None, 0.5))


def test_numbers_that_change_each_time_are_not_kept(x):
    known = frt.softmax.__globals__["_frt_sites"].known
    frt.softmax(x), frt.softmax(x)
    before = len(known)
    for k in range(1, 9):
        assert_close(frt.softmax(x, scale=1 / k), torch.softmax(x / k, -1))
    assert len(known) == before
    frt.softmax(x, scale=1 / 8)
    assert len(known) == before + 1


@pytest.mark.parametrize("times", [0, 3])
def test_make_fx_of_real_tensors(x, times):
    """Its mode is none that guards know."""
    w, other = torch.randn(COLUMNS, device=x.device, requires_grad=True), torch.randn_like(x)
    for op in (lambda x: frt.layer_norm(x, COLUMNS, w), lambda x: frt.softmax(x),
               lambda x: frt.gelu(x), lambda x: frt.sum(x, 1)):
        for _ in range(times):
            op(x)
        graph = make_fx(op)(x)
        assert_close(graph(other), op(other))
