"""fusionrt.nn: linear layers, norms, convolutions, MLPs, embeddings and losses against torch's modules."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from module_checks import assert_equal_state, assert_loads_both_ways, check_module, outcome
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import fusionrt
from fusionrt import nn as fnn

D, H = 12, 8  # columns


def cases(named, *wide):
    """All in float32, `wide` in float64 as well: each is kernels that a CPU test has to compile."""
    pairs = [(name, torch.float32) for name in named] + [(name, torch.float64) for name in wide]
    return pytest.mark.parametrize(("case", "dtype"), pairs)


@fusionrt.fuse
def doubled_relu(x):
    return 2 * fusionrt.relu(x)


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


class LlamaMLP(nn.Module):
    """The names and the formula of LLaMA's."""

    def __init__(self, act_fn=None, bias=False):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, H, bias), nn.Linear(D, H, bias)
        self.down_proj = nn.Linear(H, D, bias)
        self.act_fn = act_fn or nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Bert(nn.Module):
    """The names of BERT's embeddings."""

    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(20, D, padding_idx=0)
        self.position_embeddings, self.token_type_embeddings = nn.Embedding(6, D), nn.Embedding(2, D)
        self.LayerNorm = nn.LayerNorm(D)

    def forward(self, tokens, token_type):
        positions = self.position_embeddings.weight[:tokens.shape[-1]]
        total = self.word_embeddings(tokens) + positions + self.token_type_embeddings(token_type)
        return self.LayerNorm(total)


def conv_pair(bias=True, **options):
    return nn.Conv2d(4, 6, 3, bias=bias, **options), nn.BatchNorm2d(6)


def tokens():
    return torch.tensor([[3, 0, 7, 19], [1, 1, 2, 5]]), torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]])


def gated(activation):
    """Of a module's own layers, packed or not."""
    def reference(m, x):
        gate, up = m.gate_up_proj(x).chunk(2, -1) if m.packed else (m.gate_proj(x), m.up_proj(x))
        return m.down_proj(activation(gate) * up)
    return reference


def rows(*shape):
    return torch.randn(*shape or (5, D))


# -- results and gradients -------------------------------------------------------------------------

LINEAR = {
    "relu": (fnn.FusedLinearReLU, {}, F.relu), "gelu": (fnn.FusedLinearGELU, {}, F.gelu),
    "tanh form": (fnn.FusedLinear, {"activation": nn.GELU("tanh")}, gelu_tanh),
    "none": (fnn.FusedLinear, {"bias": False}, lambda x: x),
    "slope": (fnn.FusedLinear, {"activation": nn.LeakyReLU(0.2)}, lambda x: F.leaky_relu(x, 0.2)),
    "own": (fnn.FusedLinear, {"activation": doubled_relu}, lambda x: 2 * torch.relu(x)),
}


@cases(LINEAR, "gelu", "none")
def test_linear(case, dtype, device):
    kind, options, activation = LINEAR[case]
    layer = kind(D, H, **options).to(device, dtype)
    x = rows(3, 5, D).to(device, dtype)
    check_module(layer, lambda m, x: activation(F.linear(x, m.weight, m.bias)), x)


def test_linear_with_a_residual(device):
    layer = fnn.FusedLinearReLU(D, H).to(device)
    x, residual = rows().to(device), rows(5, H).to(device)
    check_module(layer, lambda m, x, r: r + F.relu(F.linear(x, m.weight, m.bias)), x, residual)


def test_linear_drops_in_training_only(device):
    layer = fnn.FusedLinearReLU(D, 64, dropout=0.25).to(device)
    x = rows(200, D).to(device)
    whole = F.relu(F.linear(x, layer.weight, layer.bias))
    found = layer(x)
    kept = found != 0
    torch.testing.assert_close(found[kept], whole[kept] / 0.75)
    assert abs(kept.sum() / (whole > 0).sum() - 0.75) < 0.03
    torch.testing.assert_close(layer.eval()(x), whole)


def test_the_named_linear_layers_have_their_activations():
    x = rows()
    for name, function in (("SiLU", F.silu), ("Sigmoid", torch.sigmoid), ("Tanh", torch.tanh),
                           ("Mish", F.mish), ("GELUTanh", gelu_tanh)):
        layer = getattr(fnn, f"FusedLinear{name}")(D, H)
        torch.testing.assert_close(layer(x), function(F.linear(x, layer.weight, layer.bias)))


