"""Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023)."""

from __future__ import annotations

from typing import Any

import torch

from fusionrt.optim.kernels import Coefficients
from fusionrt.optim.optimizer import FusedOptimizer, two_betas


class Lion(FusedOptimizer):
    """A step of the same size for every element, in the direction of an average of gradients.

        p = (1 - lr weight_decay) p - lr sign(beta1 m + (1 - beta1) g);  m = beta2 m + (1 - beta2) g

    It keeps one state, half of Adam's. The paper takes an lr 3 to 10 times smaller than AdamW's and a
    weight_decay as much larger. For the other options see `FusedOptimizer`.

        optimizer = fusionrt.optim.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
    """

    rule = "LION"

    def __init__(self, params: Any, lr: float | torch.Tensor = 1e-4, betas: tuple[Any, Any] = (0.9, 0.99),
                 weight_decay: float = 0, *, maximize: bool = False, foreach: bool | None = None,
                 capturable: bool = False, differentiable: bool = False, fused: bool | None = None,
                 master_weights: bool = False, state_dtype: torch.dtype | str | None = None,
                 clip_grad_norm: float | None = None,
                 skip_nonfinite: bool = False) -> None:
        super().__init__(params, {
            "lr": lr, "betas": betas, "weight_decay": weight_decay,
            "maximize": maximize, "foreach": foreach, "capturable": capturable,
            "differentiable": differentiable, "fused": fused, "master_weights": master_weights,
            "state_dtype": state_dtype, "clip_grad_norm": clip_grad_norm, "skip_nonfinite": skip_nonfinite})

    def _check(self, options: dict[str, Any]) -> None:
        super()._check(options)
        two_betas(type(self).__name__, options["betas"])

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def _flags(self, group: dict[str, Any]) -> dict[str, bool]:
        return {"decoupled": True}

    def _coefficients(self, group: dict[str, Any]) -> Coefficients:
        beta1, beta2 = map(float, group["betas"])
        return Coefficients(beta1, 1 - beta1, beta2, 1 - beta2)
