"""The kernels of `qkv_heads` and of its gradient, which is the way back."""

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
from fusionrt.laid import Laid, address, laid
from fusionrt.ops.rotary_kernels import TABLE_FIELDS, cpu_tables, is_packed, table_values
from fusionrt.ops.rotary_kernels import Options as Rotary
from fusionrt.rehearsal import stands_for
from fusionrt.runtime.device import MULTIPROCESSORS, multiprocessors
from fusionrt.runtime.kernel import Kernel, Launch
from fusionrt.runtime.partial_sums import add_up
from fusionrt.runtime.source import definitions, members, pointer

Tensor = torch.Tensor
LANES = 32
STAYING = 2                             # blocks of a multiprocessor
# Of others: positions of a thread, and the blocks before it has several.
MOST_ROWS, ENOUGH_BLOCKS = 8, 4 * MULTIPROCESSORS


class Operands(NamedTuple):
    """`packed`: (B, S, all columns of all heads); q, k, v: (B, heads, S, D). `rotary.rotary_dim` may be 0."""

    packed: Tensor
    heads: Sequence[Tensor]
    cos: Tensor | None          # (B or 1, positions, rotary_dim / 2)
    sin: Tensor | None
    positions: Tensor | None    # (B or 1, S)
    rotary: Rotary              # `inverse`: from heads to packed


# -- on a GPU --------------------------------------------------------------------------------------

class Form(NamedTuple):
    """What a kernel is compiled for."""

    dtype: str
    table: str | None        # dtype
    positions: str | None    # dtype
    vec: int
    table_packs: bool
    interleaved: bool
    forward: bool
    bias: bool
    rotates: bool

    @property
    def stays(self) -> bool:
        """Whether blocks do: of sums each leaves a row, and of packs of eight columns a thread finds eight
        frequencies, in double precision."""
        return self.vec > 4 or (self.bias and not self.forward)


def _heads_of_thread(dtype: str) -> int:
    """That share its angles. Doubles leave no registers for two, beside a call for cosines of wide angles."""
    return 1 if dtype == "float64" else 2


@functools.cache
def kernel_of(form: Form) -> Kernel:
    fields = [pointer("scalar_t", name, const=False) for name in ("packed", "q", "k", "v")]
    fields += [pointer("scalar_t", "bias"), pointer("acc_t", "partials", const=False),
               pointer("table_t", "cos"), pointer("table_t", "sin"), pointer("position_t", "positions"),
               pointer("unsigned long long", "fault", const=False)]
    strides = [f"{name}_{dim}" for name in ("q", "k", "v") for dim in ("batch", "row", "head")]
    fields += members("int64_t", "offset", "packed_batch", "packed_row", *strides, *TABLE_FIELDS)
    fields += members("double", "octaves", "turns")
    fields += members("Divisor", "of_units", "of_length")
    fields += members("unsigned", "column_blocks", "groups", "heads", "q_heads", "kv_heads", "count",
                      "chunk_step", "step", "rows", "width")
    fields += members("int", "rotated_units", "half", "head_dim")
    constants = definitions(
        scalar_t=f"{form.dtype}_t", table_t=f"{form.table or 'float32'}_t",
        position_t=f"{form.positions or 'int64'}_t", VEC=form.vec, HEADS=_heads_of_thread(form.dtype),
        LANES=LANES, INTERLEAVED=form.interleaved, TABLES=form.table is not None,
        TABLE_PACKS=form.table_packs, POSITIONS=form.positions is not None, FORWARD=form.forward,
        BIAS=form.bias, ROTATES=form.rotates)
    return Kernel("qkv_heads", "qkv_heads", fields, constants, acc=acc_of(form.dtype))


