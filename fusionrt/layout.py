"""Geometry of a pointwise kernel: broadcasting, memory order, collapsed dimensions, reductions.

Pure integers. A kernel walks its domain (the broadcast shape of all operands) in the memory order
of its outputs. Neighbouring dimensions that every operand steps through alike are merged, so that
the common cases have one dimension (all operands contiguous) or two (a bias over the last one).
Dimensions of a `Domain` are innermost first; strides count elements.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

Ints = tuple[int, ...]


class Domain(NamedTuple):
    """Collapsed sizes (innermost first) and, for each operand, its strides over them."""

    sizes: Ints
    strides: tuple[Ints, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def flat(self) -> Ints:
        """The strides of an operand that lies in memory exactly as the domain is walked."""
        return dense(self.sizes)


def dense(sizes: Sequence[int]) -> Ints:
    strides, step = [], 1
    for size in sizes:
        strides.append(step)
        step *= size
    return tuple(strides)


def contiguous(shape: Sequence[int]) -> Ints:
    """Strides of a tensor whose last dimension is the innermost one."""
    return tuple(reversed(dense(tuple(reversed(shape)))))


def broadcast_shapes(shapes: Sequence[Sequence[int]]) -> Ints | None:
    """The common shape under torch's rules, or None."""
    out: list[int] = []
    for shape in shapes:
        out = [1] * (len(shape) - len(out)) + out
        for d in range(1, len(shape) + 1):
            if out[-d] == 1:
                out[-d] = shape[-d]
            elif shape[-d] not in (1, out[-d]):
                return None
    return tuple(out)


def is_among(value: int | Sequence[int], *choices: int | Sequence[int]) -> bool:
    """Whether a size or a shape is one of these. `in` of Dynamo's takes equal symbols for different ones."""
    for choice in choices:
        if value == choice:
            return True
    return False


def expand_strides(shape: Sequence[int], strides: Sequence[int], domain: Sequence[int]) -> Ints:
    """Strides over the domain: 0 along every dimension in which the operand is broadcast."""
    pad = len(domain) - len(shape)
    return (0,) * pad + tuple(
        0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))


def missing(shape: Sequence[int], domain: Sequence[int]) -> set[int]:
    """Dimensions of the domain, of those that have an extent, that a tensor has not."""
    pad = len(domain) - len(shape)
    return {d for d, n in enumerate(domain) if n != 1 and (d < pad or shape[d - pad] == 1)}


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Dimensions that have an extent, innermost first."""
    return sorted((d for d in range(len(shape)) if shape[d] != 1),
                  key=lambda d: (strides[d], -d))


def leads(shape: Sequence[int], strides: Sequence[int], domain: Sequence[int]) -> bool:
    """Has the full shape and a memory order of its own (an expanded tensor has none)."""
    return tuple(shape) == tuple(domain) and all(
        stride != 0 or size == 1 for size, stride in zip(shape, strides, strict=True))


def lie_apart(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two elements share memory: each dimension steps over all that those of no larger steps
    reach. Without sorting, which Dynamo does not do for sizes that vary."""
    steps = [(stride, (n - 1) * stride) for n, stride in zip(shape, strides, strict=True) if n > 1]
    return all(stride > sum(reach for other, reach in [*steps[:k], *steps[k + 1:]] if other <= stride)
               for k, (stride, _) in enumerate(steps))


def collapse(shape: Sequence[int], order: Sequence[int], operands: Sequence[Ints]) -> Domain:
    """Merge neighbouring dimensions wherever all operands allow it.

    `operands` are strides over the full domain; size-1 dimensions are left out of `order`.
    """
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in operands]
    for d in order:
        if sizes and all(s[d] == kept[-1] * sizes[-1] for s, kept in zip(operands, strides, strict=True)):
            sizes[-1] *= shape[d]
            continue
        sizes.append(shape[d])
        for s, kept in zip(operands, strides, strict=True):
            kept.append(s[d])
    if not sizes:
        sizes, strides = [1], [[0] for _ in operands]
    return Domain(tuple(sizes), tuple(map(tuple, strides)))


def ordered(shape: Sequence[int], order: Sequence[int]) -> Ints:
    """Strides of a dense tensor whose dimensions lie in this order, innermost first; those without an extent
    are not in it."""
    strides, step = [1] * len(shape), 1
    for d in order:
        strides[d] = step
        step *= shape[d]
    return tuple(strides)


def reduced_strides(target: Sequence[int], domain: Sequence[int], order: Sequence[int]) -> Ints:
    """Strides over the domain of a dense result that keeps the target's dimensions only.

    The kept dimensions lie in memory in the order in which the domain is walked.
    """
    pad = len(domain) - len(target)
    strides, step = [0] * len(domain), 1
    for d in order:
        if d >= pad and target[d - pad] != 1:
            strides[d] = step
            step *= domain[d]
    return tuple(strides)


class Reduction(NamedTuple):
    """A domain seen as groups (kept) x rows (reduced) x columns (the innermost dimension, or as many of the
    innermost ones as are kept)."""

    pattern: tuple[bool, ...]             # which dimensions are kept, innermost first
    columns: int
    groups: tuple[tuple[int, int], ...]   # (size, stride in the domain's walk), innermost first
    rows: tuple[tuple[int, int], ...]

    @property
    def keeps_columns(self) -> bool:
        return self.pattern[0]

    @property
    def n_groups(self) -> int:
        return math.prod(size for size, _ in self.groups)

    @property
    def n_rows(self) -> int:
        return math.prod(size for size, _ in self.rows)

    @property
    def kept(self) -> int:
        return self.n_groups * (self.columns if self.keeps_columns else 1)


def reduction(domain: Domain, kept: Sequence[bool]) -> Reduction:
    """How to sum over the dimensions that are not kept."""
    inner = next((d for d, keep in enumerate(kept) if not keep), len(kept)) or 1
    outer = list(zip(domain.sizes, domain.flat, kept, strict=True))[inner:]
    return Reduction(tuple(kept), math.prod(domain.sizes[:inner]),
                     tuple((size, stride) for size, stride, keep in outer if keep),
                     tuple((size, stride) for size, stride, keep in outer if not keep))
