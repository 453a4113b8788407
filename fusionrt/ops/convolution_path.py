"""How a convolution and what follows it are computed.

Dense convolutions are torch's, depthwise ones of channels_last images on a GPU ours (`depthwise`). What
follows is one kernel. Without a gradient it writes over the convolution's result, or is part of the
convolution: of ours, or of cuDNN's where that has it (`convolution_cudnn`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from fusionrt import autocast
from fusionrt.activation import Epilogue, activated, finishing, resolve
from fusionrt.arguments import check_number, is_int
from fusionrt.array import converted, is_foreign
from fusionrt.dtypes import FLOATS, STORAGE
from fusionrt.expr import Expr, rsqrt
from fusionrt.op import Operator
from fusionrt.ops import convolution_cudnn, depthwise, folding
from fusionrt.ops.activations import relu
from fusionrt.ops.batch_norm import batch_norm
from fusionrt.ops.depthwise_forms import RESIDUAL, VALUE, Finish, Geometry, channel
from fusionrt.ops.dropout import scale_of_kept
from fusionrt.ops.recomputation import sparing
from fusionrt.row_fusion import like_sum, row_operator
from fusionrt.watching import PLAIN, is_recorded, is_watched

Tensor = torch.Tensor
Ints = int | Sequence[int]
Padding = Ints | str
Given = tuple[Ints, Padding, Ints, int]  # stride, padding, dilation, groups
_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


# -- arguments -------------------------------------------------------------------------------------

class Convolution(NamedTuple):
    """The options as torch takes them; of images with equal padding on both sides their geometry; and the
    result's shape but for the first dimension."""

    options: tuple[tuple[int, ...], tuple[int, ...] | str, tuple[int, ...], int]
    geometry: Geometry | None
    result: tuple[int, ...]

    @property
    def groups(self) -> int:
        return self.options[3]


def check(op: str, named: Mapping[str, Any], of_channels: Sequence[str], options: Given) -> Convolution:
    """`named`: x, weight, and what else there is; `of_channels` name those with one value a channel."""
    x, weight = named["x"], named["weight"]
    for name, value in named.items():
        if value is None and name not in ("x", "weight"):
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor or an array, got "
                            f"{None if value is None else type(value).__name__}")
        if value.device != x.device:
            raise ValueError(f"{op}: {name} must be on x's device, {x.device}, got {value.device}")
    find = _conv_of.__wrapped__ if is_watched() else _conv_of  # symbolic sizes are no key
    shapes = tuple((name, named[name].shape) for name in of_channels if named[name] is not None)
    made: Convolution = find(op, x.shape, weight.shape, shapes, *(
        tuple(value) if isinstance(value, list) else value for value in options))
    _check_dtypes(op, x, weight, named["bias"])
    return made


