"""Cheaper special functions for kernels whose results are float16 or bfloat16; otherwise as math32.

Errors below 1e-4 disappear in the rounding of such results (half an ulp is 2.4e-4 and more), so a
polynomial of degree four serves as 2^r and one reciprocal as the heart of the normal distribution.
Specials and denormals as in math32. Coefficients: our own fits to least relative error (reweighted
least squares on Chebyshev points); the bound measured is given with each function.
"""
from fusionrt.cpu import math32
from fusionrt.cpu.math32 import (
    HALF,
    INV_SQRT_2PI,
    LOG2E,
    ONE,
    TWO,
    _round_to_int,
    _scale,
    _table,
    acc_t,
)
from fusionrt.cpu.storage import abs_, copysign, fma, horner, inline, where

# 2^r on |r| <= 1/2, relative error 2.6e-6
EXP2 = _table(0.00957009382545948, 0.05591785907745361, 0.240247443318367, 0.6931217908859253,
              0.9999992847442627)
# normcdf(-t) e^(t^2/2) / u as a polynomial of u = 1 / (1 + 0.38 t), relative error 3.6e-5
NORMCDF = _table(-0.08992928266525269, 0.18887871503829956, 0.09197788685560226, 0.15783007442951202,
                 0.15122507512569427)
NORMCDF_SLOPE = acc_t(0.38)


@inline
def exp(x):
    """e^x; 1e-5 relative (the product with log2 e is rounded)."""
    x = where(x > acc_t(89.0), acc_t(89.0), x)
    x = where(x < acc_t(-104.0), acc_t(-104.0), x)
    n, k = _round_to_int(x * LOG2E)
    return _scale(horner(fma(x, LOG2E, -n), EXP2), k)


@inline
def sigmoid(x):
    """With e = e^-|x|, 1 / (1 + e) or e / (1 + e); 1e-5 relative."""
    e = exp(-abs_(x))
    y = ONE / (ONE + e)
    return where(x < acc_t(0.0), e * y, y)


@inline
def sigmoid_complement(x, sigmoid_of_x):
    """1 - sigmoid(x)."""
    return ONE - sigmoid_of_x


@inline
def tanh(x):
    """(1 - e) / (1 + e) with e = e^-2|x|, and x itself below 0.01, where that cancels; 4e-5 relative."""
    a = abs_(x)
    e = exp(-TWO * a)
    return where(a < acc_t(0.01), x, copysign((ONE - e) / (ONE + e), x))


@inline
def normpdf(x):
    """Standard normal density; 1e-5 relative."""
    return exp(-HALF * (x * x)) * INV_SQRT_2PI


@inline
def normcdf(x):
    """Standard normal distribution function; 5e-5 relative, in the lower tail as well."""
    u = ONE / fma(NORMCDF_SLOPE, abs_(x), ONE)
    tail = horner(u, NORMCDF) * u * exp(-HALF * (x * x))
    return where(x > acc_t(0.0), ONE - tail, tail)


OVERRIDES = {f.__name__: f for f in (exp, sigmoid, sigmoid_complement, tanh, normpdf, normcdf)}
NAMES = {**vars(math32), **OVERRIDES}
