// Access: W neighbouring elements as few wide transactions; truth values, four to a byte.

namespace fusionrt {

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

}  // namespace fusionrt