def run_on_gpu(operands: Operands, bias: Tensor | None) -> None:
    """To heads adding the bias, or back, when the bias is what its gradient is written to."""
    q, rotary = operands.heads[0], operands.rotary
    tensors = (operands.packed, *operands.heads, None if rotary.inverse else bias, operands.cos, operands.sin,
               operands.positions)
    index = stands_for(q.device).index
    sums = bias is not None and rotary.inverse  # whose order is to follow from shapes alone
    held = MULTIPROCESSORS if index is None or sums else multiprocessors(index)
    launch, chunks = _planned(held, bias is not None, rotary._replace(offset=0), *map(laid, tensors))
    partials = fault = None
    if bias is not None and rotary.inverse:
        acc = torch.promote_types(q.dtype, torch.float32)
        partials = torch.empty((chunks, operands.packed.shape[2]), dtype=acc, device=q.device)
    if operands.positions is not None and operands.cos is not None:
        fault = indices.fault_of(q.device)
    places = [address(t) for t in (*tensors[:5], partials, *tensors[5:], fault)]
    launch(q.device, *places, rotary.offset)
    if partials is not None and bias is not None:
        add_up("qkv_heads_backward", partials, bias)
    if fault is not None and operands.cos is not None:
        indices.check_later("qkv_heads", fault, [Indices("position_ids", None, operands.cos.shape[1])])


