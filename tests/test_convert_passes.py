"""Structured patterns: what is replaced in small models, that they compute the same and train the same."""

import sys

import pytest
import torch
from convert_checks import (
    assert_as_accurate,
    called,
    check,
    check_module,
    compiled,
    copies,
    leaf,
    of_pass,
    outcome,
    randomised,
)
from convert_net import one_thread  # noqa: F401  (a fixture)
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from fusionrt.convert.capture import Options, backend, rewrite

# -- models --------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """BERT's layer."""

    def __init__(self, p=0.0):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm1, self.norm2, self.drop, self.p = nn.LayerNorm(16), nn.LayerNorm(16), nn.Dropout(p), p

    def heads(self, x):
        return x.view(*x.shape[:2], 4, 4).transpose(1, 2)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0)

    def forward(self, x):
        found = self.attend(*(self.heads(layer(x)) for layer in (self.q, self.k, self.v)))
        found = self.drop(self.out(found.transpose(1, 2).reshape(x.shape)))
        x = self.norm1(found + x)
        return self.norm2(self.drop(self.down(F.gelu(self.up(x)))) + x)


class Spelled(Encoder):
    """The same with attention as it is written on blackboards."""

    def attend(self, q, k, v):
        scores = torch.matmul(q, k.transpose(-1, -2)) / 2.0
        return torch.matmul(F.dropout(scores.softmax(dim=-1), self.p, self.training), v)


class Decoder(nn.Module):
    """Llama's layer: RMS norms spelled out, rotary embedding, fewer heads of keys, a gated MLP."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, n, bias=False) for n in (16, 8, 8))
        self.out, self.gate, self.up = (nn.Linear(16, n, bias=False) for n in (16, 24, 24))
        self.down = nn.Linear(24, 16, bias=False)
        self.norm1, self.norm2 = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))
        self.register_buffer("frequencies", 0.5 ** torch.arange(2))

    def norm(self, x, weight):
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * h.to(x.dtype)

    def turned(self, x, cos, sin):
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def repeated(self, x):
        batch, heads, length, width = x.shape
        twice = x[:, :, None, :, :].expand(batch, heads, 2, length, width)
        return twice.reshape(batch, heads * 2, length, width)

    def forward(self, x):
        length = x.shape[1]
        places = torch.arange(length, device=x.device)
        angles = places[None, :, None].float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype).unsqueeze(1), angles.sin().to(x.dtype).unsqueeze(1)
        h = self.norm(x, self.norm1)
        q, k, v = (layer(h).view(*x.shape[:2], -1, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = self.turned(q, cos, sin), self.turned(k, cos, sin)
        mask = places[:, None] >= places
        found = F.scaled_dot_product_attention(q, self.repeated(k), self.repeated(v), attn_mask=mask)
        x = x + self.out(found.transpose(1, 2).reshape(x.shape))
        h = self.norm(x, self.norm2)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


# -- transformers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [Encoder, Spelled])
def test_encoder(model, device):
    counts = check_module(randomised(model()).to(device), torch.randn(2, 6, 16, device=device), rtol=1e-4,
                          atol=1e-5)
    assert counts == {"attention": 1, "linear_gelu": 1, "norm": 2}


def test_dropout_of_an_encoder_in_training():
    """In the mean over many masks it is what it is without."""
    model = randomised(Encoder(0.1))
    run, found = compiled(model)
    x = torch.randn(1, 4, 16)
    assert not torch.equal(run(x), run(x))
    assert found[0].counts == {"attention": 1, "linear_gelu": 1, "norm": 2}
    with torch.no_grad():
        ours = torch.stack([run(x) for _ in range(100)])
        eager = torch.stack([model(x) for _ in range(100)])
    spread = (ours.var(0) + eager.var(0)).div(100).sqrt() + 1e-3
    assert ((ours.mean(0) - eager.mean(0)).abs() < 6 * spread).all()


def test_decoder(device):
    model = Decoder().to(device)
    x = leaf(2, 6, 16, device=device)
    graphs = []
    torch._dynamo.reset()
    run = torch.compile(model, backend=lambda gm, inputs: graphs.append(gm) or backend(gm, inputs))
    assert_close(outcome(run, [x])[0], outcome(model, [x])[0], rtol=1e-4, atol=1e-5)
    counts = check_module(model, x, rtol=1e-4, atol=1e-5)
    assert counts["rotary"] == counts["attention"] == 1
    assert counts["norm"] == 2
    (attention,) = (n for n in graphs[0].graph.nodes if getattr(n.target, "__name__", "") == "attention")
    assert attention.kwargs["causal"] is True and attention.kwargs["enable_gqa"] is True
    assert "mask" not in attention.kwargs


def test_decoder_in_16_bits():
    """The norms' conversions are part of their kernels."""
    model = Decoder().to(torch.bfloat16)
    run, found = compiled(model)
    x = torch.randn(2, 6, 16, dtype=torch.bfloat16)
    with torch.no_grad():
        own, ours, exact = model(x), run(x), Decoder.forward(copy_in_double(model), x.double())
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).abs().max() <= 2 * (own - exact).abs().max() + 1e-2
    assert found[0].counts["norm"] == 2


