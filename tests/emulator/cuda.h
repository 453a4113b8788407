// CUDA's vocabulary, for kernels that are compiled as C++: what a thread is, how it meets others, intrinsics, and the
// PTX instructions that kernels use, each a function `ptx_` and its name without what says only how memory is to be
// cached. translation.py reads these names: an instruction that has no function here fails where it is executed.

#pragma once
#include "engine.h"

#include <string.h>
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS  // C's alone: what C++ adds is a third of the time that kernels take to compile
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS

#define __builtin_assume(...)
#define __device__
#define __global__
#define __grid_constant__
#define __noinline__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static  // blocks run one after the other

#define threadIdx emu_thread
#define blockIdx emu_block
#define gridDim emu_grid

namespace emu {
template <typename T> T exchange(T value, int from) {
    unsigned long long* slots = warp_slots();
    memcpy(slots + emu_thread.x % 32, &value, sizeof value);
    meet_warp();
    memcpy(&value, slots + from, sizeof value);
    meet_warp();
    return value;
}
template <typename To, typename From> To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
template <typename To> To toward_zero(double x, double end) {  // `end`: the first number that is too large
    if (x != x) return 0;
    return x >= end ? static_cast<To>(~(To(1) << (8 * sizeof(To) - 1))) : x <= -end ? To(1) << (8 * sizeof(To) - 1) : To(x);
}
}  // namespace emu

// -- threads ---------------------------------------------------------------------------------------

inline bool __isGlobal(const void*) { return true; }
inline void __syncthreads() { emu::meet_block(); }
inline int __syncthreads_count(int holds) { return emu::count_in_block(holds); }
inline int __syncthreads_and(int holds) { return emu::count_in_block(!holds) == 0; }
inline void __syncwarp() { emu::meet_warp(); }
// Lanes of others than a thread's `width` neighbours give it its own value.
template <typename T> T shuffle(T x, int lane, int width) {
    const int own = emu_thread.x % 32;
    return emu::exchange(x, (lane ^ own) & ~(width - 1) ? own : lane);
}
template <typename T> T __shfl_sync(unsigned, T x, int lane, int width = 32) {
    return shuffle(x, static_cast<int>(emu_thread.x % 32 & ~(width - 1)) | (lane & (width - 1)), width);
}
template <typename T> T __shfl_xor_sync(unsigned, T x, int mask, int width = 32) {
    return shuffle(x, static_cast<int>(emu_thread.x % 32) ^ mask, width);
}
template <typename T> T __shfl_up_sync(unsigned, T x, int by, int width = 32) {
    return shuffle(x, static_cast<int>(emu_thread.x % 32) - by, width);
}
template <typename T> T __shfl_down_sync(unsigned, T x, int by, int width = 32) {
    return shuffle(x, static_cast<int>(emu_thread.x % 32) + by, width);
}
inline unsigned __ballot_sync(unsigned, int holds) {
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= unsigned(emu::exchange(holds != 0, lane)) << lane;
    return bits;
}
template <typename T> unsigned __match_any_sync(unsigned, T x) {
    unsigned alike = 0;
    for (int lane = 0; lane < 32; ++lane) alike |= unsigned(emu::exchange(x, lane) == x) << lane;
    return alike;
}
inline int __all_sync(unsigned mask, int holds) { return __ballot_sync(mask, holds) == ~0u; }
inline int __any_sync(unsigned mask, int holds) { return __ballot_sync(mask, holds) != 0; }
inline void __trap() { emu::fail("__trap"); }
inline unsigned long long atomicMax(unsigned long long* at, unsigned long long x) {
    const unsigned long long before = *at;
    if (x > before) *at = x;
    return before;
}
inline int atomicMin(int* at, int x) {
    const int before = *at;
    if (x < before) *at = x;
    return before;
}
template <typename T> T atomicAdd(T* at, T x) {
    const T before = *at;
    *at += x;
    return before;
}

struct __align__(16) uint4 { unsigned x, y, z, w; };

// -- numbers ---------------------------------------------------------------------------------------

