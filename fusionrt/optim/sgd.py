"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusionrt.optim.kernels import Coefficients
from fusionrt.optim.optimizer import FusedOptimizer, not_negative, number
from fusionrt.optim.state import STEP


class SGD(FusedOptimizer):
    """torch.optim.SGD in a handful of launches.

        g = g + weight_decay p;  b = momentum b + (1 - dampening) g, at first g
        p = p - lr (g + momentum b  with nesterov,  b  with momentum,  else g)

    `maximize`: g is -g. For the other options see `FusedOptimizer`; `state_dtype` is that of b.

        optimizer = fusionrt.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    """

    rule = "SGD"

    def __init__(self, params: Any, lr: float | torch.Tensor = 1e-3, momentum: float = 0,
                 dampening: float = 0, weight_decay: float = 0, nesterov: bool = False, *,
                 maximize: bool = False, foreach: bool | None = None, differentiable: bool = False,
                 fused: bool | None = None, master_weights: bool = False,
                 state_dtype: torch.dtype | str | None = None, clip_grad_norm: float | None = None,
                 skip_nonfinite: bool = False) -> None:
        super().__init__(params, {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize, "foreach": foreach, "differentiable": differentiable,
            "fused": fused, "master_weights": master_weights, "state_dtype": state_dtype,
            "clip_grad_norm": clip_grad_norm, "skip_nonfinite": skip_nonfinite})
        # Not of a group, which may do without a momentum, as in torch.
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(f"{type(self).__name__}: nesterov needs a momentum and no dampening, got "
                             f"momentum={momentum}, dampening={dampening}")

    def _check(self, options: dict[str, Any]) -> None:
        super()._check(options)
        not_negative(type(self).__name__, "momentum", options["momentum"])
        number(type(self).__name__, "dampening", options["dampening"])

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _saved(self, state: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Before the first step that counts nothing, as torch's, whose first one takes the gradient."""
        saved, step = super()._saved(state, names), state.get(STEP)
        if names and isinstance(step, (int, float, torch.Tensor)) and not float(step):
            saved = {key: value for key, value in saved.items() if key not in (STEP, *names)}
        return saved

    def _flags(self, group: dict[str, Any]) -> dict[str, bool]:
        return {"nesterov": bool(group["nesterov"])}

    def _coefficients(self, group: dict[str, Any]) -> Coefficients:
        return Coefficients(group["momentum"], 1 - group["dampening"])
