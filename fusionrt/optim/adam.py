"""Adam (Kingma & Ba, 2015) and AdamW (Loshchilov & Hutter, 2019)."""

from __future__ import annotations

from typing import Any

import torch

from fusionrt.optim.kernels import Coefficients
from fusionrt.optim.optimizer import FusedOptimizer, not_negative, two_betas


class Adam(FusedOptimizer):
    """torch.optim.Adam in a handful of launches.

        m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g²
        p = p - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

    `weight_decay` is added to the gradient, times p; with `decoupled_weight_decay` p is multiplied by
    1 - lr weight_decay instead. `amsgrad`: the largest v so far in the place of v. `maximize`: g is -g.
    For the other options see `FusedOptimizer`.

        optimizer = fusionrt.optim.Adam(model.parameters(), lr=1e-3, state_dtype="8bit")
    """

    rule = "ADAM"

    def __init__(self, params: Any, lr: float | torch.Tensor = 1e-3, betas: tuple[Any, Any] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0, amsgrad: bool = False, *,
                 foreach: bool | None = None, maximize: bool = False, capturable: bool = False,
                 differentiable: bool = False, fused: bool | None = None,
                 decoupled_weight_decay: bool = False, master_weights: bool = False,
                 state_dtype: torch.dtype | str | None = None, clip_grad_norm: float | None = None,
                 skip_nonfinite: bool = False) -> None:
        super().__init__(params, {
            "lr": lr, "betas": betas, "eps": eps,
            "weight_decay": weight_decay, "amsgrad": amsgrad, "foreach": foreach, "maximize": maximize,
            "capturable": capturable, "differentiable": differentiable, "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay, "master_weights": master_weights,
            "state_dtype": state_dtype, "clip_grad_norm": clip_grad_norm, "skip_nonfinite": skip_nonfinite})

    def _check(self, options: dict[str, Any]) -> None:
        super()._check(options)
        two_betas(type(self).__name__, options["betas"])
        not_negative(type(self).__name__, "eps", options["eps"])

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))

    def _flags(self, group: dict[str, Any]) -> dict[str, bool]:
        return {"decoupled": bool(group["decoupled_weight_decay"])}

    def _coefficients(self, group: dict[str, Any]) -> Coefficients:
        beta1, beta2 = map(float, group["betas"])
        return Coefficients(beta1, 1 - beta1, beta2, 1 - beta2, group["eps"])


class AdamW(Adam):
    """torch.optim.AdamW: Adam whose `weight_decay`, 0.01 if not given, multiplies p by 1 - lr weight_decay.

        optimizer = fusionrt.optim.AdamW(model.parameters(), lr=3e-4, clip_grad_norm=1.0)
    """

    def __init__(self, params: Any, lr: float | torch.Tensor = 1e-3, betas: tuple[Any, Any] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 1e-2, amsgrad: bool = False, *,
                 maximize: bool = False, foreach: bool | None = None, capturable: bool = False,
                 differentiable: bool = False, fused: bool | None = None, master_weights: bool = False,
                 state_dtype: torch.dtype | str | None = None, clip_grad_norm: float | None = None,
                 skip_nonfinite: bool = False) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, foreach=foreach, maximize=maximize,
            capturable=capturable, differentiable=differentiable, fused=fused, decoupled_weight_decay=True,
            master_weights=master_weights, state_dtype=state_dtype,
            clip_grad_norm=clip_grad_norm, skip_nonfinite=skip_nonfinite)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a checkpoint of an old AdamW does not say
            group["decoupled_weight_decay"] = True
