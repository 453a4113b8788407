"""Multi-head attention with torch's state and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fusionrt.arguments import check_counts
from fusionrt.nn.sharing import expect, place, share
from fusionrt.ops.attention import attention, attention_apply, attention_score
from fusionrt.ops.dropout import scale_of_kept
from fusionrt.ops.qkv import qkv_heads
from fusionrt.ops.rotary import rotary_embedding
from fusionrt.ops.softmax import attention_dropout

Tensor = torch.Tensor
_ROTARY = ("base", "interleaved", "rotary_dim", "scaling")


class FusedMultiheadAttention(nn.MultiheadAttention):
    """softmax(Q K^T / sqrt(D)) V of each head, between two projections: a `torch.nn.MultiheadAttention`.

    The arguments are torch's; add_bias_kv and add_zero_attn must be False. Further ones:
    num_kv_heads: fewer heads of keys and values, each for num_heads / num_kv_heads of the queries (GQA).
    rotary: whether queries and keys are turned by their positions, or the options of
    `fusionrt.rotary_embedding`: {"base": 500000.0, "rotary_dim": 64, "interleaved": True, "scaling": 1.0}.
    causal: a query sees no key after its own position, whatever the other masks say.

    forward(query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None,
    average_attn_weights=True, is_causal=False, *, position_ids=None) -> (output, weights or None), shapes as
    in torch: (L, N, E), with batch_first (N, L, E), or (L, E). Masks say True where nothing is to be seen, or
    are added to the scores. is_causal is a hint, as in torch, that attn_mask is the causal one, which is then
    not read; here attn_mask may also be absent. need_weights=False is the fast way, without a matrix of
    scores. A query that sees nothing gets zeros, where torch gives NaN. position_ids: (L,) or (N, L).

    State: `in_proj_weight`, `in_proj_bias`, `out_proj.weight`, `out_proj.bias` (with kdim or vdim
    `q_proj_weight`, `k_proj_weight`, `v_proj_weight` for the first), as torch.nn.MultiheadAttention's; the
    rows of in_proj are those of queries, keys, values. Raises ValueError and TypeError for arguments that do
    not fit.

        attention = FusedMultiheadAttention(512, 8, batch_first=True, causal=True, num_kv_heads=2)
        y, _ = attention(x, x, x, need_weights=False)
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True,
                 add_bias_kv: bool = False, add_zero_attn: bool = False, kdim: int | None = None,
                 vdim: int | None = None, batch_first: bool = False, device: Any = None, dtype: Any = None, *,
                 num_kv_heads: int | None = None, rotary: bool | Mapping[str, Any] = False,
                 causal: bool = False) -> None:
        self._check_options(embed_dim, num_heads, num_kv_heads, dropout, add_bias_kv, add_zero_attn)
        super().__init__(embed_dim, num_heads, dropout, bias, False, False, kdim, vdim, batch_first, device,
                         dtype)
        self.num_kv_heads, self.causal = num_kv_heads or num_heads, causal
        self.rotary = _rotary_options(rotary)
        if self.num_kv_heads != num_heads:
            self._shrink_keys()
        # Torch's encoder layer bypasses a module of which this is true, and knows nothing of these.
        plain = self.rotary is None and self.num_kv_heads == num_heads and not causal
        self._qkv_same_embed_dim = self._qkv_same_embed_dim and plain

    @staticmethod
    def _check_options(embed_dim: int, num_heads: int, num_kv_heads: int | None, dropout: float,
                       add_bias_kv: bool, add_zero_attn: bool) -> None:
        name = "FusedMultiheadAttention"
        for option, given in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if given:
                raise ValueError(f"{name}: {option} is not supported; torch.nn.MultiheadAttention has it")
        check_counts(name, {"num_kv_heads": num_kv_heads}, embed_dim=embed_dim, num_heads=num_heads)
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"{name}: num_heads must divide embed_dim, got {num_heads} and {embed_dim}")
        if num_kv_heads is not None and (num_kv_heads < 1 or num_heads % num_kv_heads):
            raise ValueError(f"{name}: num_kv_heads must divide num_heads, got {num_kv_heads} and "
                             f"{num_heads}")
        scale_of_kept(name, dropout, False, "dropout")

    def _shrink_keys(self) -> None:
        """To the heads that keys and values have."""
        columns = self.num_kv_heads * self.head_dim
        for name, rows in (("in_proj_weight", self.embed_dim + 2 * columns), ("k_proj_weight", columns),
                           ("v_proj_weight", columns), ("in_proj_bias", self.embed_dim + 2 * columns)):
            old = getattr(self, name)
            if old is not None:
                self.register_parameter(name, nn.Parameter(old.new_empty((rows, *old.shape[1:]))))
        self._reset_parameters()

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> FusedMultiheadAttention:
        """With the parameters of `module` themselves. TypeError for anything but a
        torch.nn.MultiheadAttention, ValueError for one with add_bias_kv or add_zero_attn."""
        expect(cls, module, nn.MultiheadAttention)
        return share(cls(module.embed_dim, module.num_heads, module.dropout, module.in_proj_bias is not None,
                         module.bias_k is not None, module.add_zero_attn, module.kdim, module.vdim,
                         module.batch_first, **place(module)), module)

    # -- what it computes --------------------------------------------------------------------------

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
                need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
                is_causal: bool = False, *, position_ids: Tensor | None = None
                ) -> tuple[Tensor, Tensor | None]:
        batched, batch_first = query.dim() == 3, self.batch_first or query.dim() == 2
        _check_inputs(query, key, value, (self.embed_dim, self.kdim, self.vdim))
        if position_ids is not None and self.rotary is None:
            raise ValueError("FusedMultiheadAttention: position_ids are of a module with rotary")
        if query is key and key is value and self.in_proj_weight is not None:
            q, k, v = self._heads_of_one(query, batch_first, position_ids)
        else:
            q, k, v = (_heads(_batch_first(t, batch_first), self.head_dim)
                       for t in self._projected(query, key, value))
            if self.rotary is not None:
                if q.shape[2] != k.shape[2]:
                    raise ValueError("FusedMultiheadAttention: rotary needs as many queries as keys, got "
                                     f"{q.shape[2]} and {k.shape[2]}")
                q, k = rotary_embedding(q, k, layout="bhsd", position_ids=position_ids, **self.rotary)
        causal, attn_mask = self._causality(is_causal, attn_mask, q.shape[2], k.shape[2])
        mask = _merged(attn_mask, key_padding_mask, q, k)
        weights = None
        if need_weights:
            out, weights = self._explained(q, k, v, mask, causal)
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            out = attention(q, k, v, causal=causal, mask=mask, dropout_p=self.dropout, training=self.training,
                            enable_gqa=self.num_kv_heads != self.num_heads)
        merged = (out.transpose(1, 2) if batch_first else out.permute(2, 0, 1, 3)).flatten(2)
        return self.out_proj(merged if batched else merged.squeeze(0)), weights

    def _heads_of_one(self, x: Tensor, batch_first: bool, position_ids: Tensor | None) -> Any:
        """A product with its bias, which the kernel that turns queries and keys adds where there is one."""
        weight, bias, counts = self.in_proj_weight, self.in_proj_bias, (self.num_heads, self.num_kv_heads)
        if self.rotary is None:
            return qkv_heads(_batch_first(F.linear(x, weight, bias), batch_first), *counts)
        return qkv_heads(_batch_first(F.linear(x, weight), batch_first), *counts, bias=bias,
                         position_ids=position_ids, **self.rotary)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Of queries, keys and values, which are not all the same."""
        columns = self.num_kv_heads * self.head_dim
        sizes, bias = [self.embed_dim, columns, columns], self.in_proj_bias
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            biases = (None,) * 3 if bias is None else bias.split(sizes)
            return tuple(map(F.linear, (query, key, value), weights, biases))
        parts = sizes if key is not value else [self.embed_dim, 2 * columns]
        weights = self.in_proj_weight.split(parts)
        biases = (None,) * len(parts) if bias is None else bias.split(parts)
        found = list(map(F.linear, (query, key, value), weights, biases))
        return tuple(found) if key is not value else (found[0], *found[1].chunk(2, -1))

    def _causality(self, is_causal: bool, attn_mask: Tensor | None, queries: int, keys: int
                   ) -> tuple[bool, Tensor | None]:
        """Whether only keys up to a query's position count, and the mask that is left to be read."""
        if not (is_causal or self.causal):
            return False, attn_mask
        if queries != keys:
            if is_causal and attn_mask is not None and not self.causal:
                return False, attn_mask
            raise ValueError("FusedMultiheadAttention: causality without an attn_mask needs as many queries "
                             f"as keys, got {queries} and {keys}")
        return True, None if is_causal else attn_mask

    def _explained(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
                   ) -> tuple[Tensor, Tensor]:
        """With the weights, after dropout as in torch."""
        groups = self.num_heads // self.num_kv_heads
        if groups > 1:
            k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        weights = attention_dropout(attention_score(q, k), self.dropout, self.training, mask=mask,
                                    causal=causal)
        return attention_apply(weights, v), weights

    def extra_repr(self) -> str:
        options = {"num_kv_heads": (self.num_kv_heads, self.num_heads), "dropout": (self.dropout, 0.0),
                   "batch_first": (self.batch_first, False), "causal": (self.causal, False),
                   "rotary": (self.rotary, None)}
        shown = [f"{name}={value}" for name, (value, usual) in options.items() if value != usual]
        return ", ".join([f"embed_dim={self.embed_dim}, num_heads={self.num_heads}", *shown])


