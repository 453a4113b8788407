"""Consecutive integers on a device, which operators compare positions with; each is made once."""

from __future__ import annotations

import functools

import torch

from fusionrt import forks
from fusionrt.watching import is_watched


def integers(start: int, stop: int, like: torch.Tensor) -> torch.Tensor:
    """start ... stop - 1 in int32, where `like` lies; what is being traced or captured has its own."""
    if is_watched() or (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        return torch.arange(start, stop, dtype=torch.int32, device=like.device)
    return kept(start, stop, like.device)


@functools.lru_cache(1024)
def kept(start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Part of a line that is never freed: kernels of any stream may still read it. It begins at a multiple of
    16 bytes."""
    reach, shift = max(-start, stop, ALIGNED), start % ALIGNED
    with _lock(), torch.inference_mode(False):
        lines = _lines.setdefault((device, shift), [])
        if not lines or len(lines[-1]) < 2 * reach:
            reach = 1 << (reach - 1).bit_length()
            # Copied from the host, which waits for it: other streams may read it next.
            on_host = torch.arange(shift - reach, shift + reach, dtype=torch.int32, device="cpu")
            lines.append(on_host.to(device))
        first = len(lines[-1]) // 2 - shift + start
        return lines[-1][first:first + stop - start]


ALIGNED = 4  # numbers
# Of shift - n to shift + n - 1, each at least twice as long as the last.
_lines: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
_lock = forks.Lock()
