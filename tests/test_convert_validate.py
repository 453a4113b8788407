"""Converted models are proved against float64; what is wrong is found, undone and named."""

import copy
import random
import re
import threading

import numpy as np
import pytest
import torch
from convert_net import X, assert_same, installed_passes, one_thread, replaced_by, small_net  # noqa: F401  (fixtures)
from torch import nn

import fusionrt as frt
from fusionrt import convert
from fusionrt.convert import inputs as inputs_of_models
from fusionrt.convert.inputs import Inputs
from fusionrt.convert.model import record_of
from fusionrt.convert.speed import call
from fusionrt.convert.undisturbed import undisturbed
from fusionrt.convert.validate import Judge, ValidationError


def other_relu(x):
    return torch.where(x > 0, x, 0.0)


def failing(x):
    raise RuntimeError("no kernel")


def test_right_replacements_stay(net, with_passes):
    names = with_passes(good=replaced_by(other_relu))
    converter = convert.ModelConverter(passes=names, measure=False)
    fast = converter.convert_model(net, example_inputs=X)
    assert_same(fast(X), net(X))
    assert converter.conversion_stats["norm_replaced"] == 2
    assert converter.conversion_stats["total_replaced"] == 2
    verdict = record_of(fast).verdict
    assert verdict.accepted
    assert 0 < verdict.error <= 2 * verdict.own_error + 2.4e-7
    assert (verdict.samples, verdict.exact) == (3, "float64")


@pytest.mark.parametrize(("wrong", "reason"), [
    (torch.sigmoid, "too inaccurate: error "), (failing, "RuntimeError: no kernel"),
    (lambda x: torch.relu(x).double(), "output has dtype torch.float64 instead of torch.float32"),
    (lambda x: torch.relu(x) * 1.0001, "too inaccurate: error ")])
def test_the_guilty_replacement_is_undone(net, with_passes, wrong, reason):
    """The second relu is the first in line, once one was replaced already."""
    net.drop = nn.Identity()
    names = with_passes(before=replaced_by(other_relu, lambda k: k == 0), wrong=replaced_by(wrong),
                        after=replaced_by(other_relu))
    fast = frt.auto_convert_model(net, example_inputs=X, passes=names)
    record = record_of(fast)
    assert record.verdict.accepted
    assert list(record.rolled_back) == ["wrong:relu_1"]
    assert record.counts == {"norm": 2}
    assert_same(fast(X), net(X))
    assert f"Undone: wrong:relu_1 ({reason}" in " ".join(str(convert.conversion_report(fast)).split())


def test_a_pass_of_which_no_single_replacement_is_to_blame_is_left_out(net, with_passes):
    def hidden(edits):
        """Wrong, and without a key."""
        for n in edits.graph.nodes:
            if n.target is torch.relu:
                n.target = torch.sigmoid
        edits.changed()

    names = with_passes(hidden=hidden, good=replaced_by(other_relu))
    fast = frt.auto_convert_model(net, example_inputs=X, passes=names)
    assert list(record_of(fast).rolled_back) == ["hidden"]
    assert record_of(fast).options.passes == ("good",)
    assert_same(fast(X), net(X))


def test_strict_and_threshold(net, with_passes):
    names = with_passes(wrong=replaced_by(lambda x: torch.relu(x) * 1.001))
    with pytest.raises(ValidationError, match=r"Net: too inaccurate: error \S+, the original's own"):
        frt.auto_convert_model(net, example_inputs=X, passes=names, strict=True)
    fast = frt.auto_convert_model(net, example_inputs=X, passes=names, accuracy_threshold=0.01, strict=True)
    assert record_of(fast).verdict.accepted
    assert record_of(fast).counts == {"norm": 2}


def test_a_graph_that_is_wrong_by_itself_is_an_error(net, monkeypatch):
    from fusionrt.convert import capture
    monkeypatch.setattr(capture, "backend", lambda gm, inputs, options: lambda *args: [
        t * 2 if isinstance(t, torch.Tensor) else t for t in gm.forward(*args)])
    with pytest.raises(ValidationError, match="even without any replacement the captured model is not "):
        frt.auto_convert_model(net, example_inputs=X)


class Noisy(nn.Module):
    """Random in evaluation mode, counts its calls, remembers."""

    def __init__(self, noise=1.0):
        super().__init__()
        self.noise, self.calls = noise, 0
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.calls += 1
        self.mean += x.mean(0)
        return torch.relu(x + self.mean) + self.noise * torch.rand_like(x)


def test_random_results_cannot_be_judged():
    verdict = record_of(frt.auto_convert_model(Noisy(), example_inputs=X)).verdict
    assert verdict.accepted is None
    assert str(verdict) == "two runs of the original differ: its results are random"


