"""Statistics and elements in one kernel, the blocks of which meet."""

import threading
import time

import pytest
import torch
from checking import BF16, F16, F32, assert_same_bits

import fusionrt as frt
from fusionrt.rehearsal import collecting
from fusionrt.runtime import arrivals, launch, pointwise, reduction_cut, resident, vectors

SHAPES = [(4, 64, 29, 31), (3, 24, 29, 27), (2, 520, 19, 15), (64, 8, 17, 7), (16, 256, 28, 28)]
SEPARATE = ["pointwise_reduce", "join_partials", "pointwise_walk"]


def images(shape, dtype, device):
    x = torch.randn(shape, dtype=torch.float32, device=device).add(1).to(dtype)
    return x.contiguous(memory_format=torch.channels_last).requires_grad_()


def of_channels(x):
    return torch.rand(x.shape[1], dtype=torch.float32, device=x.device).add(0.5).requires_grad_()


def norm(x, weight, bias, residual=None):
    return frt.batch_norm(x, None, None, weight, bias, training=True, residual=residual, epilogue=frt.relu)


def problems(shape, dtype=BF16, last=True, training=True):
    x = torch.empty(shape, dtype=dtype, device="meta")
    x = (x.contiguous(memory_format=torch.channels_last) if last else x).requires_grad_()
    with collecting() as found:
        y = norm(x, *(torch.empty(shape[1], device="meta", requires_grad=True) for _ in range(2)))
        if training:
            y.backward(torch.empty_like(y))
    return found


def entries(found):
    return [s.entry for p in found for s in launch.sources(p)]


@pytest.mark.parametrize("shape, dtype, last", [
    ((8, 64, 28, 28), torch.float64, True), ((8, 64, 28, 28), BF16, False), ((8, 33, 28, 28), BF16, True),
    ((1, 256, 2, 2), F32, True), ((20, 68000, 1, 1), BF16, True)], ids=str)
def test_what_keeps_its_kernels(shape, dtype, last):
    assert "pointwise_resident" not in entries(problems(shape, dtype, last))


@pytest.mark.parametrize("multiprocessors, nbytes", [(132, 228 << 10), (108, 164 << 10),
                                                      (40, 64 << 10), (4, 100 << 10)])
