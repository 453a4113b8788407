"""Attention: results and gradients on every way, queries without a key, dropout, what is refused."""

import importlib
import math

import pytest
import torch
from attention_cases import DIM, heads, same
from checking import BF16, F16, F32, F64, captured, forget, frames
from torch.nn import functional as F
from torch.testing import assert_close

import fusionrt as frt
from fusionrt.ops import attention_chunks as chunks
from fusionrt.ops import attention_path as path
from fusionrt.ops.attention_masked import prepared

INF = math.inf
HALF_KEPT = 0.25  # a probability that cuDNN has as well


# --- against the formula


def padding(keys, device):
    there = torch.tensor([keys - keys // 3, keys], device=device)
    return torch.arange(keys, device=device) < there[:, None, None, None]


OPTIONS = {
    "dense": {}, "causal": {"causal": True}, "scale": {"scale": -0.3},
    "window": {"window": 9, "causal": True}, "both sides": {"window": (5, 2)},
    "to the right": {"window": (None, 3)},
    "softcap": {"softcap": 2.0}, "alibi": {"alibi_slopes": True, "causal": True},
    "everything": {"alibi_slopes": True, "softcap": 2.0, "window": 20, "causal": True},
}
# Of ways that torch has not each kind of call is compiled, on a CPU for half a second.
LENGTHS = [*((name, (300, 300)) for name in OPTIONS),
           *((name, n) for name in ("dense", "causal") for n in ((1, 1), (1, 17), (17, 17), (128, 128))),
           *((name, n) for name in ("causal", "window", "everything") for n in ((40, 23), (23, 40))),
           ("everything", (1, 17))]


def with_slopes(options, device):
    slopes = {"alibi_slopes": torch.rand(4, device=device)} if "alibi_slopes" in options else {}
    return {**options, **slopes}


@pytest.mark.parametrize("name, lengths", LENGTHS, ids=str)
def test_results_and_gradients(name, lengths, device):
    q, k, v = heads(*lengths, lengths[1], device=device)
    same(q, k, v, **with_slopes(OPTIONS[name], device))


@pytest.mark.parametrize("name, dtype", [
    ("causal", BF16), ("window", BF16), ("everything", BF16), ("causal", F64), ("everything", F64)], ids=str)
def test_dtypes(name, dtype, device):
    q, k, v = heads(130, 130, 130, dtype=dtype, device=device)
    same(q, k, v, **with_slopes(OPTIONS[name], device))


MASKS = {
    "of keys": lambda s, t, device: padding(t, device),
    "of queries and keys": lambda s, t, device: torch.rand(s, t, device=device) < 0.7,
    "full": lambda s, t, device: torch.rand(2, 4, s, t, device=device) < 0.7,
    "of queries": lambda s, t, device: torch.rand(2, 1, s, 1, device=device) < 0.7,
    "added": lambda s, t, device: torch.randn(1, 4, s, t, device=device),
    "added to keys": lambda s, t, device: torch.randn(2, 1, 1, t, device=device),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name, causal", [
    *((name, False) for name in MASKS), ("of keys", True), ("added", True)])
def test_masks(name, causal, device):
    q, k, v = heads(33, 29, 29, device=device)
    same(q, k, v, mask=MASKS[name](33, 29, device), causal=causal)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_what_is_added_for_a_mask(dtype):
    """By the kernel that looks after queries without a key on a GPU."""
    q, = heads(33, dtype=dtype)
    few = torch.rand(2, 1, 33, 29) < 0.1
    added = torch.randn(2, 1, 33, 29).masked_fill(~few, -INF)
    for mask in (few, added, added.transpose(2, 3).contiguous().transpose(2, 3)):
        added, first = (t.expand(2, 4, -1, -1) for t in prepared(mask, q, 29))
        passed = (mask if mask.dtype == torch.bool else mask != -INF).expand(2, 4, 33, 29)
        value = 0.0 if mask.dtype == torch.bool else mask.to(dtype)
        assert_close(added, torch.where(passed, value, -INF).to(dtype), rtol=0, atol=0)
        least = passed.int().argmax(-1, keepdim=True).float()
        assert_close(first, torch.where(passed.any(-1, keepdim=True), least, INF), rtol=0, atol=0)
        assert all(stride % 16 == 0 for stride in added.stride()[:3]) and added.stride(3) == 1


def test_masks_of_16_bit_types(device):
    q, k, v = heads(33, 48, 48, dtype=BF16, device=device)
    same(q, k, v, mask=MASKS["of queries and keys"](33, 48, device))
    same(q, k, v, mask=MASKS["added"](33, 48, device).to(BF16), window=(30, 4))
    fixed = torch.randn(33, 48, device=device)  # of another dtype, without a gradient
    assert_close(frt.attention(q, k, v, mask=fixed), frt.attention.reference(q, k, v, mask=fixed.to(BF16)),
                 atol=2e-2, rtol=2e-2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype, mask_dtype, width", [
    (BF16, F32, 64), (BF16, BF16, 64), (F16, F32, 64), (F16, F16, 64), (F32, F32, 64), (F32, F32, 20),
    (BF16, F32, 20), (BF16, BF16, 20)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_the_least_numbers_have_a_mean(dtype, mask_dtype, width, causal, device):
    """As models mask what is padding: such numbers are not -inf, in whatever dtype they are added. (The
    least float16 leaves a score most of its bits: which mean that gives is a matter of the kernel.)"""
    q, k, v = (t.requires_grad_() for t in heads(48, 48, 48, dim=width, dtype=dtype, device=device))
    mask = torch.zeros(2, 1, 48, 48, dtype=mask_dtype, device=device)
    mask[0, :, :9] = mask[1, ..., 17:] = torch.finfo(mask_dtype).min
    y = frt.attention(q, k, v, mask=mask, causal=causal)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = frt.attention.reference(*exact, mask=mask.double().clamp(min=-1e30), causal=causal)
    assert y.isfinite().all()
    if dtype == F16:
        y, expected = y[..., 9:, :], expected[..., 9:, :]
    assert_close(y.double(), expected, atol=2e-2, rtol=2e-2)
    grad = torch.randn_like(y)
    grad[0, :, :9] = 0  # nobody asks for the gradient of padding, and kernels have too few bits for it
    for a, b in zip(torch.autograd.grad(y, (q, k, v), grad),
                    torch.autograd.grad(expected, exact, grad.double()), strict=True):
        assert_close(a.double(), b, atol=4e-2, rtol=4e-2)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": 8}], ids=str)
def test_fewer_heads_of_keys(options, device):
    q, = heads(40, n=6, device=device)
    k, v = heads(40, 40, n=2, device=device)
    same(q, k, v, enable_gqa=True, **options)
    same(q, k[:, :1], v[:, :1], enable_gqa=True, mask=torch.rand(6, 40, 40, device=device) < 0.7)


def test_values_of_another_width(device):
    q, k, v = heads(40, 30, 30, device=device)
    same(q, k, torch.cat((v, v), 3), causal=True)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 3}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("masked", [0, 2, 3])
def test_one_head_needs_no_dimension(options, masked, device):
    q, k, v = (torch.randn(3, n, 16, device=device).requires_grad_() for n in (5, 7, 7))
    mask = torch.rand(3, 5, 7, device=device) > 0.3 if masked else None
    mask = mask[0] if masked == 2 else mask
    found = frt.attention(q, k, v, mask=mask, **options)
    of_four = mask if mask is None else mask.expand(3, 5, 7)[:, None]
    expected = frt.attention(q[:, None], k[:, None], v[:, None], mask=of_four, **options)[:, 0]
    assert_close(found, expected)
    grad = torch.randn_like(found)
    assert_close(*(torch.autograd.grad(y, (q, k, v), grad) for y in (found, expected)))
    if not options and mask is None:
        assert_close(found, F.scaled_dot_product_attention(q, k, v), rtol=1e-4, atol=1e-5)


def test_layouts(device):
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in heads(40, 40, 40, device=device))
    same(q, k, v, softcap=2.0)
    apart = torch.randn(2, 40, 3, 4, DIM + 1, device=device)[..., 1:].transpose(1, 3).unbind(2)
    same(*apart, causal=True)
    turned = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in heads(40, 40, 40, device=device)]
    same(*turned)
    same(*heads(40, 40, 40, dim=20, device=device), causal=True)


