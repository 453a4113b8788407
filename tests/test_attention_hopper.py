"""Hopper's attention kernels: results and gradients, queries without a key, memory, registers."""

import importlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from attention_cases import heads, same
from checking import BF16, F16, captured, forget

import fusionrt as frt
from fusionrt.ops import attention_kernels as kernels
from fusionrt.ops import attention_path as path
from fusionrt.runtime import compiler, tensor_map
from fusionrt.runtime.tensor_map import Heads

FORMS = [kernels.Form("bfloat16", *kind)
         for kind in itertools.product(kernels.DIMS, (False, True), ("NONE", "LEFT", "BOTH"))]


@pytest.fixture
def hopper(monkeypatch):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    monkeypatch.setattr(path, "candidates", lambda *_: ["hopper"])
    monkeypatch.setattr(path, "_chosen", {})
    forget(monkeypatch, importlib.import_module("fusionrt.ops.attention"))


OPTIONS = {
    "dense": {}, "causal": {"causal": True}, "window": {"window": 65, "causal": True},
    "both sides": {"window": (130, 40)}, "to the right": {"window": (None, 3)},
    "softcap": {"softcap": 2.0}, "alibi": {"alibi_slopes": True, "causal": True},
    "alibi of both sides": {"alibi_slopes": True},
    "everything": {"alibi_slopes": True, "softcap": 2.0, "window": 150, "causal": True},
}


def with_slopes(options, q):
    slopes = {"alibi_slopes": torch.rand(q.shape[:2], device=q.device)} if "alibi_slopes" in options else {}
    return {**options, **slopes}


# --- results and gradients


LENGTHS = [*((name, n) for name in OPTIONS for n in ((300, 300), (513, 200), (200, 513))),
           *((name, n) for name in ("dense", "causal", "everything") for n in ((1, 1), (1, 300), (128, 128)))]


@pytest.mark.gpu
@pytest.mark.parametrize("dim", kernels.DIMS)
@pytest.mark.parametrize("name, lengths", LENGTHS, ids=str)
def test_results_and_gradients(name, lengths, dim, hopper):
    q, k, v = heads(*lengths, lengths[1], dim=dim, dtype=BF16, device="cuda")
    same(q, k, v, **with_slopes(OPTIONS[name], q))


@pytest.mark.gpu
@pytest.mark.parametrize("name, dim", [("causal", 64), ("everything", 128)])
def test_float16(name, dim, hopper):
    q, k, v = heads(300, 300, 300, dim=dim, dtype=F16, device="cuda")
    same(q, k, v, **with_slopes(OPTIONS[name], q))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", kernels.DIMS)
def test_of_one_key_a_query_gets_the_value(dim, hopper):
    q, k, v = (t.requires_grad_() for t in heads(300, 300, 300, dim=dim, dtype=BF16, device="cuda"))
    out, grad = frt.attention(q, k, v, window=1), torch.randn_like(v)
    assert torch.equal(out, v)
    assert torch.equal(torch.autograd.grad(out, v, grad)[0], grad)


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap_near_and_far(softcap, hopper):
    """Scores of which tanh is hardly curved, and such as it makes ends of the range of."""
    q, k, v = heads(300, 300, 300, dim=128, dtype=BF16, device="cuda")
    same(q * 4, k, v, softcap=softcap)
    same(q * 4, torch.cat((k[:, :, :200], k[:, :, 200:] * 8), 2), v, softcap=softcap)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "softcap", "alibi"])
def test_fewer_heads_of_keys(name, hopper):
    q, = heads(260, n=6, dim=128, dtype=BF16, device="cuda")
    for n in (1, 2):
        k, v = heads(260, 260, n=n, dim=128, dtype=BF16, device="cuda")
        same(q, k, v, enable_gqa=True, **with_slopes(OPTIONS[name], q))


@pytest.mark.gpu
def test_long_sequences(hopper):
    """Rings go round, tiles are left out on either side."""
    for options in ({"causal": True}, {"window": (700, 90), "softcap": 5.0}):
        q, k, v = heads(3000, 3000, 3000, n=1, batch=1, dim=128, dtype=BF16, device="cuda")
        same(q, k, v, **options)


