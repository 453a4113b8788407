"""fusionrt.nn: children that modules call, because their tensors do not say all that a call would compute."""

import copy

import pytest
import torch
from module_checks import outcome
from test_nn import D, H, conv_pair, gated, gelu_tanh, rows, tokens
from torch import nn
from torch.nn import functional as F

from fusionrt import nn as fnn


class Doubled(nn.Module):
    """In the place of a layer, with its weight, as LoRA's layers."""

    def __init__(self, base):
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, getattr(base, "bias", None)

    def forward(self, x):
        return 2 * self.base(x)


def doubled_by_a_hook(layer):
    layer.register_forward_hook(lambda module, args, out: 2 * out)
    return layer


def doubled_by_a_method(layer):
    forward = layer.forward
    layer.forward = lambda x: 2 * forward(x)
    return layer


def doubled_before_calls(layer):
    """As by the hook of weight_norm, which is outdated, or of prune."""
    weight = layer._parameters.pop("weight")
    layer.register_parameter("weight_half", weight)
    layer.weight = torch.zeros_like(weight)
    layer.register_forward_pre_hook(lambda module, args: setattr(module, "weight", 2 * module.weight_half))
    return layer


def doubled_by_parametrization(layer):
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    return nn.utils.parametrize.register_parametrization(layer, "weight", Double())


def fed_forward(m, x):
    y = m.norm1(x + m.self_attn(x, x, x)[0])
    return m.norm2(y + m.linear2(F.relu(m.linear1(y))))


CHILDREN = {
    "linear1": (lambda: fnn.FusedMLP(D, H, activation="silu"), lambda m, x: m.linear2(F.silu(m.linear1(x)))),
    "linear2": (lambda: fnn.TransformerBlock(D, 1, H, 0.0), fed_forward),
    "gate_up_proj": (lambda: fnn.FusedSwiGLU(D, H, packed=True), gated(F.silu)),
    "up_proj": (lambda: fnn.FusedGEGLU(D, H, approximate="tanh"), gated(gelu_tanh)),
    "0": (lambda: fnn.FusedConvBNAct(*conv_pair(), "silu"), lambda m, x: F.silu(m.bn(m.conv(x)))),
    "1": (lambda: fnn.FusedConv2dBNReLU(*conv_pair()), lambda m, x: F.relu(m.bn(m.conv(x)))),
    "position_embeddings": (
        lambda: fnn.EmbeddingPosition(20, D, 4, layer_norm=True, scale=3.0),
        lambda m, x: m.LayerNorm(3 * m.word_embeddings(x) + m.position_embeddings(torch.arange(4)))),
    "LayerNorm": (lambda: fnn.EmbeddingPosition(20, D, layer_norm=True),
                  lambda m, x: m.LayerNorm(m.word_embeddings(x))),
}
WAYS = (Doubled, doubled_by_a_hook, doubled_by_a_method, doubled_before_calls, doubled_by_parametrization)


def with_doubled(name, double):
    """A module with one child that is another, what it should compute, and an input."""
    make, reference = CHILDREN[name]
    module = make()
    module.add_module(name, double(module.get_submodule(name)))
    return module, reference, tokens()[0] if "LayerNorm" in module._modules else (
        rows(2, 4, 5, 5) if name in "01" else rows())


@pytest.mark.covering(1)
@pytest.mark.parametrize("double", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", CHILDREN)
def test_children_that_are_more_than_their_tensors_are_called(name, double):
    module, reference, x = with_doubled(name, double)
    expected = outcome(lambda x: reference(module, x), module, [x])
    for a, b in zip(outcome(module, module, [x]), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", CHILDREN)
def test_compiles_with_a_child_that_is_called(name):
    module, _, x = with_doubled(name, Doubled)
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="eager")(x), module(x))


def test_called_with_a_residual_and_dropout(monkeypatch):
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", lambda self, z: 2 * z)  # it needs a GPU
    block = fnn.FusedConvBNAct(*conv_pair(), "silu")
    block = nn.SyncBatchNorm.convert_sync_batchnorm(block)
    x, residual = rows(2, 4, 5, 5), rows(2, 6, 3, 3)
    torch.testing.assert_close(block(x, residual), F.silu(2 * block.conv(x) + residual))
    dropping = fnn.FusedMLP(D, H, dropout=1.0)
    doubled_by_a_hook(dropping.linear1)
    torch.testing.assert_close(dropping(rows()), dropping.linear2.bias.expand(5, D))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("names", [("dropout", "dropout1", "dropout2"), ("norm1", "norm2"),
                                   ("norm2", "dropout2")], ids=str)
def test_other_modules_in_the_place_of_dropouts_and_norms(names, norm_first):
    theirs = nn.TransformerEncoderLayer(D, 2, H, 0.0, batch_first=True, norm_first=norm_first)
    ours = fnn.TransformerBlock(D, 2, H, 0.0, batch_first=True, norm_first=norm_first)
    ours.load_state_dict(theirs.state_dict())
    for name in names:
        other = nn.RMSNorm(D) if name.startswith("norm") else nn.Tanh()
        for module in (theirs, ours):
            module.add_module(name, other)
    x = rows(2, 3, D)
    torch.testing.assert_close(ours(x), theirs(x))


def test_a_norm_with_an_activation_is_called():
    module = fnn.EmbeddingPosition(20, D, 4, layer_norm=True)
    module.LayerNorm = fnn.FusedLayerNormReLU(D)
    x = tokens()[0]
    torch.testing.assert_close(module(x), F.relu(F.layer_norm(
        module.word_embeddings(x) + module.position_embeddings(torch.arange(x.shape[1])), (D,))))


def test_ids_of_tables_that_are_called():
    made = fnn.EmbeddingPosition(50, 8, 16)
    hooked = copy.deepcopy(made)
    hooked.word_embeddings.register_forward_hook(lambda *_: None)
    tokens, places = torch.randint(0, 50, (7,)), torch.arange(7)
    for ids in (None, places, places[None]):
        torch.testing.assert_close(hooked(tokens, None, ids), made(tokens, None, ids))
    for module in (made, hooked):
        with pytest.raises(ValueError, match="must have the shape"):
            module(tokens, None, places[:, None])


def test_tables_that_do_more_are_called():
    made = fnn.EmbeddingPosition(20, 8, 16)
    made.word_embeddings = torch.nn.Embedding(20, 8, max_norm=0.1)
    made(torch.tensor([[2, 3, 4]]))
    assert made.word_embeddings.weight[2].norm() <= 0.1001
    made.word_embeddings = torch.nn.Embedding(20, 8, sparse=True)
    made(torch.tensor([[2, 3, 4]])).sum().backward()
    assert made.word_embeddings.weight.grad.is_sparse


def test_hooks_of_all_modules_are_heard():
    """What children would compute is then not read from their tensors."""
    mlp, x, seen = fnn.FusedMLP(4, 6), torch.randn(3, 4), []
    with torch.no_grad():
        plain = mlp(x)

    def hook(module, args, out):
        seen.append(type(module).__name__)
        return out * 2 if type(module) is nn.Linear else out

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        with torch.no_grad():
            hooked = mlp(x)
    finally:
        handle.remove()
    assert seen == ["Linear", "Linear", "FusedMLP"]
    assert not torch.allclose(plain, hooked)
