"""fusionrt.bench on the CPU. Times decide a test only where they differ ten times."""

import itertools
import json
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import fusionrt
from fusionrt import bench
from fusionrt.bench import memory, profile, sampling, traffic
from fusionrt.bench.kernel import copied

CPU = torch.device("cpu")


def chain(x, b):
    return torch.relu(x + b)


@pytest.fixture
def inputs():
    return torch.randn(64, 256), torch.randn(256)


# -- names -----------------------------------------------------------------------------------------

def test_bench_is_reached_without_torch():
    code = "import sys, fusionrt; fusionrt.bench.__all__; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_every_public_name_resolves():
    assert fusionrt.bench is bench
    assert [name for name in bench.__all__ if not hasattr(bench, name)] == []
    with pytest.raises(AttributeError, match=r"module 'fusionrt.bench' has no attribute 'nothing'"):
        _ = bench.nothing


# -- times -----------------------------------------------------------------------------------------

def test_statistics_are_those_of_the_samples():
    m = bench.Measurement("f", "cpu", "by hand", (3.0, 1.0, 2.0, 4.0, 10.0), (1.0, 2.0, 6.0))
    assert (m.mean, m.median, m.us, m.min, m.max, m.host) == (4.0, 3.0, 3.0, 1.0, 10.0, 2.0)
    assert m.std == pytest.approx(np.std([3, 1, 2, 4, 10], ddof=1))
    assert m.spread == pytest.approx((4 - 2) / 3)
    assert m.percentile(50) == m.percentiles[50] == 3.0
    assert m["mean_time"] == 0.004
    assert dict(m) == {"mean_time": 0.004, "median_time": 0.003, "std_time": m.std / 1e3, "min_time": 0.001,
                       "max_time": 0.01}
    assert json.loads(json.dumps(m.as_dict()))["samples"] == [3, 1, 2, 4, 10]
    with pytest.raises(KeyError, match="'time'; there are mean_time, median_time"):
        m["time"]


def test_one_sample_has_no_deviation():
    m = bench.benchmark_kernel(time.sleep, 0.001, warmup=0, repeat=1, device="cpu")
    assert (m.std, m.spread, len(m.samples), m.host) == (0.0, 0.0, 1, None)
    assert m.median == m.mean == m.percentiles[99] == m.samples[0]


def test_a_slow_function_is_seen_as_slow_and_variants_take_turns():
    order = []

    def pausing(seconds):
        def call():
            order.append(seconds)
            time.sleep(seconds)
        return call

    found = bench.benchmark_kernel({"slow": pausing(0.02), "fast": pausing(0.001)}, warmup=1, repeat=4,
                                   device="cpu")
    assert 20_000 <= found["slow"].median < 60_000
    assert 1_000 <= found["fast"].median < 10_000
    assert all(len(m.samples) == 4 and m.calls == 1 for m in found.values())
    changes = sum(a != b for a, b in itertools.pairwise(order[4:]))  # without warm-ups
    assert changes >= 4


def test_a_short_call_is_repeated_within_a_sample():
    calls = 0

    def nothing():
        nonlocal calls
        calls += 1

    m = bench.benchmark_kernel(nothing, repeat=5, warmup=3, device="cpu")
    assert m.calls > 1
    assert calls == 3 + 1 + (1 + 5) * m.calls  # the first sample does not count
    assert m.median < 20
    assert f"perf_counter around {m.calls} calls" in m.method


@pytest.mark.parametrize(("inputs", "expected"), [
    ((1, 2), ((1, 2), {})), ([1, 2], ((1, 2), {})), ({"a": 1}, ((), {"a": 1})), (3, ((3,), {})),
    ((), ((), {})), (([1, 2],), (([1, 2],), {})),
], ids=str)
def test_inputs(inputs, expected):
    seen = []
    bench.benchmark_kernel(lambda *args, **kwargs: seen.append((args, kwargs)), inputs, 0, 1, device="cpu")
    assert seen[0] == expected


