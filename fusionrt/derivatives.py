"""Reverse-mode derivatives: a rule for each primitive that has a slope, and the sweep that applies them.

Derivatives are expressions again. The rules name functions of `expr`, which are made of primitives: so they
stand above both, and not in the rows of `primitives.PRIMITIVES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fusionrt.expr import (
    Expr,
    abs_,
    cos,
    exp,
    expm1,
    log,
    node,
    normpdf,
    pow_,
    power,
    row_mean,
    row_sum,
    sigmoid,
    sin,
    where,
)
from fusionrt.graph import toposort

# Primitive -> vector-Jacobian product: (g, out, *operands) -> for each operand a gradient, or None for zero.
# What is not here is flat: conditions, integers.
RULES: dict[str, Callable[..., tuple[Expr | None, ...]]] = {
    "add": lambda g, out, a, b: (g, g),
    "sub": lambda g, out, a, b: (g, -g),
    "mul": lambda g, out, a, b: (g * b, g * a),
    "mul_rn": lambda g, out, a, b: (g * b, g * a),
    "div": lambda g, out, a, b: (g / b, -(g * (out / b))),
    "reciprocal": lambda g, out, a: (-g * (out * out),),
    "near_reciprocal": lambda g, out, a: (-g * (out * out),),
    "neg": lambda g, out, a: (-g,),
    "abs": lambda g, out, a: (where(a < 0, -g, where(0 < a, g, 0)),),
    "where": lambda g, out, c, a, b: (None, where(c, g, 0), where(c, 0, g)),
    "relu": lambda g, out, a: (where(out <= 0, 0, g),),
    "relu_dropped": lambda g, out, a, kept, scale: (where(out <= 0, 0, g * scale), None, None),
    "hardtanh": lambda g, out, a, lo, hi: (where(lo < a, where(a < hi, g, 0), 0), None, None),
    "elu": lambda g, out, a, alpha: (where(0 < a, g, g * (alpha * exp(where(0 <= a, 0, a)))),
                                     where(0 < a, 0, g * expm1(where(0 < a, 0, a)))),
    # Ties share the gradient and NaN lets it pass, as torch.minimum does.
    "minimum": lambda g, out, a, b: (_picked(g, a == b, b < a), _picked(g, a == b, a < b)),
    "maximum": lambda g, out, a, b: (_picked(g, a == b, a < b), _picked(g, a == b, b < a)),
    "clamp": lambda g, out, a, lo, hi: (where((lo <= a) & (a <= hi), g, 0),
                                        where((a < lo) & (lo < hi), g, 0),
                                        where((hi < a) | (hi < lo), g, 0)),
    "exp": lambda g, out, a: (g * out,),
    "exp2": lambda g, out, a: (g * (out * math.log(2)),),
    "expm1": lambda g, out, a: (g * exp(a),),  # out + 1 cancels
    "log": lambda g, out, a: (g / a,),
    "log1p": lambda g, out, a: (g / (1 + a),),
    "log2": lambda g, out, a: (g / (a * math.log(2)),),
    "sqrt": lambda g, out, a: (g / (2 * out),),
    "norm_sqrt": lambda g, out, a: (where(out == 0, 0, g) / (2 * where(out == 0, 1, out)),),
    "rsqrt": lambda g, out, a: (-0.5 * g * (out * out * out),),
    "pow": lambda g, out, a, b: (g * (b * _lower_power(a, b)),
                                 g * (out * log(where((a == 0) & (0 <= b), 1, a)))),
    "sin": lambda g, out, a: (g * cos(a),),
    "cos": lambda g, out, a: (-g * sin(a),),
    "tanh": lambda g, out, a: (g * (1 - out * out),),
    "erf": lambda g, out, a: (g * (2 / math.sqrt(math.pi) * exp(-a * a)),),
    "sigmoid": lambda g, out, a: (g * (out * node("sigmoid_complement", a, out)),),
    "sigmoid_complement": lambda g, out, a, s: (-g * (s * out), None),
    "softplus": lambda g, out, a: (g * sigmoid(a),),
    "tanh_softplus": lambda g, out, a, s, u, r: (g * where(20 <= a, 0, u * (u + r)), None, None, None),
    "normcdf": lambda g, out, a: (g * normpdf(a),),
    "normpdf": lambda g, out, a: (-g * (a * out),),
    **dict.fromkeys(("cast_float16", "cast_bfloat16", "cast_float32"), lambda g, out, a: (g,)),
    "row_sum": lambda g, out, a: (g,),
    # A product, not a choice: of a row with NaN, which none equals, it is NaN.
    "row_max": lambda g, out, a: (node("number", a == out) * (g / row_sum(node("number", a == out))),),
    "moment_mean": lambda g, out, a: (g / node("row_size", "row_size"),),
    "moment_squares": lambda g, out, a, mean: (2 * g * (a - mean), None),
    "taken": lambda g, out, a, column: (where(node("is_column", column), g, 0), None),
    "standardized": lambda g, out, x, mean, rstd: (
        (g - row_mean(g)) * rstd - (x - mean) * (rstd * rstd * row_mean(g * out)), None, None),
    "rms_scaled": lambda g, out, x, rstd: (g * rstd - x * (rstd * rstd * row_mean(g * out)), None),
    "masked": lambda g, out, a, passed, low: (g, None, None),
    "softmaxed": lambda g, out, x, most, scale: (out * (g - row_sum(g * out)), None, None),
    "log_softmaxed": lambda g, out, x, most, log_total: (g - exp(out) * row_sum(g), None, None),
}


def _picked(g: Expr, tie: Expr, loses: Expr) -> Expr:
    return where(loses, 0, where(tie, 0.5 * g, g))


def _lower_power(a: Expr, b: Expr) -> Expr:
    """a ** (b - 1), as finite as it is times b."""
    if b.op == "const" and float(str(b.args[0])) != 0:
        return power(a, float(str(b.args[0])) - 1)  # often a product or a root
    # What would be infinite beside a 0 (of a reciprocal beyond float32 too) is of base 1: a choice afterwards
    # has derivatives of 0 times that.
    return pow_(where((b == 0) & ~(abs_(a) > 3e-39), 1, a), b - 1)


class _Ungraded:
    """What no gradient goes through: truth values and integers."""

    def __contains__(self, n: Any) -> bool:
        return n.is_truth or n.op.startswith(("cast_int", "cast_uint", "cast_bool"))


UNGRADED = _Ungraded()


def through_output(root: Expr, output: Expr) -> dict[Expr, Expr]:
    """What to substitute so that a derivative reads the value of `root` instead of computing it."""
    replacement = {root: output}
    if root.op == "sigmoid":
        replacement[node("sigmoid_complement", root.args[0], root)] = 1 - output
    return replacement


def gradients(seeds: Mapping[Expr, Expr], wrt: Sequence[Expr]) -> list[Expr]:
    """Reverse-mode derivative: `seeds` gives the incoming gradient of each output."""
    grads = {n: row_sum(g) if n.uniform and not g.uniform else g for n, g in seeds.items()}
    for n in reversed(toposort(seeds)):
        rule = RULES.get(n.op)
        if rule is None or n not in grads:
            continue
        for a, g in zip(n.args, rule(grads[n], n, *n.args), strict=True):
            if g is not None and isinstance(a, Expr) and a.op != "const":
                g = row_sum(g) if a.uniform and not g.uniform else g
                grads[a] = grads[a] + g if a in grads else g
    return [grads.get(v, node("const", "0.0")) for v in wrt]
