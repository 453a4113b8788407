"""What generated CPU kernels share whatever their accumulation type: LLVM instructions that Numba
cannot spell, the storage formats (fp16, bf16, integers) and the Philox random numbers.

Everything here is branch-free and inlined, so that LLVM vectorises the loop it is used in.
Trap: Numba widens int32/uint32 arithmetic to 64 bits, hence the `np.uint32(...)` around every
integer operation; LLVM folds the pair of conversions away.
"""
import platform

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils, config
from numba.extending import intrinsic

# error_model="numpy": x / 0 is inf instead of a branch that raises. No fastmath: strict IEEE.
# To be called from compiled code alone: wrappers for Python were a fifth of a kernel's compilation.
inline = njit(error_model="numpy", nogil=True, fastmath=False, boundscheck=False, forceinline=True,
              no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False)

_LLVM_FLOATS = {types.float32: (ir.FloatType(), "f32"), types.float64: (ir.DoubleType(), "f64")}


def _call_llvm(builder, name, result, args):
    # By full name: llvmlite's declare_intrinsic knows only some of LLVM's intrinsics.
    fnty = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, fnty, name), args)


def _float_intrinsic(name):
    """The one-argument float -> float instruction llvm.<name>."""

    @intrinsic
    def unary(typing_context, x):
        def codegen(context, builder, signature, args):
            llvm_type, suffix = _LLVM_FLOATS[signature.return_type]
            return _call_llvm(builder, f"llvm.{name}.{suffix}", llvm_type, args)

        return (x(x), codegen) if x in _LLVM_FLOATS else None

    return unary


# llvm.sqrt is correctly rounded; llvm.rint is torch.round (half to even).
abs_ = _float_intrinsic("fabs")
sqrt = _float_intrinsic("sqrt")
floor = _float_intrinsic("floor")
rint = rint_near = _float_intrinsic("rint")
trunc = _float_intrinsic("trunc")
exp2 = _float_intrinsic("exp2")  # a call of libm


@intrinsic
def fma(typing_context, a, b, c):
    """a * b + c with one rounding. Without hardware FMA (x86 before 2013) a slow call of libm."""

    def codegen(context, builder, signature, args):
        llvm_type, suffix = _LLVM_FLOATS[signature.return_type]
        return _call_llvm(builder, f"llvm.fma.{suffix}", llvm_type, args)

    return (a(a, a, a), codegen) if a == b == c and a in _LLVM_FLOATS else None


@intrinsic
def copysign(typing_context, x, sign):
    """|x| with the sign of `sign`."""

    def codegen(context, builder, signature, args):
        llvm_type, suffix = _LLVM_FLOATS[signature.return_type]
        return _call_llvm(builder, f"llvm.copysign.{suffix}", llvm_type, args)

    return (x(x, x), codegen) if x == sign and x in _LLVM_FLOATS else None


@intrinsic
def where(typing_context, condition, a, b):
    """a if condition else b, as an LLVM select: both sides are evaluated, never a branch."""
    result = typing_context.unify_types(a, b)
    if result is None or not isinstance(condition, (types.Boolean, types.Number)):
        return None

    def codegen(context, builder, signature, args):
        c = context.cast(builder, args[0], condition, types.boolean)
        x = context.cast(builder, args[1], a, result)
        y = context.cast(builder, args[2], b, result)
        return builder.select(c, x, y)

    return result(condition, a, b), codegen


def _in_register(builder, number_type, constant):
    """A constant that LLVM cannot see through: it is computed before the loop and stays in a register.

    Else LLVM broadcasts each from memory wherever it is used (28 loads in a loop of 81 instructions, for
    gelu), which takes a fifth to a fourth of the time of such loops.
    """
    llvm_type, suffix = _LLVM_FLOATS[number_type]
    return _call_llvm(builder, f"llvm.arithmetic.fence.{suffix}", llvm_type, (constant,))


@intrinsic
def in_register(typing_context, constant):
    """A float constant of a loop."""

    def codegen(context, builder, signature, args):
        return _in_register(builder, signature.return_type, args[0])

    return (constant(constant), codegen) if constant in _LLVM_FLOATS else None


def _polynomial(monic):
    @intrinsic
    def evaluate(typing_context, x, coefficients):
        def codegen(context, builder, signature, args):
            llvm_type, suffix = _LLVM_FLOATS[signature.return_type]
            point, values = args
            y, *rest = [_in_register(builder, signature.return_type, builder.extract_value(values, i))
                        for i in range(coefficients.count)]
            if monic:
                y = builder.fadd(point, y)
            for c in rest:
                y = _call_llvm(builder, f"llvm.fma.{suffix}", llvm_type, (y, point, c))
            return y

        matches = isinstance(coefficients, types.UniTuple) and coefficients.dtype == x
        return (x(x, coefficients), codegen) if matches and x in _LLVM_FLOATS else None

    return evaluate


horner = _polynomial(False)   # with these coefficients, highest power first, as a chain of fma
monic = _polynomial(True)     # with a 1 before them


