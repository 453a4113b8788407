"""The GPU runtime: streams, threads, devices, graphs; what it says when something is missing."""

import functools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checking import assert_same_bits, needs_nvrtc
from torch.nn import functional as F
from torch.testing import assert_close

import fusionrt as frt
from fusionrt import reference, rehearsal
from fusionrt.runtime import compiler, device, launch
from fusionrt.runtime import device as cuda

ROOT = Path(__file__).parents[1]
gpu = pytest.mark.gpu
BUSY = 100_000_000  # cycles: about 50 ms
several_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def scaled(factor):
    """An operator that nobody has called yet."""
    @frt.fuse
    def scaled(x, bias):
        return frt.sigmoid(x + bias) * factor

    return scaled


def inputs(*shape, device="cuda", dtype=torch.float32):
    return (torch.randn(shape, device=device, dtype=dtype, requires_grad=True),
            torch.randn(shape[-1], device=device, dtype=dtype, requires_grad=True))


def everything(op, args):
    """Result and gradients."""
    out = op(*args)
    return out.detach(), *torch.autograd.grad(out.square().sum(), args)


def expected(factor, args):
    return everything(lambda x, bias: torch.sigmoid(x + bias) * factor, args)


# --- streams and threads


@gpu
def test_a_call_waits_its_turn_on_the_current_stream():
    x = torch.zeros(1 << 20, device="cuda")
    frt.relu(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY)
        x.fill_(3)
        y = frt.relu(x)
        assert not stream.query()  # the call did not wait for the device
    stream.synchronize()
    assert y.unique().tolist() == [3]


@gpu
def test_backward_runs_on_the_forwards_stream():
    args = inputs(256, 512)
    alone = everything(frt.bias_gelu, args)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY)
        found = everything(frt.bias_gelu, args)
    stream.synchronize()
    for a, b in zip(found, alone, strict=True):
        assert_same_bits(a, b)


@gpu
def test_threads_on_streams_of_their_own():
    """Every thread packs its own parameters; the driver reads them without the GIL."""
    names = ["bias_gelu", "bias_relu", "bias_silu", "add_sigmoid", "mul_tanh", "add_relu"]
    sets = [inputs(64 + i, 512) for i in range(4)]
    alone = {(n, i): everything(getattr(frt, n), s) for n in names for i, s in enumerate(sets)}
    torch.cuda.synchronize()

    def work(seed):
        stream, wrong = torch.cuda.Stream(), 0
        with torch.cuda.stream(stream):
            for k in range(60):
                name, i = names[(seed + k) % len(names)], (seed * 7 + k) % len(sets)
                found = everything(getattr(frt, name), sets[i])
                stream.synchronize()
                wrong += any(not torch.equal(a, b)
                             for a, b in zip(found, alone[name, i], strict=True))
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 0