def _batch_first(t: Tensor, is_first: bool) -> Tensor:
    """(N, L, W), also of (L, N, W) and (L, W)."""
    return t.unsqueeze(0) if t.dim() == 2 else t if is_first else t.transpose(0, 1)


def _heads(t: Tensor, head_dim: int) -> Tensor:
    """(N, L, H D) as (N, H, L, D), where it lies."""
    return t.unflatten(-1, (-1, head_dim)).transpose(1, 2)


# -- arguments -------------------------------------------------------------------------------------

def _rotary_options(rotary: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    if rotary is False:
        return None
    if rotary is True:
        rotary = {}
    if not isinstance(rotary, Mapping):
        raise TypeError("FusedMultiheadAttention: rotary must be a bool or a mapping of options, got "
                        f"{rotary!r}")
    options = {"base": 10000.0, **rotary}
    if unknown := [name for name in options if name not in _ROTARY]:
        raise ValueError(f"FusedMultiheadAttention: rotary has no option {', '.join(unknown)}; there are "
                         f"{', '.join(_ROTARY)}")
    return options


def _check_inputs(query: Tensor, key: Tensor, value: Tensor, widths: tuple[int, ...]) -> None:
    name = "FusedMultiheadAttention"
    for argument, t, width in zip(("query", "key", "value"), (query, key, value), widths, strict=True):
        if t.is_nested:
            raise TypeError(f"{name}: {argument} must not be a nested tensor")
        if t.dim() not in (2, 3) or t.dim() != query.dim():
            raise ValueError(f"{name}: query, key and value must all have 2 or all 3 dimensions, got "
                             f"{argument} of shape {tuple(t.shape)} with a query of {tuple(query.shape)}")
        if t.shape[-1] != width:
            raise ValueError(f"{name}: {argument} must have {width} columns, got shape {tuple(t.shape)}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"{name}: key and value must have one length and one batch size, got shapes "
                         f"{tuple(key.shape)} and {tuple(value.shape)}")


def _merged(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Both in one that broadcasts to (N, H, L, S): True where a key is seen, or added to the scores."""
    n, heads, queries, keys = *q.shape[:3], k.shape[2]
    masks = []
    if attn_mask is not None:
        masks.append(_viewed("attn_mask", attn_mask,
                             ((queries, keys), (1, 1, queries, keys)),
                             ((n * heads, queries, keys), (n, heads, queries, keys))))
    if key_padding_mask is not None:
        unbatched = [((keys,), (1, 1, 1, keys))] if n == 1 else []
        masks.append(_viewed("key_padding_mask", key_padding_mask,
                             ((n, keys), (n, 1, 1, keys)), *unbatched))
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        return ~(masks[0] | masks[-1]) if len(masks) > 1 else ~masks[0]
    added = [torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -torch.inf)
             if mask.dtype == torch.bool else mask.to(q.dtype) for mask in masks]
    return added[0] if len(added) == 1 else added[0] + added[1]


def _viewed(name: str, mask: Tensor, *views: tuple[tuple[int, ...], tuple[int, ...]]) -> Tensor:
    """`views`: the shapes that it may have, each with that as which it is seen."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"FusedMultiheadAttention: {name} must be boolean (True where nothing is seen) or "
                        f"floating-point (added to the scores), got {mask.dtype}")
    for shape, view in views:  # not by a dictionary, in which Dynamo's equal symbols are different keys
        if tuple(mask.shape) == shape:
            return mask.view(view)
    raise ValueError(f"FusedMultiheadAttention: {name} must have the shape "
                     f"{' or '.join(str(shape) for shape, _ in views)}, got {tuple(mask.shape)}")
