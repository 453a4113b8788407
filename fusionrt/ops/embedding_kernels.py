"""The kernels of `embedding_position`: rows of tables added up, and rows of a gradient summed by index."""

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
from fusionrt.ops.embedding_gradients import add_partials, gradients_on_gpu, vector_of
from fusionrt.rehearsal import device_type
from fusionrt.runtime.device import MULTIPROCESSORS
from fusionrt.runtime.kernel import Kernel, Launch
from fusionrt.runtime.source import definitions, members, pointer

Tensor = torch.Tensor
NONE, COUNTED, GIVEN = range(3)      # as in the template
MOST_ROWS = (1 << 32) - 1
MOST_PACKS = 4                       # of a thread; with more the compiler keeps their conditions in memory
ELEMENTS, ELEMENTS_OF_GRADIENT = 32, 24   # of a thread, as long as there can be more threads
# Without a norm. Longer rows are cut into parts, of which a thread has fewer packs, of more rows.
WHOLE_ROW, PACKS_OF_A_PART = 4096, 2  # bytes
ROWS_AT_ONCE, MOST_EACH = 4, 32      # rows of a team: of parts, with a norm
ENOUGH_TEAMS = 1 << 11
ROUND = 8                            # rows that a team could have while a round begins and ends
MOST_COMMON, MOST_SHARED = 2, 47 << 10  # rows of types; bytes of a block


class Lookup(NamedTuple):
    """What is looked up and added: for each of the rows, one of each table. Ids are contiguous, and repeat:
    row n has ids[n % len(ids)]. Without ids, row n has the row n % period of positions, and the first one of
    types."""

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
    def tables(self) -> tuple[Tensor | None, ...]:
        return self.weight, self.position_weight, self.token_type_weight

    @property
    def ids(self) -> tuple[Tensor | None, ...]:
        return self.tokens, self.position_ids, self.token_type

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


# -- on a GPU: rows of tables ----------------------------------------------------------------------

class Form(NamedTuple):
    """What a kernel is compiled for."""

    dtype: str
    ids: tuple[str, ...]     # dtypes of tokens, position ids, token types
    vec: int
    packs: int
    threads: int
    full: bool
    each: int                # rows of a team without a norm
    kinds: tuple[int, ...]   # of positions and types
    one_position: bool       # of all rows of a team
    scaled: bool
    norm: bool
    affine: tuple[bool, ...]
    dropout: bool
    gradient: bool = False   # of the norm, instead
    common: int = 0          # kinds of what a team's rows add to their tokens, that wait in shared memory
    rounded: bool = False    # what a norm is taken of


_TABLES = "token", "position", "type"


@functools.cache
def sum_kernel(form: Form) -> Kernel:
    fields = [pointer("token_t", "tokens"), pointer("position_t", "positions"), pointer("type_t", "types")]
    fields += [pointer("scalar_t", name) for name in (
        "token_table", "position_table", "type_table", "norm_weight", "norm_bias", "grad")]
    fields += [pointer(dtype, name, const=False) for dtype, name in (
        ("scalar_t", "out"), ("acc_t", "mean"), ("acc_t", "rstd"), ("acc_t", "partials"),
        ("unsigned long long", "fault"))]
    fields += [pointer("unsigned long long", "random_state")]
    fields += members("unsigned long long", "seed", "random_offset")
    fields += members("double", "scale", "eps", "p", "scale_of_kept")
    fields += members("int64_t", *(f"{table}_{what}" for table in _TABLES for what in ("stride", "rows")))
    fields += members("unsigned", "rows", "columns", "position_period", "type_period", "apart", "each")
    (positions, types), (weight, bias) = form.kinds, form.affine
    constants = definitions(
        scalar_t=f"{form.dtype}_t", **{f"{name}_t": f"{ids}_t" for name, ids in zip(
            _TABLES, form.ids, strict=True)},
        VEC=form.vec, PACKS=form.packs, THREADS=form.threads, EACH=form.each, KINDS=form.common,
        MIN_BLOCKS=_blocks(form, False) if form.norm else 1,
        COMMON_BLOCKS=_blocks(form, True) if form.norm else 1, POSITIONS=positions, TYPES=types,
        FULL=form.full, ONE_POSITION=form.one_position, SCALED=form.scaled, NORM=form.norm,
        ROUNDED=form.rounded, NORM_WEIGHT=weight, NORM_BIAS=bias, DROPOUT=form.dropout,
        GRADIENT=form.gradient)
    return Kernel("embedding_position", "embedding", fields, constants, block=max(128, form.threads),
                  acc=acc_of(form.dtype))