class Chosen(nn.Module):
    """How many elements it returns depends on roundings, or on random numbers."""

    def __init__(self, at_random):
        super().__init__()
        self.first, self.second, self.at_random = nn.Linear(64, 64), nn.Linear(64, 64), at_random

    def forward(self, x):
        y = self.second(torch.relu(self.first(x))).flatten()
        if self.at_random:
            return y[torch.rand_like(y) > 0.5], nn.functional.dropout(nn.functional.gelu(y), 0.5, True)
        return y[y * 1e7 - (y * 1e7).round() > 0]


@pytest.mark.parametrize("at_random", [False, True])
def test_shapes_that_depend_on_numbers(at_random):
    fast = frt.auto_convert_model(Chosen(at_random).eval(), example_inputs=torch.randn(50, 64))
    verdict = record_of(fast).verdict
    if at_random:
        assert verdict.accepted is None and "its results are random" in str(verdict)
    else:
        assert verdict.accepted and verdict.exact == "the original itself"


def test_what_dynamo_leaves_alone_is_reported():
    class Opaque(nn.Module):
        @torch.compiler.disable
        def forward(self, x):
            return nn.functional.gelu(x.sin())

    class Mapped(nn.Module):
        def forward(self, x):
            return torch.func.vmap(lambda row: row.cumsum(0))(nn.functional.gelu(x))

    whole = convert.conversion_report(frt.auto_convert_model(Opaque(), torch.randn(2, 5)))
    assert "No graph was captured" in str(whole) and "Validation: accepted" in str(whole)
    mapped = frt.auto_convert_model(Mapped(), torch.randn(3, 8))
    assert "0 replacements in 1 graph" in str(convert.conversion_report(mapped))


