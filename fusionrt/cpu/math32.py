"""The vocabulary of generated CPU kernels that compute in float32, beside what storage.py has for all.

Each function is a branch-free polynomial that LLVM vectorises; calls of libm would not (sin, cos,
pow_ still are such calls). Strict IEEE: denormals are kept, NaN and infinities pass as in torch.

The coefficients are our own minimax fits: Lawson-weighted least squares of the function named at
each table against its relative error on 1500 Chebyshev nodes (truth: mpmath), rounded to float32
from the lowest power up with a refit of the rest after each. `ulp` in a docstring is the largest
error measured against float64 over float32 inputs of the whole range, in units of the last place.
"""
import math

import numpy as np

from fusionrt.cpu.storage import (
    abs_,
    bfloat16_to_float,
    bits_to_float,
    copysign,
    float_to_bits,
    float_to_half,
    fma,
    half_to_float,
    horner,
    in_register,
    inline,
    monic,
    sqrt,
    store_bfloat16,
    where,
)

acc_t = np.float32
INV_SQRT_2PI = acc_t(1 / math.sqrt(2 * math.pi))


def _table(*coefficients):
    return tuple(np.float32(c) for c in coefficients)


# 1.5 * 2^23: adding it to |x| < 2^22 rounds x to an integer, which the low bits then hold. Not
# `np.int32(rint(x))`, because LLVM leaves the conversion of a NaN or of a large value undefined.
MAGIC, MAGIC_BITS = np.float32(12582912.0), np.int32(0x4B400000)
ONE_BITS = np.int32(0x3F800000)
ZERO, HALF, ONE, TWO = _table(0.0, 0.5, 1.0, 2.0)
inf, nan = _table(math.inf, math.nan)
LOG2E = np.float32(1.4426950408889634)
# ln 2 = LN2_9BIT + LN2_REST: a multiple of 355/512 up to 2^15 is exact, and so is x minus it.
LN2_9BIT, LN2_REST = _table(355 / 512, math.log(2) - 355 / 512)
# ln 2 and log2 e as float32 plus the float32 of what is left.
LN2, LN2_LOW = np.float32(math.log(2)), np.float32(math.log(2) - float(np.float32(math.log(2))))
LOG2E_LOW = np.float32(1.925963033500011e-08)

# (e^r - 1 - r) / r^2 on |r| <= ln2/2
EXP = _table(0.001382013550028205, 0.008368685841560364, 0.04166827350854874, 0.1666652113199234,
             0.4999999403953552)
# the same, weighted for the relative error of e^r - 1
EXPM1 = _table(0.00019763388263527304, 0.001393234240822494, 0.008333544246852398,
               0.04166649281978607, 0.1666666567325592, 0.5)
# (2^r - 1) / r on |r| <= 1/2
EXP2 = _table(0.0001532646274426952, 0.0013390806270763278, 0.009618505835533142,
              0.05550359934568405, 0.24022647738456726, 0.6931471824645996)
# (log(1+f) - f + f^2/2) / f^3 on |f| <= 1/3
LOG = _table(0.11958466470241547, -0.12830117344856262, 0.1076955497264862, -0.12199417501688004,
             0.1430271714925766, -0.16679295897483826, 0.19999681413173676, -0.2499982714653015,
             0.3333333432674408)
# (log2(1+f) - f log2(e)) / f^2 on |f| <= 1/3
LOG2 = _table(0.1731417328119278, -0.19387021660804749, 0.1552203744649887, -0.1738440990447998,
              0.20636048913002014, -0.2408093810081482, 0.2885335385799408, -0.3606657087802887,
              0.480898380279541, -0.7213475704193115)
# (r / tanh(r) - 1) / r^2 as a polynomial of r^2 on |r| <= 0.95
COTH = _table(-0.00017093449423555285, 0.0020871476735919714, -0.022213755175471306, 0.3333325684070587)
# erf(x)/x - 1 as a polynomial of x^2 on |x| <= 1
ERF = _table(7.806903158780187e-05, -0.0007997853099368513, 0.005187162198126316,
             -0.026853347197175026, 0.11283578723669052, -0.3761262595653534, 0.12837916612625122)
# -log(erfc(x)) on [1, 4], weighted for the relative error of erf
LOG_ERFC = _table(2.169735853385646e-05, -0.00044146639993414283, 0.004205241799354553,
                  -0.02521020732820034, 0.10842189192771912, 0.6332165598869324,
                  1.1295802593231201, -0.000188466627150774)
