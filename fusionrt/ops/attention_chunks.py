"""Attention of our own: queries in chunks, each a matrix product, a kernel over its scores, another product.

For what no kernel of torch's computes: windows of float32, ALiBi, softcap, gradients of masks, float64.
Only a chunk of the scores is in memory; the backward pass makes it again. Keys that causality or a window
excludes from all of a chunk are left out of its products, so that a window costs O(S window).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fusionrt import random
from fusionrt.dtypes import HALVES, name_of
from fusionrt.expr import row_sum
from fusionrt.laid import heads_of_rows
from fusionrt.ops.attention_rows import Form, Values, gradients, weights
from fusionrt.ops.product import TO_WIDER
from fusionrt.random import Rng
from fusionrt.rehearsal import device_type
from fusionrt.row_fusion import row_operator
from fusionrt.structured import Gradient, StructuredOp, no_second_derivatives
from fusionrt.watching import is_watched

Tensor = torch.Tensor
# Scores of a chunk: on a GPU so many that the host can keep ahead of it (128 MiB of float32), on a CPU so few
# that they stay in a cache.
CHUNK = {"cuda": 1 << 25, "cpu": 1 << 20}
ROWS = 256            # queries of a chunk, at least, as long as there are so many
KEYS_OF_TILE = 128
WIDTHS = 8            # of causal chunks, at most about so many different ones: each is another kernel


class Options(NamedTuple):
    """`left`, `right`: keys on either side of a query's position that it attends to, -1: all; query i stands
    at i + `offset`. `chunk`: queries of a chunk; 0: as many as suit the machine."""

    scale: float
    left: int
    right: int
    offset: int
    softcap: float
    dropout_p: float
    chunk: int

    @property
    def causal(self) -> bool:
        """As torch means it: query i attends to the keys up to i."""
        return self.left < 0 and self.right == 0 and self.offset == 0


# -- chunks ----------------------------------------------------------------------------------------

class Sizes(NamedTuple):
    batch: int
    kv_heads: int
    group: int      # query heads of a key's head
    queries: int
    keys: int


class Chunk(NamedTuple):
    batch: slice
    heads: slice    # of keys
    rows: slice     # of queries
    keys: slice


@functools.lru_cache(256)
def chunks(sizes: Sizes, options: Options, most: int) -> tuple[Chunk, ...]:
    """Of at most about so many scores each."""
    rows, heads = _shares(sizes, options, most)
    found = []
    for b, h in _of_heads(sizes, heads):
        for first in range(0, sizes.queries, rows):
            last = min(first + rows, sizes.queries)
            found.append(Chunk(b, h, slice(first, last), _keys(sizes, options, first, last, rows)))
    return tuple(found)


def _shares(sizes: Sizes, options: Options, most: int) -> tuple[int, int]:
    """Queries and heads, of all batches, of a chunk."""
    batch_heads = sizes.batch * sizes.kv_heads
    if options.chunk:
        return min(options.chunk, sizes.queries), batch_heads
    bounded = options.left >= 0 or options.right >= 0
    limit = sizes.queries
    if bounded:  # queries of a chunk share their keys: the fewer, the less is computed in vain
        inside = options.left >= 0 and options.right >= 0
        limit = max(ROWS, options.left + options.right + 1 if inside else sizes.queries // WIDTHS)
    least = min(ROWS, sizes.queries)
    wide = min(sizes.keys, options.left + options.right + least) if (
        options.left >= 0 and options.right >= 0) else sizes.keys
    heads = max(1, min(batch_heads, most // (least * sizes.group * wide)))
    rows = most // (heads * sizes.group * wide) // KEYS_OF_TILE * KEYS_OF_TILE
    return max(least, min(rows, limit, sizes.queries)), heads


def _of_heads(sizes: Sizes, most: int) -> Iterator[tuple[slice, slice]]:
    """Batches with all of their heads, or heads of one batch."""
    batches = max(1, most // sizes.kv_heads)
    heads = min(most, sizes.kv_heads)
    for b in range(0, sizes.batch, batches):
        for h in range(0, sizes.kv_heads, heads):
            yield slice(b, min(b + batches, sizes.batch)), slice(h, min(h + heads, sizes.kv_heads))


def _keys(sizes: Sizes, options: Options, first: int, last: int, rows: int) -> slice:
    """That queries [first, last) attend to, and as many more as make lengths equal."""
    keys, (left, right) = sizes.keys, (options.left, options.right)
    begin = first + options.offset - left if left >= 0 else 0
    end = last + options.offset + right if right >= 0 else keys
    if left >= 0 and right >= 0:
        length = min(keys, -(-(left + rows + right) // 8) * 8 + 8)
        begin = max(0, min(begin // 8 * 8, keys - length))
        return slice(begin, begin + length)
    step = max(KEYS_OF_TILE, -(-keys // (WIDTHS * KEYS_OF_TILE)) * KEYS_OF_TILE)
    begin = max(0, min(begin // step * step, keys - 1))
    return slice(begin, max(begin + 1, min(keys, -(-end // step) * step)))


# -- one call --------------------------------------------------------------------------------------

def _chunks_of(q: Tensor, k: Tensor, options: Options) -> tuple[Sizes, tuple[Chunk, ...]]:
    batch, kv_heads, keys, _ = k.shape
    sizes = Sizes(batch, kv_heads, q.shape[1] // kv_heads, q.shape[2], keys)
    return sizes, chunks(sizes, options, CHUNK[device_type(q)])


class Operands:
    """Operands as the products take them: one matrix for a head of keys and the queries that share it."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, slopes: Tensor | None,
                 rng: Tensor | None, options: Options, of_mask: bool = False) -> None:
        self.sizes, self.chunks = _chunks_of(q, k, options)
        self.options, kv_heads = options, self.sizes.kv_heads
        # A CPU multiplies float32 faster; on a GPU products of halves are accumulated and left in float32.
        self.dtype = torch.float32 if device_type(q) == "cpu" and q.dtype in HALVES else q.dtype
        self.acc = torch.promote_types(q.dtype, torch.float32)
        self.q, self.k, self.v = self.of_queries(q), self.of_keys(k), self.of_keys(v)
        mask = mask.to(self.acc) if of_mask and mask is not None else self.no_wider(mask)
        self.mask = None if mask is None else _by_groups(mask, kv_heads)
        slopes = self.no_wider(slopes)
        self.slopes = None if slopes is None else _by_groups(slopes[..., None, None], kv_heads)
        self.rngs = _rngs(rng, len(self.chunks))
        places = torch.arange(options.offset, options.offset + self.sizes.queries, device=q.device)
        self.positions = places.float()[:, None, None]
        self.columns = torch.arange(self.sizes.keys, dtype=torch.float32, device=q.device)
        kind_of_mask = None if mask is None else "passed" if mask.dtype == torch.bool else "added"
        half = None if self.acc == self.dtype else name_of(q.dtype)
        self.form = Form(half, kind_of_mask, left=options.left >= 0, right=options.right >= 0,
                         alibi=slopes is not None, softcap=options.softcap > 0, dropout=rng is not None,
                         of_mask=of_mask)

    def no_wider(self, x: Tensor | None) -> Tensor | None:
        """float64 would be the dtype of all that follows."""
        if x is None or not x.is_floating_point() or torch.promote_types(x.dtype, self.acc) == self.acc:
            return x
        return of_dtype(x, self.acc)

    def of_queries(self, x: Tensor) -> Tensor:
        """(B heads, S group, D) of (B, H, S, D)."""
        b, h, g, s, _ = self.sizes
        return x.to(self.dtype).view(b, h, g, s, -1).transpose(2, 3).reshape(b * h, s * g, -1)

    def of_keys(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).flatten(0, 1)

    def heads(self, chunk: Chunk) -> slice:
        """Of those of all batches."""
        h = self.sizes.kv_heads
        return slice(chunk.batch.start * h + chunk.heads.start, (chunk.batch.stop - 1) * h + chunk.heads.stop)

    def queries(self, x: Tensor, chunk: Chunk) -> Tensor:
        """A chunk's part of what `of_queries` made."""
        g = self.sizes.group
        return x[self.heads(chunk), chunk.rows.start * g:chunk.rows.stop * g]

    def keys(self, x: Tensor, chunk: Chunk) -> Tensor:
        return x[self.heads(chunk), chunk.keys]

    def shape(self, chunk: Chunk) -> tuple[int, ...]:
        """Of its scores, but for the keys."""
        return (chunk.batch.stop - chunk.batch.start, chunk.heads.stop - chunk.heads.start,
                chunk.rows.stop - chunk.rows.start, self.sizes.group)

    def scores(self, a: Tensor, b: Tensor, chunk: Chunk) -> Tensor:
        """The product of a chunk's rows and its keys, or of the gradient's and the values."""
        found = _product(self.queries(a, chunk), self.keys(b, chunk).transpose(1, 2), self.acc)
        return found.view(*self.shape(chunk), -1)

    def matrix(self, x: Tensor) -> Tensor:
        """Of a chunk's scores or what has their shape: one matrix a head."""
        return x.flatten(2, 3).flatten(0, 1)

    def values(self, chunk: Chunk) -> Values:
        o = self.options
        return Values(_part(self.mask, chunk), self.positions[chunk.rows], self.columns[chunk.keys],
                      _part(self.slopes, chunk), chunk.keys.start, o.scale, o.left, o.right, o.softcap,
                      o.dropout_p)


