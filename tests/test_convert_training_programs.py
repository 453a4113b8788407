"""Programs of users that replays of training steps must serve, or leave alone."""

import threading

import pytest
import torch
from convert_checks import compiled
from test_convert_training import captures, layer, made, step, warmed, weights  # noqa: F401  (a fixture)
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fusionrt as frt
from fusionrt.convert import capture, replay, training
from fusionrt.convert.replay import Roles
from fusionrt.convert.training import WATCHED, Training

CPU = torch.device("cpu")


@pytest.fixture
def converted(captures, monkeypatch):  # noqa: F811
    """A model whose steps are replayed, here as on a GPU."""
    monkeypatch.setattr(replay, "device_of_graph", lambda gm: CPU)
    monkeypatch.setattr(capture, "device_of_graph", lambda gm: None)

    def convert(model):
        captures.model = model
        return frt.auto_convert_model(model, validate_accuracy=False)

    return convert


def test_a_checkpoint_that_computes_it_again(converted, monkeypatch):
    """The engine calls it from a thread of its own, for which whoever captures would wait."""
    own = training._gradients

    def in_a_thread(*args):
        found = []
        thread = threading.Thread(target=lambda: found.append(own(*args)), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), "waits for the lock that its caller holds"
        return found[0]

    monkeypatch.setattr(training, "_gradients", in_a_thread)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    fast = converted(model)
    for _ in range(4):
        x, grads = torch.randn(3, 8), []
        for run in (model, fast):
            model.zero_grad()
            checkpoint(run, x, use_reentrant=False).square().sum().backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        assert_close(*grads)


class Router(nn.Module):
    """A result whose derivative is infinite where a weight is 0, and which nobody differentiates."""

    def __init__(self):
        super().__init__()
        self.gate, self.out = nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, x):
        p = torch.relu(self.gate(x))
        p = p / (p.sum(-1, keepdim=True) + 1e-6)
        return self.out(x) * p[:, :1], -(p * p.log()).nansum(-1)


def test_results_that_nobody_differentiates(converted, captures):  # noqa: F811
    model = Router()
    fast = converted(model)
    for _ in range(WATCHED + 3):
        x, grads = torch.randn(16, 8), []
        for run in (model, fast):
            model.zero_grad()
            run(x)[0].sum().backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        assert_close(*grads)
    assert len(captures) == 2
    for _ in range(3):  # now somebody does
        x, grads = torch.randn(16, 8), []
        for run in (model, fast):
            model.zero_grad()
            y, entropy = run(x)
            (y.sum() + entropy[:1].sum()).backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        assert_close(*grads, equal_nan=True)
    assert len(captures) == 2


def test_other_results_of_what_draws_random_numbers(captures):  # noqa: F811
    """Another call would draw others."""
    ours = Training(lambda x, w: (x @ w, (x @ w).square()), CPU, Roles(weights=[1]), draws=True)
    w = torch.randn(4, 5, requires_grad=True)
    for _ in range(WATCHED + 2):
        ours(torch.randn(3, 4), w)[0].sum().backward()
        w.grad = None
    with pytest.raises(RuntimeError, match="only through the results that the first calls were"):
        ours(torch.randn(3, 4), w)[1].sum().backward()
    ours(torch.randn(3, 4), w)[1].sum().backward()


def test_gradients_that_somebody_keeps_stay(captures):  # noqa: F811
    """Also where they go after the next forward pass."""
    (ours, _), mine, others = made(), weights(), weights()
    products = []
    for run, parameters in ((layer, others), (ours, mine)):
        torch.manual_seed(0)
        before, found = None, []
        for _ in range(WATCHED + 5):
            loss = run(torch.randn(3, 4), *parameters)[0].square().sum()
            for p in parameters:
                p.grad = None
            loss.backward()
            if before is not None:
                found.append(sum((p.grad * q).sum() for p, q in zip(parameters, before, strict=True)))
            before = [p.grad for p in parameters]
        products.append(torch.stack(found))
    assert_close(*products)


def test_buffers_are_written_once_where_a_capture_fails(captures):  # noqa: F811
    count, calls = torch.zeros(()), []

    def run(x, w, counter):
        calls.append(1)
        counter.add_(1)
        if len(calls) == WATCHED + 1:
            raise torch.OutOfMemoryError("no memory")
        return (x @ w,)

    ours, w = Training(run, CPU, Roles(weights=[1, 2], written=[2])), torch.randn(4, 5, requires_grad=True)
    for _ in range(WATCHED + 3):
        ours(torch.randn(3, 4), w, count)[0].sum().backward()
    assert count == WATCHED + 3


def test_sparse_gradients(converted):
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 4))
    fast = converted(model)
    for _ in range(WATCHED + 3):
        model.zero_grad()
        fast(torch.randint(20, (4, 6))).sum().backward()
        assert model[0].weight.grad.is_sparse


def test_other_settings_of_libraries_are_captured_apart(captures):  # noqa: F811
    (ours, _), parameters = made(), weights()
    warmed(ours, parameters)
    assert len(captures) == 2
    with torch.backends.cudnn.flags(deterministic=True):
        warmed(ours, parameters)
    assert len(captures) == 4
    step(ours, torch.randn(3, 4), parameters)
    assert len(captures) == 4


def test_weights_that_move_between_the_passes_are_refused(captures):  # noqa: F811
    """As shards that were gathered for the forward pass are elsewhere for the backward pass."""
    (ours, _), parameters = made(), weights()
    warmed(ours, parameters)
    loss = ours(torch.randn(3, 4), *parameters)[0].sum()
    parameters[0].data = parameters[0].data.clone()
    with pytest.raises(RuntimeError, match="or lies elsewhere since"):
        loss.backward()


def test_captures_draw_nothing(captures):  # noqa: F811
    def run(x, w, b):
        return (torch.nn.functional.dropout(layer(x, w, b)[0], 0.5),)

    found = []
    for function in (run, Training(run, CPU, Roles(weights=[1, 2]), draws=True)):
        torch.manual_seed(0)
        parameters = weights()
        warmed(function, parameters)
        found.append([function(torch.ones(3, 4), *parameters)[0].detach(), torch.rand(3)])
    assert len(captures) == 2
    assert_close(*found, rtol=0, atol=0)


@pytest.mark.gpu
def test_captures_draw_nothing_on_a_gpu():
    """The call that captures takes what every replay takes."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Sigmoid(), nn.Dropout(0.5)).cuda()
    fast, generator, taken = compiled(model)[0], torch.cuda.default_generators[0], []
    for _ in range(WATCHED + 3):
        before = generator.get_offset()
        fast(torch.ones(32, 64, device="cuda")).sum().backward()
        taken.append(generator.get_offset() - before)
    assert taken[-1] == taken[-2] == taken[-3] > 0


@pytest.mark.gpu
def test_models_that_are_trained_in_threads():
    """All backward passes are one thread's; who captures must not wait for it with what it waits for."""
    def train(k):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4 + k)), nn.GELU()).cuda()
        fast, x = frt.auto_convert_model(model, validate_accuracy=False), torch.randn(64, 256, device="cuda")
        for _ in range(60):
            model.zero_grad()
            fast(x).square().sum().backward()
            grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).square().sum().backward()
        assert_close(grads, [p.grad for p in model.parameters()], rtol=2e-2, atol=1e-2)
        done.append(k)

    done, threads = [], [threading.Thread(target=train, args=(k,), daemon=True) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(done) == [0, 1, 2]
