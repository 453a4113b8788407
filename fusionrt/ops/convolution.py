"""Convolutions of one to three dimensions with what follows them: bias, norm, activation, dropout, residual.

Dense convolutions are torch's (cuDNN, oneDNN), in the precision that torch is set to; depthwise ones of
channels_last images on a GPU are ours (`depthwise`). What follows is one kernel. Without a gradient it writes
over the convolution's result, or is part of the convolution: of ours, or of cuDNN's where that has it
(`convolution_cudnn`).

Shapes: x (N, C, ...), weight (C', C / groups, ...), results (N, C', ...), channels_last where x is. Dtypes:
float16, bfloat16, float32, float64, the same for x, weight and bias; those of norms may be wider, a residual
any, of which a wider one decides the result's. Under autocast x, weight and bias are cast as torch's
convolutions cast theirs. `stride`, `padding`, `dilation`: a number, or one for each dimension; padding may be
"same" or "valid". All tensors have first and second derivatives. Raises TypeError or ValueError, with the
name of the argument, for what does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusionrt.activation import resolve
from fusionrt.arguments import as_int
from fusionrt.catalogue import Make, public
from fusionrt.ops.activations import is_tanh, relu
from fusionrt.ops.batch_norm import group_norm
from fusionrt.ops.convolution_path import (
    Given,
    Ints,
    Padding,
    check,
    check_residual,
    convolve,
    with_activation,
    with_norm,
)
from fusionrt.ops.dropout import scale_of_kept

IMAGES, CHANNELS = (32, 64, 56, 56), 64  # of the examples


def _example(make: Make) -> tuple[Any, ...]:
    return make(*IMAGES), make(CHANNELS, CHANNELS, 3, 3), make(CHANNELS)


def _norm_example(make: Make) -> tuple[Any, ...]:
    mean, var, weight, bias = (make(CHANNELS) for _ in range(4))
    return *_example(make), mean.detach(), var.detach().abs(), weight, bias


def _last_example(make: Make) -> tuple[Any, ...]:
    n, c, h, w = IMAGES
    return make(n, h, w, c).permute(0, 3, 1, 2), *_norm_example(make)[1:]


@public(example=lambda make: (*_example(make), "gelu"))
def conv_activation(x: Any, weight: Any, bias: Any = None, activation: Any = None, *, stride: Ints = 1,
                    padding: Padding = 0, dilation: Ints = 1, groups: int = 1, dropout_p: float = 0.0,
                    residual: Any = None, training: bool = True) -> Any:
    """residual + dropout(activation(convolution(x) + bias), dropout_p), of 1 to 3 dimensions.

    x: (N, C, ...), or (C, ...) of one image, weight: (C', C / groups, ...), bias: (C',), residual: the
    result's shape. `activation`: None, the name of one of the catalogue ("relu", "gelu", "silu", ...), or a
    function of one traced value, as `fuse` takes them; define it once, outside of a loop. The dropout mask is
    drawn from torch's generator, and computed anew in the backward pass.
    Source: residual + F.dropout(activation(F.conv2d(x, weight, bias, ...)), dropout_p, training).

        conv_activation(x, weight, bias, "silu", padding=1)
    """
    options = stride, padding, dilation, groups
    return with_activation("conv_activation", x, weight, bias, activation, options, dropout_p, residual,
                           training)


@public(example=_example)
def conv_gelu_dropout(x: Any, weight: Any, bias: Any = None, p: float = 0.5, training: bool = True, *,
                      approximate: str = "none", stride: Ints = 1, padding: Padding = 0, dilation: Ints = 1,
                      groups: int = 1) -> Any:
    """dropout(gelu(convolution(x) + bias), p). Arguments as in `conv_activation`.

    Source: F.dropout(F.gelu(F.conv2d(x, weight, bias, ...), approximate=approximate), p, training).
    `p`: from 0 to 1; `approximate`: "none" (erf) or "tanh".

        conv_gelu_dropout(torch.randn(2, 8, 16, 16), torch.randn(4, 8, 3, 3), torch.zeros(4), 0.1)
    """
    scale_of_kept("conv_gelu_dropout", p, training)
    activation = "gelu_tanh" if is_tanh("conv_gelu_dropout", approximate) else "gelu"
    options = stride, padding, dilation, groups
    return with_activation("conv_gelu_dropout", x, weight, bias, activation, options, p, None, training)


@public(example=_norm_example)
def conv_bn_act(x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, bn_weight: Any = None,
                bn_bias: Any = None, *, activation: Any = "relu", residual: Any = None, stride: Ints = 1,
                padding: Padding = 0, dilation: Ints = 1, groups: int = 1, training: bool = False,
                momentum: float = 0.1, eps: float = 1e-5, recompute: bool = False) -> Any:
    """activation(batch_norm(convolution(x) + bias) + residual), of 1 to 3 dimensions.

    x: (N, C, ...), weight: (C', C / groups, ...), residual: the result's shape, the others (C',) or None;
    `activation` as in `conv_activation`. With `training` mean and variance are the batch's, and running_mean,
    running_var, where given, move towards them by `momentum`, in place; without it they are what is taken.
    Where then no gradient is recorded and cuDNN has a kernel for it (relu, channels_last on a GPU, groups 1),
    the norm is folded into the weights, once for each version of these. `recompute`: in training, a
    convolution of ours that reads the result does not keep it, but makes it again in its backward pass.
    Source: activation(F.batch_norm(F.conv2d(x, weight, bias, ...), ...) + residual).

        conv_bn_act(x, weight, None, mean, var, gamma, beta, padding=1)
    """
    of, options = (bias, running_mean, running_var, bn_weight, bn_bias), (stride, padding, dilation, groups)
    return with_norm("conv_bn_act", x, weight, of, activation, residual, options, training, momentum, eps,
                     recompute)


@public(example=_last_example)
def conv2d_bn_act(x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, bn_weight: Any = None,
                  bn_bias: Any = None, *, activation: Any = "relu", residual: Any = None, stride: Ints = 1,
                  padding: Padding = 0, dilation: Ints = 1, groups: int = 1, training: bool = False,
                  momentum: float = 0.1, eps: float = 1e-5, recompute: bool = False) -> Any:
    """`conv_bn_act` of images: activation(batch_norm(conv2d(x) + bias) + residual), x (N, C, H, W).

    Source: activation(F.batch_norm(F.conv2d(x, weight, bias, ...), running_mean, ...) + residual).

        conv2d_bn_act(x, weight, None, mean, var, gamma, beta, activation="silu", padding=1, training=True)
    """
    _check_images("conv2d_bn_act", x)
    of, options = (bias, running_mean, running_var, bn_weight, bn_bias), (stride, padding, dilation, groups)
    return with_norm("conv2d_bn_act", x, weight, of, activation, residual, options, training, momentum, eps,
                     recompute)


def _check_images(op: str, x: Any) -> None:
    if getattr(x, "ndim", 4) != 4:
        raise ValueError(f"{op}: x must have 4 dimensions, (N, C, H, W), got shape {tuple(x.shape)}")
    if hasattr(x, "shape") and x.shape[1] == 0:
        raise ValueError(f"{op}: x must have at least one channel, got shape {tuple(x.shape)}")


def _early_example(make: Make) -> tuple[Any, ...]:
    x, weight, bias, mean, var, bn_weight, bn_bias = _norm_example(make)
    return x, weight, bias, bn_weight, bn_bias, mean, var


def _unbiased_example(make: Make) -> tuple[Any, ...]:
    x, weight, _, *norm = _early_example(make)
    return x, weight, None, *norm


@public(example=_unbiased_example)
def conv2d_batchnorm_relu(x: Any, conv_weight: Any, conv_bias: Any, bn_weight: Any, bn_bias: Any,
                          bn_mean: Any, bn_var: Any, eps: float = 1e-5, *, stride: Ints = 1,
                          padding: Padding = 0, dilation: Ints = 1, groups: int = 1) -> Any:
    """relu(batch_norm(conv2d(x) + bias)) at inference: `conv2d_bn_act` with its arguments in another order.

    Source: F.relu(F.batch_norm(F.conv2d(x, conv_weight, conv_bias, ...), bn_mean, bn_var, bn_weight,
    bn_bias)).

        conv2d_batchnorm_relu(x, weight, None, gamma, beta, mean, var, padding=1)
    """
    _check_images("conv2d_batchnorm_relu", x)
    of, options = (conv_bias, bn_mean, bn_var, bn_weight, bn_bias), (stride, padding, dilation, groups)
    return with_norm("conv2d_batchnorm_relu", x, conv_weight, of, relu, None, options, False, 0.0, eps)


@public(example=_early_example)
def conv2d_batchnorm(x: Any, conv_weight: Any, conv_bias: Any, bn_weight: Any, bn_bias: Any, bn_mean: Any,
                     bn_var: Any, eps: float = 1e-5, *, stride: Ints = 1, padding: Padding = 0,
                     dilation: Ints = 1, groups: int = 1) -> Any:
    """batch_norm(conv2d(x) + bias) at inference. Arguments as in `conv2d_batchnorm_relu`.

    Source: F.batch_norm(F.conv2d(x, conv_weight, conv_bias, ...), bn_mean, bn_var, bn_weight, bn_bias).

        conv2d_batchnorm(x, weight, None, gamma, beta, mean, var, padding=1)
    """
    _check_images("conv2d_batchnorm", x)
    of, options = (conv_bias, bn_mean, bn_var, bn_weight, bn_bias), (stride, padding, dilation, groups)
    return with_norm("conv2d_batchnorm", x, conv_weight, of, None, None, options, False, 0.0, eps)


@public(example=lambda make: (*_example(make), 32, make(CHANNELS), make(CHANNELS)),
        arrays="x weight bias gn_weight gn_bias residual")
def conv_group_norm(x: Any, weight: Any, bias: Any, num_groups: int, gn_weight: Any = None,
                    gn_bias: Any = None, *, activation: Any = None, residual: Any = None, stride: Ints = 1,
                    padding: Padding = 0, dilation: Ints = 1, groups: int = 1, eps: float = 1e-5) -> Any:
    """activation(group_norm(convolution(x) + bias) + residual), of 1 to 3 dimensions.

    x: (N, C, ...), weight: (C', C / groups, ...), residual: the result's shape, bias, gn_weight, gn_bias:
    (C',) or None; `activation` as in `conv_activation`.
    Source: activation(F.group_norm(F.conv2d(x, weight, bias, ...), num_groups, ...) + residual).
    `num_groups` divides C'.

        conv_group_norm(x, weight, None, 32, gamma, beta, activation="silu", padding=1)
    """
    op = "conv_group_norm"
    arrays = {"x": x, "weight": weight, "bias": bias, "gn_weight": gn_weight, "gn_bias": gn_bias,
              "residual": residual}
    conv = check(op, arrays, ("bias", "gn_weight", "gn_bias"), (stride, padding, dilation, groups))
    check_residual(op, residual, x, conv)
    if as_int(op, "num_groups", num_groups) < 1 or weight.shape[0] % num_groups:
        raise ValueError(f"{op}: num_groups must divide the {weight.shape[0]} channels of the result, got "
                         f"{num_groups!r}")
    z = convolve(x, weight, bias, conv)
    return group_norm(z, num_groups, gn_weight, gn_bias, eps, residual=residual,
                      epilogue=resolve(op, activation))


def _depthwise_example(make: Make) -> tuple[Any, ...]:
    n, c, h, w = IMAGES
    return make(n, h, w, c).permute(0, 3, 1, 2), make(c, 1, 3, 3)


@public(example=lambda make: (*_depthwise_example(make), make(CHANNELS), "silu"))
def depthwise_conv2d(x: Any, weight: Any, bias: Any = None, activation: Any = None, *, stride: Ints = 1,
                     padding: Padding = 0, dilation: Ints = 1) -> Any:
    """activation(conv2d(x) + bias) with a kernel for each channel: `conv_activation` with groups = C.

    x: (N, C, H, W), weight: (C, 1, kH, kW), or (m C, 1, kH, kW), m results a channel; bias: (m C,). Our own
    kernels compute it, with bias and activation, for channels_last x on a GPU, m = 1, strides of 1 and 2 (2
    without a dilation), up to 121 taps (float64: 49) and a padding smaller than the kernel; torch all
    others. Of our kernels the gradient of weights may be NaN where x is not finite in a pixel of the last
    rows or columns that few results read, or none.

        depthwise_conv2d(x.to(memory_format=torch.channels_last), weight, bias, "relu", padding=1)
    """
    _check_images("depthwise_conv2d", x)
    groups = x.shape[1] if hasattr(x, "shape") else 1
    options = stride, padding, dilation, groups
    return with_activation("depthwise_conv2d", x, weight, bias, activation, options)


Norm = Sequence[Any] | None


def _separable_example(make: Make) -> tuple[Any, ...]:
    x, weight = _depthwise_example(make)
    return x, weight, make(2 * CHANNELS, CHANNELS, 1, 1), make(CHANNELS), make(2 * CHANNELS)


@public(example=_separable_example)
def depthwise_separable(x: Any, depthwise_weight: Any, pointwise_weight: Any, depthwise_bias: Any = None,
                        pointwise_bias: Any = None, *, depthwise_norm: Norm = None,
                        pointwise_norm: Norm = None, activation: Any = "relu",
                        pointwise_activation: Any = "relu", residual: Any = None,
                        stride: Ints = 1, padding: Padding = 1, dilation: Ints = 1, training: bool = False,
                        momentum: float = 0.1, eps: float = 1e-5) -> Any:
    """A depthwise convolution and one of 1 x 1, each with its norm and activation: a block of MobileNet.

        y = activation(norm(depthwise_conv2d(x)))      pointwise_activation(norm(conv2d(y)) + residual)

    x: (N, C, H, W), depthwise_weight: (C, 1, kH, kW), pointwise_weight: (C', C, 1, 1), biases (C,) and (C',).
    A norm is None or (running_mean, running_var, weight, bias), used as in `conv_bn_act`. `stride`,
    `padding`, `dilation` are those of the depthwise convolution. Without a norm the residual stands after the
    activation. (Howard et al. 2017)

        depthwise_separable(x, w3x3, w1x1, depthwise_norm=norm1, pointwise_norm=norm2, training=True)
    """
    op = "depthwise_separable"
    if not hasattr(x, "shape"):
        raise TypeError(f"{op}: x must be a tensor or an array, got {type(x).__name__}")
    _check_images(op, x)

    def layer(x: Any, weight: Any, bias: Any, norm: Norm, activation: Any, residual: Any, options: Given
              ) -> Any:
        if norm is None:
            return with_activation(op, x, weight, bias, activation, options, residual=residual)
        if not isinstance(norm, (tuple, list)) or len(norm) != 4:
            came = f"{len(norm)} values" if isinstance(norm, (tuple, list)) else type(norm).__name__
            raise ValueError(f"{op}: a norm must be (running_mean, running_var, weight, bias), got {came}")
        return with_norm(op, x, weight, (bias, *norm), activation, residual, options, training, momentum, eps)

    shape = tuple(getattr(pointwise_weight, "shape", ()))
    if shape and shape[2:] != (1, 1):  # what is no tensor is for the layer to refuse
        raise ValueError(f"{op}: pointwise_weight must have the shape (C', C, 1, 1), got {shape}")
    y = layer(x, depthwise_weight, depthwise_bias, depthwise_norm, activation, None,
              (stride, padding, dilation, x.shape[1]))
    return layer(y, pointwise_weight, pointwise_bias, pointwise_norm, pointwise_activation, residual,
                 (1, 0, 1, 1))
