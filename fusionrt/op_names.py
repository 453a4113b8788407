"""The public ops by the module of `fusionrt.ops` that has them, and their other names: costs no import.

Simple ones come first: a kernel that several share bears the name of the first.
"""

from __future__ import annotations

import importlib
from types import ModuleType

OPS = {
    "activations": (
        "elu", "gelu", "gelu_tanh", "hardsigmoid", "hardswish", "leaky_relu", "mish", "relu", "relu6",
        "relu_squared", "sigmoid", "silu", "softplus", "tanh"),
    "pointwise": (
        "add_mul_add", "add_mul_exp", "add_relu", "add_sigmoid", "bias_gelu", "bias_relu", "bias_silu",
        "geglu", "mish_scale", "mul_tanh", "multiply_relu", "prelu_bias", "reglu", "scale_bias_sigmoid",
        "swish_multiply"),
    "dropout": ("bias_dropout_add", "dropout_add", "gelu_dropout", "relu_dropout"),
    "quantize": ("dequantize_int8", "quantize_int8"),
    "reduction": (
        "amax", "amin", "argmax", "argmin", "logsumexp", "mean", "mean_abs", "norm", "row_reduce", "std",
        "sum", "sum_squared", "var"),
    "softmax": ("softmax", "log_softmax", "attention_dropout"),
    "norm": (
        "add_norm", "add_rms_norm", "dropout_add_layer_norm", "layer_norm", "layer_norm_gelu",
        "layer_norm_relu", "rms_norm", "rms_norm_gelu"),
    "batch_norm": ("batch_norm", "batch_norm_relu", "group_norm", "instance_norm"),
    "loss": ("bce_with_logits", "huber_loss", "kl_div", "l1_loss", "mse_loss", "smooth_l1_loss"),
    "cross_entropy": ("cross_entropy",),
    "linear_cross_entropy": ("linear_cross_entropy",),
    "linear": (
        "linear_activation", "linear_gelu", "linear_gelu_dropout", "linear_relu", "linear_relu_dropout"),
    "ffn": ("ffn", "geglu_mlp", "linear_swiglu", "swiglu_mlp"),
    "embedding": ("embedding_position",),
    "rotary": ("rotary_embedding",),
    "qkv": ("qkv_heads",),
    "attention": (
        "attention", "attention_apply", "attention_score", "attention_score_softmax", "cpu_fused_attention",
        "multihead_attention", "optimized_cpu_attention"),
    "convolution": (
        "conv2d_batchnorm", "conv2d_batchnorm_relu", "conv2d_bn_act", "conv_activation", "conv_bn_act",
        "conv_gelu_dropout", "conv_group_norm", "depthwise_conv2d", "depthwise_separable"),
}
MODULE = {op: module for module, ops in OPS.items() for op in ops}


def load(op: str) -> ModuleType:
    """The module that has it."""
    return importlib.import_module(f"fusionrt.ops.{MODULE[op]}")


# Other name -> op.
ALIASES = {
    "elementwise_add_relu": "add_relu", "fused_add_relu": "add_relu",
    "elementwise_mul_tanh": "mul_tanh", "multiply_tanh": "mul_tanh", "fused_mul_tanh": "mul_tanh",
    "fused_multiply_relu": "multiply_relu", "fused_add_sigmoid": "add_sigmoid",
    "fused_bias_gelu": "bias_gelu", "fused_bias_relu": "bias_relu", "fused_bias_silu": "bias_silu",
    "fused_gelu_dropout": "gelu_dropout", "fused_relu_dropout": "relu_dropout",
    "fused_dropout_add": "dropout_add", "fused_swish_multiply": "swish_multiply",
    "swiglu": "swish_multiply", "fused_mish_scale": "mish_scale",
    "fused_prelu_bias": "prelu_bias", "fused_add_mul_exp": "add_mul_exp",
    "fused_cross_entropy": "cross_entropy", "fused_linear_cross_entropy": "linear_cross_entropy",
    "fused_mse_loss": "mse_loss", "binary_cross_entropy_with_logits": "bce_with_logits",
    "fused_quantize_int8": "quantize_int8", "swish": "silu",
    "reduce_sum_squared": "sum_squared", "reduce_mean_abs": "mean_abs", "reduce": "row_reduce",
    "reduce_sum": "sum", "reduce_mean": "mean", "reduce_max": "amax", "reduce_min": "amin",
    "batchnorm": "batch_norm", "groupnorm": "group_norm", "instancenorm": "instance_norm",
    "fused_batch_norm": "batch_norm", "fused_batch_norm_relu": "batch_norm_relu",
    "fused_group_norm": "group_norm",
    "fused_conv2d_batchnorm_relu": "conv2d_batchnorm_relu", "fused_conv2d_batchnorm": "conv2d_batchnorm",
    "fused_conv_gelu_dropout": "conv_gelu_dropout",
    "layernorm": "layer_norm", "rmsnorm": "rms_norm", "fused_layer_norm": "layer_norm",
    "fused_rms_norm": "rms_norm", "fused_layer_norm_relu": "layer_norm_relu",
    "fused_layer_norm_gelu": "layer_norm_gelu", "fused_rms_norm_gelu": "rms_norm_gelu",
    "fused_add_norm": "add_norm", "fused_layer_norm_add": "add_norm", "fused_add_rms_norm": "add_rms_norm",
    "fused_dropout_add_layernorm": "dropout_add_layer_norm",
    "fused_attention_score": "attention_score", "fused_attention_score_softmax": "attention_score_softmax",
    "fused_attention_apply": "attention_apply", "fused_multihead_attention": "multihead_attention",
    "flash_attention": "attention",
    "fused_linear_activation": "linear_activation", "fused_linear_relu": "linear_relu",
    "fused_linear_gelu": "linear_gelu", "fused_linear_relu_dropout": "linear_relu_dropout",
    "fused_linear_gelu_dropout": "linear_gelu_dropout", "fused_swiglu": "linear_swiglu",
}
