"""CUDA graphs of inference: what is replayed computes what a call does, now and after weights have
changed."""

import contextlib
import functools
import sys
import threading

import pytest
import torch
from convert_checks import compiled_apart
from torch import nn
from torch.testing import assert_close

from fusionrt.convert import cuda_graphs, derived, purity, replay
from fusionrt.convert.aliases import guarded
from fusionrt.convert.capture import Options, backend
from fusionrt.convert.replay import Replays, Roles

CPU = torch.device("cpu")


class Recorded:
    """In the place of torch.cuda.CUDAGraph. What ran while it was captured stands for its first replay; what
    was kept from weights is what it was then."""

    replays = 0

    def capture(self, run):
        self.run, self.kept = run, []
        with pytest.MonkeyPatch.context() as patch:
            own = derived.derived
            patch.setattr(derived, "derived", lambda *args: self.kept.append(own(*args)) or self.kept[-1])
            self.results = run()
        return self.results

    def replay(self):
        self.replays += 1
        if self.replays == 1:
            return
        with pytest.MonkeyPatch.context() as patch:
            kept = iter(self.kept)
            patch.setattr(derived, "derived", lambda *args: next(kept))
            found = self.run()
        for result, new in zip(self.results, found, strict=True):
            if isinstance(result, torch.Tensor):
                result.copy_(new)


class Here:
    """In the place of a Turn."""

    def __init__(self):
        self.lock, self.pool, self.stream, self.forgetful = threading.RLock(), None, None, set()

    def after_others(self):
        pass

    def recover(self):
        pass

    inside = False
    capturing = staticmethod(contextlib.nullcontext)

    @contextlib.contextmanager
    def aside(self):
        self.inside = True
        yield
        self.inside = False


