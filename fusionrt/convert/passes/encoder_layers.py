"""nn.TransformerEncoderLayer at inference, one call of torch's, becomes the calls that it stands for."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, arguments
from fusionrt.convert.match import named
from fusionrt.convert.revalue import computed, revalue

_REQUIRED = ("src", "embed_dim", "num_heads", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias",
             "use_gelu", "norm_first", "eps", "norm_weight_1", "norm_bias_1", "norm_weight_2", "norm_bias_2",
             "ffn_weight_1", "ffn_bias_1", "ffn_weight_2", "ffn_bias_2")


def encoder_layers(edits: Edits) -> None:
    """For the passes that know these. Not under autocast: on a CPU torch's call then gives 16 bits, and fake
    tensors do not know it."""
    if torch.is_autocast_enabled("cpu") or any(named(n, "_enter_autocast") for n in edits.nodes()):
        return
    for n in edits.nodes():
        given = (arguments(n, **dict.fromkeys(_REQUIRED), mask=None, mask_type=None)
                 if n.target is torch._transformer_encoder_layer_fwd else None)
        if given is not None and value(given["src"]).dim() == 3 and edits.allows(n):
            _spell_out(edits, n, SimpleNamespace(**given))


def _spell_out(edits: Edits, n: Node, given: SimpleNamespace) -> None:
    def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return edits.call(target, args, kwargs, n, given=computed(target, args, kwargs))

    # cuBLASLt's GELU, which torch's call has on a GPU, is the approximate one; so is what stands in for it.
    approximate = "tanh" if value(n).device.type == "cuda" else "none"
    found = _layer(call, given, approximate)
    n.replace_all_uses_with(found)
    if revalue(edits, {found: value(n).contiguous()}):
        edits.note(n, None)
        edits.erase([n])
    else:
        found.replace_all_uses_with(n)
        edits.erase([found])


def _layer(call: Callable[..., Any], of: SimpleNamespace, approximate: str) -> Any:
    def norm(x: Any, weight: Any, bias: Any) -> Any:
        return call(F.layer_norm, x, (of.embed_dim,), weight, bias, of.eps)

    def attend(x: Any) -> Any:
        pair = call(torch._native_multi_head_attention, x, x, x, of.embed_dim, of.num_heads, of.qkv_weight,
                    of.qkv_bias, of.proj_weight, of.proj_bias, of.mask, False, True, of.mask_type)
        return call(operator.getitem, pair, 0)

    def feed_forward(x: Any) -> Any:
        hidden = call(F.linear, x, of.ffn_weight_1, of.ffn_bias_1)
        hidden = call(F.gelu, hidden, approximate=approximate) if of.use_gelu else call(F.relu, hidden)
        return call(F.linear, hidden, of.ffn_weight_2, of.ffn_bias_2)

    first, second = (of.norm_weight_1, of.norm_bias_1), (of.norm_weight_2, of.norm_bias_2)
    if of.norm_first:
        x = call(torch.add, attend(norm(of.src, *first)), of.src)
        return call(torch.add, feed_forward(norm(x, *second)), x)
    x = norm(call(torch.add, attend(of.src), of.src), *first)
    return norm(call(torch.add, feed_forward(x), x), *second)
