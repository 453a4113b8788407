"""The unfused torch formula of every op: what tests, benchmarks and documentation compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

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


def swish_multiply(x: Tensor, gate: Tensor) -> Tensor:
    return F.silu(x) * gate


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