# --- comparisons and arithmetic, the same for both accumulation types -----------------------------

@inline
def minimum(a, b):
    """The smaller one; NaN if either is NaN, as torch.minimum."""
    smaller = where(a < b, a, b)  # b if either is NaN: that is the vminps instruction
    return where(a == a, smaller, a)


@inline
def maximum(a, b):
    """The larger one; NaN if either is NaN, as torch.maximum."""
    larger = where(a > b, a, b)
    return where(a == a, larger, a)


@inline
def div(a, b):
    """a / b, correctly rounded."""
    return a / b


@inline
def mul_rn(a, b):
    """a * b, rounded: never contracted into an fma."""
    return a * b


@inline
def logical_not(x):
    """True where x is zero (or False)."""
    return not x


@inline
def isnan_(x):
    """True where x is NaN."""
    return x != x


# --- bit casts ------------------------------------------------------------------------------------

def _bit_cast(source, target, llvm_target):
    @intrinsic
    def cast(typing_context, x):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], llvm_target)

        return (target(source), codegen) if x == source else None

    return cast


float_to_bits = _bit_cast(types.float32, types.int32, ir.IntType(32))
bits_to_float = _bit_cast(types.int32, types.float32, ir.FloatType())


# --- 16-bit floats --------------------------------------------------------------------------------

@intrinsic
def _half_to_float_llvm(typing_context, bits):
    """fp16 bits -> float32, exact. Through LLVM's half, that is F16C or AVX-512 on x86."""

    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return (types.float32(types.uint16), codegen) if bits == types.uint16 else None


