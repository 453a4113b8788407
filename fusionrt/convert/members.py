"""Which calls of a graph may be part of one kernel, and what each computes there.

A member is a pointwise call, or a norm or softmax over the last dimensions. Its value in the kernel is what
torch's would be, but for roundings to 16 bits: those of intermediate values are left out, those that the
model asks for (`x.to(dtype)`) are kept. Integers of 32 bits and more are read only where torch makes floats
of them: the arithmetic is in float32.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from fusionrt import rowwise
from fusionrt.convert.effects import NONE, Facts, value
from fusionrt.convert.pointwise import BOUNDS, COMPARISONS, CONVERSIONS, FUNCTIONS, METHODS, Rule
from fusionrt.dtypes import FLOATS, STORAGE
from fusionrt.expr import Expr, TraceError, argument, cast, node
from fusionrt.fusion import trace
from fusionrt.ops.norm import EPS

_EXACT = {torch.bool: 1, torch.bfloat16: 8, torch.uint8: 8, torch.int8: 8, torch.float16: 11, torch.int16: 16,
          torch.float32: 24, torch.int32: 32, torch.float64: 53, torch.int64: 64}
_LONG = (torch.int32, torch.int64)


class Member(NamedTuple):
    """`rule`: of traced values, or for rows of them and `row_dims`, which gives what a gradient reads
    besides."""

    node: Node
    rule: Rule
    row_dims: int = 0

    @property
    def name(self) -> str:
        return self.rule.__name__.strip("_")


# -- norms and softmax -----------------------------------------------------------------------------


def layer_norm(input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5,
               cudnn_enable: bool = True) -> Any:
    y, *terms = rowwise.standardize(input, eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, terms


def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    y, *terms = rowwise.rms_scale(input, EPS[False] if eps is None else eps)
    return y if weight is None else y * weight, terms


def softmax(input: Any, dim: Any = None, *_: Any, dtype: Any = None, **__: Any) -> Any:
    y, *terms = rowwise.softmax(_product(input))
    return y, terms


def log_softmax(input: Any, dim: Any = None, *_: Any, dtype: Any = None, **__: Any) -> Any:
    y, *terms = rowwise.log_softmax(_product(input))
    return y, terms


def _product(x: Expr) -> Expr:
    """Not contracted with the subtraction of the maximum, which would be of another product."""
    return node("mul_rn", *x.args) if x.op == "mul" else x


_F = torch.nn.functional
_SPELLINGS: dict[Rule, tuple[Any, ...]] = {
    layer_norm: (_F.layer_norm, torch.layer_norm), rms_norm: (_F.rms_norm, torch.rms_norm),
    softmax: (_F.softmax, torch.softmax, torch.special.softmax, "softmax"),
    log_softmax: (_F.log_softmax, torch.log_softmax, torch.special.log_softmax, "log_softmax")}
ROWS: dict[Any, Rule] = {spelling: rule for rule, spellings in _SPELLINGS.items() for spelling in spellings}


def _row_dims(node: Node, rule: Rule) -> int:
    """How many of the last dimensions are a row; 0: something else is."""
    rank = value(node).dim()
    given: Any = (node.args[1] if len(node.args) > 1
                  else node.kwargs.get("normalized_shape" if rule in (layer_norm, rms_norm) else "dim"))
    if rule in (layer_norm, rms_norm):
        eps = node.kwargs.get("eps", node.args[3 if rule is rms_norm else 4 :])
        default = eps is None or eps in ((), (None,))
        # That of float64 where the model leaves it to torch.
        exact = rule is rms_norm and default and value(node).dtype == torch.float64
        return 0 if exact else len(given) if isinstance(given, (tuple, list)) else 1
    return int(rank > 0 and given in (-1, rank - 1))


# -- whether a node is one ---------------------------------------------------------------------------


def member(node: Node, facts: Facts) -> Member | None:
    """What a node is in a kernel, None where it cannot be in one."""
    target = node.target
    table: tuple[Mapping[Any, Rule], ...] = (METHODS, ROWS) if node.op == "call_method" else (FUNCTIONS, ROWS)
    if node.op not in ("call_function", "call_method") or not any(target in t for t in table):
        return None
    if facts.effects[node] != NONE or not node.users or not _storable(node, facts):
        return None
    rule = next(t[target] for t in table if target in t)
    row_dims = _row_dims(node, rule) if target in ROWS else 0
    made = Member(node, rule, row_dims)
    return made if (row_dims or target not in ROWS) and _reads(made, facts) and _traceable(made) else None


def _storable(node: Node, facts: Facts) -> bool:
    t = value(node)
    return (isinstance(t, torch.Tensor) and t.layout == torch.strided and t.device.type in ("cpu", "cuda")
            and (t.dtype in FLOATS or t.dtype == torch.bool) and not facts.is_written(node))


def _reads(made: Member, facts: Facts) -> bool:
    """Whether its operands can be read in a kernel."""
    t = value(made.node)
    found = False
    for operand in made.node.all_input_nodes:
        v = value(operand)
        if isinstance(v, torch.Tensor):
            if (v.dtype not in STORAGE or v.layout != torch.strided or v.device != t.device
                    or facts.is_written(operand) or v.is_neg()):
                return False
            if v.dtype in _LONG and (made.rule in COMPARISONS or t.dtype == torch.bool):
                return False
            if made.rule in COMPARISONS and not _is_compared_exactly(v, made.node):
                return False
            if made.rule in CONVERSIONS and not facts.classes[operand].isdisjoint(facts.classes[made.node]):
                return False
            found = True
        elif not isinstance(v, (torch.SymInt, torch.SymFloat)):
            return False
    return found


def _is_compared_exactly(t: torch.Tensor, comparison: Node) -> bool:
    """Torch compares in a common dtype, to which one without dimensions is rounded."""
    operands = [value(a) for a in comparison.all_input_nodes if isinstance(value(a), torch.Tensor)]
    common = torch.result_type(operands[0], operands[-1])
    return torch.promote_types(t.dtype, common) == common


def _traceable(made: Member) -> bool:
    operands = made.node.all_input_nodes
    signature = inspect.Signature([inspect.Parameter(f"x{k}", inspect.Parameter.POSITIONAL_OR_KEYWORD)
                                  for k in range(len(operands))])

    def compute(*args: Expr) -> Any:
        found = evaluate(made, dict(zip(operands, args, strict=True)))
        return found[0] if isinstance(found, tuple) else found

    try:
        trace(compute, made.name, [argument(f"x{k}") for k in range(len(operands))], signature)
    except TypeError:  # arguments that the rule does not know, or what cannot be traced
        return False
    return True


# -- what it computes --------------------------------------------------------------------------------


def evaluate(made: Member, known: Mapping[Node, Any]) -> Any:
    """The member's value of those of its operands; for rows with what a gradient reads besides."""
    args = map_arg(made.node.args, known.__getitem__)
    kwargs = map_arg(dict(made.node.kwargs), known.__getitem__)
    if made.rule in COMPARISONS or made.rule in BOUNDS:
        args, kwargs = map_aggregate((args, kwargs), lambda a: _rounded(a, made.node))
    found: Any = made.rule(*args, **kwargs)
    dtype = value(made.node).dtype
    if made.row_dims:
        return found
    if not isinstance(found, Expr):
        raise TraceError(f"{made.name}: these arguments make it something else")
    if dtype == torch.bool:
        return found if found.is_truth else found != 0
    if made.rule in CONVERSIONS:
        source = value(made.node.args[0]).dtype
        if source != dtype and (_EXACT[source] > _EXACT[dtype] or dtype == torch.float16):
            return cast(found, dtype)
    return found


def _rounded(number: Any, node: Node) -> Any:
    """As torch compares: in the dtype of both operands, to which whole numbers are rounded, or wrapped."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return number
    dtype = value(next(a for a in node.all_input_nodes if isinstance(value(a), torch.Tensor))).dtype
    if not dtype.is_floating_point and (isinstance(number, float) or dtype == torch.bool):
        return number  # compared in a dtype that both become
    exact = torch.int64 if isinstance(number, int) else torch.float64
    return torch.tensor(number, dtype=exact, device="cpu").to(dtype).item()
