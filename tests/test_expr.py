"""Expressions: interning, text, derivatives, ties and special values, against torch in float64."""

import gc
import math
import operator
import re
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusionrt as frt
from fusionrt import expr
from fusionrt.catalogue import OPS
from fusionrt.cpu import memory
from fusionrt.derivatives import RULES, gradients
from fusionrt.expr import Expr, argument, node
from fusionrt.graph import emit, toposort
from fusionrt.op import Operator
from fusionrt.primitives import CASTS, PRIMITIVES
from fusionrt.runtime.source import template

F64 = torch.float64
X, Y, Z = argument("a0"), argument("a1"), argument("a2")


def call(outputs, *args):
    """Expressions of a0, a1, ... on tensors."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return Operator("expression", [f"x{i}" for i in range(len(args))], outputs)(*args)


def tensor(*values, device="cpu", dtype=F64):
    return torch.tensor(values, dtype=dtype, device=device)


# --- derivatives ----------------------------------------------------------------------------------

# Where to differentiate an operand: [low, high]; the default is [-2, 2].
DOMAINS = {
    "div": [None, (0.5, 2)],
    "reciprocal": [(0.5, 2)],
    "near_reciprocal": [(0.5, 2)],
    "log": [(0.1, 3)],
    "log1p": [(-0.9, 3)],
    "log2": [(0.1, 3)],
    "sqrt": [(0.1, 3)],
    "norm_sqrt": [(0.1, 3)],
    "rsqrt": [(0.1, 3)],
    "pow": [(0.1, 3), None],
    "clamp": [None, (-1, -0.5), (0.5, 1)],
}
CONSTANT = {
    "lt",
    "le",
    "eq",
    "ne",
    "and",
    "or",
    "not",
    "number",
    "kept",
    "floor",
    "round",
    "trunc",
    "flag",
    *(f"cast_{t}" for t in CASTS if not t.startswith(("float", "bfloat"))),
}
# Of rows: tests/test_rows_cpu.py looks at these.
OF_ROWS = {n for n, primitive in PRIMITIVES.items() if primitive.of_row} | {
    "total", "standardized", "rms_scaled", "masked", "softmaxed", "log_softmaxed"}
ARITY = {name: primitive.text.count("{") for name, primitive in PRIMITIVES.items()} | {
    "relu": 1, "relu_dropped": 1, "elu": 2, "hardtanh": 1}


@pytest.mark.parametrize("name", [n for n in RULES if n not in OF_ROWS and not n.startswith("cast_")])
def test_derivative_is_that_of_central_differences(name):
    n = ARITY[name] = 3 if name == "clamp" else ARITY[name]
    domains = DOMAINS.get(name, [None] * n)
    args = [torch.empty(201, dtype=F64).uniform_(*(d or (-2, 2))) for d in domains]
    operands = [X, Y, Z][:n]
    if name == "sigmoid_complement":  # its second operand says nothing that the first does not
        args, root = args[:1], node(name, X, expr.sigmoid(X))
    elif name == "tanh_softplus":  # nor do its others
        args, root = args[:1], expr.tanh_softplus(X)
    elif name == "where":
        root = node(name, X > 0, Y, Z)
    elif name == "relu_dropped":  # is kept where the condition says
        root = node(name, X, X > -1, 1.25)
    elif name == "hardtanh":  # between numbers
        root = node(name, X, -1, 1.5)
    else:
        root = node(name, *operands)
    leaves = [a.clone().requires_grad_() for a in args]
    found = torch.autograd.grad(call(root, *leaves).sum(), leaves, allow_unused=True)
    h = 1e-6
    for k, gradient in enumerate(found):
        above, below = ([a + s * h if i == k else a for i, a in enumerate(args)] for s in (1, -1))
        difference = (call(root, *above) - call(root, *below)) / (2 * h)
        smooth = torch.ones(201, dtype=torch.bool)
        if name in ("minimum", "maximum", "where", "abs", "clamp"):
            smooth = (
                torch.stack([(args[0] - b).abs() for b in (*args[1:], torch.zeros(()))]).amin(0)
                > 2 * h
            )
        gradient = torch.zeros_like(difference) if gradient is None else gradient  # of a condition
        torch.testing.assert_close(gradient[smooth], difference[smooth], rtol=1e-6, atol=1e-8)


def test_a_primitive_has_a_rule_or_is_flat():
    flat = CONSTANT | {n for n, primitive in PRIMITIVES.items() if primitive.is_leaf} | {
        "row_top", "row_first", "total", "is_column", "up_to_column", "round_near"}
    assert flat | RULES.keys() == PRIMITIVES.keys() and flat.isdisjoint(RULES)


@pytest.mark.parametrize("name", sorted(CONSTANT - {"kept", "flag"}))
def test_no_derivative(name):
    args = [torch.randn(17, dtype=F64).requires_grad_() for _ in range(ARITY[name])]
    root = node(name, *[X, Y][: len(args)]) + X * 0.5
    grads = torch.autograd.grad(call(root, *args).sum(), args, allow_unused=True)
    assert torch.equal(grads[0], torch.full_like(grads[0], 0.5))
    assert not any(g is not None and g.any() for g in grads[1:])


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_a_cast_to_a_float_passes_the_gradient(name):
    x = torch.randn(17, dtype=F64, requires_grad=True)
    out = call(expr.cast(X, name) * 3, x)
    torch.testing.assert_close(out, x.to(getattr(torch, name)).double() * 3, rtol=0, atol=0)
    assert torch.autograd.grad(out.sum(), x)[0].eq(3).all()


def test_gradients_of_shared_subexpressions_add_up():
    x = torch.linspace(-1, 1, 11, dtype=F64, requires_grad=True)
    e = expr.exp(X)
    (grad,) = torch.autograd.grad(call(e * e + e * X, x).sum(), x)
    torch.testing.assert_close(grad, 2 * (2 * x).exp() + x.exp() * (1 + x))
    assert gradients({e: Y}, [Z])[0] is node("const", "0.0")


# --- trees ----------------------------------------------------------------------------------------

UNARY = {
    "neg": operator.neg,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "normcdf": torch.special.ndtr,
    "softplus": lambda x: x.clamp(min=0) + (-x.abs()).exp().log1p(),
    "expm1_tanh": lambda x: torch.expm1(torch.tanh(x)),
    "log1p_square": lambda x: torch.log1p(x * x),
    "rsqrt_square": lambda x: torch.rsqrt(x * x + 1),
}
OURS = {
    **{name: getattr(expr, name) for name in UNARY if hasattr(expr, name)},
    "neg": operator.neg,
    "expm1_tanh": lambda x: expr.expm1(expr.tanh(x)),
    "log1p_square": lambda x: expr.log1p(x * x),
    "rsqrt_square": lambda x: expr.rsqrt(x * x + 1),
}
BINARY = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": lambda a, b: a / (b * b + 1),
}
LEAVES = st.one_of(st.sampled_from(["x", "y"]), st.floats(-3, 3).map(lambda v: round(v, 3)))
# Comparisons are of leaves alone: of two results that agree up to rounding, either may be larger.
TREES = st.recursive(
    LEAVES,
    lambda children: st.one_of(
        st.tuples(st.sampled_from(sorted(UNARY)), children),
        st.tuples(st.sampled_from(sorted(BINARY)), children, children),
        st.tuples(st.sampled_from(["minimum", "maximum"]), LEAVES, LEAVES),
        st.tuples(st.just("where"), LEAVES, LEAVES, children, children),
    ),
    max_leaves=12,
)


def evaluate(tree, x, y, functions, where, minimum, maximum, number):
    def visit(t):
        match t:
            case "x" | "y":
                return x if t == "x" else y
            case float() | int():
                return number(t)
            case ("where", a, b, c, d):
                return where(visit(a) < visit(b), visit(c), visit(d))
            case ("minimum" | "maximum", a, b):
                return (minimum if t[0] == "minimum" else maximum)(visit(a), visit(b))
            case (name, a):
                return functions[name](visit(a))
            case (name, a, b):
                return BINARY[name](visit(a), visit(b))

    return visit(tree)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(TREES)
def test_trees_are_what_torch_says(tree):
    x, y = (
        torch.randn(64, dtype=F64, generator=torch.Generator().manual_seed(k)).requires_grad_()
        for k in (1, 2)
    )
    root = evaluate(
        tree,
        X,
        Y,
        OURS,
        expr.where,
        expr.minimum,
        expr.maximum,
        lambda v: node("const", repr(float(v))),
    )
    ours = call(root + 0 * X + 0 * Y, x, y)
    theirs = (
        evaluate(
            tree,
            x,
            y,
            UNARY,
            torch.where,
            torch.minimum,
            torch.maximum,
            lambda v: torch.tensor(v, dtype=F64),
        )
        + 0 * x
        + 0 * y
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    for a, b in zip(
        *(torch.autograd.grad(out.sum(), (x, y)) for out in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


# --- interning and text ---------------------------------------------------------------------------


def test_equal_expressions_are_one_object():
    assert X + 1 is X + 1.0
    assert expr.exp(X * Y) is expr.exp(X * Y)
    assert X * Y is not Y * X
    assert X + 0.0 is not X + -0.0
    assert len(toposort([expr.exp(X) + expr.exp(X) * expr.exp(X)])) == 4
    statements, _ = emit([expr.exp(X) + expr.exp(X) * expr.exp(X)], "{} = {}")
    assert statements == ["t0 = exp(a0)", "t1 = t0 * t0", "t2 = t0 + t1"]


def test_forgotten_expressions_are_freed():
    before = len(expr._interned)
    root = X
    for k in range(500):
        root = root * Y + k
    assert len(expr._interned) >= before + 1000
    del root
    gc.collect()
    assert len(expr._interned) <= before + 10


def operators():
    found = {}
    for name, op in OPS.items():
        functions = (
            [op]
            if hasattr(op, "operator")
            else [
                f
                for f in vars(__import__(op.__module__, fromlist=["_"])).values()
                if not isinstance(f, Expr) and isinstance(getattr(f, "operator", None), Operator)
            ]
        )
        found |= {f"{name}.{f.operator.name}": f.operator for f in functions}
    return found


@pytest.mark.parametrize("op", operators().values(), ids=lambda op: op.name)
def test_one_text_for_both_languages(op):
    backward = op.gradient((True,) * len(op.params), op.differentiable)
    for roots in (op.outputs, backward.outputs):
        python, names = emit(roots, "{} = {}")
        cpp, same_names = emit(roots, "const auto {} = {};")
        assert names == same_names
        assert [line.removeprefix("const auto ").removesuffix(";") for line in cpp] == python
        for line in python:  # each statement is one primitive on names and constants
            assert re.fullmatch(r"t\d+ = -?[\w.()+*/<>=!&|, -]+", line), line
            compile(line, "", "exec")


def test_both_languages_define_every_primitive():
    called = {
        name
        for n, primitive in PRIMITIVES.items()
        if n not in OF_ROWS
        for name in re.findall(r"(\w+)\(", primitive.text)
    } - {"acc_t"}
    for acc in ("float32", "float64"):
        assert called <= set(memory.scope(acc))
    headers = "".join(map(template, ("types.cuh", "mathematics.cuh", "philox.cuh")))
    written = {re.sub(r"^cast_(\w+)", r"CAST(\1)", n) for n in called}
    assert [n for n in sorted(written) if not re.search(rf"\b{re.escape(n)}", headers)] == []


def test_numbers_in_the_text():
    for value in (1 / 3, 1e-320, 1e300, -0.0, 2):
        _, (name,) = emit([node("const", repr(float(value)))], "{} = {}")
        assert name == f"acc_t({float(value)!r})"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_infinite_constants(value, device):
    x = tensor(-1.0, 0.0, 1.0, device=device)
    out = call(expr.where(X > 0, value, X), x)
    torch.testing.assert_close(out, torch.where(x > 0, value, x), equal_nan=True)


# --- ties and special values ----------------------------------------------------------------------

EDGES = (-math.inf, -3.0, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0, math.inf, math.nan)


def grads_of(function, *args):
    args = [a.clone().requires_grad_() for a in args]
    out = function(*args)
    if not out.requires_grad:  # it follows from comparisons alone
        return [out, *map(torch.zeros_like, args)]
    return [out, *torch.autograd.grad(out, args, torch.ones_like(out), allow_unused=True)]


def clamped(x):
    """With a gradient of 1 on the bounds, as in torch before 2.14."""
    return torch.where((x >= -1) & (x <= 1), x, x.detach().clamp(-1, 1))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (expr.where(X <= 0, 0, X), torch.relu),
        (abs(X), torch.abs),
        (-X, torch.neg),
        (expr.clamp(X, -1, 1), clamped),
        (expr.floor(X), torch.floor),
        (expr.round_(X), torch.round),
        (expr.trunc(X), torch.trunc),
        (expr.sqrt(X), torch.sqrt),
        (expr.rsqrt(X), torch.rsqrt),
        (expr.exp(X), torch.exp),
        (expr.log(X), torch.log),
        (expr.log1p(X), torch.log1p),
        (expr.log2(X), torch.log2),
        (expr.exp2(X), torch.exp2),
        (expr.tanh(X), torch.tanh),
        (expr.expm1(X), torch.expm1),
        (expr.sigmoid(X), torch.sigmoid),
        (expr.erf(X), torch.erf),
        (expr.reciprocal(X), torch.reciprocal),
        (X**2, lambda x: x**2),
        (X**3, lambda x: x**3),
        (X**-1, lambda x: x**-1),
        (X**0.5, lambda x: x**0.5),
        (X**-0.5, torch.rsqrt),
        (X**1.5, lambda x: x**1.5),
        (X**2.5, lambda x: x**2.5),
        (X**-2, lambda x: x**-2),
        (X**0, lambda x: x**0),
        (X**1, lambda x: x**1),
        (2.0**X, lambda x: 2.0**x),
    ],
    ids=lambda v: "" if callable(v) else (emit([v], "{}={}")[0] or ["leaf"])[-1],
)
def test_edges_of_one_variable(ours, theirs, device):
    """Value and derivative where torch's are a matter of convention."""
    x = tensor(*EDGES, device=device)
    for a, b in zip(grads_of(lambda x: call(ours, x), x), grads_of(theirs, x), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (expr.minimum(X, Y), torch.minimum),
        (expr.maximum(X, Y), torch.maximum),
        (X / Y, torch.div),
        (X * Y, torch.mul),
        (expr.pow_(X, Y), torch.pow),
    ],
    ids=["minimum", "maximum", "div", "mul", "pow"],
)
def test_edges_of_two_variables(ours, theirs, device):
    x, y = (
        t.flatten() for t in torch.meshgrid(*[tensor(*EDGES, device=device)] * 2, indexing="ij")
    )
    for a, b in zip(
        grads_of(lambda x, y: call(ours, x, y), x, y), grads_of(theirs, x, y), strict=True
    ):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_edges_of_clamp(device):
    values = tensor(-1.0, 0.0, 1.0, math.nan, device=device)
    x, low, high = (t.flatten() for t in torch.meshgrid(values, values, values, indexing="ij"))
    for a, b in zip(
        grads_of(lambda *args: call(expr.clamp(X, Y, Z), *args), x, low, high),
        grads_of(torch.clamp, x, low, high),
        strict=True,
    ):
        seen = ~(x.isnan() | low.isnan() | high.isnan())
        if torch.__version__ >= "2.14":  # which shares the gradient with the bounds that x lies on
            seen &= (x != low) & (x != high) & (low != high)
        torch.testing.assert_close(a[seen], b[seen])
    out = call(expr.clamp(X, Y, Z), x, low, high)
    torch.testing.assert_close(out, torch.clamp(x, low, high), equal_nan=True)


