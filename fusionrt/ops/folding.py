"""A norm folded into the weights of the convolution before it.

What was folded is kept as long as the weight lives, and made anew when the weight, a statistic or a parameter
of the norm has other values: that is what a kernel looks at in each call, as versions of tensors do not tell.
It costs a launch and the reading of the weights; where calls are repeated, one launch for all (`Ahead`).
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fusionrt.dtypes import STORAGE
from fusionrt.laid import address, in_memory
from fusionrt.runtime.kernel import Kernel
from fusionrt.runtime.source import Field, Params, definitions, members, pointer

Tensor = torch.Tensor
OF_NORM = ("bias", "running_mean", "running_var", "bn_weight", "bn_bias")  # the first is the convolution's
BLOCK = 256


class Folded:
    """Weight and bias, and what they follow from: at first nothing that could be."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight = torch.empty_like(weight, dtype=dtype, memory_format=torch.channels_last)
        self.bias = torch.empty(weight.shape[0], dtype=dtype, device=weight.device)
        self.applied = torch.full((weight.shape[0], 2), -1, dtype=torch.int64, device=weight.device)


_folded: Any = WeakIdKeyDictionary()
_ahead: ContextVar[Ahead | None] = ContextVar("ahead", default=None)


class Form(NamedTuple):
    """What a kernel is made for: dtypes, None for what there is not; whether the weight is channels_last."""

    weight: str
    folded: str
    of: tuple[str | None, ...]
    last: bool


LAYER = [pointer("weight_t", "weight"), *(pointer(f"{name}_t", name) for name in OF_NORM),
         *(Field(f"{kind}* {name}", "Q") for kind, name in (
             ("folded_t", "folded"), ("folded_t", "folded_bias"), ("unsigned long long", "applied"))),
         *members("int", "row", "pixels", "inner", "channels", "team"), *members("float", "eps")]


@functools.cache
def kernel(form: Form, many: bool = False) -> Kernel:
    """`many`: of a list of layers."""
    constants = definitions(weight_t=f"{form.weight}_t", folded_t=f"{form.folded}_t", LAST=form.last,
                            MANY=many)
    for name, dtype in zip(OF_NORM, form.of, strict=True):
        constants += [*definitions(**{f"has_{name}": dtype is not None}),
                      *definitions(**{f"{name}_t": f"{dtype or 'float32'}_t"})]
    fields = LAYER
    if many:
        constants.append(Params(fields, "Layer").declaration)
        fields = [pointer("Layer", "layers"), pointer("int2", "channels"), *members("int", "count")]
    else:
        constants.append("struct Params;\nusing Layer = Params;")
    return Kernel("fold_norm", "fold_norm", fields, constants, block=BLOCK)


def _team(row_bytes: int) -> int:
    """Threads for a channel's weights: one for each 16 bytes, in whole warps, of which a power of two makes a
    block."""
    return min(BLOCK, max(32, 1 << (-(-row_bytes // 16) - 1).bit_length()))


def kept_for(weight: Tensor) -> Folded | None:
    """What was folded for it, if it was."""
    made: Folded | None = _folded.get(weight)
    return made


def folded(weight: Tensor, of: Sequence[Tensor | None], eps: float, dtype: torch.dtype
           ) -> tuple[Tensor, Tensor]:
    """Weight and bias of the convolution that is as good as one and its norm, whose tensors `of` are in the
    order of OF_NORM: computed in float32, rounded once to `dtype`; in memory as convolutions of channels_last
    images want them."""
    made = kept_for(weight)
    is_new = made is None or made.weight.dtype != dtype or made.weight.shape != weight.shape
    made = Folded(weight, dtype) if made is None or is_new else made
    last = weight.is_contiguous(memory_format=torch.channels_last)
    given = weight, *of
    held = [t if t is None else in_memory(t) for t in given]
    dense = [t if t is None or (k == 0 and last) else t.contiguous() for k, t in enumerate(held)]
    of_norm = tuple(None if t is None else STORAGE[t.dtype] for t in of)
    form = Form(STORAGE[weight.dtype], STORAGE[dtype], of_norm, last)
    tensors = *dense, made.weight, made.bias, made.applied
    fold, team = kernel(form), _team(weight[0].nbytes)
    values = (*map(address, tensors), *fold.planned(
        row=weight[0].numel(), pixels=weight[0, 0].numel(), inner=weight.shape[1], channels=len(weight),
        team=team, eps=eps))
    ahead = _ahead.get()
    if ahead is None or not ahead.has(form, values):
        fold(weight.device, -(-len(weight) * team // BLOCK), *values)
        if ahead is not None and all(a is b for a, b in zip(dense, given, strict=True)):
            ahead.add(form, values, made, given)
    # The memory of a graph is the graph's.
    if is_new and weight.is_cuda and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(weight.device).synchronize()  # other streams may have it next
        _folded[weight] = made
    return made.weight, made.bias


class Ahead:
    """For a sequence of calls that is repeated and writes to none of their arguments: what its first time
    (`noting`) folds, each later one looks at ahead of all else (`looking`), in one kernel instead of one
    each."""

    def __init__(self) -> None:
        self.layers: dict[Form, dict[tuple[Any, ...], Folded]] = {}
        self.lists: list[tuple[Form, Tensor, Tensor]] = []
        self.read: list[Sequence[Tensor | None]] = []  # some may be nobody else's
        self.is_noting = False

    def add(self, form: Form, values: tuple[Any, ...], made: Folded, given: Sequence[Tensor | None]) -> None:
        if self.is_noting:
            self.layers.setdefault(form, {})[values] = made
            self.read.append(given)

    def has(self, form: Form, values: tuple[Any, ...]) -> bool:
        return not self.is_noting and values in self.layers.get(form, ())

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        token, self.is_noting = _ahead.set(self), True
        try:
            yield
        finally:
            _ahead.reset(token)
            self.is_noting = False
        # What two norms are folded into in turns cannot be both ahead of all.
        times = Counter(id(made) for layers in self.layers.values() for made in layers.values())
        self.layers = {form: alone for form, layers in self.layers.items() if (alone := {
            values: made for values, made in layers.items() if times[id(made)] == 1})}
        for form, layers in self.layers.items():
            packer = Params(LAYER).packer
            channels = [(k, channel) for k, made in enumerate(layers.values())
                        for channel in range(len(made.bias))]
            text = bytearray(b"".join(packer.pack(*values) for values in layers))
            device = next(iter(layers.values())).bias.device
            self.lists.append((form, torch.frombuffer(text, dtype=torch.uint8).to(device),
                               torch.tensor(channels, dtype=torch.int32, device=device)))
        self._look()  # a graph's capture may load no kernel

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        self._look()
        token = _ahead.set(self)
        try:
            yield
        finally:
            _ahead.reset(token)

    def _look(self) -> None:
        for form, layers, channels in self.lists:
            count = len(channels)
            kernel(form, True)(channels.device, -(-count * 32 // BLOCK), layers.data_ptr(),
                               channels.data_ptr(), count)
