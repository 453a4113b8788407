// What every template may use: storage types, 16-byte access, scalar mathematics, Philox, reductions.
//
// No CUDA header is included: a bare translation unit compiles in 25 ms, cuda_fp16.h + cuda_bf16.h
// cost 45 ms more and are the most frequent NVRTC installation fault.
//
// The runtime puts the specialisation's constants before this file:
//   using acc_t = float;                    // arithmetic type: float, or double for double tensors
//   constexpr int SIGNIFICANT_BITS = 8;     // of results: 8 bfloat16, 11 float16, 24, 53
// 16-bit outputs hide errors below 2^-12, so their mathematics may use the special-function unit
// directly. float and double use CUDA's accurate functions; nothing is compiled with fast-math.

namespace fusionrt {

// ---------------------------------------------------------------------------------------------
// Storage types

struct float16_t { unsigned short bits; };
struct bfloat16_t { unsigned short bits; };
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using float32_t = float;
using float64_t = double;
struct bool_t { unsigned char bits; };

template <typename T> __device__ __forceinline__ acc_t to_acc(T x) { return static_cast<acc_t>(x); }
template <> __device__ __forceinline__ acc_t to_acc(bool_t x) { return x.bits ? acc_t(1) : acc_t(0); }
template <> __device__ __forceinline__ acc_t to_acc(bfloat16_t x) {
    return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
template <> __device__ __forceinline__ acc_t to_acc(float16_t x) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
}

__device__ __forceinline__ unsigned short float16_bits(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ unsigned short bfloat16_bits(float x) {
#if __CUDA_ARCH__ >= 800
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
#else
    const unsigned bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
#endif
}

// To integers: toward zero, saturating, NaN gives 0. From float PTX converts so by itself, to 64 bits but for NaN.
__device__ __forceinline__ int to_int(float x) { return __float2int_rz(x); }
#define TO_NARROW(name, type) \
    __device__ __forceinline__ int to_##name(float x) { \
        int y; \
        asm("cvt.rzi." #type ".f32 %0, %1;" : "=r"(y) : "f"(x)); \
        return y; \
    }
TO_NARROW(int8, s8) TO_NARROW(uint8, u8) TO_NARROW(int16, s16)
#undef TO_NARROW
// From double NaN gives the most negative number instead; narrower results are clamped first.
__device__ __forceinline__ int to_int(double x) { return x != x ? 0 : __double2int_rz(x); }
__device__ __forceinline__ int clamped(int x, int lo, int hi) { return min(max(x, lo), hi); }
__device__ __forceinline__ int to_int8(double x) { return clamped(to_int(x), -128, 127); }
__device__ __forceinline__ int to_uint8(double x) { return clamped(to_int(x), 0, 255); }
__device__ __forceinline__ int to_int16(double x) { return clamped(to_int(x), -32768, 32767); }
__device__ __forceinline__ int64_t to_int64(float x) { return x != x ? 0 : __float2ll_rz(x); }
__device__ __forceinline__ int64_t to_int64(double x) { return x != x ? 0 : __double2ll_rz(x); }

template <typename T> __device__ __forceinline__ T from_acc(acc_t x) { return static_cast<T>(x); }
template <> __device__ __forceinline__ bool_t from_acc(acc_t x) {
    return {static_cast<unsigned char>(x != acc_t(0))};
}
template <> __device__ __forceinline__ float16_t from_acc(acc_t x) { return {float16_bits(x)}; }
template <> __device__ __forceinline__ bfloat16_t from_acc(acc_t x) { return {bfloat16_bits(x)}; }
template <> __device__ __forceinline__ int8_t from_acc(acc_t x) { return to_int8(x); }
template <> __device__ __forceinline__ uint8_t from_acc(acc_t x) { return to_uint8(x); }
template <> __device__ __forceinline__ int16_t from_acc(acc_t x) { return to_int16(x); }
template <> __device__ __forceinline__ int32_t from_acc(acc_t x) { return to_int(x); }
template <> __device__ __forceinline__ int64_t from_acc(acc_t x) { return to_int64(x); }

// A cast inside an expression rounds through the storage type and goes on in acc_t.
template <typename T> __device__ __forceinline__ acc_t rounded(acc_t x) { return to_acc(from_acc<T>(x)); }
#define CAST(name) \
    __device__ __forceinline__ acc_t cast_##name(acc_t x) { return rounded<name##_t>(x); } \
    __device__ __forceinline__ acc_t cast_##name(bool x) { return rounded<name##_t>(acc_t(x)); }
CAST(float16) CAST(bfloat16) CAST(float32)
CAST(int8) CAST(uint8) CAST(int16) CAST(int32) CAST(int64) CAST(bool)
#undef CAST

// ---------------------------------------------------------------------------------------------
// Kernels that follow each other. On Hopper and later the next one, where it was launched so (DependentLaunch), begins
// when this one's blocks have left, and waits for what they wrote: 0.25 us less in a graph. Of one op it may begin while
// they leave what they found: as much again; told so at the start it was slower. Nothing is touched before the wait.
__device__ __forceinline__ void next_may_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    if constexpr (READS_FIRST) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
    } else {  // a loop of one turn: within a basic block ptxas moved loads by the read-only path to before the wait
        asm volatile("" ::"r"(threadIdx.x), "r"(blockIdx.x));  // which then have been read
        int blocks;
        do asm volatile("griddepcontrol.wait;\n\tmov.u32 %0, %%nctaid.x;" : "=r"(blocks)::"memory");
        while (blocks < 0);
    }
#endif
}

