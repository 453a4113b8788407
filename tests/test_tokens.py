"""token_preprocess against the same formulas in torch, element by element."""

import numpy as np
import pytest
import torch

from fusionrt import deferred
from fusionrt.data import token_preprocess

SEQUENCES = [[5, 6, 7, 8, 9, 10, 11], [12], [], [13, 0, 14]]


def padded(rows, width, pad, left=False):
    made = torch.full((len(rows), width), pad)
    for k, row in enumerate(rows):
        row = row[:width]
        if row:
            made[k, slice(-len(row), None) if left else slice(len(row))] = torch.tensor(row)
    return made


def positions(mask):
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)


def test_arrays_of_numpy_are_ids():
    flat, offsets = np.array([i for s in SEQUENCES for i in s]), np.array([0, 7, 8, 8, 11])
    expected = token_preprocess(SEQUENCES)
    for ids, options in (([np.array(s, dtype=np.int64) for s in SEQUENCES], {}), (flat, {"offsets": offsets}),
                         ([[np.int64(i) for i in s] for s in SEQUENCES], {})):
        for made, wanted in zip(token_preprocess(ids, **options), expected, strict=True):
            assert torch.equal(made, wanted)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_padded_tensor(device, index):
    ids = torch.randint(0, 4, (5, 700), device=device).to(index)
    out = token_preprocess(ids, pad_id=0, pad_to_multiple_of=64)
    full = torch.nn.functional.pad(ids, (0, 4))
    assert torch.equal(token_preprocess(ids, pad_id=0, pad_to_multiple_of=None).input_ids, ids)
    assert all(t.dtype == index for t in out)
    assert torch.equal(out.input_ids, full)
    assert torch.equal(out.attention_mask, (full != 0).to(index))
    assert torch.equal(out.position_ids, positions(full != 0))
    assert torch.equal(out.labels, full.masked_fill(full == 0, -100))
    assert torch.equal(token_preprocess(ids, max_length=30).input_ids, ids[:, :30])