# r / tanh(r ln2/2) as a polynomial of r^2 on |r| <= 1/2, weighted for the relative error of 2^r (1.3e-9)
HALF_COTH = (-0.00092292670160532, 0.1155247688293457, 2.885390043258667)
# normcdf(-a) e^(a^2/2) as a quotient of polynomials of a in [0, 14.6]; the denominator begins with a^4. The
# relative error may grow as that of the exponential does, 7e-8 at 0 to 2e-6; and what the exponential is
# always short of, because -log2(e)/2 is rounded, is made up for.
NORMCDF_ABOVE = _table(0.39884209632873535, 2.97275710105896,
                       9.345370292663574, 13.537604331970215)
NORMCDF_BELOW = _table(7.442540645599365, 24.558574676513672,
                       40.29352569580078, 27.075210571289062)


# --- exponentials and roots -----------------------------------------------------------------------

@inline
def rsqrt(x):
    """1 / sqrt(x). 1.49 ulp, two roundings as in torch."""
    return ONE / sqrt(x)


@inline
def _round_to_int(x):
    """The nearest integer of |x| < 2^22, as float32 and as int32; garbage but no trap for NaN."""
    shifted = x + MAGIC
    return shifted - MAGIC, np.int32(float_to_bits(shifted) - MAGIC_BITS)


@inline
def _power_of_two(k):
    """2^k for -127 < k < 128."""
    return bits_to_float(np.int32(np.int32(k << np.int32(23)) + ONE_BITS))


@inline
def _scale(y, k):
    """y * 2^k for |k| < 252, rounded once: the first factor is exact, the second may underflow."""
    first = np.int32(k >> np.int32(1))
    return y * _power_of_two(first) * _power_of_two(np.int32(k - first))


@inline
def _exp_reduce(x):
    """k and r with e^x = 2^k e^r, |r| <= ln2/2."""
    magic = in_register(MAGIC)
    shifted = fma(x, in_register(LOG2E), magic)
    n = shifted - magic
    r = fma(n, in_register(-LN2_REST), fma(n, in_register(-LN2_9BIT), x))
    return np.int32(float_to_bits(shifted) - MAGIC_BITS), r


@inline
def _exp_mantissa(r):
    """e^r for |r| <= ln2/2."""
    one = in_register(ONE)
    return fma(r, fma(r, horner(r, EXP), one), one)


@inline
def _exp_bounded(x):
    """e^x for |x| < 87, where neither overflow nor underflow can happen."""
    k, r = _exp_reduce(x)
    return _exp_mantissa(r) * _power_of_two(k)


@inline
def exp(x):
    """e^x. 0.88 ulp (torch 0.57)."""
    top, bottom = in_register(acc_t(89.0)), in_register(acc_t(-104.0))
    x = where(x > top, top, x)
    x = where(x < bottom, bottom, x)
    k, r = _exp_reduce(x)
    return _scale(_exp_mantissa(r), k)


@inline
def exp2(x):
    """2^x. 0.87 ulp (torch 0.89)."""
    x = where(x > acc_t(129.0), acc_t(129.0), x)
    x = where(x < acc_t(-151.0), acc_t(-151.0), x)
    n, k = _round_to_int(x)
    r = x - n
    return _scale(fma(r, horner(r, EXP2), ONE), k)


@inline
def _expm1_bounded(x):
    """e^x - 1 for -30 <= x < 88 and the halves up to 89: the result is the product of the two."""
    k, r = _exp_reduce(x)
    p = fma(r * r, horner(r, EXPM1), r)
    # 2^128 does not exist: take half of it and double the end result.
    scale = _power_of_two(where(k > np.int32(127), np.int32(127), k))
    return fma(scale, p, scale - ONE), where(k > np.int32(127), TWO, ONE)


@inline
def expm1(x):
    """e^x - 1. 1.43 ulp (torch 1.00)."""
    bounded = where(x > acc_t(89.0), acc_t(89.0), x)
    bounded = where(bounded < acc_t(-30.0), acc_t(-30.0), bounded)
    y, factor = _expm1_bounded(bounded)
    return copysign(y * factor, x)  # for -0


# --- logarithms -----------------------------------------------------------------------------------

@inline
def _split_exponent(x):
    """k and m with x = 2^k m, 2/3 <= m < 4/3, for positive normal x."""
    bits = float_to_bits(x)
    k = np.int32(np.int32(bits - np.int32(0x3F2AAAAB)) >> np.int32(23))
    return k, bits_to_float(np.int32(bits - np.int32(k << np.int32(23))))


@inline
def _normalize(x):
    """x, or 2^23 x if x is denormal, and the exponent to add: 0 or -23."""
    tiny = x < acc_t(1.1754943508222875e-38)
    return where(tiny, x * acc_t(8388608.0), x), where(tiny, acc_t(-23.0), ZERO)


