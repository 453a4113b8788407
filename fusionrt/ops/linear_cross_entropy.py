"""Cross-entropy of the logits of a linear layer, which never are in memory as a whole.

Rows are taken in chunks: a matrix product (torch's) makes their logits, the kernels of `cross_entropy` their
losses and the gradient of the logits, two more products the gradients of the operands. Where the losses
are summed, all of that happens in the forward pass, for an incoming gradient of 1, and the backward pass is a
multiplication; of losses that are not (reduction "none") the backward pass makes the logits again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from fusionrt import autocast
from fusionrt.array import check_dense
from fusionrt.catalogue import COLUMNS, ROWS, Make, public
from fusionrt.ops.cross_entropy import (
    Call,
    check_classes,
    checked,
    reducing,
    result_dtype,
    with_exact_ignored,
)
from fusionrt.ops.cross_entropy_rows import gradient_of, losses_of
from fusionrt.ops.linear_path import rows_of
from fusionrt.ops.product import TO_WIDER
from fusionrt.watching import is_batched, transforms_active

CHUNK_BYTES = 1 << 29     # of logits, at most
FEWEST_CHUNKS = 8         # as long as each has the rows of a matrix product's tile
ROWS_OF_TILE = 128
Tensor = torch.Tensor


class Gradients:
    """Of the operands that need one, under way; of weight and bias in float32 (float64 for doubles)."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> None:
        self.operands, acc = (hidden, weight), torch.promote_types(hidden.dtype, torch.float32)
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=acc) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=acc) if needed[2] and bias is not None else None

    def add(self, rows: slice, of_logits: Tensor) -> None:
        hidden, weight = self.operands
        if self.hidden is not None:
            torch.mm(of_logits, weight, out=self.hidden[rows])
        if self.weight is not None:
            _add_product(self.weight, of_logits.t(), hidden[rows])
        if self.bias is not None:
            self.bias += of_logits.sum(0, dtype=self.bias.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total may be of a wider dtype."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    elif TO_WIDER and total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total += a @ b


def _chunked(hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call, needed: tuple[bool, ...],
             grad_output: Tensor | None = None) -> tuple[Tensor, Tensor | None, Gradients]:
    """Losses of all rows, of shape (N, 1), the weights of their classes, and gradients of the operands."""
    acc = torch.promote_types(hidden.dtype, torch.float32)
    kernel, gradient = losses_of(call.params, True, False), gradient_of(call.params, False, False, True)
    n, step = hidden.shape[0], _rows_of_chunk(hidden.shape[0], weight.shape[0] * hidden.element_size())
    losses = hidden.new_empty((n, 1), dtype=acc)
    shares = torch.empty_like(losses) if call.has_shares else None
    one, grads = torch.ones((), dtype=acc, device=hidden.device), Gradients(hidden, weight, bias, needed)
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        args = [F.linear(hidden[rows], weight, bias), call.args[1][rows], *call.args[2:]]
        found = kernel(*args)
        losses[rows] = found[0]
        if shares is not None:
            shares[rows] = found[1]
        if any(needed):
            incoming = one.expand(rows.stop - first, 1) if grad_output is None else grad_output[rows]
            saved = (found[k] for k in gradient.saved)
            grads.add(rows, gradient.operator.launch([*args, *saved, incoming]))
    return losses, shares, grads


def _rows_of_chunk(n: int, bytes_of_row: int) -> int:
    rows = min(-(-n // FEWEST_CHUNKS), CHUNK_BYTES // bytes_of_row)
    return max(ROWS_OF_TILE, rows // ROWS_OF_TILE * ROWS_OF_TILE)


Options = tuple[int, str, float, float, float | None, torch.dtype]   # ignore_index ... softcap, the result's


def _compute(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
             ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float | None,
             dtype: torch.dtype, needed: Sequence[bool], grad_output: Tensor | None) -> list[Tensor]:
    """The losses of "none", or with grad_output their needed gradients; otherwise the result, what it was
    divided by, and the needed gradients for an incoming one of 1, undivided."""
    logits = torch.empty((hidden.shape[0], weight.shape[0]), dtype=hidden.dtype, device="meta")
    call = checked("linear_cross_entropy", logits, target, class_weight, ignore_index, reduction,
                   label_smoothing, z_loss, softcap, "class_weight")._replace(dtype=dtype)
    with autocast.off(hidden.device):  # which would cast what a backward pass reads
        losses, shares, grads = _chunked(hidden, weight, bias, call, tuple(needed), grad_output)
    found = [g for g in (grads.hidden, grads.weight, grads.bias) if g is not None]
    if grad_output is not None:
        return found
    if reduction == "none":
        check_classes(call, call.args)
        return [torch.ops.aten._unsafe_view(losses, losses.shape[:1]).to(dtype)]  # no view, as in `shaped`
    result, count = reducing(call, losses.dim())(call.args, losses, shares)
    count = torch.as_tensor(count, dtype=losses.dtype, device=hidden.device)
    return [result, count.reshape(()), *found]


# An op of torch's, so that torch.compile has it in its graph as it stands.
_as_op = torch.library.custom_op(
    "fusionrt::linear_cross_entropy_chunks", _compute, mutates_args=(), schema=(
        "(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, int ignore_index,"
        " str reduction, float label_smoothing, float z_loss, float? softcap, ScalarType dtype, "
        "bool[] needed, Tensor? grad_output) -> Tensor[]"))


@_as_op.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
      *options: Any) -> list[Tensor]:
    _, reduction, *_, dtype, needed, grad_output = options
    acc = torch.promote_types(hidden.dtype, torch.float32)
    grads = [torch.empty_like(t, dtype=t.dtype if t is hidden else acc)
             for t, need in zip((hidden, weight, bias), needed, strict=True) if need and t is not None]
    if grad_output is not None:
        return grads
    if reduction == "none":
        return [hidden.new_empty(hidden.shape[0], dtype=dtype)]
    return [hidden.new_empty((), dtype=dtype), hidden.new_empty((), dtype=acc), *grads]


class LinearCrossEntropy(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
                class_weight: Tensor | None, options: Options) -> Tensor:
        operands, needed = (hidden, weight, bias), list(ctx.needs_input_grad[:3])
        ctx.options, ctx.dtypes = options, [
            t.dtype for t, need in zip(operands, needed, strict=True) if need and t is not None]
        ctx.is_each = options[1] == "none"
        compute: Any = _compute if hidden.is_meta else _as_op  # of meta tensors the op only knows the shapes
        result, *more = compute(*operands, target, class_weight, *options,
                                [False] * 3 if ctx.is_each else needed, None)
        ctx.save_for_backward(*((*operands, target, class_weight) if ctx.is_each else more))
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        if torch.is_grad_enabled():  # it would be a constant's, without a word
            raise RuntimeError("linear_cross_entropy has no second derivative: it needs a backward pass "
                               "without create_graph")
        needed = ctx.needs_input_grad[:3]
        batched = not torch.compiler.is_dynamo_compiling() and is_batched(grad_output)
        if batched and ctx.is_each:
            raise NotImplementedError("linear_cross_entropy: reduction='none' takes one incoming gradient at "
                                      "a time; use cross_entropy of torch.nn.functional.linear")
        incoming = grad_output.to(torch.promote_types(grad_output.dtype, torch.float32))
        if ctx.is_each:
            compute: Any = _compute if grad_output.device.type == "meta" else _as_op
            found = compute(*ctx.saved_tensors, *ctx.options, list(needed), incoming.unsqueeze(-1))
            found = [g.to(dtype) for g, dtype in zip(found, ctx.dtypes, strict=True)]
        else:
            count, *grads = ctx.saved_tensors
            scale = torch.where(count == 0, 0, incoming / count)  # of no target that counts: zeros
            found = [(g * scale).to(dtype) if batched else
                     torch.mul(g, scale, out=torch.empty_like(g, dtype=dtype))  # no more in float32
                     for g, dtype in zip(grads, ctx.dtypes, strict=True)]
        each = iter(found)
        return *(next(each) if need else None for need in needed), None, None, None


def _example(make: Make) -> tuple[Any, ...]:
    return make(ROWS, 1024), make(COLUMNS, 1024), make(ROWS, dtype=torch.int64, high=COLUMNS)


@public(example=_example, arrays="hidden weight target bias class_weight")
def linear_cross_entropy(hidden: Any, weight: Any, target: Any, bias: Any = None, *,
                         class_weight: Any = None, ignore_index: int = -100, reduction: str = "mean",
                         label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None
                         ) -> Any:
    """cross_entropy(hidden @ weight.T + bias, target), whose logits never are in memory as a whole.

    `hidden`: (..., H). `weight`: (V, H), `bias`: (V,), of hidden's dtype. `target`: classes of hidden's shape
    without the last dimension, or probabilities of the shape (..., V). `class_weight` and what follows: as
    `weight` and the options of `cross_entropy`. The losses of "none" have target's shape.
    Raises what `cross_entropy` raises.

    Gradients of hidden, weight and bias; those of weight and bias are summed in float32. There are no second
    ones: a backward pass with create_graph is a RuntimeError, also that of a sum with another loss.
    (Under autocast operands are cast, and the result is float32.)
    With "mean" and "sum" it costs the three matrix products that torch's two ops cost, with "none" a fourth
    one. Memory, beside the operands: a chunk of logits (1/8 of them, 512 MiB at most, but 128 rows at least)
    and the gradients, that of weight in float32.
    Source: torch.nn.functional.cross_entropy of torch.nn.functional.linear.

        linear_cross_entropy(torch.randn(8, 64), torch.randn(512, 64), torch.randint(512, (8,)))
    """
    op = "linear_cross_entropy"
    if transforms_active():
        raise NotImplementedError(f"{op}: torch.func's transforms are not implemented; use cross_entropy of "
                                  "torch.nn.functional.linear")
    _check_operands(op, hidden, weight, bias, target)
    for name, value in (("target", target), ("class_weight", class_weight)):
        if getattr(value, "requires_grad", False):
            raise ValueError(f"{op}: {name} gets no gradient here: detach it, or use cross_entropy")
    rows, n_classes = rows_of(hidden), weight.shape[0]
    logits = torch.empty((rows.shape[0], n_classes), dtype=hidden.dtype, device="meta")
    flat = target.reshape(len(rows), n_classes) if target.is_floating_point() else target.flatten()
    checked(op, logits, flat, class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap,
            "class_weight")
    flat, ignore_index = with_exact_ignored(flat, ignore_index)
    options = (ignore_index, reduction, float(label_smoothing), float(z_loss), softcap,
               result_dtype(hidden.device, hidden.dtype))
    rows, weight, bias = autocast.cast(rows, weight, bias)
    if not torch.is_grad_enabled():  # what the context says is needed is whatever could have a gradient
        rows, weight, bias = rows.detach(), weight.detach(), None if bias is None else bias.detach()
    result: Tensor = LinearCrossEntropy.apply(rows, weight, bias, flat, class_weight, options)
    return result.view(hidden.shape[:-1]) if reduction == "none" else result


def _check_operands(op: str, hidden: Any, weight: Any, bias: Any, target: Any) -> None:
    named = {"hidden": hidden, "weight": weight, "target": target}
    if bias is not None:
        named["bias"] = bias
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor or an array, got {type(value).__name__}")
        check_dense(op, name, value)
        if name != "target" and value.dtype != hidden.dtype:
            raise TypeError(f"{op}: {name} must have hidden's dtype, {hidden.dtype}, got {value.dtype}")
    if hidden.dim() == 0 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"{op}: hidden and weight must have shapes (..., H) and (V, H), got "
                         f"{tuple(hidden.shape)} and {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: bias must have the shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    expected = (*hidden.shape[:-1], *(weight.shape[:1] if target.is_floating_point() else ()))
    if tuple(target.shape) != expected:
        raise ValueError(f"{op}: target must have the shape {tuple(expected)}, got {tuple(target.shape)}")
