"""Numbers among an op's arguments, and what is said of what is none."""

from __future__ import annotations

import math
import numbers
import struct
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import torch

from fusionrt.dtypes import FLOATS

BEYOND = (OverflowError, struct.error)  # of integers that float64 has not, where one is packed


def as_float(op: str, name: str, value: Any) -> float:
    """Of a number, or of what gives one (a tensor of one element); of nothing that is text."""
    if isinstance(value, (int, float)) or hasattr(value, "__float__"):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{op}: {name} must be a number that float64 has, got one beyond it") from None
        except (TypeError, ValueError, RuntimeError):
            if math.prod(getattr(value, "shape", ())) == 1:
                raise
            raise TypeError(f"{op}: {name} must be a number, got a {type(value).__name__} of shape "
                            f"{tuple(value.shape)}") from None
    raise TypeError(f"{op}: {name} must be a number, got {value!r}")


def check_number(op: str, name: str, value: Any) -> None:
    """As `as_float`, without making one of a number that a tracer follows."""
    if not isinstance(value, (int, float)):
        as_float(op, name, value)


def is_int(value: Any) -> TypeGuard[int]:
    """Whether it is an integer, also one of NumPy or of a tracer: no truth value, which Python counts among
    them and torch does not, and no array, which has `__index__` whatever its dtype is."""
    if isinstance(value, numbers.Integral):
        return not isinstance(value, bool)
    return hasattr(value, "__index__") and not hasattr(value, "__array__")


def as_int(op: str, name: str, value: Any) -> int:
    if is_int(value):
        return value
    raise TypeError(f"{op}: {name} must be an integer, got {value!r}")


def as_count(op: str, name: str, value: Any, least: int = 0) -> int:
    if as_int(op, name, value) < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {value}")
    return value


def check_counts(op: str, optional: Mapping[str, Any] | None = None, /, **counts: Any) -> None:
    """Each at least 0; of the `optional` ones None is as good."""
    given = {name: value for name, value in (optional or {}).items() if value is not None}
    for name, value in (counts | given).items():
        as_count(op, name, value)


def as_tensors(op: str, name: str, value: Any) -> list[torch.Tensor]:
    """Of one tensor or of any number of them."""
    if not isinstance(value, (torch.Tensor, Iterable)):
        raise TypeError(f"{op}: {name} must be tensors, got a {type(value).__name__}")
    found = [value] if isinstance(value, torch.Tensor) else list(value)
    for index, each in enumerate(found):
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"{op}: {name}[{index}] must be a tensor, got {type(each).__name__}")
    return found


def as_dim(op: str, dim: Any, rank: int) -> int:
    """One of so many dimensions; negative ones count from the end."""
    if not -rank <= as_int(op, "dim", dim) < rank:
        raise IndexError(f"{op}: dim must be in [{-rank}, {rank}), got {dim}")
    return dim


def check_float_dtype(op: str, dtype: Any) -> None:
    """Of a result, or None."""
    if dtype is not None and not any(dtype is each for each in FLOATS):
        raise TypeError(f"{op}: dtype must be None or one of {', '.join(map(str, FLOATS))}, got {dtype!r}")


def as_device(op: str, device: Any) -> torch.device:
    """No GPU where there is none."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"{op}: device must name one, such as 'cpu' or 'cuda:0', got {device!r}") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{op}: device is {found}, and there is no CUDA device")
    return found
