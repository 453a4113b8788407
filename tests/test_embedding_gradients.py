"""Gradients of embeddings: sums of many rows, padding, first and second derivatives, what is saved."""

import pytest
import torch
from checking import BF16, F32, F64, lost
from test_embedding import COLUMNS, WORDS, affine, ids, of_floats, table, tables

import fusionrt as frt
from fusionrt import reference


def exact_sums(grad, index, rows):
    return torch.zeros(rows, grad.shape[1], dtype=F64).index_add_(0, index.cpu().long(), grad.double().cpu())


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("shape", [(33, 7), (1, 40), (3, 20), (150, 2), (17,)], ids=str)
def test_sums_of_positions_and_types(shape, dtype, device):
    """Together with the tokens' and apart from them; few types, and many; with ids and without."""
    tokens, weight = ids(shape, device=device), table(WORDS, dtype, device)
    length = shape[-1]
    for kinds in (2, 6):
        for types in (None, ids(shape, kinds, device), ids((length,), kinds, device)):
            leaves = [weight.requires_grad_(), table(length + 2, dtype, device).requires_grad_(),
                      table(kinds, dtype, device).requires_grad_()]
            out = of_floats(frt.embedding_position, tokens, token_type=types)(*leaves)
            g = torch.randn_like(out)
            of_types = torch.zeros_like(tokens) if types is None else types
            rows = [tokens, torch.arange(length, device=device), of_types]
            for wanted in ([0, 1, 2], [1], [2], [1, 2], [0, 2]):
                found = torch.autograd.grad(out, [leaves[k] for k in wanted], g, retain_graph=True)
                for k, sums in zip(wanted, found, strict=True):
                    index = rows[k].expand(shape).flatten()
                    grad = g.reshape(-1, COLUMNS)
                    exact = exact_sums(grad, index, len(leaves[k]))
                    near = lost(exact_sums(grad.abs(), index, len(leaves[k])), dtype)
                    tolerance = (2.0**-8 if dtype == BF16 else 2.0**-22) * exact.abs()
                    assert ((sums.double().cpu() - exact).abs() <= tolerance + near).all()


def test_one_token_a_million_times(device):
    """Split among threads, and accurate: naive sums in float32 would lose three digits."""
    count = 1 << 20 if device == "cuda" else 1 << 14
    tokens = torch.full((count,), 3, device=device)
    weight = table(WORDS, F32, device, 8).requires_grad_()
    g = torch.rand(count, 8, device=device)
    (found,) = torch.autograd.grad(frt.embedding_position(tokens, weight), weight, g)
    torch.testing.assert_close(
        found[3].double(), g.double().sum(0), rtol=3e-6 if device == "cuda" else 1e-4, atol=0
    )
    assert not found[:3].any()
    assert not found[4:].any()


@pytest.mark.parametrize("padding_idx", [0, 7, -1, -WORDS])
def test_padding(padding_idx, device):
    tokens = ids(device=device)
    tokens[0, :5] = padding_idx % WORDS
    weight = table(WORDS, F32, device).requires_grad_()
    g = torch.randn(4, 11, COLUMNS, device=device)
    for norm in (None, affine(F32, device)):
        outs = [
            f(tokens, weight, padding_idx=padding_idx, layer_norm=norm)
            for f in (frt.embedding_position, reference.embedding_position)
        ]
        ours, theirs = (torch.autograd.grad(out, weight, g)[0] for out in outs)
        assert not ours[padding_idx].any()
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("norm", [False, True])
def test_derivatives_of_first_and_second_order(norm, device):
    tokens = ids((2, 3), 4, device)
    options = {"token_type": ids((2, 3), 2, device), "padding_idx": 1, "scale": 1.5}
    floats = [table(n, F64, device, 3).requires_grad_() for n in (4, 5, 2)]
    floats += [t.requires_grad_() for t in affine(F64, device, 3)] if norm else []
    function = of_floats(frt.embedding_position, tokens, **options)
    if norm:  # smooth in what gradcheck changes, with the norm's scale near 1
        floats[0].data.add_(torch.tensor([1.0, 0.0, -1.0], dtype=F64, device=device))
    without_padding = of_floats(frt.embedding_position, tokens, **{**options, "padding_idx": None})
    assert torch.autograd.gradcheck(without_padding, floats, fast_mode=True)
    assert torch.autograd.gradgradcheck(without_padding, floats, fast_mode=True)
    grads = [
        torch.autograd.grad(f(*floats).square().sum(), floats, create_graph=True)
        for f in (function, of_floats(reference.embedding_position, tokens, **options))
    ]
    seconds = [torch.autograd.grad(sum(g.square().sum() for g in found), floats) for found in grads]
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(*seconds)


def test_second_derivatives_of_no_tokens(device):
    tokens = ids((2, 0), 4, device)
    floats = [table(n, F64, device, 3).requires_grad_() for n in (4, 5, 2)]
    y = of_floats(frt.embedding_position, tokens, token_type=tokens)(*floats)
    g = torch.ones_like(y).requires_grad_()
    grads = torch.autograd.grad(y, floats, g, create_graph=True)
    assert not any(grad.any() for grad in grads)
    assert torch.autograd.grad(sum(grad.sum() for grad in grads), g)[0].shape == g.shape


def test_second_derivatives_of_no_tokens_at_given_positions(device):
    """Positions of shape (S,) are there even so."""
    tokens, positions = ids((0, 6), 4, device), ids((6,), 5, device)
    floats = [table(n, F64, device, 3).requires_grad_() for n in (4, 5, 7)]  # types: too many for one pass
    y = of_floats(frt.embedding_position, tokens, position_ids=positions, token_type=positions)(*floats)
    g = torch.ones_like(y).requires_grad_()
    grads = torch.autograd.grad(y, floats, g, create_graph=True)
    assert not any(grad.any() for grad in grads)
    assert torch.autograd.grad(sum(grad.sum() for grad in grads), g)[0].shape == g.shape


def test_only_the_gradients_that_are_needed(device):
    tokens, floats = ids(device=device), [*tables(F32, device), *affine(F32, device)]
    g = torch.randn(4, 11, COLUMNS, device=device)
    for k in range(len(floats)):
        leaves = [t.detach().requires_grad_(i == k) for i, t in enumerate(floats)]
        found, wanted = (
            torch.autograd.grad(of_floats(f, tokens)(*leaves), leaves[k], g)[0]
            for f in (frt.embedding_position, reference.embedding_position)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_what_is_saved(device):
    """Ids and two numbers a row, beside the parameters: nothing of the result's size."""
    tokens, floats = ids((8, 11), device=device), [*tables(F32, device), *affine(F32, device)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        of_floats(frt.embedding_position, tokens, dropout_p=0.1)(*(t.requires_grad_() for t in floats))
    known = {t.data_ptr() for t in (*floats, tokens)}
    assert sum(t.nbytes for t in saved if t.data_ptr() not in known) <= 2 * 4 * tokens.numel() + 16
