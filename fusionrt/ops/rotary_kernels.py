"""The kernels of `rotary_embedding`, on a GPU for all operands at once, on a CPU for one after the other."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fusionrt import indices
from fusionrt.cpu.kernel import Kernel as CpuKernel
from fusionrt.dtypes import acc_of, name_of
from fusionrt.indices import Indices
from fusionrt.laid import WIDEST, Laid, address, laid
from fusionrt.runtime.kernel import Kernel, Launch
from fusionrt.runtime.source import definitions, members, pointer

Tensor = torch.Tensor
# Heads that share a thread's angles at most, as long as there are so many threads.
MOST_HEADS, ENOUGH_THREADS = 8, 1 << 18
# Heads that lie far apart are fewer, where angles cost a load: so many bytes of a column.
FEW_BYTES = 8
WIDE_FROM = 1 << 31  # threads, whose number `magic` no longer divides


class Options(NamedTuple):
    offset: int
    interleaved: bool
    rotary_dim: int
    heads_first: bool
    base: float
    scaling: float
    inverse: bool

    @property
    def inverted(self) -> Options:
        return self._replace(inverse=not self.inverse)


# -- on a GPU --------------------------------------------------------------------------------------

class Form(NamedTuple):
    """What a kernel is compiled for."""

    dtype: str
    table: str | None        # dtype
    positions: str | None    # dtype
    vec: int
    table_packs: bool
    interleaved: bool
    wide: bool


_OPERANDS, _DIMS = ("q", "k", "q_out", "k_out"), ("batch", "row", "head", "column")
TABLE_FIELDS = ("table_batch", "table_row", "table_column", "table_rows", "positions_batch", "positions_row")


@functools.cache
def kernel_of(form: Form) -> Kernel:
    count, division = ("unsigned long long", "WideDivisor") if form.wide else ("unsigned", "Divisor")
    fields = [pointer("scalar_t", name, const=not name.endswith("out")) for name in _OPERANDS]
    fields += [pointer("table_t", "cos"), pointer("table_t", "sin"), pointer("position_t", "positions"),
               pointer("unsigned long long", "fault", const=False)]
    strides = [f"{name}_{dim}" for name in _OPERANDS for dim in _DIMS]
    fields += members("int64_t", "offset", *strides, *TABLE_FIELDS)
    fields += members("double", "octaves", "turns")
    fields += members(count, "threads") + members(division, "of_units", "of_fast", "of_length")
    fields += members("unsigned", "heads", "q_heads", "groups", "positions_first")
    fields += members("int", "rotated_units", "half", "head_dim") + members("float", "direction")
    constants = definitions(
        scalar_t=f"{form.dtype}_t", table_t=f"{form.table or 'float32'}_t",
        position_t=f"{form.positions or 'int64'}_t", Index=count, Division=division, VEC=form.vec,
        INTERLEAVED=form.interleaved, TABLES=form.table is not None, TABLE_PACKS=form.table_packs,
        POSITIONS=form.positions is not None)
    return Kernel("rotary_embedding", "rotary", fields, constants, acc=acc_of(form.dtype))


def rotate_on_gpu(tensors: Sequence[Tensor], outs: Sequence[Tensor], cos: Tensor | None, sin: Tensor | None,
                  positions: Tensor | None, options: Options) -> None:
    """All of shape (B, S, heads, D), cos and sin of shape (B or 1, positions, rotary_dim / 2)."""
    q = tensors[0]
    in_place = outs[0].data_ptr() == q.data_ptr() != 0
    launch = _planned(options._replace(offset=0), in_place, tuple(map(laid, tensors)), tuple(map(laid, outs)),
                      *map(laid, (cos, sin, positions)))
    fault = None if positions is None or cos is None else indices.fault_of(q.device)
    launch(q.device, *_pointers(tensors), *_pointers(outs), *_pointers((cos, sin)),
           *_pointers((positions, fault)), options.offset)
    if fault is not None and cos is not None:
        indices.check_later("rotary_embedding", fault, [Indices("position_ids", None, cos.shape[1])])


@functools.lru_cache(1024)
def _planned(options: Options, in_place: bool, tensors: Sequence[Laid], outs: Sequence[Laid],
             cos: Laid | None, sin: Laid | None, positions: Laid | None) -> Launch:
    q = tensors[0]
    batch, length, _, head_dim = q.shape
    vec = _vector((*tensors, *outs), options, in_place)
    pairs = max(1, vec // 2 if options.interleaved else vec)
    half = options.rotary_dim // 2
    table = None if cos is None or sin is None else (cos, sin)
    packs = table is not None and vec > 1 and all(is_packed(t, pairs) for t in table)
    copied = 0 if in_place else head_dim - 2 * half
    units = half // pairs + -(-copied // (vec if pairs < vec else 2 * vec))
    heads, places = sum(t.shape[2] for t in tensors), batch * length * units
    positions_first = length > 1 and q.stride(1) < q.stride(2)
    few = positions_first and table is not None and not options.interleaved
    groups = _groups(heads, places, max(2, FEW_BYTES // q.itemsize) if few else MOST_HEADS)
    threads = places * groups
    kernel = kernel_of(Form(
        name_of(q.dtype), table=None if table is None else name_of(table[0].dtype),
        positions=None if positions is None else name_of(positions.dtype), vec=vec, table_packs=packs,
        interleaved=options.interleaved, wide=threads >= WIDE_FROM))
    values = kernel.planned(
        **_strides(tensors, outs), **table_values(table, positions),
        octaves=2 * math.log2(options.base) / options.rotary_dim, turns=1 / (2 * math.pi * options.scaling),
        threads=threads, of_units=units, of_fast=batch * length if positions_first else groups,
        of_length=length, heads=heads, q_heads=q.shape[2], groups=groups, positions_first=positions_first,
        rotated_units=half // pairs, half=half, head_dim=head_dim,
        direction=-1.0 if options.inverse else 1.0)
    return Launch(kernel, -(-threads // kernel.block), values)


def _groups(heads: int, places: int, share: int) -> int:
    """Of heads, at most `share` of them: the fewer, the less often angles are loaded or computed; enough to
    fill a GPU."""
    while share > 1 and places * -(-heads // share) < ENOUGH_THREADS:
        share //= 2
    return -(-heads // share)


def _vector(tensors: Sequence[Laid], options: Options, in_place: bool) -> int:
    """The widest pack that all rows are multiples of; 1 where columns are not neighbours."""
    if any(t.stride(3) != 1 for t in tensors):
        return 1
    itemsize, head_dim = tensors[0].itemsize, tensors[0].shape[3]
    sizes = [options.rotary_dim if options.interleaved else options.rotary_dim // 2]
    sizes += [] if in_place else [head_dim - options.rotary_dim]
    sizes += [stride for t in tensors for n, stride in zip(t.shape[:3], t.strides, strict=False) if n > 1]
    sizes += [t.residue // itemsize for t in tensors]
    return math.gcd(16 // itemsize, *sizes)


def is_packed(table: Laid, pairs: int) -> bool:
    size = min(WIDEST, pairs * table.itemsize)
    rows = [stride for n, stride in zip(table.shape[:2], table.strides, strict=False) if n > 1]
    return table.stride(2) == 1 and all(n * table.itemsize % size == 0 for n in rows) and (
        table.residue % size == 0)


def _pointers(tensors: Sequence[Tensor | None]) -> list[int]:
    """Two."""
    found = [address(t) for t in tensors]
    return found + [0] * (2 - len(found))


def _strides(tensors: Sequence[Laid], outs: Sequence[Laid]) -> dict[str, int]:
    """Zeros of a k that is not there."""
    operands = (operand for given in (tensors, outs) for operand in (*given, None)[:2])
    return {f"{name}_{dim}": 0 if t is None else t.strides[d]
            for name, t in zip(_OPERANDS, operands, strict=True) for d, dim in enumerate(_DIMS)}


def table_values(table: tuple[Laid, Laid] | None, positions: Laid | None) -> dict[str, int]:
    """Of TABLE_FIELDS: steps from batch to batch, position to position and column to column, and how many
    positions there are; zeros of what is not there."""
    found = dict.fromkeys(TABLE_FIELDS, 0)
    if table is not None:
        cos = table[0]
        found |= {"table_batch": _batch_step(cos), "table_row": cos.stride(1), "table_column": cos.stride(2),
                  "table_rows": cos.shape[1]}
    if positions is not None:
        found |= {"positions_batch": _batch_step(positions), "positions_row": positions.stride(1)}
    return found


def _batch_step(t: Laid) -> int:
    """0 where all of a batch share it."""
    return t.stride(0) if t.shape[0] > 1 else 0


# -- on a CPU --------------------------------------------------------------------------------------

# Rows and columns: of heads and positions those that lie apart in memory, and the others.
_CPU_STEPS = tuple(f"{name}_{dim}" for name in ("x", "out", "angle") for dim in ("batch", "row", "column"))
_CPU_TEXT = """
    for r in range(start, stop):
        batch = r // (rows * columns)
        row = r // columns - batch * rows
        column = r % columns
        at = batch * x_batch + row * x_row + column * x_column
        to = batch * out_batch + row * out_row + column * out_column
        angle = batch * angle_batch + row * angle_row + column * angle_column
        for i in range(half):
            cos = load_{table}(cosines[angle + i])
            sin = load_{table}(sines[angle + i]) * direction
            a = load_{dtype}(x[at + {first}])
            b = load_{dtype}(x[at + {second}])
            out[to + {first}] = store_{dtype}(a * cos - b * sin)
            out[to + {second}] = store_{dtype}(b * cos + a * sin)
        for i in range(2 * half, head_dim):
            out[to + i] = x[at + i]
