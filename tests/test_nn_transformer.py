"""fusionrt.nn: attention and transformer blocks against torch's layers."""

import copy
import pickle

import pytest
import torch
from checking import captured
from module_checks import assert_equal_state, assert_loads_both_ways, check_module, first, outcome
from torch import nn
from torch.nn import functional as F

import fusionrt
from fusionrt import nn as fnn
from fusionrt.bench import profile
from fusionrt.nn.sharing import share

E, HEADS, N, L, S = 16, 4, 2, 5, 7
causal_mask = nn.Transformer.generate_square_subsequent_mask
floats = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def made(kind, *args, **kwargs):
    """With biases and weights of norms that show where they are forgotten."""
    module = kind(*args, **kwargs)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.3)
            elif "in_proj" in name:
                p.mul_(3)
    return module


def padding(rows=N, keys=S):
    mask = torch.zeros(rows, keys, dtype=torch.bool)
    mask[0, -2:] = True
    return mask


def added(mask):
    return torch.zeros(mask.shape).masked_fill(mask, -torch.inf)


def unseen(queries=L, keys=S):
    mask = torch.rand(queries, keys) < 0.4
    mask[:, 0] = False
    return mask


# -- attention -------------------------------------------------------------------------------------

def torchs_attention(m):
    """torch's module on the parameters of ours."""
    return share(nn.MultiheadAttention(m.embed_dim, m.num_heads, bias=m.in_proj_bias is not None, kdim=m.kdim,
                                       vdim=m.vdim, batch_first=m.batch_first, device="meta"), m)


def three(inputs):
    """Query, key and value, of which the last ones may be the same."""
    return [*inputs, *inputs[-1:] * (3 - len(inputs))]


class Fast(nn.Module):
    """An attention without its weights."""

    def __init__(self, inner, masks):
        super().__init__()
        self.inner, self.masks = inner, masks

    def forward(self, *inputs):
        return self.inner(*three(inputs), **self.masks, need_weights=False)[0]


ATTENTION = {  # options of the module, shapes of query, key and value, what else the call gets
    "self": ({}, [(L, N, E)], {}),
    "batch first": ({"batch_first": True}, [(N, L, E)], {}),
    "alone": ({"bias": False}, [(L, E)], {}),
    "memory": ({"batch_first": True}, [(N, L, E), (N, S, E)], {}),
    "three": ({}, [(L, N, E), (S, N, E), (S, N, E)], {}),
    "other widths": ({"kdim": 6, "vdim": 9}, [(L, N, E), (S, N, 6), (S, N, 9)], {}),
    "mask": ({}, [(L, N, E), (S, N, E)], {"attn_mask": unseen()}),
    "mask a head": ({"batch_first": True}, [(N, L, E), (N, S, E)],
                    {"attn_mask": torch.randn(N * HEADS, L, S)}),
    "padding": ({"batch_first": True}, [(N, L, E), (N, S, E)], {"key_padding_mask": padding()}),
    "both": ({}, [(L, N, E), (S, N, E)], {"key_padding_mask": padding(), "attn_mask": unseen()}),
    "added": ({}, [(L, N, E), (S, N, E)], {"attn_mask": torch.randn(L, S),
                                           "key_padding_mask": added(padding())}),
    "causal": ({"batch_first": True}, [(N, L, E)], {"attn_mask": causal_mask(L), "is_causal": True}),
    "causal, padding": ({}, [(L, N, E)], {"attn_mask": causal_mask(L), "is_causal": True,
                                          "key_padding_mask": added(padding(N, L))}),
}


WITH_WEIGHTS = ("self", "alone", "added", "causal")  # of each kind one: it is a kernel to be compiled


