"""Losses as modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusionrt.nn.sharing import expect, share
from fusionrt.ops.cross_entropy import check_options, cross_entropy
from fusionrt.ops.linear_cross_entropy import linear_cross_entropy


class FusedCrossEntropyLoss(nn.CrossEntropyLoss):
    """The cross-entropy of logits and classes: a `torch.nn.CrossEntropyLoss` in one kernel.

    z_loss, softcap, inplace_backward, and what is raised: as in `fusionrt.cross_entropy`.
    forward(input, target): logits (N, C, ...), classes (N, ...) or probabilities (N, C, ...).
    State: the buffer `weight`, of classes, as torch's.

        loss = FusedCrossEntropyLoss(ignore_index=-1, z_loss=1e-4)(logits, target)
    """

    def __init__(self, weight: torch.Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
                 label_smoothing: float = 0.0, *, z_loss: float = 0.0, softcap: float | None = None,
                 inplace_backward: bool = False) -> None:
        check_options(type(self).__name__, ignore_index, reduction, label_smoothing, z_loss, softcap)
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction,
                         label_smoothing=label_smoothing)
        self.z_loss, self.softcap, self.inplace_backward = z_loss, softcap, inplace_backward

    @classmethod
    def from_torch(cls, module: nn.CrossEntropyLoss) -> FusedCrossEntropyLoss:
        """With the weights of `module` themselves. TypeError for anything but a torch.nn.CrossEntropyLoss."""
        expect(cls, module, nn.CrossEntropyLoss)
        options = module.ignore_index, module.reduction, module.label_smoothing
        return share(cls(module.weight, *options), module)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = cross_entropy(
            input, target, self.weight, self.ignore_index, self.reduction, self.label_smoothing,
            z_loss=self.z_loss, softcap=self.softcap, inplace_backward=self.inplace_backward)
        return found

    def extra_repr(self) -> str:
        return _spelled(self, "ignore_index", "reduction", "label_smoothing", "z_loss", "softcap",
                        "inplace_backward")


class FusedLinearCrossEntropyLoss(nn.Module):
    """cross_entropy(input @ weight.T + bias, target), whose logits never are in memory as a whole.

    forward(weight, input, target, bias=None), the order of other libraries' modules of this name: weight (V,
    H) of the last linear layer, input (..., H), target of classes (...), bias (V,).
    class_weight, z_loss, softcap, and what is raised: as in `fusionrt.linear_cross_entropy`.
    State: the buffer `class_weight`, where it is given.

        loss = FusedLinearCrossEntropyLoss(ignore_index=-1)(model.lm_head.weight, hidden, target)
    """

    class_weight: torch.Tensor | None

    def __init__(self, class_weight: torch.Tensor | None = None, ignore_index: int = -100,
                 reduction: str = "mean", label_smoothing: float = 0.0, *, z_loss: float = 0.0,
                 softcap: float | None = None) -> None:
        check_options(type(self).__name__, ignore_index, reduction, label_smoothing, z_loss, softcap)
        super().__init__()
        self.register_buffer("class_weight", class_weight)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.z_loss, self.softcap = z_loss, softcap

    def forward(self, weight: torch.Tensor, input: torch.Tensor, target: torch.Tensor,
                bias: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = linear_cross_entropy(
            input, weight, target, bias, class_weight=self.class_weight, ignore_index=self.ignore_index,
            reduction=self.reduction, label_smoothing=self.label_smoothing, z_loss=self.z_loss,
            softcap=self.softcap)
        return found

    def extra_repr(self) -> str:
        return _spelled(self, "ignore_index", "reduction", "label_smoothing", "z_loss", "softcap")


def _spelled(module: nn.Module, *names: str) -> str:
    """Those that are not as they are unless given."""
    usual: dict[str, Any] = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0,
                             "softcap": None, "inplace_backward": False}
    return ", ".join(f"{name}={getattr(module, name)!r}" for name in names
                     if getattr(module, name) != usual[name])
