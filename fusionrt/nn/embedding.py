"""The first layer of a transformer: tokens, positions and token types, added, normalised, dropped from."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusionrt.arguments import check_counts
from fusionrt.layout import is_among
from fusionrt.nn.norm import FusedLayerNorm
from fusionrt.nn.reading import finished, is_read
from fusionrt.nn.sharing import expect, place
from fusionrt.ops.dropout import scale_of_kept
from fusionrt.ops.embedding import embedding_position

_EMBED = nn.Embedding.forward
_OPTIONS = ("max_norm", "scale_grad_by_freq", "sparse")


class EmbeddingPosition(nn.Module):
    """dropout(norm(word[tokens] * scale + position[position_ids] + types[token_type])) in one kernel.

    max_positions: rows of the positions' table, None for no such table (a rotary model); token_types: rows of
    the token types' table, None for none. layer_norm: whether there is a norm. padding_idx: a token whose row
    starts as zeros and gets no gradient.
    forward(tokens, token_type=None, position_ids=None): tokens (..., S) -> (..., S, embedding_dim);
    token_type of tokens' shape or (S,), zeros unless given; position_ids as well, 0 to S - 1 unless given.
    The tables and the norm are read, or called as the linear layers of `FusedMLP`.

    State, as BERT's embeddings have it: `word_embeddings.weight`, `position_embeddings.weight`,
    `token_type_embeddings.weight`, `LayerNorm.weight`, `LayerNorm.bias`; the first three are
    `torch.nn.Embedding`s. Raises what `fusionrt.embedding_position` does, ValueError for a dropout outside
    [0, 1].

        embed = EmbeddingPosition(30522, 768, 512, token_types=2, layer_norm=True, dropout=0.1)
        embed = EmbeddingPosition.from_modules(gpt2.wte, gpt2.wpe, dropout=0.1)
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, max_positions: int | None = None, *,
                 token_types: int | None = None, padding_idx: int | None = None, scale: float = 1.0,
                 layer_norm: bool = False, layer_norm_eps: float = 1e-5, dropout: float = 0.0,
                 device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        scale_of_kept("EmbeddingPosition", dropout, False, "dropout")
        check_counts("EmbeddingPosition", {"max_positions": max_positions, "token_types": token_types},
                     num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        where = {"device": device, "dtype": dtype}

        def table(rows: int | None) -> nn.Embedding | None:
            return None if rows is None else nn.Embedding(rows, embedding_dim, **where)

        self.word_embeddings = nn.Embedding(num_embeddings, embedding_dim, padding_idx, **where)
        self.position_embeddings, self.token_type_embeddings = table(max_positions), table(token_types)
        self.LayerNorm = FusedLayerNorm(embedding_dim, layer_norm_eps, **where) if layer_norm else None
        self.scale, self.dropout = scale, dropout

    @classmethod
    def from_modules(cls, word: nn.Embedding, position: nn.Embedding | None = None,
                     token_type: nn.Embedding | None = None, layer_norm: nn.LayerNorm | None = None, *,
                     scale: float = 1.0, dropout: float = 0.0) -> EmbeddingPosition:
        """Of these modules themselves, with the mode of the first one.

        Raises TypeError for modules of other classes, ValueError for an embedding with a max_norm,
        scale_grad_by_freq or sparse gradients."""
        for name, table in (("word", word), ("position", position), ("token_type", token_type)):
            if table is not None:
                _check_table(name, table)
        made = cls(word.num_embeddings, word.embedding_dim, scale=scale, dropout=dropout, **place(word))
        made.word_embeddings, made.position_embeddings = word, position
        made.token_type_embeddings = token_type
        made.LayerNorm = layer_norm if layer_norm is None else FusedLayerNorm.from_torch(layer_norm)
        made.training = word.training
        return made

    def forward(self, tokens: torch.Tensor, token_type: torch.Tensor | None = None,
                position_ids: torch.Tensor | None = None) -> torch.Tensor:
        norm, positions, types = self.LayerNorm, self.position_embeddings, self.token_type_embeddings
        found: torch.Tensor
        tables = self.word_embeddings, positions, types
        if not (all(map(_is_plain, tables)) and is_read(norm, FusedLayerNorm.forward)
                and (norm is None or norm.activation is None)):
            return self._composed(tokens, token_type, position_ids)
        found = embedding_position(
            tokens, self.word_embeddings.weight, None if positions is None else positions.weight,
            scale=self.scale, layer_norm=None if norm is None else (norm.weight, norm.bias, norm.eps),
            dropout_p=self.dropout, training=self.training, padding_idx=self.word_embeddings.padding_idx,
            token_type=token_type, token_type_weight=None if types is None else types.weight,
            position_ids=position_ids)
        return found

    def _composed(self, tokens: torch.Tensor, token_type: torch.Tensor | None,
                  position_ids: torch.Tensor | None) -> torch.Tensor:
        found: torch.Tensor = self.word_embeddings(tokens) * self.scale
        places = torch.arange(tokens.shape[-1], device=tokens.device)
        for name, ids, usual in (("position", position_ids, places),
                                 ("token_type", token_type, torch.zeros_like(places))):
            table = getattr(self, f"{name}_embeddings")
            if ids is not None and not is_among(tuple(ids.shape), tuple(tokens.shape), tuple(places.shape),
                                                (1, *places.shape)):
                raise ValueError(f"EmbeddingPosition: {name} ids must have the shape {tuple(tokens.shape)} "
                                 f"or {tuple(places.shape)}, got {tuple(ids.shape)}")
            if table is not None:
                ids = usual if ids is None else ids if ids.shape == tokens.shape else ids.view(-1)
                found = found + table(ids)
            elif ids is not None:
                raise ValueError(f"EmbeddingPosition: {name} ids need {name}_embeddings, got None")
        found = found if self.LayerNorm is None else self.LayerNorm(found)
        return finished("embedding_position", found, None, self.dropout, self.training)

    def extra_repr(self) -> str:
        parts = [f"scale={self.scale}"] if self.scale != 1 else []
        return ", ".join([*parts, *([f"dropout={self.dropout}"] if self.dropout else [])])


def _is_plain(table: Any) -> bool:
    """Whether its weight and a position's padding say all that a call of it does."""
    return table is None or (is_read(table, _EMBED) and not any(getattr(table, name) for name in _OPTIONS))


def _check_table(name: str, table: Any) -> None:
    expect(EmbeddingPosition, table, nn.Embedding, argument=name)
    for option in _OPTIONS:
        if getattr(table, option):
            raise ValueError(f"EmbeddingPosition: {name} has {option}={getattr(table, option)!r}, which is "
                             "not supported")
    if name != "word" and table.padding_idx is not None:
        raise ValueError(f"EmbeddingPosition: {name} has padding_idx={table.padding_idx!r}, which only the "
                         "word embedding may have")
