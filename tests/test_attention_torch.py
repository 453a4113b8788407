"""Attention in torch's machinery: compiled, under autocast, with checkpoints, as an op of torch's; arrays."""

import numpy as np
import pytest
import torch
from attention_cases import DIM, heads
from checking import BF16, F32, F64, frames
from torch.testing import assert_close

import fusionrt as frt
from fusionrt.ops import attention_chunks as chunks

COMPILED = [{}, {"causal": True}, {"softcap": 2.0}, {"mask": True}, {"causal": True, "window": 9}]


@pytest.mark.parametrize("options", COMPILED, ids=str)
def test_compiled(options, device):
    dtype = BF16 if device == "cuda" else F32
    q, k, v = (t.requires_grad_() for t in heads(40, 40, 40, dtype=dtype, device=device))
    if "mask" in options:
        options = {"mask": torch.rand(40, 40, device=device) < 0.7}
    torch.compiler.reset()
    compiled = torch.compile(lambda q, k, v: frt.attention(q, k, v, **options) * 2, fullgraph=True,
                             backend="aot_eager")
    plain = frt.attention(q, k, v, **options) * 2
    grad = torch.randn_like(plain)
    assert_close(compiled(q, k, v), plain)
    assert_close(torch.autograd.grad(compiled(q, k, v), (q, k, v), grad),
                 torch.autograd.grad(plain, (q, k, v), grad))


def test_compiled_for_any_length(device):
    torch.compiler.reset()
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: frt.multihead_attention(x, x, x, 4, causal=True), fullgraph=True,
                             dynamic=True, backend=backend)
    for length in (33, 40, 57):
        x = torch.randn(2, length, 64, device=device)
        assert_close(compiled(x), frt.multihead_attention(x, x, x, 4, causal=True))
    assert len(seen) == 1


def test_dropout_when_compiled(device):
    q, k, v = heads(40, 40, 40, device=device)
    torch.compiler.reset()
    compiled = torch.compile(lambda q, k, v: frt.attention(q, k, v, dropout_p=0.5, softcap=2.0),
                             fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(q, k, v), compiled(q, k, v))


def test_autocast(device):
    q, k, v = (t.requires_grad_() for t in heads(40, 40, 40, device=device))
    for options in ({}, {"softcap": 2.0}, {"mask": torch.randn(40, 40, device=device)}):
        full = frt.attention(q, k, v, **options)
        with torch.autocast(device, BF16):
            out = frt.attention(q, k, v, **options)
            assert frt.attention(q.double(), k.double(), v.double()).dtype == F64
        assert out.dtype == BF16 and full.dtype == F32
        assert_close(out.float(), full, atol=3e-2, rtol=3e-2)
        assert torch.autograd.grad(out.sum(), q)[0].dtype == F32
        assert frt.attention(q, k, v, **options).dtype == F32


def test_checkpoint(device):
    q, k, v = (t.requires_grad_() for t in heads(40, 40, 40, device=device))
    for options in ({"causal": True}, {"softcap": 2.0, "dropout_p": 0.25}):
        def call(q, k, v, options=options):
            return frt.attention(q, k, v, **options)

        torch.manual_seed(5)
        plain = torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))
        torch.manual_seed(5)
        again = torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=False)
        assert_close(torch.autograd.grad(again.square().sum(), (q, k, v)), plain)


def test_second_derivatives_are_refused(device):
    q, k, v = (t.requires_grad_() for t in heads(9, 9, 9, device=device))
    out = frt.attention(q, k, v, softcap=2.0)
    grads = torch.autograd.grad(out.sum(), (q, k, v), create_graph=True)
    with pytest.raises(NotImplementedError, match="attention: no second derivatives"):
        torch.autograd.grad(grads[0].sum(), q)


def test_as_an_op_of_torchs(device):
    q, k, v = (t.requires_grad_() for t in heads(9, 9, 9, dim=8, device=device))
    options = chunks.Options(0.3, -1, -1, 0, 2.0, 0.0, 0)
    torch.library.opcheck(torch.ops.fusionrt.attention_chunks.default, (q, k, v, None, None, None, *options))


def test_a_call_like_the_last_one(device):
    """It skips the checks: whatever changes has to be seen."""
    q, k, v = heads(40, 40, 40, device=device)
    first = frt.attention(q, k, v)
    assert "attend" not in frames(lambda: frt.attention(q, k, v))
    assert_close(frt.attention(q, k, v), first)
    assert not torch.equal(frt.attention(q, k, v, causal=True), first)
    assert_close(frt.attention(q, k, v, scale=0.1), frt.attention.reference(q, k, v, scale=0.1))
    assert frt.attention(q.double(), k.double(), v.double()).dtype == F64
    assert frt.attention(q[:, :, :9], k, v).shape[2] == 9
    assert frt.attention(q.requires_grad_(), k, v).requires_grad
    with torch.no_grad():
        assert not frt.attention(q, k, v).requires_grad
    assert frt.attention(q, k, v).requires_grad


def test_numpy():
    q, k, v = (t.numpy() for t in heads(9, 7, 7))
    found = frt.attention(q, k, v, causal=True, mask=np.ones((9, 7), dtype=bool))
    assert isinstance(found, np.ndarray)
    expected = frt.attention.reference(*map(torch.from_numpy, (q, k, v)), causal=True)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    rows = [t.transpose(0, 2, 1, 3).reshape(2, -1, 4 * DIM) for t in (q, k, v)]
    np.testing.assert_allclose(frt.multihead_attention(*rows, 4, causal=True).reshape(2, 9, 4, DIM),
                               found.transpose(0, 2, 1, 3), atol=1e-6)
    assert frt.attention_score(q, k).shape == (2, 4, 9, 7)
    assert isinstance(frt.optimized_cpu_attention(q, k, v), np.ndarray)
