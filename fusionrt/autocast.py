"""torch.autocast, which ops follow as torch's own do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusionrt.guards import Check
from fusionrt.sites import Sites

Run = Callable[..., Any]


def is_on(device: torch.device) -> bool:
    return device.type in ("cuda", "cpu") and torch.is_autocast_enabled(device.type)


def off(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """For what computes with operands that were cast."""
    return torch.autocast(device.type, enabled=False) if is_on(device) else contextlib.nullcontext()


def cast(first: torch.Tensor, *more: Any) -> tuple[Any, ...]:
    """To the lower precision, but for float64 and what is not floating-point; where `first` is decides."""
    tensors = first, *more
    if not is_on(first.device):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(t if t is None or t.dtype == torch.float64 or not t.is_floating_point() else t.to(dtype)
                 for t in tensors)


def chosen(sites: Sites, key: tuple[Any, ...], tensors: Sequence[Any], choose: Callable[[], Run]) -> Run:
    """What `choose` gives for tensors that were cast, kept by `sites`: where torch casts, by the dtype as
    well."""
    as_now = casting_as_now(tensors[0].device)
    if as_now is None:
        return sites.keep(key, tensors, choose())
    key = *key, torch.get_autocast_dtype(tensors[0].device.type)
    return sites.find(key, tensors) or sites.keep(key, tensors, choose(), as_now)


def casting_as_now(device: torch.device) -> Check | None:
    """Whether torch casts to the dtype to which it does now, whatever the arguments; a guard sees whether it
    casts at all. None: it does not."""
    if not is_on(device):
        return None
    kind, dtype = device.type, torch.get_autocast_dtype(device.type)
    return lambda *_: torch.get_autocast_dtype(kind) == dtype
