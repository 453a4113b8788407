"""Attention, spelled out or torch's, becomes ours, which chooses the fastest way for the call."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert import pointwise as p
from fusionrt.convert.calls import batch_first_attention, is_batch_first, self_attention
from fusionrt.convert.effects import value
from fusionrt.convert.graph import DERIVED, VALUE, Edits, arguments, is_tensor, present, same
from fusionrt.convert.kept_masks import attention_by_kept_mask
from fusionrt.convert.match import (
    between,
    factors,
    is_sum,
    named,
    only_users,
    rule_of,
    without_conversions,
)
from fusionrt.convert.members import ROWS, softmax
from fusionrt.convert.passes.constants import CONSTANT
from fusionrt.convert.revalue import revalue
from fusionrt.dtypes import FLOATS
from fusionrt.ops.attention import attention as attend

_WHOLE = slice(None, None, None)


class Operands(NamedTuple):
    q: Node
    k: Node
    v: Node
    mask: Node | None
    scale: float | None
    causal: bool = False
    dropout_p: float = 0.0
    enable_gqa: bool = False


def attention(edits: Edits) -> None:
    """scaled_dot_product_attention, matmul + softmax + matmul, and nn.MultiheadAttention's self-attention."""
    for n in edits.nodes():
        if n.target is F.scaled_dot_product_attention:
            _fused(edits, n)
        elif named(n, "matmul"):
            _spelled_out(edits, n)
        elif n.target is F.multi_head_attention_forward:
            _of_heads(edits, n)
        elif n.target is torch._native_multi_head_attention:
            _native(edits, n)


def _replace(edits: Edits, nodes: Sequence[Node], last: Node, found: Operands) -> None:
    found = _with_known_mask(_with_shared_heads(found))
    read = [a for a in (found.q, found.k, found.v, found.mask) if a is not None]
    if not _fits(last, found) or any(map(edits.facts.is_written, read)) or not edits.allows(last, nodes):
        return
    special = found.causal or found.dropout_p or found.enable_gqa or value(last).requires_grad
    if _is_kept(found.mask) and not special:
        edits.replace(nodes, last, attention_by_kept_mask, read, "attention", **present(scale=found.scale))
    else:
        options = present(mask=found.mask, scale=found.scale, causal=found.causal or None,
                          dropout_p=found.dropout_p or None, enable_gqa=found.enable_gqa or None)
        edits.replace(nodes, last, attend, read[:3], "attention", **options)


def _is_kept(mask: Node | None) -> bool:
    return mask is not None and (CONSTANT in mask.meta or DERIVED in mask.meta)


def _fits(last: Node, found: Operands) -> bool:
    q, k, v = (value(n) for n in (found.q, found.k, found.v))
    return (all(t.dim() == 4 and t.dtype in FLOATS and t.dtype == q.dtype and t.device.type in ("cpu", "cuda")
                for t in (q, k, v))
            and same((q.shape[0], q.shape[3]), (k.shape[0], k.shape[3])) and same(k.shape[:3], v.shape[:3])
            and not same(q.shape[3], 0)
            and (found.enable_gqa or same(k.shape[1], q.shape[1]))
            and same(value(last).shape, (*q.shape[:3], v.shape[3]))  # no mask is of more than the scores
            and (value(last).dtype == q.dtype or q.dtype != torch.float64))  # under autocast


def _with_known_mask(found: Operands) -> Operands:
    """A constant mask may be none, or causality."""
    mask = found.mask.meta.get(CONSTANT) if found.mask is not None else None
    if mask is not None and bool(mask.all() if mask.dtype == torch.bool else not mask.any()):
        return found._replace(mask=None)
    if mask is None or mask.dtype != torch.bool or found.causal:
        return found
    sizes = value(found.q).shape[-2], value(found.k).shape[-2]
    if mask.dim() < 2 or not same(mask.shape[-2:], sizes):
        return found
    triangle = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    return found._replace(mask=None, causal=True) if bool((mask == triangle).all()) else found


# -- torch's own -------------------------------------------------------------------------------------

