"""The unfused torch formula of every op: what tests, benchmarks and documentation compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from fusionrt.op_names import OPS

Tensor = torch.Tensor

relu = F.relu
leaky_relu = F.leaky_relu
elu = F.elu
gelu = F.gelu
silu = F.silu
sigmoid = torch.sigmoid
tanh = torch.tanh
mish = F.mish
softplus = F.softplus
hardswish = F.hardswish
hardsigmoid = F.hardsigmoid
relu6 = F.relu6


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def relu_squared(x: Tensor) -> Tensor:
    return torch.relu(x).square()


_ACTIVATIONS = {name: globals()[name] for name in OPS["activations"]}


def _activated(y: Tensor, activation: Any, residual: Any = None) -> Tensor:
    """Of y + residual, by the name of one of the catalogue's, or by a function of a tensor."""
    function = _ACTIVATIONS[activation] if isinstance(activation, str) else activation
    total = y if residual is None else y + residual
    made: Tensor = total if function is None else function(total)
    return made


def add_relu(a: Tensor, b: Tensor) -> Tensor:
    return torch.relu(a + b)


def multiply_relu(a: Tensor, b: Tensor) -> Tensor:
    return torch.relu(a * b)


def add_sigmoid(a: Tensor, b: Tensor) -> Tensor:
    return torch.sigmoid(a + b)


def mul_tanh(a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(a * b)


def bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(x + bias)


def bias_silu(x: Tensor, bias: Tensor) -> Tensor:
    return F.silu(x + bias)


def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x + bias, approximate=approximate)


def geglu(x: Tensor, gate: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate) * gate


def reglu(x: Tensor, gate: Tensor) -> Tensor:
    return torch.relu(x) * gate


def swish_multiply(x: Tensor, gate: Tensor, *, activate: str = "x") -> Tensor:
    return F.silu(x) * gate if activate == "x" else x * F.silu(gate)


def mish_scale(x: Tensor, scale: Any) -> Tensor:
    return scale * F.mish(x)


def prelu_bias(x: Tensor, alpha: Any, bias: Tensor, *, bias_first: bool = True) -> Tensor:
    alpha = torch.as_tensor(alpha, dtype=x.dtype, device=x.device).reshape(-1)
    return F.prelu(x + bias, alpha) if bias_first else F.prelu(x, alpha) + bias


def add_mul_exp(x: Tensor, y: Tensor) -> Tensor:
    return torch.exp((x + y) * 2)


