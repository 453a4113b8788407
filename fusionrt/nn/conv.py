"""A convolution, its batch norm and an activation."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fusionrt.nn.activation import Activated, known
from fusionrt.nn.reading import finished, is_read
from fusionrt.nn.sharing import expect
from fusionrt.ops.convolution import conv_bn_act

_PAIRS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}
_CONVOLVE = [kind.forward for kind in _PAIRS]
_NORMALISE = [kind.forward for kind in _PAIRS.values()]


class FusedConvBNAct(Activated):
    """activation(bn(conv(x)) + residual), of a convolution and a batch norm of 1 to 3 dimensions.

    conv, bn: torch's modules, which become children, so their parameters, buffers and modes are used as they
    are. activation: as in `FusedLinear`. In training mode of `bn` the norm takes the batch's statistics and
    moves the running ones, as torch's does; without gradients, where cuDNN has a kernel for it, it is folded
    into the convolution's weights, once for each version of these (see `fusionrt.conv_bn_act`). Both are read
    or called as the layers of `FusedMLP`: what convert_sync_batchnorm puts in the place of bn is called.
    forward(input, residual=None): (N, C, ...) -> (N, C', ...); channels_last stays.

    State: that of `torch.nn.Sequential(conv, bn, act)`: `0.weight`, `0.bias`, `1.weight`, `1.bias`,
    `1.running_mean`, `1.running_var`, `1.num_batches_tracked`. Raises TypeError for modules of other classes
    (SyncBatchNorm among them), ValueError where bn does not have conv's channels.

        block = FusedConvBNAct(conv, bn, "silu")
        block = FusedConvBNAct.from_torch(torch.nn.Sequential(conv, bn, torch.nn.SiLU()))
    """

    def __init__(self, conv: nn.Module, bn: nn.Module, activation: Any = None) -> None:
        super().__init__()
        kind = type(self)
        expect(kind, conv, *_PAIRS, argument="conv")
        expect(kind, bn, _PAIRS[type(conv)], argument="bn")
        if bn.num_features != conv.out_channels:
            raise ValueError(f"{kind.__name__}: bn must have conv's {conv.out_channels} channels, got "
                             f"{bn.num_features}")
        self.add_module("0", conv)
        self.add_module("1", bn)
        self._choose(activation)
        self.training = bn.training

    @classmethod
    def from_modules(cls, conv: nn.Module, bn: nn.Module, **activation: Any) -> FusedConvBNAct:
        """Of these modules themselves; `activation` where the class leaves it open."""
        return cls(conv, bn, **activation)

    @classmethod
    def from_torch(cls, module: nn.Sequential) -> FusedConvBNAct:
        """Of the modules in a torch.nn.Sequential: conv, bn and, if there is a third, the activation."""
        expect(cls, module, nn.Sequential)
        if len(module) not in (2, 3):
            raise ValueError(f"{cls.__name__}: module must hold a convolution, a batch norm and at most an "
                             f"activation, got {len(module)} modules")
        conv, bn, *rest = module
        activation = known(cls.__name__, *rest) if rest else None
        if cls._fixed is None:
            return cls(conv, bn, activation)
        if activation != cls._fixed:
            raise ValueError(f"{cls.__name__}: the activation is {cls._fixed}, got a module with "
                             f"{activation}")
        return cls(conv, bn)

    @property
    def conv(self) -> Any:
        return self._modules["0"]

    @property
    def bn(self) -> Any:
        return self._modules["1"]

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        conv, bn = self.conv, self.bn
        if not (is_read(conv, *_CONVOLVE) and is_read(bn, *_NORMALISE)):
            z = bn(conv(input))
            return finished("conv_bn_act", z if residual is None else z + residual, self.activation)
        padding = conv.padding
        if conv.padding_mode != "zeros":
            input = F.pad(input, conv._reversed_padding_repeated_twice, mode=conv.padding_mode)
            padding = 0
        keeps = not bn.training or bn.track_running_stats  # that may be set after the statistics were made
        mean, var = (bn.running_mean, bn.running_var) if keeps else (None, None)
        found: torch.Tensor = conv_bn_act(
            input, conv.weight, conv.bias, mean, var, bn.weight, bn.bias,
            activation=self.activation, residual=residual, stride=conv.stride, padding=padding,
            dilation=conv.dilation, groups=conv.groups, training=bn.training or mean is None,
            momentum=_momentum(bn), eps=bn.eps)
        return found


class FusedConv2dBNReLU(FusedConvBNAct, activation="relu"):
    """relu(bn(conv(x)) + residual): of an existing pair, or with the arguments of `torch.nn.Conv2d`.

    eps, momentum, affine, track_running_stats are those of `torch.nn.BatchNorm2d`. State: that of
    `torch.nn.Sequential(conv, bn, relu)`, see `FusedConvBNAct`, which has any other activation.

        block = FusedConv2dBNReLU(64, 128, 3, padding=1, bias=False)
        block = FusedConv2dBNReLU(conv, bn)
    """

    def __init__(self, in_channels: Any, out_channels: Any, kernel_size: Any = None, stride: Any = 1,
                 padding: Any = 0, dilation: Any = 1, groups: int = 1, bias: bool = True,
                 padding_mode: Any = "zeros", device: Any = None, dtype: Any = None, *, eps: float = 1e-5,
                 momentum: float | None = 0.1, affine: bool = True, track_running_stats: bool = True) -> None:
        of_conv: dict[str, Any] = {
            "kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation,
            "groups": groups, "bias": bias, "padding_mode": padding_mode}
        of_norm: dict[str, Any] = {
            "eps": eps, "momentum": momentum, "affine": affine, "track_running_stats": track_running_stats}
        where = {"device": device, "dtype": dtype}
        if isinstance(in_channels, nn.Module) and isinstance(out_channels, nn.Module):
            expect(type(self), in_channels, nn.Conv2d, argument="conv")
            usual = inspect.signature(FusedConv2dBNReLU).parameters
            told = [n for n, value in (of_conv | of_norm | where).items() if value != usual[n].default]
            if told:
                raise TypeError("FusedConv2dBNReLU: of a Conv2d and a BatchNorm2d, which have their own "
                                f"options, got {', '.join(told)}")
            super().__init__(in_channels, out_channels)
            return
        if kernel_size is None:
            kinds = f"{type(in_channels).__name__}, {type(out_channels).__name__}"
            raise TypeError("FusedConv2dBNReLU: takes a Conv2d and a BatchNorm2d, or numbers of channels and "
                            f"a kernel_size, got {kinds} and no kernel_size")
        super().__init__(nn.Conv2d(in_channels, out_channels, **of_conv, **where),
                         nn.BatchNorm2d(out_channels, **of_norm, **where))


def _momentum(bn: Any) -> float:
    """Of this batch; counts it, as torch's norm does before it runs."""
    if bn.training and bn.track_running_stats and bn.num_batches_tracked is not None:
        bn.num_batches_tracked.add_(1)
        if bn.momentum is None:
            return 1.0 / float(bn.num_batches_tracked)
    return 0.0 if bn.momentum is None else float(bn.momentum)
