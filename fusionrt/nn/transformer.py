"""Transformer blocks: those of torch.nn's layers, and of LLMs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fusionrt.arguments import check_counts
from fusionrt.nn.activation import Activated
from fusionrt.nn.attention import FusedMultiheadAttention
from fusionrt.nn.norm import FusedLayerNorm, FusedRMSNorm
from fusionrt.nn.reading import feed_forward, finished, gated_feed_forward, is_read
from fusionrt.nn.sharing import expect, place
from fusionrt.ops.dropout import dropout_add

Tensor = torch.Tensor
_NORMS: dict[str, Any] = {"layer_norm": FusedLayerNorm, "rms_norm": FusedRMSNorm}
_NORMALISE, _DROP = (FusedLayerNorm.forward, FusedRMSNorm.forward), nn.Dropout.forward


class TransformerBlock(Activated):
    """Self-attention and a feed-forward block, each with its norm and residual.

    An encoder's layer; with `causal` one of a decoder without an encoder, as LLMs are. For a decoder with one
    there is `TransformerDecoderBlock`.
    norm_first: x = x + attention(norm1(x)), x = x + ff(norm2(x)); otherwise x = norm1(x + attention(x)), x =
    norm2(x + ff(x)); ff(x) = linear2(dropout(activation(linear1(x)))). A dropout, the residual and the norm
    after them are one kernel.
    The arguments up to dtype are those of `torch.nn.TransformerEncoderLayer`; activation as in `FusedLinear`,
    causal, num_kv_heads, rotary as in `FusedMultiheadAttention`.
    norm: "layer_norm" or "rms_norm". gated: ff(x) = linear2(activation(gate) * up) of gate, up = linear1(x),
    with 2 dim_feedforward rows in linear1, the gate's first, and without the dropout inside; activation
    "silu" (SwiGLU), "gelu" or "gelu_tanh" (GEGLU). recompute: the backward pass makes the hidden layer again.

    forward(src, src_mask=None, src_key_padding_mask=None, is_causal=False, *, position_ids=None): the shapes
    and masks of torch's layer. linear1 and linear2 are read or called as those of `FusedMLP`; dropouts are
    only asked for p and training.

    State: `self_attn.*`, `linear1.*`, `linear2.*`, `norm1.*`, `norm2.*`, as that of torch's layer.
    Raises ValueError and TypeError for arguments that do not fit.

        block = TransformerBlock(768, 12, 3072, activation="gelu", batch_first=True, causal=True)
        llama = TransformerBlock(1024, 16, 2816, 0.0, "silu", 1e-6, True, True, bias=False, norm="rms_norm",
                                 gated=True, causal=True, rotary=True, num_kv_heads=4)
        block = TransformerBlock.from_torch(torch.nn.TransformerEncoderLayer(512, 8))
    """

    _torchs: type[nn.Module] = nn.TransformerEncoderLayer
    _has_memory = False

    def __init__(self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1,
                 activation: Any = "relu", layer_norm_eps: float = 1e-5, batch_first: bool = False,
                 norm_first: bool = False, bias: bool = True, device: Any = None, dtype: Any = None, *,
                 causal: bool = False, num_kv_heads: int | None = None,
                 rotary: bool | Mapping[str, Any] = False, norm: str = "layer_norm", gated: bool = False,
                 recompute: bool = False) -> None:
        super().__init__()
        name, where = type(self).__name__, {"device": device, "dtype": dtype}
        self._choose(activation)
        if norm not in _NORMS:
            raise ValueError(f"{name}: norm must be {' or '.join(map(repr, _NORMS))}, got {norm!r}")
        if gated and self.activation not in ("silu", "gelu", "gelu_tanh"):
            raise ValueError(f"{name}: gated needs activation 'silu', 'gelu' or 'gelu_tanh', got "
                             f"{activation!r}")
        check_counts(name, d_model=d_model, nhead=nhead, dim_feedforward=dim_feedforward)
        self.norm_first, self.gated, self.recompute = norm_first, gated, recompute
        self.self_attn = FusedMultiheadAttention(
            d_model, nhead, dropout, bias, batch_first=batch_first, num_kv_heads=num_kv_heads, rotary=rotary,
            causal=causal, **where)
        if self._has_memory:
            self.multihead_attn = FusedMultiheadAttention(
                d_model, nhead, dropout, bias, batch_first=batch_first, num_kv_heads=num_kv_heads, **where)
        self.linear1 = nn.Linear(d_model, (2 if gated else 1) * dim_feedforward, bias, **where)
        self.dropout = nn.Dropout(0.0 if gated else dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias, **where)
        affine = {"bias": bias} if norm == "layer_norm" else {}
        numbers = range(1, 4 if self._has_memory else 3)
        for i in numbers:
            self.add_module(f"norm{i}", _NORMS[norm](d_model, layer_norm_eps, **affine, **where))
        for i in numbers:
            self.add_module(f"dropout{i}", nn.Dropout(dropout))

    @classmethod
    def from_torch(cls, module: nn.Module, *, recompute: bool = False) -> Any:
        """With the parameters of a torch.nn.TransformerEncoderLayer (the decoder's: TransformerDecoderLayer).

        Its linear layers and dropouts themselves become children. TypeError for anything else, or of which a
        part is of a derived class; ValueError as FusedMultiheadAttention.from_torch."""
        expect(cls, module, cls._torchs)
        given: Any = module
        made = cls(given.self_attn.embed_dim, given.self_attn.num_heads, 1, activation=given.activation,
                   norm_first=given.norm_first, recompute=recompute, **place(module))
        taken: dict[nn.Module, nn.Module] = {}  # one of theirs may have two names
        for name, child in module._modules.items():
            ours = made._modules.get(name)
            if ours is None or child is None:  # the activation, where it is a module
                continue
            if not isinstance(ours, (FusedMultiheadAttention, FusedLayerNorm)):
                expect(cls, child, type(ours), argument=name)
                taken[child] = child
            elif child not in taken:
                take: Any = ours.from_torch
                taken[child] = child if isinstance(child, type(ours)) else take(child)
            made.add_module(name, taken[child])
        made.training = module.training
        return made

    def forward(self, src: Tensor, src_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
                is_causal: bool = False, *, position_ids: Tensor | None = None) -> Tensor:
        if src.is_nested:
            if src_key_padding_mask is not None or not self.self_attn.batch_first:
                raise ValueError(f"{type(self).__name__}: a nested src needs batch_first and no "
                                 "src_key_padding_mask, whose place its lengths take")
            return self._through_nested(src, src_mask, is_causal, position_ids)

        def attended(x: Tensor) -> Tensor:
            return self.self_attn(x, x, x, src_key_padding_mask, False, src_mask, is_causal=is_causal,
                                  position_ids=position_ids)[0]

        return self._through(src, [attended, self._fed_forward])

    def _through_nested(self, src: Tensor, mask: Tensor | None, is_causal: bool,
                        position_ids: Tensor | None) -> Tensor:
        """Padded, and packed again: what torch.nn.TransformerEncoder makes of sequences in inference."""
        lengths = [t.shape[0] for t in src.unbind()]
        padded = src.to_padded_tensor(0.0)
        ends = torch.tensor(lengths, device=src.device)
        unseen = torch.arange(padded.shape[1], device=src.device) >= ends[:, None]
        found = self(padded, mask, unseen, is_causal, position_ids=position_ids)
        return torch.nested.as_nested_tensor([t[:n] for t, n in zip(found, lengths, strict=True)])

    def _fed_forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return gated_feed_forward(x, self.linear1, None, self.linear2, str(self.activation),
                                      self.recompute)
        if not is_read(self.dropout, _DROP):
            found: Tensor = self.linear2(self.dropout(finished("ffn", self.linear1(x), self.activation)))
            return found
        return feed_forward(x, self.linear1, self.linear2, self.activation, self.dropout.p,
                            self.dropout.training, self.recompute)

    def _through(self, x: Tensor, sublayers: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        norms = [self._modules[f"norm{i + 1}"] for i in range(len(sublayers))]
        drops: list[Any] = [self._modules[f"dropout{i + 1}"] for i in range(len(sublayers))]
        if not self.norm_first:
            for sublayer, norm, drop in zip(sublayers, norms, drops, strict=True):
                x = _normed_sum(norm, sublayer(x), x, drop, False)
            return x
        y = norms[0](x)  # type: ignore[misc]
        for sublayer, norm, drop in zip(sublayers[:-1], norms[1:], drops[:-1], strict=True):
            y, x = _normed_sum(norm, sublayer(y), x, drop, True)
        branch, p, training = _before_dropout(drops[-1], sublayers[-1](y))
        found: Tensor = dropout_add(branch, x, p, training)
        return found

    def extra_repr(self) -> str:
        options = {"norm_first": self.norm_first, "gated": self.gated, "recompute": self.recompute}
        return ", ".join([super().extra_repr(), *(f"{name}=True" for name, on in options.items() if on)])


class TransformerDecoderBlock(TransformerBlock):
    """Self-attention, attention to an encoder's output, and a feed-forward block: a decoder's layer.

    The arguments are those of `TransformerBlock`; rotary and causal are those of self-attention.
    forward(tgt, memory, tgt_mask=None, memory_mask=None, tgt_key_padding_mask=None,
    memory_key_padding_mask=None, tgt_is_causal=False, memory_is_causal=False, *, position_ids=None): the
    shapes and masks of `torch.nn.TransformerDecoderLayer`.

    State: `self_attn.*`, `multihead_attn.*`, `linear1.*`, `linear2.*`, `norm1.*`, `norm2.*`, `norm3.*`, as
    torch.nn.TransformerDecoderLayer's. Raises ValueError and TypeError for arguments that do not fit.

        block = TransformerDecoderBlock(512, 8, batch_first=True, causal=True)
        y = block(tgt, memory)
    """

    _torchs = nn.TransformerDecoderLayer
    _has_memory = True
    multihead_attn: FusedMultiheadAttention

    def forward(self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None,  # type: ignore[override]
                memory_mask: Tensor | None = None, tgt_key_padding_mask: Tensor | None = None,
                memory_key_padding_mask: Tensor | None = None, tgt_is_causal: bool = False,
                memory_is_causal: bool = False, *, position_ids: Tensor | None = None) -> Tensor:

        def attended(x: Tensor) -> Tensor:
            return self.self_attn(x, x, x, tgt_key_padding_mask, False, tgt_mask, is_causal=tgt_is_causal,
                                  position_ids=position_ids)[0]

        def attended_memory(x: Tensor) -> Tensor:
            return self.multihead_attn(x, memory, memory, memory_key_padding_mask, False, memory_mask,
                                       is_causal=memory_is_causal)[0]

        return self._through(tgt, [attended, attended_memory, self._fed_forward])


def _before_dropout(drop: Any, x: Tensor) -> tuple[Tensor, float, bool]:
    """x, and the probability and mode of the dropout that it still has to go through. Another module in its
    place is called."""
    return (x, drop.p, drop.training) if is_read(drop, _DROP) else (drop(x), 0.0, False)


def _normed_sum(norm: Any, branch: Tensor, x: Tensor, drop: Any, return_sum: bool) -> Any:
    """norm(dropout(branch) + x), and with return_sum that sum."""
    branch, p, training = _before_dropout(drop, branch)
    if getattr(norm.forward, "__func__", None) not in _NORMALISE:  # somebody has put another module there
        x = dropout_add(branch, x, p, training)
        return (norm(x), x) if return_sum else norm(x)
    return norm(branch, x, dropout_p=p, training=training, return_sum=return_sum)
