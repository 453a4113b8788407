"""Losses of single elements, fused with their reduction: what is summed is never written.

`reduction`: "mean" (of all elements), "sum", or "none" (a loss for each element). Sums are accumulated
in float32 (float64 for doubles) in an order that depends on the shape alone, and rounded once.
`input` and `target` broadcast; like torch, a loss warns where their shapes differ. The result has their
promoted dtype, under autocast at least float32. Dtypes: float16, bfloat16 (computed in float32), float32,
float64; one of the two may be of integers. Every floating tensor has first and second derivatives, each one
kernel.
Raises ValueError for other options and shapes that do not broadcast, TypeError for what is no array.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fusionrt import autocast, layout
from fusionrt.arguments import as_float
from fusionrt.catalogue import COLUMNS, ROWS, Make, public
from fusionrt.definition import SCALAR
from fusionrt.dtypes import HALVES, as_torchs
from fusionrt.expr import Expr, abs_, cast, clamp, exp, log, softplus, where
from fusionrt.fusion import Fused, fuse_named
from fusionrt.op import promoted_dtype
from fusionrt.ops.reduction import sum as sum_of


class Kernels(NamedTuple):
    """Of a formula."""

    each: Fused              # of the formula's arguments
    total: Fused             # of those and a factor, by which every element is scaled before it is added


class Loss(NamedTuple):
    """Whose result has the operands' dtype, and that of float32 whatever they are."""

    own: Kernels
    wide: Kernels


def _loss(formula: Callable[..., Expr]) -> Loss:
    name = formula.__name__.removeprefix("_")
    parameters = list(inspect.signature(formula).parameters.values())
    factor = inspect.Parameter("factor", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=float)

    def kernels(wide: bool) -> Kernels:
        def each(*args: Any) -> Expr:
            return cast(formula(*args), "float32") if wide else formula(*args)

        def scaled(*args: Any) -> Expr:
            found = formula(*args[:-1]) * args[-1]
            return cast(found, "float32") if wide else found

        each.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        scaled.__signature__ = inspect.Signature([*parameters, factor])  # type: ignore[attr-defined]
        return Kernels(fuse_named(each, name), fuse_named(scaled, name, SCALAR))

    return Loss(kernels(False), kernels(True))


def _reduced(op: str, loss: Loss, reduction: str, *args: Any, also: str = "", weighted: bool = False) -> Any:
    """`weighted`: a mean is divided by the sum of the third argument, not by the number of elements."""
    shape = _shape(op, *args[:2])
    each, total = _kernels(loss, *args)
    if reduction == "mean":
        count = math.prod(shape)
        if not count:
            return total(*args, 1.0) * math.nan
        return total(*args, 1 / (_sum_of_weights(args[0], args[2]) if weighted else count))
    if reduction == "sum":
        return total(*args, 1.0)
    if reduction == "none":
        return each(*args)
    raise ValueError(f"{op}: reduction must be 'mean', 'sum'{also} or 'none', got {reduction!r}")


