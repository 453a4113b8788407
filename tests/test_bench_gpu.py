"""fusionrt.bench on a GPU: the harness against what is known otherwise."""

import gc
import os
import statistics
import time

import pytest
import torch

import fusionrt
from fusionrt import bench
from fusionrt.bench import memory, profile, timing, traffic
from fusionrt.runtime import device as cuda

pytestmark = pytest.mark.gpu
COPY = 128 << 20  # bytes read by a large copy, and as many written
alone = pytest.mark.skipif(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
                           reason="compares times, and other tests are on this GPU: run this file alone")


@pytest.fixture(scope="module")
def copies():
    return [(torch.randn(COPY // 4, device="cuda"), torch.empty(COPY // 4, device="cuda")) for _ in range(4)]


def memcpy(dst, src):
    """cudaMemcpyAsync: so is `copy_` of contiguous memory."""
    dst.copy_(src)


def by_hand(pairs, rounds=9, calls=40):
    """us of a memcpy: two events around many of them, on buffers in rotation."""
    found = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)
        start.record()
        for i in range(calls):
            src, dst = pairs[i % len(pairs)]
            dst.copy_(src)
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(found)


# -- the clock -------------------------------------------------------------------------------------

@alone
def test_memcpy_takes_what_many_of_them_take(copies):
    src, dst = copies[0]
    m = bench.benchmark_kernel(memcpy, (dst, src))
    assert m.median == pytest.approx(by_hand(copies), rel=0.03)
    assert "L2 cold" in m.method


@alone
@pytest.mark.parametrize("graph", [False, True], ids=["issued", "graph"])
def test_a_copy_kernel_is_within_3_percent_of_memcpy(copies, graph):
    src, dst = copies[0]

    def kernel(dst, src):
        torch.neg(src, out=dst)

    m = bench.benchmark_kernel(kernel, (dst, src), graph=graph)
    assert m.median == pytest.approx(bench.benchmark_kernel(memcpy, (dst, src)).median, rel=0.03)


@alone
def test_our_copy_kernel_is_within_3_percent_of_the_ceiling(copies):
    m = bench.benchmark_kernel(fusionrt.relu, (copies[0][0],))
    assert 2 * COPY / m.median / 1e6 == pytest.approx(traffic.copy_rate(2 * COPY, torch.device("cuda", 0)),
                                                      rel=0.03)


def test_twice_as_many_cycles_take_twice_as_long():
    cycles = 400_000
    m = bench.benchmark_kernel({"one": lambda: torch.cuda._sleep(cycles),
                                "two": lambda: torch.cuda._sleep(2 * cycles)})
    assert m["two"].median == pytest.approx(2 * m["one"].median, rel=0.03)
    assert m["one"].median > cycles / 2.5e3  # no GPU has a clock above 2.5 GHz


def test_the_host_does_not_count():
    x = torch.zeros(1 << 16, device="cuda")

    def sleeping(x):
        x.add_(1)
        time.sleep(0.002)
        x.add_(1)

    m = bench.benchmark_kernel({"awake": lambda x: x.add_(1).add_(1), "sleeping": sleeping}, (x,), repeat=30)
    assert m["sleeping"].host > 2000
    assert m["awake"].host < 200
    assert m["sleeping"].median < 50
    assert m["sleeping"].median < m["awake"].median + 10


def test_nothing_takes_almost_no_time():
    assert bench.benchmark_kernel(lambda: None).median < 5
    assert bench.benchmark_kernel(lambda: time.sleep(0.001), repeat=20).median < 5


def test_a_difference_of_10_percent_is_always_seen():
    x = torch.randn(22 << 20, device="cuda")
    less = x[:20 << 20]
    for _ in range(5):
        m = bench.benchmark_kernel({"more": lambda: torch.sin(x), "less": lambda: torch.sin(less)}, repeat=40)
        assert m["less"].median < m["more"].median
        m = bench.benchmark_kernel({"less": lambda: torch.cuda._sleep(100_000),
                                    "more": lambda: torch.cuda._sleep(110_000)}, repeat=40)
        assert m["less"].median < m["more"].median


def test_noise_is_reported_and_small():
    x = torch.randn(16 << 20, device="cuda")
    m = bench.benchmark_kernel(torch.sin, (x,))
    assert 0 < m.spread < 0.1
    assert len(m.samples) == len(m.host_samples) == 100
    assert m.device.startswith("cuda:0 (")


def test_a_call_that_waits_says_so():
    m = bench.benchmark_kernel(lambda x: x.sum().item(), (torch.ones(1000, device="cuda"),), repeat=10)
    assert "waited for the device" in m.method


# -- cold, warm, graphs ----------------------------------------------------------------------------

def test_cold_inputs_take_longer_than_warm_ones():
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    for elements in (l2 // 16, 1 << 14):  # in rotation; so small that the L2 is flushed
        x = torch.randn(elements, device="cuda")
        times = {cold: bench.benchmark_kernel(torch.sum, (x,), cold=cold) for cold in (False, True)}
        assert "L2 warm" in times[False].method
        assert "L2 cold" in times[True].method
        assert times[True].median > times[False].median


def test_what_makes_inputs_cold():
    def method(x, **options):
        return bench.benchmark_kernel(lambda x: None, (x,), 1, 3, **options).method

    small, large = torch.ones(1000, device="cuda"), torch.ones(8 << 20, device="cuda")
    part_of_a_graph = torch.ones(8 << 20, device="cuda", requires_grad=True) * 2
    assert method(small).endswith("L2 warm")
    assert method(large).endswith("input sets in rotation")
    assert method(small, cold=True).endswith("flushed before every sample")
    assert method(large, cold=False).endswith("L2 warm")
    assert method(part_of_a_graph).endswith("flushed before every sample")


def test_copies_have_the_strides_and_sharing_of_the_inputs():
    seen = {}

    def record(x, t, wide):
        seen[x.data_ptr()] = (t.data_ptr(), t.stride(), wide.stride(), x.requires_grad)

    x = torch.ones(2048, 2048, device="cuda", requires_grad=True)
    with torch.no_grad():
        t, wide = x.t(), torch.ones(2048, device="cuda").expand(2048, 2048)
    bench.benchmark_kernel(record, (x, t, wide), cold=True)
    assert len(seen) > 2
    assert all(found == (at, (1, 2048), (0, 1), True) for at, found in seen.items())


def test_a_graph_has_no_dispatch():
    x = torch.randn(1 << 12, device="cuda")

    def long(x):
        for _ in range(20):
            x = x + 1
        return x

    issued, graph = (bench.benchmark_kernel(long, (x,), graph=g) for g in (False, True))
    assert graph.host < issued.host / 5
    assert graph.median < issued.median * 1.2
    assert "a graph of" in graph.method


def test_a_gradient_in_a_graph():
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    seed = torch.ones_like(x)
    m = bench.benchmark_kernel({"fused": lambda x: torch.autograd.grad(fusionrt.gelu(x), x, seed),
                                "eager": lambda x: torch.autograd.grad(torch.nn.functional.gelu(x), x, seed)},
                               (x,), graph=True)
    assert m["fused"].median == pytest.approx(m["eager"].median, rel=0.5)


def test_what_cannot_be_captured_names_its_variant():
    x = torch.ones(9, device="cuda")
    with pytest.raises(bench.VariantError, match="variant 'item' raised"):
        bench.benchmark_kernel({"item": lambda x: x.sum().item()}, (x,), graph=True)
    assert gc.isenabled()
    assert bench.benchmark_kernel(torch.sin, (x,), graph=True).median < 50


def test_cupy_arrays():
    cupy = pytest.importorskip("cupy")
    x = cupy.random.standard_normal((4096, 4096), dtype="float32")
    t = torch.from_dlpack(x)
    for cold in (True, False):
        # The least of three: other tests use the GPU at the same time.
        theirs, ours = (min(bench.benchmark_kernel(fusionrt.relu, (a,), cold=cold).min for _ in range(3))
                        for a in (x, t))
        assert theirs == pytest.approx(ours, rel=0.1)
    graphs = [min(bench.benchmark_kernel(fusionrt.relu, (a,), graph=True).min for _ in range(3))
              for a in (x, t)]
    assert graphs[0] == pytest.approx(graphs[1], rel=0.05)


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="one GPU")
def test_another_device():
    x = torch.randn(1 << 22, device="cuda:1")
    for graph in (False, True):
        assert bench.benchmark_kernel(torch.sin, (x,), graph=graph).device.startswith("cuda:1 (")
    assert torch.cuda.current_device() == 0


# -- memory, kernels, registers --------------------------------------------------------------------

def test_memory():
    x = torch.randn(1 << 20, device="cuda")
    where = x.device
    fusionrt.add_relu(x, x)
    assert memory.measure(lambda: torch.relu(x + 1), where) == memory.Memory(2 * x.nbytes, 2)
    assert memory.measure(lambda: x.add_(1), where) == memory.Memory(0, 0)
    assert memory.measure(lambda: fusionrt.add_relu(x, x), where) == memory.Memory(x.nbytes, 1)


def test_kernels_of_a_call():
    x = torch.randn(1 << 22, device="cuda")
    where = x.device
    fusionrt.add_relu(x, x)
    assert profile.launches(lambda: torch.relu(x + 1), where) == 2
    assert profile.launches(lambda: fusionrt.add_relu(x, x), where) == 1  # not torch's, but seen
    assert profile.launches(lambda: None, where) == 0
    found = profile.kernels(lambda: fusionrt.add_relu(x, x), where)
    assert [k.name for k in found] == ["pointwise"]
    alone = bench.benchmark_kernel(fusionrt.add_relu, (x, x), cold=False).median
    assert found[0].us == pytest.approx(alone, rel=0.3)


def test_registers_and_occupancy_are_those_of_the_driver(home):
    driver = cuda.driver()
    x = torch.randn(512, 1024, device="cuda", requires_grad=True)
    b = torch.randn(1024, device="cuda", requires_grad=True)
    found = profile.resources(fusionrt.bias_gelu, (x, b), backward=True)
    assert len(found) == 3
    properties = torch.cuda.get_device_properties(0)
    warps = properties.max_threads_per_multi_processor // 32
    for r, function in _loaded(found):
        assert driver.funcGetAttribute(4, function) == r.registers   # CU_FUNC_ATTRIBUTE_NUM_REGS
        assert driver.funcGetAttribute(1, function) == r.shared      # ..._SHARED_SIZE_BYTES
        blocks = driver.occupancyMaxActiveBlocksPerMultiprocessor(function, r.block, 0)
        assert r.occupancy == blocks * (r.block // 32) / warps


def _loaded(found):
    """Each with the handle of its kernel, loaded from the cache, which nobody else has filled."""
    from fusionrt.runtime import cache
    entries = [entry for _, entry in cache.contents()]
    for r in found:
        entry = next(e for e in entries if e.metadata.get("kernel") == r.kernel
                     and e.metadata.get("entry") == r.entry and e.metadata.get("arch") == r.arch
                     and e.metadata.get("registers") == r.registers)
        yield r, cuda.driver().moduleGetFunction(cuda.driver().moduleLoadData(entry.payload), r.entry)


# -- comparison ------------------------------------------------------------------------------------

def test_a_comparison():
    x, b = torch.randn(16384, 2048, device="cuda"), torch.randn(2048, device="cuda")

    def chain(x, b):
        return torch.relu(x + b)

    found = bench.compare_implementations({"eager": chain, "fused": fusionrt.bias_relu}, (x, b),
                                          reference=chain)
    eager, fused = found["eager"], found["fused"]
    assert (eager["launches"], fused["launches"]) == (2, 1)
    assert (eager["peak_bytes"], fused["peak_bytes"]) == (2 * x.nbytes, x.nbytes)
    assert (eager["allocations"], fused["allocations"]) == (2, 1)
    assert eager["bytes"] == fused["bytes"] == 2 * x.nbytes + b.nbytes
    assert eager["bound"] == pytest.approx(2, rel=0.01)
    assert 1.2 < fused["speedup"] < 3
    assert 0.9 < fused["of_copy"] < 1.1
    assert fused["TB/s"] == pytest.approx(fused["bytes"] / fused["us"] / 1e6)
    assert (fused["outside"], fused["host_us"] > 0) == (0, True)
    assert "L2 cold" in str(found)


@alone
def test_copy_rate_is_that_of_this_run(copies):
    rate = 2 * COPY / by_hand(copies) / 1e6
    assert traffic.copy_rate(2 * COPY, torch.device("cuda", 0)) == pytest.approx(rate, rel=0.03)


def test_profile_model_inference():
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()).cuda()
    report = bench.profile_model_inference(model, torch.randn(64, 256, device="cuda"))
    assert "Sequential on cuda:0" in report
    assert ", of the host " in report
    assert " kernels, " in report
    assert "65,792 parameters" in report


@alone
def test_the_other_harness_agrees():
    x = torch.randn(64 << 20, device="cuda")
    with timing.stream():
        other = timing.replayed({"": [lambda: torch.sin(x)] * 4})[""].us
    assert bench.benchmark_kernel(torch.sin, (x,), cold=False).median == pytest.approx(other, rel=0.03)
