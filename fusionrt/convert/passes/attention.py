"""Attention, spelled out or torch's, becomes ours, which chooses the fastest way for the call."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.nn import functional as F

from fusionrt.convert import pointwise as p
from fusionrt.convert.calls import is_batch_first, self_attention
from fusionrt.convert.effects import value
from fusionrt.convert.graph import VALUE, Edits, arguments, present, same
from fusionrt.convert.match import factors, named, only_users, rule_of, without_conversions
from fusionrt.convert.members import ROWS, softmax
from fusionrt.convert.passes.constants import CONSTANT
from fusionrt.convert.revalue import revalue
from fusionrt.ops.attention import DTYPES
from fusionrt.ops.attention import attention as attend

_OF_HEADS = F.multi_head_attention_forward
_OF_HEADS_DEFAULTS = dict.fromkeys(
    (
        "query",
        "key",
        "value",
        "embed_dim",
        "num_heads",
        "in_proj_weight",
        "in_proj_bias",
        "bias_k",
        "bias_v",
        "add_zero_attn",
        "dropout_p",
        "out_proj_weight",
        "out_proj_bias",
    )
) | {
    "training": True,
    "key_padding_mask": None,
    "need_weights": True,
    "attn_mask": None,
    "use_separate_proj_weight": False,
    "q_proj_weight": None,
    "k_proj_weight": None,
    "v_proj_weight": None,
    "static_k": None,
    "static_v": None,
    "average_attn_weights": True,
    "is_causal": False,
}


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
        elif n.target is _OF_HEADS:
            _of_heads(edits, n)


def _replace(edits: Edits, nodes: list[Node], last: Node, found: Operands) -> None:
    tensors = [value(t) for t in (found.q, found.k, found.v)]
    batch, _, _, dim = tensors[0].shape if tensors[0].dim() == 4 else (None,) * 4
    fits = (
        all(
            t.dim() == 4
            and t.dtype in DTYPES
            and t.dtype == tensors[0].dtype
            and same(t.shape[0], batch)
            and t.device.type in ("cpu", "cuda")
            for t in tensors
        )
        and same(tensors[1].shape[3], dim)
        and (value(last).dtype == tensors[0].dtype or tensors[0].dtype != torch.float64)
        and same(tensors[1].shape[1:3], tensors[2].shape[1:3])
    )
    if not fits or not edits.allows(last):
        return
    found = _with_known_mask(_with_shared_heads(found))
    if not (found.enable_gqa or same(value(found.k).shape[1], tensors[0].shape[1])):
        return
    edits.replace(
        nodes,
        last,
        attend,
        (found.q, found.k, found.v),
        "attention",
        **present(
            mask=found.mask,
            scale=found.scale,
            causal=found.causal or None,
            dropout_p=found.dropout_p or None,
            enable_gqa=found.enable_gqa or None,
        ),
    )


def _with_known_mask(found: Operands) -> Operands:
    """A constant mask may be none, or causality."""
    mask = found.mask.meta.get(CONSTANT) if found.mask is not None else None
    if mask is None or mask.dtype != torch.bool or found.causal:
        return found
    if bool(mask.all()):
        return found._replace(mask=None)
    rows, columns = mask.shape[-2:] if mask.dim() > 1 else (0, 0)
    full = same((rows, columns), (value(found.q).shape[2], value(found.k).shape[2]))
    triangle = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).tril()
    return found._replace(mask=None, causal=True) if full and bool((mask == triangle).all()) else found


# -- torch's own -------------------------------------------------------------------------------------


def _fused(edits: Edits, n: Node) -> None:
    given = arguments(
        n,
        query=None,
        key=None,
        value=None,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    )
    if given is None or not all(
        isinstance(given[k], bool | float | int | None)
        for k in ("dropout_p", "is_causal", "scale", "enable_gqa")
    ):
        return
    mask = given["attn_mask"]
    # A mask that has a gradient needs all scores, in torch as here: torch's is as good.
    if mask is not None and (value(mask).requires_grad or value(mask).dim() > 4):
        return
    _replace(
        edits,
        [n],
        n,
        Operands(
            given["query"],
            given["key"],
            given["value"],
            mask,
            given["scale"],
            given["is_causal"],
            given["dropout_p"],
            given["enable_gqa"],
        ),
    )


def _of_heads(edits: Edits, n: Node) -> None:
    given = arguments(n, **_OF_HEADS_DEFAULTS)
    absent = (
        "bias_k",
        "bias_v",
        "add_zero_attn",
        "key_padding_mask",
        "attn_mask",
        "need_weights",
        "static_k",
        "static_v",
        "use_separate_proj_weight",
        "is_causal",
    )
    if (
        given is None
        or any(given[k] for k in absent if not isinstance(given[k], Node))
        or any(isinstance(given[k], Node) for k in absent)
    ):
        return
    result = next((u for u in n.users if u.target is operator.getitem and u.args[1] == 0), None)
    x, w = given["query"], given["in_proj_weight"]
    if (
        result is None
        or len(n.users) > 1
        or not x is given["key"] is given["value"]
        or w is None
        or value(x).dim() != 3
        or not edits.allows(n)
    ):
        return
    made = edits.replace(
        [n, result],
        result,
        self_attention,
        (x, given["num_heads"], w, given["in_proj_bias"], given["out_proj_weight"], given["out_proj_bias"]),
        "attention",
        **present(dropout_p=given["dropout_p"] or None if given["training"] else None),
    )
    old = value(made)
    if is_batch_first(value(x)):  # then so is the result
        made.meta[VALUE] = (
            old.detach()
            .new_empty((old.shape[1], old.shape[0], old.shape[2]))
            .transpose(0, 1)
            .requires_grad_(old.requires_grad)
        )
        if not revalue(edits, [made]):
            made.meta[VALUE] = old
            made.kwargs = {**made.kwargs, "as_torch": True}


# -- spelled out -------------------------------------------------------------------------------------


def _spelled_out(edits: Edits, n: Node) -> None:
    """matmul(dropout(softmax(matmul(q, k^T) * scale + mask)), v), with conversions anywhere in between."""
    if len(n.args) != 2 or not isinstance(n.args[0], Node):
        return
    weights, dropout_p = n.args[0], 0.0
    probabilities = without_conversions(weights)
    if rule_of(probabilities) is p.dropout:
        given = arguments(probabilities, input=None, p=0.5, training=True, inplace=False)
        if given is None:
            return
        dropout_p = float(given["p"]) if given["training"] else 0.0
        probabilities = without_conversions(given["input"])
    if not isinstance(probabilities, Node) or ROWS.get(probabilities.target) is not softmax:
        return
    dim = probabilities.args[1] if len(probabilities.args) > 1 else probabilities.kwargs.get("dim")
    if dim not in (-1, value(probabilities).dim() - 1):
        return
    found = _scores(probabilities.args[0])
    if found is None:
        return
    operands = Operands(
        found.q,
        found.k,
        n.args[1],
        found.mask,
        found.scale,
        dropout_p=dropout_p,
    )
    nodes = _between(n, {operands.q, operands.k, operands.v, operands.mask})
    if only_users(nodes[:-1], nodes) and value(n).dtype == value(operands.v).dtype:
        _replace(edits, nodes, n, operands)


def _scores(n: Any) -> Operands | None:
    """q, k, the mask and the scale of scores before a softmax; v stands for nothing."""
    n, mask = without_conversions(n), None
    if rule_of(n) is p.add and len(n.args) == 2 and not n.kwargs and all(isinstance(a, Node) for a in n.args):
        products = [(a, b) for a, b in (n.args, n.args[::-1]) if _product(a) is not None]
        if len(products) != 1:
            return None
        n, mask = products[0]
        t = value(mask)
        if not t.is_floating_point() or t.requires_grad or t.dim() > 4:
            return None
    found = _product(n)
    if found is None:
        return None
    scale, product = found
    q, turned = product.args
    first, qs = factors(q)
    q, scale = (qs[0], scale * first) if len(qs) == 1 and value(qs[0]).dtype == value(q).dtype else (q, scale)
    k = _transposed(turned)
    return None if k is None else Operands(q, k, k, mask, scale)


def _product(n: Any) -> tuple[float, Node] | None:
    """The constant factor and the matmul of scores."""
    scale, rest = factors(without_conversions(n))
    inner = without_conversions(rest[0]) if len(rest) == 1 else None
    fits = named(inner, "matmul") and len(inner.args) == 2 and all(isinstance(a, Node) for a in inner.args)
    return (scale, inner) if fits and value(inner).dim() == 4 else None


def _transposed(n: Any) -> Node | None:
    """k of k^T."""
    if named(n, "transpose", "swapaxes") and len(n.args) == 3:
        rank = value(n).dim()
        return n.args[0] if {d % rank for d in n.args[1:]} == {rank - 1, rank - 2} else None
    is_turned = n.target is getattr and n.args[1] == "mT" if isinstance(n, Node) else False
    return n.args[0] if is_turned else None


def _between(n: Node, ends: set[Any]) -> list[Node]:
    """The calls that lead from the ends to n, in order, n among them."""
    found: dict[Node, None] = {}

    def visit(m: Node) -> None:
        for a in m.all_input_nodes:
            if a not in ends and a not in found:
                visit(a)
        found[m] = None

    visit(n)
    return list(found)


# -- heads that several queries share ------------------------------------------------------------------


def _with_shared_heads(found: Operands) -> Operands:
    """Keys and values as they were before they were repeated for each query head."""
    k, v = _unrepeated(found.k), _unrepeated(found.v)
    if k is None or v is None or not same(value(k).shape[:3], value(v).shape[:3]):
        return found
    return found._replace(k=k, v=v, enable_gqa=True)


def _unrepeated(n: Node) -> Node | None:
    """x of x[:, :, None].expand(B, heads, times, S, D).reshape(B, heads * times, S, D)."""
    expanded = n.args[0] if named(n, "reshape") else None
    inserted = expanded.args[0] if named(expanded, "expand") else None
    if (
        not isinstance(inserted, Node)
        or inserted.target is not operator.getitem
        or value(inserted).dim() != 5
    ):
        return None
    x, index = inserted.args
    whole = slice(None, None, None)
    fits = (
        isinstance(x, Node)
        and value(x).dim() == 4
        and isinstance(index, tuple)
        and (index[:3] == (whole, whole, None) and all(i == whole for i in index[3:]))
    )
    sizes = value(expanded).shape
    return (
        x
        if fits
        and same(
            (sizes[0], sizes[3], sizes[4]),
            (
                value(n).shape[0],
                value(n).shape[2],
                value(n).shape[3],
            ),
        )
        else None
    )