def test_a_tensor_and_a_numpy_array_are_single_arguments():
    for value in (torch.ones(3), np.ones(3)):
        seen = []
        m = bench.benchmark_kernel(seen.append, value, 0, 1)
        assert seen[0] is value
        assert m.device == "cpu"


def test_errors_name_the_variant():
    def bad():
        raise ValueError("no good\nmore")

    with pytest.raises(bench.VariantError, match=r"variant 'b' raised ValueError: no good$") as caught:
        bench.benchmark_kernel({"a": lambda: None, "b": bad}, device="cpu")
    assert caught.value.variant == "b"
    assert isinstance(caught.value.__cause__, ValueError)


def test_errors_of_calls_issued_one_by_one_keep_their_kind():
    """By which a benchmark tells that a rival has too little memory."""
    def fails():
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match=r"^no room$"):
        sampling.issued({"": [fails]})


def test_an_error_that_comes_late_names_the_variant():
    calls = iter(range(5))
    with pytest.raises(bench.VariantError, match="variant 'next' raised StopIteration"):
        bench.benchmark_kernel({"next": lambda: time.sleep(0.0001 * next(calls))}, warmup=2, repeat=20,
                               device="cpu")


@pytest.mark.parametrize(("fn", "options", "error", "text"), [
    ({}, {}, ValueError, "no function to measure"),
    ({"a": 1}, {}, TypeError, "a must be a function, got int"),
    (print, {"repeat": 2.5}, TypeError, "repeat must be an integer, got 2.5"),
    (print, {"device": "tpu"}, ValueError, "device must be cpu or cuda, got tpu"),
    (print, {"repeat": 0}, ValueError, "repeat must be at least 1, got 0"),
    (print, {"warmup": -1}, ValueError, "warmup must be at least 0, got -1"),
    (print, {"device": "meta"}, ValueError, "device must be cpu or cuda, got meta"),
    (print, {"device": "cpu", "cold": True}, ValueError, "cold=True is for GPUs"),
    (print, {"device": "cpu", "graph": True}, ValueError, "graph=True is for GPUs"),
])
def test_wrong_arguments(fn, options, error, text):
    with pytest.raises(error, match=text):
        bench.benchmark_kernel(fn, (), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(ValueError, match="device is cuda, and there is no CUDA device"):
        bench.benchmark_kernel(print, device="cuda")


def test_copies_have_the_strides_and_sharing_of_the_inputs():
    x = torch.ones(8, 8, requires_grad=True)
    with torch.no_grad():
        args = (x, x.t(), torch.ones(8).expand(8, 8), np.ones(3), "mean")
    (y, t, wide, array, word), more = copied((args, {"x": x}))
    assert y.data_ptr() == t.data_ptr() == more["x"].data_ptr() != x.data_ptr()
    assert (y.requires_grad, t.stride(), wide.stride(), word) == (True, (1, 8), (0, 1), "mean")
    array[0] = 2
    assert args[3][0] == 1
    assert copied(((x * 2,), {})) is None  # part of a graph


class _Clock:
    """Samples with given times, as a GPU would give them: whether the host got ahead depends on `spin`."""

    def __init__(self, variant, host, us):
        self.variant, self.host, self.us = variant, host, us

    def __call__(self):
        issuing = self.host * self.variant.calls
        return sampling.Sample(self.us, self.host, ahead=self.variant.spin > issuing)


@pytest.mark.parametrize(("host", "us", "calls"), [(10, 2, 50), (10, 40, 7), (5000, 2, 1), (10, 1e5, 1)])
def test_the_device_is_kept_busy_while_the_host_issues(monkeypatch, host, us, calls):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    variant = sampling.Variant("f", [lambda: None], None)
    variant.take = _Clock(variant, host, us)
    variant.prepare()
    assert not variant.waits
    assert variant.calls == calls
    assert variant.spin > host * calls


def test_a_call_that_waits_for_the_device_is_told_apart(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    variant = sampling.Variant("f", [lambda: None], None)
    variant.take = lambda: sampling.Sample(50.0, 50.0 + variant.spin, ahead=False)
    variant.prepare()
    assert variant.waits
    assert variant.spin == 0
    assert "waited for the device" in sampling._how(variant, 100, graph=False)


# -- traffic ---------------------------------------------------------------------------------------

def test_least_bytes_counts_each_array_once_in_its_own_dtype(inputs):
    x, b = inputs
    q = torch.zeros(64, 256, dtype=torch.int8)
    assert traffic.least_bytes((x, b), q) == x.nbytes + b.nbytes + 64 * 256
    assert traffic.least_bytes((x, x, 2.0), x) == 2 * x.nbytes
    assert traffic.least_bytes({"b": b.expand(64, 256)}, [x.half()]) == b.nbytes + x.nbytes // 2
    assert traffic.least_bytes((x[:, ::2],), ()) == x.nbytes // 2
    assert traffic.least_bytes((np.ones(5), [torch.empty(0), None]), np.ones(3, np.int8)) == 43


def test_memory_that_several_inputs_share_counts_once():
    a, b = torch.ones(64, 64), torch.ones(64, 64)
    for shared in ((a, a.t()), (a, a[:32], a[32:]), (a[::2], a[1::2]), (a.numpy(), a.numpy().T),
                   (a.unfold(0, 3, 1), a.view(torch.int32))):
        assert traffic.least_bytes(shared, ()) == a.nbytes
        assert traffic.least_bytes((b, *shared), b) == 3 * a.nbytes
    assert traffic.least_bytes((a[:, :8], a[:, 8:16], a[:, :8]), ()) == a.nbytes // 4
    assert traffic.least_bytes((torch.arange(100.0).unfold(0, 50, 1),), ()) == 400
    meta = torch.ones(8, device="meta"), torch.ones(8, device="meta")
    assert traffic.least_bytes((*meta, meta[0]), ()) == 64
    assert traffic.unfused(torch.mm, (a, a.t())).bytes == 2 * a.nbytes


def test_the_unfused_chain(inputs):
    x, b = inputs
    n, m = x.nbytes, b.nbytes
    found = traffic.unfused(lambda x, b: torch.relu((x + b).t().reshape(256, 8, 8)), (x, b))
    assert found.ops == ("add", "relu")
    assert found.bytes == (n + m + n) + (n + n)
    assert found.launches == 2
    assert found.bound(2 * n + m) == (4 * n + m) / (2 * n + m)


def test_the_unfused_chain_of_a_gradient_and_of_work_in_place(inputs):
    x, _ = inputs
    n = x.nbytes

    def both(x):
        y = torch.relu(x.detach().requires_grad_())
        y.backward(x)

    found = traffic.unfused(both, (x,))
    assert found.ops == ("relu", "threshold_backward")
    assert found.bytes == 2 * n + 3 * n
    assert traffic.unfused(lambda: torch.empty(5).fill_(1).mul_(2)).bytes == 20 + 40
    assert traffic.unfused(torch.zeros_like, (x,)).bytes == n
    assert traffic.unfused(torch.neg, (x,), {"out": torch.empty_like(x)}).bytes == 2 * n


def test_device_of():
    assert traffic.device_of(((torch.ones(1), 2.0), {})) == CPU
    assert traffic.device_of((np.ones(2),)) == CPU
    if not torch.cuda.is_available():
        assert traffic.device_of(()) == CPU


# -- memory and profile ----------------------------------------------------------------------------

def test_memory_sees_intermediate_results(inputs):
    x, b = inputs
    chain(x, b)
    found = memory.measure(lambda: torch.relu(x + b), CPU)
    assert (found.peak, found.allocations) == (2 * x.nbytes, 2)
    kept = memory.measure(lambda: torch.add(x, b, out=x), CPU)
    assert (kept.peak, kept.allocations) == (0, 0)


def test_kernels_of_the_cpu_are_ops(inputs):
    x, b = inputs
    found = {k.name: k for k in profile.kernels(lambda: torch.relu(x + b), CPU, calls=3)}
    assert found["aten::add"].launches == 1
    assert found["aten::add"].us > 0
    assert profile.launches(lambda: None, CPU) is None


@pytest.mark.parametrize(("arch", "block", "registers", "shared", "expected"), [
    ("sm_90", 128, 40, 0, 48 / 64),      # 12 blocks: registers go by 256 a warp, 48 warps
    ("sm_90", 256, 32, 0, 1.0),
    ("sm_90", 256, 64, 0, 0.5),
    ("sm_90", 32, 16, 0, 0.5),           # 32 blocks
    ("sm_90", 1024, 255, 0, 0.0),        # does not fit at all
    ("sm_90a", 256, 32, 113 * 1024, 16 / 64),
    ("sm_75", 256, 64, 0, 1.0),
    ("sm_86", 1024, 32, 0, 32 / 48),
])
def test_occupancy(arch, block, registers, shared, expected):
    assert profile.occupancy(arch, block, registers, shared) == expected


def test_occupancy_of_an_unknown_architecture():
    with pytest.raises(ValueError, match="no limits of 'sm_10' are known; there are sm_75"):
        profile.occupancy("sm_10", 32, 32)


def test_resources_of_our_kernels():
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    x, b = torch.empty(64, 256, requires_grad=True), torch.empty(256, requires_grad=True)
    found = profile.resources(fusionrt.bias_relu, (x, b), arch="sm_90", backward=True)
    assert [r.entry for r in found] == ["pointwise", "pointwise_reduce", "sum_partials"]
    for r in found:
        assert 16 <= r.registers <= 255
        assert r.spills == 0
        assert r.occupancy == profile.occupancy("sm_90", r.block, r.registers, r.shared)
    assert found[0].block == 128


def test_resources_refuse():
    with pytest.raises(ValueError, match="relu runs no kernel of ours"):
        profile.resources(torch.relu, (torch.ones(3),), arch="sm_90")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="there is no GPU; say for which arch"):
            profile.resources(fusionrt.relu, (torch.ones(3),))


# -- other names -----------------------------------------------------------------------------------

def test_kernel_profiler(inputs, tmp_path):
    profiler = bench.KernelProfiler()
    found = profiler.compare_implementations(
        {"slow": lambda x, b: time.sleep(0.02), "fast": chain}, args=inputs, num_iterations=3)
    assert set(found["slow"]) == {"mean_time", "median_time", "std_time", "min_time", "max_time", "memory"}
    assert 20 <= found["slow"]["min_time"] <= found["slow"]["mean_time"] <= found["slow"]["max_time"]
    assert found["fast"]["mean_time"] < found["slow"]["mean_time"]
    assert found["slow"]["std_time"] > 0
    assert (found["slow"]["memory"], found["fast"]["memory"]) == (0, 2 * inputs[0].nbytes)
    one = profiler.compare_implementations({"relu": torch.relu}, args=inputs[0], num_iterations=2)
    assert one["relu"]["memory"] == inputs[0].nbytes
    with pytest.raises(ValueError, match="metric must be a time in the results, as mean_time, got 'memory'"):
        profiler.plot_comparison(found, metric="memory")
    pytest.importorskip("matplotlib")
    profiler.plot_comparison(found, title="both", path=tmp_path / "p.svg")
    assert "slow" in (tmp_path / "p.svg").read_text()


def test_cpu_kernel_benchmark():
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    found = bench.CPUKernelBenchmark.compare_implementations({"a": sdpa, "b": sdpa}, q, k, v)
    assert list(found) == ["a", "b"]
    one = bench.CPUKernelBenchmark.benchmark_function(time.sleep, 0.002, warmup=1, repeat=3)
    assert set(one) == {"mean", "std", "min", "max"}
    assert 2 <= one["min"] <= one["mean"] <= one["max"]


def test_quick_benchmark_and_compare_functions(inputs):
    found = bench.quick_benchmark(torch.softmax, inputs[0], dim=-1, num_iterations=5)
    assert found["mean_time"] > 0
    assert (found.name, len(found.samples)) == ("softmax", 5)
    both = bench.compare_functions([torch.relu, torch.sigmoid], inputs[0], num_iterations=2)
    assert list(both) == ["relu", "sigmoid"]
    assert list(bench.compare_functions({"r": torch.relu}, inputs[0], num_iterations=2)) == ["r"]
    with pytest.raises(ValueError, match="the functions need different names"):
        bench.compare_functions([chain, chain], *inputs)


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda f: bench.profile_model_inference(f, 1), TypeError, "model must be a torch.nn.Module, got Tensor"),
    (lambda f: bench.profile_model_inference(torch.nn.ReLU(), f, top=-1), ValueError,
     "profile_model_inference: top must be at least 0, got -1"),
    (lambda f: bench.profile_model_inference(torch.nn.ReLU(), f, top=2.5), TypeError,
     "profile_model_inference: top must be an integer, got 2.5"),
    (lambda f: bench.profile_model_inference(torch.nn.ReLU(), f, 0), ValueError,
     "profile_model_inference: num_iterations must be at least 1, got 0"),
    (lambda f: bench.profile_with_pytorch_profiler([(3, "three", f)]), TypeError,
     "profile_with_pytorch_profiler: three must be a function, got int"),
    (lambda f: bench.profile_with_pytorch_profiler([(torch.relu, "f", f), (abs, "f", f)]), ValueError,
     "profile_with_pytorch_profiler: the functions need different names, got f, f"),
    (lambda f: bench.quick_benchmark(torch.relu, f, num_iterations=0), ValueError,
     "quick_benchmark: num_iterations must be at least 1, got 0"),
    (lambda f: bench.compare_functions(torch.relu, f), TypeError,
     "compare_functions: functions must be a list of functions or a mapping of names to functions, got relu"),
    (lambda f: bench.KernelProfiler().compare_implementations([torch.relu], f), TypeError,
     "compare_implementations: implementations must be a mapping of names to functions, got list"),
    (lambda f: bench.profile_with_pytorch_profiler([torch.relu]), TypeError,
     r"functions must be triples \(function, name, arguments\), got relu"),
    (lambda f: bench.compare_functions({"a": 3}, f), TypeError,
     "compare_implementations: a must be a function, got int"),
    (lambda f: bench.benchmark_kernel(3, f), TypeError, "benchmark_kernel: fn must be a function, got int"),
    (lambda f: bench.compare_functions([torch.relu], f, num_iterations="many"), TypeError,
     "compare_implementations: num_iterations must be an integer, got 'many'"),
])
def test_older_names_refuse(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.ones(3))


