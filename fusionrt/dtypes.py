"""Dtypes: which ones kernels read and write, their names, bits and bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)  # computed in float32


def name_of(dtype: object) -> str:
    """As kernels' texts call it: "float32" of torch.float32, NumPy's and "float32"."""
    if isinstance(dtype, type) and issubclass(dtype, (np.generic, float, int)):
        dtype = np.dtype(dtype)
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


def as_torchs(dtype: Any) -> Any:
    """NumPy's dtypes, and names, as torch's; anything else as it is."""
    found = dtype if dtype is None or isinstance(dtype, torch.dtype) else getattr(torch, name_of(dtype), None)
    return found if isinstance(found, torch.dtype) else dtype


def rounds(dtype: torch.dtype, to: torch.dtype) -> bool:
    """Whether numbers of a dtype that are taken as of another one change in arithmetic that is as wide."""
    widens = dtype.is_floating_point and torch.promote_types(dtype, to) == to
    return to != torch.float64 and not widens


# Of elements in memory.
STORAGE = {dtype: name_of(dtype) for dtype in (
    *FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)}
# By name.
ITEMSIZE = {name: dtype.itemsize for dtype, name in STORAGE.items()}
SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}


def acc_of(dtype: object) -> str:
    """What it is computed in."""
    return "float64" if name_of(dtype) == "float64" else "float32"


def element_of(name: str) -> str:
    """Of an array of it in a CPU's kernel: 16-bit floats are bit patterns."""
    return {"float16": "uint16", "bfloat16": "uint16", "bool": "uint8"}.get(name, name)