@gpu
def test_a_new_thread_may_be_the_first_to_launch():
    """The driver's calls need a context that torch binds to a thread only when it has to."""
    args = inputs(16, 64)
    warm, cold, found = scaled(3), scaled(5), []
    warm(*args)

    def work():
        found.extend([warm(*args), cold(*args)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert_close(found[0], torch.sigmoid(args[0] + args[1]) * 3)
    assert_close(found[1], torch.sigmoid(args[0] + args[1]) * 5)


@gpu
def test_a_thread_that_exists_before_cuda_does(tmp_path):
    code = """
import threading, torch, fusionrt as frt
found, ready, go = [], threading.Event(), threading.Event()
def work():
    ready.set(); go.wait()
    found.append(frt.relu(x).sum().item())
thread = threading.Thread(target=work); thread.start(); ready.wait()
x = torch.ones(8, device="cuda")
go.set(); thread.join()
assert found == [8.0], found
"""
    env = os.environ | {"PYTHONPATH": str(ROOT), "FUSIONRT_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@gpu
def test_threads_meet_at_a_cold_op():
    op, args, barrier = scaled(7), inputs(33, 65), threading.Barrier(8)

    def work(_):
        barrier.wait()
        return everything(op, args)

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(work, range(8)):
            assert_close(found, expected(7, args))


@gpu
def test_warm_calls_never_wait_for_the_device():
    args = inputs(64, 512)
    x = args[0].detach()

    def step():
        y = frt.gelu_dropout(frt.bias_gelu(*args), 0.5)
        frt.relu(x[1:, 1:])
        return torch.autograd.grad(y.sum(), args)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        torch.cuda._sleep(BUSY)
        step()
        assert not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- CUDA graphs


def captured(function, *args):
    """A graph of function(*args), warmed up on a side stream as torch asks for, and its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function(*args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function(*args)
    return graph, results


@gpu
def test_graphs_replay_forward_and_backward():
    args = inputs(64, 512)
    graph, results = captured(functools.partial(everything, frt.bias_gelu), args)
    for _ in range(3):
        with torch.no_grad():
            for a in args:
                a.normal_()
        graph.replay()
        assert_close(results, everything(reference.bias_gelu, args), rtol=1e-4, atol=1e-4)


@gpu
def test_graphs_of_a_training_step():
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, device="cuda")
    x = torch.randn(32, 64, device="cuda")
    twin = torch.nn.Linear(64, 64, device="cuda")
    twin.load_state_dict(model.state_dict())

    def step(net, ops):
        loss = ops.gelu(net(x)).square().mean()
        grads = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for p, g in zip(net.parameters(), grads, strict=True):
                p -= 0.1 * g

    graph, _ = captured(step, model, frt)
    model.load_state_dict(twin.state_dict())
    for _ in range(3):
        graph.replay()
        step(twin, reference)
    assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-4, atol=1e-5)


@gpu
def test_a_cold_kernel_in_a_capture_is_refused():
    op, args = scaled(11), [t.detach() for t in inputs(16, 64)]
    graph = torch.cuda.CUDAGraph()
    message = "scaled: this specialisation is not loaded yet.*before the capture .*fusionrt warmup"
    with pytest.raises(frt.CaptureError, match=message), torch.cuda.graph(graph):
        op(*args)
    want = torch.sigmoid(args[0] + args[1]) * 11
    assert_close(op(*args), want)  # the process goes on
    graph, y = captured(op, *args)
    y.zero_()
    graph.replay()
    assert_close(y, want)
    with pytest.raises(frt.CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        op(args[0].double(), args[1].double())  # another specialisation of the same op
    assert_close(op(*args), want)


@gpu
@pytest.mark.parametrize("rows", [16, 8192])  # many elements have a kernel of their own
def test_a_new_shape_of_a_loaded_kernel_can_be_captured(rows):
    """The shape is a parameter, not a specialisation: nothing has to be loaded."""
    op, args = scaled(13 + rows), [t.detach() for t in inputs(rows, 64)]
    op(*args)
    more = [t.detach() for t in inputs(32, 64)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(*more)
    graph.replay()
    assert_close(y, torch.sigmoid(more[0] + more[1]) * (13 + rows))


@needs_nvrtc
def test_a_translation_unit_is_loaded_with_all_its_kernels(monkeypatch):
    with rehearsal.collecting() as needed:
        frt.relu(torch.empty(1 << 20, device="meta"))
    unit, = launch.sources(needed[0])
    driver = SimpleNamespace(moduleLoadData=lambda code: "my", moduleGetFunction="{} {}".format)
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    monkeypatch.setattr(cuda, "architecture", lambda index: "sm_90")
    monkeypatch.setattr(cuda, "_functions", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert cuda.function(unit.text, unit.entry, 0, "relu") == "my pointwise"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert cuda.function(unit.text, unit.entry, 0, "relu", "pointwise_of_few") == "my pointwise_of_few"


# --- devices


@gpu
@several_gpus
def test_the_tensors_device_is_used_whatever_is_current():
    for current, other in ((0, 1), (1, 0)):
        args = inputs(16, 64, device=f"cuda:{other}")
        op = scaled(17 + current)
        with torch.cuda.device(current):
            for _ in range(2):
                found = everything(op, args)
                assert {t.device.index for t in found} == {other}
                assert torch.cuda.current_device() == current
        # Near one 1 - sigmoid has few digits, on both sides.
        assert_close(found, expected(17 + current, args), rtol=1e-4, atol=1e-4)
        torch.manual_seed(1)
        with torch.cuda.device(current):
            kept = frt.relu_dropout(torch.ones(64, 64, device=f"cuda:{other}"), 0.5)
        torch.manual_seed(1)
        assert torch.equal(kept.cpu(), frt.relu_dropout(torch.ones(64, 64), 0.5))


@gpu
@several_gpus
def test_threads_on_devices_of_their_own():
    def work(i):
        device = i % torch.cuda.device_count()
        torch.cuda.set_device(device)
        args = inputs(64, 128, device=f"cuda:{device}")
        for _ in range(20):
            assert_close(everything(frt.bias_gelu, args), everything(reference.bias_gelu, args),
                         rtol=1e-4, atol=1e-4)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


@gpu
@several_gpus
def test_several_gpus_in_one_call_are_refused():
    with pytest.raises(ValueError, match="add_relu: all tensors must be on one device, got "
                                         "a on cuda:0, b on cuda:1"):
        frt.add_relu(torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1"))


@gpu
def test_devices_do_not_mix_and_can_be_insisted_on():
    x, y = torch.ones(3, device="cuda"), torch.ones(3)
    with pytest.raises(ValueError, match="add_relu: all tensors must be on one device, got "
                                         "a on cuda:0, b on cpu"):
        frt.add_relu(x, y)
    with pytest.raises(TypeError, match="add_relu: a must be a CPU tensor, got one on cuda"):
        frt.add_relu.cpu(x, x)
    with pytest.raises(TypeError, match="add_relu: b must be a CUDA tensor, got one on cpu"):
        frt.add_relu.cuda(x, y)
    assert_close(frt.add_relu.cuda(x, x), x + x)


# --- memory


@gpu
def test_empty_tensors_launch_nothing(monkeypatch):
    monkeypatch.setattr(device, "function", None)
    op = scaled(19)
    for shape in ((0, 4), (3, 0), (0,)):
        args = inputs(*shape)
        out, *grads = everything(op, args)
        assert out.shape == shape
        assert all(torch.equal(g, torch.zeros_like(a)) for g, a in zip(grads, args, strict=True))


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_nothing_is_written_beside_the_result(dtype):
    """Any alignment, any tail: 16-byte vectors stay within their tensor."""
    for n in (1, 7, 8, 9, 31, 33, 127, 1023, 1025, 4099):
        for first in (0, 1, 2, 3, 4):
            x = torch.randn(first + n + 3, device="cuda", dtype=dtype)
            before = x.clone()
            y = frt.gelu(x[first:first + n])
            assert_same_bits(x, before)
            assert_close(y, F.gelu(x[first:first + n]))


@gpu
def test_results_are_the_same_bits_each_time():
    args = inputs(1023, 517)
    first = everything(frt.bias_gelu, args)
    for _ in range(5):
        for a, b in zip(everything(frt.bias_gelu, args), first, strict=True):
            assert_same_bits(a, b)


@gpu
@pytest.mark.slow
def test_more_elements_than_32_bits_count():
    n = 2**32 + 2**16
    x = torch.empty(n, dtype=torch.float16, device="cuda").normal_()
    y = frt.relu(x)
    for a in range(0, n, 2**30):
        assert torch.equal(y[a:a + 2**30], x[a:a + 2**30].relu())
    del y
    rows = x.view(-1, 2**16)
    bias = torch.randn(2**16, device="cuda", dtype=torch.float16)
    y = frt.bias_relu(rows, bias)
    for r in range(0, len(rows), 2**14):
        assert torch.equal(y[r:r + 2**14], (rows[r:r + 2**14] + bias).relu())
    del y
    strided = x[: 2**32].view(-1, 2)[:, 0]  # few elements, far apart
    y = frt.relu(strided)
    assert torch.equal(y[-2**20:], strided[-2**20:].relu())


# --- when something is missing


def test_without_cupy_a_cuda_call_says_what_to_install(monkeypatch):
    cuda.driver.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", None)
    try:
        with pytest.raises(RuntimeError, match=r"need CuPy: pip install 'fusionrt\[cuda12\]'"):
            cuda.driver()
    finally:
        cuda.driver.cache_clear()


def test_without_nvrtc_a_compilation_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    with pytest.raises(RuntimeError, match=r"CuPy and NVRTC: pip install 'fusionrt\[cuda12\]'"):
        compiler.build("", "f", "sm_90", "f")


def test_a_refused_source_is_shown_with_its_log():
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    with pytest.raises(frt.CompileError, match="undefined_name") as caught:
        compiler.build('extern "C" __global__ void f() { undefined_name(); }', "f", "sm_80", "kern")
    error = caught.value
    assert (error.kernel, error.arch) == ("kern", "sm_80")
    assert str(error).startswith("kern: cannot compile for sm_80 with --std=c++17")
    path = Path(error.source)
    try:
        assert "undefined_name" in path.read_text()
    finally:
        path.unlink()


def test_the_compilers_report_is_read():
    log = ("ptxas info    : 0 bytes gmem\n"
           "ptxas info    : Function properties for f\n"
           "    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
           "ptxas info    : Used 32 registers, used 0 barriers, 512 bytes smem\n"
           "ptxas info    : (C7510) Potential Performance Loss: wgmma\n")
    assert compiler.resources(log) == {"registers": 32, "stack": 16, "spills": 8, "shared": 512,
                                       "warnings": 1}
