"""Norms of channels: batch norm, instance norm, group norm, with what stands after them.

x is (N, C, ...), contiguous or channels_last; the result lies in memory as x does. After the norm come
weight and bias (one a channel), a residual, and an epilogue: `fusionrt.relu`, a function made by `fuse`, or a
plain one of scalars. Inference is one pass over memory; with the statistics of the batch it is one that finds
mean and squares about it, without the cancellation of a difference of sums, and one that normalises; so
are the gradients, of any order, of x, weight, bias and residual.

Shapes: x (N, C, ...), weight and bias (C,), results as x. Dtypes: float16, bfloat16 (computed in float32),
float32, float64; results have x's, or that of a wider residual, whatever that of the weight. Raises TypeError
or ValueError, with the name of the argument, for what does not fit.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fusionrt.activation import Activation, resolve
from fusionrt.arguments import as_float, as_int, check_number
from fusionrt.array import check_dense, check_writeable
from fusionrt.catalogue import Make, public
from fusionrt.expr import Expr, node, rsqrt
from fusionrt.layout import lie_apart
from fusionrt.ops.activations import relu
from fusionrt.ops.recomputation import is_made_by
from fusionrt.problem import unpack
from fusionrt.row_fusion import Epilogue, Run, finished, like_sum, per_call, row_operator
from fusionrt.rowwise import standardize
from fusionrt.watching import is_recorded, transforms_active

IMAGES = (32, 256, 56, 56)  # of the examples


# -- what the kernels compute ----------------------------------------------------------------------

@per_call
def _operator(op: str, names: tuple[str, ...], row_dims: int, per_channel: bool, epilogue: Epilogue,
              recorded: bool, tracked: bool, like: str) -> Run:
    """`names` of the tensors that there are; mean and var, or rstd, are among them unless found in x.
    `per_channel`: weight and bias have one value a row. `recorded`, `tracked`: with what the gradient reads,
    with the unbiased variance. `like`: whose dtype the result has."""

    def expression(x: Expr, eps: float, weight: Any = None, bias: Any = None, residual: Any = None,
                   mean: Any = None, var: Any = None, rstd: Any = None) -> tuple[Any, ...]:
        more: list[Expr] = []
        if rstd is not None:
            y = (x - mean) * rstd
        elif var is None:
            y, mean, rstd = standardize(x, eps)
            more = [mean, *([rstd] if recorded else [])] if recorded or tracked else []
            if tracked:
                more.append(node("moment_squares", x, mean) / (node("row_size", "row_size") - 1))
        else:
            y = (x - mean) * rsqrt(var + eps)
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
        return finished(y if residual is None else y + residual, epilogue), *more

    uniform = ("mean", "var", "rstd", *(("weight", "bias") if per_channel else ()))
    return row_operator(expression, ("x", *names, "eps"), name=op, row_dims=row_dims,
                        uniform=tuple(name for name in names if name in uniform), like=like,
                        of_channels=True)


def _of_channels(op: str, x: torch.Tensor, training: bool, running: tuple[Any, Any], weight: Any, bias: Any,
                 residual: Any, eps: float, epilogue: Activation, recompute: bool = False) -> tuple[Any, ...]:
    """The result, and with `training` mean and unbiased variance of every channel. A row is a channel."""
    n = x.dim()
    order, ones = (1, 0, *range(2, n)), (-1,) + (1,) * (n - 1)
    mean, var = (None, None) if training else running
    given = {"weight": weight, "bias": bias, "mean": mean, "var": var}
    tensors = {name: t.view(ones) for name, t in given.items() if t is not None}
    if residual is not None:
        tensors["residual"] = residual.permute(order)
    recorded, tracked = is_recorded(x, weight, bias, residual), running[0] is not None
    epilogue = resolve(op, epilogue, "epilogue")
    like = like_sum(x, residual)
    run = _operator(op, tuple(tensors), n - 1, True, epilogue, training and recorded, training and tracked,
                    like)
    out = run(x.permute(order), *tensors.values(), eps)
    if not isinstance(out, tuple):
        return (out.permute(order),)
    y = out[0].permute(order)
    if recompute and recorded:
        given = {"x": x, "mean": out[1], "rstd": out[2], **tensors}
        again = _operator(op, tuple(given)[1:], n - 1, True, epilogue, False, False, like)
        is_made_by(y, lambda x, *of: again(x.permute(order), *of, eps).permute(order), *given.values())
    return y, out[1].view(-1), out[-1].view(-1)


# -- arguments -------------------------------------------------------------------------------------

def _check(op: str, least_dims: int, x: Any, residual: Any = None, num_batches_tracked: Any = None,
           **of_channels: Any) -> None:
    """That they are tensors, and of shapes that fit."""
    named = {"x": x, **of_channels, "residual": residual, "num_batches_tracked": num_batches_tracked}
    for name, a in named.items():
        if a is None and name != "x":
            continue
        if not isinstance(a, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a tensor or an array, got "
                            f"{None if a is None else type(a).__name__}")
        check_dense(op, name, a)
    if x.dim() < least_dims:
        raise ValueError(f"{op}: x must have at least {least_dims} dimensions, (N, C, ...), got shape "
                         f"{tuple(x.shape)}")
    for name, value in of_channels.items():
        if value is not None and tuple(value.shape) != (x.shape[1],):
            raise ValueError(f"{op}: {name} must have one value a channel, shape ({x.shape[1]},), got "
                             f"{tuple(value.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"{op}: residual must have x's shape {tuple(x.shape)}, got {tuple(residual.shape)}")


def _check_running(op: str, x: torch.Tensor, running_mean: Any, running_var: Any, needed: bool, eps: float,
                   num_batches_tracked: Any = None) -> None:
    """`needed` for what they are; otherwise they, and the number of batches, will be written to."""
    check_number(op, "eps", eps)
    if (running_mean is None) != (running_var is None):
        raise ValueError(f"{op}: running_mean and running_var go together: give both or neither")
    if needed and running_mean is None:
        raise ValueError(f"{op}: without the batch's statistics running_mean and running_var are needed, "
                         "got None")
    if needed:
        return
    if not eps > 0:
        raise ValueError(f"{op}: eps must be positive for statistics of the batch, got {eps}")
    running = {"running_mean": running_mean, "running_var": running_var}
    check_writeable(op, **running, num_batches_tracked=num_batches_tracked)
    for name, value in running.items():
        if value is not None:
            _check_written(op, x, name, value)
    if num_batches_tracked is not None and (
            num_batches_tracked.numel() != 1 or num_batches_tracked.dtype == torch.bool):
        raise ValueError(f"{op}: num_batches_tracked must be one number to add 1 to, got "
                         f"{num_batches_tracked.dtype} of shape {tuple(num_batches_tracked.shape)}")


def _check_written(op: str, x: torch.Tensor, name: str, value: torch.Tensor) -> None:
    if value.requires_grad:
        raise ValueError(f"{op}: {name} is written to and must not require a gradient")
    if not value.is_floating_point():
        raise TypeError(f"{op}: {name} is written to and must have a floating dtype, got {value.dtype}")
    if value.device != x.device:
        raise ValueError(f"{op}: {name} must be on the device of x, {x.device}, got one on {value.device}")
    if not (value.is_contiguous() or lie_apart(value.shape, value.stride())):
        raise ValueError(f"{op}: {name} is written to and needs its elements apart in memory, got strides "
                         f"{value.stride()} of shape {tuple(value.shape)}")


def _check_momentum(momentum: Any, num_batches_tracked: Any) -> None:
    if momentum is None and num_batches_tracked is None:
        raise ValueError("batch_norm: momentum None is the mean over all batches and needs "
                         "num_batches_tracked")
    if not isinstance(momentum, (int, float, torch.Tensor, type(None))):
        raise TypeError(f"batch_norm: momentum must be a number or None, got {momentum!r}")
    if isinstance(momentum, int):
        as_float("batch_norm", "momentum", momentum)


@torch.no_grad()
def _update(running: tuple[torch.Tensor, torch.Tensor], found: tuple[torch.Tensor, torch.Tensor],
            factor: float | torch.Tensor) -> None:
    """running += factor * (found - running), both in one kernel."""
    new = [f.to(r.dtype) for f, r in zip(found, running, strict=True)]
    if not isinstance(factor, torch.Tensor) and not transforms_active():
        torch._foreach_lerp_(list(running), new, factor)
        return
    for r, f in zip(running, new, strict=True):  # vmap has no rules for those in place
        r.copy_(torch.lerp(r, f, factor.to(r.dtype) if isinstance(factor, torch.Tensor) else factor))


@torch.no_grad()
def _factor(momentum: Any, num_batches_tracked: torch.Tensor | None) -> float | torch.Tensor:
    """That of the running average; without a momentum that of the mean of all batches so far."""
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)
    return 1 / num_batches_tracked if momentum is None else momentum  # type: ignore[operator]


# -- ops -------------------------------------------------------------------------------------------

def _typical(make: Make) -> tuple[Any, ...]:
    x, mean, var, weight, bias = make(*IMAGES), *(make(IMAGES[1]) for _ in range(4))
    return x, mean.detach(), var.detach().abs(), weight, bias


def _typical_at_inference(make: Make) -> tuple[Any, ...]:
    x, mean, var, weight, bias = _typical(make)
    return x, weight, bias, mean, var


@public(example=_typical, numbers=(),
        arrays="x running_mean running_var weight bias num_batches_tracked residual")
def batch_norm(x: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None,
               bias: Any = None, training: bool = False, momentum: float | None = 0.1, eps: float = 1e-5, *,
               num_batches_tracked: Any = None, residual: Any = None, epilogue: Activation = None,
               recompute: bool = False) -> Any:
    """epilogue((x - mean) / sqrt(var + eps) * weight + bias + residual), mean and var of every channel.

    x: (N, C, ...), residual: x's shape, the others (C,). With `training` mean and (biased) variance are the
    batch's, and running_mean, running_var, where given, move towards the batch's mean and unbiased variance
    by `momentum`, in place; without it they are what is taken. `momentum` None: by 1 / num_batches_tracked,
    the mean of all batches. `num_batches_tracked`: an int64 tensor that training adds 1 to. `epilogue`: as in
    `layer_norm`. `recompute`: a convolution of ours that reads the result does not keep it, but makes it
    again in its backward pass.
    Source: torch.nn.functional.batch_norm, torch.nn.BatchNorm2d (Ioffe & Szegedy 2015).
    In training one value a channel is a ValueError, as in torch.

        batch_norm(x, running_mean, running_var, weight, bias, training=True, epilogue=fusionrt.relu)
    """
    _check("batch_norm", 2, x, residual, num_batches_tracked, running_mean=running_mean,
           running_var=running_var, weight=weight, bias=bias)
    _check_running("batch_norm", x, running_mean, running_var, not training, eps, num_batches_tracked)
    if training and x.shape[0] * math.prod(x.shape[2:]) == 1:
        raise ValueError("batch_norm: Expected more than 1 value per channel when training, got input "
                         f"size {tuple(x.shape)}")
    running, tracked = (running_mean, running_var), running_mean is not None
    counted = training and (tracked or num_batches_tracked is not None)
    if counted:
        _check_momentum(momentum, num_batches_tracked)
    y, *found = _of_channels("batch_norm", x, training, running, weight, bias, residual, eps, epilogue,
                             recompute)
    # Nothing is written before all that may be refused has been.
    factor = _factor(momentum, num_batches_tracked) if counted else 0.0
    if training and tracked and x.numel():
        _update(running, (found[0], found[1]), factor)
    return y


@public(example=_typical_at_inference, arrays="x weight bias mean var", numbers=())
def batch_norm_relu(x: Any, weight: Any, bias: Any, mean: Any, var: Any, eps: float = 1e-5) -> Any:
    """relu((x - mean) / sqrt(var + eps) * weight + bias): batch norm at inference; all but x are (C,).

    `batch_norm` has mean and variance in front of weight and bias.

    Source: torch.relu(torch.nn.functional.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)). With the
    batch's statistics: `batch_norm(..., training=True, epilogue=relu)`.

        batch_norm_relu(x, weight, bias, mean, var)
    """
    _check("batch_norm_relu", 2, x, weight=weight, bias=bias, mean=mean, var=var)
    _check_running("batch_norm_relu", x, mean, var, True, eps)
    return _of_channels("batch_norm_relu", x, False, (mean, var), weight, bias, None, eps, relu)[0]


@public(example=lambda make: (make(*IMAGES), None, None, make(IMAGES[1]), make(IMAGES[1])), numbers=(),
        arrays="x running_mean running_var weight bias residual")
def instance_norm(x: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None,
                  bias: Any = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5, *,
                  residual: Any = None, epilogue: Activation = None) -> Any:
    """epilogue((x - mean) / sqrt(var + eps) * weight + bias + residual), of each instance's channels.

    x: (N, C, ...) with at least one more dimension, residual: x's shape, the others (C,). Running statistics,
    where given, move by `momentum` towards the means, over the instances, of mean and unbiased variance;
    without `use_input_stats` they are what is taken. Source: torch.nn.functional.instance_norm.
    One element a channel is a ValueError, as in torch.

        instance_norm(x, weight=weight, bias=bias, epilogue=fusionrt.relu)
    """
    op = "instance_norm"
    _check(op, 3, x, residual, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    _check_running(op, x, running_mean, running_var, not use_input_stats, eps)
    if use_input_stats and running_mean is not None and not isinstance(momentum, (int, float)):
        raise ValueError(f"{op}: momentum must be a number, got {momentum!r}")
    if isinstance(momentum, int):
        as_float(op, "momentum", momentum)
    running, tracked = (running_mean, running_var), running_mean is not None
    if not use_input_stats:
        return _of_channels(op, x, False, running, weight, bias, residual, eps, epilogue)[0]
    if math.prod(x.shape[2:]) == 1:
        raise ValueError(f"{op}: Expected more than 1 spatial element when training, got input size "
                         f"{tuple(x.shape)}")
    ones = (-1,) + (1,) * (x.dim() - 2)
    tensors = {name: t.view(ones) for name, t in (("weight", weight), ("bias", bias)) if t is not None}
    tensors |= {} if residual is None else {"residual": residual}
    recorded = is_recorded(x, weight, bias, residual)
    each = _operator(op, tuple(tensors), x.dim() - 2, True, resolve(op, epilogue, "epilogue"), recorded,
                     tracked, like_sum(x, residual))
    out = each(x, *tensors.values(), eps)
    if tracked and x.numel():
        mean, var = (s.view(x.shape[:2]).mean(0) for s in (out[1], out[-1]))
        _update(running, (mean, var), momentum)
    return unpack(out)[0]


@public(example=lambda make: (make(*IMAGES), 32, make(IMAGES[1]), make(IMAGES[1])), numbers=(),
        arrays="x weight bias residual")
def group_norm(x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *,
               residual: Any = None, epilogue: Activation = None) -> Any:
    """epilogue((x - mean) / sqrt(var + eps) * weight + bias + residual), over C / num_groups channels.

    x: (N, C, ...), residual: x's shape, weight and bias: (C,). Source: torch.nn.functional.group_norm
    (Wu & He 2018). num_groups divides C. One value a group is a ValueError, as in torch.

        group_norm(x, 32, weight, bias, epilogue=fusionrt.silu)
    """
    _check("group_norm", 2, x, residual, weight=weight, bias=bias)
    channels = x.shape[1]
    if as_int("group_norm", "num_groups", num_groups) < 1 or channels % num_groups:
        raise ValueError(f"group_norm: num_groups must divide the {channels} channels, got {num_groups!r}")
    if x.numel() == num_groups:
        raise ValueError("group_norm: Expected more than 1 value per channel when training, got input size "
                         f"{tuple(x.shape)}")
    grouped, ones = (num_groups, channels // num_groups), (1,) * (x.dim() - 2)
    tensors = {name: t.view(*grouped, *ones)
               for name, t in (("weight", weight), ("bias", bias)) if t is not None}
    tensors |= {} if residual is None else {"residual": residual.unflatten(1, grouped)}
    recorded = is_recorded(x, weight, bias, residual)
    each = _operator("group_norm", tuple(tensors), x.dim() - 1, False,
                     resolve("group_norm", epilogue, "epilogue"), recorded, False, like_sum(x, residual))
    return unpack(each(x.unflatten(1, grouped), *tensors.values(), eps))[0].flatten(1, 2)