@pytest.mark.parametrize("side", ["right", "left"])
def test_lists_offsets_and_tensors_are_the_same_batch(device, side):
    out = token_preprocess(SEQUENCES, pad_id=1, max_length=5, padding_side=side, device=device)
    left = side == "left"
    mask = padded([[1] * len(s) for s in SEQUENCES], 5, 0, left).to(device)
    assert torch.equal(out.input_ids, padded(SEQUENCES, 5, 1, left).to(device))
    assert torch.equal(out.attention_mask, mask)  # a token is one even where it is pad_id
    assert torch.equal(out.position_ids, positions(mask))
    flat = torch.tensor([t for s in SEQUENCES for t in s], device=device)
    offsets = torch.tensor([0, 7, 8, 8, 11], device=device)
    same = token_preprocess(flat, offsets=offsets, pad_id=1, max_length=5, padding_side=side)
    tensors = [torch.tensor(s, dtype=torch.int64, device=device) for s in SEQUENCES]
    third = token_preprocess(tensors, pad_id=1, max_length=5, padding_side=side)
    for a, b, c in zip(out, same, third, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_row_has_no_more_tokens_than_max_length_whatever_its_width(device, side):
    options = {"pad_id": 1, "max_length": 5, "pad_to_multiple_of": 4, "padding_side": side}
    out = token_preprocess(SEQUENCES, **options, device=device)
    cut = [s[:5] for s in SEQUENCES]
    left = side == "left"
    assert torch.equal(out.input_ids, padded(cut, 8, 1, left).to(device))
    assert torch.equal(out.attention_mask, padded([[1] * len(s) for s in cut], 8, 0, left).to(device))
    assert out.labels.ne(-100).sum(-1).tolist() == [5, 1, 0, 3]
    out = token_preprocess(SEQUENCES[:1], **options, eos_id=99, device=device)
    assert [t for t in out.input_ids[0].tolist() if t != 1] == [5, 6, 7, 8, 99]
    out = token_preprocess(torch.arange(2, 9, device=device)[None], **options)
    assert out.input_ids.tolist() == [[1, 1, 1, 2, 3, 4, 5, 6] if left else [2, 3, 4, 5, 6, 1, 1, 1]]
    assert out.attention_mask.sum() == 5


@pytest.mark.parametrize("options", [{}, {"max_length": 4}, {"max_length": 4, "pad_to_multiple_of": 3},
                                     {"shift_right": True, "bos_id": 99}], ids=str)
def test_a_tensor_padded_at_the_left_is_its_sequences(device, options):
    sequences = [[5, 6, 7], [8], [], list(range(2, 9))]
    ids = padded(sequences, 7, 0, True).to(device)
    found = token_preprocess(ids, padding_side="left", **options)
    expected = token_preprocess(sequences, padding_side="left", device=device, **options)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    wide = torch.nn.functional.pad(ids, (1000, 0))
    assert torch.equal(token_preprocess(wide, padding_side="left").labels[:, 1000:],
                       token_preprocess(ids).labels)


def test_bos_and_eos_go_around_sequences_and_eos_stays(device):
    out = token_preprocess(SEQUENCES, pad_id=0, bos_id=2, eos_id=3, max_length=6, device=device)
    assert out.input_ids.tolist() == [[2, 5, 6, 7, 8, 3], [2, 12, 3, 0, 0, 0], [2, 3, 0, 0, 0, 0],
                                      [2, 13, 0, 14, 3, 0]]
    assert out.attention_mask.sum(-1).tolist() == [6, 3, 2, 5]
    assert token_preprocess(SEQUENCES, bos_id=2, eos_id=3, device=device).input_ids.shape == (4, 9)


def test_shifted_inputs_are_those_of_t5(device):
    ids = padded(SEQUENCES[:2], 9, 0).to(device)
    out = token_preprocess(ids, pad_id=0, bos_id=99, shift_right=True)
    shifted = torch.cat([torch.full_like(ids[:, :1], 99), ids[:, :-1]], -1)
    assert torch.equal(out.input_ids, shifted)
    assert torch.equal(out.labels, ids.masked_fill(ids == 0, -100))
    assert torch.equal(out.attention_mask, (ids != 0).long())
    out = token_preprocess(SEQUENCES[:2], pad_id=0, bos_id=99, shift_right=True, padding_side="left",
                           device=device)
    assert out.input_ids[1].tolist() == [0] * 6 + [99]


@pytest.mark.parametrize("texts", [["byte", "", "é!"], [b"byte", b"", "é!".encode()]], ids=["str", "bytes"])
def test_bytes_are_ids_above_those_of_special_tokens(device, texts):
    out = token_preprocess(texts, byte_offset=3, eos_id=1, device=device)
    expected = [[*(b + 3 for b in (t.encode() if isinstance(t, str) else t)), 1] for t in texts]
    assert torch.equal(out.input_ids, padded(expected, 5, 0).to(device))
    assert out.input_ids.dtype == torch.int64
    assert out.attention_mask.sum(-1).tolist() == [5, 1, 4]


def test_only_ids_of_results_have_to_be_in_the_vocabulary():
    ids, offsets = torch.tensor([999, 1, 2, 999]), torch.tensor([1, 3])
    assert token_preprocess(ids, offsets=offsets, vocab_size=10).input_ids.tolist() == [[1, 2]]
    assert token_preprocess([[1, 2, 999]], max_length=2, vocab_size=10).input_ids.tolist() == [[1, 2]]
    for given in ([[1, 2, 999]], [[1]]):
        with pytest.raises(IndexError, match="token_preprocess: ids"):
            token_preprocess(given, eos_id=None if len(given[0]) > 1 else 50, vocab_size=10)


def test_a_tensor_of_bytes(device):
    raw = torch.arange(256, dtype=torch.uint8, device=device).view(2, 128)
    out = token_preprocess(raw, byte_offset=3)
    assert torch.equal(out.input_ids, raw.long() + 3)
    assert out.attention_mask.all()
    assert token_preprocess("ab", byte_offset=3).input_ids.tolist() == [[100, 101]]


def masked(device, p=0.15, seed=7, **options):
    torch.manual_seed(seed)
    ids = torch.randint(10, 1000, (64, 1000)).to(device)
    ids[:, 900:] = 0
    torch.manual_seed(seed)
    return ids, token_preprocess(ids, mask_probability=p, mask_id=4, vocab_size=1000, **options)


def test_masking_chooses_masks_and_replaces_at_the_rates_of_bert(device):
    ids, out = masked(device, special_ids=(11, 12))
    chosen = out.labels != -100
    assert torch.equal(out.labels[chosen], ids[chosen])
    assert torch.equal(out.input_ids[~chosen], ids[~chosen])
    assert not (chosen & torch.isin(ids, torch.tensor([0, 11, 12], device=device))).any()
    real = int((~torch.isin(ids, torch.tensor([0, 11, 12], device=device))).sum())
    n, hidden = int(chosen.sum()), out.input_ids[chosen]
    same = hidden == ids[chosen]
    rates = [(n, real, 0.15), (int((hidden == 4).sum()), n, 0.8), (int(same.sum()), n, 0.1)]
    for count, of, rate in rates:  # five standard deviations
        assert abs(count - of * rate) < 5 * (of * rate * (1 - rate)) ** 0.5
    replaced = hidden[~same & (hidden != 4)]
    assert 0 <= int(replaced.min()) < 20 and 980 < int(replaced.max()) < 1000
    assert abs(float(replaced.double().mean()) - 499.5) < 5 * 289 / len(replaced) ** 0.5


def test_masking_repeats_with_the_seed(device):
    _, a = masked(device)
    _, b = masked(device)
    _, c = masked(device, seed=8)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a.labels, c.labels)
    ids, out = masked(device, p=1.0)
    assert torch.equal(out.labels, ids.masked_fill(ids == 0, -100))


