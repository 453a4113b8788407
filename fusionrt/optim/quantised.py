"""8-bit states: a byte for each element, and the largest magnitude of every 256 neighbours in float32.

A code is a level of a logarithmic scale, eight to an octave, below the block's largest magnitude: sign and
127 levels (16 octaves) for a first moment, 255 levels (32 octaves) for a second one; 0 is zero. That is
1 + 4 / 256 bytes an element, 25.4 % of float32.

Why logarithmic and not linear: Adam divides by the root of the second moment, whose values within a block
span many orders of magnitude; a linear scale of 255 levels makes zero of what is below a 500th of the
largest, and a step of it unbounded. Here each value is at most 4.5 % off, whatever its size, and a logarithm
and a power of two say which level it is, where a dynamic map (Dettmers et al., 2022) searches a table.

Why the second moment is rounded by chance: a step changes it by a thousandth, which rounding to the nearest
of levels 9 % apart would drop always; by chance it is kept on average.
"""

from __future__ import annotations

import torch

BLOCK = 256
OCTAVE = 8
SMALLEST = 4096  # elements: what is smaller stays in float32


def n_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def encode(value: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 codes in the layout of a dense `value`, and float32 [blocks]; to the nearest level.

    Of what `decode` gave it gives the same codes again.
    """
    flat = in_memory_order(value).float()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scale, top = blocks.abs().amax(dim=1), 127 if signed else 255
    level = (torch.log2(blocks.abs() / scale[:, None]) * OCTAVE + top).round()
    level = level.clamp(0 if signed else 1, top).nan_to_num(0)
    codes = torch.where(blocks == 0, torch.zeros_like(level), level).to(torch.uint8)
    if signed:
        codes = torch.where((blocks < 0) & (codes > 0), codes | 128, codes)
    out = torch.empty_like(value, dtype=torch.uint8)
    in_memory_order(out).copy_(codes.view(-1)[:len(flat)])
    return out, scale


def decode(codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> torch.Tensor:
    """float32 in the layout of `codes`."""
    flat = in_memory_order(codes).int()
    top, level = (127, flat & 127) if signed else (255, flat)
    wide = scale.repeat_interleave(BLOCK)[:len(flat)]
    value = torch.exp2((level - top).float() / OCTAVE) * wide
    value = torch.where(level == 0, wide * 0, value)  # NaN where the block has met what is not finite
    out = torch.empty_like(codes, dtype=torch.float32)
    in_memory_order(out).copy_(torch.where(flat >= 128, -value, value) if signed else value)
    return out
