// For blocks that read what others of the same launch have written: those that stay until all of a grid have met, or
// the one that ends last.

namespace fusionrt {

// Not through the read-only path.
template <int BYTES> __device__ __forceinline__ void load_fresh_bytes(const void* from, void* to) {
    unsigned* w = static_cast<unsigned*>(to);
    if constexpr (BYTES > 16) {
        load_fresh_bytes<16>(from, to);
        load_fresh_bytes<BYTES - 16>(static_cast<const char*>(from) + 16, static_cast<char*>(to) + 16);
    } else if constexpr (BYTES == 16) {
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(from) : "memory");
    } else if constexpr (BYTES == 8) {
        asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(from) : "memory");
    } else {
        static_assert(BYTES == 4);
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(w[0]) : "l"(from) : "memory");
    }
}
template <int W, typename T> __device__ __forceinline__ Pack<T, W> fresh_pack(const T* from) {
    Pack<T, W> pack;
    load_fresh_bytes<Pack<T, W>::BYTES>(from, &pack);
    return pack;
}

// Of results that leave the L2 first, before what is still to be read again: 1 to 2 % of a batch norm.
template <typename T, int W> __device__ __forceinline__ void store_passing(T* to, const acc_t (&values)[W]) {
    Pack<T, W> pack;
#pragma unroll
    for (int v = 0; v < W; ++v) pack.data[v] = from_acc<T>(values[v]);
    if constexpr (Pack<T, W>::BYTES == 16) {
        const unsigned* w = reinterpret_cast<const unsigned*>(pack.data);
        asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
                     :: "l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
    } else {
        store_bytes<Pack<T, W>::BYTES>(to, &pack);
    }
}

// A block's thread has arrived: the counter before and after. Its top bit changes with the last block of the grid; its
// other bits are zero before the first and after the last.
struct Arrival { unsigned before, after; };
__device__ __forceinline__ bool differ_in_top_bit(unsigned a, unsigned b) { return (a ^ b) >> 31; }
__device__ __forceinline__ Arrival arrive(unsigned* arrived) {
    const unsigned mine = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
    unsigned before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(arrived), "r"(mine) : "memory");
    return {before, before + mine};
}
// Until all blocks of the grid have arrived.
__device__ __forceinline__ void meet(unsigned* arrived) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned before = arrive(arrived).before;
        unsigned now;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(arrived) : "memory");
        } while (!differ_in_top_bit(before, now));
    }
    __syncthreads();
}
// Whether this block is the last one of the grid to come here: what the others wrote before is there.
__device__ __forceinline__ bool is_last(unsigned* arrived) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        const Arrival arrival = arrive(arrived);
        last = differ_in_top_bit(arrival.before, arrival.after);
    }
    __syncthreads();
    return last;
}

}  // namespace fusionrt
