// Scalar mathematics; names as in fusionrt/primitives.py.
//
// 16-bit outputs hide errors below 2^-12, so their mathematics may use the special-function unit
// directly. float and double use CUDA's accurate functions; nothing is compiled with fast-math.

namespace fusionrt {

#define inf __longlong_as_double(0x7ff0000000000000ll)  // as Python prints them; in cpu/math32.py too
#define nan __longlong_as_double(0x7ff8000000000000ll)
constexpr bool HALF = SIGNIFICANT_BITS <= 11 && sizeof(acc_t) == 4;  // of float64 it would lose the range
constexpr bool HALF_OF_BF16 = HALF && SIGNIFICANT_BITS == 8;

__device__ __forceinline__ float ex2(float x) {  // 2^x, 2 ulp; below 2^-126 gives 0
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float rcp(float x) {  // 1/x, 1 ulp; 1/inf and 1/huge give 0
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float subnormal_rcp(float x) {  // 1/x over the whole range, 1 ulp
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 4^x over the whole range, 5 ulp: a square may be subnormal. ex2 without ftz takes a comparison and two products.
__device__ __forceinline__ float squared_ex2(float x) {
    const float y = ex2(x);
    return y * y;
}
__device__ __forceinline__ float refined_rcp(float x) {  // 1/x, 1 ulp, for 2^-120 < |x| < 2^120
    const float y = rcp(x);
    return ::fmaf(y, ::fmaf(-x, y, 1.0f), y);
}
__device__ __forceinline__ float lg2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
constexpr float LOG2_E = 1.4426950408889634f, LOG4_E = 0.7213475204444817f, LN_2 = 0.6931471805599453f;

__device__ __forceinline__ acc_t where(bool c, acc_t a, acc_t b) { return c ? a : b; }
__device__ __forceinline__ bool logical_not(bool a) { return !a; }
// NaN in either operand wins, as in torch.minimum.
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ float minimum(float a, float b) {
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
    return least;
}
__device__ __forceinline__ float maximum(float a, float b) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}
#else
__device__ __forceinline__ float minimum(float a, float b) { return a < b || a != a ? a : b; }
__device__ __forceinline__ float maximum(float a, float b) { return b < a || a != a ? a : b; }
#endif
__device__ __forceinline__ double minimum(double a, double b) { return a < b || a != a ? a : b; }
__device__ __forceinline__ double maximum(double a, double b) { return b < a || a != a ? a : b; }
__device__ __forceinline__ acc_t div(acc_t a, acc_t b) { return a / b; }
// IEEE division is 10 instructions and a call for what is out of range; 16-bit results need less.
__device__ __forceinline__ acc_t reciprocal(acc_t a) {
    if constexpr (HALF) return subnormal_rcp(a);
    else return acc_t(1) / a;
}
__device__ __forceinline__ acc_t near_reciprocal(acc_t a) {
    if constexpr (HALF) return rcp(a);
    else if constexpr (sizeof(acc_t) == 4) return refined_rcp(a);
    else return acc_t(1) / a;
}
__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double mul_rn(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ acc_t abs_(acc_t a) { return ::fabs(a); }
__device__ __forceinline__ acc_t exp(acc_t a) {
    // The product's rounding costs |a| / 2 ulp of float: far below 16 bits.
    if constexpr (HALF) return squared_ex2(LOG4_E * a);
    else return ::exp(a);
}
__device__ __forceinline__ acc_t exp2(acc_t a) { return ::exp2(a); }
__device__ __forceinline__ acc_t expm1(acc_t a) {
    if constexpr (HALF) {  // near 0, where the subtraction cancels, three terms of the series
        const float near = a * ::fmaf(a, ::fmaf(a, 0.16666667f, 0.5f), 1.0f);
        return ::fabsf(a) < 0.05f ? near : squared_ex2(LOG4_E * a) - 1.0f;
    } else {
        return ::expm1(a);
    }
}
__device__ __forceinline__ acc_t log(acc_t a) { return ::log(a); }
__device__ __forceinline__ acc_t log1p(acc_t a) { return ::log1p(a); }
__device__ __forceinline__ acc_t log2(acc_t a) { return ::log2(a); }
__device__ __forceinline__ acc_t sqrt(acc_t a) { return ::sqrt(a); }
__device__ __forceinline__ acc_t rsqrt(acc_t a) { return ::rsqrt(a); }
__device__ __forceinline__ acc_t sin(acc_t a) { return ::sin(a); }
__device__ __forceinline__ acc_t cos(acc_t a) { return ::cos(a); }
__device__ __forceinline__ acc_t erf(acc_t a) { return ::erf(a); }
__device__ __forceinline__ acc_t pow_(acc_t a, acc_t b) { return ::pow(a, b); }
__device__ __forceinline__ acc_t floor(acc_t a) { return ::floor(a); }
__device__ __forceinline__ acc_t rint(acc_t a) { return ::rint(a); }
// 1.5 * 2^23 (2^52) and a have no bits below 1: two additions, where `rint` is one of the few operations a
// clock of the special functions' pipe.
__device__ __forceinline__ acc_t rint_near(acc_t a) {
    const acc_t big = sizeof(acc_t) == 8 ? acc_t(6755399441055744.0) : acc_t(12582912.0f);
    return (a + big) - big;
}
__device__ __forceinline__ acc_t trunc(acc_t a) { return ::trunc(a); }

// exp(x - most) scale. The exponential by itself would lose what is below 2^-126, where bfloat16 goes on.
__device__ __forceinline__ acc_t softmaxed(acc_t x, acc_t most, acc_t scale) {
    if constexpr (HALF_OF_BF16) return ex2(::fmaf(x - most, LOG2_E, 64.0f)) * (scale * 5.4210109e-20f);
    else if constexpr (HALF) return ex2(LOG2_E * (x - most)) * scale;
    else return exp(x - most) * scale;
}

// With e = exp(-|a|), which cannot overflow: 1 / (1 + e), or e / (1 + e) for negative a.
__device__ __forceinline__ acc_t sigmoid(acc_t a) {
    if constexpr (HALF) {
        const float e = squared_ex2(-LOG4_E * ::fabsf(a)), y = rcp(1.0f + e);
        return a < 0 ? e * y : y;
    } else {
        const acc_t e = ::exp(-::fabs(a)), y = near_reciprocal(acc_t(1) + e);
        return a < acc_t(0) ? e * y : y;
    }
}

// 1 - sigmoid(a); the subtraction cancels where sigmoid(a) is near 1.
__device__ __forceinline__ acc_t sigmoid_complement(acc_t a, acc_t sigmoid_of_a) {
    if constexpr (HALF) return acc_t(1) - sigmoid_of_a;
    else return a < acc_t(1) ? acc_t(1) - sigmoid_of_a : sigmoid(-a);
}

__device__ __forceinline__ acc_t tanh(acc_t a) {
    if constexpr (HALF_OF_BF16) {  // tanh.approx is good to 2^-11: a quarter of half an ulp
        float y;
        asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(static_cast<float>(a)));
        return y;
    } else if constexpr (HALF) {  // (1 - e) / (1 + e); near 0, where that cancels, tanh(a) = a
        const float magnitude = ::fabsf(a), e = ex2(-2.0f * LOG2_E * magnitude);
        const float y = ::copysignf((1.0f - e) * rcp(1.0f + e), a);
        return magnitude < 0.01f ? a : (a != a ? a : y);
    } else {
        return ::tanh(a);
    }
}

// log(1 + e^a) = max(a, 0) + log(1 + e^-|a|)
__device__ __forceinline__ acc_t softplus(acc_t a) {
    if constexpr (HALF) {
        const float e = squared_ex2(-LOG4_E * ::fabsf(a));
        const float tail = e < 0.002f ? e - 0.5f * e * e : LN_2 * lg2(1.0f + e);
        return maximum(a, acc_t(0)) + tail;
    } else {
        const acc_t e = ::exp(-::fabs(a));
        return maximum(a, acc_t(0)) + (e < acc_t(1e-18) ? e : ::log1p(e));  // log1p flushes denormals
    }
}

// exp(-a^2/2); where normcdf uses it as well a GELU's backward needs it once.
__device__ __forceinline__ acc_t gaussian(acc_t a) {
    if constexpr (HALF) {
        return ex2(-0.5f * LOG2_E * a * a);
    } else {
        return ::exp(acc_t(-0.5) * a * a);  // the rounding of a^2 costs a^2 / 4 ulp, torch's as well
    }
}
__device__ __forceinline__ acc_t normpdf(acc_t a) { return gaussian(a) * acc_t(0.3989422804014327); }

// Of the standard normal distribution, what lies beyond |a|: polynomials fitted to least relative error
// (reweighted least squares on Chebyshev points).
__device__ __forceinline__ float normal_tail(float a) {
    const float t = ::fabsf(a);
    if constexpr (HALF_OF_BF16) {  // 2^p(t), to 3.7e-4 up to t = 6; beyond, where 1 - erf is 0 in float, 2e-2 at 7
        float p = ::fmaf(-2.016842e-4f, t, 4.4676038e-3f);
        p = ::fmaf(p, t, -4.2832725e-2f);
        p = ::fmaf(p, t, -4.7278568e-1f);
        p = ::fmaf(p, t, -1.1443998f);
        return ex2(::fmaf(p, t, -1.0005318f));
    } else if constexpr (HALF) {   // the same, to 8e-6 up to 6.5, where float16 has ended
        float p = ::fmaf(-1.757777e-6f, t, 5.9936592e-5f);
        p = ::fmaf(p, t, -9.1636303e-4f);
        p = ::fmaf(p, t, 8.4473863e-3f);
        p = ::fmaf(p, t, -5.3824503e-2f);
        p = ::fmaf(p, t, -4.5861569e-1f);
        p = ::fmaf(p, t, -1.1511801f);
        return ex2(::fmaf(p, t, -1.0000038f));
    } else {  // exp(-t^2/2) q(u), u = 1 / (1 + c t), to 3.7e-8
        const float u = rcp(::fmaf(0.21f, t, 1.0f));
        float q = -0.071295291f;
        q = ::fmaf(q, u, 0.28180677f);
        q = ::fmaf(q, u, -0.32649747f);
        q = ::fmaf(q, u, 0.34499112f);
        q = ::fmaf(q, u, -0.090775460f);
        q = ::fmaf(q, u, 0.12347324f);
        q = ::fmaf(q, u, 0.069569476f);
        q = ::fmaf(q, u, 0.085012473f);
        return ::fmaf(q, u, 0.083715148f) * u * gaussian(a);
    }
}

// The distribution function of the standard normal: erfc(-a / sqrt 2) / 2.
__device__ __forceinline__ acc_t normcdf(acc_t a) {
    if constexpr (sizeof(acc_t) == 8) {
        return ::normcdf(a);
    } else {
        const float tail = normal_tail(a);
        const float outer = a > 0 ? 1.0f - tail : tail;
        if constexpr (HALF) return outer;
        // Errors of u weigh most where it is near 1; there the odd part has a polynomial of its own.
        const float square = a * a;
        float odd = ::fmaf(9.423519e-5f, square, -1.1693536e-3f);
        odd = ::fmaf(odd, square, 9.9671967e-3f);
        odd = ::fmaf(odd, square, -6.6489585e-2f);
        odd = ::fmaf(odd, square, 0.39894226f);
        return ::fabsf(a) < 1.0f ? ::fmaf(a, odd, 0.5f) : outer;
    }
}

}  // namespace fusionrt