inline float __uint_as_float(unsigned x) { return emu::same_bits<float>(x); }
inline float __int_as_float(int x) { return emu::same_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emu::same_bits<unsigned>(x); }
inline int __float_as_int(float x) { return emu::same_bits<int>(x); }
inline double __longlong_as_double(long long x) { return emu::same_bits<double>(x); }
inline long long __double_as_longlong(double x) { return emu::same_bits<long long>(x); }
inline int __float2int_rz(float x) { return emu::toward_zero<int>(x, 2147483648.0); }
inline int __double2int_rz(double x) { return emu::toward_zero<int>(x, 2147483648.0); }
inline long long __float2ll_rz(float x) { return emu::toward_zero<long long>(x, 9223372036854775808.0); }
inline long long __double2ll_rz(double x) { return emu::toward_zero<long long>(x, 9223372036854775808.0); }
inline unsigned long long __double2ull_rn(double x) { return x >= 18446744073709551616.0 ? ~0ull : x > 0 ? nearbyint(x) : 0; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return (static_cast<unsigned long long>(high) << 32 | low) >> (by & 31);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
// Never part of an addition, which other products may be.
inline float __fmul_rn(float a, float b) {
    float product = a * b;
    __asm__("" : "+x"(product));
    return product;
}
inline double __dmul_rn(double a, double b) {
    double product = a * b;
    __asm__("" : "+x"(product));
    return product;
}
inline float rsqrtf(float x) { return 1 / ::sqrt(static_cast<double>(x)); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline double rsqrt(double x) { return 1 / ::sqrt(x); }
inline double normcdf(double x) { return 0.5 * ::erfc(-x * 0.70710678118654752); }
inline void sincospif(float x, float* s, float* c) { *s = ::sin(M_PI * x), *c = ::cos(M_PI * x); }
inline void sincospi(double x, double* s, double* c) { *s = ::sinl(M_PIl * x), *c = ::cosl(M_PIl * x); }

#define OF_FLOAT(name) inline float name(float x) { return name##f(x); }
OF_FLOAT(fabs) OF_FLOAT(exp) OF_FLOAT(exp2) OF_FLOAT(expm1) OF_FLOAT(log) OF_FLOAT(log1p) OF_FLOAT(log2) OF_FLOAT(sqrt)
OF_FLOAT(sin) OF_FLOAT(cos) OF_FLOAT(tanh) OF_FLOAT(erf) OF_FLOAT(floor) OF_FLOAT(rint) OF_FLOAT(trunc) OF_FLOAT(ceil)
#undef OF_FLOAT
inline float pow(float a, float b) { return powf(a, b); }
inline float fma(float a, float b, float c) { return fmaf(a, b, c); }

#define MIN_AND_MAX(R, A, B) \
    inline R min(A a, B b) { return (R)a < (R)b ? (R)a : (R)b; } \
    inline R max(A a, B b) { return (R)a > (R)b ? (R)a : (R)b; }
MIN_AND_MAX(int, int, int)
MIN_AND_MAX(unsigned, unsigned, unsigned)
MIN_AND_MAX(unsigned, int, unsigned)
MIN_AND_MAX(unsigned, unsigned, int)
MIN_AND_MAX(long long, long long, long long)
MIN_AND_MAX(unsigned long long, unsigned long long, unsigned long long)
MIN_AND_MAX(unsigned long long, unsigned long long, unsigned)
MIN_AND_MAX(float, float, float)
MIN_AND_MAX(double, double, double)
#undef MIN_AND_MAX

// -- instructions: operands in the order of PTX -----------------------------------------------------

inline float without_subnormals(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }

inline void ptx_cvt_f32_f16(float& y, unsigned short x) {
    const unsigned magnitude = (x & 0x7fffu) << 13, sign = (x & 0x8000u) << 16;
    if (magnitude >= 0x0f800000u) y = __uint_as_float(magnitude | 0x7f800000u | sign);
    else y = __uint_as_float(__float_as_uint(__uint_as_float(magnitude) * 0x1p112f) | sign);
}
inline void ptx_cvt_rn_f16_f32(unsigned short& y, float x) {
    const unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) y = 0x7fff;
    else if (magnitude >= 0x47800000u) y = sign | 0x7c00;
    else if (magnitude < 0x38800000u)  // subnormal: an addition rounds
        y = sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - __float_as_uint(0.5f));
    else y = sign | (magnitude + (magnitude >> 13 & 1) - 0x38000000u + 0xfff) >> 13;
}
inline void ptx_cvt_rn_bf16_f32(unsigned short& y, float x) {
    const unsigned bits = __float_as_uint(x);
    y = x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void ptx_cvt_rzi_X_f32(const char* type, int& y, float x) {
    const int bits = type[1] == '8' ? 8 : 16, low = type[0] == 'u' ? 0 : -(1 << (bits - 1)), high = low + (1 << bits) - 1;
    y = x != x ? 0 : x <= low ? low : x >= high ? high : static_cast<int>(x);
}
inline void ptx_ex2_approx_ftz_f32(float& y, float x) { y = without_subnormals(::exp2(static_cast<double>(x))); }
inline void ptx_lg2_approx_ftz_f32(float& y, float x) { y = ::log2f(without_subnormals(x)); }
inline void ptx_rcp_approx_ftz_f32(float& y, float x) { y = without_subnormals(1.0f / without_subnormals(x)); }
inline void ptx_rcp_approx_f32(float& y, float x) { y = 1.0f / x; }
inline void ptx_sqrt_approx_f32(float& y, float x) { y = ::sqrtf(x); }
inline void ptx_rsqrt_approx_f32(float& y, float x) { y = rsqrt(x); }
inline void ptx_div_full_f32(float& y, float a, float b) { y = a / b; }
inline void ptx_tanh_approx_f32(float& y, float x) { y = ::tanhf(x); }
inline void ptx_min_NaN_f32(float& y, float a, float b) { y = a < b || a != a ? a : b; }
inline void ptx_max_NaN_f32(float& y, float a, float b) { y = a > b || a != a ? a : b; }
inline void ptx_mul_wide_u32(unsigned long long& y, unsigned a, unsigned b) { y = static_cast<unsigned long long>(a) * b; }

inline void load(const void* from, void* to, int bytes) {
    emu::check(from, bytes, false);
    memcpy(to, from, bytes);
}
inline void ptx_ld_global_v4_u32(unsigned& a, unsigned& b, unsigned& c, unsigned& d, const void* from,
                                 unsigned long long = 0) {
    unsigned words[4];
    load(from, words, 16);
    a = words[0], b = words[1], c = words[2], d = words[3];
}
inline void ptx_ld_global_v2_u32(unsigned& a, unsigned& b, const void* from) {
    unsigned words[2];
    load(from, words, 8);
    a = words[0], b = words[1];
}
inline void ptx_ld_global_u32(unsigned& to, const void* from) { load(from, &to, 4); }
inline void ptx_ld_global_u16(unsigned short& to, const void* from) { load(from, &to, 2); }
inline void ptx_ld_global_u8(unsigned& to, const void* from) {
    unsigned char byte;
    load(from, &byte, 1);
    to = byte;
}
inline void ptx_st_global_v4_u32(void* to, unsigned a, unsigned b, unsigned c, unsigned d, unsigned long long = 0) {
    const unsigned words[4] = {a, b, c, d};
    emu::check(to, 16, true);
    memcpy(to, words, 16);
}
inline void ptx_st_global_v2_u32(void* to, unsigned a, unsigned b) {
    const unsigned words[2] = {a, b};
    emu::check(to, 8, true);
    memcpy(to, words, 8);
}
inline void ptx_createpolicy_fractional_b64(unsigned long long& policy, double) { policy = 0; }
inline void ptx_atom_add_global_u32(unsigned& before, unsigned* at, unsigned by) { before = *at, *at += by; }

#define __cvta_generic_to_shared(at) emu::shared_handle(at)
inline void ptx_cp_async_shared_global(unsigned to, const void* from, int bytes) { emu::copy_later(to, from, bytes, bytes); }
inline void ptx_cp_async_shared_global(unsigned to, const void* from, int bytes, int copied) {
    emu::copy_later(to, from, bytes, copied);
}
inline void ptx_cp_async_commit_group() { emu::commit_copies(); }
inline void ptx_cp_async_wait_group(int groups) { emu::wait_for_copies(groups); }
