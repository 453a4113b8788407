"""Every op, under its name and under the names that older fusion libraries gave it."""
# ruff: noqa: F401  what is imported here is public; ruff cannot evaluate __all__

from typing import TYPE_CHECKING, Any

from fusionrt import op_names
from fusionrt.catalogue import OPS
from fusionrt.ops.activations import (
    elu,
    gelu,
    gelu_tanh,
    hardsigmoid,
    hardswish,
    leaky_relu,
    mish,
    relu,
    relu6,
    relu_squared,
    sigmoid,
    silu,
    softplus,
    tanh,
)
from fusionrt.ops.attention import (
    attention,
    attention_apply,
    attention_score,
    attention_score_softmax,
    cpu_fused_attention,
    multihead_attention,
    optimized_cpu_attention,
)
from fusionrt.ops.batch_norm import batch_norm, batch_norm_relu, group_norm, instance_norm
from fusionrt.ops.convolution import (
    conv2d_batchnorm,
    conv2d_batchnorm_relu,
    conv2d_bn_act,
    conv_activation,
    conv_bn_act,
    conv_gelu_dropout,
    conv_group_norm,
    depthwise_conv2d,
    depthwise_separable,
)
from fusionrt.ops.cross_entropy import cross_entropy
from fusionrt.ops.dropout import bias_dropout_add, dropout_add, gelu_dropout, relu_dropout
from fusionrt.ops.embedding import embedding_position
from fusionrt.ops.ffn import ffn, geglu_mlp, swiglu_mlp
from fusionrt.ops.linear import (
    linear_activation,
    linear_gelu,
    linear_gelu_dropout,
    linear_relu,
    linear_relu_dropout,
)
from fusionrt.ops.linear_cross_entropy import linear_cross_entropy
from fusionrt.ops.loss import bce_with_logits, huber_loss, kl_div, l1_loss, mse_loss, smooth_l1_loss
from fusionrt.ops.norm import (
    add_norm,
    add_rms_norm,
    dropout_add_layer_norm,
    layer_norm,
    layer_norm_gelu,
    layer_norm_relu,
    rms_norm,
    rms_norm_gelu,
)
from fusionrt.ops.pointwise import (
    add_mul_add,
    add_mul_exp,
    add_relu,
    add_sigmoid,
    bias_gelu,
    bias_relu,
    bias_silu,
    geglu,
    mish_scale,
    mul_tanh,
    multiply_relu,
    prelu_bias,
    reglu,
    scale_bias_sigmoid,
    swish_multiply,
)
from fusionrt.ops.qkv import qkv_heads
from fusionrt.ops.quantize import dequantize_int8, quantize_int8
from fusionrt.ops.reduction import (
    amax,
    amin,
    argmax,
    argmin,
    logsumexp,
    mean,
    mean_abs,
    norm,
    row_reduce,
    std,
    sum,
    sum_squared,
    var,
)
from fusionrt.ops.rotary import rotary_embedding
from fusionrt.ops.softmax import attention_dropout, log_softmax, softmax

# Other name -> op. `fusionrt.kernels` reads the same table.
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
    "fused_linear_gelu_dropout": "linear_gelu_dropout", "fused_swiglu": "swiglu_mlp",
}

if not TYPE_CHECKING:  # a type checker cannot evaluate it, and takes all that is imported here
    __all__ = sorted(op for ops in op_names.OPS.values() for op in ops)


def __getattr__(name: str) -> Any:
    """Aliases, and for `op_cuda`, `op_cpu` and `op_pytorch` the three ways to run an op."""
    if name in ALIASES:
        return globals()[ALIASES[name]]
    for suffix, attribute in (("_cuda", "cuda"), ("_cpu", "cpu"), ("_pytorch", "reference")):
        stem = name.removesuffix(suffix)
        op = OPS.get(ALIASES.get(stem, stem))
        if name.endswith(suffix) and op is not None:
            return getattr(op, attribute)
    raise AttributeError(f"module 'fusionrt.ops' has no op {name!r}")
