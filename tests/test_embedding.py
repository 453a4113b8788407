"""Embeddings of tokens, positions and types: results, norm, dropout, ids out of range, errors."""

import functools

import numpy as np
import pytest
import torch
from checking import BF16, F16, F32, F64, assert_same_bits, check, dtypes, lost

import fusionrt as frt
from fusionrt import deferred, reference

WORDS, POSITIONS, TYPES, COLUMNS = 50, 13, 3, 96


def table(rows, dtype=F32, device="cpu", columns=COLUMNS):
    return torch.randn(rows, columns, device=device).to(dtype)


def tables(dtype=F32, device="cpu", columns=COLUMNS):
    return [table(rows, dtype, device, columns) for rows in (WORDS, POSITIONS, TYPES)]


def ids(shape=(4, 11), high=WORDS, device="cpu", dtype=torch.int64):
    return torch.randint(high, shape, device=device, dtype=dtype)


def affine(dtype=F32, device="cpu", columns=COLUMNS):
    return torch.randn(columns, device=device).to(dtype), torch.randn(columns, device=device).to(dtype)


def of_floats(function, tokens, **fixed):
    """The op as a function of its floating tensors alone: tables, then the norm's weight and bias."""

    def call(weight, position_weight=None, token_type_weight=None, gamma=None, beta=None, **options):
        more = {} if gamma is None else {"layer_norm": (gamma, beta, 1e-5)}
        return function(
            tokens, weight, position_weight, token_type_weight=token_type_weight, **more, **fixed, **options
        )

    return call


def magnitudes(columns):
    """Every gradient of a table or a norm's parameters sums up to all the rows of the incoming one."""

    def found(args, kwargs, grad_output):
        size = 8 * grad_output.abs().sum() / columns
        return [size] * len(args)

    return found


def compared(tokens, floats, extra=0.0, **fixed):
    ours, theirs = (
        of_floats(f, tokens, **fixed) for f in (frt.embedding_position, reference.embedding_position)
    )
    return check(ours, floats, reference=theirs, extra=extra, magnitudes=magnitudes(floats[0].shape[1]))


@dtypes
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_results_and_gradients(index, dtype, device):
    tokens = ids(device=device, dtype=index)
    weight, positions, types = tables(dtype, device)
    extra = lost(16.0, dtype)  # of three terms, which may cancel
    compared(tokens, [weight], extra)
    compared(tokens, [weight, positions], extra, scale=0.5)
    compared(tokens, [weight, positions, types], extra)
    compared(
        tokens,
        [weight, positions, types],
        extra,
        token_type=ids((4, 11), TYPES, device),
        position_ids=ids((4, 11), POSITIONS, device, index),
    )
    compared(
        tokens,
        [weight, positions, types],
        extra,
        position_ids=ids((11,), POSITIONS, device),
        token_type=ids((1, 11), TYPES, device),
    )


@pytest.mark.covering(1)
@dtypes
@pytest.mark.parametrize("columns", [7, 200])
def test_with_a_norm(columns, dtype, device):
    tokens, floats = ids(device=device), [*tables(dtype, device, columns), *affine(dtype, device, columns)]
    # Torch normalises what was rounded; of one column nothing is left but cancellation.
    compared(tokens, floats, lost(64.0, dtype), scale=2.0, token_type=ids((4, 11), TYPES, device))