def test_chunks_of_every_kind(device, monkeypatch):
    """Batches, heads and queries are divided, and keys are left out."""
    q, k, v = heads(600, 700, 700, n=2, dim=8, device=device)
    for most in (1 << 12, 1 << 19):
        monkeypatch.setitem(chunks.CHUNK, device, most)
        for options in ({"softcap": 2.0}, {"window": (None, 0)}, {"window": (40, 7)}):
            assert_close(frt.attention(q, k, v, **options), frt.attention.reference(q, k, v, **options))
    options = chunks.Options(1.0, 40, 0, 0, 0.0, 0.0, 0)
    made = chunks.chunks(chunks.Sizes(2, 2, 1, 600, 700), options, 1 << 16)
    assert len({c.keys.stop - c.keys.start for c in made}) == 1, "as many kernels as widths"
    assert max(c.keys.stop - c.keys.start for c in made) < 700 / 2
    options = options._replace(left=-1)
    made = chunks.chunks(chunks.Sizes(1, 1, 1, 5000, 5000), options, 1 << 16)
    assert len({c.keys.stop - c.keys.start for c in made}) <= chunks.WIDTHS
    assert sum((c.rows.stop - c.rows.start) * (c.keys.stop - c.keys.start) for c in made) < 0.65 * 5000**2