@pytest.fixture
def captures(monkeypatch):
    """Counts captures; `captures.fail` makes them impossible."""

    class Count(list):
        fail = False

    count = Count()

    def into(graph, pool, run):
        if count.fail:
            raise RuntimeError("operation not permitted when stream is capturing")
        count.append(1)
        return graph.capture(run)

    monkeypatch.setattr(cuda_graphs, "into", into)
    count.turn = here = Here()
    monkeypatch.setattr(cuda_graphs, "turn_of", lambda device: here)
    monkeypatch.setattr(cuda_graphs, "current", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return count


def replays(run, fresh=True, kept=8, **roles):
    calls = []
    return Replays(lambda *args: calls.append(1) or run(*args), CPU, Roles(**roles), fresh, kept), calls


def kinds(made):
    return [kind for of_model in made.models.values() for kind in of_model.values()]


def double(x, w):
    return (x * 2 + w,)


def test_the_second_call_is_captured_and_later_ones_replayed(captures):
    made, calls = replays(double)
    x, w = torch.randn(3), torch.randn(3)
    for n in range(6):
        assert_close(made(x, w), double(x, w))
        assert len(captures) == min(n, 1)
    assert len(calls) == 1 + 2 + 4  # once; aside and into the graph; what stands for later replays


@pytest.mark.parametrize("fresh", [True, False])
def test_what_is_forgotten_is_captured_anew(captures, fresh):
    """But not what results lie in that a caller may have."""
    made, _ = replays(double, fresh=fresh)
    x, w = torch.randn(3), torch.randn(3)
    for n in range(6):
        if n == 3:
            for one in captures.turn.forgetful:
                one.forget()
        assert_close(made(x, w), double(x, w))
    assert captures.turn.forgetful == ({made} if fresh else set())
    assert len(captures) == (2 if fresh else 1)


def test_what_moves_is_copied_and_what_is_written_to_in_place_is_seen(captures):
    made, _ = replays(double)
    w = torch.randn(3)
    for n in range(6):
        x = torch.full((3,), float(n))
        w.add_(1)
        assert_close(made(x, w), double(x, w))
        kept = x  # so that the next one lies elsewhere
    assert len(captures) == 1
    assert kinds(made)[0].captured.buffers.keys() == {0}
    del kept


def test_buffers_are_memory_of_the_stream_of_captures(captures, monkeypatch):
    """It waits for all replays before it gets any of it again, whoever's stream still reads it."""
    own = cuda_graphs.buffer_like
    seen = []
    monkeypatch.setattr(cuda_graphs, "buffer_like",
                        lambda like: seen.append(captures.turn.inside) or own(like))
    made, _ = replays(double)
    inputs, w = [torch.randn(3) for _ in range(4)], torch.randn(3)
    for x in inputs:
        assert_close(made(x, w), double(x, w))
    assert seen == [True]


def test_tensors_that_move_now_and_then_are_seen(captures):
    made, _ = replays(double)
    x, weights = torch.randn(3), [torch.randn(3) for _ in range(3)]
    for w in weights:
        for _ in range(6):
            assert_close(made(x, w), double(x, w))
    assert len(captures) == 3  # each of them stayed for a while
    for w in weights * 4:
        assert_close(made(x, w), double(x, w))
    assert len(captures) == 4  # now they are copied


def test_what_follows_from_weights_is_captured_anew(captures):
    made, _calls = replays(double, sources=[1])
    x, w = torch.randn(3), torch.randn(3)
    for _ in range(3):
        for _ in range(6):
            assert_close(made(x, w), double(x, w))
        w.add_(1)
    assert len(captures) == 3
    with torch.inference_mode():
        for _ in range(3):
            v = torch.randn(3)
            assert_close(made(x, v), double(x, v))


def with_stacked(x, w):
    return (x @ derived.stacked(w, w),)


def test_each_set_of_weights_has_a_graph_of_its_own(captures):
    """Of equal versions, and whoever's turn it is; weights are never copied."""
    made, _ = replays(with_stacked, weights=[1], sources=[1])
    weights = [torch.randn(2, 4) for _ in range(3)]
    for n in range(6):
        for w in weights:
            x = torch.randn(3, 4)
            assert_close(made(x, w), (x @ torch.cat([w, w]),))
        assert len(captures) == (3 if n else 0)
    assert {tuple(kind.captured.buffers) for kind in kinds(made)} == {(0,)}


def test_another_tensor_at_the_same_address_is_another(captures):
    made, _ = replays(with_stacked, weights=[1], sources=[1])
    memory, x = torch.randn(2, 4), torch.randn(3, 4)
    for _ in range(3):
        w = memory.view(2, 4)  # of version 0, as all that lie in memory that was given back
        for _ in range(4):
            assert_close(made(x, w), (x @ torch.cat([w, w]),))
        memory.data = memory.data.normal_()
    assert len(made.models) == 1
    assert len(captures) == 3


def test_sources_that_move_are_never_captured(captures):
    """What follows from a buffer's content at the capture would be what all later calls get."""
    made, _ = replays(with_stacked, sources=[1])
    x, weights = torch.randn(3, 4), [torch.randn(2, 4) for _ in range(6)]
    for w in weights:
        assert_close(made(x, w), (x @ torch.cat([w, w]),))
    assert not captures


def test_few_sets_of_weights_are_kept(captures, monkeypatch):
    monkeypatch.setattr(replay, "MODELS", 2)
    made, _ = replays(double, weights=[1])
    x, weights = torch.randn(3), [torch.randn(3) for _ in range(4)]
    for w in weights:
        for _ in range(3):
            assert_close(made(x, w), double(x, w))
    assert list(made.models) == [(w.data_ptr(),) for w in weights[2:]]


def test_models_that_share_a_captured_graph(captures, monkeypatch):
    """Dynamo has one graph for both, of which weights and buffers are inputs."""
    monkeypatch.setattr(replay, "device_of_graph", lambda gm: CPU)
    monkeypatch.setattr(sys.modules["fusionrt.convert.passes.stacked"], "DEVICES", ("cpu",))

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.bn = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.bn(torch.tanh(self.a(x)) * self.b(x))

    models, found = [Two().eval(), Two().eval()], []
    models[1].bn.running_mean.fill_(3)
    torch._dynamo.reset()
    heard = functools.partial(backend, options=Options(on_graph=found.append))
    runs = [compiled_apart(m, heard) for m in models]
    with torch.no_grad():
        for _ in range(4):
            for run, model in zip(runs, models, strict=True):
                x = torch.randn(3, 4)
                assert_close(run(x), model(x))
    assert len(found) == 1
    assert any(key.startswith("stacked") for key in found[0].replacements)
    assert len(captures) == 2


def test_views_of_parameters_are_not_taken_for_recorded(captures, monkeypatch):
    """Of which torch says that they require a gradient, without gradients too."""
    monkeypatch.setattr(replay, "device_of_graph", lambda gm: CPU)

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.linear = nn.Parameter(torch.randn(1, 1, 4)), nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1))

    model = Tokens()
    torch._dynamo.reset()
    fast = compiled_apart(model)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3, 2, 4)
            assert_close(fast(x), model(x))
    assert len(captures) == 1


