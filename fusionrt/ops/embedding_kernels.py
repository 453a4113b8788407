"""The kernels of `embedding_position`: rows of tables added up, and rows of a gradient summed by index."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fusionrt import indices
from fusionrt.cpu.kernel import Kernel as CpuKernel
from fusionrt.indices import Indices
from fusionrt.rehearsal import device_type
from fusionrt.runtime.kernel import Kernel
from fusionrt.runtime.source import Field, pointer

Tensor = torch.Tensor
NONE, COUNTED, GIVEN = range(3)      # as in the template
MOST_ROWS = (1 << 32) - 1
MOST_PACKS = 4                       # of a thread; with more the compiler keeps their conditions in memory


class Call(NamedTuple):
    """What is added up: for each of the rows, one of each table. Ids are contiguous, and repeat: row n has
    ids[n % len(ids)]. Without ids, row n has the row n % period of positions, and the first one of types."""

    op: str
    tokens: Tensor
    weight: Tensor
    position_weight: Tensor | None
    position_ids: Tensor | None
    token_type_weight: Tensor | None
    token_type: Tensor | None
    scale: float
    period: int

    @property
    def indices(self) -> list[Indices]:
        def rows(table: Tensor | None) -> int:
            return 0 if table is None else table.shape[0]

        return [Indices("tokens", self.tokens, self.weight.shape[0]),
                Indices("position_ids", self.position_ids, rows(self.position_weight)),
                Indices("token_type", self.token_type, rows(self.token_type_weight))]


class Norm(NamedTuple):
    weight: Tensor | None
    bias: Tensor | None
    eps: float


class Dropout(NamedTuple):
    p: float
    scale_of_kept: float
    random: tuple[int, int, Tensor | None]   # as `fusionrt.random.draw` gives it


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _acc(dtype: torch.dtype) -> str:
    return "float64" if dtype == torch.float64 else "float32"


def _vector(columns: int, tables: Sequence[Tensor]) -> int:
    """The widest pack that all rows are multiples of."""
    itemsize = tables[0].itemsize
    strides = [t.stride(0) for t in tables if t.dim() > 1]
    return math.gcd(16 // itemsize, columns, *strides, *(t.data_ptr() // itemsize for t in tables))


# -- on a GPU: rows of tables ----------------------------------------------------------------------

class Form(NamedTuple):
    """What a kernel is compiled for."""

    dtype: str
    ids: tuple[str, ...]     # dtypes of tokens, position ids, token types
    vec: int
    packs: int
    threads: int
    kinds: tuple[int, ...]   # of positions and types
    norm: bool
    affine: tuple[bool, ...]
    dropout: bool


@functools.cache
def sum_kernel(form: Form) -> Kernel:
    fields = [pointer("token_t", "tokens"), pointer("position_t", "positions"), pointer("type_t", "types")]
    fields += [pointer("scalar_t", name) for name in (
        "token_table", "position_table", "type_table", "norm_weight", "norm_bias")]
    fields += [pointer(dtype, name, const=False) for dtype, name in (
        ("scalar_t", "out"), ("acc_t", "mean"), ("acc_t", "rstd"), ("unsigned long long", "fault"))]
    fields += [pointer("unsigned long long", "random_state")]
    fields += [Field(f"int64_t {name}", "q") for name in (
        "token_stride", "position_stride", "type_stride", "token_rows", "position_rows", "type_rows")]
    fields += [Field(f"unsigned long long {name}", "Q") for name in ("seed", "random_offset")]
    fields += [Field(f"double {name}", "d") for name in ("scale", "eps", "p", "scale_of_kept")]
    fields += [Field(f"unsigned {name}", "I") for name in (
        "rows", "columns", "position_period", "type_period")]
    constants = [f"using {name} = {dtype}_t;" for name, dtype in (
        ("scalar_t", form.dtype), *zip(("token_t", "position_t", "type_t"), form.ids, strict=True))]
    constants += [f"constexpr int {name} = {value};" for name, value in (
        ("VEC", form.vec), ("PACKS", form.packs), ("THREADS", form.threads),
        *zip(("POSITIONS", "TYPES"), form.kinds, strict=True))]
    constants += [f"constexpr bool {name} = {str(value).lower()};" for name, value in (
        ("NORM", form.norm), *zip(("NORM_WEIGHT", "NORM_BIAS"), form.affine, strict=True),
        ("DROPOUT", form.dropout))]
    return Kernel("embedding_position", "embedding", fields, constants, block=max(128, form.threads),
                  acc="float64" if form.dtype == "float64" else "float32")


def threads_and_packs(columns: int, vec: int, norm: bool, itemsize: int) -> tuple[int, int] | None:
    """Of a row; None where a norm's does not fit into the registers of a block."""
    packs = -(-columns // vec)
    most = (1024 if itemsize == 4 else 512) if norm else 256  # more would leave too few registers to each
    threads = 1
    while threads < packs and (threads < 32 or threads * MOST_PACKS < packs) and threads < most:
        threads *= 2
    if norm and threads * MOST_PACKS < packs:
        return None
    return threads, min(MOST_PACKS, -(-packs // threads))


def fits(call: Call, norm: Norm | None) -> bool:
    """Whether a row's norm can be in the same kernel."""
    return norm is None or _shape_of(call, norm) is not None


def _shape_of(call: Call, norm: Norm | None) -> tuple[int, int, int] | None:
    """Elements of a pack, threads of a row, packs of a thread."""
    tables = (call.weight, call.position_weight, call.token_type_weight, *(norm[:2] if norm else ()))
    columns = call.weight.shape[1]
    vec = _vector(columns, [t for t in tables if t is not None])
    found = threads_and_packs(columns, vec, norm is not None, call.weight.itemsize)
    return None if found is None else (vec, *found)


def sum_on_gpu(call: Call, norm: Norm | None = None, dropout: Dropout | None = None) -> tuple[Tensor, ...]:
    """The result, and with a norm mean and rstd of shape (rows, 1)."""
    rows, columns, device = call.tokens.numel(), call.weight.shape[1], call.weight.device
    out = call.weight.new_empty((rows, columns))
    stats = [torch.empty((rows, 1), dtype=getattr(torch, _acc(out.dtype)), device=device) for _ in range(2)
             ] if norm else []
    if not out.numel():
        return out, *stats
    tables = call.weight, call.position_weight, call.token_type_weight
    ids = call.tokens, call.position_ids, call.token_type
    affine = (norm.weight, norm.bias) if norm else (None, None)
    shape = _shape_of(call, norm)
    assert shape is not None
    vec, threads, packs = shape
    kinds = [NONE if table is None else COUNTED if given is None else GIVEN
             for table, given in zip(tables[1:], ids[1:], strict=True)]
    kernel = sum_kernel(Form(
        _name(out.dtype), tuple("int64" if i is None else _name(i.dtype) for i in ids), vec, packs, threads,
        tuple(kinds), norm is not None, tuple(a is not None for a in affine), dropout is not None))
    fault = indices.fault_of(device)
    seed, offset, state = dropout.random if dropout else (0, 0, None)
    kernel(device, (-(-rows // (kernel.block // threads)), -(-columns // (vec * packs * threads))),
           *(0 if t is None else t.data_ptr() for t in (
               *ids, *tables, *affine, out, *(stats or (None, None)), fault, state)),
           *(0 if t is None else t.stride(0) for t in tables),
           *(0 if t is None else t.shape[0] for t in tables),
           seed, offset, call.scale, norm.eps if norm else 0.0, *(dropout[:2] if dropout else (0.0, 0.0)),
           rows, columns, call.period if ids[1] is None else ids[1].numel(),
           1 if ids[2] is None else ids[2].numel())
    indices.check_later(call.op, fault, call.indices)
    return out, *stats


# -- on a GPU: rows of a gradient ------------------------------------------------------------------

TEAMS_WANTED, SHORTEST_CHUNK = 1 << 13, 16


@functools.cache
def gradient_kernel(dtype: str, index: str, vec: int, lanes: int, stage: int) -> Kernel:
    acc = "float64" if dtype == "float64" else "float32"
    fields = [pointer("scalar_t", "grad"), pointer("index_t", "indices"), pointer("int64_t", "order"),
              pointer("acc_t", "partials", const=False), pointer("scalar_t", "out", const=False),
              *(Field(f"int64_t {name}", "q") for name in ("count", "chunk", "rows", "padding")),
              Field("double scale", "d"), Field("unsigned columns", "I")]
    constants = [f"using scalar_t = {dtype}_t;", f"using index_t = {index}_t;",
                 *(f"constexpr int {name} = {value};" for name, value in (
                     ("VEC", vec), ("LANES", lanes), ("STAGE", stage)))]
    return Kernel("embedding_position_backward", "embedding_backward", fields, constants, acc=acc)


def _gradient_on_gpu(grad: Tensor, index: Tensor, out: Tensor, scale: float, padding: int) -> None:
    columns, count = grad.shape[1], index.numel()
    found, order = torch.sort(index, stable=True)
    vec = _vector(columns, (grad, out))
    lanes = min(32, 1 << (-(-columns // vec) - 1).bit_length())
    tiles = -(-columns // (vec * lanes))
    chunk = max(SHORTEST_CHUNK, count * tiles // TEAMS_WANTED)
    chunks = -(-count // chunk)
    partials = torch.empty((chunks, 2, columns), dtype=getattr(torch, _acc(grad.dtype)), device=grad.device)
    for stage in (0, 1):
        kernel = gradient_kernel(_name(grad.dtype), _name(index.dtype), vec, lanes, stage)
        blocks = -(-chunks // (kernel.block // lanes)) if stage == 0 else chunks
        kernel(grad.device, (blocks, tiles), *(t.data_ptr() for t in (grad, found, order, partials, out)),
               count, chunk, out.shape[0], padding, scale, columns)


def sum_by_index(grad: Tensor, index: Tensor, rows: int, scale: float, padding: int) -> Tensor:
    """out[i] = scale * sum of grad[n] over index[n] == i, for i != padding; grad of shape (N, C)."""
    grad, index = grad.contiguous(), index.contiguous()
    if device_type(grad) == "cpu":
        return _gradient_on_cpu(grad, index, rows, scale, padding)
    out = grad.new_zeros((rows, grad.shape[1]))
    if grad.numel():
        _gradient_on_gpu(grad, index, out, scale, padding)
    return out


# -- on a CPU --------------------------------------------------------------------------------------

def _memory(dtype: str) -> str:
    return "uint16" if dtype in ("float16", "bfloat16") else dtype


_SUM_TEXT = """def kernel(pointers, integers, scalars, start, stop):
    out, tokens, table = {store}_at(pointers[0]), int64_at(pointers[1]), {store}_at(pointers[2])
    position_table, position_ids = {store}_at(pointers[3]), int64_at(pointers[4])
    type_table, type_ids = {store}_at(pointers[5]), int64_at(pointers[6])
    columns, scale = integers[0], acc_t(scalars[0])
    for n in range(start, stop):
        token = tokens[n] * integers[1]
        position = position_ids[n % integers[3]] * integers[2]
        type = type_ids[n % integers[5]] * integers[4]
        for j in range(columns):
            out[n * columns + j] = store_{dtype}(load_{dtype}(table[token + j]) * scale{more})
"""
_GRADIENT_TEXT = """def kernel(pointers, integers, scalars, start, stop):
    grad, index, total = {store}_at(pointers[0]), int64_at(pointers[1]), {acc}_at(pointers[2])
    count, columns, rows, padding = integers[0], integers[1], integers[2], integers[3]
    for n in range(count):
        i = index[n]
        if 0 <= i and i < rows and i != padding:
            for j in range(start, stop):
                total[i * columns + j] += load_{dtype}(grad[n * columns + j])
"""


@functools.cache
def _cpu_sum(dtype: str, positions: bool, types: bool) -> CpuKernel:
    more = [f" + load_{dtype}({name}_table[{name} + j])"
            for name, there in (("position", positions), ("type", types)) if there]
    text = _SUM_TEXT.format(store=_memory(dtype), dtype=dtype, more="".join(more))
    return CpuKernel("embedding_position", text, "float64" if dtype == "float64" else "float32")


@functools.cache
def _cpu_gradient(dtype: str) -> CpuKernel:
    acc = "float64" if dtype == "float64" else "float32"
    return CpuKernel("embedding_position_backward",
                     _GRADIENT_TEXT.format(store=_memory(dtype), dtype=dtype, acc=acc), acc)


def sum_on_cpu(call: Call) -> Tensor:
    indices.check(call.op, call.indices)
    rows, columns, device = call.tokens.numel(), call.weight.shape[1], call.weight.device
    out = call.weight.new_empty((rows, columns))
    if not out.numel():
        return out
    positions = torch.arange(call.period, device=device) if call.position_ids is None else call.position_ids
    types = torch.zeros(1, dtype=torch.int64, device=device) if call.token_type is None else call.token_type
    ids = [t.long() for t in (call.tokens, positions, types)]
    tables = [call.weight if t is None else t
              for t in (call.weight, call.position_weight, call.token_type_weight)]
    kernel = _cpu_sum(_name(out.dtype), call.position_weight is not None, call.token_type_weight is not None)
    pointers = [out, ids[0], tables[0], tables[1], ids[1], tables[2], ids[2]]
    kernel(device, rows, [t.data_ptr() for t in pointers],
           [columns, tables[0].stride(0), tables[1].stride(0), ids[1].numel(), tables[2].stride(0),
            ids[2].numel()],
           [call.scale], work=columns)
    return out


def _gradient_on_cpu(grad: Tensor, index: Tensor, rows: int, scale: float, padding: int) -> Tensor:
    """Threads share the columns, so that every sum has its order."""
    acc = getattr(torch, _acc(grad.dtype))
    total = torch.zeros((rows, grad.shape[1]), dtype=acc, device=grad.device)
    if grad.numel():
        index = index.long()
        kernel = _cpu_gradient(_name(grad.dtype))
        kernel(grad.device, grad.shape[1], [t.data_ptr() for t in (grad, index, total)],
               [index.numel(), grad.shape[1], rows, padding], grain=16, work=index.numel())
    return total.mul_(scale).to(grad.dtype) if scale != 1 else total.to(grad.dtype)
