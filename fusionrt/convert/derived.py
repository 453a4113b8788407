"""Tensors that follow from weights, kept from call to call: weights in another layout, several as one.

What is kept lives as long as its first weight and is made anew when one of the weights was written to (its
version tells), is another one or has other memory. A write through `.data` changes no version, as autograd
does not see it either; nor does one through the buffer that parameters are views of. Nor does what a norm
does to its statistics: those are compared by their numbers, which can be done on a CPU only. Of memory that
is shared with other processes, whose versions are their own, nothing is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

Tensor = torch.Tensor


class _Kept(NamedTuple):
    result: Any
    source: list[tuple[Any, ...]]
    weights: list[weakref.ref[Tensor]]
    memory: list[StorageWeakRef]
    statistics: list[Tensor]


kept: Any = WeakIdKeyDictionary()  # first weight -> {what made it: _Kept}
_written: Any = WeakIdKeyDictionary()  # tensors that replays may write to, which changes no version either


def derived(make: Callable[..., Any], *weights: Tensor) -> Any:
    """make(*weights), kept. For weights that record no gradients."""
    first = weights[0]
    if any(w.is_inference() or w in _written or _is_shared(w) for w in weights):  # versions tell nothing
        return make(*weights)
    source = list(map(_source, weights))
    statistics = [w for w in weights if w.device.type == "cpu" and is_statistic(w)]
    entry = kept.get(first)
    found = entry.get(make) if entry is not None else None
    if found is not None and found.source == source and all(
            ref() is w for ref, w in zip(found.weights, weights, strict=True)) and not any(
            memory.expired() for memory in found.memory) and all(
            map(torch.equal, found.statistics, statistics)):
        return found.result
    with torch.inference_mode(False), torch.no_grad():
        result = make(*weights)
    if first.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return result  # nothing has been computed, and each replay computes it
        torch.cuda.current_stream(first.device).synchronize()  # once: other streams will read it as well
    if entry is None:
        entry = kept[first] = {}
    # Another weight may be given the address of memory that was freed.
    memory = [StorageWeakRef(w.untyped_storage()) for w in weights]
    entry[make] = _Kept(result, source, list(map(weakref.ref, weights)), memory,
                        [s.clone() for s in statistics])
    return result


def _is_shared(w: Tensor) -> bool:
    """With other processes, whose writes change their versions alone (Hogwild)."""
    return w.is_cpu and w.untyped_storage().is_shared()


def _source(w: Tensor) -> tuple[Any, ...]:
    return w._version, w.data_ptr(), w.dtype, w.shape, w.stride()


class Last:
    """derived(make, weight) for a call in a graph, which sees the same parameter each time: it looks at what
    it was given last, and at a third of what there is to look at otherwise. Between products of matrices,
    which leave nothing of the interpreter in a processor's caches, that saves 30 us."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        self.make = make
        self._last: tuple[Any, ...] | None = None

    def __call__(self, weight: Tensor) -> Tensor:
        if self._last is not None:
            seen, source, memory, result = self._last
            if seen() is weight and _source(weight) == source and not memory.expired():
                return cast(Tensor, result)
        result = derived(self.make, weight)
        entry = kept.get(weight)
        found = None if entry is None or is_statistic(weight) else entry.get(self.make)
        self._last = None if found is None or found.result is not result else (
            found.weights[0], found.source[0], found.memory[0], result)
        return cast(Tensor, result)


def _count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """After a step of any optimizer: torch's fused ones write to parameters, whose versions do not tell."""
    if getattr(optimizer, "tells_versions", False):
        return
    stepped = [p for group in getattr(optimizer, "param_groups", ()) if group.get("fused")
               for p in group["params"] if p.grad is not None and not p.is_inference()]
    if stepped:
        torch.autograd.graph.increment_version(stepped)


register_optimizer_step_post_hook(_count)


def is_statistic(t: Tensor) -> bool:
    """Whether a norm may move it."""
    return t.is_floating_point() and not isinstance(t, torch.nn.Parameter)


def note_written(tensors: Iterable[Any]) -> None:
    """These are written to by a graph whose replays nobody sees."""
    for t in tensors:
        if isinstance(t, Tensor) and not is_statistic(t) and not t.is_inference() and t not in _written:
            _written[t] = True
            torch.autograd.graph.increment_version(t)  # what was kept of it is old


def kept_by(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function of weights that keeps what `make` makes of them, as long as there is this function."""
    def from_weights(*weights: Tensor) -> Tensor:
        return derived(make, *weights)

    weakref.finalize(from_weights, _forget, make)
    return from_weights


def _forget(make: Callable[..., Tensor]) -> None:
    for entry in list(kept.values()):
        entry.pop(make, None)


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