def test_profile_with_pytorch_profiler():
    x = torch.randn(100, 100)
    calls = [(torch.relu, "relu", x), (torch.softmax, "softmax", (x, -1))]
    found = bench.profile_with_pytorch_profiler(calls, 3)
    assert list(found) == ["relu", "softmax"]
    assert [k.launches for k in found["softmax"] if k.name == "aten::_softmax"] == [1]
    assert all(k.us > 0 for ks in found.values() for k in ks)


def test_profile_model_inference():
    model = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(4))
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = bench.profile_model_inference(model, torch.randn(8, 16), num_iterations=3)
    assert "Sequential on cpu: 76 parameters" in report
    assert "aten::addmm" in report
    assert "memory beyond the arguments" in report
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_mapping_may_be_the_only_argument():
    x = {"x": torch.ones(3)}

    def of_mapping(d):
        return d["x"] + 1

    assert bench.KernelProfiler().compare_implementations({"f": of_mapping}, x, num_iterations=2)["f"]
    assert bench.profile_with_pytorch_profiler([(of_mapping, "f", x)], 2)["f"]


def test_the_report_of_a_model_on_a_cpu_has_our_kernels_time():
    class Model(torch.nn.Module):
        def forward(self, x):
            return fusionrt.bias_gelu(fusionrt.softmax(x), x[0])

    said = bench.profile_model_inference(Model(), torch.randn(512, 512), num_iterations=3)
    assert profile.OUTSIDE in said
