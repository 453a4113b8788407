"""What a plan does: what it allocates and launches. Its Python text and its machine code are made of this."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fusionrt.random import Taking
from fusionrt.runtime.source import Params

RANDOM = "rng"  # the last argument, where there is one: seed, offset, and None, as only captures have a state
ARRIVED = "counter({device}, at)"  # where blocks count themselves, which belongs to a stream


class Allocated(NamedTuple):
    """An output, as `empty_strided` makes it."""

    name: str
    shape: Sequence[int]
    strides: Sequence[int]
    dtype: torch.dtype


class Launched(NamedTuple):
    """A kernel, and its parameters: numbers, or as Python text the addresses of inputs (p_ and the argument's
    name) and of outputs, and arguments that are numbers."""

    kernel: int
    grid: int
    layers: int
    block: int
    shared: int
    params: Params
    packed: Sequence[str | float]
    n_allocated: int       # outputs that there were by then: a later one may have the name of one of these
    attribute: Any = None  # of the launch: a CUlaunchAttribute of ctypes
    owned: Any = None      # the kernel, if nobody else owns it


class Plan(NamedTuple):
    """`general` does the same in Python, and whatever else there is to do."""

    general: Callable[..., Any]
    arguments: Sequence[str]
    outputs: Sequence[Allocated]
    returned: Sequence[str]  # the others are for the kernels alone
    launched: Sequence[Launched]
    device: int
    thread: int  # that it belongs to
    functions: Mapping[str, Any]  # empty; stream, scratch
    random: Taking | None = None  # for RANDOM, if that is no argument
    still: tuple[Callable[[], int], int] | None = None  # what must be so in each call
    driver: tuple[int | None, int | None] | None = None  # launches, tells of captures; None: CUDA's