def copy_in_double(model):
    twin = type(model)().double()
    twin.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    twin.norm = lambda x, weight: weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return twin


def test_autocast_training():
    model, x = randomised(Encoder()), leaf(2, 6, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run, found = compiled(model)
        (ours, _, (slope,)), (own, _, (its,)) = outcome(run, copies([x])), outcome(model, copies([x]))
    assert found[0].counts == {"attention": 1, "linear_gelu": 1, "norm": 2}
    assert ours.dtype == own.dtype
    assert_close(ours, own, rtol=5e-2, atol=5e-2)
    assert_close(slope, its, rtol=0.1, atol=0.1)


def test_autocast_casts_once():
    """What several layers read: the same results, kept once for their gradients."""
    layers, x = nn.ModuleList(nn.Linear(16, 8, bias=k > 0) for k in range(3)), leaf(4, 16)

    def function(x):
        return torch.cat([layer(x) for layer in layers], 1)

    kept = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run, found = compiled(function)
        ours, own = outcome(run, copies([x])), outcome(function, copies([x]))
        with torch.autograd.graph.saved_tensors_hooks(
                lambda t: kept.append(t.data_ptr()) if t.shape == x.shape else None, lambda t: t):
            run(x)
    assert sum(key.startswith("casts") for key in found[0].replacements) == 1
    assert torch.equal(ours[0], own[0])
    assert_close(ours[2], own[2], rtol=2e-2, atol=2e-2)
    assert len(kept) == 3 and len(set(kept)) == 1


def test_multihead_attention_of_torch():
    for batch_first in (True, False):
        layer = nn.MultiheadAttention(16, 4, batch_first=batch_first).eval()
        function = lambda x, layer=layer: layer(x, x, x, need_weights=False)[0] + x  # noqa: E731
        run, found = compiled(function)
        x = leaf(2, 6, 16)
        assert_close(outcome(run, copies([x])), outcome(function, copies([x])))
        assert found[0].counts["attention"] == 1


def test_masks_and_weights_of_attention():
    """A mask that is added, one that fills, weights that are returned, a scale on the queries."""
    q, k, v = (leaf(2, 3, 5, 4) for _ in range(3))
    passed = torch.rand(2, 1, 5, 5) > 0.3
    added = torch.where(passed, 0.0, torch.finfo(torch.float32).min)

    def with_added(q, k, v, mask):
        return torch.softmax((q * 0.5) @ k.mT + mask, -1) @ v

    def with_weights(q, k, v):
        weights = torch.softmax(q @ k.transpose(2, 3), -1)
        return weights @ v, weights

    assert check(with_added, q, k, v, added) == {"attention": 1}
    assert check(with_weights, q, k, v) == {"softmax": 1}
    filled = lambda q, k, v, m: (q @ k.mT).masked_fill(m, -1e9).softmax(-1) @ v  # noqa: E731
    assert check(filled, q, k, v, ~passed) == {"softmax": 1}
    assert check(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), q, k, v,
                 passed) == {"attention": 1}


