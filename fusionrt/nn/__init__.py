"""Modules in the place of torch.nn's, on fused kernels, whose weights load both ways.

    mlp = fusionrt.nn.FusedMLP(512, activation="gelu", dropout=0.1)
    block = fusionrt.nn.TransformerBlock.from_torch(torch.nn.TransformerEncoderLayer(512, 8))

Constructor, call and state-dict keys are those of the torch module that a class replaces, with further
options by keyword, but for a loss's deprecated size_average and reduce; `from_torch` (of what is several
modules in torch, `from_modules`) takes the parameters of existing ones, without copies, and hooks of what is
replaced stay behind. Everything that modules do works: train and eval, `to`, deepcopy, pickle,
`torch.compile(fullgraph=True)`, autocast.

One file an idea: `linear`, `norm`, `conv`, `mlp`, `attention`, `transformer`, `embedding`, `loss`;
`activation` (what may stand for one), `sharing` (parameters of another module), `reading` (tensors of
children that are not called), `hooks` (where torch keeps them).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusionrt import lazy

_MODULE = {
    "EmbeddingPosition": "embedding", "FusedConv2dBNReLU": "conv", "FusedConvBNAct": "conv",
    "FusedCrossEntropyLoss": "loss", "FusedGEGLU": "mlp", "FusedLayerNorm": "norm",
    "FusedLayerNormGELU": "norm", "FusedLayerNormReLU": "norm", "FusedLinear": "linear",
    "FusedLinearCrossEntropyLoss": "loss", "FusedLinearGELU": "linear", "FusedLinearGELUTanh": "linear",
    "FusedLinearMish": "linear", "FusedLinearReLU": "linear", "FusedLinearSiLU": "linear",
    "FusedLinearSigmoid": "linear", "FusedLinearTanh": "linear", "FusedMLP": "mlp",
    "FusedMultiheadAttention": "attention", "FusedRMSNorm": "norm", "FusedSwiGLU": "mlp",
    "TransformerBlock": "transformer", "TransformerDecoderBlock": "transformer",
}
_SUBMODULES = ("activation", "attention", "conv", "embedding", "linear", "loss", "mlp", "norm", "sharing",
               "transformer")

__getattr__, __dir__, __all__ = lazy.attach(__name__, _MODULE, _SUBMODULES)

if TYPE_CHECKING:
    from fusionrt.nn.attention import FusedMultiheadAttention as FusedMultiheadAttention
    from fusionrt.nn.conv import FusedConv2dBNReLU as FusedConv2dBNReLU
    from fusionrt.nn.conv import FusedConvBNAct as FusedConvBNAct
    from fusionrt.nn.embedding import EmbeddingPosition as EmbeddingPosition
    from fusionrt.nn.linear import FusedLinear as FusedLinear
    from fusionrt.nn.linear import FusedLinearGELU as FusedLinearGELU
    from fusionrt.nn.linear import FusedLinearGELUTanh as FusedLinearGELUTanh
    from fusionrt.nn.linear import FusedLinearMish as FusedLinearMish
    from fusionrt.nn.linear import FusedLinearReLU as FusedLinearReLU
    from fusionrt.nn.linear import FusedLinearSigmoid as FusedLinearSigmoid
    from fusionrt.nn.linear import FusedLinearSiLU as FusedLinearSiLU
    from fusionrt.nn.linear import FusedLinearTanh as FusedLinearTanh
    from fusionrt.nn.loss import FusedCrossEntropyLoss as FusedCrossEntropyLoss
    from fusionrt.nn.loss import FusedLinearCrossEntropyLoss as FusedLinearCrossEntropyLoss
    from fusionrt.nn.mlp import FusedGEGLU as FusedGEGLU
    from fusionrt.nn.mlp import FusedMLP as FusedMLP
    from fusionrt.nn.mlp import FusedSwiGLU as FusedSwiGLU
    from fusionrt.nn.norm import FusedLayerNorm as FusedLayerNorm
    from fusionrt.nn.norm import FusedLayerNormGELU as FusedLayerNormGELU
    from fusionrt.nn.norm import FusedLayerNormReLU as FusedLayerNormReLU
    from fusionrt.nn.norm import FusedRMSNorm as FusedRMSNorm
    from fusionrt.nn.transformer import TransformerBlock as TransformerBlock
    from fusionrt.nn.transformer import TransformerDecoderBlock as TransformerDecoderBlock