NORMS = {
    "layer": (fnn.FusedLayerNorm, {}, lambda m, x: F.layer_norm(x, (D,), m.weight, m.bias, m.eps)),
    "relu": (fnn.FusedLayerNormReLU, {}, lambda m, x: F.relu(F.layer_norm(x, (D,), m.weight, m.bias, m.eps))),
    "gelu": (fnn.FusedLayerNormGELU, {}, lambda m, x: F.gelu(F.layer_norm(x, (D,), m.weight, m.bias, m.eps))),
    "rms": (fnn.FusedRMSNorm, {"eps": 1e-6}, lambda m, x: F.rms_norm(x, (D,), m.weight, m.eps)),
    "gemma": (fnn.FusedRMSNorm, {"weight_offset": 1}, lambda m, x: F.rms_norm(x, (D,), 1 + m.weight, m.eps)),
}


@cases(NORMS, "layer", "rms")
def test_norm(case, dtype, device):
    kind, options, reference = NORMS[case]
    norm = kind(D, **options).to(device, dtype)
    nn.init.normal_(norm.weight)
    check_module(norm, reference, rows().to(device, dtype))


def test_norms_of_a_sum(device):
    x, residual = rows().to(device), rows().to(device)
    for norm in (fnn.FusedLayerNorm(D).to(device), fnn.FusedRMSNorm(D).to(device)):
        y, total = norm(x, residual, return_sum=True)
        torch.testing.assert_close(total, x + residual)
        torch.testing.assert_close(y, norm(x + residual))
        torch.manual_seed(0)
        dropped = norm(x, residual, dropout_p=0.5, return_sum=True)[1] - residual
        assert set((dropped / x).round(decimals=3).unique().tolist()) == {0.0, 2.0}
        torch.testing.assert_close(norm(x, residual, dropout_p=0.5, training=False), y)
        torch.testing.assert_close(norm.eval()(x, residual, dropout_p=0.5), y)


def test_a_norm_with_an_offset_starts_as_none():
    x, norm = rows(), fnn.FusedRMSNorm(D, weight_offset=1)
    assert norm.weight.abs().max() == 0
    norm.reset_parameters()
    torch.testing.assert_close(norm(x), F.rms_norm(x, (D,)))


CONV = {
    "plain": (lambda: fnn.FusedConv2dBNReLU(4, 6, 3, padding=1), nn.ReLU()),
    "options": (lambda: fnn.FusedConv2dBNReLU(4, 6, 3, 2, 1, 1, 2, False, eps=1e-3, momentum=0.3), nn.ReLU()),
    "silu": (lambda: fnn.FusedConvBNAct(*conv_pair(padding="same"), nn.SiLU()), nn.SiLU()),
    "reflected": (lambda: fnn.FusedConvBNAct(*conv_pair(padding=1, padding_mode="reflect")), nn.Identity()),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CONV)
def test_conv_bn(case, training, device):
    make, activation = CONV[case]
    block = make().to(device, torch.float64).train(training)
    block.bn.running_var.uniform_(0.5, 2)
    if block.conv.bias is not None:  # of a batch's norm it has no gradient, but for rounding
        block.conv.bias.requires_grad_(not training)
    x = rows(3, 4, 7, 7).to(device, torch.float64)
    theirs = copy.deepcopy(nn.Sequential(block.conv, block.bn, activation))
    check_module(block, lambda m, x: activation(F.batch_norm(
        m.conv(x), None if training else m.bn.running_mean, None if training else m.bn.running_var,
        m.bn.weight, m.bn.bias, training, 0.0, m.bn.eps)), x)
    theirs(x)
    for name, t in theirs.state_dict().items():
        torch.testing.assert_close(block.state_dict()[name], t, rtol=1e-12, atol=1e-12)


def test_conv_bn_counts_batches_and_averages_all(device):
    conv, bn = nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6, momentum=None)
    theirs = copy.deepcopy(nn.Sequential(conv, bn)).to(device, torch.float64)
    block = fnn.FusedConvBNAct(conv, bn).to(device, torch.float64)
    for _ in range(3):
        x = rows(3, 4, 9).to(device, torch.float64)
        block(x), theirs(x)
    assert bn.num_batches_tracked == 3
    torch.testing.assert_close(bn.running_mean, theirs[1].running_mean)
    torch.testing.assert_close(bn.running_var, theirs[1].running_var)


