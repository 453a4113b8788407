"""Calls on meta tensors compute nothing. In a rehearsal they list the kernels that they would need."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class Source(NamedTuple):
    """A kernel that is no problem's. `entry` is the name in a GPU's text, the accuracy for the CPU."""

    text: str
    entry: str
    name: str


_needed: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("needed", default=None)
_ANY_GPU = torch.device("cuda")
_meta_means: contextvars.ContextVar[torch.device] = contextvars.ContextVar("meta_means", default=_ANY_GPU)
_clusters: contextvars.ContextVar[bool] = contextvars.ContextVar("clusters", default=True)


@contextlib.contextmanager
def collecting(device: str | torch.device = "cuda", clusters: bool = True) -> Iterator[list[Any]]:
    """What calls in here need on a `device` ("cuda" or "cpu", or a GPU of this machine): a Problem or a
    Source for each kernel. `clusters`: whether a GPU that is none of this machine has them."""
    needed: list[Any] = []
    token, meaning = _needed.set(needed), _meta_means.set(torch.device(device))
    of_gpu = _clusters.set(clusters)
    try:
        yield needed
    finally:
        _needed.reset(token)
        _meta_means.reset(meaning)
        _clusters.reset(of_gpu)


def is_on() -> bool:
    return _needed.get() is not None


def note(kernel: Any) -> None:
    needed = _needed.get()
    if needed is not None:
        needed.append(kernel)


def device_type(tensor: torch.Tensor) -> str:
    """Of a meta tensor, the device that it stands for."""
    return stands_for(tensor.device).type


def stands_for(device: torch.device) -> torch.device:
    """Of the meta device, what is rehearsed for: a GPU without an index where it is none of this machine."""
    return _meta_means.get() if device.type == "meta" else device


def has_clusters() -> bool:
    """Of a GPU that is none of this machine."""
    return _clusters.get()