@pytest.mark.gpu
@pytest.mark.parametrize("types", [None, "first", 1, 2, 3])
@pytest.mark.parametrize("columns", [40, 768, 1000, 1024])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_norms_of_many_rows(dtype, columns, types):
    """Those of a position are walked together, and what they have in common is added up once."""
    shape, rows = (96, 128), 1 if types in (None, "first") else types
    tokens, given = ids(shape, device="cuda"), ids(shape, rows, "cuda") if isinstance(types, int) else None
    floats = [table(n, dtype, "cuda", columns) for n in (WORDS, shape[1], rows)]
    leaves = [t.requires_grad_() for t in (*floats, *affine(dtype, "cuda", columns))]
    ours, theirs = (of_floats(f, tokens, token_type=given, scale=0.75)
                    for f in (frt.embedding_position, reference.embedding_position))
    exactly = [t.detach().double().requires_grad_() for t in leaves]
    places = [0, 1, 3, 4] if types is None else range(5)

    def call(function, tensors):
        return function(*(t if k in places else None for k, t in enumerate(tensors)))

    out, exact = call(ours, leaves), call(theirs, exactly)
    assert (out.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps * exact.abs().max()
    g = torch.randn_like(out)
    found = torch.autograd.grad(out, [leaves[k] for k in places], g)
    wanted = torch.autograd.grad(exact, [exactly[k] for k in places], g.double())
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).abs().max() <= 4 * torch.finfo(dtype).eps * other.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_rows_without_variance(dtype):
    """Only the bias is left."""
    tokens, given = ids((96, 128), device="cuda"), ids((96, 128), 2, "cuda")
    flat = [table(n, dtype, "cuda", 1).expand(n, 768) for n in (WORDS, 128, 2)]
    gamma, beta = affine(dtype, "cuda", 768)
    out = of_floats(frt.embedding_position, tokens, token_type=given)(*flat, gamma, beta)
    torch.testing.assert_close(out, beta.expand_as(out), rtol=2.0**-7, atol=2e-3)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3, 5), (0,), (3, 0)], ids=str)
def test_shapes(shape, device):
    tokens = ids(shape, device=device)
    for floats in (tables(F32, device), [*tables(F32, device), *affine(F32, device)]):
        out, _ = compared(tokens, floats, lost(64.0, F32))
        assert out.shape == (*shape, COLUMNS)


@pytest.mark.parametrize("columns", [1, 768, 4096, 4097, 16384, 20000])
def test_rows_of_any_length(columns, device):
    """Several threads and packs a row; the longest with their norm in a kernel of its own."""
    tokens = ids((2, 3), device=device)
    for dtype in (BF16, F32):
        leaves = [
            t.requires_grad_() for t in (*tables(dtype, device, columns), *affine(dtype, device, columns))
        ]
        for n in (3, 5):
            out = of_floats(frt.embedding_position, tokens)(*leaves[:n])
            exact = of_floats(reference.embedding_position, tokens)(*(t.double() for t in leaves[:n]))
            g = torch.randn_like(out)
            near = {"rtol": 2.0**-7, "atol": 2.0**-4} if dtype == BF16 else {"rtol": 1e-5, "atol": 2e-5}
            torch.testing.assert_close(out.double(), exact, **near)
            found, wanted = (torch.autograd.grad(o, leaves[:n], g.to(o.dtype)) for o in (out, exact))
            torch.testing.assert_close(found, wanted, **near)


def test_strides(device):
    """Tables that are views, misaligned or transposed give the same bits."""
    tokens, (weight, positions, types), (gamma, beta) = (
        ids(device=device),
        tables(F32, device),
        affine(F32, device),
    )

    def misaligned(t):
        return torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape)

    def run(change, tokens=tokens):
        return frt.embedding_position(
            tokens,
            change(weight),
            change(positions),
            token_type_weight=change(types),
            layer_norm=(change(gamma), change(beta)),
        )

    expected = run(lambda t: t)
    changes = [
        misaligned,
        lambda t: t.t().contiguous().t(),
        lambda t: torch.cat((t, t), -1)[..., :COLUMNS],
        lambda t: torch.stack((t, t), -1)[..., 0],
    ]
    for change in changes:
        torch.testing.assert_close(run(change), expected, rtol=0, atol=2e-6)
    assert_same_bits(run(lambda t: t, tokens.t().contiguous().t()), expected)
    assert_same_bits(run(lambda t: t, torch.stack((tokens, tokens), -1)[..., 0]), expected)


