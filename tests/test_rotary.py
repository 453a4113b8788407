"""Rotary position embedding: results, gradients, layouts, tables and computed angles, in place, errors."""

import numpy as np
import pytest
import torch
from checking import BF16, F32, F64, assert_same_bits, check, dtypes, lost, needs_nvrtc

import fusionrt as frt
from fusionrt import deferred, reference
from fusionrt.ops.rotary_kernels import Form, kernel_of
from fusionrt.rehearsal import collecting
from fusionrt.runtime import compiler

HEADS, KEY_HEADS, LENGTH, DIM = 6, 2, 11, 48
interleaving = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def queries(dtype=F32, device="cpu", layout="bshd", dim=DIM, batch=2, length=LENGTH):
    q, k = (torch.randn(batch, length, heads, dim, device=device).to(dtype) for heads in (HEADS, KEY_HEADS))
    return (q, k) if layout == "bshd" else (q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous())


def tables(device="cpu", width=DIM // 2, rows=30, dtype=F32):
    angles = torch.rand(rows, width, dtype=F64, device=device) * 6
    return angles.cos().to(dtype), angles.sin().to(dtype)


def joined(function):
    """Both results as one, for `check`."""

    def call(q, k, **options):
        return torch.cat([t.flatten() for t in function(q, k, **options)])

    return call


def both(q, k, **options):
    # Of an element two terms are added, which may cancel.
    return check(
        joined(frt.rotary_embedding),
        (q, k),
        options,
        reference=joined(reference.rotary_embedding),
        extra=lost(2 * q.abs().max().double(), q.dtype),
        magnitudes=lambda args, kwargs, grad_output: [2 * grad_output.abs().max()] * 2,
    )


@dtypes
@interleaving
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_results_and_gradients(layout, interleaved, dtype, device):
    q, k = queries(dtype, device, layout)
    cos, sin = tables(device)
    both(q, k, cos=cos, sin=sin, offset=3, interleaved=interleaved, layout=layout)
    both(q, k, interleaved=interleaved, layout=layout, base=5e5, scaling=4.0)


@interleaving
@pytest.mark.parametrize("rotary_dim", [2, 6, 16, 32, 48])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_part_of_the_columns(dtype, rotary_dim, interleaved, device):
    q, k = queries(dtype, device)
    both(q, k, rotary_dim=rotary_dim, interleaved=interleaved)
    found = frt.rotary_embedding(q, k, rotary_dim=rotary_dim, interleaved=interleaved)
    for before, after in zip((q, k), found, strict=True):
        assert_same_bits(before[..., rotary_dim:], after[..., rotary_dim:])


@pytest.mark.parametrize("position", [0, 131071, 1_000_000, 3_000_000_000])
def test_angles_of_far_positions(position, device):
    """A product of position and frequency in float32 would be off by whole radians."""
    q = torch.zeros(1, 4, 1, 128, device=device)
    q[..., :64] = 1
    out = frt.rotary_embedding(q, offset=position)[0, :, 0].double().cpu()
    # In whole numbers: 2^-200 of a turn.
    frequencies = [int(10000.0 ** (-2 * i / 128) / (2 * np.pi) * 2.0**64) << 136 for i in range(64)]
    for s in range(4):
        turns = torch.tensor([(f * (position + s) % (1 << 200)) / (1 << 200) for f in frequencies], dtype=F64)
        exact = torch.cat(((turns * 2 * np.pi).cos(), (turns * 2 * np.pi).sin()))
        # The frequencies themselves have 53 bits.
        torch.testing.assert_close(out[s], exact, rtol=0, atol=4e-7 + position * 2.0**-51)


def test_negative_positions_turn_back(device):
    q, _ = queries(F64, device)
    positions = torch.arange(-5, LENGTH - 5, device=device)
    turned = frt.rotary_embedding(q, position_ids=positions)
    torch.testing.assert_close(frt.rotary_embedding(turned, position_ids=-positions), q)


@interleaving
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_position_ids(ids, interleaved, device):
    q, k = queries(F32, device)
    cos, sin = tables(device)
    for shape in ((LENGTH,), (1, LENGTH), (2, LENGTH)):
        positions = torch.randint(30, shape, device=device).to(ids)
        both(q, k, position_ids=positions, interleaved=interleaved)
        both(q, k, cos=cos, sin=sin, position_ids=positions, interleaved=interleaved)


@interleaving
def test_forms_of_tables(interleaved, device):
    """Of half width, repeated, for each batch, strided, of other dtypes: the same bits."""
    q, k = queries(F32, device)
    cos, sin = tables(device, dtype=BF16)
    expected = frt.rotary_embedding(q, k, cos, sin, interleaved=interleaved)

    def repeated(t):
        return t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)

    forms = [
        (cos.float(), sin.double().float()),
        (cos.double(), sin.double()),
        (repeated(cos), repeated(sin)),
        (cos.expand(2, -1, -1), sin.expand(2, -1, -1)),
        (cos[None], sin[None]),
        (torch.stack((cos, cos))[:, :LENGTH], torch.stack((sin, sin))[:, :LENGTH]),
        (cos.t().contiguous().t(), sin.t().contiguous().t()),
        tuple(torch.stack((cos, sin), -1).unbind(-1)),
        (cos.t().contiguous().t(), sin),
        tuple(torch.cat((t[:, :1], t), 1)[:, 1:] for t in (cos, sin)),
    ]
    for form in forms:
        for found, wanted in zip(
            frt.rotary_embedding(q, k, *form, interleaved=interleaved), expected, strict=True
        ):
            assert_same_bits(found, wanted)