def _fused(edits: Edits, n: Node) -> None:
    given = arguments(n, query=None, key=None, value=None, attn_mask=None, dropout_p=0.0, is_causal=False,
                      scale=None, enable_gqa=False)
    if given is None:
        return
    q, k, v, mask, dropout_p, causal, scale, enable_gqa = given.values()
    if not all(isinstance(option, (float, int, type(None)))
               for option in (dropout_p, causal, scale, enable_gqa)):
        return  # symbols
    # A mask that has a gradient needs all scores, in torch as here: torch's is as good.
    if mask is None or not (value(mask).requires_grad or value(mask).dim() > 4):
        _replace(edits, [n], n, Operands(q, k, v, mask, scale, causal, dropout_p, enable_gqa))


def _of_heads(edits: Edits, n: Node) -> None:
    required = ("query", "key", "value", "embed_dim", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k",
                "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias")
    given = arguments(
        n, **dict.fromkeys(required), training=True, key_padding_mask=None, need_weights=True, attn_mask=None,
        use_separate_proj_weight=False, q_proj_weight=None, k_proj_weight=None, v_proj_weight=None,
        static_k=None, static_v=None, average_attn_weights=True, is_causal=False)
    absent = ("bias_k", "bias_v", "add_zero_attn", "key_padding_mask", "attn_mask", "need_weights",
              "static_k", "static_v", "use_separate_proj_weight", "is_causal")
    if given is None or any(isinstance(given[k], Node) or given[k] for k in absent):
        return
    result = _only_result(n)
    x, w = given["query"], given["in_proj_weight"]
    if (result is None or not x is given["key"] is given["value"] or w is None or value(x).dim() != 3
            or not edits.allows(result, [n, result])):
        return
    made = edits.replace([n, result], result, self_attention, (
        x, given["num_heads"], w, given["in_proj_bias"], given["out_proj_weight"], given["out_proj_bias"]),
        "attention", **present(dropout_p=given["dropout_p"] or None if given["training"] else None))
    if is_batch_first(value(x)):
        _lie_batch_first(edits, made)


def _only_result(n: Node) -> Node | None:
    """What attends, where nobody asks for the weights."""
    return next((u for u in n.users if u.target is operator.getitem and u.args[1] == 0 and len(n.users) == 1),
                None)


def _native(edits: Edits, n: Node) -> None:
    """nn.MultiheadAttention's own at inference, (B, L, E)."""
    required = ("query", "key", "value", "embed_dim", "num_head", "qkv_weight", "qkv_bias", "proj_weight",
                "proj_bias")
    given = arguments(n, **dict.fromkeys(required), mask=None, need_weights=True, average_attn_weights=True,
                      mask_type=None)
    result = _only_result(n)
    if given is None or result is None or given["mask"] is not None:
        return
    x = given["query"]
    if x is given["key"] is given["value"] and value(x).dim() == 3 and edits.allows(result, [n, result]):
        edits.replace([n, result], result, batch_first_attention, (
            x, *(given[name] for name in required[4:])), "attention")


def _lie_batch_first(edits: Edits, made: Node) -> None:
    """The result lies in memory as the operand does, where nothing behind it minds."""
    old = value(made)
    length, batch, width = old.shape
    made.meta[VALUE] = old.detach().new_empty((batch, length, width)).transpose(0, 1).requires_grad_(
        old.requires_grad)
    if not revalue(edits, {made: old}):
        made.kwargs = {**made.kwargs, "as_torch": True}


# -- spelled out -------------------------------------------------------------------------------------