// ---------------------------------------------------------------------------------------------
// Access: W neighbouring elements as few wide transactions

template <typename T, int W> struct Pack {
    static constexpr int BYTES = W * static_cast<int>(sizeof(T));
    alignas(BYTES < 16 ? BYTES : 16) T data[W];
};

__device__ __forceinline__ unsigned shared_address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Through the read-only path, so that ptxas may move them over stores (outputs are fresh memory); one that reads first
// needs neither that nor the loop of the wait, 5 % of a small kernel. No cache hints but that of `load_of_line`: others
// gained nothing, and L1::no_allocate lost up to 7 %.
template <int BYTES> __device__ __forceinline__ void load_bytes(const void* from, void* to) {
    unsigned* w = static_cast<unsigned*>(to);
    if constexpr (BYTES > 16) {
        load_bytes<16>(from, to);
        load_bytes<BYTES - 16>(static_cast<const char*>(from) + 16, static_cast<char*>(to) + 16);
    } else if constexpr (READS_FIRST && BYTES >= 4) {
        *static_cast<Pack<unsigned, BYTES / 4>*>(to) = *static_cast<const Pack<unsigned, BYTES / 4>*>(from);
    } else if constexpr (READS_FIRST) {
        *static_cast<Pack<unsigned char, BYTES>*>(to) = *static_cast<const Pack<unsigned char, BYTES>*>(from);
    } else if constexpr (BYTES == 16) {
        asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(from));
    } else if constexpr (BYTES == 8) {
        asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(from));
    } else if constexpr (BYTES == 4) {
        asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(w[0]) : "l"(from));
    } else if constexpr (BYTES == 2) {
        asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(*static_cast<unsigned short*>(to)) : "l"(from));
    } else {
        unsigned byte;
        asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(byte) : "l"(from));
        *static_cast<unsigned char*>(to) = byte;
    }
}

// Few bytes of a line at a time; others take the rest of it about then: a walk down columns, or a warp that
// reads 128 bytes where memory gives 256 (int8 beside float32 results: 83.1 to 82.8 of 80.5 us that a copy takes).
template <int BYTES> __device__ __forceinline__ void load_of_line(const void* from, void* to) {
#if __CUDA_ARCH__ >= 800
    if constexpr (READS_FIRST) return load_bytes<BYTES>(from, to);
    else if constexpr (BYTES == 4) {
        asm volatile("ld.global.nc.L2::256B.u32 %0, [%1];" : "=r"(*static_cast<unsigned*>(to)) : "l"(from));
        return;
    } else if constexpr (BYTES == 2) {
        asm volatile("ld.global.nc.L2::256B.u16 %0, [%1];" : "=h"(*static_cast<unsigned short*>(to)) : "l"(from));
        return;
    } else if constexpr (BYTES == 1) {
        unsigned byte;
        asm volatile("ld.global.nc.L2::256B.u8 %0, [%1];" : "=r"(byte) : "l"(from));
        *static_cast<unsigned char*>(to) = byte;
        return;
    }
#endif
    load_bytes<BYTES>(from, to);
}

template <int W, typename T> __device__ __forceinline__ Pack<T, W> load_pack(const T* from) {
    Pack<T, W> pack;
    if constexpr (W == 4 && sizeof(T) == 1) load_of_line<4>(from, &pack);
    else load_bytes<Pack<T, W>::BYTES>(from, &pack);
    return pack;
}

// Elements before the first aligned pack.
template <int W, typename T> __device__ __forceinline__ unsigned until_pack(const T* at) {
    return -static_cast<unsigned>(reinterpret_cast<unsigned long long>(at) / sizeof(T)) % W;
}

// From shared memory.
template <int W, typename T> __device__ __forceinline__ Pack<T, W> shared_pack(const T* from) {
    return *reinterpret_cast<const Pack<T, W>*>(from);
}

template <bool SHARED, int W, typename T> __device__ __forceinline__ Pack<T, W> pack_in(const T* from) {
    if constexpr (SHARED) return shared_pack<W>(from);
    else return load_pack<W>(from);
}