# --- dropout --------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("columns", [7, 24, 1000])
def test_dropout(columns, norm, dtype, device):
    """What is kept is scaled; the backward pass has the same mask, and a GPU that of a CPU."""
    tokens = ids((9, 11), device=device)
    floats = [1 + t.abs() for t in tables(dtype, device, columns)[:2]]  # sums that are not 0
    floats += [None, *affine(dtype, device, columns)] * norm
    call = of_floats(frt.embedding_position, tokens)
    whole = call(*floats)
    torch.manual_seed(5)
    out = call(*floats, dropout_p=0.25)
    mask = out != 0
    expected = whole.double() / 0.75
    torch.testing.assert_close(
        out.double()[mask], expected[mask], rtol=2e-3 if dtype == F16 else 1e-5, atol=1e-5
    )
    assert abs(mask.double().mean() - 0.75) < 5 * (0.75 * 0.25 / mask.numel()) ** 0.5
    torch.manual_seed(5)
    ours = frt.dropout_add(torch.ones_like(whole), torch.zeros_like(whole), 0.25) != 0
    assert torch.equal(ours, mask)  # as all fused dropouts draw, on every device

    weight = floats[0].requires_grad_()
    torch.manual_seed(5)
    dropped = call(*floats, dropout_p=0.25)
    g = torch.randn_like(dropped)
    (found,) = torch.autograd.grad(dropped, weight, g)
    (wanted,) = torch.autograd.grad(call(*floats), weight, g * mask / 0.75)
    torch.testing.assert_close(
        found, wanted, rtol=5e-3 if dtype == F16 else 1e-4, atol=5e-2 if dtype == F16 else 1e-4
    )
    assert_same_bits(call(*floats, dropout_p=0.25, training=False), whole)
    assert not call(*floats, dropout_p=1.0).any()


def test_dropout_twice_differentiated(device):
    tokens, floats = ids((2, 3), 4, device), [table(n, F64, device, 3).requires_grad_() for n in (4, 5)]

    def function(*floats):
        torch.manual_seed(3)
        return of_floats(frt.embedding_position, tokens, dropout_p=0.4)(*floats)

    assert torch.autograd.gradcheck(function, floats)
    assert torch.autograd.gradgradcheck(function, floats)


# --- torch's machinery ----------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
def test_compiled(norm, device):
    tokens, floats = ids(device=device), tables(F32, device) + list(affine(F32, device)) * norm
    leaves = [t.requires_grad_() for t in floats]
    function = of_floats(frt.embedding_position, tokens, scale=2.0, padding_idx=3)
    torch.compiler.reset()
    plain, compiled = function(*leaves), torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(compiled, plain)
    g = torch.randn_like(plain)
    torch.testing.assert_close(
        torch.autograd.grad(compiled, leaves, g), torch.autograd.grad(plain, leaves, g)
    )


def test_compiled_dropout(device):
    tokens, leaves = (
        ids(device=device),
        [t.requires_grad_() for t in (*tables(F32, device)[:2], *affine(F32, device))],
    )

    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    def function(weight, positions, gamma, beta):
        return frt.embedding_position(tokens, weight, positions, layer_norm=(gamma, beta), dropout_p=0.5)

    out = function(*leaves)
    mask = out != 0
    whole = frt.embedding_position(tokens, *leaves[:2], layer_norm=leaves[2:])
    torch.testing.assert_close(out, whole * 2 * mask)
    g = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, leaves, g),
        torch.autograd.grad(whole, leaves, g * 2 * mask),
        rtol=1e-4,
        atol=1e-5,
    )


def test_as_an_op_of_torchs(device):
    tokens = ids(device=device)
    weight, positions, types, *norm = (
        t.requires_grad_() for t in (*tables(F32, device), *affine(F32, device))
    )
    operands, sizes = (tokens, weight, positions, None, types, None), (WORDS, POSITIONS, TYPES)
    torch.library.opcheck(torch.ops.fusionrt.embedding_sum.default, (*operands, 1.5, 2, *sizes))
    torch.library.opcheck(
        torch.ops.fusionrt.embedding_sum_by_index.default, (weight, ids((WORDS,), 9, device), 9, 2.0, 1)
    )
    types = ids(tokens.shape, TYPES, device)
    torch.library.opcheck(
        torch.ops.fusionrt.embedding_gradients.default,
        (table(44, F32, device).requires_grad_(), tokens.view(-1), types.view(-1), 11, *sizes, 1.5, 2),
    )
    rng = torch.tensor([1, 2], device=device)
    torch.library.opcheck(
        torch.ops.fusionrt.embedding_position.default,
        (*operands, 1.5, 2, *sizes, *norm, 1e-5, 0.25, rng),
    )