def test_a_mask_that_learns_stays_in_the_scores():
    q, k, v, bias = leaf(2, 3, 5, 4), leaf(2, 3, 5, 4), leaf(2, 3, 5, 4), leaf(1, 3, 5, 5)
    counts = check(lambda q, k, v, bias: torch.softmax(q @ k.mT + bias, -1) @ v, q, k, v, bias)
    assert counts == {"softmax": 1}


# -- what is spelled out -----------------------------------------------------------------------------------

ROOT = (2 / torch.pi) ** 0.5
GELUS = {
    "GPT-2": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    "fast": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "erf": lambda x: x * 0.5 * (1.0 + torch.erf(x / 2**0.5))}


@pytest.mark.parametrize("name", GELUS)
def test_gelu_is_known_by_its_formula(name):
    function = lambda x, w: GELUS[name](x @ w) * 1.0  # noqa: E731
    run, found = compiled(function)
    x, w = leaf(4, 8), leaf(8, 8)
    assert_close(outcome(run, copies([x, w])), outcome(function, copies([x, w])))
    assert [key for key in found[0].replacements if key.startswith("gelu:")]


def test_what_is_almost_a_gelu_is_none():
    run, found = compiled(lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * x**3))))
    x = torch.randn(16)
    assert_close(run(x), 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * x**3))))
    assert found[0].replacements == ["clusters:mul_3"] or found[0].counts == {"pointwise_cluster": 1}
    assert not [key for key in found[0].replacements if key.startswith("gelu:")]


def test_linear_layers_of_gpt2():
    """addmm of a transposed weight, with views before and after."""

    def function(x, w, b):
        y = torch.addmm(b, x.view(-1, 8), w).view(2, 3, 16)
        return GELUS["GPT-2"](y)

    assert check(function, leaf(2, 3, 8), leaf(8, 16), leaf(16)) == {"linear_gelu": 1}


def test_activations_of_linear_layers(device):
    """By name where there is one, which libraries know; any function of one value; dropout behind it."""
    x, w, b = leaf(4, 8, device=device), leaf(16, 8, device=device), leaf(16, device=device)
    for name, activation in {"linear_relu": F.relu, "linear_gelu": F.gelu,
                             "linear_activation": lambda y: torch.tanh(y) * 2 + y}.items():
        assert check(lambda x, w, b, f=activation: f(F.linear(x, w, b)), x, w, b) == {name: 1}
    run, found = compiled(lambda x, w, b: F.dropout(F.relu(F.linear(x, w, b)), 0.5))
    dropped = run(x, w, b)
    assert found[0].counts == {"linear_relu": 1}
    kept = dropped != 0
    assert_close(dropped[kept], 2 * F.relu(F.linear(x, w, b))[kept])


