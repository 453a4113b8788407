"""Memory for kernels alone: a piece for each thread and stream, whose launches follow each other."""

from __future__ import annotations

from fusionrt import forks
from fusionrt.runtime import device as cuda

BYTES = 8 << 20  # of a piece
ALIGNMENT = 256

_pieces: dict[tuple[int, int, int], int] = {}
_lock = forks.Lock()


def piece(device: int, stream: int, thread: int) -> int:
    """Its address."""
    with _lock():
        if (device, stream, thread) not in _pieces:
            _pieces.setdefault((device, stream, thread), cuda.memory(BYTES))
        return _pieces[device, stream, thread]


def offsets(sizes: dict[int, int]) -> dict[int, int]:
    """Where things of these sizes begin in a piece; of those that find room."""
    found, end = {}, 0
    for name, size in sizes.items():
        if end + size <= BYTES:
            found[name], end = end, -(-(end + size) // ALIGNMENT) * ALIGNMENT
    return found