@pytest.mark.parametrize("case", ATTENTION)
def test_attention(case, device):
    options, shapes, masks = ATTENTION[case]
    module = made(fnn.FusedMultiheadAttention, E, HEADS, **options).to(device, torch.float64)
    given = [torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes]
    masks = {k: v.to(device) if torch.is_tensor(v) else v for k, v in masks.items()}
    masks = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in masks.items()}

    check_module(Fast(module, masks), lambda m, *x: Fast(torchs_attention(m.inner), masks)(*x), *given)
    for average in (True, False) if case in WITH_WEIGHTS else ():
        found, expected = (m(*three(given), **masks, average_attn_weights=average)
                           for m in (module, torchs_attention(module)))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def grouped_and_turned(m, x):
    """softmax(q k^T) v of a module with batch_first, causal, rotary and fewer heads of keys, written out."""
    columns = m.num_kv_heads * m.head_dim
    q, k, v = (t.unflatten(-1, (-1, m.head_dim)).transpose(1, 2) for t in F.linear(
        x, m.in_proj_weight, m.in_proj_bias).split([m.embed_dim, columns, columns], -1))
    if m.rotary is not None:
        q, k = fusionrt.rotary_embedding.reference(q, k, layout="bhsd", **m.rotary)
    k, v = (t.repeat_interleave(m.num_heads // m.num_kv_heads, 1) for t in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=m.causal)
    return m.out_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.covering(1)
@floats
@pytest.mark.parametrize("options", [
    {"num_kv_heads": 2}, {"rotary": True, "causal": True},
    {"num_kv_heads": 1, "rotary": {"base": 500.0, "rotary_dim": 2, "interleaved": True}, "causal": True}],
    ids=["grouped", "rotary", "all"])
def test_attention_of_language_models(options, dtype, device):
    module = made(fnn.FusedMultiheadAttention, E, HEADS, batch_first=True, **options).to(device, dtype)

    x = torch.randn(N, L, E, device=device).to(dtype)
    check_module(Fast(module, {}), lambda m, x: grouped_and_turned(m.inner, x), x)
    found, weights = module(x, x, x)
    torch.testing.assert_close(found, module(x, x, x, need_weights=False)[0])
    torch.testing.assert_close(weights.sum(-1), torch.ones(N, L, device=device, dtype=dtype))


def test_positions_turn_queries_and_keys(device):
    module = made(fnn.FusedMultiheadAttention, E, HEADS, batch_first=True, rotary=True).to(device)
    x = torch.randn(N, L, E, device=device)
    usual = module(x, x, x, need_weights=False)[0]
    for shift, same in ((torch.arange(L) + 3, True), (torch.arange(L) * 2, False)):
        found = module(x, x, x, need_weights=False, position_ids=shift.to(device))[0]
        assert torch.allclose(found, usual, rtol=1e-4, atol=1e-5) == same


def test_causality_and_a_mask_count_both(device):
    module = made(fnn.FusedMultiheadAttention, E, HEADS, causal=True).to(device)
    plain = torchs_attention(module)
    x, extra = torch.randn(L, N, E, device=device), torch.randn(L, L, device=device)
    both = extra + causal_mask(L, device=device)
    torch.testing.assert_close(module(x, x, x, attn_mask=extra, need_weights=False)[0],
                               plain(x, x, x, attn_mask=both, need_weights=False)[0])
    hidden, far = padding(N, L).to(device), (extra > 1).fill_diagonal_(False)
    torch.testing.assert_close(
        module(x, x, x, hidden, attn_mask=far, need_weights=False)[0][:3],  # before all is hidden
        plain(x, x, x, hidden, attn_mask=far | (both == -torch.inf), need_weights=False)[0][:3])


def test_a_query_that_sees_nothing_gets_zeros(device):
    module = made(fnn.FusedMultiheadAttention, E, HEADS, batch_first=True, bias=False).to(device)
    x = torch.randn(N, L, E, device=device, requires_grad=True)
    hidden = torch.zeros(N, L, dtype=torch.bool, device=device)
    hidden[1] = True
    out = module(x, x, x, hidden, need_weights=False)[0]
    out.sum().backward()
    assert out[1].abs().max() == 0 and out[0].abs().min() > 0
    torch.testing.assert_close(module(x, x, x, hidden)[0], out)
    assert x.grad.isfinite().all() and module.in_proj_weight.grad.isfinite().all()


def test_attention_drops_in_training_only(device):
    module = made(fnn.FusedMultiheadAttention, E, HEADS, dropout=0.5, batch_first=True).to(device)
    x = torch.randn(N, 32, E, device=device)
    weights = module(x, x, x, average_attn_weights=False)[1]
    plain = module.eval()(x, x, x, average_attn_weights=False)
    kept = weights != 0
    assert abs(kept.double().mean() - 0.5) < 0.05
    torch.testing.assert_close(weights[kept], 2 * plain[1][kept])
    torch.testing.assert_close(module(x, x, x, need_weights=False)[0], plain[0])
    assert not torch.allclose(module.train()(x, x, x, need_weights=False)[0], plain[0])


# -- blocks ----------------------------------------------------------------------------------------

def torchs_block(m, kind):
    """torch's layer on the parameters of ours."""
    layer = kind(m.self_attn.embed_dim, HEADS, 24, 0.0, m.activation, batch_first=m.self_attn.batch_first,
                 norm_first=m.norm_first, device="meta")
    for name, child in m.named_children():
        if isinstance(child, nn.MultiheadAttention):
            child = torchs_attention(child)
        elif isinstance(child, nn.LayerNorm):
            child = torchs_norm(child)
        layer.add_module(name, child)
    return layer


def torchs_norm(m):
    return share(nn.LayerNorm(m.normalized_shape, m.eps, device="meta"), m)


# Each dtype of each is kernels that a CPU test has to compile.
@pytest.mark.parametrize(("norm_first", "dtype"), [(False, torch.float32), (True, torch.float64)],
                         ids=["post", "pre"])
def test_encoder_block(norm_first, dtype, device):
    block = made(fnn.TransformerBlock, E, HEADS, 24, 0.0, "gelu", norm_first=norm_first).to(device, dtype)
    x = torch.randn(L, N, E, device=device).to(dtype)
    check_module(block, lambda m, x: torchs_block(m, nn.TransformerEncoderLayer)(x), x)
    mask = causal_mask(L, device=device, dtype=dtype)
    masks = mask, added(padding(N, L)).to(device, dtype), True
    layer = torchs_block(block, nn.TransformerEncoderLayer)
    torch.testing.assert_close(block(x, *masks), layer(x, *masks), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_decoder_block(norm_first, device):
    block = made(fnn.TransformerDecoderBlock, E, HEADS, 24, 0.0, "gelu", batch_first=True,
                 norm_first=norm_first)
    block.to(device, torch.float64)
    x, memory = (torch.randn(N, n, E, device=device, dtype=torch.float64) for n in (L, S))
    check_module(block, lambda m, *inputs: torchs_block(m, nn.TransformerDecoderLayer)(*inputs), x, memory)
    layer = torchs_block(block, nn.TransformerDecoderLayer)
    masks = [unseen(L, L), unseen(L, S), padding(N, L), padding(N, S)]
    masks[2].zero_()
    masks = [mask.to(device) for mask in masks]
    torch.testing.assert_close(block(x, memory, *masks), layer(x, memory, *masks), rtol=1e-12, atol=1e-12)


def llama(columns=E, dropout=0.0):
    return made(fnn.TransformerBlock, columns, HEADS, 24, dropout, "silu", 1e-6, True, True, False,
                norm="rms_norm", gated=True, causal=True, rotary=True, num_kv_heads=2)


def llama_formula(m, x):
    x = x + grouped_and_turned(m.self_attn, F.rms_norm(x, x.shape[-1:], m.norm1.weight, 1e-6))
    gate, up = m.linear1(F.rms_norm(x, x.shape[-1:], m.norm2.weight, 1e-6)).chunk(2, -1)
    return x + m.linear2(F.silu(gate) * up)


def test_llamas_block(device):
    check_module(llama().to(device), llama_formula, torch.randn(N, L, E, device=device))


def test_geglu_and_recomputation(device):
    block = made(fnn.TransformerBlock, E, HEADS, 24, 0.0, "gelu_tanh", batch_first=True, gated=True,
                 recompute=True)

    def reference(m, x):
        x = torchs_norm(m.norm1)(x + torchs_attention(m.self_attn)(x, x, x, need_weights=False)[0])
        gate, up = m.linear1(x).chunk(2, -1)
        return torchs_norm(m.norm2)(x + m.linear2(F.gelu(gate, approximate="tanh") * up))

    check_module(block.to(device, torch.float64), reference, torch.randn(N, L, E, device=device).double())


def test_every_dropout_of_a_block_counts(device):
    """As in torch's layer each has its own probability and mode."""
    block = made(fnn.TransformerBlock, E, HEADS, 24, 0.5, batch_first=True).to(device)
    x = torch.randn(N, L, E, device=device)
    plain = block.eval()(x)
    torch.testing.assert_close(plain, torchs_block(block, nn.TransformerEncoderLayer).eval()(x))
    block.train()
    block.self_attn.dropout = 0.0
    drops = [block.dropout, block.dropout1, block.dropout2]
    for drop in drops:
        for other in drops:
            other.p = 0.5 if other is drop else 0.0
        assert not torch.allclose(block(x), plain)
        drop.eval()
        torch.testing.assert_close(block(x), plain)
        drop.train()
    for drop in drops:
        drop.p = 0.0
    block.self_attn.dropout = 0.5
    assert not torch.allclose(block(x), plain)


def test_blocks_take_the_nested_tensors_of_torchs_encoder():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, HEADS, 24, batch_first=True), 2).eval()
    x, hidden = torch.randn(N, L, E), padding(N, L)
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=hidden)
        for i, one in enumerate(encoder.layers):
            encoder.layers[i] = fnn.TransformerBlock.from_torch(one)
        found = encoder(x, src_key_padding_mask=hidden)
    assert found[0, -1].abs().max() == 0
    torch.testing.assert_close(found, expected)