template <int BYTES> __device__ __forceinline__ void store_bytes(void* to, const void* from) {
    if constexpr (BYTES > 16) {
        store_bytes<16>(to, from);
        store_bytes<BYTES - 16>(static_cast<char*>(to) + 16, static_cast<const char*>(from) + 16);
    } else if constexpr (BYTES == 16) {
        const unsigned* w = static_cast<const unsigned*>(from);
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     :: "l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
    } else if constexpr (BYTES == 8) {
        const unsigned* w = static_cast<const unsigned*>(from);
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" :: "l"(to), "r"(w[0]), "r"(w[1]) : "memory");
    } else if constexpr (BYTES == 4) {
        *static_cast<unsigned*>(to) = *static_cast<const unsigned*>(from);
    } else if constexpr (BYTES == 2) {
        *static_cast<unsigned short*>(to) = *static_cast<const unsigned short*>(from);
    } else {
        *static_cast<unsigned char*>(to) = *static_cast<const unsigned char*>(from);
    }
}

template <typename T, int W> __device__ __forceinline__ void store_pack(T* to, const acc_t (&values)[W]) {
    Pack<T, W> pack;
#pragma unroll
    for (int v = 0; v < W; ++v) pack.data[v] = from_acc<T>(values[v]);
    store_bytes<Pack<T, W>::BYTES>(to, &pack);
}

// Truth values, four to a byte, the first in its lowest bit; by the index of the first.
using mask_t = unsigned char;

template <int W, typename I> __device__ __forceinline__ Pack<bool_t, W> load_mask(const mask_t* mask, I i) {
    Pack<mask_t, (W + 3) / 4> bytes;
    load_of_line<(W + 3) / 4>(mask + i / 4, &bytes);
    Pack<bool_t, W> values;
#pragma unroll
    for (int v = 0; v < W; ++v) values.data[v].bits = bytes.data[v / 4] >> (W < 4 ? i % 4 + v : v % 4) & 1;
    return values;
}

// A byte has one thread: who asks for a mask sees to it that there are whole vectors only.
template <int W, typename I> __device__ __forceinline__ void store_mask(mask_t* mask, I i, const acc_t (&values)[W]) {
    if constexpr (W % 4 != 0) {
        __trap();
    } else {
        Pack<mask_t, W / 4> bytes;
#pragma unroll
        for (int n = 0; n < W / 4; ++n) bytes.data[n] = 0;
#pragma unroll
        for (int v = 0; v < W; ++v) bytes.data[v / 4] |= static_cast<mask_t>((values[v] != acc_t(0)) << v % 4);
        store_bytes<W / 4>(mask + i / 4, &bytes);
    }
}

// One element. Of bfloat16 a shift or a mask of the word it lies in: by way of 16 bits the compiler takes
// two instructions for every second one.
template <typename T, int W> __device__ __forceinline__ acc_t at(const Pack<T, W>& pack, int v) {
    return to_acc(pack.data[v]);
}
template <int W> __device__ __forceinline__ acc_t at(const Pack<bfloat16_t, W>& pack, int v) {
    if constexpr (W == 1) return to_acc(pack.data[0]);
    const unsigned word = reinterpret_cast<const unsigned*>(pack.data)[v / 2];
    return __uint_as_float(v % 2 ? word & 0xffff0000u : word << 16);
}

// Makes the compiler forget what it knows of a pack, at no cost.
template <typename T, int W> __device__ __forceinline__ void hide_pack(Pack<T, W>& pack) {
    if constexpr (Pack<T, W>::BYTES >= 4) {
        unsigned* words = reinterpret_cast<unsigned*>(pack.data);
#pragma unroll
        for (int k = 0; k < Pack<T, W>::BYTES / 4; ++k) asm volatile("" : "+r"(words[k]));
    }
}

// ---------------------------------------------------------------------------------------------
// Index arithmetic

// Division by an invariant below 2^31: multiply-high, add, shift (Granlund & Montgomery 1994).
struct Divisor {
    unsigned value, multiplier, shift;
    __device__ __forceinline__ unsigned divide(unsigned n) const {
        return (__umulhi(n, multiplier) + n) >> shift;
    }
};
struct WideDivisor {
    unsigned long long value;
    __device__ __forceinline__ unsigned long long divide(unsigned long long n) const { return n / value; }
};

// ---------------------------------------------------------------------------------------------
// Scalar mathematics; names as in fusionrt/expr.py

#define inf __longlong_as_double(0x7ff0000000000000ll)  // how Python spells them in emitted text
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