def of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What was finite stays so, when it is rounded to fewer bits."""
    found, most = x.to(dtype), torch.finfo(dtype).max
    return torch.where(x.isinf(), found, found.clamp(-most, most))


def _by_groups(x: Tensor, kv_heads: int) -> Tensor:
    """(B, kv heads, S, group, T) of (B, H, S, T), each of which may be 1."""
    heads = (1, 1) if x.shape[1] == 1 else (kv_heads, x.shape[1] // kv_heads)
    return x.unflatten(1, heads).transpose(2, 3)


def _part(x: Tensor | None, chunk: Chunk) -> Tensor | None:
    if x is None:
        return None
    everything = slice(None)
    batch, heads, rows, keys = (part if n > 1 else everything for part, n in zip(
        chunk, (x.shape[0], x.shape[1], x.shape[2], x.shape[4]), strict=True))
    return x[batch, heads, rows, :, keys]


def _rngs(rng: Tensor | None, n: int) -> Sequence[Rng | None]:
    """Of each chunk, as `fusionrt.random.draw` gives them, of a tensor with a seed and an offset."""
    if rng is None:
        return [None] * n
    if rng.is_cuda:
        counted = rng[1] + torch.arange(n, device=rng.device)
        return [(0, 0, state) for state in torch.stack((rng[0].expand(n), counted), 1).unbind()]
    seed, offset, _ = random.unpacked(rng)
    return [(seed, offset + k, None) for k in range(n)]


# -- products --------------------------------------------------------------------------------------

def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """Which autocast leaves alone, as all that has an `out`."""
    return torch.bmm(a, b, out=a.new_empty((*a.shape[:2], b.shape[2])))


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if a.is_meta:
        return a.new_empty((*a.shape[:2], b.shape[2]), dtype=dtype)
    if a.dtype == dtype:
        return _bmm(a, b)
    return torch.ops.aten.bmm.dtype(a, b, dtype) if TO_WIDER else _bmm(a.to(dtype), b.to(dtype))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b."""
    if total.dtype == a.dtype:
        torch.baddbmm(total, a, b, out=total)
    elif TO_WIDER and total.is_cuda:
        torch.ops.aten.baddbmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total += _product(a, b, total.dtype)


