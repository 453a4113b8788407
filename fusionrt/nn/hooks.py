"""Where torch keeps the hooks of a module, and those of all modules."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module as torch_module

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS: list[dict[int, Any]] = [getattr(torch_module, f"_global{name}") for name in HOOKS]


def has_hooks(module: Any) -> bool:
    """Whether a call of the module runs any, its own or one of all modules."""
    return any(GLOBAL_HOOKS) or bool(module._forward_hooks or module._forward_pre_hooks
                                     or module._backward_hooks or module._backward_pre_hooks)
