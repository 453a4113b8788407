"""What is replaced where no gradients are recorded: torch's own encoder layers, products with rows that begin
at no multiple of 16 bytes, questions about all elements, copies of what stays as it is."""

import copy

import pytest
import torch
from convert_checks import called, check, check_module, compiled, graph_of, leaf, of_pass, randomised
from convert_net import one_thread  # noqa: F401  (a fixture)
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import fusionrt as frt
from fusionrt.convert import calls
from fusionrt.convert.calls import aligned_product, copied
from fusionrt.convert.cuda_graphs import copies_of
from fusionrt.convert.inputs import Inputs
from fusionrt.convert.last_copies import without_last_copies
from fusionrt.convert.replay import Replays, is_repeatable
from fusionrt.convert.validate import Judge
from fusionrt.errors import MissingKernelError

# -- torch's encoder layers ------------------------------------------------------------------------------


def encoder(norm_first, activation="gelu", width=16):
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, activation, batch_first=True,
                                       norm_first=norm_first)
    return randomised(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).eval()


@pytest.mark.covering(1)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layers(norm_first, activation, device):
    """Each is one call of torch's."""
    model, x = encoder(norm_first, activation).to(device), torch.randn(3, 5, 16, device=device)
    counts = check_module(model, x, grad=False, rtol=1e-4, atol=1e-5)
    assert counts["attention"] == 2
    # On a GPU the float32 bias is part of the kernel behind the product: see passes/biases.py.
    fused = counts[f"linear_{activation}"] + counts["pointwise_cluster"]
    assert fused == (3 if device == "cuda" and norm_first else 2)  # no norm follows the last residual
    assert counts["norm"] == 4
    assert is_repeatable(graph_of(model, x))