# --- what a query may see


@pytest.mark.parametrize("name", ["causal", "window", "alibi"])
def test_nothing_is_seen_of_later_keys(name, device):
    options = with_slopes(OPTIONS[name], device)
    q, k, v = (t.requires_grad_() for t in heads(40, 40, 40, device=device))
    out = frt.attention(q, k, v, **options)
    of_k, of_v = torch.autograd.grad(out[:, :, :25].square().sum(), (k, v))
    assert not of_k[:, :, 25:].any() and not of_v[:, :, 25:].any()
    assert of_k[:, :, :25].any()
    later = torch.where(torch.arange(40, device=device)[:, None] < 25, v, 1e4)
    assert_close(frt.attention(q, k, later, **options)[:, :, :25], out[:, :, :25])


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ["boolean", "added", "causal", "window"])
def test_queries_without_a_key(name, dtype, device):
    q, k, v = (t.requires_grad_() for t in heads(33, 20, 20, dtype=dtype, device=device))
    passed = torch.rand(2, 1, 33, 20, device=device) < 0.5
    passed[..., 5, :], passed[0, ..., 11, :] = False, False
    passed[:, :, 12:] = True
    none = (~passed).all(-1, keepdim=True).expand(2, 4, 33, 1)
    options = {"mask": passed}
    if name == "added":
        options = {"mask": torch.zeros(passed.shape, device=device, dtype=dtype).masked_fill(~passed, -INF)}
    elif name == "causal":
        passed[1] = torch.arange(20, device=device) >= 7
        options, none = {"mask": passed, "causal": True}, none.clone()
        none[1] = (torch.arange(33, device=device) < 7)[:, None]
        seen = passed[0, :, :, :].tril()
        none[0] = (~seen).all(-1, keepdim=True)
    elif name == "window":  # the last query stands at the last key: the first ones before the first key
        options = {"window": 4, "causal": True}
        none = (torch.arange(33, device=device) < 13)[:, None].expand_as(none)
    out = frt.attention(q, k, v, **options)
    assert none.any() and not none.all()
    assert not out.masked_select(none).any()
    assert out.masked_select(~none).isfinite().all()
    grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0].masked_select(none).any()
    with torch.no_grad():
        assert_close(frt.attention(q, k, v, **options), out, rtol=0, atol=0)


