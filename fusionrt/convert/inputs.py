"""What a model is called with: as given, found by trying, and random variations of it."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Embedding, Module
from torch.utils import _pytree as pytree

from fusionrt.bench.kernel import split_inputs
from fusionrt.convert.contents import contents
from fusionrt.errors import first_line, one_line

MOST_TRIALS = 16
IMAGES_ON = ("cuda",)
PLAIN = 1e4   # numbers beyond that, such as those of additive masks, mean something


class Inputs(NamedTuple):
    """Arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}

    def fresh(self) -> Inputs:
        """For a model that may write into them. What autograd recorded is copied without its history, however
        deep it lies.

        Raises TypeError where something cannot be copied: a generator, a lock.
        """
        given, memo = (self.args, dict(self.kwargs)), dict[int, Any]()
        try:
            for t in contents([{"": given}]).tensors:
                if t.grad_fn is not None:
                    memo[id(t)] = copy.deepcopy(t.detach(), memo)
            return Inputs(*copy.deepcopy(given, memo))
        except Exception as error:  # of whatever class the argument is
            raise TypeError(f"the arguments {self.describe()} cannot be copied: {first_line(error, 200)}"
                            ) from error

    def map(self, function: Any) -> Inputs:
        """With every tensor replaced."""
        return Inputs(*pytree.tree_map_only(Tensor, function, (self.args, dict(self.kwargs))))

    def describe(self) -> str:
        """`(float32 [1, 3, 224, 224])`, `(input_ids=int64 [1, 128])`."""
        named = [f"{name}={_described(value)}" for name, value in self.kwargs.items()]
        return f"({', '.join([*map(_described, self.args), *named])})"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    return type(value).__name__


def are_inputs(value: Any) -> bool:
    """Whether it holds tensors; shapes hold numbers."""
    leaves = pytree.tree_leaves(dict(value) if isinstance(value, Mapping) else value)
    return any(isinstance(leaf, Tensor) for leaf in leaves)


def given(example_inputs: Any, device: torch.device | None) -> Inputs:
    """A tensor, a tuple or list of arguments, or a mapping of keyword arguments, on `device`."""
    args, kwargs = split_inputs(example_inputs)
    return Inputs(args, kwargs).map(lambda t: t.to(device) if device else t)


# -- found by trying -------------------------------------------------------------------------------

def find(model: Module, input_shape: Any, device: torch.device) -> Inputs:
    """Random inputs of these shapes that the model takes: floating numbers in the parameters' dtype, or
    integers below the vocabulary's size. It is called with each until it does not fail.

    Raises:
        TypeError: `input_shape` is neither a shape nor a list of shapes.
        ValueError: the model takes none of them.
    """
    shapes, failures = _shapes(input_shape), []
    for inputs in itertools.islice(_candidates(model, shapes, device), MOST_TRIALS):
        try:
            args, kwargs = inputs.fresh()
            model(*args, **kwargs)
            return inputs
        except Exception as error:  # whatever the model raises about them
            failures.append(f"{inputs.describe()}: {one_line(error, 200)}")
    raise ValueError(f"auto_convert_model: {type(model).__name__} takes no inputs of input_shape="
                     f"{input_shape}; give example_inputs. Tried:\n  " + "\n  ".join(failures))


def _shapes(input_shape: Any) -> list[tuple[int, ...]]:
    def is_shape(value: Any) -> bool:
        return isinstance(value, Sequence) and all(isinstance(n, int) and n > 0 for n in value)

    if isinstance(input_shape, Sequence) and input_shape and not isinstance(input_shape, str):
        if is_shape(input_shape):
            return [tuple(input_shape)]
        if all(is_shape(shape) for shape in input_shape):
            return [tuple(shape) for shape in input_shape]
    raise TypeError("auto_convert_model: input_shape must be a shape such as (1, 3, 224, 224), or a list of "
                    f"shapes, one for each argument, got {input_shape!r}")


def _candidates(model: Module, shapes: Sequence[tuple[int, ...]], device: torch.device) -> Iterator[Inputs]:
    """The likeliest first."""
    floating = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    sizes, likely = _vocabularies(model)
    random = torch.Generator().manual_seed(0)

    def tensor(shape: tuple[int, ...], integer: bool, size: int) -> Tensor:
        if integer:
            return torch.randint(size, shape, generator=random, device="cpu").to(device)
        return torch.randn(shape, generator=random, device="cpu").to(device, floating)

    trials = itertools.product(sizes, itertools.product((likely, not likely), repeat=len(shapes)))
    for size, kinds in trials:
        made = tuple(tensor(shape, integer, size) for shape, integer in zip(shapes, kinds, strict=True))
        if len(made) == 1 and kinds[0]:
            yield from _token_inputs(model, made[0])
        yield Inputs(made)


def _vocabularies(model: Module) -> tuple[list[int], bool]:
    """How many tokens there may be: of the first embedding, or what every embedding has; and whether the
    model seems to begin with them."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(size, int) and size > 0:
        return [size], getattr(model, "main_input_name", "input_ids") == "input_ids"
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, Embedding)] or [2]
    first = next((m for m in model.modules() if any(True for _ in m.parameters(recurse=False))), None)
    return list(dict.fromkeys((sizes[0], min(sizes)))), isinstance(first, Embedding)


def _token_inputs(model: Module, tokens: Tensor) -> Iterator[Inputs]:
    """By the names that transformers gives them: an encoder-decoder needs them twice."""
    names = inspect.signature(model.forward).parameters
    if "input_ids" in names:
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            yield Inputs((), {"input_ids": tokens, "decoder_input_ids": tokens.clone()})
        yield Inputs((), {"input_ids": tokens})


# -- random variations -----------------------------------------------------------------------------

def varied(inputs: Inputs, seed: int) -> Inputs:
    """Others of the same kind: floating numbers of the same mean and deviation, integers drawn from those
    that are there. Masks, flags, constants and whatever holds extreme numbers stay."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # within a checkpoint's forward pass autograd would count what this saves
        return inputs.map(lambda t: _other(t, random))


def relaid(inputs: Inputs) -> Inputs | None:
    """The same numbers, float32 images on a GPU in the other memory format; None where there are none."""
    def is_image(t: Tensor) -> bool:
        return t.dim() == 4 and t.dtype == torch.float32 and t.device.type in IMAGES_ON

    def other(t: Tensor) -> Tensor:
        last = t.is_contiguous(memory_format=torch.channels_last)
        return t.contiguous(memory_format=torch.contiguous_format if last else torch.channels_last)

    leaves = pytree.tree_leaves((inputs.args, dict(inputs.kwargs)))
    if not any(isinstance(leaf, Tensor) and is_image(leaf) for leaf in leaves):
        return None
    return inputs.map(lambda t: other(t) if is_image(t) else t)


def _other(t: Tensor, random: torch.Generator) -> Tensor:
    if not t.numel() or t.dtype == torch.bool or t.is_complex() or t.layout != torch.strided:
        return t
    if not t.is_floating_point():
        if bool(((t == 0) | (t == 1)).all()):
            return t
        return t.flatten()[torch.randint(t.numel(), t.shape, generator=random, device="cpu").to(t.device)]
    largest = t.abs().max().item()
    if not math.isfinite(largest) or largest > PLAIN or bool((t == t.flatten()[0]).all()):
        return t
    mean, deviation = t.double().mean().item(), t.double().std().item()
    other = (torch.randn(t.shape, generator=random, device="cpu") * deviation + mean).to(t.device, t.dtype)
    return torch.empty_like(t).copy_(other)  # of its layout
