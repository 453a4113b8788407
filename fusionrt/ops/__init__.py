"""Every op, under its name and under the names that older fusion libraries gave it.

The module of an op is imported when the op is first used.

One file an idea. Elements: `activations`, `pointwise`, `dropout`, `quantize`. Rows and sums: `norm`,
`softmax`, `loss`, `reduction`, `cross_entropy` with `cross_entropy_rows`, `linear_cross_entropy`. Channels:
`batch_norm` (group and instance norm too). Linear layers: `linear` and `linear_path` (how one is computed),
`ffn`; `product` (one kernel for a product and what follows) with `gemm` and `gemv` (few rows). Attention:
`attention`, `attention_path` (which way a call takes), `attention_masked` (torch's kernels with a mask),
`attention_hopper` with `attention_kernels` (ours), `attention_chunks` with `attention_rows` (products and a
kernel between); `qkv` with `qkv_kernels`, `rotary` with `rotary_kernels`. Tables: `embedding` with
`embedding_kernels` and `embedding_gradients`. Convolutions: `convolution`, `convolution_path`,
`convolution_cudnn`, `folding` (a norm into weights), `transposition` (of layouts); `depthwise`,
`depthwise_forms`, `depthwise_kernels`, whose launches are of `depthwise_strips`, `depthwise_tiles`,
`depthwise_images`, `depthwise_mma`, `depthwise_mma_weights`. `recomputation` (a result that the backward pass
makes again).
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fusionrt import lazy
from fusionrt.op_names import ALIASES, MODULE, OPS

if TYPE_CHECKING:  # what type checkers and editors read
    from fusionrt.ops.activations import elu as elu
    from fusionrt.ops.activations import gelu as gelu
    from fusionrt.ops.activations import gelu_tanh as gelu_tanh
    from fusionrt.ops.activations import hardsigmoid as hardsigmoid
    from fusionrt.ops.activations import hardswish as hardswish
    from fusionrt.ops.activations import leaky_relu as leaky_relu
    from fusionrt.ops.activations import mish as mish
    from fusionrt.ops.activations import relu as relu
    from fusionrt.ops.activations import relu6 as relu6
    from fusionrt.ops.activations import relu_squared as relu_squared
    from fusionrt.ops.activations import sigmoid as sigmoid
    from fusionrt.ops.activations import silu as silu
    from fusionrt.ops.activations import softplus as softplus
    from fusionrt.ops.activations import tanh as tanh
    from fusionrt.ops.attention import attention as attention
    from fusionrt.ops.attention import attention_apply as attention_apply
    from fusionrt.ops.attention import attention_score as attention_score
    from fusionrt.ops.attention import attention_score_softmax as attention_score_softmax
    from fusionrt.ops.attention import cpu_fused_attention as cpu_fused_attention
    from fusionrt.ops.attention import multihead_attention as multihead_attention
    from fusionrt.ops.attention import optimized_cpu_attention as optimized_cpu_attention
    from fusionrt.ops.batch_norm import batch_norm as batch_norm
    from fusionrt.ops.batch_norm import batch_norm_relu as batch_norm_relu
    from fusionrt.ops.batch_norm import group_norm as group_norm
    from fusionrt.ops.batch_norm import instance_norm as instance_norm
    from fusionrt.ops.convolution import conv2d_batchnorm as conv2d_batchnorm
    from fusionrt.ops.convolution import conv2d_batchnorm_relu as conv2d_batchnorm_relu
    from fusionrt.ops.convolution import conv2d_bn_act as conv2d_bn_act
    from fusionrt.ops.convolution import conv_activation as conv_activation
    from fusionrt.ops.convolution import conv_bn_act as conv_bn_act
    from fusionrt.ops.convolution import conv_gelu_dropout as conv_gelu_dropout
    from fusionrt.ops.convolution import conv_group_norm as conv_group_norm
    from fusionrt.ops.convolution import depthwise_conv2d as depthwise_conv2d
    from fusionrt.ops.convolution import depthwise_separable as depthwise_separable
    from fusionrt.ops.cross_entropy import cross_entropy as cross_entropy
    from fusionrt.ops.dropout import bias_dropout_add as bias_dropout_add
    from fusionrt.ops.dropout import dropout_add as dropout_add
    from fusionrt.ops.dropout import gelu_dropout as gelu_dropout
    from fusionrt.ops.dropout import relu_dropout as relu_dropout
    from fusionrt.ops.embedding import embedding_position as embedding_position
    from fusionrt.ops.ffn import ffn as ffn
    from fusionrt.ops.ffn import geglu_mlp as geglu_mlp
    from fusionrt.ops.ffn import linear_swiglu as linear_swiglu
    from fusionrt.ops.ffn import swiglu_mlp as swiglu_mlp
    from fusionrt.ops.linear import linear_activation as linear_activation
    from fusionrt.ops.linear import linear_gelu as linear_gelu
    from fusionrt.ops.linear import linear_gelu_dropout as linear_gelu_dropout
    from fusionrt.ops.linear import linear_relu as linear_relu
    from fusionrt.ops.linear import linear_relu_dropout as linear_relu_dropout
    from fusionrt.ops.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from fusionrt.ops.loss import bce_with_logits as bce_with_logits
    from fusionrt.ops.loss import huber_loss as huber_loss
    from fusionrt.ops.loss import kl_div as kl_div
    from fusionrt.ops.loss import l1_loss as l1_loss
    from fusionrt.ops.loss import mse_loss as mse_loss
    from fusionrt.ops.loss import smooth_l1_loss as smooth_l1_loss
    from fusionrt.ops.norm import add_norm as add_norm
    from fusionrt.ops.norm import add_rms_norm as add_rms_norm
    from fusionrt.ops.norm import dropout_add_layer_norm as dropout_add_layer_norm
    from fusionrt.ops.norm import layer_norm as layer_norm
    from fusionrt.ops.norm import layer_norm_gelu as layer_norm_gelu
    from fusionrt.ops.norm import layer_norm_relu as layer_norm_relu
    from fusionrt.ops.norm import rms_norm as rms_norm
    from fusionrt.ops.norm import rms_norm_gelu as rms_norm_gelu
    from fusionrt.ops.pointwise import add_mul_add as add_mul_add
    from fusionrt.ops.pointwise import add_mul_exp as add_mul_exp
    from fusionrt.ops.pointwise import add_relu as add_relu
    from fusionrt.ops.pointwise import add_sigmoid as add_sigmoid
    from fusionrt.ops.pointwise import bias_gelu as bias_gelu
    from fusionrt.ops.pointwise import bias_relu as bias_relu
    from fusionrt.ops.pointwise import bias_silu as bias_silu
    from fusionrt.ops.pointwise import geglu as geglu
    from fusionrt.ops.pointwise import mish_scale as mish_scale
    from fusionrt.ops.pointwise import mul_tanh as mul_tanh
    from fusionrt.ops.pointwise import multiply_relu as multiply_relu
    from fusionrt.ops.pointwise import prelu_bias as prelu_bias
    from fusionrt.ops.pointwise import reglu as reglu
    from fusionrt.ops.pointwise import scale_bias_sigmoid as scale_bias_sigmoid
    from fusionrt.ops.pointwise import swish_multiply as swish_multiply
    from fusionrt.ops.qkv import qkv_heads as qkv_heads
    from fusionrt.ops.quantize import dequantize_int8 as dequantize_int8
    from fusionrt.ops.quantize import quantize_int8 as quantize_int8
    from fusionrt.ops.reduction import amax as amax
    from fusionrt.ops.reduction import amin as amin
    from fusionrt.ops.reduction import argmax as argmax
    from fusionrt.ops.reduction import argmin as argmin
    from fusionrt.ops.reduction import logsumexp as logsumexp
    from fusionrt.ops.reduction import mean as mean
    from fusionrt.ops.reduction import mean_abs as mean_abs
    from fusionrt.ops.reduction import norm as norm
    from fusionrt.ops.reduction import row_reduce as row_reduce
    from fusionrt.ops.reduction import std as std
    from fusionrt.ops.reduction import sum as sum
    from fusionrt.ops.reduction import sum_squared as sum_squared
    from fusionrt.ops.reduction import var as var
    from fusionrt.ops.rotary import rotary_embedding as rotary_embedding
    from fusionrt.ops.softmax import attention_dropout as attention_dropout
    from fusionrt.ops.softmax import log_softmax as log_softmax
    from fusionrt.ops.softmax import softmax as softmax

_HOME = {op: f"{__name__}.{module}" for op, module in MODULE.items()}
_SUBMODULES = OPS.keys() - _HOME.keys()
_WAYS = {"_cuda": "cuda", "_cpu": "cpu", "_pytorch": "reference"}

if not TYPE_CHECKING:  # a type checker cannot evaluate it
    __all__ = sorted(_HOME)


class _Package(ModuleType):
    """Some ops and modules share a name (`attention`, `softmax`): here it is the op's, whoever imports the
    module."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Ops and aliases, and for `op_cuda`, `op_cpu` and `op_pytorch` the three ways to run an op."""
    for suffix, way in _WAYS.items():
        stem = name.removesuffix(suffix)
        if ALIASES.get(stem, stem) in _HOME and stem != name:
            return getattr(__getattr__(stem), way)
    op = ALIASES.get(name, name)
    if op not in _HOME and op not in _SUBMODULES:
        raise AttributeError(f"module 'fusionrt.ops' has no op {name!r}")
    return lazy.find(__name__, op, _HOME, _SUBMODULES)


def __dir__() -> list[str]:
    return sorted(_HOME)
