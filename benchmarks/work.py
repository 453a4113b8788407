"""Work that is no row of the catalogue: ours and eager torch's.

On a GPU, on input sets in rotation, forward passes are timed in CUDA graphs; backward passes as they are
issued one by one, as some gradients of torch's cannot be captured. On a CPU, the wall time of a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from fusionrt.bench import ceilings, sampling, timing
from fusionrt.bench.results import Results, why

Function = Callable[..., Any]
MOST_CALLS = 20  # in a graph


class Made(NamedTuple):
    """One input set."""

    ours: Function
    eager: Function
    leaves: list[torch.Tensor]  # what has gradients


class Work(NamedTuple):
    labels: dict[str, Any]
    nbytes: dict[str, int]      # the least, by direction
    make: Callable[[], Made]
    ceiling: str = "copy"       # or "read"


def measure(works: Iterable[Work], run: Results) -> None:
    """A row of every work and direction; one that fails says why."""
    with timing.stream():
        for work in works:
            for direction in work.nbytes:
                try:
                    _measure(work, direction, run)
                except Exception as error:
                    run.add(**work.labels, direction=direction, error=why(error))
                timing.release()


def measure_on_cpu(works: Iterable[Work], run: Results) -> None:
    for work in works:
        for direction, nbytes in work.nbytes.items():
            try:
                made = work.make()
                times = timing.cpu({name: _call(getattr(made, name), made.leaves, direction)
                                    for name in ("ours", "eager")}, rounds=9)
                ours, eager = times["ours"], times["eager"]
                run.add(**work.labels, direction=direction, bytes=nbytes, MB=round(nbytes / (1 << 20), 2),
                        us=ours.us, spread=ours.spread, eager_us=eager.us,
                        vs_eager=round(eager.us / ours.us, 3), **{"GB/s": round(nbytes / ours.us / 1e3, 2)})
            except Exception as error:
                run.add(**work.labels, direction=direction, error=why(error))


def _measure(work: Work, direction: str, run: Results) -> None:
    nbytes = work.nbytes[direction]
    made = [work.make() for _ in range(timing.n_sets(nbytes))]
    n = max(len(made), min(MOST_CALLS, timing.n_calls(nbytes)))
    sets = [made[i % len(made)] for i in range(n)]
    variants = {name: [_call(getattr(one, name), one.leaves, direction) for one in sets]
                for name in ("ours", "eager")}
    times = (timing.replayed if direction == "forward" else sampling.issued)(variants)
    reached = ceilings.read(nbytes) if work.ceiling == "read" else ceilings.copy(nbytes)
    ceiling = run.ceiling(work.ceiling, reached)
    ours, rate = times["ours"], nbytes / times["ours"].us / 1e6
    run.add(**work.labels, direction=direction, bytes=nbytes, MB=round(nbytes / (1 << 20), 2), us=ours.us,
            spread=ours.spread, eager_us=times["eager"].us, vs_eager=round(times["eager"].us / ours.us, 3),
            **{"TB/s": round(rate, 4), f"of_{work.ceiling}": round(rate / ceiling, 4)})


def _call(function: Function, leaves: list[torch.Tensor], direction: str) -> timing.Call:
    if direction == "forward":
        return torch.no_grad()(function)
    found = function()
    outs = found if isinstance(found, tuple) else (found,)
    seeds = [torch.randn_like(out) for out in outs]
    return functools.partial(torch.autograd.grad, outs, leaves, seeds, retain_graph=True)
