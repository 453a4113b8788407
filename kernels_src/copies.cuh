// Ampere: copies into shared memory that pass no register. On what came before it these names exist, so that code which
// is never chosen there compiles.

namespace fusionrt {

#if __CUDA_ARCH__ >= 800
constexpr bool COPIES_PASS_BY = true;
template <int BYTES> __device__ __forceinline__ void copy_bytes(unsigned to, const char* from) {
    if constexpr (BYTES > 16) {
        copy_bytes<16>(to, from);
        copy_bytes<BYTES - 16>(to + 16, from + 16);
    } else if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(to), "l"(from), "n"(BYTES) : "memory");
    }
}
// 16 bytes, or as many zeros. Past the L1 a line of memory is asked for once only if its 32-byte sectors lie at the same
// places of 128 bytes in shared memory; otherwise once a sector, or twice, where halves of a sector lie apart. By way of
// the L1 that costs nothing.
template <bool BY_L1 = false>
__device__ __forceinline__ void copy_or_clear(unsigned shared, const void* global, bool copies) {
    if constexpr (BY_L1)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;"
                     :: "r"(shared), "l"(global), "r"(copies ? 16 : 0) : "memory");
    else
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(shared), "l"(global), "r"(copies ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last COUNT groups of this thread's copies are there.
template <int COUNT> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" :: "n"(COUNT) : "memory");
}
#else
constexpr bool COPIES_PASS_BY = false;
template <int BYTES> __device__ __forceinline__ void copy_bytes(unsigned, const char*) {}
template <bool BY_L1 = false> __device__ __forceinline__ void copy_or_clear(unsigned, const void*, bool) {}
__device__ __forceinline__ void commit_copies() {}
template <int COUNT> __device__ __forceinline__ void wait_for_copies() {}
#endif

template <typename T, int W> __device__ __forceinline__ void copy_pack(Pack<T, W>& to, const T* from) {
    copy_bytes<Pack<T, W>::BYTES>(shared_address(&to), reinterpret_cast<const char*>(from));
}

}  // namespace fusionrt