# -- forward and backward --------------------------------------------------------------------------

def _run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, slopes: Tensor | None, rng: Tensor | None,
         *options: Any) -> tuple[Tensor, ...]:
    given = Operands(q, k, v, mask, slopes, rng, Options(*options))
    out = _result(q, v)
    b, h, g, s, _ = given.sizes
    by_groups = out.view(b, h, g, s, -1).transpose(2, 3)
    rows: list[tuple[Tensor, Tensor]] = []
    for chunk, numbers in zip(given.chunks, given.rngs, strict=True):
        w, most, factor = weights(given.form, given.scores(given.q, given.k, chunk), given.values(chunk),
                                  numbers)
        rows.append((most.flatten(), factor.flatten()))
        product = _bmm(given.matrix(w), given.keys(given.v, chunk))
        by_groups[chunk.batch, chunk.heads, chunk.rows] = product.view(*given.shape(chunk), -1)
    return out, *(torch.cat(part) for part in zip(*rows, strict=True))


def _result(q: Tensor, v: Tensor) -> Tensor:
    return heads_of_rows(q, q.shape[0], q.shape[1], q.shape[2], v.shape[3])


def _fake(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, ...]:
    acc = torch.promote_types(q.dtype, torch.float32)
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    return _result(q, v), *(q.new_empty(rows, dtype=acc) for _ in range(2))


@functools.cache
def _totals() -> Any:
    def attention_totals(grad: Any, out: Any) -> Any:
        return row_sum(grad * out)

    return row_operator(attention_totals).operator  # type: ignore[attr-defined]


