"""The kernels between the matrix products of an attention of our own: scores to weights, and back.

A row is one query's scores. Of a score x, between the query at the position i and the key at j:

    z = softcap tanh(x scale / softcap) + mask - slope |j - i|,    w = dropout(softmax(z))

over the keys with i - left <= j <= i + right that the mask lets pass; where there are none, w is zeros. The
backward kernel is no reduction: from x and two values a row it computes w again, of which dV is a product,
and the gradient of x, of which dQ and dK are.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from fusionrt import rowwise
from fusionrt.expr import Expr, argument, cast, exp, maximum, minimum, near_reciprocal, node, tanh, where
from fusionrt.fusion import kept, trace
from fusionrt.op import Operator
from fusionrt.ops.dropout import scale_of_kept
from fusionrt.random import Rng
from fusionrt.row_op import RowOperator

Tensor = torch.Tensor
Named = dict[str, Any]


class Form(NamedTuple):
    """What the kernels are compiled for."""

    half: str | None       # the dtype of weights, where that of scores is wider
    mask: str | None       # "passed": boolean; "added"
    left: bool             # the side is bounded
    right: bool
    alibi: bool
    softcap: bool
    dropout: bool
    of_mask: bool = False  # the mask needs a gradient


class Values(NamedTuple):
    """Of one chunk, whose scores have the shape (B, kv heads, queries, group, keys)."""

    mask: Tensor | None    # broadcasts to that
    positions: Tensor      # of the queries, (queries, 1, 1)
    columns: Tensor        # of the keys
    slopes: Tensor | None  # (B or 1, kv heads, 1, group, 1)
    first_key: int         # the position of the first column
    scale: float
    left: int
    right: int
    softcap: float
    dropout_p: float

    def named(self, first_column: int) -> Named:
        """What an argument is called in the kernels, whose columns count from that position."""
        keep = scale_of_kept("attention", self.dropout_p, True, "dropout_p")
        return {"mask": self.mask, "positions": self.positions, "columns": self.columns,
                "slopes": self.slopes, "scale": self.scale, "last": float(self.right - first_column),
                "before": float(-self.left - 1 - first_column), "cap": self.softcap,
                "inverse_cap": 1 / self.softcap if self.softcap else 0.0, "p": self.dropout_p,
                "kept_scale": keep}


# -- expressions -----------------------------------------------------------------------------------

def _score(form: Form, a: Named) -> tuple[Expr, Expr]:
    """z, and its derivative."""
    z, slope = node("mul_rn", a["x"], a["scale"]), a["scale"]
    if form.softcap:
        u = z * a["inverse_cap"]
        # The tanh for 16-bit results is good to 2^-11, which the cap would multiply.
        t = 1 - 2 * near_reciprocal(exp(minimum(2 * u, 40)) + 1) if form.half else tanh(u)
        z, slope = t * a["cap"], slope * (1 - t * t)
    z = z + maximum(a["mask"], rowwise.LOWEST_PASSED) if form.mask == "added" else z
    if form.alibi:
        z = z - a["slopes"] * abs(a["columns"] - a["positions"])
    return z, slope


def _passed(form: Form, a: Named, up_to: Any) -> Expr | None:
    """`up_to(column)`: whether an element stands there or before."""
    conditions = [a["mask"] != (0 if form.mask == "passed" else -math.inf)] if form.mask else []
    conditions += [up_to(a["positions"] + a["last"])] if form.right else []
    conditions += [~up_to(a["positions"] + a["before"])] if form.left else []
    return functools.reduce(lambda p, q: p & q, conditions) if conditions else None


def _dropped(form: Form, a: Named, *values: Expr) -> list[Expr]:
    if not form.dropout:
        return list(values)
    stays = kept(a["p"])
    return [where(stays, value * a["kept_scale"], 0) for value in values]


def _rounded(form: Form, value: Expr) -> Expr:
    return cast(value, form.half) if form.half else value


def _arguments(form: Form, tensors: Sequence[str], columns: bool) -> tuple[str, ...]:
    there = {"mask": form.mask is not None, "positions": form.left or form.right or form.alibi,
             "columns": columns, "slopes": form.alibi, "scale": True, "last": form.right, "before": form.left,
             "cap": form.softcap, "inverse_cap": form.softcap, "p": form.dropout, "kept_scale": form.dropout}
    return *tensors, *(name for name, is_there in there.items() if is_there)


def _traced(name: str, expression: Any, params: Sequence[str], uniform: Collection[int] = ()
            ) -> tuple[Expr, ...]:
    signature = inspect.Signature([inspect.Parameter(p, inspect.Parameter.POSITIONAL_OR_KEYWORD)
                                   for p in params])
    return trace(lambda *values: expression(dict(zip(params, values, strict=True))), name,
                 [argument(f"a{k}", k in uniform) for k in range(len(params))], signature)


# -- operators -------------------------------------------------------------------------------------

@functools.cache
def _weights(form: Form) -> Operator:
    def expression(a: Named) -> tuple[Expr, ...]:
        y, most, factor = rowwise.softmax(_score(form, a)[0], _passed(form, a, rowwise.up_to_column))
        return _rounded(form, *_dropped(form, a, y)), most, factor

    params = _arguments(form, ("x",), form.alibi)
    uniform = {k for k, name in enumerate(params) if name not in ("x", "mask", "columns")}
    name = "attention_weights"
    made = RowOperator(name, params, _traced(name, expression, params, uniform), None, uniform)
    return made if form.half else made.over({0: 0})


@functools.cache
def _gradients(form: Form) -> Operator:
    def expression(a: Named) -> tuple[Expr, ...]:
        z, slope = _score(form, a)
        passed = _passed(form, a, lambda column: a["columns"] <= column)
        z = z if passed is None else where(passed, z, rowwise.LOWEST)
        y = exp(z - a["most"]) * a["factor"]
        weights, grad = _dropped(form, a, y, a["grad"])
        of_z = y * (grad - a["total"])
        found = _rounded(form, weights), _rounded(form, of_z * slope)
        return (*found, of_z) if form.of_mask else found

    params = _arguments(form, ("x", "grad", "most", "factor", "total"), form.left or form.right or form.alibi)
    name = "attention_gradients"
    targets = [None, None, *([params.index("mask")] if form.of_mask else [])]
    made = Operator(name, params, _traced(name, expression, params), targets)
    return made if form.half else made.over({0: 0, 1: 1})


def weights(form: Form, scores: Tensor, values: Values, rng: Rng | None) -> tuple[Tensor, Tensor, Tensor]:
    """w, in the memory of the scores where that has its dtype, and of each row the maximum of z and what
    e^(z - maximum) is multiplied by."""
    operator, named = _weights(form), {"x": scores, **values.named(values.first_key)}
    found: tuple[Tensor, Tensor, Tensor] = operator.launch([named[p] for p in operator.params], rng)
    return found


def gradients(form: Form, scores: Tensor, grad: Tensor, rows: Sequence[Tensor], values: Values,
              rng: Rng | None) -> Sequence[Tensor]:
    """w and the gradient of the scores, in the memory of the scores and of `grad` where these have their
    dtype; and if need be that of the mask, in its shape. `grad`: of w; `rows`: what `weights` gave of each
    row, and sum(w grad)."""
    operator = _gradients(form)
    named = {"x": scores, "grad": grad, **dict(zip(("most", "factor", "total"), rows, strict=True)),
             **values.named(0)}
    found: tuple[Tensor, ...] = operator.launch([named[p] for p in operator.params], rng)
    return found