def test_conv_bn_takes_a_residual_and_follows_its_weights(device):
    block = fnn.FusedConv2dBNReLU(4, 4, 3, padding=1).to(device).eval()
    x, residual = (rows(2, 4, 5, 5).to(device, memory_format=torch.channels_last) for _ in range(2))
    for _ in range(2):
        with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
            expected = F.relu(block.bn(block.conv(x)) + residual)
            torch.testing.assert_close(block(x, residual), expected, rtol=1e-4, atol=1e-5)
            block.conv.weight.mul_(3)  # what was folded before is folded anew
            block.bn.bias.add_(1)


MLPS = {
    "gelu": (lambda: fnn.FusedMLP(D, H, activation="gelu"), lambda m, x: m.linear2(F.gelu(m.linear1(x)))),
    "recomputed": (lambda: fnn.FusedMLP(D, H, D + 1, activation="relu", recompute=True, bias=False),
                   lambda m, x: m.linear2(F.relu(m.linear1(x)))),
    "swiglu": (lambda: fnn.FusedSwiGLU(D, H), gated(F.silu)),
    "packed": (lambda: fnn.FusedSwiGLU(D, H, packed=True, bias=True), gated(F.silu)),
    "geglu": (lambda: fnn.FusedGEGLU(D, H, approximate="tanh"), gated(gelu_tanh)),
}


@cases(MLPS, "gelu", "packed")
def test_mlp(case, dtype, device):
    make, reference = MLPS[case]
    check_module(make().to(device, dtype), reference, rows(2, 5, D).to(device, dtype))


def test_mlp_drops_in_training_only():
    mlp, x = fnn.FusedMLP(D, 64, dropout=0.5), rows()
    whole = mlp.linear2(F.gelu(mlp.linear1(x)))
    assert not torch.allclose(mlp(x), whole)
    torch.testing.assert_close(mlp.eval()(x), whole)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_of_no_features():
    mlp, x = fnn.FusedMLP(D, 0, 3), rows()
    torch.testing.assert_close(mlp(x), mlp.linear2.bias.expand(*x.shape[:-1], 3))
    for none in (fnn.FusedMLP(D, H, 0), fnn.FusedSwiGLU(D, H, 0), fnn.FusedGEGLU(D, H, 0, packed=True)):
        assert none(x).shape == (*x.shape[:-1], 0)


def test_weights_that_are_packed_load_where_they_are_not():
    packed, apart = fnn.FusedSwiGLU(D, H, packed=True, bias=True), fnn.FusedSwiGLU(D, H, bias=True)
    x = rows()
    apart.load_state_dict(packed.state_dict())
    torch.testing.assert_close(apart(x), packed(x))
    fresh = nn.Sequential(fnn.FusedSwiGLU(D, H, packed=True, bias=True))
    fresh.load_state_dict(nn.Sequential(apart).state_dict())
    torch.testing.assert_close(fresh(x), packed(x))
    assert torch.equal(fresh[0].gate_up_proj.weight, packed.gate_up_proj.weight)


def test_embedding(device):
    embed = fnn.EmbeddingPosition(20, D, 6, token_types=2, padding_idx=0, layer_norm=True).to(device)
    words, types = (t.to(device) for t in tokens())
    assert embed.word_embeddings.weight[0].abs().max() == 0

    def reference(m, words, types):
        total = m.word_embeddings(words) + m.position_embeddings.weight[:4] + m.token_type_embeddings(types)
        return F.layer_norm(total, (D,), m.LayerNorm.weight, m.LayerNorm.bias)

    check_module(embed, reference, words, types)
    ids = torch.tensor([5, 4, 3, 2], device=device)
    plain = fnn.EmbeddingPosition.from_modules(embed.word_embeddings, embed.position_embeddings, scale=3.0)
    torch.testing.assert_close(plain(words, position_ids=ids),
                               3 * embed.word_embeddings(words) + embed.position_embeddings(ids))