@pytest.mark.parametrize("shape", [(32, 256, 56, 56), (256, 2048, 7, 7), (8, 24, 17, 13)], ids=str)
def test_all_blocks_fit_on_the_device(shape, multiprocessors, nbytes, monkeypatch):
    monkeypatch.setattr(resident.cuda, "multiprocessors", lambda _: multiprocessors)
    monkeypatch.setattr(resident.cuda, "shared_bytes", lambda _: (nbytes, nbytes - 1024))
    for problem in (p for p in problems(shape) if p.then is not None):
        made = resident.shape(problem, 0)
        if made is None:
            assert multiprocessors < 132
            continue
        rows, width = resident.rows(problem), vectors.vector_width(problem, 16)
        assert made.grid == made.chunks * reduction_cut.tiles(problem, rows, width) and made.chunks > 1
        a_multiprocessor = -(-made.grid // multiprocessors)
        assert a_multiprocessor <= resident.blocks(problem)
        assert made.packs * pointwise.REDUCE_BLOCK * resident.pack_bytes(problem) == made.shared
        assert (made.shared + resident.RESERVED) * a_multiprocessor <= nbytes
        rows_kept = made.packs * pointwise.REDUCE_BLOCK // reduction_cut.n_lanes(problem, rows, width)
        assert rows_kept * made.chunks < rows.n_rows + 2 * pointwise.REDUCE_BLOCK * made.chunks


def test_threads_that_begin_together_have_counters_of_one_memory(monkeypatch):
    """What a thread was given stays its own for good."""
    taken, begin = [], threading.Barrier(8)

    def zeros(nbytes):
        time.sleep(0.02)
        taken.append((len(taken) + 1) << 20)
        return taken[-1]

    def ask(found):
        begin.wait()
        found.append(arrivals._next(0))

    monkeypatch.setattr(arrivals, "_free", {})
    monkeypatch.setattr(arrivals.cuda, "zeros", zeros)
    found = []
    threads = [threading.Thread(target=ask, args=(found,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
    assert len(set(found)) == 8
    assert all(0 <= address - taken[0] < 4 * arrivals.COUNTERS for address in found)


def test_counters_do_not_run_out(monkeypatch):
    memory = iter([4096, 8192])
    monkeypatch.setattr(arrivals, "_free", {})
    monkeypatch.setattr(arrivals, "COUNTERS", 2)
    monkeypatch.setattr(arrivals.cuda, "zeros", lambda nbytes: next(memory))
    assert [arrivals._next(0) for _ in range(4)] == [4096, 4100, 8192, 8196]


# --- on a GPU


def both_ways(x, weight, bias, residual=None):
    y = norm(x, weight, bias, residual)
    torch.manual_seed(1)
    return [y.detach(), *torch.autograd.grad(y, [x, weight, bias], torch.randn_like(y))]


@pytest.mark.gpu
@pytest.mark.parametrize("shape, dtype, with_residual", [
    *((shape, BF16, False) for shape in SHAPES), (SHAPES[0], F32, False), (SHAPES[1], F32, True),
    (SHAPES[2], BF16, True), (SHAPES[2], F16, False)], ids=str)
def test_against_double(shape, dtype, with_residual, launches):
    x = images(shape, dtype, "cuda")
    weight, bias = of_channels(x), of_channels(x)
    residual = images(shape, dtype, "cuda").detach() if with_residual else None
    y = norm(x, weight, bias, residual)
    grad = torch.randn_like(y)
    found = [y.detach(), *torch.autograd.grad(y, [x, weight, bias], grad)]
    assert not launches or launches == ["pointwise_resident"] * 2  # plans may be there from another test
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = torch.nn.functional.batch_norm(wide[0], None, None, *wide[1:], training=True)
    expected = expected if residual is None else expected + residual.double()
    # Where rounding decides what relu lets pass, one element's gradient is another.
    expected = torch.where(y.detach() > 0, expected, 0)
    gradients = torch.autograd.grad(expected, wide, grad.double())
    few = {BF16: 4e-3, F16: 5e-4, F32: 2e-6}[dtype]
    for a, b in zip(found, [expected.detach(), *gradients], strict=True):
        assert (a.double() - b).norm() <= few * b.norm()


@pytest.mark.gpu
def test_every_call_gives_the_same_bits():
    x = images((16, 256, 28, 28), BF16, "cuda")
    weight, bias = of_channels(x), of_channels(x)
    first = both_ways(x, weight, bias)
    for _ in range(5):
        for a, b in zip(both_ways(x, weight, bias), first, strict=True):
            assert_same_bits(a, b)


@pytest.mark.gpu
def test_streams_and_graphs_meet_apart():
    """Calls that run at a time do not count each other's blocks."""
    x = images((16, 256, 28, 28), BF16, "cuda").detach()
    weight, bias = of_channels(x).detach(), of_channels(x).detach()
    expected = norm(x, weight, bias)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for k in range(60):
        with torch.cuda.stream(streams[k % 3]):
            found.append(norm(x, weight, bias))
    torch.cuda.synchronize()
    graphs = []
    for stream in streams:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found += [norm(x, weight, bias) for _ in range(3)]
        graphs.append(graph)
    for k in range(30):
        with torch.cuda.stream(streams[k % 3]):
            graphs[k % 3].replay()
        found.append(norm(x, weight, bias))
    torch.cuda.synchronize()
    for y in found:
        assert_same_bits(y, expected)


@pytest.mark.gpu
def test_a_device_that_does_not_hold_the_blocks(monkeypatch, launches):
    monkeypatch.setattr(resident, "shape", lambda *_: None)
    x = images((6, 128, 15, 15), F32, "cuda")  # of no other test
    norm(x, of_channels(x), of_channels(x))
    assert launches == SEPARATE


@pytest.mark.gpu
def test_misaligned_images(launches):
    """Packs of fewer elements: kernels of their own."""
    memory = torch.randn(4 * 64 * 14 * 14 + 1, device="cuda").to(BF16)
    x = memory[1:].view(4, 14, 14, 64).permute(0, 3, 1, 2)
    weight, bias = of_channels(x).detach(), of_channels(x).detach()
    aligned = x.clone(memory_format=torch.preserve_format)
    torch.testing.assert_close(norm(x, weight, bias), norm(aligned, weight, bias), rtol=0.02, atol=0.02)
    assert sorted({"pointwise_reduce", "pointwise_resident"} & set(launches)) == [
        "pointwise_reduce", "pointwise_resident"]
