"""The table of pointwise functions: what a kernel would compute, computed by torch in float64."""

import math

import pytest
import torch
from convert_net import one_thread  # noqa: F401  (a fixture)
from torch.nn import functional as F
from torch.testing import assert_close

from fusionrt.convert.cluster import Clustering
from fusionrt.convert.effects import Facts
from fusionrt.convert.fused import traced
from fusionrt.derivatives import gradients
from fusionrt.expr import argument
from fusionrt.graph import emit

SPELLINGS = {
    "acc_t": lambda x: torch.as_tensor(x, dtype=torch.float64),
    "div": torch.div,
    "reciprocal": torch.reciprocal,
    "near_reciprocal": torch.reciprocal,
    "logical_not": torch.logical_not,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "abs_": torch.abs,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "pow_": torch.pow,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "sigmoid_complement": lambda a, s: torch.sigmoid(-a),
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "normcdf": torch.special.ndtr,
    "normpdf": lambda x: torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi),
    "floor": torch.floor,
    "rint": torch.round,
    "trunc": torch.trunc,
    "mul_rn": torch.mul,
    "cast_float16": lambda x: x.half().double(),
    "cast_bfloat16": lambda x: x.bfloat16().double(),
    "cast_float32": lambda x: x.float().double(),
    "where": lambda c, a, b: torch.where(c, *(torch.as_tensor(v, dtype=torch.float64) for v in (a, b))),
}

