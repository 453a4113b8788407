"""CUDA graphs of inference on a GPU: weights that change, streams, threads, precision."""

import functools
import gc
import itertools
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from convert_checks import check_module, compiled, compiled_apart
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from fusionrt.convert.capture import Options, backend
from fusionrt.convert.replay import Replays


class Net(nn.Module):
    """Convolutions whose norms are folded, attention, linear layers."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.more = nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 32, 3)
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.drop = nn.Dropout(0.5)

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


FIRST = """
import torch
from fusionrt.convert import backend
from fusionrt.convert.replay import Replays

made, capture = [], Replays._capture
Replays._capture = lambda *args: made.append(capture(*args)) or made[-1]
run = torch.compile(torch.nn.Conv2d(3, 8, 3).cuda(), backend=backend)
with torch.no_grad():
    for _ in range(4):
        run(torch.randn(2, 3, 8, 8, device="cuda"))
assert [one is not None for one in made] == [True]
"""


@pytest.mark.gpu
def test_a_model_without_products_in_a_new_process():
    """Where nobody has used cuBLAS before."""
    run = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.gpu
def test_weights_that_change_are_seen(net, graphs):
    run, _ = compiled(net)
    with torch.no_grad():
        for change in (lambda: None, lambda: net.up.weight.mul_(2), lambda: net.conv.weight.mul_(2),
                       lambda: net.bn.running_var.add_(1),
                       lambda: net.load_state_dict(Net().cuda().state_dict()),
                       lambda: setattr(net.down.weight, "data", net.down.weight.data.clone() * 2)):
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
def test_what_draws_random_numbers_is_no_replay(net, graphs):
    """A checkpoint's second call would have others."""
    net.train()
    net.bn.eval()
    run, _ = compiled(net)
    x = images()
    with torch.no_grad():
        found = [run(x) for _ in range(5)]
    assert not graphs
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
    """Two models whose graphs share memory, each called from a thread and on a stream of its own. (While one
    captures, torch refuses random numbers to all others.)"""
    other = Net().cuda().eval()
    runs = [compiled_apart(m) for m in (net, other)]
    failures = []

    def work(run, model):
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for x in inputs:
                    x = x.clone()
                    assert_close(run(x), model(x), rtol=1e-3, atol=1e-3)
        except BaseException as error:
            failures.append(error)

    with torch.no_grad():
        for run in runs:
            for _ in range(3):
                run(images())
    inputs = [images() for _ in range(30)]
    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=pair) for pair in zip(runs, (net, other), strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


@pytest.mark.gpu
def test_models_that_share_a_graph_on_a_gpu(net, graphs):
    """In turns; what follows from the weights of one is never seen by the other."""
    other = Net().cuda().eval()
    other.bn.running_mean.fill_(0.5)
    torch._dynamo.reset()
    found = []
    heard = functools.partial(backend, options=Options(on_graph=found.append))
    pairs = [(compiled_apart(m, heard), m) for m in (net, other)]
    with torch.no_grad():
        for _ in range(4):
            for run, model in pairs:
                x = images()
                assert_close(run(x), model(x), rtol=1e-3, atol=1e-3)
    assert (len(found), len(graphs)) == (1, 2)


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

    def noted(self, *args):
        made.append(weakref.ref(self))
        init(self, *args)

    monkeypatch.setattr(Replays, "__init__", noted)
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
            exact.load_state_dict({k: v.double() if v.is_floating_point() else v
                                   for k, v in net.state_dict().items()})
            reference, own = exact(x.double()), net(x)
            limit = 2 * (own - reference).abs().max() + 1e-5
            assert (run(x) - reference).abs().max() <= limit


@pytest.mark.gpu
def test_gradients_on_a_gpu(net):
    net.drop.p = 0.0
    net.train()
    check_module(net, images().requires_grad_(), rtol=1e-2, atol=1e-2)


class Products(nn.Module):
    """Of many terms and few results: cuBLAS adds up parts of them in its workspace."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096 if k < 2 else 24) for k in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("fresh", [True, False])
def test_others_may_free_cublas_workspaces(dtype, fresh):
    """As torch.compile(mode="reduce-overhead") does, before each of its captures."""
    model = Products().to("cuda", dtype).eval()
    x = torch.randn(32, 4096, device="cuda", dtype=dtype)
    with torch.no_grad():
        expected = model(x)
        fast, _ = compiled(model, fresh_outputs=fresh)
        for _ in range(3):
            fast(x)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        others = [torch.ones(1 << 18, device="cuda") for _ in range(256)]  # where the workspaces were
        for _ in range(3):
            assert_close(fast(x), expected, rtol=1e-2, atol=1e-3)
        torch.cuda.synchronize()
        assert all(bool((one == 1).all()) for one in others)


@pytest.mark.gpu
def test_autocast_around(net):
    """Its casts of weights are gone when it ends; weights change meanwhile."""
    fast, _ = compiled(net)
    for k in range(6):
        x = images()
        with torch.no_grad():
            net.up.weight.add_(0.01)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                for _ in range(2 if k < 2 else 1):
                    found = fast(x)
                expected = net(x)
        others = [torch.full((64, 64), 1e4, device="cuda", dtype=torch.bfloat16) for _ in range(64)]
        assert_close(found, expected, rtol=5e-2, atol=5e-2)
    del others
