"""Token ids, or bytes of text, to what a language model takes, in one pass over them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch

from fusionrt import random
from fusionrt.arguments import as_device, as_float, as_int, is_int
from fusionrt.array import check_dense, is_foreign, to_torch
from fusionrt.data import tokens_kernels
from fusionrt.data.tokens_kernels import MOST_SPECIAL, Batch, Masking, Settings
from fusionrt.watching import no_transforms

OP = "token_preprocess"
Tensor = torch.Tensor
_TEXT = (bytes, bytearray, str)


class Tokens(NamedTuple):
    """Tensors of shape (sequences, width) of one integer dtype."""

    input_ids: Tensor
    attention_mask: Tensor    # 1: a token, 0: padding
    position_ids: Tensor      # among the tokens of its row; 1 for padding, as in transformers
    labels: Tensor            # ignore_index where there is no loss


def token_preprocess(ids: Any, *, pad_id: int = 0, max_length: int | None = None,
                     offsets: Tensor | None = None, padding_side: str = "right",
                     pad_to_multiple_of: int | None = None, bos_id: int | None = None,
                     eos_id: int | None = None, byte_offset: int = 0, shift_right: bool = False,
                     mask_probability: float = 0.0, mask_id: int | None = None, vocab_size: int | None = None,
                     special_ids: Sequence[int] = (), ignore_index: int = -100,
                     device: torch.device | str | None = None) -> Tokens:
    """Padding, attention mask, positions and labels of a batch, in one kernel.

    `ids`, of int32 or int64, is one of: a tensor (sequences, tokens) padded with pad_id; a list of sequences
    (lists or 1-D tensors); a 1-D tensor of all sequences and their `offsets`, sequences + 1 of them in int64.
    Other arrays, NumPy's for instance, are taken for tensors.
    Or it is text in bytes, to each of which `byte_offset` is added, so that ids below it are free for special
    tokens (ByT5: byte_offset=3, eos_id=1): bytes, a str (as UTF-8) or a list of these, or a uint8 tensor,
    2-D without padding or 1-D with offsets. Results are int32 for int32, otherwise int64; of lists they are
    on `device`, by default that of their tensors. They are a named tuple of input_ids, attention_mask (1: a
    token), position_ids and labels, each of shape (sequences, width).

    Of lists, offsets and bytes, `bos_id` goes before and `eos_id` after every sequence. Then it is cut at
    max_length, the eos_id staying, and padded at `padding_side` to the longest one or, with offsets, to
    max_length (which they need on a GPU, so that nothing waits for it), rounded up to `pad_to_multiple_of`.
    A 2-D tensor is padded at `padding_side` already: with "left" a row begins with its first token that is
    not pad_id.

    labels: the ids, and ignore_index for padding. With `shift_right` the inputs are the ids one place later,
    after a first bos_id, as of T5 and BART (which is no token of the sequence then). With a
    `mask_probability` labels are of the tokens that it chose, but never pad_id, bos_id, eos_id or one of
    special_ids; 80 % of these become mask_id in the inputs, 10 % a random one of vocab_size. Random
    numbers follow from torch's generator; the same seed gives the same tokens on a CPU and on a GPU.

    With `vocab_size`, ids are checked: IndexError, from a GPU as soon as it is known there, without waiting.
    Raises TypeError and ValueError for arguments that do not fit.

        token_preprocess([[5, 6, 7], [8]], mask_probability=0.15, mask_id=4, vocab_size=100)
        token_preprocess(["byte", "level"], byte_offset=3, eos_id=1)
    """
    _check_numbers(max_length, padding_side, pad_to_multiple_of, mask_probability, mask_id, vocab_size,
                   special_ids)
    if shift_right and (bos_id is None or mask_probability):
        what = "bos_id, the first input" if bos_id is None else "no mask_probability: labels are all tokens"
        raise ValueError(f"{OP}: shift_right needs {what}")
    batch = _batch(ids, offsets, None if device is None else as_device(OP, device))
    dtype = torch.int32 if batch.ids.dtype == torch.int32 else torch.int64
    _check_ids(dtype, pad_id=pad_id, bos_id=bos_id, eos_id=eos_id, mask_id=mask_id, ignore_index=ignore_index,
               byte_offset=byte_offset)
    if byte_offset + 255 > torch.iinfo(dtype).max:
        raise ValueError(f"{OP}: byte_offset + 255 must fit into {dtype}, got byte_offset={byte_offset}")
    if byte_offset and batch.rows and batch.ids.dtype != torch.uint8:
        raise ValueError(f"{OP}: byte_offset is of bytes, got ids of {batch.ids.dtype}")
    around = (None if shift_right else bos_id, eos_id)
    if not batch.is_ragged and any(token is not None for token in around):
        raise ValueError(f"{OP}: bos_id and eos_id go around lists, bytes or sequences with offsets, not "
                         "around the rows of a padded tensor")
    limit = _limit(batch, sum(token is not None for token in around), max_length)
    multiple = pad_to_multiple_of or 1
    width = -(-limit // multiple) * multiple
    special = {pad_id, *special_ids, *(t for t in (bos_id, eos_id) if t is not None)}
    masking = None
    if mask_probability and mask_id is not None and vocab_size is not None:
        if len(special) > MOST_SPECIAL:
            raise ValueError(f"{OP}: special_ids, with pad_id, bos_id and eos_id, must be at most "
                             f"{MOST_SPECIAL}, got {len(special)}")
        rng = random.draw(batch.ids.device, batch.rows * width)
        masking = Masking(mask_probability, mask_id, tuple(sorted(special)), rng)
    settings = Settings(width, limit, pad_id, padding_side == "left", *around,
                        bos_id if shift_right else None, byte_offset, vocab_size, ignore_index)
    out = Tokens(*(torch.empty(batch.rows, width, dtype=dtype, device=batch.ids.device)
                   for _ in Tokens._fields))
    if out.labels.numel():
        tokens_kernels.run(batch, settings, masking, out)
    return out


def _check_numbers(max_length: int | None, padding_side: str, multiple: int | None, probability: float,
                   mask_id: int | None, vocab_size: int | None, special_ids: Sequence[int]) -> None:
    positive = {"max_length": max_length, "pad_to_multiple_of": multiple, "vocab_size": vocab_size}
    for name, value in positive.items():
        if value is not None and (not is_int(value) or not 0 < value < 2**31):
            raise ValueError(f"{OP}: {name} must be a positive int below 2**31, got {value!r}")
    if not isinstance(special_ids, Collection) or isinstance(special_ids, str):
        raise TypeError(f"{OP}: special_ids must be integers, got {special_ids!r}")
    for token in special_ids:
        as_int(OP, "special_ids", token)
    if padding_side not in ("left", "right"):
        raise ValueError(f"{OP}: padding_side must be left or right, got {padding_side!r}")
    if not 0 <= as_float(OP, "mask_probability", probability) <= 1:
        raise ValueError(f"{OP}: mask_probability must be in [0, 1], got {probability!r}")
    if not probability:
        return
    for name, value in (("mask_id", mask_id), ("vocab_size", vocab_size)):
        if value is None:
            raise ValueError(f"{OP}: mask_probability needs {name}")
    if not 0 <= as_int(OP, "mask_id", mask_id) < (vocab_size or 0):
        raise ValueError(f"{OP}: mask_id must be in [0, vocab_size), [0, {vocab_size}), got {mask_id}")


def _check_ids(dtype: torch.dtype, **ids: int | None) -> None:
    limits = torch.iinfo(dtype)
    for name, value in ids.items():
        if value is None and name in ("bos_id", "eos_id", "mask_id"):
            continue
        try:
            fits = limits.min <= operator.index(value) <= limits.max  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(f"{OP}: {name} must be an int, got {value!r}") from None
        if not fits:
            raise ValueError(f"{OP}: {name} must fit into {dtype}, got {value!r}")


# -- batches ---------------------------------------------------------------------------------------

def _as_tensor(name: str, value: Any) -> Any:
    return to_torch(value, OP, name)[0] if is_foreign(value) and not isinstance(value, _TEXT) else value


def _batch(ids: Any, offsets: Any, device: torch.device | None) -> Batch:
    ids, offsets = _as_tensor("ids", ids), _as_tensor("offsets", offsets)
    if isinstance(ids, _TEXT):
        ids = [ids]
    if isinstance(ids, Tensor):
        return _batch_of_tensor(ids if device is None else ids.to(device), offsets)
    if offsets is not None:
        raise TypeError(f"{OP}: offsets are of a 1-D tensor ids, got {type(ids).__name__}")
    if not isinstance(ids, (list, tuple)):
        raise TypeError(f"{OP}: ids must be a tensor, a list of sequences, bytes or str, got "
                        f"{type(ids).__name__}")
    if any(isinstance(s, _TEXT) for s in ids):
        flat, lengths = _joined_bytes(ids)
    else:
        flat, lengths = _joined([_as_tensor("ids", s) for s in ids])
    flat = flat if device is None else flat.to(device)
    places = torch.tensor([0, *accumulate(lengths)], dtype=torch.int64, device="cpu")
    places = places.to(flat.device, non_blocking=True)
    return Batch(flat, places, len(lengths), max(lengths, default=0))


def _joined_bytes(texts: Sequence[Any]) -> tuple[Tensor, list[int]]:
    for text in texts:
        if not isinstance(text, _TEXT):
            raise TypeError(f"{OP}: ids must all be bytes or str, got {type(text).__name__} as well")
    encoded = [text.encode() if isinstance(text, str) else text for text in texts]
    joined = bytearray().join(encoded)
    flat = (torch.frombuffer(joined, dtype=torch.uint8) if joined else
            torch.empty(0, dtype=torch.uint8, device="cpu"))
    return flat.to(torch.get_default_device()), [len(text) for text in encoded]


def _joined(sequences: Sequence[Any]) -> tuple[Tensor, list[int]]:
    if any(isinstance(s, Tensor) for s in sequences):
        for s in sequences:
            if not isinstance(s, Tensor) or s.dim() != 1 or s.dtype != sequences[0].dtype:
                got = f"shape {tuple(s.shape)}, {s.dtype}" if isinstance(s, Tensor) else type(s).__name__
                raise TypeError(f"{OP}: ids must all be 1-D tensors of one dtype, got {got}")
        flat = torch.cat(list(sequences))
        _check_dtype(flat)
        return flat, [len(s) for s in sequences]
    for s in sequences:
        if not isinstance(s, (list, tuple, range)) or not all(isinstance(i, int) or is_int(i) for i in s):
            raise TypeError(f"{OP}: ids must be sequences of ints, got {s!r}"[:200])
    joined = list(chain.from_iterable(sequences))
    try:
        flat = torch.tensor(joined, dtype=torch.int64, device=torch.get_default_device())
    except (ValueError, RuntimeError, OverflowError):
        large = next(i for i in joined if not -2**63 <= i < 2**63)
        raise ValueError(f"{OP}: ids must fit into int64, got {large}") from None
    return flat, [len(s) for s in sequences]


def _check_dtype(ids: Tensor) -> None:
    if ids.dtype not in (torch.int32, torch.int64, torch.uint8):
        raise TypeError(f"{OP}: ids must be of dtype int32, int64 or (bytes) uint8, got {ids.dtype}")
    check_dense(OP, "ids", ids)
    no_transforms(OP, "ids", ids)


def _batch_of_tensor(ids: Tensor, offsets: Tensor | None) -> Batch:
    _check_dtype(ids)
    if ids.dim() != (2 if offsets is None else 1):
        raise ValueError(f"{OP}: ids must have 2 dimensions, or 1 with offsets, got {ids.dim()}")
    ids = ids.contiguous()
    if offsets is None:
        if ids.dtype != torch.uint8:
            return Batch(ids, None, *ids.shape)
        offsets = torch.arange(ids.shape[0] + 1, device=ids.device) * ids.shape[1]
        return Batch(ids, offsets, *ids.shape)
    if not isinstance(offsets, Tensor):
        raise TypeError(f"{OP}: offsets must be a 1-D tensor of int64, got {type(offsets).__name__}")
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or not len(offsets) or offsets.device != ids.device:
        raise ValueError(f"{OP}: offsets must be a 1-D tensor of int64 on {ids.device}, got {offsets.dtype} "
                         f"of shape {tuple(offsets.shape)} on {offsets.device}")
    longest = None
    if offsets.device.type == "cpu":
        if offsets[0] < 0 or offsets[-1] > len(ids) or (offsets[1:] < offsets[:-1]).any():
            raise ValueError(f"{OP}: offsets must not decrease and lie in [0, {len(ids)}]")
        lengths = offsets.diff()
        longest = int(lengths.max()) if len(lengths) else 0
    return Batch(ids, offsets.contiguous(), len(offsets) - 1, longest)


def _limit(batch: Batch, added: int, max_length: int | None) -> int:
    """How many tokens a row may have."""
    if batch.longest is None and max_length is None:
        raise ValueError(f"{OP}: offsets on a GPU need max_length, the width of the results")
    lengths = (max_length, None if batch.longest is None else batch.longest + added)
    return min(length for length in lengths if length is not None)