@inline
def _log_specials(x, y):
    """y = log(x) with its special values: log(0) = -inf, log(negative) = NaN, inf and NaN stay."""
    y = where(x < inf, y, x)
    y = where(x == ZERO, -inf, y)
    return where(x < ZERO, nan, y)


@inline
def _log_sum(k, f):
    """k ln2 + log(1 + f) for |f| <= 1/3."""
    square = f * f
    tail = fma(square * f, horner(f, LOG), acc_t(-0.5) * square)
    return fma(k, LN2, f + fma(k, LN2_LOW, tail))


@inline
def log(x):
    """Natural logarithm. 0.80 ulp (torch 0.89)."""
    normal, exponent = _normalize(x)
    k, m = _split_exponent(normal)
    return _log_specials(x, _log_sum(acc_t(k) + exponent, m - ONE))


@inline
def log2(x):
    """Logarithm to base 2, exact for powers of two. 1.34 ulp (torch 0.67)."""
    normal, exponent = _normalize(x)
    k, m = _split_exponent(normal)
    f = m - ONE
    tail = fma(f * f, horner(f, LOG2), f * LOG2E_LOW)
    return _log_specials(x, (acc_t(k) + exponent) + fma(f, LOG2E, tail))


@inline
def log1p(x):
    """log(1 + x), accurate for small x. 1.53 ulp (torch 1.00)."""
    u = ONE + x
    k, m = _split_exponent(u)
    # 2^-k (1 + x) - 1 with one rounding, from x and not from the rounded u. Where 2^-k would leave
    # the exponent range the 1 is lost in x anyway.
    large = k > np.int32(64)
    scale = _power_of_two(np.int32(-where(large, np.int32(0), k)))
    f = where(large, m - ONE, fma(x, scale, scale - ONE))
    return copysign(_log_specials(u, _log_sum(acc_t(k), f)), x)  # for -0


# --- smooth steps ---------------------------------------------------------------------------------

@inline
def tanh(x):
    """Hyperbolic tangent. With c = r / tanh(r), e^2r = (c + r) / (c - r). Of e^2|x| = 16^n e^2r it is
    r - r (c - 1) / c for n = 0, up to |x| = 0.95, and else 1 - 2 / (e^2|x| + 1): one division for both.

    1.34 ulp (torch 0.52).
    """
    a, top, magic, half = abs_(x), in_register(acc_t(10.0)), in_register(MAGIC), in_register(HALF)
    a = where(a > top, top, a)
    is_near = a < in_register(acc_t(0.95))
    shifted = where(is_near, magic, fma(a, in_register(HALF * LOG2E), magic))
    r = fma(shifted - magic, in_register(-TWO * LN2), a)
    square = r * r
    excess = square * horner(square, COTH)
    c = excess + in_register(ONE)
    bits = np.int32(np.int32(float_to_bits(shifted) << np.int32(25)) + np.int32(0x3F000000))
    below = fma(bits_to_float(bits) - half, c + r, c)
    return copysign(where(is_near, r, ONE) - where(is_near, r * excess, c - r) / below, x)


@inline
def softmaxed(x, most, scale):
    """A probability: of x, by the largest of its row and 1 over the sum of their exponentials."""
    return exp(x - most) * scale


@inline
def sigmoid(x):
    """1 / (1 + e^-x), with e^-|x| so that it underflows where e^x does, not before.

    2.31 ulp (torch 2.47 for x > -87, and 0 for the denormals below). The exponential is multiplied by
    2^64 and so is the 1: it is no denormal then, and the division rounds what is one once.
    """
    a, bottom = -abs_(x), in_register(acc_t(-104.0))
    k, r = _exp_reduce(where(a < bottom, bottom, a))
    one = in_register(acc_t(2.0**64))
    e = _exp_mantissa(r) * _power_of_two(np.int32(k + np.int32(64)))
    return where(x < ZERO, e, one) / (one + e)


@inline
def softplus(x):
    """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|). 2.06 ulp (torch 1.50)."""
    e = exp(-abs_(x))
    large = e > acc_t(1 / 3)
    f = where(large, fma(e, HALF, acc_t(-0.5)), e)  # 1 + e = 2 (1 + f)
    return where(x > ZERO, x, ZERO) + _log_sum(where(large, ONE, ZERO), f)


@inline
def erf(x):
    """Error function: x P(x^2) for |x| < 1, else 1 - e^-Q(|x|). 1.09 ulp (torch 0.77)."""
    a = abs_(x)
    near = fma(x, horner(x * x, ERF), x)
    far = ONE - _exp_bounded(-horner(where(a > acc_t(4.0), acc_t(4.0), a), LOG_ERFC))
    return where(a < ONE, near, copysign(far, x))


