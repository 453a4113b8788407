"""A second tree of modules on the same tensors."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils import _pytree as pytree


def shared_clone(model: Module) -> Module:
    """The same modules once more: of the same classes, on the same parameters and buffers, with Python
    attributes of their own.

    Buffers are shared by their places: one that is assigned anew, or moved with the model, is so in both.
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
                                for name, value in vars(module).items()}, _buffers=module._buffers)
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


class SeparateMoves:
    """`_apply` of a converted module, by which torch moves and casts (`to`, `cuda`, `half`).

    Torch's own changes parameters in place, and they are the original's as well, as are the places of
    buffers: the converted module takes parameters and places of its own before.
    """

    def __init__(self, module: Module) -> None:
        self.module = module

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
        if _changes(self.module, fn):
            own_tensors(self.module)
        return type(self.module)._apply(self.module, fn, recurse)


def _changes(module: Module, fn: Callable[[Tensor], Tensor]) -> bool:
    """By the smallest tensor of each kind: `fn` of all would copy a model twice."""
    kinds: dict[Any, Tensor] = {}
    for t in (*module.parameters(), *module.buffers()):
        kind = t.dtype, t.device, t.dim()
        if kind not in kinds or t.numel() < kinds[kind].numel():
            kinds[kind] = t
    with torch.no_grad():
        return any(fn(t) is not t for t in kinds.values())


def own_tensors(module: Module) -> None:
    """Give a clone parameters of its own, still on the same memory, and places of its own for buffers; tied
    parameters stay tied."""
    own: dict[int, Parameter] = {}
    for part in module.modules():
        part._buffers = dict(part._buffers)
        for name, p in part._parameters.items():
            if p is None:
                continue
            if id(p) not in own:
                own[id(p)] = Parameter(p.detach(), p.requires_grad)
                own[id(p)].grad = None if p.grad is None else p.grad.detach()
            part._parameters[name] = own[id(p)]
