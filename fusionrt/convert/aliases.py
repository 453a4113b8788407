"""Inputs that share memory with one that the graph writes to.

Passes move calls by what shares memory when a graph is captured. Dynamo does not look whether that is so
in later calls; where the graph writes to its inputs, this does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fusionrt.convert.derived import note_written

Run = Callable[..., Any]


class _Seen(NamedTuple):
    places: list[int]  # where each input's elements lie; 0: it is no tensor
    memory: list[int]  # where the memory begins that they are a part of
    run: Run


def guarded(run: Run, original: Run, written: Sequence[int]) -> Run:
    """`run`, or `original` for inputs some of whose memory is also that of one of the `written` ones, by
    their places. Looked at again when an input lies elsewhere than in the last call."""
    last = _Seen([], [], run)

    def checked(*args: Any) -> Any:
        nonlocal last
        seen = last  # of whichever thread
        places = [a.data_ptr() if isinstance(a, torch.Tensor) else 0 for a in args]
        if places != seen.places:
            note_written(args[k] for k in written)
            memory = [seen.memory[k] if seen.places and seen.places[k] == at else _memory(args[k])
                      for k, at in enumerate(places)]
            seen = last = _Seen(places, memory, original if _overlap(memory, written) else run)
        return seen.run(*args)

    return checked


def _memory(given: Any) -> int:
    return given.untyped_storage().data_ptr() if isinstance(given, torch.Tensor) and given.numel() else 0


def _overlap(memory: Sequence[int], written: Sequence[int]) -> bool:
    times = Counter(memory)
    return any(memory[k] and times[memory[k]] > 1 for k in written)