def test_no_keys_and_nothing_at_all(device):
    q, k, v = heads(5, 0, 0, device=device)
    assert not frt.attention(q.requires_grad_(), k, v).any()
    assert torch.autograd.grad(frt.attention(q, k, v, causal=True).sum(), q)[0].eq(0).all()
    assert frt.attention(q[:0], k[:0], v[:0]).shape == (0, 4, 5, DIM)
    assert frt.attention(q[:, :, :0], q, q).shape == (2, 4, 0, DIM)
    for mask, queries, keys in ((torch.zeros(5, 1), q, k), (torch.zeros(0, 5), q[:, :, :0], q.detach())):
        mask = mask.to(device, F64).requires_grad_()
        out = frt.attention(queries, keys, keys, mask=mask)
        assert torch.equal(*torch.autograd.grad(out.sum(), mask), torch.zeros_like(mask))


# --- dropout


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {}], ids=str)
def test_dropout(options, device):
    q, k = heads(60, 70, device=device)
    ones = torch.ones(2, 4, 70, DIM, device=device)
    torch.manual_seed(7)
    mean = torch.stack([frt.attention(q, k, ones, dropout_p=HALF_KEPT, **options) for _ in range(40)]).mean(0)
    expected = frt.attention(q, k, ones, **options)
    assert (mean - expected)[:, :, 10:].abs().mean() < 0.1
    assert (mean - expected).mean().abs() < 0.01
    torch.manual_seed(7)
    first = frt.attention(q, k, ones, dropout_p=HALF_KEPT, **options)
    torch.manual_seed(7)
    assert torch.equal(frt.attention(q, k, ones, dropout_p=HALF_KEPT, **options), first)
    assert not torch.equal(frt.attention(q, k, ones, dropout_p=HALF_KEPT, **options), first)
    assert_close(frt.attention(q, k, ones, dropout_p=HALF_KEPT, training=False, **options), expected)


@pytest.mark.parametrize("lengths", [(37, 29), (300, 520)], ids=str)
def test_gradients_see_the_mask_of_the_dropout(lengths, device):
    """Values that are the unit matrix show which weights were kept."""
    q, k = heads(*lengths, n=2, dim=8, device=device)
    v = torch.eye(lengths[1], device=device).expand(2, 2, -1, -1).contiguous()
    operands = [t.requires_grad_() for t in (q, k, v)]
    out = frt.attention(q, k, v, dropout_p=0.25, softcap=30.0)
    kept = out.detach() != 0
    assert abs(kept.double().mean() - 0.75) < 0.02
    scores = 30 * torch.tanh(q @ k.mT * 8**-0.5 / 30)
    expected = (torch.softmax(scores, -1) * kept / 0.75) @ v
    assert_close(out, expected)
    grad = torch.randn_like(out)
    assert_close(torch.autograd.grad(out, operands, grad), torch.autograd.grad(expected, operands, grad),
                 atol=1e-5, rtol=1e-4)


def test_everything_is_dropped(device):
    q, k, v = heads(9, 9, 9, device=device)
    assert not frt.attention(q, k, v, dropout_p=1.0, softcap=1.0).any()


# --- what is refused


