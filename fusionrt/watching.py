"""Who watches a call, and must see what it does: autograd, transforms, modes and tracers of torch's. And what
they see: an op of torch's own, or a function of autograd's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

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


_library = torch.library.Library("fusionrt", "FRAGMENT")


def registered(schema: str, run: Callable[..., Any], fake: Callable[..., Any],
               gradient: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
               vmap: Callable[..., Any] | None = None) -> Any:
    """An op of torch's, to be called. `fake` only allocates its results; `gradient`: what runs backwards, and
    what sets up the context for it."""
    name = schema.partition("(")[0]
    _library.define(schema)
    for device in ("CPU", "CUDA"):
        _library.impl(name, run, device)
    qualified = f"fusionrt::{name}"
    torch.library.register_fake(qualified, fake, lib=_library)
    if gradient is not None:
        backward, setup_context = gradient
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_library)
    if vmap is not None:
        torch.library.register_vmap(qualified, vmap, lib=_library)
    return getattr(torch.ops.fusionrt, name).default


class Transformed(torch.autograd.Function):
    """For torch.func, which does not take what `register_autograd` makes, and for forward mode, which loses
    its tangents there. `ctx.op`: the op."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        no_forward_mode(ctx.op.name)


def no_forward_mode(op: str) -> NoReturn:
    raise NotImplementedError(f"{op}: forward-mode differentiation (jvp, jacfwd, forward_ad) is not "
                              "implemented; use reverse mode (grad, vjp, jacrev)")


def no_transforms(op: str, name: str, tensor: torch.Tensor) -> None:
    """Refuse what a transform of torch.func stands in for: it has no memory of its own."""
    if is_wrapped(tensor):
        raise NotImplementedError(f"{op}: torch.func's transforms (vmap, grad) of {name} are not "
                                  "implemented; give the whole batch")