def test_autocast_keeps_nothing_of_a_capture(captures):
    """What it has cast is its own, and lives as long as it is on."""
    seen = []

    def run(x, w):
        seen.append(torch.is_autocast_cache_enabled())
        return (x @ w,)

    made, _ = replays(run, weights=[1])
    x, w = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            made(x, w)
        assert torch.is_autocast_cache_enabled()
    assert seen[:3] == [True, False, False]


def test_captures_in_vain_come_to_an_end(captures):
    made, _calls = replays(double, sources=[1])
    x, w = torch.randn(3), torch.randn(3)
    for _ in range(40):
        w.add_(1)
        assert_close(made(x, w), double(x, w))
    assert len(captures) == replay.IN_VAIN


def test_what_cannot_be_captured_runs_as_it_is(captures):
    captures.fail = True
    made, calls = replays(double)
    x, w = torch.randn(3), torch.randn(3)
    for _ in range(5):
        assert_close(made(x, w), double(x, w))
    assert not captures
    assert len(calls) == 5 + 1  # and one aside


def test_what_is_written_to_is_written_to_once_a_call(captures):
    """Also in the call that is captured. What is written to and moves is never captured."""

    def step(x, total):
        total.add_(x)
        return (total * 2,)

    made = replays(step, written=[1])[0]
    x, total, expected = torch.ones(3), torch.zeros(3), torch.zeros(3)
    for _ in range(5):
        assert_close(made(x, total), step(x, expected))
        assert_close(total, expected)
    assert len(captures) == 1
    moved = replays(step, written=[1])[0]
    totals = [torch.zeros(3) for _ in range(6)]
    for total in totals:
        assert_close(moved(x, total), (x * 2,))
    assert len(captures) == 1


def test_each_kind_of_inputs_has_a_graph_and_few_are_kept(captures):
    made, _ = replays(lambda n, x: (x * n,), vary=True, kept=2)
    for sizes in ((2, 3), (2, 3), (2, 3), (4,), (4,), (2, 3)):
        for size in sizes:
            x = torch.randn(size)
            assert_close(made(size, x), (x * size,))
    assert len(kinds(made)) == 2
    assert len(captures) == 3


def test_results_are_the_callers_own(captures):
    def several(x):
        y = x * 2
        return y, y[1:], x + 1, y, 7, None

    x = torch.arange(4.0)
    made, _ = replays(several)
    for _ in range(3):
        first = made(x)
        assert_close([t for t in first if isinstance(t, torch.Tensor)],
                     [t for t in several(x) if isinstance(t, torch.Tensor)])
        assert first[4:] == (7, None)
        assert first[3] is first[0]
        before = first[2].clone()
        first[0].fill_(-1)  # seen by the view, by nobody else
        assert_close(first[1], torch.full((3,), -1.0))
        made(x + 5)
        assert_close(first[2], before)
    shared, _ = replays(several, fresh=False)
    results = [shared(x) for _ in range(4)]
    assert results[2][0].data_ptr() == results[3][0].data_ptr()


