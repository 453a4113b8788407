"""A second tree of modules on the same tensors."""

from __future__ import annotations

import copy
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils import _pytree as pytree

_sharing: weakref.WeakSet[Module] = weakref.WeakSet()  # the modules of all that was cloned, and of the clones


def shared_clone(model: Module) -> Module:
    """The same modules once more: of the same classes, on the same parameters and buffers, with Python
    attributes of their own.

    Buffers are shared by their places: one that is assigned anew, registered, or moved with the model, is so
    in both.
    What is shared or tied within the model is so within the clone. Hooks run in both; what is registered
    or removed later concerns one of them. An attribute that cannot be copied (a lock, a handle) is shared,
    as are TorchScript's modules and those that are not among the model's own.
    """
    clones = {id(m): object.__new__(type(m)) for m in model.modules()
              if not isinstance(m, torch.jit.ScriptModule)}
    memo: dict[int, Any] = {id(x): x for m in model.modules() for x in pytree.tree_leaves(vars(m))
                            if isinstance(x, (Tensor, Module))} | clones
    for module in model.modules():
        clone = clones.get(id(module))
        if clone is not None:
            vars(clone).update({name: (_hooks if name.endswith("_hooks") else _copied)(value, memo)
                                for name, value in vars(module).items()}, _buffers=module._buffers,
                               _non_persistent_buffers_set=module._non_persistent_buffers_set)
    _sharing.update(model.modules())
    _sharing.update(clones.values())
    return clones.get(id(model), model)


def _hooks(hooks: Any, memo: dict[int, Any]) -> Any:
    """Methods of the model's own modules become the clones'. Others stay what they are: a recorder that was
    copied would keep what it has seen out of its owner's sight."""
    own = copy.copy(hooks)
    for key, hook in own.items() if isinstance(own, dict) else ():
        if isinstance(hook, types.MethodType) and id(hook.__self__) in memo:
            own[key] = types.MethodType(hook.__func__, memo[id(hook.__self__)])
    return own


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    known = len(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # of whatever class the attribute is
        for key in list(memo)[known:]:  # half of a copy: nobody must find it
            del memo[key]
        return value


class Separate:
    """What a converted module has in place of a method of its class that changes parameters or the places of
    buffers. Where others see the same ones, the original above all, the module takes its own before."""

    is_copied = False

    def __init__(self, module: Module) -> None:
        self.module = module

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a deep copy or a pickle: the original may have been copied along."""
        vars(self).update(state, is_copied=True)

    def part(self) -> None:
        """As new tensors on the same memory. Hooks and attributes of parameters are carried over."""
        if self.is_copied or is_shared(self.module):
            own_tensors(self.module, hooks=True)


class SeparateMoves(Separate):
    """In the place of `_apply`, by which torch moves and casts (`to`, `cuda`, `half`)."""

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
        if _changes(self.module, fn):
            self.part()
        return type(self.module)._apply(self.module, fn, recurse)


class SeparateLoads(Separate):
    """In the place of `_load_from_state_dict`, for what `load_state_dict(assign=True)` assigns."""

    def __call__(self, state: Any, prefix: str, local_metadata: Any, *args: Any, **kwargs: Any) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            self.part()
        type(self.module)._load_from_state_dict(self.module, state, prefix, local_metadata, *args, **kwargs)


def is_shared(module: Module) -> bool:
    """Whether modules that are not the module's own have its parameters or its places of buffers."""
    if not _sharers(module):
        return False
    gc.collect()  # whoever let go of an original must not find it in the way
    return bool(_sharers(module))


def _sharers(module: Module) -> list[Module]:
    own = set(module.modules())
    places = {id(part._buffers) for part in own if part._buffers}
    params = {id(p) for p in module.parameters()}
    return [m for m in _sharing if m not in own and (
        id(m._buffers) in places or any(id(p) in params for p in m._parameters.values()))]


def _changes(module: Module, fn: Callable[[Tensor], Tensor]) -> bool:
    """By the smallest tensor of each kind: `fn` of all would copy a model twice."""
    kinds: dict[Any, Tensor] = {}
    for t in (*module.parameters(), *module.buffers()):
        kind = t.dtype, t.device, t.dim()
        if kind not in kinds or t.numel() < kinds[kind].numel():
            kinds[kind] = t
    with torch.no_grad():
        return any(fn(t) is not t for t in kinds.values())


def own_tensors(module: Module, hooks: bool = False) -> None:
    """Give a clone parameters of its own, still on the same memory, and places of its own for buffers; tied
    parameters stay tied. `hooks`: those of parameters serve both from now on."""
    own: dict[int, Parameter] = {}
    for part in module.modules():
        part._buffers = dict(part._buffers)
        part._non_persistent_buffers_set = set(part._non_persistent_buffers_set)
        for name, p in part._parameters.items():
            if p is None:
                continue
            if id(p) not in own:
                own[id(p)] = _own(p, hooks)
            part._parameters[name] = own[id(p)]


def _own(p: Parameter, hooks: bool) -> Parameter:
    made = Parameter(p.detach(), p.requires_grad)
    vars(made).update(vars(p))
    made.grad = None if p.grad is None else p.grad.detach()
    if hooks:
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(p, kind):
                setattr(made, kind, getattr(p, kind))
    return made
