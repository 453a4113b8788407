"""Children whose tensors a module reads, for kernels that do the work of several, instead of calling them.

Where their tensors do not say all that a call would compute (another forward, as of LoRA's layers,
SyncBatchNorm and quantized ones; hooks, by which weight_norm, prune and others work), they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fusionrt.activation import finishing
from fusionrt.nn.hooks import has_hooks
from fusionrt.ops.dropout import scale_of_kept
from fusionrt.ops.ffn import ffn, gating, geglu_mlp, swiglu_mlp

Tensor = torch.Tensor
_LINEAR = nn.Linear.forward


def is_read(child: Any, *forwards: Callable[..., Any]) -> bool:
    """Whether a call of `child` is one of these functions of it and nothing else, or there is no child.

    The classes that parametrize makes have torch's forward, and tensors that are computed when they are read.
    """
    return child is None or (
        getattr(child.forward, "__func__", None) in forwards and not has_hooks(child))


def feed_forward(x: Tensor, first: Any, second: Any, activation: Any, dropout_p: float, training: bool,
                 recompute: bool) -> Tensor:
    """second(dropout(activation(first(x)))) of two linear layers."""
    found: Tensor
    if is_read(first, _LINEAR) and is_read(second, _LINEAR):
        found = ffn(x, first.weight, first.bias, second.weight, second.bias, activation,
                    dropout_p=dropout_p, training=training, recompute=recompute)
    else:
        found = second(finished("ffn", first(x), activation, dropout_p, training))
    return found


def gated_feed_forward(x: Tensor, gate: Any, up: Any, down: Any, activation: str, recompute: bool) -> Tensor:
    """down(activation(gate(x)) * up(x)) of three linear layers; without `up`, `gate` has both."""
    found: Tensor
    op = "swiglu_mlp" if activation == "silu" else "geglu_mlp"
    if not (is_read(gate, _LINEAR) and is_read(up, _LINEAR) and is_read(down, _LINEAR)):
        parts = gate(x).chunk(2, -1) if up is None else (gate(x), up(x))
        found = down(gating(op, activation)(*parts))
        return found
    weights = gate.weight, None if up is None else up.weight, down.weight
    options = {"gate_bias": gate.bias, "up_bias": None if up is None else up.bias, "down_bias": down.bias,
               "recompute": recompute}
    if activation == "silu":
        found = swiglu_mlp(x, *weights, **options)
    else:
        found = geglu_mlp(x, *weights, **options, approximate="tanh" if activation == "gelu_tanh" else "none")
    return found


def finished(op: str, x: Tensor, activation: Any, dropout_p: float = 0.0, training: bool = False) -> Tensor:
    """dropout(activation(x))."""
    scale = scale_of_kept(op, dropout_p, training)
    if activation is None and scale is None:
        return x
    numbers = () if scale is None else (float(dropout_p), scale)
    found: Tensor = finishing(op, activation, False, False, scale is not None)(x, *numbers)
    return found