@pytest.mark.gpu
def test_layouts(hopper):
    packed = torch.randn(2, 200, 3, 4, 64, device="cuda").to(BF16)
    same(*packed.transpose(1, 3).unbind(2), causal=True)
    same(*packed.permute(2, 0, 1, 3, 4).unbind(0), causal=True)
    odd = torch.randn(2 * 4 * 200 * 64 + 1, device="cuda").to(BF16)[1:].view(2, 4, 200, 64)
    same(odd, odd, odd, softcap=2.0)
    q, k, v = heads(200, 200, 200, dim=64, dtype=BF16, device="cuda")
    same(q, k[:1].expand(2, -1, -1, -1), v[:, :1].expand(-1, 4, -1, -1), softcap=2.0)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    ones = torch.ones((), dtype=BF16, device="cuda").expand(q.shape)  # as sum() gives
    found = torch.autograd.grad(frt.attention(*leaves, softcap=2.0), leaves, ones)
    expected = torch.autograd.grad(frt.attention(*leaves, softcap=2.0), leaves, ones.contiguous())
    assert all(map(torch.equal, found, expected))


@pytest.mark.gpu
def test_queries_without_a_key(hopper):
    q, k, v = (t.requires_grad_() for t in heads(300, 90, 90, dim=128, dtype=BF16, device="cuda"))
    out = frt.attention(q, k, v, window=4, causal=True)
    first = 300 - 90
    assert not out[:, :, :first].any()
    assert out[:, :, first:].isfinite().all()
    grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0][:, :, :first].any()
    assert grads[0][:, :, first + 1:].any()


@pytest.mark.gpu
def test_nan_and_infinity_stay_in_their_rows(hopper):
    q, k, v = heads(200, 200, 200, dim=64, dtype=BF16, device="cuda")
    q[:, :, 70] = float("nan")
    out = frt.attention(q, k, v, softcap=2.0)
    assert out[:, :, 70].isnan().all()
    assert out[:, :, :70].isfinite().all()
    assert out[:, :, 71:].isfinite().all()


@pytest.mark.gpu
def test_the_same_bits_every_time(hopper):
    q, k, v = (t.requires_grad_() for t in heads(1500, 1500, 1500, dim=128, dtype=BF16, device="cuda"))
    grad = torch.randn_like(q)

    def step():
        out = frt.attention(q, k, v, causal=True, softcap=3.0)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)

    first = step()
    for _ in range(10):
        assert all(map(torch.equal, step(), first))
    graph, found = captured(step)
    for t in found:
        t.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, first))


# --- on any machine


def test_memory_that_the_copy_engine_cannot_read_is_not_supported():
    x = torch.empty(2, 4, 30, 64, dtype=BF16)
    assert kernels.supports(x)
    assert kernels.supports(x.transpose(1, 2))
    assert kernels.supports(x[:, :1, :1])
    assert not kernels.supports(x.transpose(2, 3))
    assert not kernels.supports(x[..., 1:])
    assert not kernels.supports(x[:, :1].expand(-1, 4, -1, -1))
    assert not kernels.supports(x.float())


def test_what_the_driver_is_told_of_heads(monkeypatch):
    told = []

    def encode(address, dtype, rank, pointer, sizes, strides, box, steps, interleave, swizzle, l2, fill):
        told.append((dtype, rank, pointer.value, list(sizes), list(strides), list(box), list(steps), swizzle))
        return 0

    driver = SimpleNamespace(cuTensorMapEncodeTiled=encode)
    monkeypatch.setattr(tensor_map.binding, "libcuda", lambda: driver)
    tensor_map.encode_heads.cache_clear()
    of = Heads(4096, (2, 3, 300, 64), (60000, 64, 200), "bfloat16")
    assert len(tensor_map.encode_heads(of, 128, 64)) == 128
    assert told == [(9, 4, 4096, [64, 300, 3, 2], [400, 128, 120000], [64, 128, 1, 1], [1, 1, 1, 1], 3)]
    with pytest.raises(ValueError, match="multiples of 16 bytes, got Heads"):
        tensor_map.encode_heads(of._replace(strides=(60000, 64, 204)), 128, 64)
    tensor_map.encode_heads.cache_clear()


def kernels_of(kind):
    return (kernels._forward(kind, kernels.forward_tile(kind)),
            kernels._of_keys(kind, kernels.OF_KEYS[kind.dim]),
            kernels._of_queries(kind, kernels.OF_QUERIES[kind.dim]))


@pytest.mark.parametrize("kind", FORMS, ids=str)
def test_registers_suffice(kind):
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    for kernel in kernels_of(kind):
        assert kernel.params.packer.size % 64 == 0      # what C++ makes of a struct with tensor maps
        arch = compiler.target(kernel.stem, "sm_90")
        entry, _ = compiler.cubin(kernel.text, kernel.stem, arch, "attention")
        assert entry.metadata["arch"] == "sm_90a"
        assert not any(entry.metadata[key] for key in ("stack", "spills", "warnings")), kernel.stem
