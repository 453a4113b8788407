"""Images from one layout to the other, at the speed of memory: torch's copies take two to five times as
long."""

from __future__ import annotations

import functools

import torch

from fusionrt.laid import in_memory
from fusionrt.runtime.kernel import Kernel
from fusionrt.runtime.source import definitions, members, pointer

Tensor = torch.Tensor
FEWEST_ROWS = 16       # below, most of a block's part would be empty: torch's
ROWS, WORDS = 64, 32   # of a block


@functools.cache
def kernel(itemsize: int, each: int) -> Kernel:
    """`each`: neighbours that are one word."""
    word = {2: "unsigned short", 4: "unsigned"}[itemsize * each]
    return Kernel("transpose", "transpose",
                  [pointer("word_t", "x"), pointer("word_t", "y", const=False),
                   *members("int", "rows", "columns", "down", "across")],
                  definitions(word_t=word, EACH=each))


def channels_last(x: Tensor) -> Tensor:
    """A copy of images of planes (contiguous, of 2 or 4 bytes an element) with neighbouring channels."""
    if x.shape[1] < FEWEST_ROWS:
        return x.contiguous(memory_format=torch.channels_last)
    return _transposed(x, torch.empty_like(x, memory_format=torch.channels_last), x.shape[1],
                       x.shape[2:].numel())


def contiguous(x: Tensor) -> Tensor:
    """A copy of channels_last images, of 2 or 4 bytes an element, as planes."""
    return _transposed(x, torch.empty_like(x, memory_format=torch.contiguous_format), x.shape[2:].numel(),
                       x.shape[1])


def _transposed(x: Tensor, y: Tensor, rows: int, columns: int) -> Tensor:
    x = in_memory(x)
    each = 2 if x.itemsize == 2 and not (rows | columns) % 2 and not x.data_ptr() % 4 else 1
    down, across = -(-rows // ROWS), -(-columns // (WORDS * each))
    if x.numel():
        made = kernel(x.itemsize, each)
        made(x.device, len(x) * down * across, x.data_ptr(), y.data_ptr(),
             *made.planned(rows=rows, columns=columns, down=down, across=across))
    return y
