"""Which calls nobody misses whose results nobody uses: they have no effect, and draw no random numbers, as
without them those that are drawn later would be others."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fusionrt.convert.effects import NONE, effect

_DRAWS = frozenset({
    "rrelu", "rrelu_with_noise", "bernoulli", "multinomial", "binomial", "normal", "log_normal", "poisson",
    "uniform", "exponential", "geometric", "cauchy", "gumbel_softmax", "fractional_max_pool2d",
    "fractional_max_pool3d", "fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"})
# Those that may: the place of the argument `dropout_p`.
_DROPOUT_AT = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10, "self_attention": 6}
# Those that do so between their layers.
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
# Those that draw in training alone: the place of the argument that says so.
_TRAINING_AT = {"multi_head_attention_forward": 13, "rrelu": 3, **dict.fromkeys((
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
    "feature_alpha_dropout"), 2)}


def is_pure(node: Node) -> bool:
    return effect(node) == NONE and not draws(node)


def draws(node: Node) -> bool:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
        return True
    name = str(getattr(target, "__name__", target)).partition(".")[0].rstrip("_")  # of an overload as well
    at, args = _TRAINING_AT.get(name, len(node.args)), list(node.args)
    training = args[at] if len(args) > at else node.kwargs.get("training", node.kwargs.get("train"))
    if training is False:
        return False
    if name in _RECURRENT:  # packed or not: a dropout, and whether it is training
        p = next((k for k, a in enumerate(args) if isinstance(a, float)), None)
        return p is None or bool(args[p] and args[p + 1])
    if name in _DROPOUT_AT:
        at = _DROPOUT_AT[name]
        given: Any = node.args[at] if len(node.args) > at else node.kwargs.get("dropout_p", 0.0)
        return bool(given != 0.0)
    ours = getattr(target, "operator", None)  # of a fused function
    return (name.startswith("rand") or "dropout" in name or name in _DRAWS
            or bool(node.kwargs.get("dropout_p")) or bool(getattr(ours, "streams", ())))