@pytest.mark.gpu
def test_masking_is_the_same_on_both_devices():
    for options in ({}, {"special_ids": (11, 12)}):
        _, ours = masked("cpu", **options)
        _, theirs = masked("cuda", **options)
        assert all(torch.equal(a, b.cpu()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("wrong", [-5, 50, 2**40])
def test_an_id_outside_the_vocabulary_is_an_error(device, wrong):
    ids = torch.tensor([[1, 2, wrong, 0]], device=device)
    with pytest.raises(IndexError, match=rf"token_preprocess: ids must be in \[0, 50\), got {wrong}$"):
        token_preprocess(ids, vocab_size=50)
        deferred.examine(wait=True)
    assert token_preprocess(torch.tensor([[1, -1]]), pad_id=-1, vocab_size=50).labels.tolist() == [[1, -100]]


@pytest.mark.gpu
def test_offsets_on_a_gpu_are_not_followed_out_of_the_ids():
    with pytest.raises(IndexError, match=r"token_preprocess: offsets must be in \[0, 4\), got 9"):
        token_preprocess(torch.ones(3, dtype=torch.int64, device="cuda"),
                         offsets=torch.tensor([0, 9], device="cuda"), max_length=4)
        deferred.examine(wait=True)


IDS = torch.ones(2, 3, dtype=torch.int64)


run = token_preprocess


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: run(3), TypeError, "ids must be a tensor, a list of sequences, bytes or str, got int"),
    (lambda: run(IDS.float()), TypeError,
     r"ids must be of dtype int32, int64 or \(bytes\) uint8, got torch.float32"),
    (lambda: run(IDS[0]), ValueError, "ids must have 2 dimensions, or 1 with offsets, got 1"),
    (lambda: run([[1.5]]), TypeError, r"ids must be sequences of ints, got \[1.5\]"),
    (lambda: run(["a", [1]]), TypeError, "ids must all be bytes or str, got list as well"),
    (lambda: run([IDS[0], IDS]), TypeError, r"ids must all be 1-D tensors of one dtype, got shape \(2, 3\)"),
    (lambda: run(IDS[0], offsets=torch.tensor([0, 4])), ValueError,
     r"offsets must not decrease and lie in \[0, 3\]"),
    (lambda: run(IDS[0], offsets=torch.tensor([0, 2**63 - 1, -2, 3])), ValueError,
     r"offsets must not decrease and lie in \[0, 3\]"),
    (lambda: run(IDS[0], offsets=torch.tensor([0.0])), ValueError,
     "offsets must be a 1-D tensor of int64 on cpu, got torch.float32"),
    (lambda: run(IDS[0], offsets=[0, 3]), TypeError, "offsets must be a 1-D tensor of int64, got list"),
    (lambda: run([[1]], offsets=IDS[0]), TypeError, "offsets are of a 1-D tensor ids, got list"),
    (lambda: run(IDS, max_length=0), ValueError, "max_length must be a positive int below 2..31, got 0"),
    (lambda: run(IDS, padding_side="top"), ValueError, "padding_side must be left or right, got 'top'"),
    (lambda: run(IDS, mask_probability=2), ValueError, r"mask_probability must be in \[0, 1\], got 2"),
    (lambda: run(IDS, mask_probability=0.1), ValueError, "mask_probability needs mask_id"),
    (lambda: run(IDS, mask_probability=0.1, mask_id=9, vocab_size=9), ValueError,
     r"mask_id must be in \[0, vocab_size\), \[0, 9\), got 9"),
    (lambda: run(IDS, mask_probability=0.1, mask_id=1, vocab_size=9, special_ids=range(65)),
     ValueError, "special_ids, with pad_id, bos_id and eos_id, must be at most 64, got 65"),
    (lambda: run(IDS, shift_right=True), ValueError, "shift_right needs bos_id, the first input"),
    (lambda: run(IDS, eos_id=1), ValueError, "bos_id and eos_id go around lists, bytes or sequences"),
    (lambda: run(IDS, byte_offset=3), ValueError, "byte_offset is of bytes, got ids of torch.int64"),
    (lambda: run("a", byte_offset=0.5), TypeError, "byte_offset must be an int, got 0.5"),
    (lambda: run([[1]], pad_id=[1]), TypeError, r"pad_id must be an int, got \[1\]"),
    (lambda: run([[1]], pad_id=None), TypeError, "pad_id must be an int, got None"),
    (lambda: run(IDS, special_ids=3), TypeError, "special_ids must be integers, got 3"),
    (lambda: run(IDS, special_ids=[1.5]), TypeError, "special_ids must be an integer, got 1.5"),
    (lambda: run(IDS, mask_probability="x"), TypeError, "mask_probability must be a number, got 'x'"),
    (lambda: run([[5]], device="foo"), ValueError,
     "device must name one, such as 'cpu' or 'cuda:0', got 'foo'"),
    (lambda: run([[5]], mask_probability=torch.ones(2)), TypeError,
     r"mask_probability must be a number, got a Tensor of shape \(2,\)"),
    (lambda: run(IDS, pad_to_multiple_of=0), ValueError, "pad_to_multiple_of must be a positive int"),
    (lambda: torch.vmap(run)(torch.ones(2, 3, 4, dtype=torch.int64)), NotImplementedError,
     r"torch.func's transforms \(vmap, grad\) of ids are not implemented; give the whole batch"),
    (lambda: run([[2**70]]), ValueError, "ids must fit into int64, got 1180591620717411303424"),
    (lambda: run("a", byte_offset=2**63 - 50), ValueError, r"byte_offset \+ 255 must fit into torch.int64"),
    (lambda: run("a", byte_offset=2**63), ValueError, "byte_offset must fit into torch.int64"),
])
def test_errors_say_what_was_expected(call, error, message):
    with pytest.raises(error, match=f"token_preprocess: {message}"):
        call()


def test_nothing_gives_nothing(device):
    assert token_preprocess([], device=device).input_ids.shape == (0, 0)
    assert token_preprocess([[], []], device=device).labels.shape == (2, 0)
    assert token_preprocess(IDS[:0].to(device)).labels.shape == (0, 3)


@pytest.mark.parametrize("name, value", [("pad_id", 2**31), ("bos_id", 2**33), ("eos_id", -2**31 - 1),
                                         ("ignore_index", 2**40), ("pad_id", 1.5)])
def test_numbers_that_do_not_fit(name, value):
    offsets = torch.tensor([0, 1, 3])
    given = {"pad_id": 0, "offsets": offsets, name: value}
    error = ValueError if isinstance(value, int) else TypeError
    with pytest.raises(error, match=f"token_preprocess: {name} must "):
        token_preprocess(torch.tensor([1, 2, 3], dtype=torch.int32), **given)
    if isinstance(value, int):
        token_preprocess(torch.tensor([1, 2, 3]), **given)