@functools.lru_cache(4096, typed=True)  # True, which is refused, equals 1
def _conv_of(op: str, x: Sequence[int], weight: Sequence[int],
             of_channels: Sequence[tuple[str, Sequence[int]]], stride: Ints, padding: Padding, dilation: Ints,
             groups: int) -> Convolution:
    if len(x) not in _CONVOLUTIONS or len(weight) != len(x):
        raise ValueError(f"{op}: x and weight must have the same 3 to 5 dimensions, (N, C, ...) and "
                         f"(C', C / groups, ...), got shapes {tuple(x)} and {tuple(weight)}")
    if isinstance(padding, str) and padding not in ("same", "valid"):
        raise ValueError(f"{op}: padding must be numbers, 'same' or 'valid', got {padding!r}")
    if not is_int(groups) or groups < 1:
        raise ValueError(f"{op}: groups must be a positive integer, got {groups!r}")
    if x[1] != weight[1] * groups or weight[0] % groups:
        raise ValueError(f"{op}: weight must have the shape (C', C / groups, ...) with groups dividing C', "
                         f"for C = {x[1]} and groups = {groups}, got {tuple(weight)}")
    for name, shape in of_channels:
        if tuple(shape) != (weight[0],):
            raise ValueError(f"{op}: {name} must have one value a channel, shape ({weight[0]},), got "
                             f"{tuple(shape)}")
    n, kernel = len(x) - 2, weight[2:]
    stride, dilation = _each(op, "stride", n, stride, 1), _each(op, "dilation", n, dilation, 1)
    if padding == "same" and any(s != 1 for s in stride):
        raise ValueError(f"{op}: padding 'same' needs a stride of 1, got {stride}; pad by numbers")
    whole = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]  # padding, on both sides together
    if not isinstance(padding, str):
        padding = _each(op, "padding", n, padding, 0)
        whole = [2 * p for p in padding]
    elif padding == "valid":
        whole = [0] * n
    result = tuple((size + w - d * (k - 1) - 1) // s + 1 for size, w, k, s, d in zip(
        x[2:], whole, kernel, stride, dilation, strict=True))
    if min(result) < 1:
        raise ValueError(f"{op}: weight must fit into x with its padding, got shapes {tuple(weight)} and "
                         f"{tuple(x)}, padding {padding!r}, dilation {dilation!r}")
    geometry = None
    if n == 2 and not any(w % 2 for w in whole):
        geometry = Geometry(*((a, b) for a, b in (stride, (whole[0] // 2, whole[1] // 2), dilation)))
    return Convolution((stride, padding, dilation, groups), geometry, (weight[0], *result))


def _each(op: str, name: str, dims: int, value: Ints, least: int) -> tuple[int, ...]:
    made = tuple(value) if isinstance(value, Sequence) else (value,)
    if len(made) == 1:
        made *= dims
    if len(made) != dims or not all(is_int(n) and n >= least for n in made):
        raise ValueError(f"{op}: {name} must be an integer of at least {least}, or {dims} of them, got "
                         f"{value!r}")
    return made


def _check_dtypes(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"{op}: x must be of a floating-point dtype, got {x.dtype}")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.dtype != x.dtype and not autocast.is_on(x.device):
            raise TypeError(f"{op}: {name} must have x's dtype, {x.dtype}, got {value.dtype}")


def check_residual(op: str, residual: Tensor | None, x: Tensor, conv: Convolution) -> None:
    if residual is not None and tuple(residual.shape) != (x.shape[0], *conv.result):
        raise ValueError(f"{op}: residual must have the result's shape {(x.shape[0], *conv.result)}, got "
                         f"{tuple(residual.shape)}")


def _is_wider(residual: Tensor | None, x: Tensor) -> bool:
    """Than the convolution's result, so that it decides the dtype, as in torch's sum."""
    return residual is not None and like_sum(autocast.cast(x[:0])[0], residual) == "residual"


# -- the convolution alone -------------------------------------------------------------------------

def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, conv: Convolution) -> Tensor:
    """With its gradients."""
    with sparing(x):
        return _convolve(x, weight, bias, conv)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, conv: Convolution) -> Tensor:
    geometry = _depthwise(x, weight, conv)
    if geometry is None:
        return _dense(x, weight, bias, conv)
    x, weight, bias = autocast.cast(x, weight, bias)
    z = depthwise.depthwise(x, weight, geometry)
    if bias is None:
        return z
    found: Tensor = finishing("depthwise_conv2d", None, True, False, False)(z, _over_images(bias, z))
    return found


def _dense(x: Tensor, weight: Tensor, bias: Tensor | None, conv: Convolution) -> Tensor:
    z, last = _CONVOLUTIONS[x.dim()](x, weight, bias, *conv.options), _LAST.get(x.dim())
    if z.is_meta and last is not None and x.is_contiguous(memory_format=last):  # which torch forgets there
        z = z.contiguous(memory_format=last)
    return z


def _depthwise(x: Tensor, weight: Tensor, conv: Convolution) -> Geometry | None:
    """Of a depthwise convolution that is ours."""
    geometry = conv.geometry if conv.groups > 1 else None
    return geometry if geometry and depthwise.serves(x, weight, geometry, conv.groups) else None


def _over_images(value: Tensor, z: Tensor) -> Tensor:
    """One value a channel, so that it broadcasts."""
    return value.view(-1, *(1,) * (z.dim() - 2))


# -- inference -------------------------------------------------------------------------------------

class After(NamedTuple):
    """What follows a convolution z where no gradient is recorded: activation(norm(z + bias)) with a residual
    before or, as that of `conv_activation`, after the activation. `names`: of the operands that there are."""

    op: str
    activation: Epilogue
    names: tuple[str, ...]
    eps: float = 0.0
    residual_first: bool = False

    def expression(self, z: Expr, **operands: Any) -> Expr:
        residual = operands.get("residual")
        y = z + operands["bias"] if "bias" in operands else z
        if "running_mean" in operands:
            y = (y - operands["running_mean"]) * rsqrt(operands["running_var"] + self.eps)
        y = y * operands["bn_weight"] if "bn_weight" in operands else y
        y = y + operands["bn_bias"] if "bn_bias" in operands else y
        y = y + residual if residual is not None and self.residual_first else y
        y = activated(self.op, y, self.activation)
        return y if residual is None or self.residual_first else residual + y


@functools.lru_cache(1024)
def _following(after: After) -> Operator:
    """In one kernel of its own."""

    def expression(z: Expr, bias: Any = None, running_mean: Any = None, running_var: Any = None,
                   bn_weight: Any = None, bn_bias: Any = None, residual: Any = None) -> Expr:
        given = {"bias": bias, "running_mean": running_mean, "running_var": running_var,
                 "bn_weight": bn_weight, "bn_bias": bn_bias, "residual": residual}
        return after.expression(z, **{name: value for name, value in given.items() if value is not None})

    made: Any = row_operator(expression, ("z", *after.names), name=after.op, row_dims=0, targets=(0,))
    operator: Operator = made.operator
    return operator


@functools.lru_cache(1024)
def _finish(after: After, dtypes: tuple[str, ...]) -> Finish:
    """As the epilogue of our own convolution; `dtypes` of the operands with one value a channel."""
    names = [name for name in after.names if name != "residual"]
    operands = {name: channel(k) for k, name in enumerate(names)}
    has_residual = len(names) < len(after.names)
    operands |= {"residual": RESIDUAL} if has_residual else {}
    return Finish(after.expression(VALUE, **operands), dtypes, has_residual)


def _inference(after: After, x: Tensor, weight: Tensor, of_channels: Sequence[Tensor],
               residual: Tensor | None, conv: Convolution) -> Tensor:
    """`of_channels` in the order of `after.names`."""
    geometry = _depthwise(x, weight, conv)
    if geometry is None:
        z = _dense(x, weight, None, conv)
        operands = [z, *(_over_images(t, z) for t in of_channels), *([] if residual is None else [residual])]
        found: Tensor = _following(after).over({0: 0}).launch(operands)
        return found
    x, weight = autocast.cast(x, weight)
    dtypes = tuple(STORAGE[t.dtype] for t in of_channels)
    return depthwise.finished(x, weight, geometry, _finish(after, dtypes), of_channels, residual)


# -- with what follows it --------------------------------------------------------------------------

def with_activation(op: str, x: Any, weight: Any, bias: Any, activation: Any, options: Given,
                    dropout_p: float = 0.0, residual: Any = None, training: bool = True) -> Any:
    """`conv_activation`, for the op of that name."""
    arrays = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    ordinary = _ordinary(arrays.values())
    if not ordinary and any(map(is_foreign, arrays.values())):
        (x, weight, bias, residual), restore = converted(op, arrays)
        return restore(with_activation(op, x, weight, bias, activation, options, dropout_p, residual,
                                       training))
    if isinstance(x, Tensor) and isinstance(weight, Tensor) and x.dim() == weight.dim() - 1 > 1:  # one image
        added = residual.unsqueeze(0) if isinstance(residual, Tensor) else residual
        return with_activation(op, x.unsqueeze(0), weight, bias, activation, options, dropout_p, added,
                               training).squeeze(0)
    conv, function = check(op, arrays, ("bias",), options), resolve(op, activation)
    check_residual(op, residual, x, conv)
    scale = scale_of_kept(op, dropout_p, training, "dropout_p")
    plain = function is None and scale is None and residual is None
    if plain and (bias is None or _depthwise(x, weight, conv) is None):
        return convolve(x, weight, bias, conv)
    alone = ordinary and not is_watched() and not is_recorded(*arrays.values())
    if alone and scale is None and not _is_wider(residual, x):
        if function is relu and residual is None:
            found = convolution_cudnn.relu(x, weight, (bias,), None, conv.geometry, conv.groups)
            if found is not None:
                return found
        given = {} if bias is None else {"bias": bias}
        names = (*given, *(() if residual is None else ("residual",)))
        return _inference(After(op, function, names), x, weight, list(given.values()), residual, conv)
    z = convolve(x, weight, None, conv)
    more = [*(() if bias is None else (_over_images(bias.to(z.dtype), z),)),
            *(() if residual is None else (residual,)), *(() if scale is None else (float(dropout_p), scale))]
    run = finishing(op, activation, bias is not None, residual is not None, scale is not None)
    if alone and scale is not None:
        return run.operator.over({0: 0}).launch([z, *more], run.operator.draw(z.device))
    return run(z, *more)


def with_norm(op: str, x: Any, weight: Any, of: Sequence[Any], activation: Any, residual: Any, options: Given,
              training: bool, momentum: float, eps: float, recompute: bool = False) -> Any:
    """`conv_bn_act`, for the op of that name; `of` in the order of folding.OF_NORM."""
    channels = dict(zip(folding.OF_NORM, of, strict=True))
    arrays = {"x": x, "weight": weight, **channels, "residual": residual}
    ordinary = _ordinary(arrays.values())
    if not ordinary and any(map(is_foreign, arrays.values())):
        (x, weight, *of, residual), restore = converted(op, arrays)
        return restore(with_norm(op, x, weight, of, activation, residual, options, training, momentum, eps,
                                 recompute))
    conv, function = check(op, arrays, folding.OF_NORM, options), resolve(op, activation)
    check_residual(op, residual, x, conv)
    check_number(op, "eps", eps)
    if momentum is not None:
        check_number(op, "momentum", momentum)
    elif training and of[1] is not None:
        raise ValueError(f"{op}: momentum must be a number, got None, the mean over all batches: that needs "
                         "their number, which batch_norm takes")
    bias, mean, var, scale, shift = of
    if (mean is None) != (var is None) or (mean is None and not training):
        raise ValueError(f"{op}: running_mean and running_var go together, and without training both are "
                         f"needed, got {type(mean).__name__} and {type(var).__name__}")
    alone = ordinary and not is_watched() and not is_recorded(*arrays.values())
    if training or not alone or _is_wider(residual, x):
        z = convolve(x, weight, bias, conv)
        return batch_norm(z, mean, var, scale, shift, training, momentum, eps, residual=residual,
                          epilogue=function, recompute=recompute)
    if function is relu:
        found = convolution_cudnn.relu(x, weight, of, residual, conv.geometry, conv.groups, eps)
        if found is not None:
            return found
    given = {name: t for name, t in channels.items() if t is not None}
    names = (*given, *(() if residual is None else ("residual",)))
    return _inference(After(op, function, names, eps, True), x, weight, list(given.values()), residual, conv)


def _ordinary(values: Iterable[Any]) -> bool:
    """Whether all of them that there are are torch's own tensors."""
    return all(value is None or type(value) in PLAIN for value in values)
