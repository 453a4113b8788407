"""Optimizers of torch.optim whose step is a handful of launches, on a GPU and on a CPU.

    optimizer = fusionrt.optim.AdamW(model.parameters(), lr=3e-4, clip_grad_norm=1.0)

Drop-in: the arguments, groups, hooks and checkpoints are torch's. See `FusedOptimizer` for what they add.

One file an idea: `optimizer` (the step, torch's protocol), `bucket` and `table` (which tensors a launch
serves), `state` and `quantised` (what is kept of a parameter), `kernels` (the launches), `cpu_text` (their
Numba texts), `adam`, `sgd`, `lion` (the rules), `clip`, `average`, `precompile` (for a warm-up).
"""

from __future__ import annotations

from fusionrt.optim.adam import Adam, AdamW
from fusionrt.optim.average import ema_update_, get_ema_multi_avg_fn
from fusionrt.optim.clip import clip_grad_norm_
from fusionrt.optim.lion import Lion
from fusionrt.optim.optimizer import FusedOptimizer
from fusionrt.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "FusedOptimizer", "Lion", "clip_grad_norm_", "ema_update_",
           "get_ema_multi_avg_fn"]