def test_embedding_drops_in_training_only():
    embed = fnn.EmbeddingPosition(20, D, dropout=0.5)
    words = tokens()[0]
    whole = embed.word_embeddings(words)
    assert set((embed(words) / whole).round(decimals=3).unique().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(embed.eval()(words), whole)


def test_losses(device):
    weight, target = torch.rand(9, device=device) + 0.5, torch.tensor([0, 3, -1, 8, 2], device=device)
    logits, hidden = rows(5, 9).to(device), rows(5, D).to(device)
    options = {"ignore_index": -1, "label_smoothing": 0.1, "reduction": "sum"}
    theirs, ours = nn.CrossEntropyLoss(weight, **options), fnn.FusedCrossEntropyLoss(weight, **options)
    torch.testing.assert_close(ours(logits, target), theirs(logits, target))
    capped = fnn.FusedCrossEntropyLoss(ignore_index=-1, softcap=2.0)
    torch.testing.assert_close(capped(logits, target), F.cross_entropy(2 * torch.tanh(logits / 2), target,
                                                                      ignore_index=-1))
    head = nn.Linear(D, 9).to(device)
    whole = fnn.FusedLinearCrossEntropyLoss(weight, **options)
    torch.testing.assert_close(whole(head.weight, hidden, target, head.bias), theirs(head(hidden), target))


# -- weights and parameters of torch's modules ------------------------------------------------------

def conv_and_torchs():
    return fnn.FusedConv2dBNReLU(4, 6, 3, bias=False), nn.Sequential(*conv_pair(bias=False), nn.ReLU())


STATES = {
    "linear": lambda: (fnn.FusedLinear(D, H), nn.Linear(D, H), rows()),
    "layer norm": lambda: (fnn.FusedLayerNorm(D), nn.LayerNorm(D), rows()),
    "rms norm": lambda: (fnn.FusedRMSNorm(D), nn.RMSNorm(D), rows()),
    "conv": lambda: (*conv_and_torchs(), rows(2, 4, 5, 5)),
    "mlp": lambda: (fnn.FusedMLP(D, H, names=("0", "3")), nn.Sequential(
        nn.Linear(D, H), nn.GELU(), nn.Dropout(), nn.Linear(H, D)), rows()),
    "swiglu": lambda: (fnn.FusedSwiGLU(D, H), LlamaMLP(), rows()),
    "embedding": lambda: (fnn.EmbeddingPosition(20, D, 6, token_types=2, layer_norm=True), Bert(), *tokens()),
    "loss": lambda: (fnn.FusedCrossEntropyLoss(torch.ones(9)), nn.CrossEntropyLoss(torch.ones(9)), rows(2, 9),
                     torch.tensor([3, 5])),
}


@pytest.mark.parametrize("case", STATES)
def test_weights_load_both_ways(case):
    assert_loads_both_ways(*STATES[case]())


@pytest.mark.parametrize("case", ["linear", "layer norm", "rms norm", "loss"])
def test_arguments_are_named_as_torchs(case):
    ours, theirs, *inputs = STATES[case]()
    ours.load_state_dict(theirs.state_dict())
    named = dict(zip(inspect.signature(theirs.forward).parameters, inputs, strict=True))
    torch.testing.assert_close(ours(**named), theirs(**named))


SHARED = {
    "linear": lambda: (nn.Linear(D, H), lambda m: fnn.FusedLinear.from_torch(m, "relu"), F.relu, rows()),
    "no bias": lambda: (nn.Linear(D, H, bias=False), fnn.FusedLinearGELU.from_torch, F.gelu, rows()),
    "layer norm": lambda: (nn.LayerNorm((5, D), bias=False), fnn.FusedLayerNorm.from_torch, None, rows()),
    "rms norm": lambda: (nn.RMSNorm(D, 1e-3), lambda m: fnn.FusedRMSNorm.from_torch(m, torch.relu), F.relu,
                         rows()),
    "conv": lambda: (nn.Sequential(*conv_pair(), nn.SiLU()), fnn.FusedConvBNAct.from_torch, None,
                     rows(2, 4, 5, 5)),
    "conv relu": lambda: (nn.Sequential(*conv_pair(), nn.ReLU()), fnn.FusedConv2dBNReLU.from_torch, None,
                          rows(2, 4, 5, 5)),
    "pair": lambda: (nn.Sequential(*conv_pair()), lambda m: fnn.FusedConv2dBNReLU(*m), F.relu,
                     rows(2, 4, 5, 5)),
    "mlp": lambda: (nn.Sequential(nn.Linear(D, H), nn.Mish(), nn.Linear(H, D)), fnn.FusedMLP.from_torch, None,
                    rows()),
    "swiglu": lambda: (LlamaMLP(), fnn.FusedSwiGLU.from_torch, None, rows()),
    "geglu": lambda: (LlamaMLP(nn.GELU("tanh"), bias=True), fnn.FusedGEGLU.from_torch, None, rows()),
}


@pytest.mark.parametrize("case", SHARED)
def test_from_torch_shares_the_parameters(case):
    theirs, take, after, *inputs = SHARED[case]()
    ours = take(theirs.eval().to(torch.float64).requires_grad_(False))
    assert not ours.training
    assert_equal_state(ours, theirs)
    assert all(a is b for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    inputs = [t.double() for t in inputs]
    expected = theirs(*inputs) if after is None else after(theirs(*inputs))
    torch.testing.assert_close(ours(*inputs), expected, rtol=1e-12, atol=1e-12)
    assert take(theirs.train()).training


def test_statistics_that_are_no_longer_tracked_stay():
    """A norm that has them is told not to move them: it takes the batch's, as torch's does."""
    theirs = nn.Sequential(*conv_pair()).train()
    theirs[1].track_running_stats = False
    ours = fnn.FusedConvBNAct.from_torch(copy.deepcopy(theirs))
    x = rows(2, 4, 5, 5)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert_equal_state(ours, theirs)
    theirs.eval(), ours.eval()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


# -- what modules can do ---------------------------------------------------------------------------

MODULES = {
    "EmbeddingPosition": lambda: (fnn.EmbeddingPosition(20, D, 6, token_types=2, layer_norm=True), *tokens()),
    "FusedConv2dBNReLU": lambda: (fnn.FusedConv2dBNReLU(4, 6, 3), rows(2, 4, 5, 5)),
    "FusedConvBNAct": lambda: (fnn.FusedConvBNAct(*conv_pair(), "silu"), rows(2, 4, 5, 5)),
    "FusedCrossEntropyLoss": lambda: (fnn.FusedCrossEntropyLoss(z_loss=0.1), rows(4, 9),
                                      torch.tensor([1, 2, 3, 8])),
    "FusedGEGLU": lambda: (fnn.FusedGEGLU(D, H), rows()),
    "FusedLayerNorm": lambda: (fnn.FusedLayerNorm(D, activation=nn.LeakyReLU(0.2)), rows()),
    "FusedLayerNormGELU": lambda: (fnn.FusedLayerNormGELU(D), rows()),
    "FusedLayerNormReLU": lambda: (fnn.FusedLayerNormReLU(D), rows()),
    "FusedLinear": lambda: (fnn.FusedLinear(D, H, activation=doubled_relu), rows()),
    "FusedLinearCrossEntropyLoss": lambda: (fnn.FusedLinearCrossEntropyLoss(), rows(9, D), rows(4, D),
                                            torch.tensor([1, 2, 3, 8])),
    **{f"FusedLinear{name}": lambda name=name: (getattr(fnn, f"FusedLinear{name}")(D, H), rows())
       for name in ("GELU", "GELUTanh", "Mish", "ReLU", "SiLU", "Sigmoid", "Tanh")},
    "FusedMLP": lambda: (fnn.FusedMLP(D, H), rows()),
    "FusedRMSNorm": lambda: (fnn.FusedRMSNorm(D), rows()),
    "FusedSwiGLU": lambda: (fnn.FusedSwiGLU(D, H, packed=True), rows()),
}
OF_ATTENTION = {"FusedMultiheadAttention", "TransformerBlock", "TransformerDecoderBlock"}  # in their own file
COMPILED = ("EmbeddingPosition", "FusedConv2dBNReLU", "FusedCrossEntropyLoss", "FusedLayerNorm",
            "FusedLinear", "FusedLinearCrossEntropyLoss", "FusedMLP", "FusedRMSNorm", "FusedSwiGLU")


def test_every_class_is_tested():
    assert {*MODULES, *OF_ATTENTION} == {name for name in fnn.__all__ if name[0].isupper()}


@pytest.mark.parametrize("name", MODULES)
def test_copies_pickles_and_moves(name):
    module, *inputs = MODULES[name]()
    assert type(module).__name__ == name and repr(module).startswith(name)
    module.eval()
    expected = module(*inputs)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert torch.equal(other(*inputs), expected)
        assert repr(other) == repr(module)
    assert not {id(p) for p in copy.deepcopy(module).parameters()} & {id(p) for p in module.parameters()}
    wide = module.double()(*(t.double() if t.is_floating_point() else t for t in inputs))
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_as_one_graph(name):
    module, *inputs = MODULES[name]()
    state = copy.deepcopy(module.state_dict())
    expected = outcome(module, module, inputs)
    trained = copy.deepcopy(module.state_dict())
    module.load_state_dict(state)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for a, b in zip(outcome(compiled, module, inputs), expected, strict=True):
        torch.testing.assert_close(a, b)
    for name, t in module.state_dict().items():
        torch.testing.assert_close(t, trained[name])


@pytest.mark.parametrize("name", ["FusedConv2dBNReLU", "FusedLinearGELU", "FusedMLP", "FusedSwiGLU"])
def test_autocast(name, device):
    module, *inputs = MODULES[name]()
    module.to(device)
    inputs = [t.to(device) for t in inputs]
    expected = outcome(module, module, inputs)
    with torch.autocast(device, torch.bfloat16):
        out = module(*inputs)
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.float().sum(), module.parameters())
    assert all(g.dtype == torch.float32 for g in grads)
    torch.testing.assert_close(out.float(), expected[0], rtol=0.1, atol=0.05)
    for g, e in zip(grads, expected[2:], strict=True):
        assert (g - e).abs().max() <= 0.05 * max(e.abs().max(), 1)


def test_repr_says_what_is_special():
    assert repr(fnn.FusedLinear(3, 4, activation=nn.LeakyReLU(0.2), dropout=0.1)) == (
        "FusedLinear(in_features=3, out_features=4, bias=True, activation=leaky_relu(negative_slope=0.2), "
        "dropout=0.1)")
    assert repr(fnn.FusedLinearReLU(3, 4)) == "FusedLinearReLU(in_features=3, out_features=4, bias=True)"
    assert "activation=relu" in repr(fnn.FusedLayerNorm(3, activation=fusionrt.relu))
    assert "weight_offset=1" in repr(fnn.FusedRMSNorm(3, weight_offset=1))
    assert "activation=silu" in repr(fnn.FusedConvBNAct(*conv_pair(), F.silu))
    assert "approximate='tanh'" in repr(fnn.FusedGEGLU(3, 4, approximate="tanh"))
    assert repr(fnn.FusedLinearCrossEntropyLoss(softcap=30.0)) == "FusedLinearCrossEntropyLoss(softcap=30.0)"


# -- errors ----------------------------------------------------------------------------------------

class Linear(nn.Linear):
    pass


ERRORS = {
    "unknown name": (lambda: fnn.FusedLinear(2, 2, activation="swoosh"), ValueError,
                     "FusedLinear: activation must be None, .*, or one of elu, gelu, .*, got 'swoosh'"),
    "no activation": (lambda: fnn.FusedLinear(2, 2, activation=3), TypeError,
                      "FusedLinear: activation must be None, a name, or a function of .*, got int"),
    "module": (lambda: fnn.FusedLinear(2, 2, activation=nn.PReLU()), TypeError, "got a PReLU"),
    "class": (lambda: fnn.FusedLinear(2, 2, activation=nn.GELU), TypeError,
              r"FusedLinear: activation must be None, .*, got the class GELU: write GELU\(\)"),
    "of a row": (lambda: fnn.FusedLinear(2, 2, activation=nn.Softmax(-1)), fusionrt.TraceError,
                 r"torch\.softmax cannot be fused"),
    "of text": (lambda: fnn.FusedLinear(2, 2, activation=lambda y: "y"), TypeError,
                  "FusedLinear: activation must give one traced value, got str"),
    "options beside modules": (lambda: fnn.FusedConv2dBNReLU(*conv_pair(), padding=1, eps=1.0), TypeError,
                               "FusedConv2dBNReLU: of a Conv2d and a BatchNorm2d, which have their own "
                               "options, got padding, eps"),
    "of other images": (lambda: fnn.FusedConv2dBNReLU(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2)), TypeError,
                        "FusedConv2dBNReLU: conv must be a torch.nn.Conv2d"),
    "fixed": (lambda: fnn.FusedLinearReLU(2, 2, activation="gelu"), TypeError,
              "FusedLinearReLU: the activation is relu, got activation='gelu'"),
    "dropout": (lambda: fnn.FusedLinear(2, 2, dropout=1.5), ValueError,
                r"FusedLinear: dropout must be a probability in \[0, 1\], got 1.5"),
    "kind": (lambda: fnn.FusedLinear.from_torch(nn.Bilinear(2, 2, 2)), TypeError,
             "FusedLinear: module must be a torch.nn.Linear, not of a class derived from it, got "
             "torch.nn.modules.linear.Bilinear"),
    "derived": (lambda: fnn.FusedLinearReLU.from_torch(Linear(2, 2)), TypeError, "got test_nn.Linear"),
    "offset": (lambda: fnn.FusedRMSNorm(2, weight_offset=2), ValueError,
               "FusedRMSNorm: weight_offset must be 0 or 1, got 2"),
    "bn": (lambda: fnn.FusedConv2dBNReLU(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(3)), ValueError,
           "FusedConv2dBNReLU: bn must have conv's 2 channels, got 3"),
    "bn's kind": (lambda: fnn.FusedConvBNAct(nn.Conv2d(1, 2, 3), nn.SyncBatchNorm(2)), TypeError,
                  "FusedConvBNAct: bn must be a torch.nn.BatchNorm2d, .* got .*SyncBatchNorm"),
    "no kernel size": (lambda: fnn.FusedConv2dBNReLU(1, 2), TypeError,
                       "FusedConv2dBNReLU: takes a Conv2d and a BatchNorm2d, or numbers of channels and a "
                       "kernel_size, got int, int and no kernel_size"),
    "long": (lambda: fnn.FusedConvBNAct.from_torch(nn.Sequential(*conv_pair(), nn.ReLU(), nn.ReLU())),
             ValueError, "FusedConvBNAct: module must hold a convolution, a batch norm and at most an "
             "activation, got 4 modules"),
    "other activation": (lambda: fnn.FusedConv2dBNReLU.from_torch(nn.Sequential(*conv_pair(), nn.SiLU())),
                         ValueError, "FusedConv2dBNReLU: the activation is relu, got a module with silu"),
    "mlp": (lambda: fnn.FusedMLP.from_torch(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), ValueError,
            "FusedMLP: module must hold a Linear, an activation, perhaps a Dropout, and a Linear, "
            "got Linear, ReLU"),
    "widths": (lambda: fnn.FusedMLP.from_modules(nn.Linear(2, 3), nn.Linear(4, 2)), ValueError,
               "FusedMLP: linear2 must take the 3 features of linear1, got 4"),
    "act_fn": (lambda: fnn.FusedSwiGLU.from_torch(LlamaMLP(nn.ReLU())), TypeError,
               "FusedSwiGLU: module must have an act_fn that is silu, got relu"),
    "no gate": (lambda: fnn.FusedSwiGLU.from_modules(None, None, nn.Linear(2, 2)), TypeError,
                "FusedSwiGLU: gate_up_proj must be a torch.nn.Linear"),
    "approximate": (lambda: fnn.FusedGEGLU(2, 2, approximate="sinh"), ValueError, "FusedGEGLU: approximate"),
    "max_norm": (lambda: fnn.EmbeddingPosition.from_modules(nn.Embedding(2, 2, max_norm=1.0)), ValueError,
                 "EmbeddingPosition: word has max_norm=1.0, which is not supported"),
    "position": (lambda: fnn.EmbeddingPosition.from_modules(nn.Embedding(2, 2), nn.Linear(2, 2)), TypeError,
                 "EmbeddingPosition: position must be a torch.nn.Embedding"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, kind, text = ERRORS[case]
    with pytest.raises(kind, match=text):
        call()


COMPUTED = {
    "linear": lambda: (nn.Linear(D, H), "weight", lambda m: fnn.FusedLinear.from_torch(m, "relu")),
    "layer norm": lambda: (nn.LayerNorm(D), "weight", fnn.FusedLayerNorm.from_torch),
    "attention": lambda: (nn.MultiheadAttention(H, 2), "in_proj_weight",
                          fnn.FusedMultiheadAttention.from_torch),
    "mlp": lambda: ((mlp := nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D)))[0], "weight",
                    lambda m: fnn.FusedMLP.from_torch(mlp)),
    "block": lambda: ((layer := nn.TransformerEncoderLayer(H, 2, D)).linear1, "weight",
                      lambda m: fnn.TransformerBlock.from_torch(layer)),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_weights_that_hooks_compute_are_refused(case):
    """They are no parameters: what was shared would be of one moment, or of the meta device."""
    module, name, convert = COMPUTED[case]()
    prune.l1_unstructured(module, name, 0.5)
    with pytest.raises(TypeError, match=f"the {name} of .* must be a parameter, not computed"):
        convert(module)
    prune.remove(module, name)
    convert(module)
