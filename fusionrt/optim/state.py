"""What an optimizer keeps of a parameter: in the names and shapes of torch.optim, in a dtype of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusionrt.cpu.team import torch_alone
from fusionrt.laid import is_lazy
from fusionrt.optim import quantised
from fusionrt.optim.table import Row

MASTER, STEP, SCALE = "master_weight", "step", "_scale"


class Format(NamedTuple):
    """Of the states of one parameter. `names` are torch's, the first moment's first."""

    names: tuple[str, ...]
    dtype: torch.dtype  # uint8: quantised
    master: bool


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a piece of memory, each once."""
    expected = 1
    if tensor.numel() == 0:
        return True
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def as_dense_as(param: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`value` in that dtype, on the parameter's device, in its layout; itself if it is that already.

    Raises RuntimeError where it has another shape: kernels would write beyond its end."""
    if value.shape != param.shape:
        raise RuntimeError(f"a parameter of shape {tuple(param.shape)} has a gradient or a state of shape "
                           f"{tuple(value.shape)}")
    if (value.dtype == dtype and value.device == param.device and value.stride() == param.stride()
            and not is_lazy(value)):
        return value
    with torch_alone():
        return torch.empty_like(param, dtype=dtype, requires_grad=False).copy_(value)


def conform(param: torch.Tensor, state: dict[str, Any], form: Format, counter: torch.Tensor | None) -> None:
    """Make a state of that format of whatever there is: nothing, one loaded from torch, one of other options.

    `counter` is a fresh float32 zero for a parameter that has no step yet.
    """
    if not form.names and not form.master:
        return
    for name in [name for name, value in state.items() if isinstance(value, dict)]:
        del state[name]  # torch's flattened checkpoints leave an empty one in the place of what was not there
    begun = any(state.get(name) is not None for name in form.names)
    # SGD of torch does not count; ours does without a momentum too, whose first step is special.
    if STEP not in state or (form.names and not begun):
        state[STEP] = counter if counter is not None else torch.zeros((), dtype=torch.float32,
                                                                      device=param.device)
        if begun:
            state[STEP].fill_(1.0)
    step = state[STEP]
    if not isinstance(step, torch.Tensor) or step.dtype != torch.float32 or step.device != param.device:
        state[STEP] = torch.as_tensor(step, dtype=torch.float32, device=param.device)
    for position, name in enumerate(form.names):
        _conform_one(param, state, name, form.dtype, signed=position == 0)
    if form.master:
        state[MASTER] = as_dense_as(param, state.get(MASTER, param.detach()), torch.float32)
        follow(param, state[MASTER])
    else:
        state.pop(MASTER, None)


@torch_alone()
def follow(param: torch.Tensor, master: torch.Tensor) -> None:
    """Take into the master weights what somebody else than a step has written into the parameter."""
    now = param.detach()
    master.copy_(torch.where(master.to(now.dtype) == now, master, now))


def _conform_one(param: torch.Tensor, state: dict[str, Any], name: str, dtype: torch.dtype, signed: bool
                 ) -> None:
    value, scale = state.get(name), _scale(state, name)
    if value is not None and value.shape != param.shape:
        raise RuntimeError(f"a parameter of shape {tuple(param.shape)} has a state {name} of shape "
                           f"{tuple(value.shape)}")
    quantise = dtype == torch.uint8
    if value is None:
        state[name] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
        if quantise:
            state[name + SCALE] = torch.zeros(quantised.n_blocks(param.numel()), dtype=torch.float32,
                                              device=param.device)
        return
    if scale is not None:
        _check_codes(name, value, scale)
        if quantise and value.stride() == torch.empty_like(param, device="meta").stride():
            return
        value = quantised.decode(value, state.pop(name + SCALE), signed)
    if quantise:
        state[name], state[name + SCALE] = quantised.encode(as_dense_as(param, value, torch.float32), signed)
    else:
        state.pop(name + SCALE, None)
        state[name] = as_dense_as(param, value, dtype)


def _check_codes(name: str, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """What somebody else has put into the place of one of the two would be taken for the other's."""
    blocks = quantised.n_blocks(codes.numel())
    if codes.dtype != torch.uint8 or scale.dtype != torch.float32 or scale.numel() != blocks:
        raise RuntimeError(
            f"an 8-bit state {name} must have {blocks} scales of float32 for codes of uint8, got "
            f"{scale.numel()} of {scale.dtype} for {codes.dtype}: change it by way of state_dict(), which "
            "has numbers, and load_state_dict()")


def _scale(state: dict[str, Any], name: str) -> torch.Tensor | None:
    """Of an 8-bit state; torch's flattened checkpoints leave an empty entry in its place."""
    found = state.get(name + SCALE)
    return found if isinstance(found, torch.Tensor) else None


def in_float(state: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A copy for a checkpoint, that torch.optim can load: without codes."""
    plain = {key: value for key, value in state.items() if key not in [name + SCALE for name in names]}
    for position, name in enumerate(names):
        scale = _scale(state, name)
        if scale is not None:
            _check_codes(name, state[name], scale)
            plain[name] = quantised.decode(state[name], scale, signed=position == 0)
    return plain


def kept(state: dict[str, Any], form: Format) -> list[torch.Tensor]:
    """The tensors whose addresses are in the table."""
    names = (STEP, MASTER, *form.names, *(name + SCALE for name in form.names))
    return [state[name] for name in names if name in state]


def row(param: torch.Tensor, state: dict[str, Any], form: Format, position: int) -> Row:
    """Its line in the kernels' table."""

    def addresses(suffix: str) -> list[int]:
        found = [state[name + suffix].data_ptr() if name + suffix in state else 0 for name in form.names]
        return found + [0] * (3 - len(found))

    step = state[STEP].data_ptr() if STEP in state else 0
    return Row._make([param.data_ptr(), step, param.numel(), position, *addresses(""), *addresses(SCALE),
                      state[MASTER].data_ptr() if form.master else 0])