def test_validation_leaves_no_trace():
    model = nn.Sequential(Noisy(0.0), nn.BatchNorm1d(8)).train()
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    fast = frt.auto_convert_model(model, example_inputs=X)
    assert record_of(fast).verdict.accepted
    assert_same(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert (model[0].calls, fast[0].calls) == (0, 0)
    assert (model.training, fast.training, fast[1].training) == (True, True, True)
    assert torch.equal(torch.get_rng_state(), random)


def average(p, q):
    return p * 0.9 + q * 0.1


class Teacher(nn.Module):
    """Follows its student in evaluation mode too, and keeps short rows."""

    def __init__(self, follow):
        super().__init__()
        self.student, self.teacher, self.follow = nn.Linear(8, 8), nn.Linear(8, 8), follow
        self.rows = nn.Embedding(5, 8, max_norm=0.5)

    def forward(self, x):
        with torch.no_grad():
            for p, q in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                self.follow(p, q)
        return torch.relu(self.student(x)) + self.teacher(x) + self.rows(x.argmax(1) % 5)


@pytest.mark.parametrize("follow", [
    lambda p, q: p.copy_(average(p, q)), lambda p, q: p.data.copy_(average(p, q)),
    lambda p, q: setattr(p, "data", average(p.data, q.data))], ids=["in place", "unseen", "other memory"])
def test_weights_that_a_call_writes_to_are_as_before(follow):
    model = Teacher(follow).eval()
    untouched, places = copy.deepcopy(model), [p.data_ptr() for p in model.parameters()]
    fast = frt.auto_convert_model(model, (4, 8))
    assert str(record_of(fast).verdict).startswith("accepted")
    assert_same(dict(model.state_dict()), dict(untouched.state_dict()), rtol=0, atol=0)
    assert [p.data_ptr() for p in model.parameters()] == places
    with torch.no_grad():
        for _ in range(2):
            assert_same(fast(X), untouched(X))


def test_of_weights_that_no_call_writes_to_one_copy_is_made(net):
    unwritten = set()
    for copied in (set(map(id, net.parameters())), set()):
        with undisturbed(net, unwritten=unwritten) as state:
            assert {id(t) for t in state if isinstance(t, nn.Parameter)} == copied
            net(X)
    assert unwritten == set(map(id, net.parameters()))


class Drawing(nn.Module):
    """Noise of every kind of generator, of the modules' own and of everybody's."""

    def __init__(self):
        super().__init__()
        self.layer, self.torch, self.python = nn.Linear(8, 8), torch.Generator(), (random.Random(1),)
        self.numpy = {"new": np.random.default_rng(1), "old": np.random.RandomState(1)}
        self.bits = np.random.PCG64(1)

    @torch._dynamo.disable
    def draw(self):
        return (torch.rand((), generator=self.torch).item(), torch.rand(()).item(), random.random(),
                self.python[0].gauss(0, 1), *(of.normal() for of in self.numpy.values()), np.random.rand(),
                self.bits.random_raw() / 2**64)

    def forward(self, x):
        return torch.relu(self.layer(x)) + sum(self.draw())


def test_validation_draws_from_no_generator():
    model = Drawing().eval()
    twin, states = copy.deepcopy(model), (random.getstate(), np.random.get_state(), torch.get_rng_state())
    fast = frt.auto_convert_model(model, example_inputs=X)
    assert record_of(fast).verdict.accepted
    drawn = model.draw()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    assert drawn == twin.draw()


class Cache:
    def __init__(self, seen, lock=None):
        self.seen, self.lock = seen, lock


class Reader(nn.Module):
    """Of what a cache holds, which then holds more, or of what an iterator gives."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, given):
        if isinstance(given, Cache):
            given.seen.append(torch.relu(self.layer(given.seen[-1])))
            return torch.stack(given.seen)
        return torch.stack([torch.relu(self.layer(x)) for x in given])


leaf = torch.randn(16, 8, requires_grad=True)
COPIED = {"a recorded cache": lambda: Cache([X, leaf.exp(), leaf.exp().t().contiguous().t()]),
          "an iterator": lambda: iter([X, X + 1])}
NOT_COPIED = {"generator": lambda: (X + k for k in range(2)), "lock": lambda: Cache([X], threading.Lock())}


@pytest.mark.parametrize("kind", [*COPIED, *NOT_COPIED])
def test_what_is_given_is_not_used_up(kind):
    make = (COPIED | NOT_COPIED)[kind]
    model, given, untouched = Reader(), make(), make()
    fast = frt.auto_convert_model(model)
    if kind in COPIED:
        call(model, Inputs((given,)))()
    assert_same(fast(given), model(untouched))
    if isinstance(given, Cache):
        assert_same(given.seen, untouched.seen)
    verdict = str(record_of(fast).verdict)
    if kind in COPIED:
        assert verdict.startswith("accepted: error")
        return
    assert re.fullmatch(rf"the arguments \(\w+\) cannot be copied: cannot pickle '.*{kind}' object", verdict)
    with pytest.raises(TypeError, match=re.escape(verdict)):
        convert.validate_optimization(model, fast, (make(),))


def test_what_knows_no_float64_is_compared_with_something_else():
    class Narrow(nn.Module):
        def __init__(self, widest):
            super().__init__()
            self.widest, self.weight = widest, nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            if x.dtype.itemsize > self.widest:
                raise RuntimeError("no such kernel")
            return x @ self.weight

    half = Narrow(4).bfloat16()
    assert Judge(half, Inputs((X.bfloat16(),)))(half).exact == "float32"
    for model, x in ((Narrow(4), X), (Narrow(8).double(), X.double())):
        assert Judge(model, Inputs((x,)))(model).exact == "the original itself"


def test_results_that_do_not_depend_on_anything_are_no_proof():
    head = nn.Linear(8, 8)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    verdict = Judge(head, Inputs((X,)))(head)
    assert (verdict.accepted, verdict.reason) == (None, "every result is zero, whatever the inputs are")


class Given(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(("wrong", "reason"), [
    (lambda x: (x.argmax(1), x), "returned output (tuple)[1] instead of nothing"),
    (lambda x: x.argmax(1), "returned output instead of output (tuple)[0]"),
    (lambda x: (x.argmax(1)[:-1],), "output (tuple)[0] has shape torch.Size([15]) instead of torch.Size([16"),
    (lambda x: ((x.argmax(1) + 1) % 8,), "too inaccurate"),
    (lambda x: (x.argmin(1),), "too inaccurate"),
])
def test_structure_and_integers(wrong, reason):
    verdict = Judge(Given(lambda x: (x.argmax(1),)), Inputs((X,)))(Given(wrong))
    assert verdict.accepted is False
    assert reason in str(verdict)


class Rounding(nn.Module):
    """Less exact for images in channels_last memory, or for none."""

    def __init__(self, last=True):
        super().__init__()
        self.last = last

    def forward(self, x):
        rounds = self.last and x.is_contiguous(memory_format=torch.channels_last)
        return x * (1 + 1e-3 * rounds * (x.dtype == torch.float32))


@pytest.mark.parametrize("setting", [True, False])
def test_tf32_of_the_other_memory_format_is_the_originals_own(monkeypatch, setting):
    """Where cuDNN may take it in one of them alone, the converted model does what the original may."""
    monkeypatch.setattr(inputs_of_models, "IMAGES_ON", ("cpu",))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", setting)
    image = torch.randn(4, 8, 16, 16)
    verdict = Judge(Rounding(), Inputs((image,)))(Given(lambda x: x * (1 + 1e-3)))
    assert verdict.accepted is setting
    assert (verdict.own_error == pytest.approx(1e-3, rel=0.01)) is setting
    again = Judge(Rounding(last=False), Inputs((image,)))(Given(lambda x: x * (1 + 1e-3)))
    assert again.accepted is False


def test_nan_where_none_belongs():
    reference = Given(lambda x: torch.where(x > 0, x, float("nan")))
    assert Judge(reference, Inputs((X,)))(Given(torch.relu)).accepted, "the original is NaN there"
    assert Judge(Given(torch.relu), Inputs((X,)))(reference).accepted is False


def test_undisturbed_restores_what_an_exception_left(net):
    before = dict(vars(net.train()))
    with pytest.raises(KeyError), undisturbed(net):
        net.scale.zero_()
        net.extra = 1
        raise KeyError
    assert vars(net) == before
    assert torch.equal(net.scale, torch.full((8,), 0.5))


class State:
    steps = 0


class Remembering(nn.Module):
    """Keeps what it has seen where no state_dict looks."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen, self.counts = nn.Linear(8, 8), [], {"calls": 0}
        self.state, self.last = State(), ([None],)

    def forward(self, x):
        self.seen.append(self.layer(x).relu())
        self.counts["calls"] += 1
        self.state.steps += 1
        self.last[0][0] = x
        return torch.stack(self.seen).sum(0) + self.state.steps


def test_validation_leaves_no_trace_in_what_attributes_hold():
    model, x = Remembering().eval(), torch.randn(2, 8)
    untouched = copy.deepcopy(model)
    fast = frt.auto_convert_model(model, example_inputs=x)
    for module in (model, fast):
        assert (module.seen, module.counts, module.state.steps) == ([], {"calls": 0}, 0)
        assert module.last == ([None],)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), untouched(x))
    fresh = copy.deepcopy(model)
    convert.validate_optimization(model, fresh, x)
    assert not model.seen and not fresh.seen