def test_transforms(device):
    tokens, weight = ids(device=device), table(WORDS, F64, device)

    def loss(weight):
        return frt.embedding_position(tokens, weight, layer_norm=(None, None)).sin().sum()

    leaf = weight.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(weight), wanted)


@pytest.mark.gpu
def test_graphs():
    """A mask is drawn anew at every replay."""
    tokens, weight = ids(device="cuda"), table(WORDS, F32, "cuda")
    frt.embedding_position(tokens, weight, dropout_p=0.5)
    frt.embedding_position(tokens, weight, layer_norm=(None, None))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plain = frt.embedding_position(tokens, weight, layer_norm=(None, None))
        dropped = frt.embedding_position(tokens, weight, dropout_p=0.5)
    masks = []
    for _ in range(2):
        graph.replay()
        masks.append(dropped != 0)
        torch.testing.assert_close(dropped, 2 * weight[tokens] * masks[-1])
    assert not torch.equal(*masks)
    torch.testing.assert_close(plain, reference.embedding_position(tokens, weight, layer_norm=(None, None)))


# --- other arrays ---------------------------------------------------------------------------------


def test_arrays():
    tokens, (weight, positions, _), (gamma, beta) = ids(), tables(), affine()
    found = frt.embedding_position(
        tokens.numpy(), weight.numpy(), positions.numpy(), layer_norm=(gamma.numpy(), beta.numpy())
    )
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(
        found, frt.embedding_position(tokens, weight, positions, layer_norm=(gamma, beta)).numpy()
    )


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("name", "rows"), [("tokens", WORDS), ("position_ids", POSITIONS), ("token_type", TYPES)]
)
def test_an_id_out_of_range(name, rows, norm, device):
    weight, positions, types = tables(F32, device)
    for wrong in (rows, -1, 2**40):
        given = {
            "tokens": ids(device=device),
            "position_ids": ids((4, 11), POSITIONS, device),
            "token_type": ids((4, 11), TYPES, device),
        }
        given[name][2, 3] = wrong
        call = functools.partial(
            frt.embedding_position,
            weight=weight,
            position_weight=positions,
            **given,
            token_type_weight=types,
            layer_norm=affine(F32, device) if norm else None,
        )
        message = rf"embedding_position: {name} must be in \[0, {rows}\), got {wrong}$"
        if device == "cpu":
            with pytest.raises(IndexError, match=message):
                call()
            continue
        out = call()
        with pytest.raises(IndexError, match=message):
            deferred.examine(wait=True)
        assert out[2, 3].isnan().all()
        assert out.isnan().all(-1).sum() == 1
        given[name][2, 3] = 0
        assert call().isfinite().all()


@pytest.mark.gpu
def test_a_type_out_of_range_of_many_rows():
    shape = (96, 128)
    tokens, given = ids(shape, device="cuda"), ids(shape, 2, "cuda")
    given[5, 6], given[7, 8] = 2, -1
    weight, positions, types = (table(n, BF16, "cuda") for n in (WORDS, 128, 2))
    out = frt.embedding_position(tokens, weight, positions, token_type_weight=types, token_type=given,
                                 layer_norm=affine(BF16, "cuda"))
    with pytest.raises(IndexError, match=r"token_type must be in \[0, 2\), got (2|-1)$"):
        deferred.examine(wait=True)
    assert out[5, 6].isnan().all() and out[7, 8].isnan().all()
    assert out.isnan().any(-1).sum() == 2


