"""What a captured graph compiles, listed without running it, and compiled side by side."""

import threading

import pytest
import torch
from checking import needs_nvrtc
from torch import nn
from torch.nn import functional as F

import fusionrt as frt
from fusionrt.convert import capture, kernels
from fusionrt.convert.graph import value
from fusionrt.rehearsal import Source, collecting
from fusionrt.runtime import cache, compiler, launch
from fusionrt.runtime import device as cuda

GPU = torch.device("cuda", 0)
WIDTH = 64


class Block(nn.Module):
    """A norm, an activation, a residual, dropout where it is trained; torch's own product between them."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = F.dropout(F.silu(self.norm(x)), 0.25, self.training) + torch.sigmoid(self.linear(x)) * x
        return F.gelu(self.last(y))


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A GPU to rehearse for, and an empty cache."""
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda, "architecture", lambda index: "sm_90")
    monkeypatch.setattr(cuda, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(cuda, "has_clusters", lambda index: True)
    monkeypatch.setattr(cuda, "shared_bytes", lambda index: (233472, 232448))


def captured(module, *inputs):
    """The module's rewritten graph, and meta tensors in the place of its inputs."""
    found = []
    torch._dynamo.reset()
    torch.compile(module, backend=lambda gm, given: found.append(gm) or gm.forward)(*inputs)
    gm, = found
    of_cpus = ("packed", "packed_linears")
    passes = tuple(name for name in capture.DEFAULT.passes if name not in of_cpus)
    capture.rewrite(gm, capture.DEFAULT._replace(passes=passes))
    values = [value(n) for n in gm.graph.nodes if n.op == "placeholder"]
    return gm, [torch.empty(v.shape, dtype=v.dtype, device="meta", requires_grad=v.requires_grad)
                for v in values]


def texts(found):
    return {(s.text, s.entry) for kernel in found
            for s in ([kernel] if isinstance(kernel, Source) else launch.sources(kernel))}


def joined():
    for thread in threading.enumerate():
        if thread.name == "fusionrt-kernels":
            thread.join()


@pytest.mark.parametrize("training", [False, True])
def test_what_is_listed_is_what_a_run_compiles(hopper, training):
    with torch.set_grad_enabled(training):
        gm, metas = captured(Block().train(training), torch.randn(32, WIDTH, requires_grad=training))
        with collecting(GPU) as run:
            out = gm.forward(*metas)[0]
            if training:
                out.backward(torch.empty_like(out))
        listed = list(kernels.needed(gm, GPU))
    assert all(isinstance(kernel, Source) for kernel in listed)
    assert texts(listed) == texts(run)
    assert len(texts(run)) == (5 if training else 2)


def test_a_product_of_hopper_is_listed_for_it_alone(hopper):
    module, x = nn.Sequential(nn.Linear(1024, 1024), nn.SiLU()).half(), torch.randn(512, 1024).half()
    with torch.no_grad():
        gm, _ = captured(module, x)
        assert [kernel.entry for kernel in kernels.needed(gm, GPU)] == ["gemm_sm90"]
        rows, weight = (torch.empty(n, 1024, device="meta", dtype=torch.float16) for n in (512, 1024))
        with collecting("cuda") as warmed:
            frt.linear_activation(rows, weight, activation="silu")
    assert "gemm_sm90" not in {entry for _, entry in texts(warmed)}


def test_a_rehearsal_draws_no_random_numbers(hopper):
    gm, _ = captured(Block().train(), torch.randn(8, WIDTH))
    before = torch.get_rng_state()
    assert list(kernels.needed(gm, GPU))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_op_that_cannot_be_rehearsed_hides_no_other(hopper):
    with torch.no_grad():
        gm, _ = captured(Block().eval(), torch.randn(8, WIDTH))
        whole = texts(kernels.needed(gm, GPU))
        last = next(n for n in gm.graph.nodes if getattr(n.target, "__module__", "").startswith("fusionrt"))
        with gm.graph.inserting_before(last):
            gm.graph.call_function(frt.bias_gelu, (last.args[0], "no tensor"))
        assert texts(kernels.needed(gm, GPU)) == whole and len(whole) == 2


@needs_nvrtc
def test_all_are_compiled_from_the_first_that_is_missing(hopper):
    with torch.no_grad():
        gm, _ = captured(Block().eval(), torch.randn(8, WIDTH))
        first, *others = dict.fromkeys(kernels.needed(gm, GPU))
        assert others

        def run(x):
            compiler.cubin(first.text, first.entry, "sm_90", first.name)
            return x + 1

        called = kernels.compiled_side_by_side(gm, run, GPU)
        assert called(1) == 2
        joined()
    for kernel in (first, *others):
        assert cache.load(compiler.key(kernel.text, kernel.entry, "sm_90")).payload[:4] == b"\x7fELF"
    assert called(2) == 3


@needs_nvrtc
def test_nothing_is_rehearsed_where_nothing_is_missing(hopper, monkeypatch):
    with torch.no_grad():
        gm, _ = captured(Block().eval(), torch.randn(8, WIDTH))
        first = next(kernels.needed(gm, GPU))
    rehearsed = []
    monkeypatch.setattr(kernels, "needed", lambda *given: rehearsed.append(given) or [])

    def run():
        return compiler.cubin(first.text, first.entry, "sm_90", first.name)[1]

    assert kernels.compiled_side_by_side(gm, run, GPU)() is False
    joined()
    assert len(rehearsed) == 1
    assert kernels.compiled_side_by_side(gm, run, GPU)() is True
    joined()
    assert len(rehearsed) == 1
    assert kernels.compiled_side_by_side(gm, run, None) is run


@needs_nvrtc
@pytest.mark.parametrize("name", ["needed", "Thread", "autocast"])
def test_a_fault_fails_no_call(hopper, monkeypatch, name):
    with torch.no_grad():
        gm, _ = captured(Block().eval(), torch.randn(8, WIDTH))
        first = next(kernels.needed(gm, GPU))

    def fails(*args, **kwargs):
        raise RuntimeError("can't start new thread")

    if name == "autocast":  # nothing is rehearsed
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
        monkeypatch.setattr(kernels.threading, "Thread", lambda **given: pytest.fail("started"))
    else:
        monkeypatch.setattr(kernels if name == "needed" else kernels.threading, name, fails)
    entry, was_there = kernels.compiled_side_by_side(
        gm, lambda: compiler.cubin(first.text, first.entry, "sm_90", first.name), GPU)()
    joined()
    assert (entry.payload[:4], was_there) == (b"\x7fELF", False)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
def test_the_first_call_on_a_gpu_finds_what_was_listed(monkeypatch, tmp_path, training):
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda, "_functions", {})
    listed, asked = [], set()
    known, function = kernels.needed, cuda.function
    monkeypatch.setattr(kernels, "needed", lambda *given: listed.extend(known(*given)) or listed)
    for module in ("launch.cuda", "kernel.cuda"):
        monkeypatch.setattr(f"fusionrt.runtime.{module}.function", lambda text, entry, *more: asked.add(
            (text, entry)) or function(text, entry, *more))
    torch.manual_seed(0)
    block = Block().cuda().train(training)
    x = torch.randn(33, WIDTH, device="cuda", requires_grad=training)
    with torch.set_grad_enabled(training):
        out = frt.auto_convert_model(block, validate_accuracy=False, cuda_graphs=False)(x)
        if training:
            out.backward(torch.ones_like(out))
    joined()
    assert asked and asked <= {(kernel.text, kernel.entry) for kernel in listed}
    if not training:
        torch.testing.assert_close(out, block(x))