def test_graphs_that_no_replay_can_stand_for():
    """With gradients, on a CPU, with results that are views of inputs."""

    def run():
        pass

    seen = []
    torch._dynamo.reset()

    def judged(gm, inputs):
        seen.append(replay._replays(gm))
        return gm.forward

    x = torch.randn(4, 4, requires_grad=True)
    for function in (lambda x: x * 2, lambda x: x.detach() * 2, lambda x: x.detach().view(-1),
                     lambda x: torch.relu(x.detach() + 1).view(-1)):
        torch.compile(function, backend=judged)(x)
    assert seen == [False, True, False, True]
    gm = torch.fx.symbolic_trace(lambda x: x * 2)
    assert replay.replayed(gm, run, [], True, 8) is run


# -- inputs that share memory ------------------------------------------------------------------------------


def test_inputs_are_looked_at_when_they_move():
    run = guarded(lambda *args: "rewritten", lambda *args: "original", [1])
    a, b = torch.ones(8), torch.ones(8)
    assert run(a, b, 3) == "rewritten"
    assert run(a, a, 3) == "original"
    assert run(b[:4], b[4:], 3) == "original"
    assert run(a[:4], b[4:], 3) == "rewritten"
    assert run(torch.ones(0), torch.ones(0), 3) == "rewritten"


def test_views_that_are_conjugated_or_negated(captures, monkeypatch):
    monkeypatch.setattr(replay, "device_of_graph", lambda gm: CPU)

    def run(x):
        z = torch.fft.rfft(x) * 2
        return z, z.conj(), z.conj().imag

    fast = torch.compile(run, backend=backend)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(8)
            for ours, theirs in zip(fast(x), run(x), strict=True):
                assert_close(ours.resolve_conj().resolve_neg(), theirs.resolve_conj().resolve_neg())
    assert captures


def test_inputs_that_need_gradients_leave_no_history(captures):
    """A teacher's, that records none: its copies would hold what every call came from."""
    ours, _ = replays(lambda x, w: (x.detach() * 2 + w,), weights=[1])
    w, student = torch.randn(3), torch.randn(3, requires_grad=True)
    for _ in range(5):
        ours(student * torch.randn(3), w)
    kind, = kinds(ours)
    buffer, = kind.captured.buffers.values()
    assert buffer.grad_fn is None


def test_random_numbers_are_drawn_by_calls(captures, monkeypatch):
    """In a graph they would be others than those of the same call that records gradients."""
    monkeypatch.setattr(replay, "device_of_graph", lambda gm: CPU)
    for function in (lambda x: torch.dropout(x, 0.5, True) * 2, lambda x: torch.relu(x) + torch.rand_like(x)):
        torch._dynamo.reset()
        fast = torch.compile(function, backend=backend)
        with torch.no_grad():
            for _ in range(4):
                fast(torch.randn(64))
    assert not captures


class Read(nn.Module):
    """What may draw random numbers in training."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.drop = nn.Sequential(nn.Dropout(0.5), nn.RReLU(), nn.AlphaDropout(0.2))

    def forward(self, x):
        return self.drop(self.attention(x, x, x, need_weights=False)[0])


def test_in_evaluation_nothing_is_drawn():
    """Of calls as they are traced, none of which is replaced."""
    model, drawn = Read(), {}

    def seen(gm, example):
        drawn.setdefault(model.training, []).extend(
            purity.draws(n) for n in gm.graph.nodes if n.op.startswith("call"))
        return gm

    with torch.no_grad():
        for training in (True, False):
            torch._dynamo.reset()
            torch.compile(model.train(training), backend=seen)(torch.randn(2, 3, 8))
    assert sum(drawn[True]) == 4 and not any(drawn[False])


def test_dropouts_of_recurrent_layers():
    graph = torch.fx.Graph()
    data = [graph.placeholder(f"a{k}") for k in range(3)]
    for p, train, expected in ((0.5, True, True), (0.5, False, False), (0.0, True, False)):
        for more in ((data[2], True, 2), (data[1], data[2], True, 2)):  # packed sequences have one more
            args = (data[0], *more[:-3], [data[1]], *more[-2:], p, train, False, True)
            assert purity.draws(graph.call_function(torch.lstm, args)) is expected