def _spelled_out(edits: Edits, n: Node) -> None:
    """matmul(dropout(softmax(matmul(q, k^T) * scale + mask)), v), with conversions anywhere in between."""
    weights = n.args[0] if len(n.args) == 2 else None
    if not isinstance(weights, Node) or not is_tensor(n.args[1]):
        return
    probabilities, dropout_p = _without_dropout(without_conversions(weights))
    if not isinstance(probabilities, Node) or ROWS.get(probabilities.target) is not softmax:
        return
    dim = probabilities.args[1] if len(probabilities.args) > 1 else probabilities.kwargs.get("dim")
    found = _scores(probabilities.args[0]) if dim in (-1, value(probabilities).dim() - 1) else None
    if found is None:
        return
    v: Any = n.args[1]
    nodes = between([found.q, found.k, v, found.mask], n)
    if only_users(nodes[:-1], nodes) and value(n).dtype == value(v).dtype:
        _replace(edits, nodes, n, found._replace(v=v, dropout_p=dropout_p))


def _without_dropout(n: Any) -> tuple[Any, float]:
    if rule_of(n) is not p.dropout:
        return n, 0.0
    given = arguments(n, input=None, p=0.5, training=True, inplace=False)
    if given is None or isinstance(given["p"], Node):  # a symbol: the probability has been changed
        return None, 0.0
    return without_conversions(given["input"]), float(given["p"]) if given["training"] else 0.0


def _scores(n: Any) -> Operands | None:
    """q, k, the mask and the scale of scores before a softmax; the place of v is k's."""
    n, mask = without_conversions(n), None
    if is_sum(n):
        products = [(a, b) for a, b in (n.args, n.args[::-1]) if _product(a) is not None and is_tensor(b)]
        if len(products) != 1:
            return None
        n, mask = products[0]
        t = value(mask)
        if not t.is_floating_point() or t.requires_grad or t.dim() > 4:
            return None
    found = _product(n)
    k = None if found is None else _transposed(found[1].args[1])
    if found is None or k is None:
        return None
    scale, product = found
    q: Any = product.args[0]
    factor, qs = factors(q)
    if len(qs) == 1 and value(qs[0]).dtype == value(q).dtype:  # the scale of q is one of scores
        scale, q = scale * factor, qs[0]
    return Operands(q, k, k, mask, scale)


def _product(n: Any) -> tuple[float, Node] | None:
    """The constant factor and the matmul of scores."""
    scale, rest = factors(without_conversions(n))
    inner: Any = without_conversions(rest[0]) if len(rest) == 1 else None
    fits = named(inner, "matmul") and len(inner.args) == 2 and all(map(is_tensor, inner.args))
    return (scale, inner) if fits and value(inner).dim() == 4 else None


def _transposed(n: Any) -> Any:
    """k of k^T."""
    if named(n, "transpose", "swapaxes") and len(n.args) == 3:
        rank = value(n).dim()
        return n.args[0] if {d % rank for d in n.args[1:]} == {rank - 1, rank - 2} else None
    read = isinstance(n, Node) and n.target is getattr and n.args[1] == "mT"  # Dynamo's before torch 2.14
    return n.args[0] if read or named(n, "mT") else None


# -- heads that several queries share ------------------------------------------------------------------

def _with_shared_heads(found: Operands) -> Operands:
    """Keys and values as they were before they were repeated for each query head."""
    k, v = _unrepeated(found.k), _unrepeated(found.v)
    if k is None or v is None or not same(value(k).shape[:3], value(v).shape[:3]):
        return found
    return found._replace(k=k, v=v, enable_gqa=True)


def _unrepeated(n: Node) -> Node | None:
    """x of x[:, :, None].expand(B, heads, times, S, D).reshape(B, heads * times, S, D)."""
    expanded: Any = n.args[0] if named(n, "reshape") else None
    inserted: Any = expanded.args[0] if named(expanded, "expand") else None
    if not is_tensor(inserted) or inserted.target is not operator.getitem or value(inserted).dim() != 5:
        return None
    x, index = inserted.args
    if not is_tensor(x) or value(x).dim() != 4 or not isinstance(index, tuple) or index[:3] != (
            _WHOLE, _WHOLE, None) or any(i != _WHOLE for i in index[3:]):
        return None
    batch, _, _, length, width = value(expanded).shape
    whole = value(n).shape
    found: Node = x
    return found if len(whole) == 4 and same((batch, length, width), (whole[0], whole[2], whole[3])) else None