@pytest.mark.gpu
def test_gradients_of_ids_out_of_range():
    """The wrong row's gradient goes nowhere."""
    tokens, weight = ids(device="cuda"), table(WORDS, F32, "cuda").requires_grad_()
    tokens[0, 0], tokens[3, 3] = WORDS + 5, -9
    frt.embedding_position(tokens, weight).backward(torch.ones(4, 11, COLUMNS, device="cuda"))
    with pytest.raises(IndexError, match=rf"got {WORDS + 5}$"):
        deferred.examine(wait=True)
    right = tokens[(tokens >= 0) & (tokens < WORDS)]
    assert torch.equal(weight.grad[:, 0], right.bincount(minlength=WORDS).float())


IDS, W = torch.zeros(2, 5, dtype=torch.int64), torch.ones(7, 4)
G = torch.ones(4)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"tokens": "x"}, TypeError, "tokens must be a tensor or an array, got str"),
        ({"tokens": IDS.float()}, TypeError, "tokens must be of dtype int32 or int64, got torch.float32"),
        ({"weight": None}, TypeError, "weight must be a tensor or an array, got NoneType"),
        ({"weight": IDS}, TypeError, r"weight must have a floating dtype .*, got torch.int64"),
        ({"weight": G}, ValueError, r"weight must have the shape \(V, C\), got \(4,\)"),
        (
            {"position_weight": W.double()},
            TypeError,
            "position_weight must have weight's dtype, torch.float32, got torch.float64",
        ),
        (
            {"position_weight": torch.ones(7, 3)},
            ValueError,
            r"position_weight must have the shape \(rows, 4\), got "
            r"\(7, 3\)",
        ),
        (
            {"position_weight": W[:3]},
            ValueError,
            r"position_weight must have at least 5 rows \(no position_ids are "
            r"given\), got 3",
        ),
        ({"position_ids": IDS}, ValueError, "position_ids needs position_weight"),
        (
            {"position_ids": IDS[:, :3], "position_weight": W},
            ValueError,
            r"position_ids must have the shape \(2, 5\) or "
            r"\(5,\), got \(2, 3\)",
        ),
        ({"token_type": IDS}, ValueError, "token_type needs token_type_weight"),
        (
            {"token_type": IDS.bool(), "token_type_weight": W},
            TypeError,
            "token_type must be of dtype int32 or int64",
        ),
        ({"token_type_weight": W[:0]}, ValueError, r"token_type_weight must have at least 1 rows"),
        ({"layer_norm": G}, TypeError, r"layer_norm must be \(weight, bias\) or \(weight, bias, eps\)"),
        (
            {"layer_norm": (G[:3], None)},
            ValueError,
            r"layer_norm weight must have the shape \(4,\), got \(3,\)",
        ),
        ({"layer_norm": (None, G.double())}, TypeError, "layer_norm bias must have weight's dtype"),
        ({"dropout_p": 1.5}, ValueError, r"dropout_p must be a probability in \[0, 1\], got 1.5"),
        ({"padding_idx": 7}, ValueError, r"padding_idx must be in \[-7, 7\), got 7"),
        ({"weight": W.to("meta")}, ValueError, "tokens must be on weight's device, meta, got cpu"),
    ],
)
def test_errors(change, kind, message):
    with pytest.raises(kind, match=f"embedding_position: {message}"):
        frt.embedding_position(**{"tokens": IDS, "weight": W} | change)


def test_tables_that_hooks_lay_otherwise():
    """Whoever keeps saved tensors may give back others whose columns lie apart."""
    tokens = torch.tensor([[1, 2, 3, 1], [0, 4, 2, 2]])
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((6, 16), (8, 16), (16,), (16,))]

    def turned(t):
        return t.detach().t().contiguous().t() if t.dim() == 2 else t.detach().clone()

    grads = []
    for pack in (torch.Tensor.detach, turned):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = frt.embedding_position(tokens, *leaves[:2], layer_norm=tuple(leaves[2:]))
        grads.append(torch.autograd.grad(out.square().sum(), leaves))
    torch.testing.assert_close(*grads)