"""


@functools.cache
def _cpu_kernel(dtype: str, table: str, interleaved: bool, in_place: bool) -> CpuKernel:
    first, second = ("2 * i", "2 * i + 1") if interleaved else ("i", "half + i")
    text = _CPU_TEXT.format(dtype=dtype, table=table, first=first, second=second)
    if in_place:  # one name, so that LLVM sees one memory
        text = text.replace("out[to +", "x[at +")
    return CpuKernel("rotary_embedding", text, acc_of(dtype),
                     pointers={"x": dtype, "out": dtype, "cosines": table, "sines": table},
                     integers=("rows", "columns", "half", "head_dim", *_CPU_STEPS), scalars=("direction",))


def rotate_on_cpu(tensors: Sequence[Tensor], outs: Sequence[Tensor], cos: Tensor | None, sin: Tensor | None,
                  positions: Tensor | None, options: Options) -> None:
    cos, sin = cpu_tables("rotary_embedding", tensors[0], cos, sin, positions, options)
    for x, out in zip(tensors, outs, strict=True):
        if not x.numel():
            continue
        source = x if x.stride(3) == 1 else x.contiguous()
        # Not like x: of windows that overlap that is no tensor of neighbouring columns either.
        result = out if out.stride(3) == 1 else x.new_empty(x.shape)
        in_place = result.data_ptr() == source.data_ptr() != 0
        kernel = _cpu_kernel(name_of(x.dtype), name_of(cos.dtype), options.interleaved, in_place)
        batch, length, heads, head_dim = x.shape
        at, to = source.stride(), result.stride()
        angle = cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), 0
        row, column = (2, 1) if at[1] < at[2] else (1, 2)  # as in memory
        kernel(x.device, batch * length * heads, kernel.given(
            x=source.data_ptr(), out=result.data_ptr(), cosines=cos.data_ptr(), sines=sin.data_ptr(),
            rows=x.shape[row], columns=x.shape[column], half=options.rotary_dim // 2, head_dim=head_dim,
            x_batch=at[0], x_row=at[row], x_column=at[column],
            out_batch=to[0], out_row=to[row], out_column=to[column],
            angle_batch=angle[0], angle_row=angle[row], angle_column=angle[column],
            direction=-1.0 if options.inverse else 1.0), work=head_dim)
        if result is not out:
            out.copy_(result)


def cpu_tables(op: str, q: Tensor, cos: Tensor | None, sin: Tensor | None, positions: Tensor | None,
               options: Options) -> tuple[Tensor, Tensor]:
    """Of shape (B or 1, S, rotary_dim / 2), with neighbouring columns, for a q of shape (B, S, ...)."""
    length, offset = q.shape[1], options.offset
    if cos is not None and sin is not None:
        if positions is None:
            found = cos[:, offset:offset + length], sin[:, offset:offset + length]
        else:
            indices.check(op, [Indices("position_ids", positions, cos.shape[1])])
            found = cos[0][positions], sin[0][positions]
        return found if found[0].stride(2) == 1 == found[1].stride(2) and (
            found[0].stride() == found[1].stride()) else (found[0].contiguous(), found[1].contiguous())
    if positions is None:
        positions = torch.arange(offset, offset + length, device=q.device)[None]
    n = options.rotary_dim
    exponents = torch.arange(0, n, 2, dtype=torch.float64, device=q.device) / n
    angles = positions.double()[..., None] * (options.base ** -exponents / options.scaling)
    dtype = torch.promote_types(q.dtype, torch.float32)
    return angles.cos().to(dtype), angles.sin().to(dtype)