@pytest.mark.parametrize("gate", [F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh")])
def test_gated_blocks(gate):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x):
            return self.down(self.up(x) * gate(self.gate(x)))

    model, x = Gated(), leaf(2, 3, 8)
    assert check_module(model, x, rtol=1e-4, atol=1e-5) == {"gated_mlp": 1}
    assert check_module(model, x, grad=False) == {"pointwise_cluster": 1}


def kept_by(run, *args):
    """Shapes of what is kept for the backward pass."""
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        run(*args)
    return shapes


def test_hidden_layers_are_not_kept():
    """In training a feed-forward block is one call; with another user of its hidden layer it is not."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.0), nn.Linear(64, 8))
    assert check_module(model, leaf(4, 8), rtol=1e-4, atol=1e-5) == {"linear_activation": 1}
    run, _ = compiled(model)
    assert kept_by(run, leaf(4, 8)).count((4, 64)) == 1 < kept_by(model, leaf(4, 8)).count((4, 64))

    def shown(x, w, v):
        h = torch.relu(F.linear(x, w))
        return F.linear(h, v), h

    assert check(shown, leaf(4, 8), leaf(16, 8), leaf(8, 16)) == {"linear_relu": 1}


def linear_and_gelu(write, x, w):
    y = F.linear(x, w)
    write(w)
    return F.gelu(y), w.sum()


def attention(write, x, w):
    q, v = x.view(1, 2, 2, 8), w.view(1, 2, 4, 8)[:, :, :2]
    scores = torch.matmul(q, q.transpose(-1, -2)) / 8**0.5
    write(x)
    return torch.matmul(F.softmax(scores, -1), v) + x.sum()


def norm_and_relu(write, x, w):
    mean, var = torch.zeros_like(w[0]), torch.ones_like(w[0])
    y = F.batch_norm(F.conv1d(x[None], w[:, :4, None].contiguous()), mean, var, training=True)
    write(mean)
    return torch.relu(y), mean


@pytest.mark.parametrize(("function", "name"), [
    (linear_and_gelu, "linear_gelu"), (attention, "attention"), (norm_and_relu, "conv_bn_relu")])
def test_no_call_moves_across_a_write(function, name):
    args = torch.randn(4, 8), torch.randn(8, 8)
    for write, replaced in ((lambda t: t.add_(1), 0), (lambda t: None, 1)):
        counts = check(lambda *args, write=write: function(write, *args), *args, rtol=1e-4, atol=1e-5)
        assert counts[name] == replaced


def test_checkpoints_compute_anew():
    """What they hold is rewritten as well."""
    def function(x, w):
        return checkpoint(lambda x: F.layer_norm(torch.tanh(x @ w) * 2, (8,)), x, use_reentrant=False) + 1

    args = leaf(4, 8), leaf(8, 8)
    assert check(function, *args) == {"norm": 1}
    run, _ = compiled(function)
    assert kept_by(run, *args).count((4, 8)) == kept_by(function, *args).count((4, 8))


def test_cross_entropy(monkeypatch):
    monkeypatch.setattr(sys.modules["fusionrt.convert.passes.losses"], "DEVICES", ("cpu",))
    target, logits = torch.tensor([1, -100, 4, 2]), leaf(4, 7)
    assert check(lambda x, t: F.cross_entropy(x, t), logits, target) == {"cross_entropy": 1}
    smooth = lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1, reduction="sum") * 2  # noqa: E731
    assert check(smooth, logits, target) == {"cross_entropy": 1}


def test_constants_are_computed_once():
    def function(x):
        mask = (torch.arange(6)[:, None] >= torch.arange(6)) & torch.ones(6, 6, dtype=torch.bool)
        return x.masked_fill(~mask, 0.0) * 2 + torch.zeros_like(x), torch.arange(3)

    run, found = compiled(function)
    x = torch.randn(6, 6)
    _first, range_ = run(x)
    range_.add_(1)  # a result is the caller's own
    assert_close(run(x), function(x))
    assert found[0].graph_after <= 3


@pytest.mark.parametrize("make", [
    lambda x: x.new_zeros(4), lambda x: x.new_full((2, 1), 2.0), lambda x: torch.Tensor.new_ones(x, 4),
    lambda x: torch.full_like(input=x[0], fill_value=2.0),
    lambda x: torch.zeros_like(x.view(4, -1)[:, :2]).t()])
def test_constants_like_tensors_whose_sizes_vary(make):
    function = lambda x: x[:2] * 2 + make(x)  # noqa: E731
    run, found = compiled(function)
    for n in (2, 3, 5):
        x = torch.randn(n, 4)
        assert_close(run(x), function(x))
    assert found[0].replacements


def test_constants_that_are_filled():
    """As the masks of shifted windows are: whoever reads them does so afterwards."""

    def mask(x):
        made = x.new_zeros((6, 6))
        for k in range(3):
            made[k:, k:-1] = k + 1
        return made

    def function(x):
        made = mask(x).view(2, 3, 6).permute(1, 0, 2).reshape(6, 6)
        return x.masked_fill(made != 0, -1.0)

    def read_meanwhile(x):
        made = mask(x)
        y = x + made
        made[0] = 7.0
        return y * made

    def written_by_x(x):
        made = mask(x)
        made[0] = x[0]
        return made * 2

    x = torch.randn(6, 6)
    for f, calls in ((function, 1), (read_meanwhile, None), (written_by_x, None)):
        run, found = compiled(f)
        for _ in range(2):
            assert_close(run(x), f(x))
        assert calls is None or found[0].graph_after == calls


def test_constants_that_are_written_to_are_made_anew():
    """By a call that works in place again, as nothing was fused with it."""
    def function(x):
        added, scaled = torch.zeros(3, 4), torch.arange(12.0).view(3, 4)
        added.add_(x)
        scaled.mul_(x)
        return added.cumsum(0), scaled @ x.t()

    check(function, torch.randn(3, 4), calls=3)


def test_calls_in_place_on_views_with_gaps():
    """A new result would lie otherwise."""
    def function(x):
        part = (x * 2)[:, ::2]
        part.add_(1)
        return part

    with torch.no_grad():
        check(function, torch.randn(4, 8))
    check(function, leaf(4, 8))


@pytest.mark.gpu
def test_calls_in_place_under_autocast():
    """It makes some of them float32, but for those in place."""
    def function(x, w):
        with torch.autocast("cuda", torch.float16):
            y = F.linear(x, w)
            z = y * 2
            y.exp_()
        return y, z.cumsum(0)

    with torch.no_grad():
        check(function, torch.randn(4, 8, device="cuda"), torch.randn(8, 8, device="cuda"))


def test_masks_that_make_more_of_the_scores():
    """Ours has as many results as there are queries."""
    table, x = nn.Parameter(torch.randn(4, 1, 5, 5)), torch.randn(1, 2, 5, 8)

    def function(x, mask):
        return (x @ x.transpose(2, 3) + mask).softmax(-1) @ x

    with torch.no_grad():
        check(lambda x: function(x, torch.zeros(4, 1, 5, 5)), x, rtol=1e-4, atol=1e-5)
        check(lambda x: function(x, table.exp()), x, rtol=1e-4, atol=1e-5)


@torch.library.custom_op("fusionrt_tests::flat_memory", mutates_args=())
def flat_memory(x: torch.Tensor) -> torch.Tensor:
    """As kernels of users read it."""
    return torch.as_strided(x, (x.numel(),), (1,)).clone()


@flat_memory.register_fake
def _(x):
    return x.new_empty(x.numel())


@pytest.mark.parametrize("read", [lambda t: t.as_strided((3, 8), (8, 1)), flat_memory])
def test_what_asks_where_elements_lie_sees_torchs_memory(monkeypatch, read):
    """Products that are views of one leave it be."""
    for place in of_pass("stacked", DEVICES=("cpu",)):
        monkeypatch.setattr(*place)
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)

    def function(x):
        return read(a(x)).sum() + b(x).exp().sum()

    with torch.no_grad():
        check(function, torch.randn(5, 8))
        assert "stacked" not in called(function, torch.randn(5, 8))


def test_stacked_linear_layers(monkeypatch):
    """Three products of one input are one; what follows sees views of it, and new weights."""
    monkeypatch.setattr(sys.modules["fusionrt.convert.passes.stacked"], "DEVICES", ("cpu",))
    for model in (randomised(Encoder()), Decoder()):
        run, found = compiled(model)
        x = torch.randn(2, 6, 16)
        with torch.no_grad():
            assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
            model.k.weight.mul_(2)
            assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
        assert found[0].counts["stacked_linear"] == (1 if isinstance(model, Encoder) else 2)
        assert found[0].counts["attention"] == 1
    flat = lambda x, a, b: (F.linear(x, a).view(-1), F.linear(x, b) * 2 + 1)  # noqa: E731
    run, found = compiled(flat)
    args = [torch.randn(4, 8), torch.randn(6, 8), torch.randn(6, 8)]
    assert_close(run(*args), flat(*args))
    assert "stacked_linear" not in found[0].counts  # a view of a part cannot be flat


def test_linear_layers_are_stacked_where_others_cannot_be(monkeypatch):
    monkeypatch.setattr(sys.modules["fusionrt.convert.passes.stacked"], "DEVICES", ("cpu",))

    def layers(x, a, b):
        e = x.exp()
        return F.linear(x, a).view(-1), F.linear(x, b) * 2, F.linear(e, a) + 1, F.linear(e, b) * 2

    run, found = compiled(layers)
    args = [torch.randn(4, 8), torch.randn(6, 8), torch.randn(6, 8)]
    assert_close(run(*args), layers(*args))
    assert found[0].counts["stacked_linear"] == 1


# -- the interface -------------------------------------------------------------------------------------------


def test_single_replacements_can_be_left_out():
    function = lambda x, w: torch.relu(F.gelu(x @ w) * 2) + F.layer_norm(x, (8,))  # noqa: E731
    args = [torch.randn(8, 8), torch.randn(8, 8)]
    run, found = compiled(function)
    run(*args)
    keys = found[0].replacements
    assert len(keys) == len(set(keys)) > 0
    run, found = compiled(function, excluded=frozenset(keys))
    assert_close(run(*args), function(*args))
    assert not found[0].replacements
    assert found[0].graph_before == found[0].graph_after
    run, found = compiled(function, passes=())
    assert_close(run(*args), function(*args))
    assert not found[0].counts


def test_options_are_checked():
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(ValueError, match="rewrite: no pass is called 'fast'; known are checkpoints, id"):
        rewrite(gm, Options(passes=("fast",)))
    with pytest.raises(ValueError,
                       match=r"fusionrt: mode must be one of default, reduce-overhead, .*, got 'quick'"):
        backend(gm, [torch.ones(2)], mode="quick")
    with pytest.raises(TypeError, match="fusionrt: no option 'speed'; there are passes, "):
        backend(gm, [torch.ones(2)], options={"speed": 11})
    for mode in ("reduce-overhead", "max-autotune-no-cudagraphs"):
        torch._dynamo.reset()
        run = torch.compile(lambda x: torch.relu(x) * 2, backend="fusionrt", mode=mode)
        assert_close(run(torch.ones(3)), torch.full((3,), 2.0))


def test_gradients_of_fifty_steps():
    """An encoder trained by the compiled function follows the one trained by torch's."""
    torch.manual_seed(0)
    model, data = randomised(Encoder()), torch.randn(8, 6, 16)
    losses = []
    for kind in (lambda m: m, lambda m: compiled(m)[0]):
        twin = Encoder()
        twin.load_state_dict(model.state_dict())
        run, optimiser = kind(twin), torch.optim.SGD(twin.parameters(), 0.05, 0.9)
        losses.append([])
        for _ in range(50):
            optimiser.zero_grad()
            loss = (run(data) - data.flip(0)).square().mean()
            loss.backward()
            optimiser.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0] * 0.9
    assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=1e-4)


def test_accuracy_is_torchs_own():
    assert_as_accurate(lambda x, w: F.gelu(F.linear(F.layer_norm(x, (16,)), w)) * 2, leaf(64, 16),
                       leaf(32, 16))


@pytest.mark.parametrize("training", [False, True])
def test_a_batch_norm_lies_as_its_image(training):
    """What `revalue` counts on, in the place of torch's decomposition."""
    norm, image = nn.BatchNorm2d(6).train(training), torch.randn(2, 6, 5, 4)
    for x in (image, image.contiguous(memory_format=torch.channels_last), image[:1], image[:, :, :1, :1]):
        if training and x.numel() == 6:
            continue  # torch wants more than one value a channel
        x = x.contiguous(memory_format=torch.channels_last if x.stride(1) == 1 else torch.contiguous_format)
        assert norm(x).stride() == torch.empty_like(x).stride()
        assert norm(x).shape == x.shape and norm(x).dtype == x.dtype
