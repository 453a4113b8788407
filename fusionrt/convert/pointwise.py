"""What a cluster is put together from: torch's pointwise functions, and those that are a model's own matter.

Dtypes are not a rule's business: see `members`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.nn import functional as F

from fusionrt import functions
from fusionrt.functions import COMPARISONS, Rule
from fusionrt.fusion import dropped

_RULES = functions.RULES.copied()
FUNCTIONS, METHODS = _RULES
# Rules whose result is their first operand, in the dtype that torch gives it.
CONVERSIONS: set[Rule] = set()
# Rules that compare with bounds, which torch rounds to the tensors' dtype as well.
BOUNDS: set[Rule] = {functions.clamp, functions.clamp_min, functions.clamp_max, functions.hardtanh,
                     functions.threshold, functions.hardshrink, functions.softshrink}


@_RULES.rule(spaces=(F,), method=False)
def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if inplace or training is not True or not isinstance(p, (float, int)) or not 0 < p < 1:
        return None
    return dropped(input, p, 1 / (1 - p))


# Of tensors of bool, as all are whose results are: there are no bits to join.
_RULES.rule("bitwise_and", "__and__", operators=(operator.and_,))(functions.logical_and)
_RULES.rule("bitwise_or", "__or__", operators=(operator.or_,))(functions.logical_or)
_RULES.rule("bitwise_not", "__invert__", operators=(operator.invert,))(functions.logical_not)


@_RULES.rule("float", "double", "half", "bfloat16", "type_as", spaces=())
def to(input: Any, *others: Any, dtype: Any = None, device: Any = None, other: Any = None,
       non_blocking: bool = False, copy: bool = False, memory_format: Any = torch.preserve_format) -> Any:
    """Devices are compared by the cluster; a tensor among the arguments stands for its dtype and device."""
    moved = copy or memory_format is not torch.preserve_format or any(a is True for a in others)
    return None if moved else input


CONVERSIONS.add(to)

__all__ = ["BOUNDS", "COMPARISONS", "CONVERSIONS", "FUNCTIONS", "METHODS", "Rule"]