def _blocks(form: Form, common: bool) -> int:
    """Of a multiprocessor; without a limit the compiler takes so many registers that few have room."""
    few = form.vec * form.packs <= (16 if form.gradient else 24)
    threads = (640 if few else 512) if common and not form.gradient else 512 if few else 384
    return max(1, threads // max(128, form.threads))


def _held(form: Form, common: bool) -> int:
    """Teams of a GPU."""
    return MULTIPROCESSORS * _blocks(form, common) * max(1, 128 // form.threads)


def threads_and_packs(columns: int, vec: int, norm: bool, itemsize: int, gradient: bool = False
                      ) -> tuple[int, int] | None:
    """Of a row, without a norm of a part of it; None where a norm's does not fit into the registers of a
    block, of which each thread has the fewer the more threads there are."""
    packs = -(-columns // vec)
    if gradient:
        most, few = (512 if itemsize == 4 else 256), min(3, ELEMENTS_OF_GRADIENT // vec)
    elif norm:
        most, few = (1024 if itemsize == 4 else 512), min(MOST_PACKS, ELEMENTS // vec)
    elif columns * itemsize <= WHOLE_ROW:
        most, few = 64, MOST_PACKS
    else:
        most, few = 32, PACKS_OF_A_PART
    most_packs = MOST_PACKS if norm and not gradient else few
    threads = 1
    while threads < packs and (threads < 32 or threads * few < packs) and threads < most:
        threads *= 2
    if norm and threads * most_packs < packs:
        return None
    return threads, min(most_packs, -(-packs // threads))


class Rows(NamedTuple):
    """What a launch is planned by: how the tensors of a call lie."""

    tables: tuple[Laid | None, ...]     # of tokens, positions and types; as the ids
    ids: tuple[Laid | None, ...]
    affine: tuple[Laid | None, ...]     # the norm's weight and bias, if there is a norm
    scaled: bool
    norm: bool
    dropout: bool
    period: int

    @property
    def weight(self) -> Laid:
        assert self.tables[0] is not None
        return self.tables[0]

    @property
    def total(self) -> int:
        assert self.ids[0] is not None
        return self.ids[0].numel

    @property
    def position_period(self) -> int:
        return self.period if self.ids[1] is None else self.ids[1].numel

    @property
    def kinds(self) -> tuple[int, ...]:
        """Of positions and types."""
        return tuple(NONE if table is None else COUNTED if ids is None else GIVEN
                     for table, ids in zip(self.tables[1:], self.ids[1:], strict=True))


def _rows_of(lookup: Lookup, norm: Norm | None, dropout: Dropout | None = None) -> Rows:
    affine = (None, None) if norm is None else (laid(norm.weight), laid(norm.bias))
    return Rows(tuple(map(laid, lookup.tables)), tuple(map(laid, lookup.ids)), affine, lookup.scale != 1,
                norm is not None, dropout is not None, lookup.period)


@functools.lru_cache(1024)
def _shape_of(rows: Rows, gradient: bool) -> tuple[int, int, int] | None:
    """Elements of a pack, threads of a row, packs of a thread."""
    columns = rows.weight.shape[1]
    vec = vector_of(columns, [t for t in (*rows.tables, *rows.affine) if t is not None])
    found = threads_and_packs(columns, vec, rows.norm, rows.weight.itemsize, gradient)
    return None if found is None else (vec, *found)


def _fits(table: Laid, gradient: bool) -> bool:
    """Whether a row with its norm is short enough for the kernel: by its columns alone, so that both passes
    agree on whether sums are rounded before the norm, whatever hooks of saved tensors make of the tables."""
    vec = math.gcd(16 // table.itemsize, table.shape[1])
    return threads_and_packs(table.shape[1], vec, True, table.itemsize, gradient) is not None


def _laid_out(lookup: Lookup, norm: Norm | None, dropout: Dropout | None, gradient: bool
              ) -> tuple[Lookup, Norm | None, Rows]:
    """Copies, where packs would be too narrow for a row and its norm that fit otherwise."""
    rows = _rows_of(lookup, norm, dropout)
    if norm is not None and _shape_of(rows, gradient) is None and _fits(rows.weight, gradient):
        weight, *others = (t if t is None else t.clone(memory_format=torch.contiguous_format)
                           for t in (*lookup.tables, *norm[:2]))
        assert weight is not None
        lookup = lookup._replace(weight=weight, position_weight=others[0], token_type_weight=others[1])
        norm = norm._replace(weight=others[2], bias=others[3])
        rows = _rows_of(lookup, norm, dropout)
    return lookup, norm, rows


class Share(NamedTuple):
    """The rows of a team: `each`, `apart` from each other, which has the same position for all of them."""

    each: int
    apart: int
    one_position: bool


def _share_of(rows: Rows, each: int) -> Share:
    """`each` or a little less, where that many take as many turns."""
    count, period = rows.total, rows.position_period
    repeats = count // period if rows.tables[1] is not None and count % period == 0 else 0
    if repeats >= each:
        turns = -(-repeats // each)
        return Share(-(-repeats // turns), period * turns, True)
    return Share(each, -(-count // each), False)


def _best_share(rows: Rows, most: int, held: int | None) -> Share:
    """Up to `most` for each. Teams with a norm, of which a GPU holds so many, take turns in whole rounds; of
    others there need only be enough."""
    if 2 * rows.total >= MOST_ROWS:  # the kernel counts beyond the last row, in 32 bits
        return _share_of(rows, 1)
    if held is None:
        return _share_of(rows, max(1, min(most, rows.total // ENOUGH_TEAMS)))
    return min((_share_of(rows, each) for each in range(most, 0, -1)),
               key=lambda share: -(-share.apart // held) * (share.each + ROUND))


def _common(form: Form, rows: Rows, each: int) -> int:
    """Kinds of what the rows of a team add to their tokens; 0 where there are many, or no room for them, or
    nothing to unpack: float32's gained nothing."""
    position, type_ = form.kinds
    kinds = 1 if rows.tables[2] is None or type_ == COUNTED else rows.tables[2].shape[0]
    if not (form.norm and rows.weight.itemsize == 2 and each > 2 and any(form.kinds)
            and (form.one_position or position == NONE) and kinds <= MOST_COMMON
            and (form.gradient or form.threads <= 256)):
        return 0
    one = 4 * form.vec * form.packs   # bytes of a thread
    block = max(128, form.threads)
    affine, partial = 2 * form.threads * one * any(form.affine), block * one // form.packs * form.gradient
    return kinds if kinds * block * one + affine + partial <= MOST_SHARED else 0


@functools.lru_cache(1024)
def _planned(rows: Rows, gradient: bool) -> tuple[Launch, int] | None:
    """And its blocks, each of which leaves partial sums. None where a row's norm is too long for the kernel.
    """
    shape = _shape_of(rows, gradient)
    if shape is None:
        return None
    vec, threads, packs = shape
    weight, columns, tile = rows.weight, rows.weight.shape[1], vec * packs * threads
    most = min(threads, MOST_EACH if rows.norm else ROWS_AT_ONCE if columns > tile else 1)
    form = Form(name_of(weight.dtype), tuple("int64" if i is None else name_of(i.dtype) for i in rows.ids),
                vec, packs, threads, full=columns % tile == 0, each=1, kinds=rows.kinds,
                one_position=_share_of(rows, most).one_position, scaled=rows.scaled, norm=rows.norm,
                affine=tuple(a is not None for a in rows.affine), dropout=rows.dropout, gradient=gradient,
                rounded=rows.norm and not _fits(weight, True))
    share = _best_share(rows, most, _held(form, _common(form, rows, most) > 0) if rows.norm else None)
    form = form._replace(each=1 if rows.norm else share.each, one_position=share.one_position)
    form = form._replace(common=_common(form, rows, share.each))
    blocks = -(-share.apart // max(1, 128 // threads))
    of_tables = {f"{name}_{what}": n for name, t in zip(_TABLES, rows.tables, strict=True)
                 for what, n in (("stride", 0 if t is None else t.stride(0)),
                                 ("rows", 0 if t is None else t.shape[0]))}
    kernel = sum_kernel(form)
    values = kernel.planned(
        **of_tables, rows=rows.total, columns=columns, position_period=rows.position_period,
        type_period=1 if rows.ids[2] is None else rows.ids[2].numel, apart=share.apart, each=share.each)
    return Launch(kernel, (blocks, -(-columns // tile)), values), blocks


def _run(launch: Launch, lookup: Lookup, norm: Norm | None, dropout: Dropout | None, out: Tensor,
         stats: Sequence[Tensor | None], fault: Tensor | None, grad: Tensor | None = None,
         partials: Tensor | None = None) -> None:
    affine = (None, None) if norm is None else norm[:2]
    seed, offset, state = (0, 0, None) if dropout is None else dropout.random
    launch(out.device, *map(address, (
        *lookup.ids, *lookup.tables, *affine, grad, out, *stats, partials, fault, state)),
        seed, offset, lookup.scale, 0.0 if norm is None else norm.eps,
        *((0.0, 0.0) if dropout is None else dropout[:2]))


def sum_on_gpu(lookup: Lookup, norm: Norm | None = None, dropout: Dropout | None = None
               ) -> tuple[Tensor, ...] | None:
    """The result, and with a norm mean and rstd of shape (rows, 1); None where the norm does not fit in."""
    rows, device = lookup.tokens.numel(), lookup.weight.device
    out = lookup.weight.new_empty((rows, lookup.weight.shape[1]))
    stats = [torch.empty((rows, 1), dtype=getattr(torch, acc_of(out.dtype)), device=device) for _ in range(2)
             ] if norm else []
    if not out.numel():
        return out, *stats
    lookup, norm, lies = _laid_out(lookup, norm, dropout, False)
    planned = _planned(lies, False)
    if planned is None:
        return None
    # What a graph's replays find is not looked at.
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    fault = None if captured else indices.fault_of(device)
    _run(planned[0], lookup, norm, dropout, out, stats or (None, None), fault)
    if fault is not None:
        indices.check_later(lookup.op, fault, lookup.indices)
    return out, *stats


def norm_gradient_on_gpu(lookup: Lookup, norm: Norm, dropout: Dropout | None, grad: Tensor, mean: Tensor,
                         rstd: Tensor) -> tuple[Tensor, Tensor] | None:
    """Of what the norm was taken of, and of its weight and bias; `grad` of shape (rows, columns). None where
    the norm does not fit into the kernel."""
    grad = grad if grad.data_ptr() % 16 == 0 else grad.clone()   # packs are as wide as the tables allow
    out, affine = torch.empty_like(grad), grad.new_empty((2, grad.shape[1]))
    if not grad.numel():
        return out, affine.zero_()
    lookup, laid_norm, lies = _laid_out(lookup, norm._replace(bias=None), dropout, True)
    planned = _planned(lies, True)
    if planned is None:
        return None
    launch, blocks = planned
    partials = torch.empty((2, blocks, grad.shape[1]), dtype=mean.dtype, device=grad.device)
    _run(launch, lookup, laid_norm, dropout, out, (mean, rstd), None, grad, partials)
    add_partials(partials, affine)
    return out, affine


# -- rows of a gradient ----------------------------------------------------------------------------

def sum_by_index(grad: Tensor, index: Tensor, rows: int, scale: float, padding: int) -> Tensor:
    """out[i] = scale * sum of grad[n] over index[n] == i, for i != padding; grad of shape (N, C)."""
    grad, index = grad.contiguous(), index.contiguous()
    if device_type(grad) == "cpu":
        return _gradient_on_cpu(grad, index, rows, scale, padding)
    return gradients_on_gpu(grad, index, rows, scale, padding)[0]


# -- on a CPU --------------------------------------------------------------------------------------

_SUM_TEXT = """
    for n in range(start, stop):
        token = token_ids[n] * token_stride
        position = position_ids[n % position_period] * position_stride
        type = type_ids[n % type_period] * type_stride
        for j in range(columns):
            out[n * columns + j] = store_{dtype}(load_{dtype}(token_table[token + j]) * scale{more})
"""
_GRADIENT_TEXT = """
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
    return CpuKernel(
        "embedding_position", _SUM_TEXT.format(dtype=dtype, more="".join(more)), acc_of(dtype),
        pointers={"out": dtype, **dict.fromkeys(("token_ids", "position_ids", "type_ids"), "int64"),
                  **dict.fromkeys(("token_table", "position_table", "type_table"), dtype)},
        integers=("columns", "token_stride", "position_stride", "type_stride", "position_period",
                  "type_period"), scalars=("scale",))


@functools.cache
def _cpu_gradient(dtype: str) -> CpuKernel:
    acc = acc_of(dtype)
    return CpuKernel("embedding_position_backward", _GRADIENT_TEXT.format(dtype=dtype), acc,
                     pointers={"grad": dtype, "index": "int64", "total": acc},
                     integers=("count", "columns", "rows", "padding"))


def sum_on_cpu(lookup: Lookup) -> Tensor:
    indices.check(lookup.op, lookup.indices)
    rows, columns, device = lookup.tokens.numel(), lookup.weight.shape[1], lookup.weight.device
    out = lookup.weight.new_empty((rows, columns))
    if not out.numel():
        return out
    _, positions, types = lookup.ids
    positions = torch.arange(lookup.period, device=device) if positions is None else positions
    types = torch.zeros(1, dtype=torch.int64, device=device) if types is None else types
    tokens, positions, types = (t.long() for t in (lookup.tokens, positions, types))
    token_table, position_table, type_table = (lookup.weight if t is None else t for t in lookup.tables)
    kernel = _cpu_sum(name_of(out.dtype), *(t is not None for t in lookup.tables[1:]))
    kernel(device, rows, kernel.given(
        out=out.data_ptr(), token_ids=tokens.data_ptr(), position_ids=positions.data_ptr(),
        type_ids=types.data_ptr(), token_table=token_table.data_ptr(),
        position_table=position_table.data_ptr(), type_table=type_table.data_ptr(), columns=columns,
        token_stride=token_table.stride(0), position_stride=position_table.stride(0),
        type_stride=type_table.stride(0), position_period=positions.numel(), type_period=types.numel(),
        scale=lookup.scale), work=columns)
    return out


def _gradient_on_cpu(grad: Tensor, index: Tensor, rows: int, scale: float, padding: int) -> Tensor:
    """Threads share the columns, so that every sum has its order."""
    acc = getattr(torch, acc_of(grad.dtype))
    total = torch.zeros((rows, grad.shape[1]), dtype=acc, device=grad.device)
    if grad.numel():
        index = index.long()
        kernel = _cpu_gradient(name_of(grad.dtype))
        kernel(grad.device, grad.shape[1], kernel.given(
            grad=grad.data_ptr(), index=index.data_ptr(), total=total.data_ptr(), count=index.numel(),
            columns=grad.shape[1], rows=rows, padding=padding), grain=16, work=index.numel())
    return total.mul_(scale).to(grad.dtype) if scale != 1 else total.to(grad.dtype)
