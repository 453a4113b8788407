"""Tensors that follow from weights, kept from call to call: weights in another layout, several as one.

What is kept lives as long as its first weight and is made anew when one of the weights was written to (its
version tells), is another one or has other memory. A write through `.data` changes no version, as autograd
does not see it either.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

Tensor = torch.Tensor


class _Kept(NamedTuple):
    result: Tensor
    source: list[tuple[Any, ...]]
    weights: list[weakref.ref[Tensor]]


kept: Any = WeakIdKeyDictionary()  # first weight -> {what made it: _Kept}


def derived(make: Callable[..., Tensor], *weights: Tensor) -> Tensor:
    """make(*weights), kept. For weights that record no gradients."""
    first = weights[0]
    if first.is_inference():  # it has no version
        return make(*weights)
    source = [(w._version, w.data_ptr(), w.dtype, w.shape) for w in weights]
    entry = kept.get(first)
    found = entry.get(make) if entry is not None else None
    if found is not None and found.source == source and all(
            ref() is w for ref, w in zip(found.weights, weights, strict=True)):
        return found.result
    with torch.no_grad():
        result = make(*weights)
    if first.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return result  # nothing has been computed, and each replay computes it
        torch.cuda.current_stream(first.device).synchronize()  # once: other streams will read it as well
    if entry is None:
        entry = kept[first] = {}
    entry[make] = _Kept(result, source, [weakref.ref(w) for w in weights])
    return result


def channels_last(weight: Tensor) -> Tensor:
    """The weight of a convolution as channels_last images want it."""
    return derived(_channels_last, weight)


def stacked(*weights: Tensor) -> Tensor:
    """The weights, or biases, of linear layers of one input as those of one layer."""
    return derived(_stacked, *weights)


def _channels_last(weight: Tensor) -> Tensor:
    return weight.contiguous(memory_format=torch.channels_last)


def _stacked(*weights: Tensor) -> Tensor:
    return torch.cat(weights)
