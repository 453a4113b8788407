"""The public ops by the module of `fusionrt.ops` that has them: the one list, which costs no import."""

OPS = {
    "activations": (
        "elu", "gelu", "gelu_tanh", "hardsigmoid", "hardswish", "leaky_relu", "mish", "relu", "relu6",
        "relu_squared", "sigmoid", "silu", "softplus", "tanh"),
    "attention": (
        "attention", "attention_apply", "attention_score", "attention_score_softmax", "cpu_fused_attention",
        "multihead_attention", "optimized_cpu_attention"),
    "batch_norm": ("batch_norm", "batch_norm_relu", "group_norm", "instance_norm"),
    "convolution": (
        "conv2d_batchnorm", "conv2d_batchnorm_relu", "conv2d_bn_act", "conv_activation", "conv_bn_act",
        "conv_gelu_dropout", "conv_group_norm", "depthwise_conv2d", "depthwise_separable"),
    "cross_entropy": ("cross_entropy",),
    "dropout": ("bias_dropout_add", "dropout_add", "gelu_dropout", "relu_dropout"),
    "embedding": ("embedding_position",),
    "ffn": ("ffn", "geglu_mlp", "swiglu_mlp"),
    "linear": (
        "linear_activation", "linear_gelu", "linear_gelu_dropout", "linear_relu", "linear_relu_dropout"),
    "linear_cross_entropy": ("linear_cross_entropy",),
    "loss": ("bce_with_logits", "huber_loss", "kl_div", "l1_loss", "mse_loss", "smooth_l1_loss"),
    "norm": (
        "add_norm", "add_rms_norm", "dropout_add_layer_norm", "layer_norm", "layer_norm_gelu",
        "layer_norm_relu", "rms_norm", "rms_norm_gelu"),
    "pointwise": (
        "add_mul_add", "add_mul_exp", "add_relu", "add_sigmoid", "bias_gelu", "bias_relu", "bias_silu",
        "geglu", "mish_scale", "mul_tanh", "multiply_relu", "prelu_bias", "reglu", "scale_bias_sigmoid",
        "swish_multiply"),
    "qkv": ("qkv_heads",),
    "quantize": ("dequantize_int8", "quantize_int8"),
    "reduction": (
        "amax", "amin", "argmax", "argmin", "logsumexp", "mean", "mean_abs", "norm", "row_reduce", "std",
        "sum", "sum_squared", "var"),
    "rotary": ("rotary_embedding",),
    "softmax": ("attention_dropout", "log_softmax", "softmax"),
}