UNARY = {
    "neg": lambda x: -x,
    "abs": torch.abs,
    "square": torch.square,
    "rsub": lambda x: 1 - x,
    "cube": lambda x: x**3,
    "fourth": lambda x: x**4,
    "zeroth": lambda x: x**0,
    "inverse": lambda x: (x * x + 0.1) ** -2,
    "power": lambda x: (x * x + 0.1) ** 1.3,
    "of two": lambda x: 2**x,
    "half": lambda x: (x * x + 0.1) ** 0.5,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": F.tanh,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "expit": torch.special.expit,
    "sqrt": lambda x: torch.sqrt(x.abs() + 0.1),
    "rsqrt": lambda x: torch.rsqrt(x * x + 0.1),
    "log": lambda x: torch.log(x * x + 0.1),
    "log1p": lambda x: torch.log1p(x * x),
    "log2": lambda x: torch.log2(x * x + 0.1),
    "log10": lambda x: torch.log10(x * x + 0.1),
    "tan": torch.tan,
    "ndtr": torch.special.ndtr,
    "sign": torch.sign,
    "sgn": lambda x: x.sgn(),
    "frac": torch.frac,
    "deg2rad": torch.deg2rad,
    "rad2deg": torch.rad2deg,
    "reciprocal": lambda x: torch.reciprocal(x * x + 0.1),
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "selu": F.selu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu": lambda x: F.elu(x, 0.7),
    "celu": lambda x: F.celu(x, 1.3),
    "celu of torch": torch.celu,
    "hardshrink": lambda x: F.hardshrink(x, 0.25),
    "softshrink": F.softshrink,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "softplus": lambda x: F.softplus(x, 2.0, 3.0),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.75),
    "threshold": lambda x: F.threshold(x, 0.1, 0.3),
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp_min": lambda x: torch.clamp(x, min=0.1),
    "clip": lambda x: torch.clip(x, max=0.3),
    "clamp_max": lambda x: x.clamp_max(0.25),
    "where": lambda x: torch.where(x > 0.1, x, 0.5),
    "masked_fill": lambda x: x.masked_fill(x < 0, -2.0),
    "round": torch.round,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "isnan": lambda x: torch.isnan(x).double() + x,
    "logic": lambda x: ((x >= 0) & (x < 1) | ~(x == 0)) * x,
    "to float": lambda x: x.float().double(),
}
BINARY = {
    "add": lambda x, y: torch.add(x, y, alpha=2),
    "sub": lambda x, y: x.sub(y, alpha=0.5),
    "rsub": torch.rsub,
    "mul": torch.mul,
    "div": lambda x, y: x / (y * y + 0.1),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "max": lambda x, y: torch.max(x, y),
    "min": lambda x, y: x.min(y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp far": lambda x, y: torch.lerp(x, y, 0.7),
    "lerp by": lambda x, y: torch.lerp(x, y, torch.sigmoid(x)),
    "addcmul": lambda x, y: torch.addcmul(x, y, x, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, x * x + 1, value=-0.5),
    "where": lambda x, y: x.where(x > y, y),
    "clamp": lambda x, y: torch.clamp(x, y, y + 0.5),
    "clamp_min": lambda x, y: torch.clamp_min(x, y),
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "div trunc": lambda x, y: torch.div(x, y * y + 0.1, rounding_mode="trunc"),
    "pow": lambda x, y: (x * x + 0.1) ** y,
    "compare": lambda x, y: (x <= y) * y + (x != y).double() * x,
    "and": lambda x, y: torch.logical_and(x > 0, y > 0).double() * x,
    "or": lambda x, y: torch.logical_or(x > 0, y > 0).double() * x,
    "xor": lambda x, y: torch.logical_xor(x > 0, y > 0).double() * x,
    "not": lambda x, y: torch.logical_not(torch.bitwise_or(x > 0, y > 0)).double() * x,
    "matrix": lambda x, y: (x + y) * (x - y),
}
VALUES = [
    -math.inf, -30, -6, -3, -2.5, -1, -0.5, -0.25, -0.0, 0, 1e-3, 0.1, 0.2, 0.25, 0.3, 0.5, 0.75, 1, 1.5,
    2.5, 3, 6, 10, 25, math.inf, math.nan]
# At infinities, where torch's own gives NaN on a CPU; of NaN, where each backward pass does as it likes.
FINITE = [v for v in VALUES if math.isfinite(v)]


def evaluated(expression, names):
    lines, (root,) = emit([expression], "{} = {}")
    scope = dict(SPELLINGS, inf=math.inf, nan=math.nan, **names)
    exec("\n".join(lines), scope)
    return scope[root] if root in scope else eval(root, scope)


def recorded_graph(function, args):
    """The graph that Dynamo makes."""
    graphs = []
    torch._dynamo.reset()
    torch.compile(function, backend=lambda gm, _: graphs.append(gm) or gm.forward)(*args)
    (gm,) = graphs
    return gm.graph


@pytest.mark.parametrize(("table", "size"), [(UNARY, 1), (BINARY, 2)], ids=["unary", "binary"])
def test_functions_are_torchs(table, size):
    """In value and gradient, at kinks, ties and infinities; each is wholly one cluster."""
    base = torch.tensor(VALUES if size == 1 else FINITE, dtype=torch.float64)
    args = [base] if size == 1 else [
        base.repeat_interleave(len(base)).clamp(-6, 6), base.repeat(len(base)).clamp(-6, 6)]
    graph = recorded_graph(lambda *args: [f(*args) * 0.5 for f in table.values()], args)
    clusters = Clustering(Facts(graph)).clusters
    assert len(clusters) == len(table)
    names = {f"a{k}": a for k, a in enumerate(args)}
    ordered = sorted(clusters, key=lambda c: next(n for n in c.results).name)
    by_result = {c.results[0]: c for c in ordered}
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    results = next(n for n in graph.nodes if n.op == "output").args[0]
    for (name, function), result in zip(table.items(), results, strict=True):
        (root,) = traced(by_result[result], inputs, [result])
        leaves = [a.clone().requires_grad_() for a in args]
        expected = function(*leaves) * 0.5
        with_value = torch.isfinite(expected) | (name != "gelu")
        ours = evaluated(root, names).expand_as(expected)
        assert_close(ours[with_value], expected.detach()[with_value], equal_nan=True,
                     msg=lambda m, n=name: f"{n}: {m}")
        slopes = torch.autograd.grad(expected.sum(), leaves, allow_unused=True, materialize_grads=True)
        found = gradients({root: argument("g")}, [argument(f"a{k}") for k in range(size)])
        finite = torch.isfinite(args[0])
        for slope, expression in zip(slopes, found, strict=True):
            slope_of_ours = evaluated(expression, names | {"g": torch.ones_like(args[0])}).expand_as(slope)
            assert_close(slope_of_ours[finite], slope[finite], msg=lambda m, n=name: f"gradient of {n}: {m}")


@pytest.mark.parametrize("train", [False, True])
def test_powers_of_negative_numbers(train):
    """Which torch.fx writes without the parentheses."""
    def signed(x, k):
        return x * (-1) ** k

    def of_sizes(x):
        return x * (-2.0) ** torch.arange(x.shape[-1])

    for function, inputs in ((signed, lambda n: (torch.ones(n), torch.arange(n))),
                             (of_sizes, lambda n: (torch.ones(n),))):
        torch._dynamo.reset()
        run = torch.compile(function, backend="fusionrt")
        for n in (3, 4, 6):
            x, *rest = inputs(n)
            x.requires_grad_(train)
            assert_close(run(x, *rest), function(x, *rest))
    x = torch.arange(4.0).requires_grad_(train)
    run = torch.compile(lambda x: (-2.0) ** x, backend="fusionrt")
    assert_close(run(x), (-2.0) ** x)


COMPARISONS = {
    "bfloat16 and a float32 without dimensions": (
        lambda x, t: x >= t, torch.tensor([0.1, 0.3, 1.0], dtype=torch.bfloat16), torch.tensor(0.3)),
    "uint8 and an int8 without dimensions": (
        lambda x, t: x > t, torch.tensor([0, 3], dtype=torch.uint8), torch.tensor(-3, dtype=torch.int8)),
    "float16 and an int": (lambda x: x == 2049, torch.tensor([2048.0, 2050.0], dtype=torch.float16)),
    "uint8 and a negative int": (lambda x: x == -1, torch.tensor([255, 3], dtype=torch.uint8)),
    "uint8 and a large int": (lambda x: x < 300, torch.tensor([255, 3], dtype=torch.uint8)),
    "int16 and a float": (lambda x: x < 2.5, torch.tensor([2, 3], dtype=torch.int16)),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_are_in_the_common_dtype(name):
    compare, *tensors = COMPARISONS[name]

    def function(*tensors):
        return torch.where(compare(*tensors), 1.0, 0.0) * 2

    torch._dynamo.reset()
    assert_close(torch.compile(function, backend="fusionrt")(*tensors), function(*tensors))
