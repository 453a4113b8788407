// Ampere: products of 16-bit matrices by a warp. On what came before it these names exist, so that code which is never
// chosen there compiles.

namespace fusionrt {

// Makes the compiler keep a number in a register, which it would rather compute anew each time.
template <typename T> __device__ __forceinline__ void keep(T& x) { asm volatile("" : "+r"(x)); }

#if __CUDA_ARCH__ >= 800
// A number that the compiler does not know: a zero that it knows it would make anew each time.
__device__ __forceinline__ unsigned unknown(const void* shared) {
    unsigned x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(shared_address(shared)));
    return x;
}
// d += a b for matrices of 16 x DEPTH and DEPTH x 8, DEPTH 8 or 16. Of lane 4 g + t: a[0] is row g, columns 2t and
// 2t + 1, a[1] row g + 8, a[2] and a[3] columns 8 further; b[0] is rows 2t and 2t + 1 of column g, b[1] rows 8
// further; d0, d1 are row g, columns 2t and 2t + 1, d2, d3 row g + 8.
#define MULTIPLY(T, NAME) \
    template <int DEPTH> \
    __device__ __forceinline__ void multiply(T, float& d0, float& d1, float& d2, float& d3, \
                                             const unsigned (&a)[DEPTH / 4], const unsigned (&b)[DEPTH / 8]) { \
        if constexpr (DEPTH == 16) \
            asm("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
                "{%8, %9}, {%0, %1, %2, %3};" : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) \
                : "r"(a[0]), "r"(a[1]), "r"(a[DEPTH / 4 - 2]), "r"(a[DEPTH / 4 - 1]), "r"(b[0]), "r"(b[DEPTH / 8 - 1])); \
        else \
            asm("mma.sync.aligned.m16n8k8.row.col.f32." NAME "." NAME ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, " \
                "{%0, %1, %2, %3};" : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "r"(a[0]), "r"(a[1]), "r"(b[0])); \
    }
MULTIPLY(float16_t, "f16") MULTIPLY(bfloat16_t, "bf16")
#undef MULTIPLY
#else
__device__ __forceinline__ unsigned unknown(const void*) { return 0; }
template <int DEPTH, typename T>
__device__ __forceinline__ void multiply(T, float&, float&, float&, float&, const unsigned (&)[DEPTH / 4],
                                         const unsigned (&)[DEPTH / 8]) {}
#endif

}  // namespace fusionrt
