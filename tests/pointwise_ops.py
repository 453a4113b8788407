"""The pointwise ops as the tests see them: their kinds, their arguments, formulas exact in float64."""

import inspect
import math

import torch
from checking import accumulated, check, make

from fusionrt.catalogue import COLUMNS, OPS, ROWS

MODULES = ("activations", "dropout", "pointwise", "quantize")
ALL = sorted(name for name, op in OPS.items() if op.__module__.rpartition(".")[2] in MODULES)
RANDOM = [n for n in ALL if "training" in inspect.signature(OPS[n]).parameters]
DIFFERENTIABLE = [n for n in ALL if n not in ("quantize_int8", "dequantize_int8")]
UNARY = [n for n in DIFFERENTIABLE if len(OPS[n].example(lambda *shape, **_: shape)) == 1]

# Where functions and their derivatives have kinks, tails, denormal results.
FINITE = [
    0.0, -0.0, 1e-45, -1e-45, 1e-39, 1.1754944e-38, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 6.0, -6.0,
    20.0, 20.1, -20.0, 90.0, -90.0, 110.0, -110.0, 1e4, -1e4,
]
SPECIALS = [*FINITE, 1e10, -1e10, 3.4028235e38, -3.4028235e38, math.inf, -math.inf, math.nan]


def prelu(x, alpha, bias, *, bias_first=True):
    """torch's takes no alpha of full shape."""
    y = x + bias if bias_first else x
    y = torch.where(y > 0, y, alpha * y)
    return y if bias_first else y + bias


def exact_gelu(x):
    """torch's own cancels in the tail: 1 + erf(x)."""
    return x * torch.erfc(x * -math.sqrt(0.5)) * 0.5


def exact_sigmoid(x):
    """torch's own is exact, its derivative is not: s (1 - s)."""
    return 1 / (1 + torch.exp(-x.clamp(min=-700)))


def exact_gelu_tanh(x):
    return x * exact_sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


# In float64, where the reference is not exact enough to be compared with.
EXACT = {
    "gelu": exact_gelu,
    "gelu_tanh": exact_gelu_tanh,
    "bias_gelu": lambda x, bias: exact_gelu(x + bias),
    "geglu": lambda x, gate: exact_gelu(x) * gate,
    "gelu_dropout": lambda x, training: exact_gelu(x),
    "sigmoid": exact_sigmoid,
    "add_sigmoid": lambda a, b: exact_sigmoid(a + b),
    "scale_bias_sigmoid": lambda x, w, b: exact_sigmoid(x * w + b),
    # torch's own have float32's 1/6, on CUDA in the results as well
    "hardsigmoid": lambda x: (x + 3).clamp(0, 6) / 6,
    "hardswish": lambda x: x * ((x + 3).clamp(0, 6) / 6),
}


def exact(name, kwargs):
    return EXACT[name] if name in EXACT and "approximate" not in kwargs else OPS[name].reference


def example(name, shape, dtype, device):
    """The op's typical arguments, in another size."""

    def sized(*full, dtype=dtype):
        assert full in ((ROWS, COLUMNS), (COLUMNS,), ())
        return make({2: shape, 1: shape[-1:], 0: ()}[len(full)], dtype, device)

    args = list(OPS[name].example(sized))
    if name == "prelu_bias" and len(shape) != 2:
        args[1] = make((), dtype, device)
    return args, ({"training": False} if name in RANDOM else {})


def check_op(name, args, kwargs=None, again=None):
    """`check` of a registered op."""
    kwargs = kwargs or {}
    magnitudes = prelu_magnitudes if name == "prelu_bias" else None
    return check(OPS[name], args, kwargs, exact=exact(name, kwargs), magnitudes=magnitudes,
                 again=again)


def prelu_magnitudes(args, kwargs, grad_output):
    """The channels that alpha counts are dimension 1, not the last."""
    x, alpha, bias = args
    if alpha.dim() == 1:
        alpha = alpha.reshape(-1, *[1] * (x.dim() - 2))
    sizes = accumulated(prelu, (x, alpha, bias), kwargs, grad_output)
    return [size.reshape(a.shape) for size, a in zip(sizes, args, strict=True)]
