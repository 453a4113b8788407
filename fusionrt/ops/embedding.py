"""Embeddings of tokens, positions and token types, added up, normalised and dropped from, in one kernel.

The backward pass saves the ids, and with a norm the mean and rstd of each row; what was normalised is
gathered again. Gradients of the tables are sums in a fixed order: rows are sorted by their id (stable), cut
into chunks of equal length, summed, and joined. No atomics: two runs give the same bits, whatever the ids.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from fusionrt import indices, random
from fusionrt.arguments import as_float, as_int
from fusionrt.array import check_dense, converted, is_foreign
from fusionrt.autograd import Dispatched, backward
from fusionrt.catalogue import COLUMNS, ROWS, Make, public
from fusionrt.dtypes import FLOATS
from fusionrt.expr import Expr
from fusionrt.fusion import dropped
from fusionrt.layout import is_among
from fusionrt.ops.dropout import scale_of_kept
from fusionrt.ops.embedding_gradients import MOST_TYPES, sum_rows_on_gpu
from fusionrt.ops.embedding_kernels import (
    MOST_ROWS,
    Dropout,
    Lookup,
    Norm,
    norm_gradient_on_gpu,
    sum_by_index,
    sum_on_cpu,
    sum_on_gpu,
)
from fusionrt.rehearsal import device_type
from fusionrt.row_fusion import row_operator
from fusionrt.rowwise import standardize
from fusionrt.structured import Gradient, StructuredOp
from fusionrt.watching import is_watched, transforms_active

Tensor = torch.Tensor
EPS = 1e-5
_OP = "embedding_position"
# Tables and ids, in the order of all the ops here.
_OPERANDS = ("Tensor tokens, Tensor weight, Tensor? position_weight, Tensor? position_ids, "
             "Tensor? token_type_weight, Tensor? token_type")
_TABLES = (1, 2, 4)


# -- rows of tables, added up ----------------------------------------------------------------------

def _lookup(operands: Sequence[Any], scale: float) -> Lookup:
    """Ids repeat: those of positions with every sequence, unless each token has its own."""
    tokens, weight, *more = operands
    position_weight, position_ids, token_type_weight, token_type = more
    given = [t if t is None else t.contiguous().view(-1) for t in (position_ids, token_type)]
    return Lookup(_OP, tokens.contiguous().view(-1), weight, position_weight, given[0], token_type_weight,
                given[1], scale, tokens.shape[-1] if tokens.dim() else 1)


def _shaped(rows: Tensor, operands: Sequence[Any]) -> Tensor:
    """Of an autograd.Function a view could not be changed in place."""
    return torch.ops.aten._unsafe_view(rows, (*operands[0].shape, rows.shape[1]))


def _sums(lookup: Lookup) -> Tensor:
    if device_type(lookup.weight) == "cpu":
        return sum_on_cpu(lookup)
    found = sum_on_gpu(lookup)
    assert found is not None
    return found[0]


def _run_sum(*args: Any) -> Tensor:
    return _shaped(_sums(_lookup(args[:6], args[6])), args)


def _fake_sum(*args: Any) -> Tensor:
    return args[1].new_empty((*args[0].shape, args[1].shape[1]))


def _save_ids(args: Sequence[Any], out: Any) -> Sequence[Tensor | None]:
    return args[0], args[3], args[5]


def _backward_sum(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any], needed: Sequence[bool]
                  ) -> Sequence[Any]:
    """Of each table. What is summed where it stands is summed with the tokens."""
    tokens, position_ids, token_type = saved
    scale, padding, sizes = args[6], args[7], args[8:]
    grad = grads[0].reshape(tokens.numel(), grads[0].shape[-1])
    period = tokens.shape[-1] if tokens.dim() else 1
    counted = needed[2] and position_ids is None and 0 < period < grad.shape[0]
    typed = needed[4] and sizes[2] <= MOST_TYPES
    found: list[Any] = [None] * len(args)
    wanted = needed[1], counted, typed
    if any(wanted):
        types = None if token_type is None else token_type.reshape(-1)
        summed = _gradients(grad, tokens.reshape(-1), types, period, *(
            n if there else 0 for n, there in zip(sizes, wanted, strict=True)), scale, padding)
        for k, there, table in zip(_TABLES, wanted, summed, strict=True):
            found[k] = table if there else None
    if needed[2] and not counted:
        found[2] = _of_repeated(grad, position_ids, period, sizes[1])
    if needed[4] and not typed:
        found[4] = _of_repeated(grad, token_type, 1, sizes[2])
    return found


def _of_repeated(grad: Tensor, ids: Tensor | None, period: int, rows: int) -> Tensor:
    """Of a table whose ids repeat: those of the first rows if there are none."""
    count = period if ids is None else ids.numel()
    if count and grad.shape[0] > count:
        wide = torch.promote_types(grad.dtype, torch.float32)
        summed = grad.view(-1, count, grad.shape[1]).sum(0, dtype=wide)
    else:
        summed = grad if ids is not None or rows > count else grad.clone()  # not the caller's memory
    if ids is not None:  # of no tokens none are summed, however many there are
        summed = _by_index(summed, ids.reshape(-1)[:summed.shape[0]], rows, 1.0, -1)
    elif rows > summed.shape[0]:
        summed = torch.nn.functional.pad(summed, (0, 0, 0, rows - summed.shape[0]))
    return summed.to(grad.dtype)


_sum = StructuredOp(f"embedding_sum({_OPERANDS}, float scale, int padding, int token_rows, "
                    "int position_rows, int type_rows) -> Tensor", _run_sum, _fake_sum,
                    Gradient(_save_ids, _backward_sum))


# -- rows of a gradient, summed ------------------------------------------------------------------

def _run_gradients(grad: Tensor, tokens: Tensor, token_type: Tensor | None, period: int, *more: Any
                   ) -> tuple[Tensor, ...]:
    *sizes, scale, padding = more
    if device_type(grad) != "cpu":
        return sum_rows_on_gpu(grad, tokens, token_type, period, sizes, scale, padding)
    rows, positions, types = sizes
    none = grad.new_empty((0, grad.shape[1]))
    return (sum_by_index(grad, tokens, rows, scale, padding) if rows else none,
            _of_repeated(grad, None, period, positions) if positions else none.clone(),
            _of_repeated(grad, token_type, 1, types) if types else none.clone())


def _backward_gradients(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any],
                        needed: Sequence[bool]) -> Sequence[Any]:
    tokens, token_type = saved
    period, rows, positions, types, scale, padding = args[3:]
    table, of_positions, of_types = grads
    terms = []
    if rows and table is not None:
        terms.append(_gathered(table, tokens, scale, padding))
    if positions and of_positions is not None:
        terms.append(of_positions[:period].repeat(tokens.numel() // period, 1))
    if types and of_types is not None:
        term = of_types[:1] if token_type is None else _gathered(of_types, token_type, 1.0, -1)
        terms.append(term.repeat(tokens.numel() // max(1, term.shape[0]), 1))
    return sum(terms[1:], terms[0]) if terms else None, *(None for _ in args[1:])


def _gathered(table: Tensor, index: Tensor, scale: float, padding: int) -> Any:
    if padding >= 0:
        table = table.index_fill(0, torch.full((1,), padding, dtype=torch.int64, device=table.device), 0)
    return _sum(index, table.contiguous(), None, None, None, None, scale, -1, table.shape[0], 0, 0)


# Of tokens, of positions that repeat every `period` rows, and of token types; 0 rows of what is not wanted.
_gradients = StructuredOp(
    "embedding_gradients(Tensor grad, Tensor tokens, Tensor? token_type, int period, int token_rows, "
    "int position_rows, int type_rows, float scale, int padding) -> (Tensor, Tensor, Tensor)", _run_gradients,
    lambda grad, _, __, ___, *more: tuple(grad.new_empty((n, grad.shape[1])) for n in more[:3]),
    Gradient(lambda args, out: args[1:3], _backward_gradients))


def _backward_by_index(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any], needed: Sequence[bool]
                       ) -> Sequence[Any]:
    return _gathered(grads[0], saved[0], *args[3:]), None, None, None, None


_by_index = StructuredOp("embedding_sum_by_index(Tensor grad, Tensor index, int rows, float scale, "
                         "int padding) -> Tensor", sum_by_index,
                         lambda grad, index, rows, *_: grad.new_empty((rows, grad.shape[1])),
                         Gradient(lambda args, out: (args[1],), _backward_by_index))


# -- what follows the sum --------------------------------------------------------------------------

@functools.cache
def _tail(norm: bool, weight: bool, bias: bool, dropout: bool) -> Any:
    """Of rows: their norm, with mean and rstd, and what dropout leaves of it."""

    def expression(x: Expr, eps: float = 0, weight: Any = None, bias: Any = None, p: float = 0,
                   scale: float = 1) -> tuple[Any, ...]:
        y, *stats = standardize(x, eps) if norm else (x,)
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
        return dropped(y, p, scale) if dropout else y, *stats

    present = {"x": True, "weight": weight, "bias": bias, "eps": norm, "p": dropout, "scale": dropout}
    return row_operator(expression, [name for name, there in present.items() if there],
                        name=_OP).operator  # type: ignore[attr-defined]


def _run_tail(x: Tensor, tail: Sequence[Any], rng: Tensor | None) -> Any:
    """A tuple: the result, and with a norm mean and rstd."""
    operator, args = _tail_of(x, *tail)
    found = _apply(operator, args, rng)
    return found if isinstance(found, tuple) else (found,)


def _apply(operator: Any, args: list[Any], rng: Tensor | None) -> Any:
    """With given random numbers, and recorded."""
    if not is_watched():
        return operator.apply(args, _numbers(rng))
    if rng is not None:
        rng = rng.to(args[0].device)
    return Dispatched.apply(operator, args, rng)


def _tail_of(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None, p: float
             ) -> tuple[Any, list[Any]]:
    norm, scale = eps is not None, scale_of_kept(_OP, p, True)
    operator = _tail(norm, weight is not None, bias is not None, scale is not None)
    args = [x, *(t for t in (weight, bias) if t is not None), *([eps] if norm else []),
            *([p, scale] if scale is not None else [])]
    return operator, args


def _numbers(rng: Tensor | None) -> random.Rng | None:
    return None if rng is None else random.unpacked(rng)


# -- everything in one kernel ----------------------------------------------------------------------

def _run_all(*args: Any) -> tuple[Tensor, ...]:
    operands, scale, (*tail, rng) = args[:6], args[6], args[11:]
    lookup, (weight, bias, eps, p) = _lookup(operands, scale), tail
    norm, keep = None if eps is None else Norm(weight, bias, eps), scale_of_kept(_OP, p, True)
    found = None
    if device_type(args[1]) != "cpu":
        dropout = None if keep is None else Dropout(p, keep, _numbers(rng) or (0, 0, None))
        found = sum_on_gpu(lookup, norm, dropout)
    if found is None:
        found = _run_tail(_sums(lookup), tail, rng)
    return _shaped(found[0], operands), *(found[1:] or _no_stats(args))


def _no_stats(args: Sequence[Any]) -> tuple[Tensor, Tensor]:
    return args[1].new_empty(0), args[1].new_empty(0)


def _fake_all(*args: Any) -> tuple[Tensor, ...]:
    out, acc = _fake_sum(*args), torch.promote_types(args[1].dtype, torch.float32)
    if args[13] is None:
        return out, *_no_stats(args)
    return out, *(out.new_empty((args[0].numel(), 1), dtype=acc) for _ in range(2))


def _save_all(args: Sequence[Any], out: Any) -> Sequence[Tensor | None]:
    tables = args[:6] if args[13] is not None else (args[0], None, None, args[3], None, args[5])
    return *tables, args[11], args[12], args[15], *out[1:]


def _backward_all(saved: Sequence[Any], args: Sequence[Any], grads: Sequence[Any], needed: Sequence[bool]
                  ) -> Sequence[Any]:
    *operands, weight, bias, rng, mean, rstd = saved
    scale, eps, p = args[6], *args[13:15]
    tail, wanted = (weight, bias, eps, p), any(needed[k] for k in _TABLES)
    found: list[Any] = [None] * len(args)
    if torch.is_grad_enabled() and eps is not None:
        return _differentiable_backward(operands, tail, rng, args, grads[0], needed)
    # As the rows, whose random numbers it takes.
    grad = grads[0].reshape(operands[0].numel(), grads[0].shape[-1]).contiguous()
    if eps is None:
        of_rows = _tail_gradient(grad, grad, tail, rng, ())[0]  # only of the first shape and dtype are read
    else:
        of_rows, affine = _norm_gradient(*operands, scale, *tail, rng, grad, mean, rstd)
        for row, (k, t) in enumerate(((11, weight), (12, bias))):
            found[k] = affine[row] if t is not None and needed[k] else None
    if wanted:
        found[:11] = _backward_sum((operands[0], operands[3], operands[5]), args[:11],
                                   [of_rows.view(grads[0].shape)], needed)
    return found


def _tail_gradient(x: Tensor, grad: Tensor, tail: Sequence[Any], rng: Tensor | None, stats: Sequence[Tensor]
                   ) -> list[Any]:
    """Of rows x, and with a norm of its weight and bias, None where they are absent."""
    operator, inputs = _tail_of(x, *tail)
    tensors = 1 + sum(t is not None for t in tail[:2])
    wants = tuple(k < tensors for k in range(len(inputs)))
    inputs += [(None, *stats)[k] for k in operator.read_by_backward(wants)[1]]
    found = iter(backward(operator, inputs, [grad, *(None for _ in stats)], wants, rng, _apply, None))
    return [next(found), *(None if t is None else next(found) for t in tail[:2])]


def _in_rows(operands: Sequence[Any]) -> list[Any]:
    """With tables whose rows lie together; hooks of saved tensors may give back others."""
    return [t if k not in _TABLES or t is None or t.stride(1) == 1 else t.contiguous()
            for k, t in enumerate(operands)]


def _run_norm_gradient(*args: Any) -> tuple[Tensor, ...]:
    operands, (scale, *tail, rng, grad, mean, rstd) = _in_rows(args[:6]), args[6:]
    lookup, (weight, bias, eps, p) = _lookup(operands, scale), tail
    keep = scale_of_kept(_OP, p, True)
    if device_type(grad) != "cpu":
        dropout = None if keep is None else Dropout(p, keep, _numbers(rng) or (0, 0, None))
        found = norm_gradient_on_gpu(lookup, Norm(weight, bias, eps), dropout, grad.contiguous(), mean, rstd)
        if found is not None:
            return found
    rows = _sums(lookup)
    of_rows, *affine = _tail_gradient(rows, grad, tail, rng, (mean, rstd))
    return of_rows, torch.stack([grad.new_zeros(grad.shape[1]) if g is None else g for g in affine])


# Of the sum that a norm was taken of; of the norm's weight and bias, one beside the other.
_norm_gradient = StructuredOp(
    f"embedding_norm_gradient({_OPERANDS}, float scale, Tensor? norm_weight, Tensor? norm_bias, float eps, "
    "float p, Tensor? rng, Tensor grad, Tensor mean, Tensor rstd) -> (Tensor, Tensor)", _run_norm_gradient,
    lambda *args: (torch.empty_like(args[12]), args[12].new_empty((2, args[12].shape[1]))))


def _differentiable_backward(operands: Sequence[Any], tail: Sequence[Any], rng: Tensor | None,
                             args: Sequence[Any], grad: Tensor, needed: Sequence[bool]) -> Sequence[Any]:
    """By the ops that the kernel is made of, each with derivatives of any order."""
    places = {**dict(enumerate(operands)), 11: tail[0], 12: tail[1]}
    wanted = [k for k in places if needed[k]]

    def forward(*tensors: Tensor) -> Tensor:
        given = places | dict(zip(wanted, tensors, strict=True))
        rows = _sum(*(given[k] for k in range(len(operands))), *args[6:11])
        affine = given[11], given[12], *tail[2:]
        out: Tensor = _run_tail(rows.view(-1, rows.shape[-1]), affine, rng)[0].view_as(rows)
        return out

    tensors = [places[k] for k in wanted]
    if transforms_active():
        grads = torch.func.vjp(forward, *tensors)[1](grad)
    else:
        with torch.enable_grad():
            out = forward(*tensors)
        grads = torch.autograd.grad(out, tensors, grad, create_graph=True)
    found = dict(zip(wanted, grads, strict=True))
    return [found.get(k) for k in range(len(args))]


_all = StructuredOp(f"embedding_position({_OPERANDS}, float scale, int padding, int token_rows, "
                    "int position_rows, int type_rows, Tensor? norm_weight, Tensor? norm_bias, float? eps, "
                    "float p, Tensor? rng) -> (Tensor, Tensor, Tensor)", _run_all, _fake_all,
                    Gradient(_save_all, _backward_all))


# -- what users call -------------------------------------------------------------------------------

def _example(make: Make) -> tuple[Any, ...]:
    return make(ROWS, dtype=torch.int64, high=16), make(16, COLUMNS), make(ROWS, COLUMNS)


@public(example=_example)
def embedding_position(tokens: Any, weight: Any, position_weight: Any = None, *, scale: float = 1.0,
                       layer_norm: Any = None, dropout_p: float = 0.0, training: bool = True,
                       padding_idx: int | None = None, token_type: Any = None, token_type_weight: Any = None,
                       position_ids: Any = None) -> Any:
    """dropout(norm(weight[tokens] * scale + position_weight[position_ids] + token_type_weight[token_type])).

    tokens: int32 or int64 of shape (..., S). weight: (V, C) of a floating dtype, which position_weight (P, C)
    and token_type_weight (T, C) share; each of these may be absent. position_ids: (S,) or of tokens' shape; 0
    to S - 1 unless given. token_type: of tokens' shape or (S,); 0 unless given. The result is (..., S, C).
    layer_norm: (weight, bias) or (weight, bias, eps), each of shape (C,) or None; eps is 1e-5. dropout_p: in
    [0, 1], of no effect without `training`; the mask is drawn from torch's generator. `padding_idx`: a
    row of weight that gets no gradient; negative ones count from the end.

    Computed in float32 (float64 for doubles) and rounded once; on a CPU, and where rows are long, before a
    norm as well. Up to 16 Ki columns (4 Ki doubles; 2 Ki where their number is odd) a norm is part of the one
    kernel, of longer rows a second one. Gradients of all tables and of the norm's weight and bias, dense, the
    same bits in every run; second ones as well. An id that is out of range: its row is NaN, and IndexError is
    raised: on a CPU at once; on a GPU, which is not waited for, by a later call (or by
    `fusionrt.deferred.examine(wait=True)`). Raises TypeError and ValueError for arguments that do not fit.
    Source: F.dropout(F.layer_norm(F.embedding(tokens, weight, padding_idx) * scale + position_weight[:S],
    (C,), ...)).

        embedding_position(tokens, weight, position_weight, layer_norm=(gamma, beta), dropout_p=0.1)
    """
    gamma, beta, eps = _checked_norm(layer_norm)
    arrays = {"tokens": tokens, "weight": weight, "position_weight": position_weight,
              "position_ids": position_ids, "token_type_weight": token_type_weight, "token_type": token_type,
              "layer_norm weight": gamma, "layer_norm bias": beta}
    restore: Any = None
    if any(map(is_foreign, arrays.values())):
        found, restore = converted(_OP, arrays)
        arrays = dict(zip(arrays, found, strict=True))
    _check_kinds(arrays)
    _check_shapes(arrays)
    keep = scale_of_kept(_OP, dropout_p, training, "dropout_p")
    given = list(arrays.values())
    operands = _in_rows(given[:-2])
    gamma, beta = given[-2:]
    weight = operands[1]
    sizes = (0 if operands[k] is None else operands[k].shape[0] for k in _TABLES)
    more = as_float(_OP, "scale", scale), _checked_padding(padding_idx, weight.shape[0]), *sizes
    if eps is None and keep is None:
        result = _sum(*operands, *more)
    else:
        affine = [t if t is None else t.contiguous() for t in (gamma, beta)]
        result = _all(*operands, *more, *affine, eps, dropout_p if keep is not None else 0.0,
                      None if keep is None else _drawn(weight.device))[0]
    return result if restore is None else restore(result)


def _drawn(device: torch.device) -> Tensor:
    """The state of the generator: of a program that is traced, drawn when it runs."""
    if is_watched():
        return random.draw_tensor(device)
    return random.packed(random.draw(device, 1))


def _checked_norm(layer_norm: Any) -> tuple[Any, Any, float | None]:
    if layer_norm is None:
        return None, None, None
    if not isinstance(layer_norm, (tuple, list)) or len(layer_norm) not in (2, 3):
        raise TypeError(f"{_OP}: layer_norm must be (weight, bias) or (weight, bias, eps), got a "
                        f"{type(layer_norm).__name__}")
    weight, bias, *eps = layer_norm
    return weight, bias, as_float(_OP, "eps of layer_norm", eps[0]) if eps else EPS


def _check_kinds(arrays: dict[str, Any]) -> None:
    """Tensors of one device, ids of integers, tables of one floating dtype."""
    weight = arrays["weight"]
    for name, t in arrays.items():
        if t is None and name not in ("tokens", "weight"):
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{_OP}: {name} must be a tensor or an array, got {type(t).__name__}")
        check_dense(_OP, name, t)
        if name in ("tokens", "position_ids", "token_type"):
            indices.check_dtype(_OP, name, t)
        elif t.dtype not in FLOATS:
            raise TypeError(f"{_OP}: {name} must have a floating dtype (float16, bfloat16, float32, "
                            f"float64), got {t.dtype}")
        elif t.dtype != weight.dtype:
            raise TypeError(f"{_OP}: {name} must have weight's dtype, {weight.dtype}, got {t.dtype}")
    for name, t in arrays.items():
        if t is not None and t.device != weight.device:
            raise ValueError(f"{_OP}: {name} must be on weight's device, {weight.device}, got {t.device}")


def _check_shapes(arrays: dict[str, Any]) -> None:
    tokens, weight = arrays["tokens"], arrays["weight"]
    shape, columns = tuple(tokens.shape), weight.shape[-1] if weight.dim() else 0
    length = shape[-1] if shape else 1
    if weight.dim() != 2:
        raise ValueError(f"{_OP}: weight must have the shape (V, C), got {tuple(weight.shape)}")
    if tokens.numel() > MOST_ROWS:
        raise ValueError(f"{_OP}: tokens must be fewer than 2^32, got {tokens.numel()}")
    for name in ("position_weight", "token_type_weight"):
        t = arrays[name]
        if t is not None and (t.dim() != 2 or t.shape[1] != columns):
            raise ValueError(f"{_OP}: {name} must have the shape (rows, {columns}), got {tuple(t.shape)}")
    for name in ("layer_norm weight", "layer_norm bias"):
        t = arrays[name]
        if t is not None and tuple(t.shape) != (columns,):
            raise ValueError(f"{_OP}: {name} must have the shape {(columns,)}, got {tuple(t.shape)}")
    for name, table in (("position_ids", "position_weight"), ("token_type", "token_type_weight")):
        ids, rows = arrays[name], arrays[table]
        if ids is None:
            needs = length if name == "position_ids" else 1
            if rows is not None and rows.shape[0] < needs and tokens.numel():
                raise ValueError(f"{_OP}: {table} must have at least {needs} rows (no {name} are given), got "
                                 f"{rows.shape[0]}")
        elif rows is None:
            raise ValueError(f"{_OP}: {name} needs {table}")
        elif not is_among(tuple(ids.shape), shape, (length,), (1, length)):
            raise ValueError(f"{_OP}: {name} must have the shape {shape} or {(length,)}, got "
                             f"{tuple(ids.shape)}")


def _checked_padding(padding_idx: int | None, rows: int) -> int:
    """Not negative, or -1 for none."""
    if padding_idx is None:
        return -1
    if not -rows <= as_int(_OP, "padding_idx", padding_idx) < rows:
        raise ValueError(f"{_OP}: padding_idx must be in [-{rows}, {rows}), got {padding_idx}")
    return padding_idx % rows