# --- the normal distribution ----------------------------------------------------------------------
# 2^r = (c + r) / (c - r) with c = r / tanh(r ln2/2): where a division is due anyway that takes half the
# operations of a polynomial. r and c are multiplied by LIFT, so that (c + r) 2^n is no denormal: then 2^n
# can be added to its exponent, and the division rounds what is denormal once. NaN: in c - r it stays.
LIFT = 2.0**32
LIFTED_MAGIC, LIFTED_LOG2E = np.float32(12582912.0 * LIFT), np.float32(float(LOG2E) * LIFT)
LIFTED_COTH = _table(*(c / LIFT**power for c, power in zip(HALF_COTH, (3, 1, -1), strict=True)))


@inline
def _half_coth(r):
    return horner(r * r, LIFTED_COTH)


@inline
def _raise(y, shifted):
    """y * 2^n of the n in the low bits of `shifted`, n LIFT + LIFTED_MAGIC; y and the result are normal."""
    return bits_to_float(np.int32(float_to_bits(y) + np.int32(float_to_bits(shifted) << np.int32(23))))


@inline
def _bell(a):
    """e^(-a^2/2) as above / below, for 0 <= a <= 14.5. Rounding a * slope costs up to 90 ulp, at a = 14."""
    magic = in_register(LIFTED_MAGIC)
    u = a * in_register(-LIFTED_LOG2E * HALF)
    shifted = fma(a, u, magic)
    r = fma(a, u, magic - shifted)
    middle = _half_coth(r)
    return _raise(middle + r, shifted), middle - r


@inline
def normcdf(x):
    """Standard normal distribution function, erfc(-x / sqrt 2) / 2, and with it gelu.

    2.8 ulp for x > 0, 7 down to x = -2, 16 to -3, 41 to -5, 94 (1e-5 relative) to the end of the tail;
    torch's ndtr has only absolute accuracy (142 ulp at x = -3), nor has its gelu more (37 ulp at x = -2,
    2100 at -3, no digit below -5). To carry what the exponential loses takes 6 % of gelu's time.
    """
    a, top = abs_(x), in_register(acc_t(14.5))
    a = where(a > top, top, a)
    above, below = _bell(a)
    tail = above * horner(a, NORMCDF_ABOVE) / (below * monic(a, NORMCDF_BELOW))
    return where(x < ZERO, tail, in_register(ONE) - tail)


@inline
def normpdf(x):
    """Standard normal density, e^(-x^2/2) / sqrt(2 pi). 4.7 ulp for |x| < 2, 93 in the tails."""
    a, top = abs_(x), in_register(acc_t(14.5))
    above, below = _bell(where(a > top, top, a))
    return above * in_register(INV_SQRT_2PI) / below


@inline
def reciprocal(x):
    """1 / x."""
    return ONE / x


near_reciprocal = reciprocal


@inline
def sigmoid_complement(x, sigmoid_of_x):
    """1 - sigmoid(x), without the cancellation where sigmoid(x) is near 1."""
    return where(x < ZERO, ONE - sigmoid_of_x, sigmoid(-x))


# --- calls of libm --------------------------------------------------------------------------------

@inline
def pow_(a, b):
    """a ** b. A call of powf for each element: not vectorised. Below 1 ulp."""
    return acc_t(math.pow(a, b))


@inline
def sin(x):
    """A call of sinf for each element: not vectorised. 0.57 ulp."""
    return acc_t(math.sin(x))


@inline
def cos(x):
    """A call of cosf for each element: not vectorised. 0.57 ulp."""
    return acc_t(math.cos(x))


# --- loads and casts: stored value -> acc_t, acc_t -> acc_t ---------------------------------------

@inline
def load_float16(bits):
    """fp16 bits -> acc_t, exact."""
    return half_to_float(bits)


@inline
def load_bfloat16(bits):
    """bf16 bits -> acc_t, exact."""
    return bfloat16_to_float(bits)


@inline
def load_float32(x):
    """A number of any other type -> acc_t, to nearest even."""
    return acc_t(x)


load_float64 = load_bool = load_float32
load_int8 = load_uint8 = load_int16 = load_int32 = load_int64 = load_float32


@inline
def cast_float16(x):
    """x rounded to fp16, as acc_t."""
    return half_to_float(float_to_half(x))


@inline
def cast_bfloat16(x):
    """x rounded to bf16, as acc_t."""
    return bfloat16_to_float(store_bfloat16(x))


@inline
def cast_float32(x):
    """x rounded to float32, as acc_t."""
    return x