def test_what_else_is_given_with_a_nested_tensor():
    block = made(fnn.TransformerBlock, E, HEADS, 24, 0.0, batch_first=True, rotary=True)
    x, ids = torch.randn(2, L, E), torch.randint(9, (L,))
    nested = torch.nested.as_nested_tensor([x[0], x[1, :3]])
    for options in ({"is_causal": True}, {"src_mask": causal_mask(L)}, {"position_ids": ids}):
        whole = block(x, **options, src_key_padding_mask=torch.arange(L) >= torch.tensor([[L], [3]]))
        found = block(nested, **options).unbind()
        torch.testing.assert_close(found, (whole[0], whole[1, :3]))
    with pytest.raises(ValueError, match="TransformerBlock: a nested src needs batch_first and no src_key"):
        block(nested, src_key_padding_mask=torch.zeros(2, L, dtype=torch.bool))


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_blocks_take_the_place_of_layers_in_torchs_stacks(norm_first):
    layer = nn.TransformerEncoderLayer(E, HEADS, 24, 0.1, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(E), enable_nested_tensor=False)
    layer = nn.TransformerDecoderLayer(E, HEADS, 24, 0.1, batch_first=True, norm_first=norm_first)
    decoder = nn.TransformerDecoder(layer, 2)
    x, memory, mask = torch.randn(N, L, E), torch.randn(N, L, E), causal_mask(L)
    hidden = added(padding(N, L))
    for stack, block, call in ((encoder, fnn.TransformerBlock, lambda m: m(x, mask, hidden)),
                               (decoder, fnn.TransformerDecoderBlock, lambda m: m(x, memory, mask))):
        stack.eval()
        expected, state = call(stack), stack.state_dict()
        for i, one in enumerate(stack.layers):
            stack.layers[i] = block.from_torch(one)
        torch.testing.assert_close(call(stack), expected)
        assert_equal_state(stack, copy.deepcopy(stack))
        stack.load_state_dict(state)