def test_tables_of_each_batch(device):
    q, k = queries(F32, device)
    angles = torch.rand(2, LENGTH, DIM // 2, device=device) * 6
    both(q, k, cos=angles.cos(), sin=angles.sin())


@interleaving
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
def test_strides(dtype, interleaved, device):
    """Views give the same bits as dense tensors of the same values."""

    def memory(*shape):
        return torch.randn(shape, device=device).to(dtype)

    packed = memory(2, LENGTH, HEADS + 2, DIM)
    views = [
        (packed[:, :, :HEADS], "bshd"),  # of one projection
        (packed[:, :, :HEADS].transpose(1, 2), "bhsd"),
        (memory(2 * LENGTH * HEADS * DIM + 1)[1:].view(2, LENGTH, HEADS, DIM), "bshd"),  # misaligned
        (memory(2, LENGTH, HEADS, DIM + 1)[..., 1:], "bshd"),  # rows of odd length
        (memory(2, LENGTH, HEADS, 2 * DIM)[..., ::2], "bshd"),  # columns apart
        (memory(2, DIM, HEADS, LENGTH).transpose(1, 3), "bshd"),
        (memory(2, 1, HEADS, DIM).expand(-1, LENGTH, -1, -1), "bshd"),
        (memory(LENGTH, 2, HEADS, DIM).transpose(0, 1), "bshd"),  # sequence first
        (memory(2, LENGTH, HEADS + DIM - 1).unfold(-1, DIM, 1), "bshd"),  # windows that overlap
    ]
    for view, layout in views:
        before = view.clone()
        found = frt.rotary_embedding(view, layout=layout, interleaved=interleaved)
        dense = frt.rotary_embedding(view.contiguous(), layout=layout, interleaved=interleaved)
        assert torch.equal(found, dense)
        assert torch.equal(view, before)
        assert found.stride() == torch.empty_like(view).stride()


@pytest.mark.parametrize("heads", [1, 3, 8, 33])
def test_numbers_of_heads(heads, device):
    q, k = (torch.randn(2, LENGTH, n, 16, device=device) for n in (heads, 1))
    both(q, k)


def test_large(device):
    """Threads that take several heads each."""
    q = torch.randn(2, 2500, 24, 64, device=device).to(BF16)
    k = torch.randn(2, 2500, 4, 64, device=device).to(BF16)
    for layout in ("bshd", "bhsd"):
        args = [t if layout == "bshd" else t.transpose(1, 2).contiguous() for t in (q, k)]
        found = frt.rotary_embedding(*args, layout=layout)
        exact = reference.rotary_embedding(*(t.double() for t in args), layout=layout)
        for ours, true in zip(found, exact, strict=True):
            torch.testing.assert_close(ours, true.to(BF16), rtol=2.0**-7, atol=1e-6)


def test_without_k_without_batch_without_elements(device):
    q, k = queries(F32, device)
    first, second = frt.rotary_embedding(q, k)
    assert_same_bits(frt.rotary_embedding(q), first)
    assert_same_bits(frt.rotary_embedding(k), second)
    for ours, whole in zip(frt.rotary_embedding(q[0], k[0]), (first, second), strict=True):
        assert_same_bits(ours, whole[0])
    assert frt.rotary_embedding(q[:0]).shape == (0, LENGTH, HEADS, DIM)
    assert frt.rotary_embedding(q, k[:, :, :0])[1].shape == (2, LENGTH, 0, DIM)
    of_each_batch = tables(device, rows=2)[0][:, None, :][:, :0]
    assert frt.rotary_embedding(q[:, :0], cos=of_each_batch, sin=of_each_batch).shape == (2, 0, HEADS, DIM)
    nothing = q[:1].expand(2, -1, -1, -1)[:, :0]
    assert frt.rotary_embedding(nothing, inplace=True) is nothing


# --- gradients ------------------------------------------------------------------------------------


@interleaving
def test_derivatives_of_first_and_second_order(interleaved, device):
    q, k = (t.requires_grad_() for t in queries(F64, device, dim=8, length=3))
    cos, sin = tables(device, 3, dtype=F64)

    def function(q, k):
        return frt.rotary_embedding(q, k, cos, sin, interleaved=interleaved, rotary_dim=6)

    assert torch.autograd.gradcheck(function, (q, k))
    assert torch.autograd.gradgradcheck(function, (q, k))


def test_the_gradient_of_one_result(device):
    q, k = (t.requires_grad_() for t in queries(F32, device))
    out = frt.rotary_embedding(q, k)
    g = torch.randn_like(out[1])
    (found,) = torch.autograd.grad(out[1], k, g, retain_graph=True)
    (wanted,) = torch.autograd.grad(reference.rotary_embedding(q, k)[1], k, g)
    torch.testing.assert_close(found, wanted)
    assert torch.autograd.grad(out[1], q, g, allow_unused=True) == (None,)
    only_q = frt.rotary_embedding(q, k.detach())[0]
    torch.testing.assert_close(
        torch.autograd.grad(only_q.sum(), q), torch.autograd.grad(reference.rotary_embedding(q).sum(), q)
    )


# --- in place -------------------------------------------------------------------------------------


@interleaving
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("rotary_dim", [None, 16])
def test_in_place(rotary_dim, dtype, interleaved, device):
    options = {"interleaved": interleaved, "rotary_dim": rotary_dim}
    for layout in ("bshd", "bhsd"):
        q, k = queries(dtype, device, layout)
        expected = frt.rotary_embedding(q, k, layout=layout, **options)
        versions = q._version, k._version
        found = frt.rotary_embedding(q, k, inplace=True, layout=layout, **options)
        assert found[0] is q
        assert found[1] is k
        assert (q._version, k._version) == (versions[0] + 1, versions[1] + 1)
        for ours, wanted in zip(found, expected, strict=True):
            assert_same_bits(ours, wanted)
    assert frt.rotary_embedding(q, inplace=True) is q
    apart = q.mT.contiguous().mT  # columns that are not neighbours
    expected = frt.rotary_embedding(apart, **options)
    assert_same_bits(frt.rotary_embedding(apart, inplace=True, **options), expected)


def test_gradients_in_place(device):
    q, k = queries(F64, device)
    leaves = [t.requires_grad_() for t in (q, k)]
    for views in (False, True):

        def inputs(leaf, views=views):
            return leaf.clone()[:, 1:] if views else leaf * 1

        found = frt.rotary_embedding(*map(inputs, leaves), inplace=True)
        wanted = reference.rotary_embedding(*map(inputs, leaves))
        g = [torch.randn_like(t) for t in wanted]
        torch.testing.assert_close(tuple(found), tuple(wanted))
        torch.testing.assert_close(
            torch.autograd.grad(found, leaves, g), torch.autograd.grad(wanted, leaves, g)
        )
    for refused, message in (
        (q, "leaf Variable that requires grad"),
        (q[0], "view of a leaf Variable"),
        ((q * 1).unbind()[0], "function that returns multiple views"),
    ):
        before = refused.detach().clone()
        with pytest.raises(RuntimeError, match=message):
            frt.rotary_embedding(refused, inplace=True)
        assert_same_bits(refused.detach(), before)
    saved = leaves[0] * 1
    square = (saved * saved).sum()
    frt.rotary_embedding(saved, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_what_requires_no_gradient_does_not_come_to_in_place(compiled, device):
    q, k = queries(F64, device)
    wanted = reference.rotary_embedding(q, k)
    q.requires_grad_()

    def turned(q, k):
        return frt.rotary_embedding(q * 1, k, inplace=True)

    run = torch.compile(turned, fullgraph=True, backend="aot_eager") if compiled else turned
    found = run(q, k)
    assert found[0].requires_grad
    assert not found[1].requires_grad
    assert not k.requires_grad
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(k, wanted[1])
    g = torch.randn_like(q)
    (expected,) = torch.autograd.grad(reference.rotary_embedding(q), q, g)
    torch.testing.assert_close(torch.autograd.grad(found[0], q, g), (expected,))


@pytest.mark.parametrize("of", [0, 1])
def test_what_requires_no_gradient_does_not_come_to(of, device):
    given = [torch.randn(1, 5, 2, 8, device=device) for _ in range(2)]
    expected = frt.rotary_embedding(*given)
    given[of].requires_grad_()
    for _ in range(3):
        found = frt.rotary_embedding(*given)
        assert [t.requires_grad for t in found] == [k == of for k in range(2)]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_in_place_needs_elements_apart():
    q, _ = queries()
    with pytest.raises(ValueError, match="inplace needs a q whose elements lie apart in memory"):
        frt.rotary_embedding(q[:, :1].expand(-1, LENGTH, -1, -1), inplace=True)
    windows = torch.randn(2, LENGTH, HEADS + DIM - 1)
    before = windows.clone()
    with pytest.raises(ValueError, match="inplace needs a q whose elements lie apart in memory"):
        frt.rotary_embedding(windows.unfold(-1, DIM, 1), inplace=True)
    assert torch.equal(windows, before)
    with pytest.raises(ValueError, match="inplace needs q and k in memory of their own"):
        frt.rotary_embedding(q, q.view(q.shape), inplace=True)


def test_in_place_of_both_where_memory_has_no_address(device):
    def turned(q, k):
        return frt.rotary_embedding(q, k, inplace=True)

    q, k = (torch.randn(2, 4, 3, 8, device=device) for _ in range(2))
    expected = frt.rotary_embedding(q, k)
    found = torch.compile(turned, fullgraph=True, backend="aot_eager")(q.clone(), k.clone())
    torch.testing.assert_close(tuple(found), tuple(expected))
    mapped = torch.func.vmap(turned)(q[:, None].clone(), k[:, None].clone())
    torch.testing.assert_close(mapped[1], expected[1][:, None])
    made = turned(q.to("meta"), k.to("meta"))
    assert [t.shape for t in made] == [q.shape, k.shape]
    with torch._subclasses.fake_tensor.FakeTensorMode():
        turned(torch.empty(2, 4, 3, 8), torch.empty(2, 4, 3, 8))


# --- torch's machinery ----------------------------------------------------------------------------


def test_compiled(device):
    q, k = (t.requires_grad_() for t in queries(F32, device))
    cos, sin = tables(device)
    positions = torch.randint(30, (2, LENGTH), device=device)
    torch.compiler.reset()

    def function(q, k):
        q, k = frt.rotary_embedding(q * 2, k, cos, sin, position_ids=positions)
        return frt.rotary_embedding(q, inplace=True) + 1, k

    plain, compiled = function(q, k), torch.compile(function, fullgraph=True, backend="aot_eager")(q, k)
    g = [torch.randn_like(t) for t in plain]
    torch.testing.assert_close(compiled, plain)
    torch.testing.assert_close(
        torch.autograd.grad(compiled, (q, k), g), torch.autograd.grad(plain, (q, k), g)
    )


def test_transforms(device):
    q, k = queries(F64, device)

    def loss(q):
        return frt.rotary_embedding(q, k)[0].square().sum()

    torch.testing.assert_close(torch.func.grad(loss)(q), 2 * q)
    mapped = torch.func.vmap(lambda q: frt.rotary_embedding(q))(torch.stack((q, 2 * q)))
    torch.testing.assert_close(mapped[1], frt.rotary_embedding(2 * q))


def test_as_an_op_of_torchs(device):
    q, k = (t.requires_grad_() for t in queries(F32, device))
    cos, sin = (t[None] for t in tables(device))
    more = (cos, sin, None, 2, False, DIM, False, 1e4, 1.0, False)
    torch.library.opcheck(torch.ops.fusionrt.rotary_embedding.default, (q, k, *more))
    torch.library.opcheck(torch.ops.fusionrt.rotary_embedding_of_one.default, (q, *more))


@pytest.mark.gpu
def test_streams_and_graphs():
    q, k = queries(BF16, "cuda")
    expected = frt.rotary_embedding(q, k)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = frt.rotary_embedding(q, k)
    torch.cuda.current_stream().wait_stream(stream)
    assert_same_bits(found[0], expected[0])
    graph, static = torch.cuda.CUDAGraph(), q.clone()
    with torch.cuda.graph(graph):
        replayed = frt.rotary_embedding(static, k)
    static.zero_()
    graph.replay()
    assert not replayed[0].any()
    assert_same_bits(replayed[1], expected[1])


def test_same_bits_again(device):
    q, k = queries(F32, device)
    assert all(map(torch.equal, frt.rotary_embedding(q, k), frt.rotary_embedding(q, k)))


# --- other arrays, kernels ------------------------------------------------------------------------


def test_arrays():
    q, k = queries()
    cos, sin = tables()
    found = frt.rotary_embedding(*(t.numpy() for t in (q, k, cos, sin)))
    assert all(isinstance(a, np.ndarray) for a in found)
    for ours, wanted in zip(found, frt.rotary_embedding(q, k, cos, sin), strict=True):
        np.testing.assert_array_equal(ours, wanted.numpy())
    copy = q.numpy().copy()
    frt.rotary_embedding(copy, inplace=True)
    np.testing.assert_array_equal(copy, frt.rotary_embedding(q).numpy())


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize(
    "form",
    [
        Form("bfloat16", "float32", None, 8, True, False, False),
        Form("bfloat16", None, None, 8, False, True, False),
        Form("float32", "float32", "int64", 4, True, True, False),
        Form("float64", None, "int32", 1, False, False, True),
    ],
    ids=lambda form: f"{form.dtype}-{form.vec}",
)
def test_kernels_compile_without_spills(form, arch):
    kernel = kernel_of(form)
    made = compiler.build(kernel.text, kernel.stem, arch, kernel.name).metadata
    assert (made["spills"], made["stack"], made["warnings"]) == (0, 0, 0)
    assert made["registers"] <= 80


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_warm_up_finds_its_kernels(kind):
    q, k = (t.to("meta") for t in queries())
    with collecting(kind) as needed:
        frt.rotary_embedding(q, k)
    assert [kernel.name for kernel in needed] == ["rotary_embedding"] * (1 if kind == "cuda" else 2)


# --- errors ---------------------------------------------------------------------------------------


def test_a_position_that_is_no_row(device):
    q, k = queries(F32, device)
    cos, sin = tables(device)
    positions = torch.arange(LENGTH, device=device)
    for wrong in (30, -1):
        positions[3] = wrong
        message = rf"rotary_embedding: position_ids must be in \[0, 30\), got {wrong}$"
        if device == "cpu":
            with pytest.raises(IndexError, match=message):
                frt.rotary_embedding(q, k, cos, sin, position_ids=positions)
            continue
        found = frt.rotary_embedding(q, k, cos, sin, position_ids=positions)
        with pytest.raises(IndexError, match=message):
            deferred.examine(wait=True)
        for out in found:
            assert out[:, 3].isnan().all()
            assert out.isfinite().all(dim=(0, 2, 3)).sum() == LENGTH - 1


Q, K = torch.ones(2, 5, 4, 8), torch.ones(2, 5, 2, 8)
T = torch.ones(5, 4)


@pytest.mark.parametrize(
    ("args", "options", "kind", "message"),
    [
        (("x",), {}, TypeError, "q must be a tensor or an array, got str"),
        ((Q.long(),), {}, TypeError, "q must have a floating dtype .*, got torch.int64"),
        (
            (Q[0, 0],),
            {},
            ValueError,
            r"q must have the shape \(B, S, H, D\), with or without B, got \(4, 8\)",
        ),
        (
            (Q, K.double()),
            {},
            TypeError,
            "k must have q's dtype and device, torch.float32 on cpu, got torch.float64",
        ),
        (
            (Q, K[:, :3]),
            {},
            ValueError,
            r"k must have q's shape \(2, 5, 4, 8\) but for the number of heads \(layout "
            r"bshd\), got \(2, 3, 2, 8\)",
        ),
        ((Q, K), {"layout": "bhsd"}, ValueError, r"got \(2, 5, 2, 8\)"),
        ((Q,), {"layout": "sbhd"}, ValueError, "layout must be 'bshd' or 'bhsd', got 'sbhd'"),
        (
            (Q,),
            {"rotary_dim": 5},
            ValueError,
            r"rotary_dim must be even and in \[2, 8\], the columns of a head, got 5",
        ),
        ((Q,), {"rotary_dim": 10}, ValueError, "got 10"),
        ((Q[..., :7],), {}, ValueError, "rotary_dim must be even .* got 7"),
        ((Q,), {"base": None}, TypeError, "base must be a number, got None"),
        ((Q.to_sparse(),), {}, TypeError, "q must be a dense tensor, got torch.sparse_coo"),
        ((Q,), {"base": -1.0}, ValueError, "base and scaling must be positive numbers, got -1.0 and 1.0"),
        ((Q, K, T), {}, TypeError, "cos and sin must both be tensors or arrays, or both None, got sin None"),
        ((Q, K, T, T.long()), {}, TypeError, "sin must have a floating dtype, got torch.int64"),
        ((Q, K, T, T[:4]), {}, ValueError, "cos and sin must have one shape, dtype and device"),
        ((Q, K, T[:, :3], T[:, :3]), {}, ValueError, r"with R = 4 or 8, got \(5, 3\)"),
        ((Q, K, T[:4], T[:4]), {}, ValueError,
         r"a row for each of the 0 \+ 5 positions \(offset \+ S\), got 4"),
        ((Q, K, T, T), {"offset": np.int64(2**63 - 2)}, ValueError, r"\+ 5 positions \(offset \+ S\), got"),
        ((Q, K, T, T), {"offset": 1}, ValueError, r"each of the 1 \+ 5 positions"),
        ((Q, K, T.clone().requires_grad_(), T), {}, ValueError, "cos gets no gradient here: detach it"),
        (
            (Q,),
            {"position_ids": torch.ones(5)},
            TypeError,
            "position_ids must be of dtype int32 or int64, got torch.float32",
        ),
        (
            (Q,),
            {"position_ids": torch.ones(4).long()},
            ValueError,
            r"position_ids must have the shape \(5,\) or "
            r"\(2, 5\), got \(4,\)",
        ),
        (
            (Q,),
            {"position_ids": torch.ones(5).long(), "offset": 3},
            ValueError,
            "offset and position_ids exclude each other, got offset 3",
        ),
        ((Q,), {"position_ids": [1]}, TypeError, "position_ids must be a tensor or an array, got list"),
    ],
)
def test_errors(args, options, kind, message):
    with pytest.raises(kind, match=f"rotary_embedding: .*{message}"):
        frt.rotary_embedding(*args, **options)


@pytest.mark.parametrize("op", ["rotary_embedding", "qkv_heads"])
def test_tables_have_no_row_before_the_first(op):
    tables = {"cos": torch.ones(20, 4), "sin": torch.ones(20, 4)}
    with pytest.raises(ValueError, match=f"{op}: offset must not be negative where cos .* tables, got -3"):
        if op == "qkv_heads":
            frt.qkv_heads(torch.ones(2, 5, 96), 4, **tables, offset=-3)
        else:
            frt.rotary_embedding(torch.ones(1, 4, 2, 8), **tables, offset=-3)


@pytest.mark.parametrize("refused", [lambda k: k, lambda k: k[:], lambda k: (k * 1).unbind(1)[0][:, None]],
                         ids=["leaf", "view of a leaf", "of several results"])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_pair_of_which_one_may_not_be_changed_stays(refused, recorded):
    q = torch.randn(2, 1, 3, 8, requires_grad=recorded) * 1
    before, node, version = q.detach().clone(), q.grad_fn, q._version
    with pytest.raises(RuntimeError):
        frt.rotary_embedding(q, refused(torch.randn(2, 1, 3, 8, requires_grad=True)), inplace=True)
    assert torch.equal(q, before) and q.grad_fn is node and q._version == version