def scale_bias_sigmoid(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.sigmoid(x * w + b)


def add_mul_add(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:
    return (x + y) * z + w


def _along(value: Any, x: Tensor, dim: int | None) -> Any:
    if dim is None or not isinstance(value, Tensor) or value.dim() != 1:
        return value
    return value.reshape((-1,) + (1,) * (x.dim() - 1 - dim % x.dim()))


def quantize_int8(x: Tensor, scale: Any, zero_point: Any = 0.0, *, dim: int | None = None) -> Tensor:
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    q = torch.round(x / _along(scale, x, dim) + _along(zero_point, x, dim)).clamp(-128, 127)
    return q.nan_to_num(0.0).to(torch.int8)


def dequantize_int8(q: Tensor, scale: Any, zero_point: Any = 0.0, *, dim: int | None = None,
                    dtype: torch.dtype = torch.float32) -> Tensor:
    return ((q.float() - _along(zero_point, q, dim)) * _along(scale, q, dim)).to(dtype)


def gelu_dropout(x: Tensor, p: float = 0.5, training: bool = True, *, approximate: str = "none"
                 ) -> Tensor:
    return F.dropout(F.gelu(x, approximate=approximate), p, training)


def relu_dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    return F.dropout(torch.relu(x), p, training)


def dropout_add(x: Tensor, residual: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    return F.dropout(x, p, training) + residual


def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, p: float = 0.5, training: bool = True
                     ) -> Tensor:
    return F.dropout(x + bias, p, training) + residual


def _norm_input(x: Tensor, residual: Tensor | None, dropout_p: float, training: bool) -> Tensor:
    x = F.dropout(x, dropout_p, training) if dropout_p else x
    return x if residual is None else x + residual


def layer_norm(x: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *,
               residual: Any = None, dropout_p: float = 0.0, training: bool = True, epilogue: Any = None,
               return_sum: bool = False, return_stats: bool = False) -> Any:
    total = _norm_input(x, residual, dropout_p, training)
    y, mean, rstd = torch.native_layer_norm(total, normalized_shape, weight, bias, eps)
    y = _activated(y, epilogue)
    outputs = y, *([total] if return_sum else []), *([mean, rstd] if return_stats else [])
    return outputs if len(outputs) > 1 else y


def rms_norm(x: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None, *,
             weight_offset: int = 0, residual: Any = None, dropout_p: float = 0.0, training: bool = True,
             epilogue: Any = None, return_sum: bool = False) -> Any:
    total = _norm_input(x, residual, dropout_p, training)
    weight = weight + weight_offset if weight is not None and weight_offset else weight
    y = _activated(F.rms_norm(total, normalized_shape, weight, eps), epilogue)
    return (y, total) if return_sum else y


def layer_norm_relu(x: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
                    ) -> Tensor:
    return torch.relu(F.layer_norm(x, normalized_shape, weight, bias, eps))


def layer_norm_gelu(x: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None,
                    eps: float = 1e-5, *, approximate: str = "none") -> Tensor:
    return F.gelu(F.layer_norm(x, normalized_shape, weight, bias, eps), approximate=approximate)


def rms_norm_gelu(x: Tensor, weight: Tensor, eps: float | None = None, *, weight_offset: int = 0,
                  approximate: str = "none") -> Tensor:
    y = rms_norm(x, weight.shape, weight, eps, weight_offset=weight_offset)
    return F.gelu(y, approximate=approximate)


def add_norm(x: Tensor, residual: Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5, *,
             epilogue: Any = None) -> tuple[Tensor, Tensor]:
    shape = x.shape[-1:] if weight is None else weight.shape
    return layer_norm(x, shape, weight, bias, eps, residual=residual, epilogue=epilogue, return_sum=True)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Any = None, eps: float | None = None, *,
                 weight_offset: int = 0, epilogue: Any = None) -> tuple[Tensor, Tensor]:
    shape = x.shape[-1:] if weight is None else weight.shape
    return rms_norm(x, shape, weight, eps, weight_offset=weight_offset, residual=residual, epilogue=epilogue,
                    return_sum=True)


def dropout_add_layer_norm(x: Tensor, residual: Tensor, weight: Any = None, bias: Any = None, p: float = 0.5,
                           training: bool = True, *, eps: float = 1e-5, return_sum: bool = False) -> Any:
    shape = x.shape[-1:] if weight is None else weight.shape
    return layer_norm(x, shape, weight, bias, eps, residual=residual, dropout_p=p, training=training,
                      return_sum=return_sum)


def _scores(x: Tensor, scale: Any, mask: Any, causal: bool) -> Tensor:
    x = x if scale is None else x * scale
    if causal:
        rows, columns = x.shape[-2:]
        x = x.masked_fill(~torch.ones(rows, columns, dtype=torch.bool, device=x.device).tril(columns - rows),
                          -float("inf"))
    if mask is None:
        return x
    return x.masked_fill(~mask, -float("inf")) if mask.dtype == torch.bool else x + mask


def softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, scale: Any = None,
            mask: Any = None, causal: bool = False, epilogue: Any = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    return _activated(torch.softmax(_scores(x, scale, mask, causal), dim), epilogue)


def log_softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, scale: Any = None,
                mask: Any = None, causal: bool = False, epilogue: Any = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    return _activated(torch.log_softmax(_scores(x, scale, mask, causal), dim), epilogue)


def attention_dropout(scores: Tensor, p: float = 0.5, training: bool = True, *, softmax: bool = True,
                      scale: Any = None, mask: Any = None, causal: bool = False) -> Tensor:
    y = torch.softmax(_scores(scores, scale, mask, causal), -1) if softmax else scores
    return F.dropout(y, p, training)


def attention_score(q: Tensor, k: Tensor, scale: Any = None) -> Tensor:
    return q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)


def attention_score_softmax(q: Tensor, k: Tensor, scale: Any = None, mask: Any = None) -> Tensor:
    scores = attention_score(q, k, scale)
    if mask is None or mask.is_floating_point():
        return torch.softmax(scores if mask is None else scores + mask, -1)
    return _softmax_of_some(scores, mask)


def _softmax_of_some(scores: Tensor, passed: Tensor) -> Tensor:
    """Zeros where nothing passes."""
    scores = scores.masked_fill(~passed, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, -1).masked_fill(~passed, 0)