# -- on a GPU --------------------------------------------------------------------------------------

def of_a_gpu():
    """Of widths that fast kernels take; a formula of torch's for each."""
    def encoder(m, x):
        layer = torchs_block(m, nn.TransformerEncoderLayer)
        return layer(x)

    plain = made(fnn.TransformerBlock, 256, HEADS, 512, 0.0, "gelu", batch_first=True, norm_first=True)
    return [(plain, encoder), (llama(256), llama_formula)]


@pytest.mark.gpu
@pytest.mark.parametrize("index", [0, 1], ids=["encoder", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_blocks_are_as_accurate_as_torchs(index, dtype):
    block, formula = of_a_gpu()[index]
    check_module(block.to("cuda", dtype), formula, torch.randn(2, 128, 256, device="cuda").to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("index", [0, 1], ids=["encoder", "llama"])
@torch.no_grad()
def test_blocks_in_a_cuda_graph_and_with_fewer_kernels(index):
    block, formula = of_a_gpu()[index]
    block.to("cuda", torch.bfloat16).eval()
    x = torch.randn(2, 128, 256, device="cuda").bfloat16()
    graph, out = captured(lambda: block(x))
    for _ in range(2):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(out, block(x), rtol=0.02, atol=0.02)
    with torch.enable_grad():  # without, torch's layer is one op of its own
        theirs = profile.launches(lambda: formula(block, x), x.device)
    assert profile.launches(lambda: block(x), x.device) < theirs


# -- weights of torch's layers ---------------------------------------------------------------------

def test_weights_load_both_ways():
    x, memory = torch.randn(L, N, E), torch.randn(S, N, E)
    options = {"kdim": 6, "vdim": 9}
    assert_loads_both_ways(fnn.FusedMultiheadAttention(E, HEADS), nn.MultiheadAttention(E, HEADS), x, x, x)
    assert_loads_both_ways(fnn.FusedMultiheadAttention(E, HEADS, **options), nn.MultiheadAttention(
        E, HEADS, **options), x, memory[..., :6], memory[..., :9])
    assert_loads_both_ways(fnn.TransformerBlock(E, HEADS, 24), nn.TransformerEncoderLayer(E, HEADS, 24), x)
    assert_loads_both_ways(fnn.TransformerBlock(E, HEADS, 24, bias=False, norm_first=True),
                           nn.TransformerEncoderLayer(E, HEADS, 24, bias=False, norm_first=True), x)
    assert_loads_both_ways(fnn.TransformerDecoderBlock(E, HEADS, 24),
                           nn.TransformerDecoderLayer(E, HEADS, 24), x, memory)


@pytest.mark.parametrize("activation", [F.relu, F.gelu, nn.GELU("tanh"), "relu"],
                         ids=["relu", "gelu", "module", "name"])
def test_from_torch_shares_the_parameters(activation):
    x, memory = torch.randn(N, L, E).double(), torch.randn(N, S, E).double()
    options = E, HEADS, 24, 0.1, activation, 1e-3, True
    for kind, theirs, inputs in (
            (fnn.FusedMultiheadAttention, nn.MultiheadAttention(E, HEADS, 0.1, batch_first=True),
             (x, memory, memory)),
            (fnn.TransformerBlock, nn.TransformerEncoderLayer(*options), (x,)),
            (fnn.TransformerDecoderBlock, nn.TransformerDecoderLayer(*options), (x, memory))):
        ours = kind.from_torch(theirs.double().eval())
        assert not ours.training
        assert_equal_state(ours, theirs)
        assert all(a is b for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
        torch.testing.assert_close(first(ours(*inputs)), first(theirs(*inputs)), rtol=1e-12, atol=1e-12)
        assert kind.from_torch(theirs.train()).training


def test_parts_with_two_names_keep_both():
    x, values = torch.randn(N, L, E), torch.randn(N, L, 7)
    layer = nn.TransformerEncoderLayer(E, HEADS, 24, 0.1, batch_first=True).eval()
    layer.dropout1 = layer.dropout2 = layer.dropout
    layer.norm2 = layer.norm1
    ours = fnn.TransformerBlock.from_torch(layer)
    assert ours.dropout1 is ours.dropout2 is layer.dropout
    assert ours.norm1 is ours.norm2
    torch.testing.assert_close(ours(x), layer(x), rtol=1e-4, atol=1e-5)
    tied = nn.MultiheadAttention(E, HEADS, kdim=E, vdim=7, batch_first=True)
    tied.k_proj_weight = tied.q_proj_weight
    ours = fnn.FusedMultiheadAttention.from_torch(tied)
    assert ours.k_proj_weight is tied.q_proj_weight
    torch.testing.assert_close(ours(x, x, values)[0], tied(x, x, values)[0], rtol=1e-4, atol=1e-5)
    linear = nn.Linear(E, E)
    mlp = nn.Sequential(linear, nn.ReLU(), linear)
    torch.testing.assert_close(fnn.FusedMLP.from_torch(mlp)(x), mlp(x), rtol=1e-4, atol=1e-5)


def test_blocks_of_layers_that_are_fused_already():
    layer = nn.TransformerEncoderLayer(E, HEADS, 24, 0.0)
    x = torch.randn(L, N, E)
    expected = layer(x)
    layer.self_attn = fnn.FusedMultiheadAttention.from_torch(layer.self_attn)
    layer.norm1 = fnn.FusedLayerNorm.from_torch(layer.norm1)
    torch.testing.assert_close(layer(x), expected)
    block = fnn.TransformerBlock.from_torch(layer)
    torch.testing.assert_close(block(x), expected)
    assert block.self_attn is layer.self_attn


def test_torchs_own_fast_path_leaves_what_it_does_not_know_alone():
    layer = nn.TransformerEncoderLayer(E, HEADS, 24, 0.0, batch_first=True).eval()
    x = torch.randn(N, L, E)
    for options in ({"causal": True}, {"rotary": True}, {"num_kv_heads": 2}):
        layer.self_attn = made(fnn.FusedMultiheadAttention, E, HEADS, batch_first=True, **options).eval()
        expected = layer(x)  # with gradients it takes no fast path
        with torch.no_grad():
            torch.testing.assert_close(layer(x), expected)


# -- what modules can do ---------------------------------------------------------------------------

def modules():
    x, memory = torch.randn(N, L, E), torch.randn(N, S, E)
    return [(made(fnn.FusedMultiheadAttention, E, HEADS, batch_first=True), x, memory, memory), (llama(), x),
            (made(fnn.TransformerBlock, E, HEADS, 24, 0.0, "gelu", batch_first=True, norm_first=True), x),
            (made(fnn.TransformerDecoderBlock, E, HEADS, 24, 0.0, batch_first=True, causal=True), x, memory)]


def test_copies_pickles_and_moves():
    for module, *inputs in modules():
        module.eval()
        expected = first(module(*inputs))
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(first(other(*inputs)), expected)
            assert repr(other) == repr(module)
        wide = first(module.double()(*(t.double() for t in inputs)))
        assert wide.dtype == torch.float64
        torch.testing.assert_close(wide.float(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("index", [0, 1, 3])
def test_compiles_as_one_graph(index):
    module, *inputs = modules()[index]
    expected = outcome(lambda *args: first(module(*args)), module, inputs)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for a, b in zip(outcome(lambda *args: first(compiled(*args)), module, inputs), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_autocast_keeps_the_residuals_wide(device):
    x = torch.randn(N, L, E, device=device)
    block = llama(dropout=0.1).to(device)
    expected = block.eval()(x)
    with torch.autocast(device, torch.bfloat16):
        found, trained = block(x), block.train()(x)
    assert found.dtype == trained.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
    grads = torch.autograd.grad(trained.sum(), block.parameters())
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)
    nn.init.zeros_(block.linear2.weight)  # what is added is nothing then, and the stream is as it was
    nn.init.zeros_(block.self_attn.out_proj.weight)
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(block(x), x)
        assert torch.equal(block.eval()(x), x)


def test_repr_says_what_is_special():
    attention = fnn.FusedMultiheadAttention(E, HEADS, 0.1, num_kv_heads=2, rotary={"base": 5e5}, causal=True)
    assert ("embed_dim=16, num_heads=4, num_kv_heads=2, dropout=0.1, causal=True, "
            "rotary={'base': 500000.0}") in repr(attention)
    assert "rotary={'base': 10000.0}" in repr(fnn.FusedMultiheadAttention(E, HEADS, rotary=True))
    assert "activation=silu, norm_first=True, gated=True" in repr(llama())


# -- errors ----------------------------------------------------------------------------------------

def attend(**more):
    x = torch.randn(L, N, E)
    return fnn.FusedMultiheadAttention(E, HEADS)(x, x, x, **more)


ERRORS = {
    "bias_kv": (lambda: fnn.FusedMultiheadAttention(E, HEADS, add_bias_kv=True), ValueError,
                "FusedMultiheadAttention: add_bias_kv is not supported; torch.nn.MultiheadAttention has it"),
    "zero_attn": (lambda: fnn.FusedMultiheadAttention.from_torch(
        nn.MultiheadAttention(E, HEADS, add_zero_attn=True)), ValueError,
        "FusedMultiheadAttention: add_zero_attn is not supported"),
    "heads": (lambda: fnn.FusedMultiheadAttention(E, 3), ValueError,
              "FusedMultiheadAttention: num_heads must divide embed_dim, got 3 and 16"),
    "kv heads": (lambda: fnn.FusedMultiheadAttention(E, HEADS, num_kv_heads=3), ValueError,
                 "FusedMultiheadAttention: num_kv_heads must divide num_heads, got 3 and 4"),
    "dropout": (lambda: fnn.FusedMultiheadAttention(E, HEADS, -0.1), ValueError,
                r"FusedMultiheadAttention: dropout must be a probability in \[0, 1\], got -0.1"),
    "rotary": (lambda: fnn.FusedMultiheadAttention(E, HEADS, rotary={"theta": 1.0}), ValueError,
               "FusedMultiheadAttention: rotary has no option theta; there are base, interleaved, "),
    "mask's shape": (lambda: attend(attn_mask=torch.zeros(3, 3)), ValueError,
                     r"FusedMultiheadAttention: attn_mask must have the shape \(5, 5\) or \(8, 5, 5\), got "
                     r"\(3, 3\)"),
    "mask's dtype": (lambda: attend(key_padding_mask=torch.zeros(N, L, dtype=torch.uint8)), TypeError,
                     "FusedMultiheadAttention: key_padding_mask must be boolean .* or floating-point .* got "
                     "torch.uint8"),
    "dimensions": (lambda: fnn.FusedMultiheadAttention(E, HEADS)(
        torch.zeros(1, 1, L, E), *[torch.zeros(L, E)] * 2), ValueError,
        "FusedMultiheadAttention: query, key and value must all have 2 or all 3 dimensions, got query of "
        r"shape \(1, 1, 5, 16\)"),
    "columns": (lambda: fnn.FusedMultiheadAttention(E, HEADS)(
        torch.zeros(L, E), torch.zeros(L, E - 1), torch.zeros(L, E)), ValueError,
        r"FusedMultiheadAttention: key must have 16 columns, got shape \(5, 15\)"),
    "lengths": (lambda: fnn.FusedMultiheadAttention(E, HEADS)(
        torch.zeros(L, E), torch.zeros(S, E), torch.zeros(L, E)), ValueError,
        r"FusedMultiheadAttention: key and value must have one length and one batch size, got shapes "
        r"\(7, 16\) and \(5, 16\)"),
    "causality": (lambda: fnn.FusedMultiheadAttention(E, HEADS, causal=True)(
        torch.randn(L, E), *[torch.randn(S, E)] * 2), ValueError,
        "FusedMultiheadAttention: causality without an attn_mask needs as many queries as keys, got 5 and 7"),
    "norm": (lambda: fnn.TransformerBlock(E, HEADS, norm="batch"), ValueError,
             "TransformerBlock: norm must be 'layer_norm' or 'rms_norm', got 'batch'"),
    "gated": (lambda: fnn.TransformerDecoderBlock(E, HEADS, gated=True), ValueError,
              "TransformerDecoderBlock: gated needs activation 'silu', 'gelu' or 'gelu_tanh', got 'relu'"),
    "kind": (lambda: fnn.TransformerBlock.from_torch(nn.TransformerDecoderLayer(E, HEADS)), TypeError,
             "TransformerBlock: module must be a torch.nn.TransformerEncoderLayer, .*, got "
             "torch.nn.modules.transformer.TransformerDecoderLayer"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, kind, text = ERRORS[case]
    with pytest.raises(kind, match=text):
        call()


def test_positions_without_a_use():
    x = torch.randn(1, 4, 16)
    with pytest.raises(ValueError, match="position_ids are of a module with rotary"):
        fnn.TransformerBlock(16, 4, 32, batch_first=True)(x, position_ids=torch.arange(4))
    rotary = fnn.FusedMultiheadAttention(16, 4, batch_first=True, rotary=True)
    with pytest.raises(ValueError, match="rotary needs as many queries as keys, got 4 and 5"):
        rotary(x, *(torch.randn(1, 5, 16),) * 2)


def test_compiled_for_other_sizes_with_masks_of_keys():
    block = fnn.TransformerDecoderBlock(E, HEADS, 4 * E, 0.0, batch_first=True)

    def call(x, memory, unseen):
        return block(x, memory, memory_key_padding_mask=unseen)

    run = torch.compile(call, fullgraph=True, backend="eager")
    for batch, length, keys in ((4, 3, 5), (3, 4, 5)):
        given = torch.randn(batch, length, E), torch.randn(batch, keys, E), torch.rand(batch, keys) < 0.3
        torch.testing.assert_close(run(*given), call(*given))
