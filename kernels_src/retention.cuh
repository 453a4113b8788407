// What the L2 keeps (Ampere): first what is read again soon, last what is not. Packs of 16 bytes; others are as always.

namespace fusionrt {

enum class Retention { KEPT, DROPPED };

#if __CUDA_ARCH__ >= 800
constexpr bool RETAINS = true;
template <Retention R> __device__ __forceinline__ unsigned long long retention_policy() {
    unsigned long long policy;
    if constexpr (R == Retention::KEPT) asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    else asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
template <Retention R> __device__ __forceinline__ void load_retained(const void* from, unsigned (&w)[4]) {
    asm volatile("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(from), "l"(retention_policy<R>()));
}
template <Retention R> __device__ __forceinline__ void store_retained(void* to, const unsigned (&w)[4]) {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;"
                 :: "l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(retention_policy<R>()) : "memory");
}
#else
constexpr bool RETAINS = false;
template <Retention R> __device__ __forceinline__ void load_retained(const void*, unsigned (&)[4]) {}
template <Retention R> __device__ __forceinline__ void store_retained(void*, const unsigned (&)[4]) {}
#endif

template <Retention R, int W, typename T> __device__ __forceinline__ Pack<T, W> load_pack_as(const T* from) {
    if constexpr (RETAINS && Pack<T, W>::BYTES == 16) {
        Pack<T, W> pack;
        load_retained<R>(from, reinterpret_cast<unsigned (&)[4]>(pack));
        return pack;
    } else {
        return load_pack<W>(from);
    }
}
template <Retention R, typename T, int W>
__device__ __forceinline__ void store_pack_as(T* to, const acc_t (&values)[W]) {
    if constexpr (RETAINS && Pack<T, W>::BYTES == 16) {
        Pack<T, W> pack;
#pragma unroll
        for (int v = 0; v < W; ++v) pack.data[v] = from_acc<T>(values[v]);
        store_retained<R>(to, reinterpret_cast<const unsigned (&)[4]>(pack));
    } else {
        store_pack<T, W>(to, values);
    }
}

}  // namespace fusionrt
