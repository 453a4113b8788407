// Storage types, which arithmetic knows only through `to_acc` and `from_acc`; casts inside expressions.

namespace fusionrt {

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

}  // namespace fusionrt