@pytest.mark.parametrize("name", CASTS)
def test_casts(name, device):
    dtype = getattr(torch, name)
    x = tensor(
        -math.inf,
        -1e10,
        -300.7,
        -128.5,
        -1.5,
        -0.5,
        0.0,
        0.5,
        1.5,
        2.5,
        127.4,
        128.0,
        255.9,
        256.0,
        32767.5,
        1e10,
        1e30,
        math.inf,
        math.nan,
        device=device,
    )
    number = expr.cast(X, name) * 1.0  # within an expression it is a number again
    out, inside = call((expr.cast(X, name), number), x)
    assert out.dtype == dtype
    if dtype.is_floating_point:
        expected = x.to(dtype)
    elif dtype == torch.bool:
        expected = x != 0
    else:
        info = torch.iinfo(dtype)
        expected = torch.tensor(
            [
                0
                if math.isnan(v)
                else info.max
                if v >= info.max
                else max(info.min, int(v) if math.isfinite(v) else info.min)
                for v in x.tolist()
            ],
            dtype=dtype,
            device=device,
        )
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    if dtype != torch.int64:
        torch.testing.assert_close(inside, expected.double(), rtol=0, atol=0, equal_nan=True)


def test_truth_values_are_numbers_and_numbers_are_conditions(device):
    x, y = (
        t.flatten() for t in torch.meshgrid(*[tensor(*EDGES, device=device)] * 2, indexing="ij")
    )
    cases = [
        ((X > 0) + (Y > 0), (x > 0).double() + (y > 0)),
        ((X > 0) * Y, torch.where(x > 0, 1.0, 0.0) * y),
        (-(X < Y), -(x < y).double()),
        (expr.where(X, Y, 7), torch.where(x.bool(), y, 7.0)),
        (expr.where(X < Y, 1, 2), torch.where(x < y, 1.0, 2.0)),
        (expr.minimum(X > 0, Y > 0), ((x > 0) & (y > 0)).double()),
        (2 - (X == Y), 2 - (x == y).double()),
        (expr.exp(X > 0), (x > 0).double().exp()),
    ]
    found = call(tuple(root for root, _ in cases), x, y)
    for ours, (_, expected) in zip(found, cases, strict=True):
        torch.testing.assert_close(ours, expected.double(), equal_nan=True)
    truths = [
        (X < Y, x < y),
        (X <= Y, x <= y),
        (X > Y, x > y),
        (X >= Y, x >= y),
        (X == Y, x == y),
        (X != Y, x != y),
        (~(X > Y), ~(x > y)),
        ((X > 0) & (Y > 0), (x > 0) & (y > 0)),
        ((X > 0) | (Y != 0), (x > 0) | (y != 0)),
        ((X != 0) & True, x != 0),
        (np.True_ & (X > 0), x > 0),
        (np.float64(2) > X, x < 2),
        (np.float32(1) == X, x == 1),
        (~(X != 0), x == 0),
        ((X > 0) == (Y > 0), (x > 0) == (y > 0)),
        (expr.cast(X, "bool"), x.bool()),
    ]
    found = call(tuple(root for root, _ in truths), x, y)
    for ours, (root, expected) in zip(found, truths, strict=True):
        assert torch.equal(ours, expected), emit([root], "{}={}")


