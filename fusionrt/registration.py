"""What those who watch a call see of it: an op of torch's own, or a function of autograd's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
        raise NotImplementedError(f"{ctx.op.name}: forward-mode differentiation (jvp, jacfwd, forward_ad) is "
                                  "not implemented; use reverse mode (grad, vjp, jacrev)")
