"""torch.autocast, which ops follow as torch's own do."""

from __future__ import annotations

from typing import Any

import torch


def is_on(device: torch.device) -> bool:
    return device.type in ("cuda", "cpu") and torch.is_autocast_enabled(device.type)


def cast(first: torch.Tensor, *more: Any) -> tuple[Any, ...]:
    """To the lower precision, but for float64 and what is not floating-point; where `first` is decides."""
    tensors = first, *more
    if not is_on(first.device):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(t if t is None or t.dtype == torch.float64 or not t.is_floating_point() else t.to(dtype)
                 for t in tensors)