def test_operators_and_functions_of_numbers(device):
    x = tensor(0.5, 1.5, -2.5, device=device)
    cases = [
        (1 + X, 1 + x),
        (1 - X, 1 - x),
        (2 * X, 2 * x),
        (1 / X, 1 / x),
        (+X, x),
        (abs(X), x.abs()),
        (round(X), x.round()),
        (math.floor(X), x.floor()),
        (True + X, 1 + x),
        (np.float32(1) + X, 1 + x),
        (np.int64(1) - X, 1 - x),
        (np.sqrt(4.0) * X, 2 * x),
        (np.float16(1) / X, 1 / x),
        (X - np.array(2.0), x - 2),
        (X - 1 / 3, x - 1 / 3),
    ]
    found = call(tuple(root for root, _ in cases), x)
    for ours, (_, expected) in zip(found, cases, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-15, atol=0)


def test_cast_names():
    for dtype in (torch.float16, np.float16, np.dtype("float16"), np.dtype(">f2")):
        assert frt.cast(X, dtype) is frt.cast(X, "float16")
    assert frt.cast(X, np.bool_) is frt.cast(X, bool) is frt.cast(X, "bool")
    assert frt.cast(X, np.int64) is frt.cast(X, int) is frt.cast(X, "int64")
    with pytest.raises(
        frt.TraceError,
        match=re.escape(
            "cast: dtype 'float8' is not one of float16, bfloat16, float32, int8, uint8, "
            "int16, int32, int64, bool"
        ),
    ):
        frt.cast(X, "float8")


def test_threads_that_make_a_node_at_once_get_one():
    """Derivatives are found by identity."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for turn in range(100):
            barrier, made = threading.Barrier(4), [[], [], [], []]

            def make(found, turn=turn, barrier=barrier):
                barrier.wait()
                found += [argument(f"of_turn_{turn}_{k}") for k in range(30)]

            workers = [threading.Thread(target=make, args=(found,)) for found in made]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            assert all(len(set(map(id, same))) == 1 for same in zip(*made, strict=True))
    finally:
        sys.setswitchinterval(before)
