"""The kernels of `cross_entropy`: losses of rows of logits, their gradient, their reduction."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fusionrt.definition import SCALAR
from fusionrt.expr import Expr, argument, cast, log, node, row_sum, tanh, where
from fusionrt.fusion import fuse_named
from fusionrt.graph import substitute, toposort
from fusionrt.op import Operator
from fusionrt.row_fusion import per_call, row_operator
from fusionrt.row_op import RowOperator
from fusionrt.rowwise import softmax_terms, taken, total

N_CLASSES = node("row_size", "row_size")


def _of_classes(input: Expr, target: Expr, ignore_index: float, weight: Any = None,
                label_smoothing: float = 0, z_loss: float = 0, softcap: float = 0, columns: Any = None
                ) -> tuple[Expr, ...]:
    """A row's loss, the weight of its class, and what its gradient reads. A wrong class makes NaN."""
    def of_class(values: Expr) -> Expr:
        return taken(values, target) if columns is None else row_sum(where(columns == target, values, 0))

    x, at_class = _capped(input, softcap), _capped(of_class(input), softcap)
    most, total = softmax_terms(x)
    share = node("const", "1.0") if weight is None else of_class(weight)
    loss, stats = share * (log(total) - (at_class - most)), [most, total]
    if isinstance(label_smoothing, Expr):
        distance, weights = x - most, N_CLASSES
        if weight is not None:
            distance, weights = weight * distance, row_sum(weight)
            stats.append(weights)
        of_all = weights * log(total) - row_sum(distance)
        loss = (1 - label_smoothing) * loss + label_smoothing / N_CLASSES * of_all
    loss = _with_z_loss(loss, most, total, z_loss)
    loss = where(_is_wrong(target, ignore_index, N_CLASSES), math.nan, loss)
    is_ignored = target == ignore_index
    return where(is_ignored, 0, loss), where(is_ignored, 0, share), *stats


def _of_probabilities(input: Expr, target: Expr, weight: Any = None, label_smoothing: float = 0,
                      z_loss: float = 0, softcap: float = 0) -> tuple[Expr, ...]:
    """A row's loss, and what its gradient reads."""
    x = _capped(input, softcap)
    most, total = softmax_terms(x)
    if isinstance(label_smoothing, Expr):
        target = (1 - label_smoothing) * target + label_smoothing / N_CLASSES
    shares = target if weight is None else target * weight
    weights = row_sum(shares)
    loss = weights * log(total) - row_sum(shares * (x - most))
    return _with_z_loss(loss, most, total, z_loss), most, total, weights


def _capped(x: Expr, softcap: Any) -> Expr:
    return softcap * tanh(x / softcap) if isinstance(softcap, Expr) else x


def _with_z_loss(loss: Expr, most: Expr, total: Expr, z_loss: Any) -> Expr:
    log_sum = most + log(total)
    return loss + z_loss * (log_sum * log_sum) if isinstance(z_loss, Expr) else loss


def _is_wrong(target: Expr, ignore_index: Any, n_classes: Any) -> Expr:
    return (target != ignore_index) & ((target < 0) | (n_classes <= target))


@per_call
def losses_of(params: tuple[str, ...], with_gradient: bool, is_result: bool) -> Callable[..., Any]:
    """The kernel over the logits. `is_result`: losses are what the user gets, of the logits' dtype."""
    expression, uniform = _losses(params, with_gradient, is_result)
    return row_operator(expression, params, name="cross_entropy", uniform=uniform,
                        rounded=(0,) if is_result else ())


def _losses(params: tuple[str, ...], with_gradient: bool, is_result: bool
            ) -> tuple[Callable[..., tuple[Expr, ...]], tuple[str, ...]]:
    """The expression, and which of its tensors have one value a row."""
    of_classes = "ignore_index" in params
    formula: Callable[..., tuple[Expr, ...]] = _of_classes if of_classes else _of_probabilities

    @functools.wraps(formula)
    def expression(**given: Any) -> tuple[Expr, ...]:
        loss, *stats = formula(**given)
        share = [stats.pop(0)] if of_classes else []
        share = share if "weight" in params and not is_result else []
        return loss, *share, *(stats if with_gradient else [])

    return expression, ("target",) if of_classes else ()


class Gradient(NamedTuple):
    """The kernel of the gradient of the logits, and which results of the kernel over the logits it reads."""

    operator: Operator
    saved: tuple[int, ...]