def totals_of(grad: Tensor, out: Tensor) -> Tensor:
    """Of each row the sum of the products, (B, H, S, 1)."""
    found: Tensor = _totals().launch([grad, out])
    return found


def _run_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, slopes: Tensor | None,
                  rng: Tensor | None, out: Tensor, most: Tensor, factor: Tensor, needed: Sequence[bool],
                  *options: Any) -> tuple[Tensor, ...]:
    of_mask = needed[3] and mask is not None
    given = Operands(q, k, v, mask, slopes, rng, Options(*options), of_mask)
    b, h, g, s, _ = given.sizes
    grads, total = given.of_queries(grad), totals_of(grad, out).view(b, h, g, s, 1).transpose(2, 3)
    dq = torch.empty_like(given.q)
    dk, dv = (torch.zeros_like(x, dtype=given.acc) for x in (given.k, given.v))
    dmask = None if given.mask is None or not of_mask else torch.zeros_like(given.mask)
    begin = 0
    for chunk, numbers in zip(given.chunks, given.rngs, strict=True):
        shape = given.shape(chunk)
        end = begin + math.prod(shape)
        rows = (most[begin:end].view(*shape, 1), factor[begin:end].view(*shape, 1),
                total[chunk.batch, chunk.heads, chunk.rows])
        begin = end
        w, dx, *more = gradients(given.form, given.scores(given.q, given.k, chunk),
                                 given.scores(grads, given.v, chunk), rows, given.values(chunk), numbers)
        torch.bmm(given.matrix(dx), given.keys(given.k, chunk), out=given.queries(dq, chunk))
        _add_product(given.keys(dk, chunk), given.matrix(dx).transpose(1, 2), given.queries(given.q, chunk))
        _add_product(given.keys(dv, chunk), given.matrix(w).transpose(1, 2), given.queries(grads, chunk))
        if dmask is not None:
            part = _part(dmask, chunk)
            part += more[0]  # type: ignore[operator]
    dq = dq.view(b, h, s, g, -1).transpose(2, 3)
    found = (_as(q, dq), _as(k, dk), _as(v, dv))
    if dmask is None or mask is None:
        return *found, q.new_empty(0)
    return *found, _as(mask, dmask.transpose(2, 3))


def _as(operand: Tensor, gradient: Tensor) -> Tensor:
    """Contiguous, as `_fake_backward` says; an operand may be of any strides."""
    return gradient.reshape(operand.shape).to(operand.dtype).contiguous()


def _fake_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, slopes: Any, rng: Any,
                   out: Any, most: Any, factor: Any, needed: Sequence[bool], *options: Any
                   ) -> tuple[Tensor, ...]:
    of_mask = mask.new_empty(mask.shape) if needed[3] and mask is not None else q.new_empty(0)
    return *(x.new_empty(x.shape) for x in (q, k, v)), of_mask


def _save(args: Sequence[Any], out: Any) -> Sequence[Tensor | None]:
    return *args[:6], *out


def _backward(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any], needed: Sequence[bool]
              ) -> Sequence[Any]:
    found = backward_op(grads[0], *saved, list(needed[:4]), *args[6:])
    return *(g if need else None for g, need in zip(found, needed, strict=False)), *(
        None for _ in args[4:])


_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? slopes, Tensor? rng"
_OPTIONS = "float scale, int left, int right, SymInt offset, float softcap, float dropout_p, int chunk"
backward_op = StructuredOp(
    f"attention_chunks_backward(Tensor grad, {_OPERANDS}, Tensor out, Tensor most, Tensor factor, "
    f"bool[] needed, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)", _run_backward, _fake_backward,
    no_second_derivatives("attention"))
_op = StructuredOp(f"attention_chunks({_OPERANDS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)", _run, _fake,
                   Gradient(_save, _backward))


def attention_in_chunks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, slopes: Tensor | None,
                        options: Options) -> Tensor:
    """Of q (B, H, S, D), k and v (B, heads, T, D). `mask`: (B, H, S, T), each of which may be 1, boolean or
    added; `slopes`: (B or 1, H)."""
    rng = _drawn(q, k, options) if options.dropout_p else None
    found: Tensor = _op(q, k, v, mask, slopes, rng, *options)[0]
    return found


def _drawn(q: Tensor, k: Tensor, options: Options) -> Tensor:
    """Random numbers, a stream for each chunk; of a program that is traced, drawn when it runs."""
    if is_watched():
        return random.draw_tensor(q.device)
    return random.packed(random.draw(q.device, len(_chunks_of(q, k, options)[1])))