@functools.lru_cache(1024)
def _planned(n_multiprocessors: int, has_bias: bool, rotary: Rotary, packed: Laid, q: Laid, k: Laid,
             v: Laid, bias: Laid | None, cos: Laid | None, sin: Laid | None, positions: Laid | None
             ) -> tuple[Launch, int]:
    """And how many rows of partial sums a bias has."""
    batch, q_heads, length, head_dim = q.shape
    kv_heads, half, dtype = k.shape[1], rotary.rotary_dim // 2, name_of(q.dtype)
    vec = _vector(rotary, head_dim, (packed, q, k, v), bias)
    pairs = max(1, vec // 2 if rotary.interleaved else vec)
    table = None if cos is None or sin is None else (cos, sin)
    packs = table is not None and vec > 1 and all(is_packed(t, pairs) for t in table)
    form = Form(dtype, table=None if table is None else name_of(table[0].dtype),
                positions=None if positions is None else name_of(positions.dtype), vec=vec,
                table_packs=packs, interleaved=rotary.interleaved, forward=not rotary.inverse, bias=has_bias,
                rotates=half > 0)
    kernel = kernel_of(form)
    copied = vec if rotary.interleaved and vec > 1 else 2 * vec   # columns of a unit
    units = half // pairs + -(-(head_dim - 2 * half) // copied)
    heads, count = q_heads + 2 * kv_heads, batch * length
    groups = -(-heads // _heads_of_thread(dtype))
    column_blocks = -(-groups * units // LANES)
    depth = kernel.block // LANES
    if form.stays:
        chunks = min(-(-count // depth), max(1, STAYING * n_multiprocessors // column_blocks))
        walk = {"chunk_step": depth, "step": chunks * depth, "rows": count}
    else:
        rows = depth * max(1, min(MOST_ROWS, count * column_blocks // (depth * ENOUGH_BLOCKS)))
        chunks = -(-count // rows)
        walk = {"chunk_step": rows, "step": depth, "rows": rows}
    strides = {f"{name}_{dim}": t.stride(d) for name, t in (("q", q), ("k", k), ("v", v))
               for d, dim in enumerate(("batch", "head", "row"))}
    values = kernel.planned(
        packed_batch=packed.stride(0), packed_row=packed.stride(1), **strides,
        **table_values(table, positions), octaves=2 * math.log2(rotary.base) / max(1, rotary.rotary_dim),
        turns=1 / (2 * math.pi * rotary.scaling), of_units=units, of_length=length,
        column_blocks=column_blocks, groups=groups, heads=heads, q_heads=q_heads, kv_heads=kv_heads,
        count=count, **walk, width=packed.shape[2], rotated_units=half // pairs, half=half, head_dim=head_dim)
    return Launch(kernel, column_blocks * chunks, values), chunks


def _vector(rotary: Rotary, head_dim: int, tensors: Sequence[Laid], bias: Laid | None) -> int:
    """The widest pack that all rows are multiples of."""
    itemsize = tensors[0].itemsize
    rotated = rotary.rotary_dim if rotary.interleaved else rotary.rotary_dim // 2
    sizes = [rotated, head_dim - rotary.rotary_dim]
    sizes += [stride for t in tensors for n, stride in zip(t.shape[:-1], t.strides, strict=False) if n > 1]
    sizes += [t.residue // itemsize for t in (*tensors, bias) if t is not None]
    return math.gcd(16 // itemsize, head_dim, *sizes)


# -- on a CPU --------------------------------------------------------------------------------------

_CPU_STEPS = tuple(f"{name}_{dim}" for name in ("x", "out") for dim in ("batch", "row", "head"))
_CPU_TEXT = """
    for r in range(start, stop):
        head = r % heads
        row = r // heads % length
        batch = r // heads // length
        at = batch * x_batch + row * x_row + head * x_head
        to = batch * out_batch + row * out_row + head * out_head
        angle = batch * angle_batch + row * angle_row
        of_head = head * head_dim
        for i in range(half):
            cos = load_{table}(cosines[angle + i])
            sin = load_{table}(sines[angle + i]) * direction
            a = load_{dtype}(x[at + {first}]){bias_first}
            b = load_{dtype}(x[at + {second}]){bias_second}
            out[to + {first}] = store_{dtype}(a * cos - b * sin)
            out[to + {second}] = store_{dtype}(b * cos + a * sin)
        for i in range(2 * half, head_dim):
            out[to + i] = store_{dtype}(load_{dtype}(x[at + i]){bias_i})
"""


@functools.cache
def _cpu_kernel(dtype: str, table: str, interleaved: bool, bias: bool) -> CpuKernel:
    first, second = ("2 * i", "2 * i + 1") if interleaved else ("i", "half + i")
    added = {f"bias_{name}": f" + load_{dtype}(bias[of_head + {place}])" if bias else ""
             for name, place in (("first", first), ("second", second), ("i", "i"))}
    text = _CPU_TEXT.format(dtype=dtype, table=table, first=first, second=second, **added)
    return CpuKernel("qkv_heads", text, acc_of(dtype), scalars=("direction",), pointers={
        "x": dtype, "out": dtype, "cosines": table, "sines": table, "bias": dtype}, integers=(
        "heads", "length", "half", "head_dim", *_CPU_STEPS, "angle_batch", "angle_row"))


def run_on_cpu(operands: Operands, bias: Tensor | None) -> None:
    """As `run_on_gpu`."""
    packed, rotary, half = operands.packed, operands.rotary, operands.rotary.rotary_dim // 2
    cos = sin = torch.empty(0, dtype=torch.promote_types(packed.dtype, torch.float32), device=packed.device)
    angle_batch = angle_row = 0
    if half:
        cos, sin = cpu_tables("qkv_heads", packed, operands.cos, operands.sin, operands.positions, rotary)
        angle_batch, angle_row = (cos.stride(0) if cos.shape[0] > 1 else 0), cos.stride(1)
    added, first = None if rotary.inverse else bias, 0
    kernel = _cpu_kernel(name_of(packed.dtype), name_of(cos.dtype), rotary.interleaved, added is not None)
    for t, rotated in zip(operands.heads, (True, True, False), strict=True):
        batch, heads, length, head_dim = t.shape
        columns = slice(first, first + heads * head_dim)
        inside, first = packed[:, :, columns], columns.stop
        sides = [(inside, (*inside.stride()[:2], head_dim)), (t, (t.stride(0), t.stride(2), t.stride(1)))]
        (x, at), (out, to) = reversed(sides) if rotary.inverse else sides
        place = 0 if added is None or added.is_meta else added[columns].data_ptr()
        kernel(packed.device, batch * length * heads, kernel.given(
            x=x.data_ptr(), out=out.data_ptr(), cosines=cos.data_ptr(), sines=sin.data_ptr(), bias=place,
            heads=heads, length=length, half=half if rotated else 0, head_dim=head_dim,
            x_batch=at[0], x_row=at[1], x_head=at[2], out_batch=to[0], out_row=to[1], out_head=to[2],
            angle_batch=angle_batch, angle_row=angle_row, direction=-1.0 if rotary.inverse else 1.0),
            work=head_dim)
    if bias is not None and rotary.inverse:
        torch.sum(packed, (0, 1), out=bias, dtype=bias.dtype)