@functools.lru_cache(1024)
def gradient_of(params: tuple[str, ...], is_result: bool, mean: bool, in_place: bool) -> Gradient:
    """Arguments: those of the kernel over the logits, its `saved` results, the incoming gradient, and what a
    mean divides by. `in_place`: the gradient takes the memory of the logits."""
    kernel = losses_of(params, True, is_result).operator
    needed, given = ((True, *(False,) * (n - 1)) for n in (len(params), len(kernel.outputs)))
    gradient = kernel.gradient(needed, given)
    n = len(gradient.params)
    incoming, count = argument(f"a{n - 1}", True), argument(f"a{n}", True)
    roots = substitute(gradient.outputs, {incoming: incoming / count}) if mean else gradient.outputs
    operator = RowOperator(gradient.name, [*gradient.params, "count"][:n + mean],
                           _first_product_rounded(roots), gradient.targets, {*gradient.uniform, n})
    return Gradient(operator.over({0: 0}) if in_place else operator, gradient.saved)


def _first_product_rounded(roots: Sequence[Expr]) -> list[Expr]:
    """With the first of two products that are added rounded by itself. A compiler joins one of them with the
    addition, not the same one in every kernel: the gradient in place would have other bits."""
    rounded = {n.args[0]: node("mul_rn", *n.args[0].args) for n in toposort(roots)
               if n.op == "add" and not n.uniform
               and all(isinstance(a, Expr) and a.op == "mul" for a in n.args) and isinstance(n.args[0], Expr)}
    return substitute(roots, rounded)


@functools.lru_cache(1024)
def reduced(params: tuple[str, ...], with_gradient: bool, mean: bool, dtype: str | None) -> Operator:
    """The kernel over the logits, which reduces the losses as well. Its results are what a gradient reads (if
    one follows), the sum or mean and, for a gradient again, what a mean was divided by. A last argument
    `wrong` is memory for the number of wrong classes. `dtype`: what the second is rounded to, if it is."""
    losses, uniform = _losses(params, with_gradient, False)
    n, last = (len(losses_of(params, with_gradient, False).operator.outputs) + k for k in (0, 1 + mean))
    read = gradient_of(params, False, mean, False).saved if with_gradient else ()
    untold = {*range(n), *range(n + 1, last + 1)} - {*read, *([n + 1] if mean and with_gradient else [])}

    def expression(wrong: Expr, **given: Any) -> tuple[Expr, ...]:
        loss, *rest = losses(**given)
        target, ignore_index = given["target"], given["ignore_index"]
        share = rest[0] if "weight" in params else where(target == ignore_index, 0, 1)
        divisor = [total(share)] if mean else []
        found = total(loss) / divisor[0] if mean else total(loss)
        n_wrong = total(where(_is_wrong(target, ignore_index, N_CLASSES), 1, 0))
        return loss, *rest, _rounded(found, dtype), *divisor, cast(n_wrong, "int64")

    of_losses = inspect.signature(losses)
    wrong = inspect.Parameter("wrong", inspect.Parameter.KEYWORD_ONLY)
    expression.__signature__ = of_losses.replace(  # type: ignore[attr-defined]
        parameters=[*of_losses.parameters.values(), wrong])
    made: Any = row_operator(expression, (*params, "wrong"), name="cross_entropy", uniform=uniform,
                             targets=[None] * n + [SCALAR] * (last + 1 - n), untold=tuple(untold),
                             rounded=(last, *((n,) if dtype else ())))
    operator: Operator = made.operator.over({last: len(params)})
    return operator


@per_call
def reduction_of(params: tuple[str, ...], mean: bool, dtype: str | None, row_dims: int) -> Callable[..., Any]:
    """The kernel over the losses of all rows: their sum or mean, how many classes are wrong, and what the
    gradient of a mean reads. A last argument `wrong` is memory for the second, see `over`."""

    def expression(loss: Expr, target: Any = None, ignore_index: float = 0, n_classes: float = 0,
                   share: Any = None, factor: float = 1, wrong: Any = None) -> tuple[Expr, ...]:
        if target is None:
            return (_rounded(row_sum(loss) * factor, dtype),)
        n_wrong = cast(row_sum(where(_is_wrong(target, ignore_index, n_classes), 1, 0)), "int64")
        if not mean:
            return _rounded(row_sum(loss), dtype), n_wrong
        count = row_sum(where(target == ignore_index, 0, 1) if share is None else share)
        return _rounded(row_sum(loss) / count, dtype), n_wrong, count

    targets = (SCALAR, *((SCALAR, None) if mean else (SCALAR,))) if "target" in params else (SCALAR,)
    return row_operator(expression, params, name="cross_entropy_reduction", targets=targets,
                        row_dims=row_dims, rounded=(0, 1))


def _rounded(result: Expr, dtype: str | None) -> Expr:
    return cast(result, dtype) if dtype else result


def _count_wrong(target: Expr, ignore_index: float, n_classes: float) -> Expr:
    return cast(where(_is_wrong(target, ignore_index, n_classes), 1, 0), "int64")


count_wrong = fuse_named(_count_wrong, "cross_entropy_wrong", SCALAR)
