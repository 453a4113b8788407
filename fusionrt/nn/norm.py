"""Norms over the last dimensions, with the residual before and the activation after them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusionrt.activation import resolve
from fusionrt.nn.activation import Activated
from fusionrt.nn.sharing import expect, place, share
from fusionrt.ops.norm import layer_norm, rms_norm


class FusedLayerNorm(Activated, nn.LayerNorm):
    """activation((s - mean(s)) / sqrt(var(s) + eps) * weight + bias) of s = dropout(x) + residual.

    A `torch.nn.LayerNorm`; what stands before and after it is part of the one kernel.
    forward(input, residual=None, *, dropout_p=0.0, training=None, return_sum=False): input and residual (...,
    *normalized_shape). dropout_p: of input's elements, of effect where `training` is true, by default
    the module's mode. With return_sum the result is (y, s), of which a pre-norm block needs both. It has
    input's dtype, under autocast too.

    State: `weight`, `bias`, as torch.nn.LayerNorm's. Raises ValueError and TypeError for an activation that
    is none, and what `fusionrt.layer_norm` raises.

        norm = FusedLayerNorm(512, activation="relu")
        y, hidden = FusedLayerNorm(512)(branch, hidden, dropout_p=0.1, return_sum=True)
    """

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True,
                 bias: bool = True, device: Any = None, dtype: Any = None, *, activation: Any = None) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self._choose(activation)

    @classmethod
    def from_torch(cls, module: nn.LayerNorm, activation: Any = None) -> FusedLayerNorm:
        """With the parameters of `module` themselves. TypeError for anything but a torch.nn.LayerNorm."""
        expect(cls, module, nn.LayerNorm)
        return share(cls(module.normalized_shape, module.eps, module.elementwise_affine,
                         module.bias is not None, activation=activation, **place(module)), module)

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None, *, dropout_p: float = 0.0,
                training: bool | None = None, return_sum: bool = False) -> Any:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, residual=residual,
                          dropout_p=dropout_p, training=self.training if training is None else training,
                          epilogue=resolve("layer_norm", self.activation), return_sum=return_sum)


class FusedLayerNormReLU(FusedLayerNorm, activation="relu"):
    """relu(layer_norm(x)); see `FusedLayerNorm`."""


class FusedLayerNormGELU(FusedLayerNorm, activation="gelu"):
    """gelu(layer_norm(x)), of the exact form; see `FusedLayerNorm`."""


class FusedRMSNorm(Activated, nn.RMSNorm):
    """activation(s / sqrt(mean(s^2) + eps) * (weight_offset + weight)) of s = dropout(x) + residual.

    A `torch.nn.RMSNorm`; forward(x, residual=None, *, dropout_p=0.0, training=None, return_sum=False) as that
    of `FusedLayerNorm`. `eps`: None is that of float32 (float64 for doubles), as in torch; LLaMA's is 1e-6.
    `weight_offset`: 1 for weights that are stored as their difference from 1 (Gemma), and then start at 0.

    State: `weight`, as torch.nn.RMSNorm's. Raises ValueError and TypeError for an activation that is none,
    another weight_offset than 0 or 1, and what `fusionrt.rms_norm` raises.

        norm = FusedRMSNorm(512, eps=1e-6)
        y, hidden = norm(branch, hidden, return_sum=True)
    """

    weight_offset = 0  # while torch's constructor runs

    def __init__(self, normalized_shape: Any, eps: float | None = None, elementwise_affine: bool = True,
                 device: Any = None, dtype: Any = None, *, weight_offset: int = 0, activation: Any = None
                 ) -> None:
        if weight_offset not in (0, 1):
            raise ValueError(f"FusedRMSNorm: weight_offset must be 0 or 1, got {weight_offset!r}")
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self._choose(activation)
        self.weight_offset = weight_offset
        self.reset_parameters()

    @classmethod
    def from_torch(cls, module: nn.RMSNorm, activation: Any = None) -> FusedRMSNorm:
        """With the parameter of `module` itself. TypeError for anything but a torch.nn.RMSNorm."""
        expect(cls, module, nn.RMSNorm)
        return share(cls(module.normalized_shape, module.eps, module.elementwise_affine,
                         activation=activation, **place(module)), module)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.elementwise_affine and self.weight_offset:
            nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None, *, dropout_p: float = 0.0,
                training: bool | None = None, return_sum: bool = False) -> Any:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, weight_offset=self.weight_offset,
                        residual=residual, dropout_p=dropout_p,
                        training=self.training if training is None else training,
                        epilogue=resolve("rms_norm", self.activation), return_sum=return_sum)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", weight_offset={self.weight_offset}" if self.weight_offset else "")
