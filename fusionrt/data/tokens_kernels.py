"""The kernels of token_preprocess: a row of results each block on a GPU, each task on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fusionrt import indices
from fusionrt.cpu import kernel as cpu
from fusionrt.dtypes import name_of
from fusionrt.laid import address
from fusionrt.random import Rng
from fusionrt.rehearsal import device_type
from fusionrt.runtime import kernel as gpu
from fusionrt.runtime.source import Field, definitions, members, pointer

BLOCK = 256
MOST_SPECIAL = 64
WORD = 2**32


class Batch(NamedTuple):
    """Sequences one behind the other, or (no offsets) rows of a padded tensor; `longest` may be unknown."""

    ids: torch.Tensor
    offsets: torch.Tensor | None
    rows: int
    longest: int | None

    @property
    def is_ragged(self) -> bool:
        return self.offsets is not None


class Settings(NamedTuple):
    width: int
    limit: int            # of tokens in a row; padding follows
    pad: int
    left: bool
    bos: int | None
    eos: int | None
    start: int | None     # the first input, others being shifted
    shift: int            # of bytes
    vocab_size: int | None
    ignore: int


class Masking(NamedTuple):
    probability: float
    mask: int
    special: tuple[int, ...]
    rng: Rng

    @property
    def bounds(self) -> tuple[int, int, int]:
        """Of 32 random bits: a token is chosen, then masked, or else replaced, below these."""
        return round(self.probability * WORD), round(0.8 * WORD), round(0.9 * WORD)


_FLAGS = ("RAGGED", "LEFT", "BOS", "EOS", "SHIFTED", "MASKED", "CHECKED")
_POINTERS = ("input_ids", "attention_mask", "position_ids", "labels")


class _Numbers(NamedTuple):
    """Of a kernel on either device."""

    size: int             # of a padded row
    total: int            # ids
    width: int
    limit: int
    pad: int
    bos: int
    eos: int
    first_input: int
    shift: int
    vocab_size: int
    ignore: int
    mask: int
    n_special: int
    chosen_below: int
    masked_below: int
    random_below: int


def _flags(batch: Batch, settings: Settings, masking: Masking | None) -> tuple[bool, ...]:
    return (batch.is_ragged, settings.left, settings.bos is not None,
            settings.eos is not None, settings.start is not None, masking is not None,
            settings.vocab_size is not None)


def _numbers(batch: Batch, settings: Settings, masking: Masking | None) -> _Numbers:
    mask, n_special, (chosen, masked, replaced) = (0, 0, (0, 0, 0)) if masking is None else (
        masking.mask, len(masking.special), masking.bounds)
    return _Numbers(
        size=0 if batch.is_ragged else batch.ids.shape[1], total=batch.ids.numel(), width=settings.width,
        limit=settings.limit, pad=settings.pad, bos=settings.bos or 0, eos=settings.eos or 0,
        first_input=settings.start or 0, shift=settings.shift,
        vocab_size=settings.vocab_size or 0, ignore=settings.ignore, mask=mask, n_special=n_special,
        chosen_below=chosen, masked_below=masked, random_below=replaced)


@functools.cache
def _gpu_kernel(source: str, index: str, flags: tuple[bool, ...]) -> gpu.Kernel:
    fields = [pointer("source_t", "ids"), pointer("long long", "offsets"),
              *(pointer("index_t", name, const=False) for name in _POINTERS),
              pointer("unsigned long long", "fault", const=False), pointer("unsigned long long", "state"),
              *members("long long", *_Numbers._fields), *members("unsigned long long", "seed", "offset"),
              Field(f"long long special[{MOST_SPECIAL}]", "q" * MOST_SPECIAL)]
    constants = definitions(source_t=f"{source}_t", index_t=f"{index}_t",
                            **dict(zip(_FLAGS, flags, strict=True)))
    return gpu.Kernel("token_preprocess", "tokens", fields, constants, block=BLOCK)


# The words of kernels_src/tokens.cu, in which the flags are constants here as well.
_TEXT = """
    half, low = uint64_of(32), uint64_of(0xFFFFFFFF)
    k0, k1 = np.uint32(uint64_of(seed) & low), np.uint32(uint64_of(seed) >> half)
    c0, c1 = np.uint32(uint64_of(offset) & low), np.uint32(uint64_of(offset) >> half)
    before, around = int(BOS), int(BOS) + int(EOS)
    for row in range(start, stop):
        begin, end = row * size, row * size + size
        if RAGGED:
            begin, end = offsets[row], offsets[row + 1]
        elif LEFT:
            while begin < end and np.int64(ids[begin]) == pad:
                begin += 1
        count = min(end - begin + around, limit)
        first = width - count if LEFT else 0
        position, previous = 0, first_input
        for at in range(width):
            k, token = at - first, pad
            inside = k >= 0 and k < count
            if inside:
                if EOS and k == count - 1:
                    token = eos
                elif BOS and k == 0:
                    token = bos
                else:
                    token = np.int64(ids[begin + k - before]) + shift
            real = inside and (RAGGED or token != pad)
            token_in, label = token, ignore
            if real:
                label = token
            if SHIFTED:
                token_in = pad if at < first else previous
                if at >= first:
                    previous = token
            to = row * width + at
            if MASKED:
                counter = uint64_of(to)
                w0, w1, w2, w3 = philox7(c0, c1, np.uint32(counter & low), np.uint32(counter >> half), k0, k1)
                chosen = real and np.int64(w0) < chosen_below
                for s in range(n_special):
                    chosen = chosen and special[s] != token
                if not chosen:
                    label = ignore
                elif np.int64(w1) < masked_below:
                    token_in = mask
                elif np.int64(w1) < random_below:
                    token_in = np.int64(uint64_of(w2) * uint64_of(vocab_size) >> half)
            input_ids[to] = token_in
            attention_mask[to] = 1 if real else 0
            position_ids[to] = position if real else 1
            labels[to] = label
            if real:
                position += 1