Q = torch.ones(2, 4, 5, 8)
REFUSED = [
    ((1.0, Q, Q), {}, TypeError, "attention: q must be a tensor or an array, got float"),
    ((Q.int(), Q, Q), {}, TypeError, "attention: q must have a floating dtype .*, got torch.int32"),
    ((Q, Q.half(), Q), {}, TypeError, "attention: k must have q's dtype and device, torch.float32 on cpu, "
                                      "got torch.float16 on cpu"),
    ((Q[0, 0],) * 3, {}, ValueError, r"attention: q must have the shape \(B, H, S, D\), got \(5, 8\)"),
    ((Q[0], Q, Q), {}, ValueError, r"attention: q must have the shape \(B, H, S, D\), got \(4, 5, 8\)"),
    ((Q, Q[..., :4], Q), {}, ValueError, r"attention: q, k and v must have shapes .*, got \(2, 4, 5, 8\), "
                                         r"\(2, 4, 5, 4\) and"),
    ((Q, Q[:, :2], Q[:, :2]), {}, ValueError, "attention: k and v must have as many heads as q, 4, unless "
                                              "enable_gqa, got 2"),
    ((Q, Q[:, :3], Q[:, :3]), {"enable_gqa": True}, ValueError,
     "the heads of q must be a multiple of those of k and v, got 4 and 3"),
    ((Q, Q, Q), {"mask": torch.ones(5, 5).int()}, TypeError,
     "attention: mask must be boolean .*, got torch.int32"),
    ((Q, Q, Q), {"mask": torch.ones(3, 5)}, ValueError,
     r"attention: mask must broadcast to the shape of scores, \(2, 4, 5, 5\), got \(3, 5\)"),
    ((Q, Q, Q), {"dropout_p": 1.5}, ValueError,
     r"attention: dropout_p must be a probability in \[0, 1\], got 1.5"),
    ((Q, Q, Q), {"window": 0}, ValueError,
     "attention: window must be a positive number of keys or .*, got 0"),
    ((Q, Q, Q), {"window": (1, -2)}, ValueError, r"attention: window must be .*, got \(1, -2\)"),
    ((Q, Q, Q), {"softcap": 0.0}, ValueError, "attention: softcap must be positive and finite.*, got 0.0"),
    ((Q, Q, Q), {"softcap": float("inf")}, ValueError, "attention: softcap must be positive .*, got inf"),
    ((Q, Q, Q), {"scale": torch.tensor(0.5, requires_grad=True)}, TypeError,
     "attention: scale must be a number or a tensor of one that requires no gradient, got .* that does"),
    ((Q, Q, Q), {"softcap": torch.ones(2)}, TypeError, r"attention: softcap must be .*, got .* shape \(2,\)"),
    ((Q, Q, Q), {"alibi_slopes": torch.ones(3)}, ValueError,
     r"attention: alibi_slopes must have the shape \(4,\) or \(2, 4\), got \(3,\)"),
    ((Q, Q, Q), {"alibi_slopes": torch.ones(4, requires_grad=True)}, ValueError,
     "attention: alibi_slopes gets no gradient here: detach it"),
    ((Q, Q, Q), {"alibi_slopes": 0.5}, TypeError,
     "attention: alibi_slopes must be a floating-point tensor or array, got float"),
]


@pytest.mark.parametrize("option", ["scale", "softcap"])
def test_numbers_in_tensors_are_read_at_each_call(option, device):
    q, k, v = torch.randn(3, 1, 2, 5, 8, device=device).unbind()
    for operands in ((q, k, v), (q, q, q)):
        number = torch.tensor(0.5)
        for value in (0.5, 2.0):
            number.fill_(value)
            expected = frt.attention(*operands, **{option: value})
            assert_close(frt.attention(*operands, **{option: number}), expected)
            with pytest.raises(TypeError, match="requires no gradient"):
                frt.attention(*operands, **{option: number.clone().requires_grad_()})


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16], ids=str)
@pytest.mark.parametrize("mask_dtype", [F32, F64, BF16, F16], ids=str)
def test_masks_and_slopes_of_another_dtype(dtype, mask_dtype, device):
    q, k, v = (t.requires_grad_() for t in torch.randn(3, 1, 2, 5, 8, device=device, dtype=dtype).unbind())
    mask = torch.randn(5, 5, device=device).to(mask_dtype)
    mask[0, 1:3] = -math.inf
    mask[2, 1] = -torch.finfo(mask_dtype).max
    # torch's kernels keep logarithms of float32, which near 65504 give gradients to .4 %
    mask[3, 2] = 30 if mask_dtype == F16 else torch.finfo(mask_dtype).max
    slopes = torch.tensor([0.5, 0.25], device=device, dtype=mask_dtype)
    for options in ({"mask": mask}, {"mask": mask, "window": (1, 1)}, {"alibi_slopes": slopes},
                    {"mask": mask, "causal": True}):
        found = frt.attention(q, k, v, **options)
        exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
        same = {name: t.double() if isinstance(t, torch.Tensor) else t for name, t in options.items()}
        wanted = frt.attention.reference(*exact, **same)
        assert found.dtype == dtype
        tolerance = {F64: 1e-12, F32: 1e-5, F16: 4e-3, BF16: 3e-2}[dtype]
        assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
        grads = torch.autograd.grad(found.sum(), (q, k, v))
        theirs = torch.autograd.grad(wanted.sum(), exact)
        assert_close([g.double() for g in grads], list(theirs), rtol=8 * tolerance, atol=8 * tolerance)


