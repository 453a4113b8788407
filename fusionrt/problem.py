"""One kernel to be built: what to compute, on which storage, over which domain.

The GPU and the CPU runtime take the same description. Operands are named by position (`a0`, `a1`,
..., `out0`, ...), so no name that a user chose reaches generated text.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusionrt import layout
from fusionrt.dtypes import SIGNIFICANT_BITS, STORAGE
from fusionrt.expr import Expr
from fusionrt.graph import leaves, toposort
from fusionrt.layout import Domain, Ints

MASK = "mask"              # the dtype of an operand of truth values, four to a byte as the domain is walked
_BITS = {**SIGNIFICANT_BITS, MASK: 0}
of_problem = functools.lru_cache(256)  # for what is asked again and again while a problem is laid out


class Operand(NamedTuple):
    name: str
    dtype: str
    strides: Ints          # over the collapsed domain, innermost first

    def numel(self, sizes: Ints) -> int:
        """Elements, in a domain of these sizes."""
        return math.prod(size for size, stride in zip(sizes, self.strides, strict=True) if stride)


class Output(NamedTuple):
    """An output of a kernel: what it is, how it is allocated, how it lies in the domain."""

    root: Expr
    dtype: torch.dtype
    shape: Ints
    strides: Ints
    over: Ints             # strides over the uncollapsed domain; of a sum, in the order of the walk
    reduced: bool          # the kernel sums it over the dimensions in which it has no stride
    into: int | None = None    # the argument whose memory it takes
    is_mask: bool = False      # truth values, four to a byte

    @property
    def walk_strides(self) -> Ints:
        """Of its memory, in the order in which the domain is walked. Where there is one element, its own."""
        walked = self.over[len(self.over) - len(self.shape):]
        return tuple(own if size == 1 else walk for size, own, walk in
                     zip(self.shape, self.strides, walked, strict=True))


class Problem(NamedTuple):
    name: str
    inputs: tuple[Operand, ...]       # the tensors that the roots really need
    scalars: tuple[str, ...]          # names of the Python numbers that they need
    roots: tuple[Expr, ...]
    outputs: tuple[Operand, ...]      # one a root
    reduced: tuple[bool, ...]         # whether an output is summed over its stride-0 dimensions
    sizes: Ints
    acc: str                          # float32 or float64
    streams: tuple[str, ...]          # random streams
    row_dims: int = 0                 # the first dimensions of the domain are a row; 0: it has none
    across: bool = False              # rows are the dimensions in which no output has a stride
    row_size: int = 0                 # where `row_size` is among the scalars
    taken: tuple[tuple[str, str], ...] = ()    # outputs that take an operand's memory, and that operand
    inner: int = 1                    # neighbours in memory of a row across it: found apart, then joined
    once: tuple[str, ...] = ()        # outputs that have one value for those
    abreast: int = 1                  # rows that are seen as one, which so is whole packs
    then: "Problem | None" = None     # elements that the same kernel computes from what it has found
    found: tuple[tuple[str, str], ...] = ()    # their operands that are outputs of this, and those
    returned: tuple[str, ...] = ()    # which outputs of both a caller gets, in order

    @property
    def domain(self) -> Domain:
        return Domain(self.sizes, tuple(o.strides for o in (*self.inputs, *self.outputs)))

    @property
    def full(self) -> list[int]:
        """Which outputs have every element."""
        return [k for k, reduced in enumerate(self.reduced) if not reduced]

    @property
    def summed(self) -> list[int]:
        """The others."""
        return [k for k, reduced in enumerate(self.reduced) if reduced]

    @property
    def full_outputs(self) -> list[Operand]:
        return [self.outputs[k] for k in self.full]

    @property
    def sums(self) -> list[Operand]:
        return [self.outputs[k] for k in self.summed]

    @property
    def draws(self) -> bool:
        """Whether a call is given random numbers, or a mask in their place."""
        return bool(self.streams) or any(o.dtype == MASK for o in self.inputs)

    @property
    def accuracy(self) -> str:
        """That the CPU's mathematics need: float16 for 16-bit results, else that of the arithmetic. But a
        logarithm may be near 0, where it makes a relative error an absolute one (of a softmax's sum)."""
        low = self.significant_bits <= 11 and self.acc == "float32"
        has_log = any(n.op in ("log", "log2") for n in toposort(self.roots))
        return "float16" if low and not has_log else self.acc

    @property
    def significant_bits(self) -> int:
        """Of the widest floating output, of those that know the difference: a norm's float32 moments do not,
        beside what is activated. Integers and truth values want float32's accuracy, and so does what is
        computed of float32 and then cast: a difference of two results may be all that is left of them."""
        shortened = [o for o, root in zip(self.outputs, self.roots, strict=True)
                     if any(n.primitive.is_shortened for n in toposort([root]))]
        written = max(_BITS.get(o.dtype, 24) for o in shortened or self.outputs)
        is_cast = any(root.op.startswith("cast_") for root in self.roots)
        is_cast &= any(o.dtype == "float32" for o in self.inputs)
        return max(written, 24) if is_cast or self._finds_again else written

    @property
    def _finds_again(self) -> bool:
        """Whether what is computed is compared with what another kernel has stored of it, as a maximum: that
        one had float32 outputs, and so float32's accuracy."""
        return any(n.op in ("eq", "ne") and any(isinstance(a, Expr) and a.op == "arg" for a in n.args)
                   and any(m.primitive.is_shortened for m in toposort([n])) for n in toposort(self.roots))


def pose(name: str, args: Sequence[Any], shape: Ints, order: Sequence[int], outputs: Sequence[Output],
         double: bool, row: int = 0, row_size: int = 0) -> Problem:
    """The problem over `shape`, walked in `order`, of the outputs of one kernel.

    `row`: how many of the last dimensions form a row, which `order` then names first; without them
    `row_size` may say how many elements a row has.
    """
    roots = tuple(o.root for o in outputs)
    used = set(leaves(roots, "arg"))
    tensors = [(i, a) for i, a in enumerate(args) if isinstance(a, torch.Tensor) and f"a{i}" in used]
    over = [layout.expand_strides(a.shape, a.stride(), shape) for _, a in tensors]
    masks = leaves(roots, "mask")
    over += [layout.reduced_strides(shape, shape, order)] * len(masks)
    over += [o.over for o in outputs]
    first = len(shape) - row
    domain = layout.collapse(shape, [d for d in order if not row or d >= first], over)
    sizes, strides = domain.sizes, list(domain.strides)
    if row:
        rows = layout.collapse(shape, [d for d in order if d < first], over)
        sizes, strides = sizes + rows.sizes, [a + b for a, b in zip(strides, rows.strides, strict=True)]
    read = [*((f"a{i}", STORAGE[a.dtype]) for i, a in tensors), *((name, MASK) for name in masks)]
    inputs = tuple(Operand(*operand, s) for operand, s in zip(read, strides, strict=False))
    made = tuple(Operand(f"out{k}", MASK if o.is_mask else STORAGE[o.dtype], s)
                 for k, (o, s) in enumerate(zip(outputs, strides[len(inputs):], strict=True)))
    taken = tuple((f"out{k}", f"a{o.into}") for k, o in enumerate(outputs) if f"a{o.into}" in used)
    numbers = tuple(f"a{i}" for i, a in enumerate(args)
                    if not isinstance(a, torch.Tensor) and f"a{i}" in used)
    if not row and leaves(roots, "row_size"):
        numbers = (*numbers, "row_size")
    return Problem(name, inputs, numbers, roots, made, tuple(o.reduced for o in outputs), sizes,
                   "float64" if double else "float32", tuple(dict.fromkeys(leaves(roots, "random"))),
                   len(domain.sizes) if row else 0, row_size=row_size, taken=taken)


def pack(outputs: Sequence[torch.Tensor]) -> Any:
    """What a caller gets: a tensor, or a tuple of several."""
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def unpack(out: Any) -> tuple[torch.Tensor, ...]:
    """What was packed."""
    return out if isinstance(out, tuple) else (out,)