def _kernels(loss: Loss, *args: Any) -> Kernels:
    """Wide where autocast, which wants losses in float32, finds one of 16 bits."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]  # (Dynamo of 2.6 has no `next` with a default)
    if not tensors or not autocast.is_on(tensors[0].device):
        return loss.own
    short = promoted_dtype(args) in HALVES
    return loss.wide if short else loss.own


def _shape(op: str, input: Any, target: Any) -> tuple[int, ...]:
    """Of the loss before its reduction."""
    mine, other = (tuple(getattr(a, "shape", ())) for a in (input, target))
    if mine == other:
        return mine
    shape = layout.broadcast_shapes([mine, other])
    if shape is None:
        raise ValueError(f"{op}: input and target must broadcast, got {mine} and {other}")
    if not torch.compiler.is_dynamo_compiling():  # which cannot warn
        warnings.warn(f"{op}: target has shape {other} and input {mine}: they broadcast, which is seldom "
                      "what is meant", UserWarning, stacklevel=4)
    return shape


def _check_weights(op: str, input: Any, **weights: Any) -> None:
    mine = tuple(getattr(input, "shape", ()))
    for name, value in weights.items():
        shape = tuple(getattr(value, "shape", ()))
        if layout.broadcast_shapes([mine, shape]) != mine:
            raise ValueError(f"{op}: {name} must broadcast to the shape of input, {mine}, got {shape}")


def _weighted(op: str, loss: Loss, reduction: str, input: Any, target: Any, weight: Any) -> Any:
    """Whose mean is divided by the sum of the weights."""
    if not hasattr(weight, "shape"):
        raise TypeError(f"{op}: weight must be a tensor or an array, got {type(weight).__name__}")
    _check_weights(op, input, weight=weight)
    return _reduced(op, loss, reduction, input, target, weight, weighted=True)


def _sum_of_weights(input: Any, weight: Any) -> Any:
    """As broadcast to input's shape."""
    wide = torch.float32 if as_torchs(weight.dtype) in HALVES else None
    return sum_of(weight, dtype=wide) * (math.prod(input.shape) // math.prod(weight.shape))


def _pair(make: Make) -> tuple[Any, ...]:
    return make(ROWS, COLUMNS), make(ROWS, COLUMNS)


# -- regression ------------------------------------------------------------------------------------

@_loss
def _mse_loss(input: Expr, target: Expr) -> Expr:
    difference = input - target
    return difference * difference


@_loss
def _mse_loss_weighted(input: Expr, target: Expr, weight: Expr) -> Expr:
    difference = input - target
    return weight * (difference * difference)


@_loss
def _l1_loss(input: Expr, target: Expr) -> Expr:
    return abs_(input - target)


@_loss
def _l1_loss_weighted(input: Expr, target: Expr, weight: Expr) -> Expr:
    return weight * abs_(input - target)


def _huber(input: Expr, target: Expr, delta: float) -> tuple[Expr, Expr]:
    """Two factors. A choice between two formulas would have infinity times 0 in its gradient."""
    difference = input - target
    near = clamp(difference, -delta, delta)  # its NaN are the derivative's too, where |NaN| has none
    return near, difference - 0.5 * near


@_loss
def _huber_loss(input: Expr, target: Expr, delta: float) -> Expr:
    near, rest = _huber(input, target, delta)
    return near * rest


@_loss
def _huber_loss_weighted(input: Expr, target: Expr, weight: Expr, delta: float) -> Expr:
    near, rest = _huber(input, target, delta)
    return weight * (near * rest)


@_loss
def _smooth_l1_loss(input: Expr, target: Expr, beta: float) -> Expr:
    near, rest = _huber(input, target, beta)
    return near / beta * rest


@public(example=_pair)
def mse_loss(input: Any, target: Any, reduction: str = "mean", weight: Any = None) -> Any:
    """(input - target)^2, reduced.

    `weight`: of each element's loss, a tensor that broadcasts to input's shape; the mean is then divided by
    the sum of the weights.
    Source: torch.nn.functional.mse_loss.

        mse_loss(model(x), y)
    """
    if weight is None:
        return _reduced("mse_loss", _mse_loss, reduction, input, target)
    return _weighted("mse_loss", _mse_loss_weighted, reduction, input, target, weight)


@public(example=_pair)
def l1_loss(input: Any, target: Any, reduction: str = "mean", weight: Any = None) -> Any:
    """|input - target|, reduced; its derivative at 0 is 0.

    `weight`: of each element's loss, a tensor that broadcasts to input's shape; the mean is then divided by
    the sum of the weights.
    Source: torch.nn.functional.l1_loss.

        l1_loss(model(x), y)
    """
    if weight is None:
        return _reduced("l1_loss", _l1_loss, reduction, input, target)
    return _weighted("l1_loss", _l1_loss_weighted, reduction, input, target, weight)


@public(example=_pair)
def smooth_l1_loss(input: Any, target: Any, reduction: str = "mean", beta: float = 1.0) -> Any:
    """e^2 / (2 beta) where e = |input - target| < beta, e - beta / 2 elsewhere, reduced.

    `beta` is a number, not negative: l1_loss where it is 0.
    Source: torch.nn.functional.smooth_l1_loss.

        smooth_l1_loss(model(x), y, beta=0.1)
    """
    if not as_float("smooth_l1_loss", "beta", beta) >= 0:
        raise ValueError(f"smooth_l1_loss: beta must be at least 0, got {beta!r}")
    if beta == 0:
        return _reduced("smooth_l1_loss", _l1_loss, reduction, input, target)
    return _reduced("smooth_l1_loss", _smooth_l1_loss, reduction, input, target, beta)


@public(example=_pair)
def huber_loss(input: Any, target: Any, reduction: str = "mean", delta: float = 1.0, weight: Any = None
               ) -> Any:
    """e^2 / 2 where e = |input - target| < delta, delta (e - delta / 2) elsewhere, reduced.

    `delta` is a positive number. `weight`: a number, or a tensor that broadcasts to input's shape, of each
    element's loss; the mean is that of all elements, whatever their weights.
    Source: torch.nn.functional.huber_loss.

        huber_loss(model(x), y, delta=2.0)
    """
    if not as_float("huber_loss", "delta", delta) > 0:
        raise ValueError(f"huber_loss: delta must be positive, got {delta!r}")
    if weight is None:
        return _reduced("huber_loss", _huber_loss, reduction, input, target, delta)
    _check_weights("huber_loss", input, weight=weight)
    return _reduced("huber_loss", _huber_loss_weighted, reduction, input, target, weight, delta)


# -- probabilities ---------------------------------------------------------------------------------

# Nothing cancels near certainty: what is added is softplus(-|x|), spelled with a derivative at 0.
@_loss
def _bce_with_logits(x: Expr, y: Expr) -> Expr:
    return x * where(x < 0, -y, 1 - y) + softplus(where(x < 0, x, -x))


@_loss
def _bce_with_logits_weighted(x: Expr, y: Expr, weight: Expr, pos_weight: Expr) -> Expr:
    certain = x * where(x < 0, -(pos_weight * y), 1 - y)
    return weight * (certain + (1 - y + pos_weight * y) * softplus(where(x < 0, x, -x)))


@public(example=_pair)
def bce_with_logits(input: Any, target: Any, weight: Any = None, reduction: str = "mean",
                    pos_weight: Any = None) -> Any:
    """-weight (pos_weight target log sigmoid(input) + (1 - target) log(1 - sigmoid(input))), reduced.

    `weight`, `pos_weight`: numbers, or tensors that broadcast to input's shape. The mean is that of all
    elements, whatever their weights.
    Source: torch.nn.functional.binary_cross_entropy_with_logits.

        bce_with_logits(torch.randn(8, 512), torch.rand(8, 512).round(), pos_weight=torch.full((512,), 3.0))
    """
    mine, other = (tuple(getattr(a, "shape", ())) for a in (input, target))
    if mine != other:
        raise ValueError(f"bce_with_logits: target must have the shape of input, {mine}, got {other}")
    if weight is None and pos_weight is None:
        return _reduced("bce_with_logits", _bce_with_logits, reduction, input, target)
    _check_weights("bce_with_logits", input, weight=weight, pos_weight=pos_weight)
    weight, pos_weight = (1.0 if w is None else w for w in (weight, pos_weight))
    return _reduced("bce_with_logits", _bce_with_logits_weighted, reduction, input, target, weight,
                    pos_weight)


@_loss
def _kl_div(input: Expr, target: Expr) -> Expr:
    return target * (log(where(target == 0, 1, target)) - input)


@_loss
def _kl_div_of_logs(input: Expr, target: Expr) -> Expr:
    return exp(target) * (target - input)


@public(example=_pair)
def kl_div(input: Any, target: Any, reduction: str = "mean", log_target: bool = False) -> Any:
    """target (log(target) - input), 0 where target is 0, reduced.

    `input` are logarithms; `log_target`: so are the targets, and it is exp(target) (target - input).
    `reduction`: "batchmean" as well, the sum divided by the size of the first dimension.
    Source: torch.nn.functional.kl_div.

        kl_div(log_probabilities, probabilities, "batchmean")
    """
    loss = _kl_div_of_logs if log_target else _kl_div
    if reduction != "batchmean":
        return _reduced("kl_div", loss, reduction, input, target, also=", 'batchmean'")
    size = next(iter(getattr(input, "shape", ())), 1)
    shape, total = _shape("kl_div", input, target), _kernels(loss, input, target).total
    return total(input, target, 1 / size) if math.prod(shape) else total(input, target, 1.0) / size
