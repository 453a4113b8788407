"""Attention of heads side by side, in its parts, on a CPU."""

import pytest
import torch
from attention_cases import evaluated, heads, same
from checking import F64
from torch.testing import assert_close

import fusionrt as frt
from fusionrt.bench import memory


def test_multihead(device):
    q, k, v = (torch.randn(2, n, 64, device=device) for n in (40, 30, 30))
    same(q, k, v, function=in_heads(4), causal=True)
    same(q, k, v, function=in_heads(4), mask=torch.rand(4, 40, 30, device=device) < 0.7)
    same(q, k[..., :32], v[..., :32], function=in_heads(4), enable_gqa=True, window=6)
    for options in ({"causal": True}, {"softcap": 2.0}):
        out = frt.multihead_attention(q, q, q, 4, **options)
        assert out.is_contiguous() and out._base is not None, "merging the heads is a view"


def in_heads(n):
    def function(q, k, v, **options):
        return frt.multihead_attention(q, k, v, n, **options)

    function.reference = lambda q, k, v, **options: frt.multihead_attention.reference(q, k, v, n, **options)
    return function


@pytest.mark.parametrize("shape", [(33, 16), (3, 33, 16), (2, 3, 33, 16)], ids=str)
def test_parts(shape, device):
    q, k, v = (torch.randn(*shape[:-2], n, 16, device=device, dtype=F64) for n in (33, 21, 21))
    passed = torch.rand(33, 21, device=device) < 0.6
    assert_close(frt.attention_score(q, k), q @ k.mT / 4)
    assert_close(frt.attention_score(q, k, 2.0), q @ k.mT * 2)
    weights = frt.attention_score_softmax(q, k, 0.3, passed)
    assert_close(weights, frt.attention_score_softmax.reference(q, k, 0.3, passed))
    assert_close(frt.attention_apply(weights, v), weights @ v)
    assert torch.autograd.gradcheck(lambda q, k: frt.attention_score(q, k), (
        q[..., :2, :3].requires_grad_(), k[..., :2, :3].requires_grad_()))


def test_on_a_cpu():
    q, k, v = heads(90, 70, 70)
    mask = (torch.rand(2, 1, 90, 70) < 0.7).int()
    mask[:, :, 3] = 0
    same(q, k, v, function=frt.cpu_fused_attention)
    whole = frt.cpu_fused_attention(q, k, v, mask)
    assert not whole[:, :, 3].any()
    for chunk_size in (7, 64):
        assert_close(frt.optimized_cpu_attention(q, k, v, chunk_size, mask), whole)
    grad = torch.randn_like(whole)
    assert_close(*(evaluated(f, (q, k, v), grad, mask=mask)
                   for f in (frt.cpu_fused_attention, frt.optimized_cpu_attention)))
    assert_close(whole, frt.cpu_fused_attention.reference(q, k, v, mask))


def test_memory_of_a_chunk():
    q, k, v = (t.requires_grad_() for t in heads(1024, 1024, 1024, n=2, dim=8, batch=1))
    scores, chunk = 2 * 1024 * 1024 * 4, 2 * 64 * 1024 * 4  # bytes

    def peak(function, *more, backward=False):
        def call():
            out = function(q, k, v, *more)
            return torch.autograd.grad(out.sum(), (q, k, v)) if backward else out

        call()
        return memory.measure(call, q.device).peak

    operands = 10 * q.nbytes
    assert scores < peak(frt.cpu_fused_attention) < 2 * scores
    assert peak(frt.optimized_cpu_attention) < 2 * chunk + operands < scores / 2
    assert peak(frt.optimized_cpu_attention, backward=True) < 4 * chunk + 2 * operands < scores / 2


def test_errors_of_others():
    x, q = torch.ones(2, 5, 12), torch.ones(2, 4, 5, 8)
    for function, args, text in (
            (frt.multihead_attention, (x, x, x, 5),
             "multihead_attention: num_heads must divide the width of q, 12, got 5"),
            (frt.multihead_attention, (x, x[..., :5], x, 4), "k must be whole heads of 3 columns"),
            (frt.multihead_attention, (x, x, x[:, :2], 4), "multihead_attention: q, k and v must have"),
            (frt.attention_score, (x, x[..., :5]), r"attention_score: q and k must have shapes \(..., S, D"),
            (frt.attention_apply, (x, x[:, :2]), "attention_apply: weights and v must have shapes"),
            (frt.optimized_cpu_attention, (q, q, q, 0), "chunk_size must be at least 1, got 0")):
        with pytest.raises(ValueError, match=text):
            function(*args)
    with pytest.raises(TypeError, match="optimized_cpu_attention: chunk_size must be an integer, got 'a'"):
        frt.optimized_cpu_attention(q, q, q, "a")
    with pytest.raises(TypeError, match="attention_apply: v must be a tensor or an array, got int"):
        frt.attention_apply(x, 3)