class Graph(nn.Module):
    """A layer on a graph, whose edges are a sparse buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("edges", torch.eye(4).to_sparse())
        self.seen = [self.edges]

    def forward(self, x):
        return torch.sparse.mm(self.edges, torch.relu(self.layer(x))) + 1


def of_inference():
    with torch.inference_mode():
        return torch.full((3,), float("nan"))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
@pytest.mark.parametrize("make", [
    lambda: torch.eye(3).to_sparse(), lambda: torch.full((1,), float("nan")).expand(3),
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), of_inference,
    lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)],
    ids=["sparse", "expanded", "nested", "inference", "quantized"])
def test_tensors_that_torch_does_not_compare(make):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    model.state = State()
    model.state.tensor = make()
    with undisturbed(model):
        pass
    assert record_of(frt.auto_convert_model(model, (4, 8))).verdict.accepted


def test_sparse_buffers():
    model, x = Graph().eval(), torch.randn(4, 8)
    fast = frt.auto_convert_model(model, example_inputs=x)
    assert record_of(fast).verdict.accepted
    torch.testing.assert_close(fast(x), model(x))


class Returning(nn.Module):
    """`make` of two of a layer's results."""

    def __init__(self, make):
        super().__init__()
        self.layer, self.make = nn.Linear(8, 8), make

    def forward(self, x):
        return self.make(torch.relu(self.layer(x)), self.layer(x)[:1])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR")
@pytest.mark.parametrize("make", [lambda a, b: a.to_sparse(), lambda a, b: a.to_sparse_csr(),
                                  lambda a, b: torch.nested.as_nested_tensor([a, b], layout=torch.jagged)],
                         ids=["coo", "csr", "jagged"])
def test_results_that_are_not_strided(make):
    model, x = Returning(make).eval(), torch.randn(4, 8)
    fast = frt.auto_convert_model(model, example_inputs=x)
    assert record_of(fast).verdict.accepted
    wrong = copy.deepcopy(model)
    wrong.layer.bias.data += 1e-2
    assert not Judge(wrong, Inputs((x,), {}))(fast).accepted


def test_expanded_tensors_are_put_back(net):
    net.register_buffer("wide", torch.zeros(1).expand(3))
    with undisturbed(net):
        net.wide[:1].fill_(1)
    assert net.wide.tolist() == [0, 0, 0]


def test_converted_models_follow_our_optimizers():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()).eval()
    x = torch.randn(2, 3, 6, 6)
    fast = frt.auto_convert_model(model, example_inputs=x)
    optimizer = frt.optim.AdamW(model.parameters(), lr=0.1)
    with torch.no_grad():
        fast(x)
    model(x).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
