"""CUDA graphs of inference: what is replayed computes what a call does, now and after weights have
changed."""

import contextlib
import gc
import itertools
import threading
import weakref

import pytest
import torch
from convert_checks import check_module, compiled
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from fusionrt.convert import replay
from fusionrt.convert.aliases import guarded
from fusionrt.convert.capture import backend
from fusionrt.convert.replay import Replays

# -- the protocol, without a GPU: a "graph" that computes anew into the results of its capture -------------

CPU = torch.device("cpu")


class Recorded:
    """In the place of torch.cuda.CUDAGraph. What ran while it was captured stands for its first replay."""

    replays = 0

    def replay(self):
        self.replays += 1
        if self.replays == 1:
            return
        for result, new in zip(self.results, self.run(), strict=True):
            if isinstance(result, torch.Tensor):
                result.copy_(new)


class Here:
    """In the place of a Turn."""

    def __init__(self):
        self.lock, self.pool, self.stream = threading.RLock(), None, None

    def after_others(self):
        pass

    def open_pool(self):
        pass

    def aside(self):
        return contextlib.nullcontext()


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
        graph.run, graph.results = run, run()
        return graph.results

    monkeypatch.setattr(replay, "_into", into)
    here = Here()
    monkeypatch.setattr(replay, "_turn", lambda device: here)
    monkeypatch.setattr(replay, "_current", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return count


def replays(run, derived=(), is_dynamic=False, fresh=True, kept=8):
    calls = []
    return Replays(lambda *args: calls.append(1) or run(*args), CPU, derived, is_dynamic, fresh, kept), calls


def double(x, w):
    return (x * 2 + w,)


def test_the_second_call_is_captured_and_later_ones_replayed(captures):
    made, calls = replays(double)
    x, w = torch.randn(3), torch.randn(3)
    for n in range(6):
        assert_close(made(x, w), double(x, w))
        assert len(captures) == min(n, 1)
    assert len(calls) == 1 + 2 + 4  # once; aside and into the graph; what stands for later replays


def test_what_moves_is_copied_and_what_is_written_to_in_place_is_seen(captures):
    made, _ = replays(double)
    w = torch.randn(3)
    for n in range(6):
        x = torch.full((3,), float(n))
        w.add_(1)
        assert_close(made(x, w), double(x, w))
        kept = x  # so that the next one lies elsewhere
    assert len(captures) == 1
    assert next(iter(made.kinds.values())).captured.buffers.keys() == {0}
    del kept


def test_weights_that_are_replaced_are_seen(captures):
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
    made, _calls = replays(double, derived=(1,))
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


def test_captures_in_vain_come_to_an_end(captures):
    made, _calls = replays(double, derived=(1,))
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

    made = Replays(step, CPU, [], False, True, 8, [1])
    x, total, expected = torch.ones(3), torch.zeros(3), torch.zeros(3)
    for _ in range(5):
        assert_close(made(x, total), step(x, expected))
        assert_close(total, expected)
    assert len(captures) == 1
    moved = Replays(step, CPU, [], False, True, 8, [1])
    totals = [torch.zeros(3) for _ in range(6)]
    for total in totals:
        assert_close(moved(x, total), (x * 2,))
    assert len(captures) == 1


def test_each_kind_of_inputs_has_a_graph_and_few_are_kept(captures):
    made, _ = replays(lambda n, x: (x * n,), is_dynamic=True, kept=2)
    for sizes in ((2, 3), (2, 3), (2, 3), (4,), (4,), (2, 3)):
        for size in sizes:
            x = torch.randn(size)
            assert_close(made(size, x), (x * size,))
    assert len(made.kinds) == 2
    assert len(captures) == 3


def test_results_are_the_callers_own(captures):
    def several(x):
        y = x * 2
        return y, y[1:], x + 1, y, 7, None

    x = torch.arange(4.0)
    made, _ = replays(several)
    for _ in range(3):
        first = made(x)
        assert_close(
            [t for t in first if isinstance(t, torch.Tensor)],
            [t for t in several(x) if isinstance(t, torch.Tensor)],
        )
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
    for function in (
        lambda x: x * 2,
        lambda x: x.detach() * 2,
        lambda x: x.detach().view(-1),
        lambda x: torch.relu(x.detach() + 1).view(-1),
    ):
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


# -- on a GPU ----------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Convolutions whose norms are folded, attention, linear layers."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.more = nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 32, 3)
        self.norm, self.up, self.down, self.drop = (
            nn.LayerNorm(32),
            nn.Linear(32, 64),
            nn.Linear(64, 32),
            nn.Dropout(0.5),
        )

    def forward(self, x):
        h = F.silu(self.more(torch.relu(self.bn(self.conv(x)))))
        h = h.flatten(2).transpose(1, 2)
        heads = h.view(*h.shape[:2], 2, 16).transpose(1, 2)
        h = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(h.shape) + h
        return self.drop(self.down(F.gelu(self.up(self.norm(h)))))


@pytest.fixture
def net(monkeypatch):
    """In full float32: with TF32 one of cuDNN's kernels may use it where another does not."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    return Net().cuda().eval()


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that are captured, as they come."""
    made = []
    capture = Replays._capture

    def noted(self, *args):
        made.append(capture(self, *args))
        return made[-1]

    monkeypatch.setattr(Replays, "_capture", noted)
    return made


def images(n=2, size=16):
    return torch.randn(n, 3, size, size, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_replays_are_calls(net, graphs, mode):
    run, found = compiled(net)
    with mode():
        for _ in range(6):
            x = images()
            assert_close(run(x), net(x), rtol=1e-3, atol=1e-3)
    assert [g is not None for g in graphs] == [True]
    assert len(found) == 1
    with torch.no_grad():  # after the other mode: a kind of its own
        for _ in range(3):
            x = images()
            assert_close(run(x).clone(), net(x), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_weights_that_change_are_seen(net, graphs):
    run, _ = compiled(net)
    with torch.no_grad():
        for change in (
            lambda: None,
            lambda: net.up.weight.mul_(2),
            lambda: net.conv.weight.mul_(2),
            lambda: net.bn.running_var.add_(1),
            lambda: net.load_state_dict(Net().cuda().state_dict()),
            lambda: setattr(net.down.weight, "data", net.down.weight.data.clone() * 2),
        ):
            change()
            for _ in range(3):
                x = images()
                assert_close(run(x), net(x), rtol=1e-3, atol=1e-3)
    assert graphs
    assert all(graphs)


@pytest.mark.gpu
def test_training_in_between(net, graphs):
    run, _ = compiled(net)
    for _ in range(2):
        with torch.no_grad():
            net.eval()
            for _ in range(3):
                x = images()
                assert_close(run(x), net(x), rtol=1e-3, atol=1e-3)
        net.train()
        optimiser = torch.optim.SGD(net.parameters(), 0.1)
        run(images()).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
    assert len(graphs) == 2


@pytest.mark.gpu
def test_results_on_a_gpu_are_the_callers_own(net):
    run, _ = compiled(net)
    with torch.no_grad():
        for _ in range(3):
            x = images()
            kept, expected = run(x), net(x)
            run(images())
            assert_close(kept, expected, rtol=1e-3, atol=1e-3)
        overwritten, _ = compiled(net, fresh_outputs=False)
        places = {overwritten(images()).data_ptr() for _ in range(6)}
    assert len(places) <= 2


@pytest.mark.gpu
def test_random_numbers_are_new_in_every_replay(net, graphs):
    net.train()
    net.bn.eval()
    run, _ = compiled(net)
    x = images()
    with torch.no_grad():
        found = [run(x) for _ in range(5)]
    assert graphs
    for a, b in itertools.pairwise(found):
        assert not torch.equal(a, b)
    dropped = torch.stack([f == 0 for f in found[2:]]).float().mean()
    assert 0.4 < dropped < 0.6


@pytest.mark.gpu
def test_sizes_that_vary_have_graphs_of_their_own(graphs):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16)).cuda().eval()
    torch._dynamo.reset()
    run, _ = compiled(model, graphs_kept=2)
    with torch.no_grad():
        for rows in (4, 6, 8, 6, 8, 6, 8, 10, 10, 6, 8):
            x = torch.randn(rows, 8, device="cuda")
            assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    assert len(graphs) >= 3


@pytest.mark.gpu
def test_threads_and_streams(net):
    """Two models whose graphs share memory, each called from a thread and on a stream of its own."""
    other = Net().cuda().eval()
    runs = [compiled_apart(m) for m in (net, other)]
    failures = []

    def work(run, model):
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(30):
                    x = images()
                    assert_close(run(x), model(x), rtol=1e-3, atol=1e-3)
        except BaseException as error:
            failures.append(error)

    with torch.no_grad():
        for run in runs:
            for _ in range(3):
                run(images())
    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=pair) for pair in zip(runs, (net, other), strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def compiled_apart(model):
    """Without forgetting what was compiled before."""
    return torch.compile(lambda x: model(x), backend=backend)


@pytest.mark.gpu
def test_captured_by_someone_else(net):
    run, _ = compiled(net)
    x = images()
    with torch.no_grad():
        for _ in range(3):
            run(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(x)
        x.normal_()
        graph.replay()
        assert_close(y, net(x), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_graphs_go_with_their_module(net, graphs, monkeypatch):
    made = []
    init = Replays.__init__
    monkeypatch.setattr(
        Replays, "__init__", lambda self, *args: (made.append(weakref.ref(self)), init(self, *args))[1]
    )
    run, _ = compiled(net)
    with torch.no_grad():
        for _ in range(3):
            run(images())
    graphs.clear()
    assert made[0]() is not None
    del run
    torch._dynamo.reset()
    gc.collect()
    assert made[0]() is None


@pytest.mark.gpu
def test_a_call_that_cannot_be_captured(monkeypatch):
    """A synchronisation within a kernel's launch, as an op of a library may have one."""
    from fusionrt.convert import calls

    model = nn.MultiheadAttention(16, 4, batch_first=True).cuda().eval()

    def waiting(x, *args, own=calls.self_attention, **options):
        torch.cuda.synchronize()
        return own(x, *args, **options)

    monkeypatch.setattr("fusionrt.convert.passes.attention.self_attention", waiting, raising=False)
    run, _ = compiled(lambda x: model(x, x, x, need_weights=False)[0] * 2 + 1)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(2, 6, 16, device="cuda")
            assert_close(run(x), model(x, x, x, need_weights=False)[0] * 2 + 1, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_every_precision(net, dtype):
    net = net.to(dtype)
    run, _ = compiled(net)
    with torch.no_grad():
        for _ in range(4):
            x = images().to(dtype)
            exact = Net().cuda().double().eval()
            exact.load_state_dict(
                {k: v.double() if v.is_floating_point() else v for k, v in net.state_dict().items()}
            )
            reference, own = exact(x.double()), net(x)
            limit = 2 * (own - reference).abs().max() + 1e-5
            assert (run(x) - reference).abs().max() <= limit


@pytest.mark.gpu
def test_gradients_on_a_gpu(net):
    net.drop.p = 0.0
    net.train()
    check_module(net, images().requires_grad_(), rtol=1e-2, atol=1e-2)
