"""The vocabulary of generated CPU kernels that compute in float64: the names of math32, by libm.

The calls do not vectorise. float64 is what gradcheck and the references use, not what must be fast.
"""
import math

import numpy as np

from fusionrt.cpu.storage import (
    abs_,
    bfloat16_to_float,
    fma,
    half_to_float,
    inline,
    sqrt,
    store_bfloat16,
    store_float16,
    where,
)

acc_t = np.float64
INV_SQRT_2PI = acc_t(1 / math.sqrt(2 * math.pi))

ZERO, HALF, ONE = acc_t(0.0), acc_t(0.5), acc_t(1.0)
inf, nan = acc_t(math.inf), acc_t(math.nan)
# 1 / sqrt(2) as float64 and what that leaves.
SQRT_HALF, SQRT_HALF_LOW = acc_t(math.sqrt(0.5)), acc_t(-4.833646656726457e-17)
INV_SQRT_PI = acc_t(1 / math.sqrt(math.pi))


@inline
def rsqrt(x):
    """1 / sqrt(x)."""
    return ONE / sqrt(x)


@inline
def exp(x):
    """e^x."""
    return math.exp(x)


@inline
def expm1(x):
    """e^x - 1."""
    return math.expm1(x)


@inline
def log(x):
    """Natural logarithm."""
    return math.log(x)


@inline
def log2(x):
    """Logarithm to base 2."""
    return math.log2(x)


@inline
def log1p(x):
    """log(1 + x), accurate for small x."""
    return math.log1p(x)


@inline
def pow_(a, b):
    """a ** b."""
    return math.pow(a, b)


@inline
def sin(x):
    """Sine."""
    return math.sin(x)


@inline
def cos(x):
    """Cosine."""
    return math.cos(x)


@inline
def tanh(x):
    """Hyperbolic tangent."""
    return math.tanh(x)


@inline
def erf(x):
    """Error function."""
    return math.erf(x)


@inline
def softmaxed(x, most, scale):
    """A probability: of x, by the largest of its row and 1 over the sum of their exponentials."""
    return exp(x - most) * scale


@inline
def sigmoid(x):
    """1 / (1 + e^-x), written with e^-|x| so that it underflows where e^x does, not before."""
    e = math.exp(-abs_(x))
    return where(x < ZERO, e, ONE) / (ONE + e)


@inline
def softplus(x):
    """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)."""
    return where(x > ZERO, x, ZERO) + math.log1p(math.exp(-abs_(x)))


@inline
def normcdf(x):
    """Standard normal distribution function, erfc(z) / 2 with z = -x / sqrt 2."""
    z = -x * SQRT_HALF
    # In the tail erfc turns a relative error of z into one z^2 times as large: correct what
    # rounding z lost to first order, erfc(z + d) = erfc(z) - 2 / sqrt(pi) e^(-z^2) d.
    lost = fma(-x, SQRT_HALF, -z) - x * SQRT_HALF_LOW
    correction = INV_SQRT_PI * math.exp(-z * z) * lost
    return HALF * math.erfc(z) - where(abs_(z) < inf, correction, ZERO)


@inline
def reciprocal(x):
    """1 / x."""
    return ONE / x


near_reciprocal = reciprocal


@inline
def sigmoid_complement(x, sigmoid_of_x):
    """1 - sigmoid(x), without the cancellation where sigmoid(x) is near 1."""
    return sigmoid(-x)


@inline
def normpdf(x):
    """Standard normal density, e^(-x^2/2) / sqrt(2 pi)."""
    return math.exp(acc_t(-0.5) * x * x) * INV_SQRT_2PI


@inline
def load_float16(bits):
    """fp16 bits -> acc_t, exact."""
    return acc_t(half_to_float(bits))


@inline
def load_bfloat16(bits):
    """bf16 bits -> acc_t, exact."""
    return acc_t(bfloat16_to_float(bits))


@inline
def load_float32(x):
    """A number of any other type -> acc_t, to nearest even."""
    return acc_t(x)


load_float64 = load_bool = load_float32
load_int8 = load_uint8 = load_int16 = load_int32 = load_int64 = load_float32


@inline
def cast_float16(x):
    """x rounded to fp16, as acc_t."""
    return acc_t(half_to_float(store_float16(x)))


@inline
def cast_bfloat16(x):
    """x rounded to bf16, as acc_t."""
    return acc_t(bfloat16_to_float(store_bfloat16(x)))


@inline
def cast_float32(x):
    """x rounded to float32, as acc_t."""
    return acc_t(np.float32(x))