@pytest.mark.parametrize("option", ["scale", "softcap", "window"])
def test_numbers_of_numpys_are_read_at_each_call(option, device):
    np = pytest.importorskip("numpy")
    q, k, v = torch.randn(3, 1, 2, 5, 8, device=device).unbind()
    number = np.array(0.5)
    for value in (1, 2):
        number[...] = value
        expected = frt.attention(q, k, v, **{option: value})
        numbers = [np.int64(value)] if option == "window" else [number, np.float64(value), np.float32(value)]
        for given in numbers:
            assert_close(frt.attention(q, k, v, **{option: given}), expected)
            assert_close(frt.attention(q, k, v, **{option: value}), expected)
    in_pairs = frt.attention(q, k, v, window=(1, 2))  # which NumPy's numbers compare with one by one
    assert_close(in_pairs, frt.attention.reference(q, k, v, window=(1, 2)))


@pytest.mark.parametrize("scale", [-0.1, 0.0])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_scales_that_are_not_positive(scale, dtype, device):
    q, k, v = torch.randn(3, 1, 2, 5, 8, device=device, dtype=dtype).unbind()
    for causal in (False, True):
        wanted = frt.attention.reference(q.double(), k.double(), v.double(), causal=causal, scale=scale)
        found = frt.attention(q, k, v, causal=causal, scale=scale)
        assert_close(found.double(), wanted, rtol=1e-2, atol=1e-2)


def test_autocast_to_another_dtype_than_before(device):
    q = torch.randn(1, 2, 5, 8, device=device, dtype=BF16)
    for _ in range(2):
        for dtype in (BF16, F16):
            with torch.autocast(device, dtype=dtype):
                assert frt.attention(q, q, q, window=2).dtype == dtype


@pytest.mark.parametrize("args, options, error, text", REFUSED, ids=[text[:40] for *_, text in REFUSED])
def test_errors(args, options, error, text):
    with pytest.raises(error, match=text):
        frt.attention(*args, **options)


def test_kinds_in_turn_are_known_again(device):
    """A decoder attends to itself and to an encoder."""
    q, k, v, far_k, far_v = (torch.randn(2, 3, n, 16, device=device) for n in (8, 8, 8, 20, 20))
    calls = [(q, k, v), (q, far_k, far_v), (far_k, far_k, far_v)]
    expected = [frt.attention(*args) for args in calls]
    for _ in range(2):
        for args, first in zip(calls, expected, strict=True):
            assert torch.equal(frt.attention(*args), first)
    for args in calls:
        assert "attend" not in frames(lambda args=args: frt.attention(*args))


# --- on a GPU