@pytest.mark.gpu
def test_cpu_functions_refuse_a_gpu():
    q = torch.ones(1, 1, 2, 2, device="cuda")
    with pytest.raises(TypeError, match="cpu_fused_attention: q must be a CPU tensor, got one on cuda:0"):
        frt.cpu_fused_attention(q, q, q)


@pytest.mark.parametrize("shape", [(1, 2, 0, 4), (0, 2, 3, 4), (1, 0, 3, 4)], ids=str)
def test_nothing_to_attend_to(shape):
    q = torch.randn(shape, requires_grad=True)
    for function in (frt.attention, frt.cpu_fused_attention, frt.optimized_cpu_attention):
        out = function(q, q, q)
        assert out.shape == shape
        assert torch.autograd.grad(out.sum(), q)[0].shape == shape
    assert frt.attention_score(torch.ones(2, 2, 0), torch.ones(2, 3, 0)).tolist() == [[[0.0] * 3] * 2] * 2


def strided(kind, *shape):
    """Of other strides than a fake tensor would guess."""
    if kind == "merged heads":
        return torch.randn(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
    if kind == "transposed columns":
        return torch.randn(*shape[:2], shape[3], shape[2]).transpose(2, 3)
    return torch.randn(1, *shape[1:]).expand(shape)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["merged heads", "transposed columns", "expanded"])
@pytest.mark.parametrize("batch", [1, 2])
def test_fake_gradients_lie_as_real_ones(kind, batch):
    """Inductor reads them where the fake ones said that they are."""
    q, k, v = (strided(kind, batch, 4, 16, 8) for _ in range(3))
    mask = torch.randn(batch, 4, 16, 16).transpose(2, 3)
    options = 0.5, -1, -1, 0, 3.0, 0.0, 8
    forward, backward = torch.ops.fusionrt.attention_chunks, torch.ops.fusionrt.attention_chunks_backward
    given = q, k, v, mask, None, None
    out, most, factor = forward(*given, *options)
    torch.library.opcheck(backward.default, (out, *given, out, most, factor, [True] * 4, *options),
                          test_utils=("test_schema", "test_faketensor"))


def test_autocast_leaves_chunks_their_precision():
    q, k, v = (torch.randn(2, 4, 64, 32, dtype=torch.bfloat16) * scale for scale in (12, 1, 1))
    found = []
    for enabled in (False, True):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = frt.attention(*leaves, softcap=50.0)
        found.append((out, torch.autograd.grad(out.float().square().sum(), leaves)))
    assert_close(*found, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR")
def test_tensors_that_are_not_dense():
    """Also after a call with dense ones, which guards remember."""
    q = torch.randn(2, 4, 16, 8)
    frt.attention(q, q, q)
    nested = torch.nested.nested_tensor([torch.randn(4, 5, 8), torch.randn(4, 6, 8)])
    with pytest.raises(TypeError, match="attention: q must be a dense tensor, got a nested one"):
        frt.attention(nested, nested, nested)
    with pytest.raises(TypeError, match="attention: k must be a dense tensor, got torch"):
        frt.attention(q, q.to_sparse(), q)
    x = torch.eye(3).to_sparse_csr()
    for _ in range(2):
        assert_close(frt.linear_relu(torch.eye(3), torch.ones(2, 3), torch.zeros(2)), torch.ones(3, 2))
        with pytest.raises(TypeError, match="linear_relu: x must be a dense tensor, got torch"):
            frt.linear_relu(x, torch.ones(2, 3), torch.zeros(2))
        with pytest.raises(TypeError, match="swiglu_mlp: up_weight must be a dense tensor, got torch"):
            frt.swiglu_mlp(torch.eye(3), torch.ones(2, 3), torch.ones(2, 3).to_sparse(), torch.ones(3, 2))