attention_apply = torch.matmul


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Any = None, scale: Any = None,
              dropout_p: float = 0.0, training: bool = True, enable_gqa: bool = False, window: Any = None,
              alibi_slopes: Any = None, softcap: Any = None) -> Tensor:
    rows, columns, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) if enable_gqa else t for t in (k, v))
    scores = attention_score(q, k, scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    offset = 0 if window is None and alibi_slopes is None else columns - rows
    distance = torch.arange(columns, device=q.device) - torch.arange(rows, device=q.device)[:, None] - offset
    left, right = window if isinstance(window, tuple) else (None if window is None else window - 1,) * 2
    passed = distance <= (0 if causal else columns + rows if right is None else right)
    if left is not None:
        passed = passed & (distance >= -left)
    if mask is not None and mask.is_floating_point():
        scores, passed = scores + mask, passed & (mask != -torch.inf)
    elif mask is not None:
        passed = passed & mask
    if alibi_slopes is not None:
        scores = scores - (alibi_slopes[..., None, None] * distance.abs()).to(scores.dtype)
    return F.dropout(_softmax_of_some(scores, passed), dropout_p, training) @ v


def multihead_attention(q: Tensor, k: Tensor, v: Tensor, num_heads: int, **options: Any) -> Tensor:
    dim = q.shape[2] // num_heads
    heads = [t.unflatten(2, (n, -1)).transpose(1, 2) for t, n in (
        (q, num_heads), (k, k.shape[2] // dim), (v, k.shape[2] // dim))]
    return attention(*heads, **options).transpose(1, 2).flatten(2)


def cpu_fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, scale: Any = None) -> Tensor:
    return attention(q, k, v, mask=None if mask is None else mask != 0, scale=scale)


def optimized_cpu_attention(q: Tensor, k: Tensor, v: Tensor, chunk_size: int = 64, mask: Any = None,
                            scale: Any = None) -> Tensor:
    return cpu_fused_attention(q, k, v, mask, scale)


sum = torch.sum
mean = torch.mean
amax = torch.amax
amin = torch.amin
argmax = torch.argmax
argmin = torch.argmin


def row_reduce(x: Tensor, dim: Any = None, map: Any = None, op: str = "sum", keepdim: bool = False) -> Tensor:
    dims = tuple(range(x.dim())) if dim is None else dim
    reduce: Any = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}[op]
    return reduce(x if map is None else map(x), dims, keepdim)


def sum_squared(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return torch.sum(x.square(), dim, keepdim)


def mean_abs(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return torch.mean(x.abs(), dim, keepdim)


def var(x: Tensor, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Tensor:
    return torch.var(x, dim, correction=correction, keepdim=keepdim)


def std(x: Tensor, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Tensor:
    return torch.std(x, dim, correction=correction, keepdim=keepdim)


def norm(x: Tensor, p: float = 2, dim: Any = None, keepdim: bool = False, *,
         dtype: torch.dtype | None = None) -> Tensor:
    return torch.linalg.vector_norm(x, p, dim, keepdim, dtype=dtype)


def logsumexp(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return torch.logsumexp(x, tuple(range(x.dim())) if dim is None else dim, keepdim)


def batch_norm(x: Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None,
               bias: Any = None, training: bool = False, momentum: Any = 0.1, eps: float = 1e-5, *,
               num_batches_tracked: Any = None, residual: Any = None, epilogue: Any = None) -> Tensor:
    if num_batches_tracked is not None and training:
        num_batches_tracked.add_(1)
    factor = 1 / float(num_batches_tracked) if momentum is None else momentum
    y = F.batch_norm(x, running_mean, running_var, weight, bias, training, factor, eps)
    return _activated(y, epilogue, residual)


def batch_norm_relu(x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, eps: float = 1e-5
                    ) -> Tensor:
    return torch.relu(F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps))


def instance_norm(x: Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None,
                  bias: Any = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5, *,
                  residual: Any = None, epilogue: Any = None) -> Tensor:
    y = F.instance_norm(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    return _activated(y, epilogue, residual)


def group_norm(x: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *,
               residual: Any = None, epilogue: Any = None) -> Tensor:
    return _activated(F.group_norm(x, num_groups, weight, bias, eps), epilogue, residual)


def _weighted(losses: Tensor, weight: Any, reduction: str) -> Tensor:
    """As torch's from 2.7 on, that takes a weight of the losses' shape."""
    losses, weight = losses * weight, torch.zeros_like(losses) + weight
    if reduction == "none":
        return losses
    return losses.sum() / weight.sum() if reduction == "mean" else losses.sum()


# With the ops' parameters: third in torch's stand the deprecated `size_average` and `reduce`.
def mse_loss(input: Tensor, target: Tensor, reduction: str = "mean", weight: Any = None) -> Tensor:
    if weight is None:
        return F.mse_loss(input, target, reduction=reduction)
    return _weighted(F.mse_loss(input, target, reduction="none"), weight, reduction)


def l1_loss(input: Tensor, target: Tensor, reduction: str = "mean", weight: Any = None) -> Tensor:
    if weight is None:
        return F.l1_loss(input, target, reduction=reduction)
    return _weighted(F.l1_loss(input, target, reduction="none"), weight, reduction)


def smooth_l1_loss(input: Tensor, target: Tensor, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    return F.smooth_l1_loss(input, target, reduction=reduction, beta=beta)


def huber_loss(input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0,
               weight: Any = None) -> Tensor:
    if weight is None:
        return F.huber_loss(input, target, reduction=reduction, delta=delta)
    losses = F.huber_loss(input, target, reduction="none", delta=delta) * weight
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


def kl_div(input: Tensor, target: Tensor, reduction: str = "mean", log_target: bool = False) -> Tensor:
    return F.kl_div(input, target, reduction=reduction, log_target=log_target)


def bce_with_logits(input: Tensor, target: Tensor, weight: Any = None, reduction: str = "mean",
                    pos_weight: Any = None) -> Tensor:
    return F.binary_cross_entropy_with_logits(input, target, weight, None, None, reduction, pos_weight)


def cross_entropy(input: Tensor, target: Tensor, weight: Any = None, ignore_index: int = -100,
                  reduction: str = "mean", label_smoothing: float = 0.0, *, z_loss: float = 0.0,
                  softcap: float | None = None, inplace_backward: bool = False) -> Tensor:
    logits = input if softcap is None else softcap * torch.tanh(input / softcap)
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if not z_loss:
        return F.cross_entropy(logits, target, weight, reduction=reduction, **options)
    losses = F.cross_entropy(logits, target, weight, reduction="none", **options)
    counted = torch.ones_like(losses) > 0 if target.is_floating_point() else target != ignore_index
    losses = losses + z_loss * logits.logsumexp(min(1, logits.dim() - 1)).square().where(counted, 0)
    if reduction != "mean":
        return losses if reduction == "none" else losses.sum()
    if weight is not None and not target.is_floating_point():
        return losses.sum() / weight[target[counted]].sum()
    return losses.sum() / counted.sum()


def linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, bias: Any = None, *,
                         class_weight: Any = None, **options: Any) -> Tensor:
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    rows = target.flatten(0, -2) if target.is_floating_point() else target.flatten()
    losses = cross_entropy(logits, rows, class_weight, **options)
    return losses.view(hidden.shape[:-1]) if losses.dim() else losses


def rotary_embedding(q: Tensor, k: Any = None, cos: Any = None, sin: Any = None, *,
                     interleaved: bool = False, offset: int = 0, position_ids: Any = None,
                     rotary_dim: int | None = None, layout: str = "bshd", inplace: bool = False,
                     base: float = 10000.0, scaling: float = 1.0) -> Any:
    n, heads = rotary_dim or q.shape[-1], -3 if layout == "bhsd" else -2
    length, positions = q.shape[-5 - heads], position_ids
    if positions is None:
        positions = torch.arange(offset, offset + length, device=q.device)
    if cos is None:
        frequencies = base ** -(torch.arange(0, n, 2, dtype=torch.float64, device=q.device) / n) / scaling
        angles = positions.double()[..., None] * frequencies
        cos, sin = angles.cos(), angles.sin()
    elif position_ids is not None:
        cos, sin = cos[positions], sin[positions]
    else:
        cos, sin = cos[..., offset:offset + length, :], sin[..., offset:offset + length, :]
    if cos.shape[-1] != n:
        cos, sin = (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin))
    cos, sin = (t.unsqueeze(heads).to(q.dtype) for t in (cos, sin))

    def rotated(x: Tensor) -> Tensor:
        turned = x[..., :n]
        if interleaved:
            other = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
        else:
            other = torch.cat((-turned[..., n // 2:], turned[..., :n // 2]), -1)
        y = torch.cat((turned * cos + other * sin, x[..., n:]), -1)
        return x.copy_(y) if inplace else y

    return rotated(q) if k is None else (rotated(q), rotated(k))


def qkv_heads(qkv: Tensor, num_heads: int, num_kv_heads: Any = None, bias: Any = None, cos: Any = None,
              sin: Any = None, *, base: Any = None, **rotary: Any) -> Any:
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    dim = qkv.shape[2] // (num_heads + 2 * kv_heads)
    parts = (qkv if bias is None else qkv + bias).split([n * dim for n in (num_heads, kv_heads, kv_heads)], 2)
    q, k, v = (t.unflatten(2, (-1, dim)) for t in parts)
    if cos is not None or base is not None:
        q, k = rotary_embedding(q, k, cos, sin, base=base or 10000.0, **rotary)
    return tuple(t.transpose(1, 2) for t in (q, k, v))


def embedding_position(tokens: Tensor, weight: Tensor, position_weight: Any = None, *, scale: float = 1.0,
                       layer_norm: Any = None, dropout_p: float = 0.0, training: bool = True,
                       padding_idx: int | None = None, token_type: Any = None, token_type_weight: Any = None,
                       position_ids: Any = None) -> Tensor:
    x = F.embedding(tokens, weight, padding_idx)
    x = x if scale == 1 else x * scale
    if position_weight is not None:
        length = tokens.shape[-1:]
        first = position_weight[:length.numel()].reshape(*length, weight.shape[1])
        x = x + (first if position_ids is None else F.embedding(position_ids, position_weight))
    if token_type_weight is not None:
        x = x + (token_type_weight[0] if token_type is None else F.embedding(token_type, token_type_weight))
    if layer_norm is not None:
        gamma, beta, *eps = layer_norm
        x = F.layer_norm(x, x.shape[-1:], gamma, beta, *eps)
    return F.dropout(x, dropout_p, training) if dropout_p else x


def linear_activation(x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, *,
                      dropout_p: float = 0.0, residual: Any = None, training: bool = True) -> Tensor:
    y = F.dropout(_activated(F.linear(x, weight, bias), activation), dropout_p, training)
    return y if residual is None else residual + y


def linear_relu(x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    return torch.relu(F.linear(x, weight, bias))


def linear_gelu(x: Tensor, weight: Tensor, bias: Any = None, *, approximate: str = "none") -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


def linear_relu_dropout(x: Tensor, weight: Tensor, bias: Any = None, p: float = 0.5, training: bool = True
                        ) -> Tensor:
    return F.dropout(torch.relu(F.linear(x, weight, bias)), p, training)


def linear_gelu_dropout(x: Tensor, weight: Tensor, bias: Any = None, p: float = 0.5, training: bool = True, *,
                        approximate: str = "none") -> Tensor:
    return F.dropout(F.gelu(F.linear(x, weight, bias), approximate=approximate), p, training)


def ffn(x: Tensor, weight1: Tensor, bias1: Any, weight2: Tensor, bias2: Any, activation: Any = "gelu", *,
        dropout_p: float = 0.0, training: bool = True, recompute: bool = False) -> Tensor:
    hidden = _activated(F.linear(x, weight1, bias1), activation)
    return F.linear(F.dropout(hidden, dropout_p, training), weight2, bias2)


def _gate_and_up(x: Tensor, gate: Tensor, up: Any, gate_bias: Any, up_bias: Any) -> Any:
    """Two products, or the halves of one."""
    if up is None:
        return F.linear(x, gate, gate_bias).chunk(2, -1)
    return F.linear(x, gate, gate_bias), F.linear(x, up, up_bias)


def linear_swiglu(x: Tensor, gate_weight: Tensor, up_weight: Any = None, *, gate_bias: Any = None,
                  up_bias: Any = None) -> Tensor:
    gate, up = _gate_and_up(x, gate_weight, up_weight, gate_bias, up_bias)
    return F.silu(gate) * up


def swiglu_mlp(x: Tensor, gate_weight: Tensor, up_weight: Any, down_weight: Tensor, *, gate_bias: Any = None,
               up_bias: Any = None, down_bias: Any = None, recompute: bool = False) -> Tensor:
    gate, up = _gate_and_up(x, gate_weight, up_weight, gate_bias, up_bias)
    return F.linear(F.silu(gate) * up, down_weight, down_bias)


def geglu_mlp(x: Tensor, gate_weight: Tensor, up_weight: Any, down_weight: Tensor, *, gate_bias: Any = None,
              up_bias: Any = None, down_bias: Any = None, approximate: str = "none", recompute: bool = False
              ) -> Tensor:
    gate, up = _gate_and_up(x, gate_weight, up_weight, gate_bias, up_bias)
    return F.linear(F.gelu(gate, approximate=approximate) * up, down_weight, down_bias)


_CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


def conv_activation(x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, *, stride: Any = 1,
                    padding: Any = 0, dilation: Any = 1, groups: int = 1, dropout_p: float = 0.0,
                    residual: Any = None, training: bool = True) -> Tensor:
    y = _activated(_CONVOLUTIONS[x.dim()](x, weight, bias, stride, padding, dilation, groups), activation)
    y = F.dropout(y, dropout_p, training)
    return y if residual is None else residual + y


def conv_gelu_dropout(x: Tensor, weight: Tensor, bias: Any = None, p: float = 0.5, training: bool = True, *,
                      approximate: str = "none", **options: Any) -> Tensor:
    activation = "gelu_tanh" if approximate == "tanh" else "gelu"
    return conv_activation(x, weight, bias, activation, dropout_p=p, training=training, **options)


def conv_bn_act(x: Tensor, weight: Tensor, bias: Any, running_mean: Any, running_var: Any,
                bn_weight: Any = None, bn_bias: Any = None, *, activation: Any = "relu", residual: Any = None,
                training: bool = False, momentum: float = 0.1, eps: float = 1e-5, **options: Any) -> Tensor:
    y = conv_activation(x, weight, bias, **options)
    y = F.batch_norm(y, running_mean, running_var, bn_weight, bn_bias, training, momentum, eps)
    return _activated(y, activation, residual)


conv2d_bn_act = conv_bn_act


def conv2d_batchnorm_relu(x: Tensor, conv_weight: Tensor, conv_bias: Any, bn_weight: Any, bn_bias: Any,
                          bn_mean: Any, bn_var: Any, eps: float = 1e-5, **options: Any) -> Tensor:
    return conv_bn_act(x, conv_weight, conv_bias, bn_mean, bn_var, bn_weight, bn_bias, eps=eps, **options)


def conv2d_batchnorm(x: Tensor, conv_weight: Tensor, conv_bias: Any, bn_weight: Any, bn_bias: Any,
                     bn_mean: Any, bn_var: Any, eps: float = 1e-5, **options: Any) -> Tensor:
    return conv_bn_act(x, conv_weight, conv_bias, bn_mean, bn_var, bn_weight, bn_bias, activation=None,
                       eps=eps, **options)


def conv_group_norm(x: Tensor, weight: Tensor, bias: Any, num_groups: int, gn_weight: Any = None,
                    gn_bias: Any = None, *, activation: Any = None, residual: Any = None, eps: float = 1e-5,
                    **options: Any) -> Tensor:
    y = F.group_norm(conv_activation(x, weight, bias, **options), num_groups, gn_weight, gn_bias, eps)
    return _activated(y, activation, residual)


def depthwise_conv2d(x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **options: Any
                     ) -> Tensor:
    return conv_activation(x, weight, bias, activation, groups=x.shape[1], **options)


def depthwise_separable(x: Tensor, depthwise_weight: Tensor, pointwise_weight: Tensor,
                        depthwise_bias: Any = None, pointwise_bias: Any = None, *,
                        depthwise_norm: Any = None, pointwise_norm: Any = None,
                        activation: Any = "relu", pointwise_activation: Any = "relu", residual: Any = None,
                        stride: Any = 1, padding: Any = 1, dilation: Any = 1, training: bool = False,
                        momentum: float = 0.1, eps: float = 1e-5) -> Tensor:
    def layer(x: Tensor, weight: Tensor, bias: Any, norm: Any, activation: Any, residual: Any, **options: Any
              ) -> Tensor:
        if norm is None:
            return conv_activation(x, weight, bias, activation, residual=residual, **options)
        return conv_bn_act(x, weight, bias, *norm, activation=activation, residual=residual,
                           training=training, momentum=momentum, eps=eps, **options)

    y = layer(x, depthwise_weight, depthwise_bias, depthwise_norm, activation, None, stride=stride,
              padding=padding, dilation=dilation, groups=x.shape[1])
    return layer(y, pointwise_weight, pointwise_bias, pointwise_norm, pointwise_activation, residual)