@intrinsic
def _float_to_half_llvm(typing_context, x):
    """float32 -> fp16 bits, round to nearest even, NaN stays NaN."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return (types.uint16(types.float32), codegen) if x == types.float32 else None


@inline
def _half_to_float_bits(bits):
    """The same by integers: exponent and mantissa moved into place, then 2^(127 - 15) exactly."""
    h = np.uint32(bits)
    sign = np.uint32(np.uint32(h & np.uint32(0x8000)) << np.uint32(16))
    moved = np.uint32(np.uint32(h & np.uint32(0x7FFF)) << np.uint32(13))
    finite = float_to_bits(bits_to_float(np.int32(moved)) * np.float32(2.0**112))
    special = np.uint32(moved | np.uint32(0x7F800000))
    magnitude = where(moved >= np.uint32(0x0F800000), special, np.uint32(finite))
    return bits_to_float(np.int32(magnitude | sign))


@inline
def _float_to_half_bits(x):
    """The same by integers."""
    a = abs_(x)
    bits = np.uint32(float_to_bits(a))
    sign = np.uint32(np.uint32(float_to_bits(x)) >> np.uint32(16)) & np.uint32(0x8000)
    odd = np.uint32(np.uint32(bits >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(np.uint32(bits + np.uint32(0xFFF)) + odd)
    normal = np.uint32(np.uint32(normal >> np.uint32(13)) - np.uint32(112 << 10))
    # 0.5 has the spacing of the fp16 denormals, so adding it rounds to one of them.
    denormal = np.uint32(np.uint32(float_to_bits(a + np.float32(0.5))) - np.uint32(0x3F000000))
    y = where(a < np.float32(2.0**-14), denormal, normal)
    y = where(a >= np.float32(65520.0), np.uint32(0x7C00), y)
    y = where(a == a, y, np.uint32(0x7E00))
    return np.uint16(y | sign)


def _has_half_instructions():
    if platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686"):
        return True
    if config.CPU_FEATURES is not None:  # NUMBA_CPU_FEATURES, or NUMBA_CPU_NAME=generic
        return "+f16c" in config.CPU_FEATURES
    return bool(binding.get_host_cpu_features().get("f16c", False))


# Without F16C LLVM calls __extendhfsf2, which Numba does not link: the process would abort.
if _has_half_instructions():
    half_to_float, float_to_half = _half_to_float_llvm, _float_to_half_llvm
else:
    half_to_float, float_to_half = _half_to_float_bits, _float_to_half_bits


@inline
def bfloat16_to_float(bits):
    """bf16 bits -> float32, exact: they are the upper half of it."""
    return bits_to_float(np.int32(np.uint32(bits) << np.uint32(16)))


@inline
def store_float16(x):
    """acc_t -> fp16 bits. float64 goes through float32, two roundings, as in torch on the CPU."""
    return float_to_half(np.float32(x))


@inline
def store_bfloat16(x):
    """acc_t -> bf16 bits, round to nearest even; every NaN becomes 0x7FC0 as in c10::BFloat16.

    By integers and not by LLVM's bfloat: vcvtneps2bf16 (AVX512-BF16) flushes denormals.
    float64 goes through float32, two roundings, as in torch on the CPU.
    """
    x = np.float32(x)
    bits = np.uint32(float_to_bits(x))
    odd = np.uint32(bits & np.uint32(0x10000)) != np.uint32(0)
    rounded = np.uint32(bits + where(odd, np.uint32(0x8000), np.uint32(0x7FFF)))
    # The choice is between 32-bit values: a select of 16-bit ones makes LLVM mix vector widths.
    return np.uint16(where(x == x, np.uint32(rounded >> np.uint32(16)), np.uint32(0x7FC0)))


@inline
def store_float32(x):
    """acc_t -> float32."""
    return np.float32(x)


@inline
def store_float64(x):
    """acc_t -> float64."""
    return np.float64(x)


# --- integers -------------------------------------------------------------------------------------

def _saturating_cast(integer, wide, lowest, past):
    """acc_t -> integer as PTX cvt.rzi.sat: toward zero, out of range saturates, NaN is 0.

    `lowest` and `past` are the range [lowest, past), powers of two and so exact in float32. `wide`
    is what is converted to: x86 has no vector instruction from float to anything narrower than
    int32, and LLVM's fptosi.sat does not vectorise to the narrow types at all.
    """
    lowest, past, zero = np.float32(lowest), np.float32(past), np.float32(0)
    highest = wide(int(past) - 1)

    @inline
    def cast(x):
        x = where(x == x, x, zero)
        x = where(x < lowest, lowest, x)
        converted = wide(where(x >= past, zero, x))
        return integer(where(x >= past, highest, converted))

    return cast


cast_int8 = _saturating_cast(np.int8, np.int32, -(2**7), 2**7)
cast_uint8 = _saturating_cast(np.uint8, np.int32, 0, 2**8)
cast_int16 = _saturating_cast(np.int16, np.int32, -(2**15), 2**15)
cast_int32 = _saturating_cast(np.int32, np.int32, -(2**31), 2**31)
cast_int64 = _saturating_cast(np.int64, np.int64, -(2**63), 2**63)


@inline
def cast_bool(x):
    """acc_t -> bool: anything but zero is True, NaN too."""
    return x != 0


# --- Philox ---------------------------------------------------------------------------------------

@inline
def _philox_round(c0, c1, c2, c3, k0, k1):
    product0 = np.uint64(c0) * np.uint64(0xD2511F53)
    product1 = np.uint64(c2) * np.uint64(0xCD9E8D57)
    high0 = np.uint32(product0 >> np.uint64(32))
    high1 = np.uint32(product1 >> np.uint64(32))
    return (
        np.uint32(np.uint32(high1 ^ c1) ^ k0),
        np.uint32(product1),
        np.uint32(np.uint32(high0 ^ c3) ^ k1),
        np.uint32(product0),
        np.uint32(k0 + np.uint32(0x9E3779B9)),
        np.uint32(k1 + np.uint32(0xBB67AE85)),
    )


@inline
def philox7(c0, c1, c2, c3, k0, k1):
    """Philox4x32 with 7 rounds (Salmon et al., SC'11, table 2: the fewest that pass BigCrush).

    Counter c and key k are uint32, so are the four values returned.
    """
    # Seven calls, not a loop: an inner loop would keep LLVM from vectorising the caller's.
    c0, c1, c2, c3, k0, k1 = _philox_round(c0, c1, c2, c3, k0, k1)
    c0, c1, c2, c3, k0, k1 = _philox_round(c0, c1, c2, c3, k0, k1)
    c0, c1, c2, c3, k0, k1 = _philox_round(c0, c1, c2, c3, k0, k1)
    c0, c1, c2, c3, k0, k1 = _philox_round(c0, c1, c2, c3, k0, k1)
    c0, c1, c2, c3, k0, k1 = _philox_round(c0, c1, c2, c3, k0, k1)
    c0, c1, c2, c3, k0, k1 = _philox_round(c0, c1, c2, c3, k0, k1)
    c0, c1, c2, c3, k0, k1 = _philox_round(c0, c1, c2, c3, k0, k1)
    return c0, c1, c2, c3


@inline
def fill_random(words, first_block, n_blocks, seed, offset):
    """The random bits of blocks of 512 elements, 16 for each element, as 64-bit words.

    Counter g of a block's 64 is one philox7: counter (low, high word of offset, low, high word of
    64 block + g), key (low, high word of seed). Its first two words are the bits of elements
    4g .. 4g+3 of the block, low halves first, its last two those of the same 256 elements later.
    """
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    seed, offset = np.uint64(seed), np.uint64(offset)
    k0, k1 = np.uint32(seed & mask), np.uint32(seed >> half)
    c0, c1 = np.uint32(offset & mask), np.uint32(offset >> half)
    for block in range(n_blocks):
        first = np.uint64(first_block + block) * np.uint64(64)
        for g in range(64):
            counter = first + np.uint64(g)
            w0, w1, w2, w3 = philox7(c0, c1, np.uint32(counter & mask), np.uint32(counter >> half), k0, k1)
            words[128 * block + g] = np.uint64(w0) | np.uint64(w1) << half
            words[128 * block + 64 + g] = np.uint64(w2) | np.uint64(w3) << half
