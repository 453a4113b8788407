"""Consecutive integers on a device, which operators compare positions with; each is made once."""

from __future__ import annotations

import functools
import threading

import torch

from fusionrt.autograd import is_watched


def counted(start: int, stop: int, like: torch.Tensor) -> torch.Tensor:
    """start ... stop - 1 in int32, where `like` lies; what is being traced or captured has its own."""
    if is_watched() or (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        return torch.arange(start, stop, dtype=torch.int32, device=like.device)
    return kept(start, stop, like.device)


@functools.lru_cache(1024)
def kept(start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Part of a line that is never freed: kernels of any stream may still read it."""
    reach = max(-start, stop, 1)
    with _lock, torch.inference_mode(False):
        lines = _lines.setdefault(device, [])
        if not lines or len(lines[-1]) < 2 * reach:
            reach = 1 << (reach - 1).bit_length()
            # Copied from the host, which waits for it: other streams may read it next.
            lines.append(torch.arange(-reach, reach, dtype=torch.int32).to(device))
        middle = len(lines[-1]) // 2
        return lines[-1][middle + start:middle + stop]


_lines: dict[torch.device, list[torch.Tensor]] = {}  # of -n to n - 1, each at least twice as long as the last
_lock = threading.Lock()
