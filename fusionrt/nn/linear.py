"""Linear layers with what follows them: an activation, dropout, a residual."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fusionrt.arguments import check_counts
from fusionrt.nn.activation import Activated
from fusionrt.nn.sharing import expect, place, share
from fusionrt.ops.dropout import scale_of_kept
from fusionrt.ops.linear import linear_activation


class FusedLinear(Activated, nn.Linear):
    """residual + dropout(activation(x W^T + b)): a `torch.nn.Linear` with what follows it.

    activation: None, a name of the catalogue ("relu", "gelu", "silu", ...), any function of one traced value
    (an op, one made by `fuse`, a plain one), or torch's module or function for one of the catalogue's.
    dropout: the probability, of effect in training mode.
    forward(input, residual=None): input (..., in_features), residual and result (..., out_features).

    State: `weight`, `bias`, as torch.nn.Linear's. The named classes (`FusedLinearReLU`, ...) differ by their
    activation alone, which they fix: theirs is not to be given. Raises ValueError and TypeError for an
    activation that is none, a dropout outside [0, 1], and what `fusionrt.linear_activation` raises.

        layer = FusedLinear(512, 2048, activation="gelu", dropout=0.1)
        layer.load_state_dict(torch.nn.Linear(512, 2048).state_dict())
        FusedLinear.from_torch(linear, torch.nn.GELU())          # shares linear's parameters
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device: Any = None,
                 dtype: Any = None, *, activation: Any = None, dropout: float = 0.0) -> None:
        check_counts(type(self).__name__, in_features=in_features, out_features=out_features)
        super().__init__(in_features, out_features, bias, device, dtype)
        self._choose(activation)
        scale_of_kept(type(self).__name__, dropout, False, "dropout")
        self.dropout = dropout

    @classmethod
    def from_torch(cls, module: nn.Linear, activation: Any = None, dropout: float = 0.0) -> FusedLinear:
        """With the parameters of `module` themselves. TypeError for anything but a torch.nn.Linear."""
        expect(cls, module, nn.Linear, NonDynamicallyQuantizableLinear)
        return share(cls(module.in_features, module.out_features, module.bias is not None,
                         activation=activation, dropout=dropout, **place(module)), module)

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = linear_activation(
            input, self.weight, self.bias, self.activation, dropout_p=self.dropout, residual=residual,
            training=self.training)
        return out

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", dropout={self.dropout}" if self.dropout else "")


class FusedLinearReLU(FusedLinear, activation="relu"):
    """dropout(relu(x W^T + b)); see `FusedLinear`."""


class FusedLinearGELU(FusedLinear, activation="gelu"):
    """dropout(gelu(x W^T + b)), of the exact form; see `FusedLinear`."""


class FusedLinearGELUTanh(FusedLinear, activation="gelu_tanh"):
    """dropout(gelu(x W^T + b)), of the tanh form; see `FusedLinear`."""


class FusedLinearSiLU(FusedLinear, activation="silu"):
    """dropout(silu(x W^T + b)); see `FusedLinear`."""


class FusedLinearSigmoid(FusedLinear, activation="sigmoid"):
    """dropout(sigmoid(x W^T + b)); see `FusedLinear`."""


class FusedLinearTanh(FusedLinear, activation="tanh"):
    """dropout(tanh(x W^T + b)); see `FusedLinear`."""


class FusedLinearMish(FusedLinear, activation="mish"):
    """dropout(mish(x W^T + b)); see `FusedLinear`."""