def test_encoder_layers_under_autocast():
    """On a CPU torch's one call is all in 16 bits."""
    model, x = encoder(True), torch.randn(3, 5, 16)
    run, _ = compiled(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours, expected = run(x), model(x)
    assert_close(ours, expected)


def test_encoder_layers_train(device):
    """Then they are not one call."""
    counts = check_module(encoder(True).to(device).eval(), torch.randn(3, 5, 16, device=device), rtol=1e-4,
                          atol=1e-5)
    assert counts["attention"] == 2


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layers_of_images(norm_first, device):
    """Whose tokens lie one after the other only in the transposed tensor."""
    model, image = encoder(norm_first).to(device), torch.randn(2, 16, 3, 4, device=device)
    with torch.no_grad():
        counts = check(lambda x: model(x.flatten(2).transpose(1, 2)).mean(1), image, rtol=1e-4, atol=1e-5)
        assert counts["attention"] == 2
        check(lambda x: model(x.flatten(2).transpose(1, 2)), image, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["causal", "padding", "both"])
def test_encoder_layers_with_masks(kind):
    """Their attention stays torch's own, what stands around it does not."""
    model, x = encoder(True), torch.randn(2, 6, 16)
    masks = {}
    if kind != "padding":
        masks.update(mask=torch.ones(6, 6, dtype=torch.bool).triu(1), is_causal=True)
    if kind != "causal":
        masks["src_key_padding_mask"] = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    with torch.no_grad():
        run, found = compiled(lambda x: model(x, **masks))
        assert_close(run(x), model(x, **masks), rtol=1e-4, atol=1e-5)
    assert sum(f.counts["linear_gelu"] for f in found) == 2
    assert not any("attention" in f.counts for f in found)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_of_an_encoder():
    """torch's own has zeros there or not, as gradients are recorded or not. The rest is compared."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.1, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    arguments = {"src": x, "src_key_padding_mask": padding}
    fast = frt.auto_convert_model(model, example_inputs=arguments)
    assert frt.convert.conversion_report(fast).as_dict()["validation"]["accepted"]
    with torch.no_grad():
        found, expected = fast(**arguments), model(**arguments)
    assert_close(found[~padding], expected[~padding], rtol=1e-4, atol=1e-5)
    wrong = copy.deepcopy(model)
    wrong.layers[0].linear1.bias.data += 1e-2
    assert not Judge(wrong, Inputs((), arguments))(fast).accepted


@pytest.mark.parametrize("length", [2, 7])
def test_attention_of_torchs_own(length, device):
    model, x = nn.MultiheadAttention(16, 4, batch_first=True).to(device).eval(), torch.randn(2, length, 16)
    x = x.to(device)
    nn.init.normal_(model.in_proj_bias)

    # Dynamo of torch 2.11 takes another way through the module than eager does, with other strides.
    def attend(x):
        return model(x, x, x, need_weights=False)[0].contiguous()

    def asked(x):
        out, weights = model(x, x, x)
        return out.contiguous(), weights

    with torch.no_grad():
        assert check(attend, x, rtol=1e-4, atol=1e-5) == {"attention": 1}
        assert check(asked, x, rtol=1e-4, atol=1e-5) == {}
        assert is_repeatable(graph_of(asked, x))


def test_in_16_bit_encoder_layers_are_as_accurate(device):
    model, x = encoder(True, width=32).to(device), torch.randn(4, 9, 32, device=device)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        half = model.bfloat16()
        run, _ = compiled(half)
        ours, own = ((m(x.bfloat16()) - exact).abs().max() for m in (run, half))
    assert ours <= 2 * own


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_encoder_layers_are_replayed(monkeypatch, dtype):
    made, capture = [], Replays._capture
    monkeypatch.setattr(Replays, "_capture", lambda *args: made.append(capture(*args)) or made[-1])
    model = encoder(True, width=32).cuda().to(dtype)
    run, _ = compiled(lambda x: model(x.flatten(2).transpose(1, 2)).mean(1))
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, 32, 3, 4, device="cuda", dtype=dtype)
            assert_close(run(x), model(x.flatten(2).transpose(1, 2)).mean(1), rtol=2e-2, atol=2e-2)
    assert [graph is not None for graph in made] == [True]


def test_a_residual_after_a_linear_layer(device):
    """In either order, with nothing behind it."""
    x, w, y = (torch.randn(*shape, device=device) for shape in ((8, 16), (16, 16), (8, 16)))
    for function in (lambda x, w, y: F.linear(x, w) + y, lambda x, w, y: y + F.linear(x, w)):
        check(function, x, w, y)
        check(function, x, w.clone().requires_grad_(), y)


# -- rows of 16 bytes ------------------------------------------------------------------------------------


@pytest.fixture
def small_products(monkeypatch):
    for place in of_pass("aligned_rows", DEVICES=("cpu", "cuda"), DEEP=8, MANY=1):
        monkeypatch.setattr(*place)


HEAD = [torch.float16, torch.bfloat16]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", HEAD, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_rows_are_aligned(small_products, bias, dtype, device):
    head = nn.Linear(16, 13, bias, device=device, dtype=dtype)
    x = torch.randn(2, 3, 16, device=device, dtype=dtype)
    with torch.no_grad():
        for function in (head, lambda x: head(x[:, -1:]), lambda x: head(x).float().softmax(-1),
                         lambda x: head(x).view(-1), lambda x: head(x).view(-1, 13).argmax(1),
                         lambda x: (head(x), head(x)[0] * 2)):
            run, _ = compiled(function)
            ours, own = run(x), function(x)
            assert_close(ours, own, rtol=2e-2, atol=2e-2)
            for a, b in zip(*([t] if isinstance(t, torch.Tensor) else t for t in (ours, own)), strict=True):
                assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            assert "aligned_product" in called(function, x)


def test_which_rows_are_aligned(small_products):
    def products(function, *args):
        return called(function, *args).count("aligned_product")

    x, w = torch.randn(4, 16).half(), torch.randn(13, 16).half()
    assert products(lambda x, w: x @ w.t(), x, w) == 1
    assert products(F.linear, x, w[:8]) == 0
    assert products(F.linear, x.float(), w.float()) == 0
    assert products(lambda x, w: x @ w, x, w.t().contiguous()) == 0  # whose rows are no better
    assert products(F.linear, x[:, :12], w[:, :12]) == 0
    assert products(F.linear, x[0], w) == 0


def test_aligned_rows_train_as_before(small_products):
    x, w = torch.randn(4, 16).half(), torch.randn(13, 16).half().requires_grad_()
    check(F.linear, x, w, rtol=1e-2, atol=1e-2)
    assert "aligned_product" not in called(F.linear, x, w, grad=True)


@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 16), (0, 16)])
def test_aligned_product(shape, device):
    x, w, b = (torch.randn(*s, device=device, dtype=torch.bfloat16) for s in (shape, (13, 16), (13,)))
    for bias in (None, b):
        made = aligned_product(x, w, bias, True)
        assert all(stride % 8 == 0 for stride in made.stride()[:-1])
        assert_close(made, F.linear(x, w, bias), rtol=2e-2, atol=2e-2)
        assert_close(aligned_product(x, w.t(), bias, False), made, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
def test_aligned_rows_in_replays(bias):
    """Of a size where it is done unasked; results have eager's strides, and are the caller's."""
    head = nn.Linear(512, 5003, bias, device="cuda", dtype=torch.float16)
    run, _ = compiled(lambda x: head(x.relu()))
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(4, 128, 512, device="cuda", dtype=torch.float16)
            kept, expected = run(x), head(x.relu())
            run(x + 1)
            assert kept.stride() == expected.stride()
            assert_close(kept, expected, rtol=1e-2, atol=1e-2)
        assert "aligned_product" in called(lambda x: head(x.relu()), x)


def test_last_copies_are_left_to_replays(small_products):
    """Of results that nobody else has."""
    x, w = torch.randn(4, 16).half(), torch.randn(13, 16).half()
    for function, expected in ((F.linear, [0]), (lambda x, w: (x * 2, F.linear(x, w)), [1]),
                               (lambda x, w: (F.linear(x, w), F.linear(x + 1, w)), [0, 1]),
                               (lambda x, w: (x * 2).t().contiguous(), [0]),
                               (lambda x, w: (y := (x * 2).t(), y.contiguous()), None),
                               (lambda x, w: x * 2, None)):
        with torch.no_grad():
            gm = graph_of(function, x, w)
            found, given = without_last_copies(gm), [x, w][:len(gm.graph.find_nodes(op="placeholder"))]
            assert (found and sorted(found[1])) == expected
            if found is None:
                continue
            bare, strides = found
            results = bare(*given)
            assert any(results[k].stride() != its for k, its in strides.items())
            for ours, own in zip(copies_of(results, strides)(), gm(*given), strict=True):
                assert ours.stride() == own.stride()
                assert torch.equal(ours, own)
                assert all(ours.data_ptr() != r.data_ptr() for r in results)


@pytest.mark.parametrize("layout", ["rows", "columns", "images"])
def test_copies_with_other_strides(layout, device):
    t = torch.randn(3, 5, 24, device=device, dtype=torch.float16)[..., :21]
    t = {"rows": t, "columns": t.transpose(1, 2), "images": t[:, None]}[layout]
    for strides in (torch.empty(t.shape).stride(), torch.empty(t.shape).transpose(0, 1).stride()):
        made = copied(t, strides)
        assert made.stride() == strides
        assert torch.equal(made, t)


def test_a_copy_whose_kernel_may_not_be_compiled(monkeypatch):
    def same(t):
        raise MissingKernelError("copied: not in the cache")

    monkeypatch.setattr(calls, "_is_made_dense", lambda t, strides: True)
    monkeypatch.setattr(calls, "_same", same)
    t = torch.randn(3, 8)[:, :5]
    assert torch.equal(copied(t, (5, 1)), t)


# -- any -------------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["isinf", "isnan"])
def test_any_of_all_elements(monkeypatch, name, dtype, device):
    for place in of_pass("any_of", DEVICES=("cpu", "cuda")):
        monkeypatch.setattr(*place)
    asks = getattr(torch, name)

    def function(x):
        most = torch.where(asks(x).any(), 60000.0, 65000.0)
        return torch.clamp(x, min=-most, max=most)

    def as_method(x):
        return getattr(x * 2, name)().any() if name == "isnan" else asks(x * 2).any()

    with torch.no_grad():
        for special in (0.0, torch.inf, -torch.inf, torch.nan):
            x = torch.randn(3, 700, device=device, dtype=dtype)
            x[1, 500] = special
            check(function, x, equal_nan=True, rtol=1e-2, atol=1e-2)
            check(as_method, x, equal_nan=True)
        assert "row_reduce" in called(function, x)
        assert "any" not in called(function, x)
        check(lambda x: asks(x).any(1), x, equal_nan=True)
        check(lambda x: (asks(x), asks(x).any()), x, equal_nan=True)
        check(lambda x: asks(x).any(), x[:0])
        check(lambda x: asks(x).any(), x[0, 0])


def test_any_in_training(monkeypatch):
    for place in of_pass("any_of", DEVICES=("cpu",)):
        monkeypatch.setattr(*place)
    function = lambda x: x * torch.where(torch.isinf(x).any(), 2.0, 3.0)  # noqa: E731  (twice the same)
    check(function, leaf(3, 4))
    assert "row_reduce" not in called(function, leaf(3, 4), grad=True)


# -- copies ---------------------------------------------------------------------------------------------


def test_padding_by_nothing():
    x = torch.randn(2, 3)
    check(lambda x: F.pad(x, (0, 0, 0, 0)) * 2, x)
    run, _ = compiled(lambda x: F.pad(x, (0, 0)))
    assert run(x) is not x
    assert "pad" not in called(lambda x: F.pad(x, (0, 0)).exp(), x)