"""


@functools.cache
def _cpu_kernel(source: str, index: str, flags: tuple[bool, ...]) -> cpu.Kernel:
    constants = "\n".join(f"{name} = {on}" for name, on in zip(_FLAGS, flags, strict=True))
    return cpu.Kernel("token_preprocess", _TEXT, before=constants, integers=(
        *_Numbers._fields, "seed", "offset"), pointers={
        "ids": source, "offsets": "int64", **dict.fromkeys(_POINTERS, index), "special": "int64"})


def run(batch: Batch, settings: Settings, masking: Masking | None, out: Sequence[torch.Tensor]) -> None:
    device = batch.ids.device
    source, index = (name_of(t.dtype) for t in (batch.ids, out[0]))
    flags = _flags(batch, settings, masking)
    addresses = [address(t) for t in (batch.ids, batch.offsets, *out)]
    numbers = _numbers(batch, settings, masking)
    seed, offset, state = (0, 0, None) if masking is None else masking.rng
    special = () if masking is None else masking.special
    if device_type(batch.ids) == "cpu":
        if settings.vocab_size is not None:
            around = torch.tensor(_around(settings), dtype=torch.int64, device="cpu")
            indices.check("token_preprocess", [indices.Indices("ids", ids, settings.vocab_size)
                                               for ids in (_real_ids(batch, settings), around)])
        table = torch.tensor(special, dtype=torch.int64, device="cpu")
        on_cpu = _cpu_kernel(source, index, flags)
        on_cpu(device, batch.rows, on_cpu.given(
            *addresses, special=table.data_ptr(), seed=_signed(seed), offset=_signed(offset),
            **numbers._asdict()), work=4 * settings.width)
        return
    watched = batch.longest is None or settings.vocab_size is not None  # offsets that nobody has seen
    fault = indices.fault_of(device) if watched else None
    on_gpu = _gpu_kernel(source, index, flags)
    on_gpu(device, batch.rows, *addresses, address(fault), address(state), *on_gpu.planned(
        **numbers._asdict(), seed=seed, offset=offset, special=special))
    if fault is not None and not fault.is_meta:
        ids = indices.Indices("ids", None, settings.vocab_size or 0)
        ends = indices.Indices("offsets", None, batch.ids.numel() + 1)
        indices.check_later("token_preprocess", fault, [ids, ends])


def _real_ids(batch: Batch, settings: Settings) -> torch.Tensor:
    """Those of results, which have to be in the vocabulary."""
    flat, offsets = batch.ids.view(-1), batch.offsets
    if offsets is None:
        ids = batch.ids[:, :settings.limit]
        return ids[ids != settings.pad]
    added = len(_around(settings))
    ends = int(offsets[0]), int(offsets[-1])
    if batch.longest is None or batch.longest + added > settings.limit or ends != (0, len(flat)):
        counts = (offsets.diff() + added).clamp(max=settings.limit).sub(added).clamp(min=0)
        first = (offsets[:-1] - counts.cumsum(0) + counts).repeat_interleave(counts)
        flat = flat[first + torch.arange(len(first), device="cpu")]
    return flat.long() + settings.shift if settings.shift else flat


def _around(settings: Settings) -> list[int]:
    """What is put before and behind each sequence."""
    return [t for t in (settings.bos, settings.eos) if t is not None]


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
