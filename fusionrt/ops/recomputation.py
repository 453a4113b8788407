"""Results that a backward pass makes again, instead of keeping them.

Who makes such a result says how that is done (`is_made_by`); who saves it for a gradient saves that
(`sparing`). It pays where what it is made of is kept anyway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from fusionrt.watching import is_watched

Tensor = torch.Tensor


class Recipe(NamedTuple):
    make: Callable[[], Tensor]
    sources: tuple[Tensor, ...]
    versions: tuple[int, ...]


_recipes: Any = WeakIdKeyDictionary()  # of the results that are alive, with their versions


def is_made_by(result: Tensor, make: Callable[..., Tensor], *sources: Tensor) -> None:
    """make(*sources) gives the result, without a gradient."""
    if not is_watched():
        kept = tuple(t.detach() for t in sources)
        _recipes[result] = result._version, _recipe(torch.no_grad()(lambda: make(*kept)), *kept)


def sparing(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """What is done within saves x, for a gradient, by how it is made, if that is known."""
    version, recipe = (None, None) if is_watched() else _recipes.get(x, (None, None))
    if recipe is None or version != x._version:
        return contextlib.nullcontext()
    place, shape, strides = x.data_ptr(), x.shape, x.stride()  # x itself is not to live on

    def pack(t: Tensor) -> Any:
        is_x = t.data_ptr() == place and t.shape == shape and t.stride() == strides
        if is_x:
            return recipe
        t = t.detach()  # torch knows where it comes from
        return _recipe(lambda: t, t)

    return saved_tensors_hooks(pack, _made)


def _recipe(make: Callable[[], Tensor], *sources: Tensor) -> Recipe:
    return Recipe(make, sources, tuple(t._version for t in sources))


def _made(recipe: Recipe) -> Tensor:
    if tuple(t._version for t in recipe.sources) != recipe.versions:  # hooks take this check from torch
        raise RuntimeError("fusionrt: one of the tensors needed for a gradient has been modified by an "
                           "inplace operation since")
    return recipe.make()
