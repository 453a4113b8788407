"""Consecutive integers on a device, which operators compare positions with; each is made once."""

from __future__ import annotations

import functools

import torch

from fusionrt.autograd import is_watched


def counted(start: int, stop: int, like: torch.Tensor) -> torch.Tensor:
    """start ... stop - 1 in int32, where `like` lies; what is being traced or captured has its own."""
    if is_watched() or (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        return torch.arange(start, stop, dtype=torch.int32, device=like.device)
    return kept(start, stop, like.device)


@functools.lru_cache(128)
def kept(start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Copied from the host, which waits for it: other streams may read it next."""
    with torch.inference_mode(False):
        return torch.arange(start, stop, dtype=torch.int32).to(device)