// ---------------------------------------------------------------------------------------------
// Random numbers: Philox4x32-7 (Salmon et al. 2011; seven rounds pass BigCrush), counter-based.
// The walk over the output is cut into blocks of 512 elements with 64 counters each: counter g of a
// block serves elements 4g .. 4g+3 of its first half and the same of its second half, 16 bits for
// each. So a thread that holds four neighbours from either half needs one Philox for eight elements,
// whatever the size of its vectors. The same seed and offset give the same bits on a CPU.

struct RandomState { unsigned long long seed, offset; };
constexpr int HALF_BLOCK = 256;

// One instruction; the compiler adds the cross terms of a 64-bit product although they are zero.
__device__ __forceinline__ unsigned long long wide_product(unsigned a, unsigned b) {
    unsigned long long product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
}

template <typename I> __device__ __forceinline__ I counter_of(I i) { return (i >> 9) << 6 | ((i >> 2) & 63); }

__device__ __forceinline__ void philox(RandomState state, unsigned long long counter, unsigned (&w)[4]) {
    w[0] = static_cast<unsigned>(state.offset), w[1] = static_cast<unsigned>(state.offset >> 32);
    w[2] = static_cast<unsigned>(counter), w[3] = static_cast<unsigned>(counter >> 32);
    unsigned k0 = static_cast<unsigned>(state.seed), k1 = static_cast<unsigned>(state.seed >> 32);
#pragma unroll
    for (int round = 0; round < 7; ++round) {
        const unsigned long long p0 = wide_product(0xD2511F53u, w[0]), p1 = wide_product(0xCD9E8D57u, w[2]);
        w[0] = static_cast<unsigned>(p1 >> 32) ^ w[1] ^ k0;
        w[2] = static_cast<unsigned>(p0 >> 32) ^ w[3] ^ k1;
        w[1] = static_cast<unsigned>(p1);
        w[3] = static_cast<unsigned>(p0);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
}

// One element's 16 bits: a half of a word. Low halves belong to even elements.
struct Lane { unsigned word; bool high; };

// The bits of W neighbours, two to a word.
template <int W> struct Lanes {
    static constexpr int WORDS = W < 2 ? 1 : W / 2;
    unsigned words[WORDS];
    bool high;  // of a single element
    __device__ __forceinline__ Lane operator[](int v) const { return {words[v / 2], W == 1 ? high : v % 2 == 1}; }
};

// Elements i .. i + W - 1, where W divides i, so that they lie in one half of a block.
template <int W, typename I> __device__ __forceinline__ Lanes<W> draw(RandomState state, I i) {
    Lanes<W> lanes;
    lanes.high = i & 1;
    const bool second = i & HALF_BLOCK;
#pragma unroll
    for (int v = 0; v < W; v += 4) {
        unsigned w[4];
        philox(state, counter_of(i) + v / 4, w);
        const unsigned low = second ? w[2] : w[0], high = second ? w[3] : w[1];
        if constexpr (W >= 4) lanes.words[v / 2] = low, lanes.words[v / 2 + 1] = high;
        else lanes.words[0] = i & 2 ? high : low;
    }
    return lanes;
}

// The elements at i and those at i + HALF_BLOCK: both halves of every counter are used.
template <int W, typename I>
__device__ __forceinline__ void draw_pair(RandomState state, I i, Lanes<W>& first, Lanes<W>& second) {
    static_assert(W >= 4, "narrower vectors use part of a counter");
#pragma unroll
    for (int v = 0; v < W; v += 4) {
        unsigned w[4];
        philox(state, counter_of(i) + v / 4, w);
        first.words[v / 2] = w[0], first.words[v / 2 + 1] = w[1];
        second.words[v / 2] = w[2], second.words[v / 2 + 1] = w[3];
    }
}

// Eight elements at i, where the lane 16 further has those at i + HALF_BLOCK: both need the same two counters, of which
// each takes one.
template <int W, typename I> __device__ __forceinline__ Lanes<W> draw_with_twin(RandomState state, I i) {
    if constexpr (W != 8) {
        return draw<W>(state, i);
    } else {
        const bool second = i & HALF_BLOCK;
        unsigned w[4];
        philox(state, counter_of(i) + second, w);
        const unsigned low = __shfl_xor_sync(0xffffffffu, second ? w[0] : w[2], 16);
        const unsigned high = __shfl_xor_sync(0xffffffffu, second ? w[1] : w[3], 16);
        return second ? Lanes<8>{{low, high, w[2], w[3]}, false} : Lanes<8>{{w[0], w[1], low, high}, false};
    }
}

// True with probability 1 - p, p taken to the nearest 2^-16.
__device__ __forceinline__ bool kept(Lane lane, acc_t p) {
    const unsigned threshold = static_cast<unsigned>(p * acc_t(65536) + acc_t(0.5));
    return (lane.high ? lane.word >> 16 : lane.word & 0xffffu) >= threshold;
}

}  // namespace fusionrt
