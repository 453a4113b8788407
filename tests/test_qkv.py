"""qkv_heads: bias, rotation and layout, gradients, views where nothing is computed, what is refused."""

import itertools

import numpy as np
import pytest
import torch
from checking import BF16, F16, F32, F64, assert_as_accurate, captured, derivatives, needs_nvrtc, wide
from torch.testing import assert_close

import fusionrt as frt
from fusionrt import deferred
from fusionrt.ops.qkv_kernels import Form, kernel_of
from fusionrt.rehearsal import collecting
from fusionrt.runtime import compiler

HEADS, KV_HEADS, DIM, LENGTH = 5, 2, 16, 11
WIDTH = (HEADS + 2 * KV_HEADS) * DIM


def packed(dtype=F32, device="cpu", dim=DIM, batch=2, length=LENGTH):
    width = (HEADS + 2 * KV_HEADS) * dim
    return [torch.randn(*shape, width, dtype=F64).to(device, dtype) for shape in ((batch, length), ())]


def tables(device="cpu", rows=30, width=DIM // 2, dtype=F32):
    angles = torch.rand(rows, width, dtype=F64, device=device) * 6
    return {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}


def positions(rows, *shape, device):
    return torch.randint(rows, shape, device=device)


def same(qkv, bias=None, **options):
    """As accurate as the formula, results and gradients."""
    def evaluated(function, operands, grads, options):
        leaves = [t.detach().requires_grad_() for t in operands]
        found = function(leaves[0], HEADS, KV_HEADS, bias=leaves[1] if len(leaves) > 1 else None, **options)
        return *(t.detach() for t in found), *torch.autograd.grad(found, leaves, grads)

    operands = [qkv] if bias is None else [qkv, bias]
    dim = qkv.shape[2] // (HEADS + 2 * KV_HEADS)
    grads = [torch.randn(*qkv.shape[:2], n, dim, device=qkv.device).to(qkv.dtype).transpose(1, 2)
             for n in (HEADS, KV_HEADS, KV_HEADS)]
    grads[1] = grads[1].contiguous()  # gradients come in any layout
    found = evaluated(frt.qkv_heads, operands, grads, options)
    theirs = evaluated(frt.qkv_heads.reference, operands, grads, options)
    exact = evaluated(frt.qkv_heads.reference, [wide(t) for t in operands], [wide(g) for g in grads],
                      {name: wide(value) for name, value in options.items()})
    for ours, torchs, truth in zip(found, theirs, exact, strict=True):
        terms = 8 * max(1.0, truth.abs().max().item())
        assert_as_accurate(ours, torchs, truth, extra=terms * (2.0**-44 if qkv.dtype == F64 else 2.0**-23))
    return found


ROTATIONS = {
    "bias alone": lambda device: {},
    "computed": lambda device: {"base": 1e4, "offset": 3},
    "interleaved": lambda device: {"base": 5e5, "scaling": 2.0, "interleaved": True},
    "tables": lambda device: {**tables(device), "offset": 5},
    "part, of a table": lambda device: {**tables(device, width=3), "rotary_dim": 6},
    "positions": lambda device: {"base": 1e4, "position_ids": positions(1000, 2, LENGTH, device=device)},
    "rows of tables": lambda device: {**tables(device), "interleaved": True,
                                      "position_ids": positions(30, LENGTH, device=device)},
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_results_and_gradients(name, device):
    qkv, bias = packed(device=device)
    same(qkv, bias, **ROTATIONS[name](device))
    if name != "bias alone":
        same(qkv, **ROTATIONS[name](device))


@pytest.mark.parametrize("dtype", [F16, BF16, F64], ids=str)
def test_dtypes(dtype, device):
    qkv, bias = packed(dtype, device)
    same(qkv, bias, base=1e4)
    same(qkv, bias, **tables(device, dtype=dtype))


@pytest.mark.parametrize("dim, batch, length", [(6, 1, 1), (20, 3, 40), (64, 1, 300), (128, 2, 65)])
def test_sizes(dim, batch, length, device):
    qkv, bias = packed(dim=dim, batch=batch, length=length, device=device)
    same(qkv, bias, base=1e4)
    apart = torch.cat((qkv, qkv), 2)[:, :, 1:1 + qkv.shape[2]]  # rows apart, from an odd place
    same(apart, bias, base=1e4)
    same(qkv.transpose(1, 2).contiguous().transpose(1, 2), bias)


def test_layout_for_attention(device):
    """What comes out goes into attention, and its result into the next layer, without a copy."""
    qkv, bias = packed(device=device)
    for options in ({"bias": bias}, {"base": 1e4}):
        found = frt.qkv_heads(qkv, HEADS, KV_HEADS, **options)
        assert [tuple(t.shape) for t in found] == [(2, n, LENGTH, DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
        assert all(t.transpose(1, 2).is_contiguous() for t in found)
    q, k, v = frt.qkv_heads(qkv, HEADS, KV_HEADS, bias=bias)
    out = frt.attention(q, k[:, :1], v[:, :1], enable_gqa=True)
    assert out.transpose(1, 2).is_contiguous()


def test_views(device):
    qkv, _ = packed(device=device)
    for t in frt.qkv_heads(qkv, HEADS, KV_HEADS):
        assert t.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    same(qkv)


def test_derivatives(device):
    """Of any order: both ways are linear."""
    qkv, bias = packed(F64, device)
    options = tables(device)

    def call(function):
        return derivatives(lambda qkv, bias: function(qkv, HEADS, KV_HEADS, bias=bias, **options),
                           (qkv, bias))

    assert_close(call(frt.qkv_heads), call(frt.qkv_heads.reference))


@pytest.mark.parametrize("with_bias", [False, True])
def test_second_derivatives_of_sums(with_bias, device):
    """The gradient that comes back to a sum's is one element, expanded."""
    qkv, bias = (t.requires_grad_() for t in packed(F64, device))
    leaves = (qkv, bias) if with_bias else (qkv,)
    found = []
    for function in (frt.qkv_heads, frt.qkv_heads.reference):
        heads = function(qkv, HEADS, KV_HEADS, bias=bias if with_bias else None, base=1e4)
        torch.manual_seed(3)
        weights = [torch.randn_like(t).requires_grad_() for t in heads]
        total = sum((t * w).sum() for t, w in zip(heads, weights, strict=True))
        first = torch.autograd.grad(total, leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.sum() for g in first), weights))
    assert_close(*found)


def test_some_gradients(device):
    qkv, bias = (t.requires_grad_() for t in packed(device=device))
    for parts, leaves in (((0,), (qkv,)), ((1, 2), (bias,)), ((2,), (qkv, bias))):
        grads = []
        for function in (frt.qkv_heads, frt.qkv_heads.reference):
            found = function(qkv, HEADS, KV_HEADS, bias=bias, base=1e4)
            grads.append(torch.autograd.grad(sum(found[k].square().sum() for k in parts), leaves))
        assert_close(*grads, atol=1e-4, rtol=1e-4)


def test_the_gradient_of_the_bias_repeats(device):
    qkv, bias = (t.requires_grad_() for t in packed(BF16, device, dim=32, length=500))
    found = [torch.autograd.grad(frt.qkv_heads(qkv, HEADS, KV_HEADS, bias=bias, base=1e4)[0].sum(), bias)[0]
             for _ in range(2)]
    assert torch.equal(*found)


def test_a_bias_of_another_dtype(device):
    qkv, bias = packed(BF16, device)
    wide_bias = bias.float().requires_grad_()
    found = frt.qkv_heads(qkv, HEADS, KV_HEADS, bias=wide_bias)
    assert_close(found, frt.qkv_heads(qkv, HEADS, KV_HEADS, bias=bias))
    assert torch.autograd.grad(found[0].sum(), wide_bias)[0].dtype == F32


def test_numpy():
    qkv, bias = packed()
    found = frt.qkv_heads(qkv.numpy(), HEADS, KV_HEADS, bias=bias.numpy(), base=1e4)
    assert all(isinstance(t, np.ndarray) for t in found)
    expected = frt.qkv_heads.reference(qkv, HEADS, KV_HEADS, bias=bias, base=1e4)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)


def test_compiled(device):
    qkv, bias = (t.requires_grad_() for t in packed(device=device))
    torch.compiler.reset()

    def function(qkv, bias):
        q, k, v = frt.qkv_heads(qkv * 2, HEADS, KV_HEADS, bias=bias, base=1e4)
        return q + 1, k, v

    plain = function(qkv, bias)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(qkv, bias)
    assert_close(compiled, plain)
    g = [torch.randn_like(t) for t in plain]
    assert_close(torch.autograd.grad(compiled, (qkv, bias), g), torch.autograd.grad(plain, (qkv, bias), g))


def test_as_an_op_of_torchs(device):
    qkv, bias = (t.requires_grad_() for t in packed(device=device))
    cos, sin = (t[None] for t in tables(device).values())
    torch.library.opcheck(torch.ops.fusionrt.qkv_heads.default,
                          (qkv, bias, cos, sin, None, HEADS, KV_HEADS, 2, False, DIM, 1e4, 1.0))


def test_positions_out_of_range(device):
    qkv, _ = packed(device=device)
    ids = torch.arange(LENGTH, device=device)
    ids[4] = 77
    call = lambda: frt.qkv_heads(qkv, HEADS, KV_HEADS, **tables(device), position_ids=ids)  # noqa: E731
    with pytest.raises(IndexError, match=r"qkv_heads: position_ids must be in \[0, 30\), got 77"):
        call()
        deferred.examine(wait=True)


QKV = torch.ones(2, 3, 12)


@pytest.mark.parametrize("args, options, error, text", [
    ((1.0, 2), {}, TypeError, "qkv_heads: qkv must be a tensor or an array, got float"),
    ((QKV.int(), 2), {}, TypeError, "qkv_heads: qkv must have a floating dtype .*, got torch.int32"),
    ((QKV, 5), {}, ValueError, r"qkv_heads: qkv must have the shape \(B, S, W\), W a multiple of the 5 \+ 2 "
                               r"\* 5 heads, got \(2, 3, 12\)"),
    ((QKV[0], 2), {}, ValueError, "qkv_heads: qkv must have the shape"),
    ((QKV, 0), {}, ValueError, "num_heads and num_kv_heads must be at least 1, got 0 and 0"),
    ((QKV, 2), {"bias": torch.ones(3)}, ValueError, r"bias must have the shape \(12,\) on cpu, got \(3,\)"),
    ((QKV, 2), {"bias": 1.0}, TypeError, "bias must be a floating-point tensor or array, got float"),
    ((QKV, 2), {"offset": 3}, ValueError,
     "position_ids, offset, rotary_dim and interleaved need cos and sin, or base"),
    ((QKV, 2), {"interleaved": True}, ValueError, "interleaved need cos and sin, or base"),
    ((QKV, 2), {"scaling": 4.0}, ValueError, "scaling is of angles that are computed, .* got 4.0"),
    ((QKV, 2), {"cos": torch.ones(5, 4), "sin": torch.ones(5, 4), "base": 100.0}, ValueError,
     "either cos and sin, or base"),
    ((QKV, 2), {"base": -1.0}, ValueError, "qkv_heads: base and scaling must be positive numbers"),
    ((QKV, 2), {"base": 1e4, "rotary_dim": 3}, ValueError, "qkv_heads: rotary_dim must be even"),
    ((QKV, 2), {"cos": torch.ones(3, 1)}, TypeError, "qkv_heads: cos and sin must both be tensors"),
], ids=str)
def test_errors(args, options, error, text):
    with pytest.raises(error, match=text):
        frt.qkv_heads(*args, **options)


# --- kernels


FORMS = [Form(dtype, table, positions, vec, table is not None and vec > 1, interleaved, forward, True, True)
         for dtype, vec in (("bfloat16", 8), ("float32", 4), ("float64", 2), ("float32", 1))
         for table, positions in ((None, None), ("float32", "int64"))
         for interleaved, forward in ((False, True), (False, False), (True, False))]
FORMS += [Form(dtype, None, None, vec, False, False, forward, True, False)
          for dtype, vec in (("bfloat16", 8), ("bfloat16", 4), ("float32", 4), ("float64", 2))
          for forward in (True, False)]
FORMS += [Form("bfloat16", table, None, 4, table is not None, False, forward, True, True)
          for table in (None, "bfloat16") for forward in (True, False)]


@pytest.mark.covering(1)
@needs_nvrtc
@pytest.mark.parametrize("form, arch", [*((form, "sm_90") for form in FORMS),
                                        *((form, arch) for form in (FORMS[0], FORMS[1], FORMS[12], FORMS[13])
                                          for arch in ("sm_75", "sm_80", "sm_100", "sm_120"))], ids=str)
def test_kernels_compile_without_spills(form, arch):
    kernel = kernel_of(form)
    made = compiler.build(kernel.text, kernel.stem, arch, kernel.name).metadata
    assert (made["spills"], made["stack"], made["warnings"]) == (0, 0, 0)
    assert made["registers"] <= 128


def test_what_a_warm_up_would_compile():
    for device in ("cuda", "cpu"):
        with collecting(device) as needed:
            qkv = torch.empty(2, 300, WIDTH, dtype=BF16, device="meta", requires_grad=True)
            bias = torch.empty(WIDTH, dtype=BF16, device="meta", requires_grad=True)
            found = frt.qkv_heads(qkv, HEADS, KV_HEADS, bias=bias, base=1e4)
            torch.autograd.backward(found, [torch.empty_like(t) for t in found])
        names = [source.name for source in needed]
        assert names.count("qkv_heads") == (2 if device == "cuda" else 6)


@pytest.mark.gpu
def test_packs_of_every_width():
    for dtype, dim, first in itertools.product((F16, F32), (128, 68, 36, 34), (0, 1, 4)):
        qkv, bias = packed(dtype, "cuda", dim=dim, length=70)
        wider = torch.randn(2, 70, qkv.shape[2] + 8, device="cuda").to(dtype)
        wider[:, :, first:first + qkv.shape[2]] = qkv
        same(wider[:, :, first:first + qkv.shape[2]], bias, base=1e4)


@pytest.mark.gpu
def test_streams_and_graphs():
    qkv, bias = (t.requires_grad_() for t in packed(BF16, "cuda", dim=64, length=70))

    def step():
        found = frt.qkv_heads(qkv, HEADS, KV_HEADS, bias=bias, base=1e4)
        return *(t.detach() for t in found), *torch.autograd.grad(sum(t.sum() for t in found), (qkv, bias))

    graph, found = captured(step)
    graph.replay()
    torch.cuda.synchronize()
    assert_close(list(found), list(step()))
