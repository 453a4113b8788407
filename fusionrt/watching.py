"""Who watches a call, and must see what it does: autograd, transforms, modes and tracers of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

PLAIN = (torch.Tensor, torch.nn.Parameter)

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# Who watches of whom no guard knows; as text too, for where one more call would be too much.
UNGUARDED = "_frt_forward_ad._current_level >= 0 or _frt_modes()"
SCOPE = {"_frt_forward_ad": forward_ad, "_frt_modes": dispatch_modes}
unguarded: Callable[[], bool] = eval(f"lambda: {UNGUARDED}", dict(SCOPE))
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
tracing_state: Callable[[], object | None] = torch._C._get_tracing_state
is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # by torch.func
# Of a backward pass, with what each says as a rule: of the thread of a device a guard sees no keys of modes
# and transforms.
OF_BACKWARD = ((torch.is_grad_enabled, False), (dispatch_modes, 0), (transforms_active, False))


def is_watched() -> bool:
    """Whether torch must see each operation: Dynamo, torch.jit.trace, a dispatch mode (FakeTensorMode,
    make_fx, selective checkpointing), a torch.func transform, forward-mode differentiation."""
    return bool(torch.compiler.is_compiling() or dispatch_modes() or is_transformed()
                or tracing_state() is not None)


def is_transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, works on the operands."""
    return transforms_active() or forward_ad._current_level >= 0


def seen_by_torch(*tensors: torch.Tensor | None) -> bool:
    """Whether torch, or a subclass of its tensors, must see each operation."""
    return is_watched() or any(t is not None and type(t) not in PLAIN for t in tensors)


def is_recorded(*values: Any) -> bool:
    """Whether autograd records what is made of these arguments."""
    return torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in values)


def no_transforms(op: str, name: str, tensor: torch.Tensor) -> None:
    """Refuse what a transform of torch.func stands in for: it has no memory of its own."""
    if is_wrapped(tensor):
        raise NotImplementedError(f"{op}: torch.func's transforms (vmap, grad) of {name} are not "
                                  "implemented; give the whole batch")