def only(way, monkeypatch):
    monkeypatch.setattr(path, "candidates", lambda *_: [way])
    monkeypatch.setattr(path, "_chosen", {})
    forget(monkeypatch, importlib.import_module("fusionrt.ops.attention"))
    monkeypatch.setattr(path, "_torch_agrees", lambda *_: True)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("way", ["cudnn", "flash", "efficient", "chunks"])
def test_every_way(way, dtype, dim, causal, monkeypatch):
    only(way, monkeypatch)
    for n, keys in ((4, 300), (1, 300), (4, 128)):
        q, = heads(keys, n=4, dim=dim, dtype=dtype, device="cuda")
        k, v = heads(keys, keys, n=n, dim=dim, dtype=dtype, device="cuda")
        same(q, k, v, causal=causal, enable_gqa=n != 4)
        if way == "flash":
            same(q, k, v, window=33, causal=causal, enable_gqa=n != 4)
            same(q[:, :, :90], k, v, window=33, causal=causal, enable_gqa=n != 4)
            same(q, k[:, :, :90], v[:, :, :90], window=33, causal=causal, enable_gqa=n != 4)
    q, k, v = heads(100, 300, 300, dim=dim, dtype=dtype, device="cuda")
    if not causal:
        same(q, k, v)
    torch.manual_seed(1)
    first = frt.attention(q, k, v, dropout_p=0.125)
    torch.manual_seed(1)
    assert torch.equal(frt.attention(q, k, v, dropout_p=0.125), first)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, keys", [
    *((dtype, n) for dtype in (F16, BF16, F32) for n in (64, 100, 129)), (F16, 256), (BF16, 256)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
def test_masks_by_torchs_kernels(dtype, keys, causal):
    q, k, v = heads(keys, keys, keys, dim=64, dtype=dtype, device="cuda")
    for name in ("of keys", "of queries and keys", "full", "of queries"):
        mask = MASKS[name](keys, keys, "cuda")
        if mask.shape[-2] > 1:
            mask[..., 7, :] = False
        same(q, k, v, mask=mask, causal=causal)
        with torch.no_grad():  # by cuDNN where gradients are not
            assert_close(frt.attention(q, k, v, mask=mask, causal=causal),
                         frt.attention.reference(q, k, v, mask=mask, causal=causal), atol=3e-2, rtol=3e-2)
    options = chunks.Options(1.0, -1, 0 if causal else -1, 0, 0.0, 0.0, 0)
    way, _ = path.way_of(q.requires_grad_(), k, v, mask, None, options)
    hopper = torch.cuda.get_device_capability()[0] in path.PREFER_CUDNN
    assert way == ("cudnn" if hopper and keys == 256 else "efficient")


@pytest.mark.gpu
def test_the_choice_heeds_torch():
    q, k, v = heads(256, 256, 256, dim=64, dtype=BF16, device="cuda")
    options = chunks.Options(1.0, -1, -1, 0, 0.0, 0.0, 0)
    hopper = torch.cuda.get_device_capability()[0] in path.PREFER_CUDNN
    assert path.way_of(q, k, v, None, None, options)[0] == ("cudnn" if hopper else "flash")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert path.way_of(q, k, v, None, None, options)[0] == "efficient"
        assert_close(frt.attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    odd = torch.randn(2 * 4 * 256 * 64 + 1, dtype=BF16, device="cuda")[1:].view(2, 4, 256, 64)
    same(odd, odd, odd)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [
    {"causal": True}, {"window": 64}, {"softcap": 2.0, "dropout_p": 0.1}], ids=str)
def test_graphs(options):
    q, k, v = (t.requires_grad_() for t in heads(256, 256, 256, dim=64, dtype=BF16, device="cuda"))

    def step():
        out = frt.attention(q, k, v, **options)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    graph, found = captured(step)
    graph.replay()
    first = [t.clone() for t in found]
    graph.replay()
    torch.cuda.synchronize()
    if "dropout_p" in options:
        assert not torch.equal(found[0], first[0])
    else:
        assert_close(first, list(step()), atol=2e-2, rtol=2e-2)
