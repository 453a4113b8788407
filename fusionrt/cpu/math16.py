"""Cheaper special functions for kernels whose results are float16 or bfloat16; otherwise as math32.

Errors below 1e-4 disappear in the rounding of such results (half an ulp is 2.4e-4 and more), so the
quotient that is 2^r has two coefficients less, and the normal distribution four. Specials and denormals
as in math32. Coefficients: our own fits to least relative error (reweighted least squares on Chebyshev
points); the bound measured is given with each function.
"""
from fusionrt.cpu import math32
from fusionrt.cpu.math32 import (
    HALF,
    INV_SQRT_2PI,
    LIFT,
    LIFTED_LOG2E,
    LIFTED_MAGIC,
    ONE,
    TWO,
    ZERO,
    _raise,
    _table,
    acc_t,
)
from fusionrt.cpu.storage import abs_, copysign, fma, horner, in_register, inline, monic, where

# r / tanh(r ln2/2) as a polynomial of r^2 on |r| <= 1/2: 2^r to 4.4e-7. Lifted as in math32.
HALF_COTH = _table(0.11523564904928207 / LIFT, 2.8854081630706787 * LIFT)
# normcdf(-a) e^(a^2/2) as a quotient of polynomials of a in [0, 14.6], relative error 2.5e-5; the denominator
# begins with a^3
NORMCDF_ABOVE = _table(0.3993673324584961, 1.7726267576217651, 3.175421953201294)
NORMCDF_BELOW = _table(4.474662780761719, 8.617290496826172, 6.350685119628906)


@inline
def _exp_parts(square, slope):
    """e^-x as above / below, where x LIFT = -square * slope * ln2, in [0, 104]."""
    magic = in_register(LIFTED_MAGIC)
    shifted = fma(square, slope, magic)
    r = fma(square, slope, magic - shifted)
    middle = horner(r * r, HALF_COTH)
    return _raise(middle + r, shifted), middle - r


@inline
def _bounded(x, top):
    """|x|, or `top` if that is less; NaN stays."""
    a, top = abs_(x), in_register(top)
    return where(a > top, top, a)


@inline
def exp(x):
    """e^x; 2e-6 relative."""
    above, below = _exp_parts(_bounded(x, acc_t(104.0)), in_register(-LIFTED_LOG2E))
    return where(x < ZERO, above, below) / where(x < ZERO, below, above)


@inline
def softmaxed(x, most, scale):
    """A probability: of x, by the largest of its row and 1 over the sum of their exponentials."""
    return exp(x - most) * scale


@inline
def sigmoid(x):
    """With e = e^-|x|, 1 / (1 + e) or e / (1 + e); 2e-6 relative."""
    above, below = _exp_parts(_bounded(x, acc_t(104.0)), in_register(-LIFTED_LOG2E))
    return where(x < ZERO, above, below) / (below + above)


@inline
def sigmoid_complement(x, sigmoid_of_x):
    """1 - sigmoid(x)."""
    return ONE - sigmoid_of_x


@inline
def tanh(x):
    """(1 - e) / (1 + e) with e = e^-2|x|, and x itself below 0.01, where that cancels; 4e-5 relative."""
    a = _bounded(x, acc_t(52.0))
    above, below = _exp_parts(a, in_register(-TWO * LIFTED_LOG2E))
    return where(a < in_register(acc_t(0.01)), x, copysign((below - above) / (below + above), x))


@inline
def normpdf(x):
    """Standard normal density; 6e-6 relative."""
    a = _bounded(x, acc_t(14.5))
    above, below = _exp_parts(a * a, in_register(-HALF * LIFTED_LOG2E))
    return above * in_register(INV_SQRT_2PI) / below


@inline
def normcdf(x):
    """Standard normal distribution function; 3e-5 relative, in the lower tail as well."""
    a = _bounded(x, acc_t(14.5))
    above, below = _exp_parts(a * a, in_register(-HALF * LIFTED_LOG2E))
    tail = above * horner(a, NORMCDF_ABOVE) / (below * monic(a, NORMCDF_BELOW))
    return where(x < ZERO, tail, ONE - tail)


OVERRIDES = {f.__name__: f for f in (exp, sigmoid, sigmoid_complement, tanh, normpdf, normcdf)}
NAMES = {**vars(math32), **OVERRIDES}
