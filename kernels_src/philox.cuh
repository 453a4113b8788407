// Random numbers: Philox4x32-7 (Salmon et al. 2011; seven rounds pass BigCrush), counter-based.
// The walk over the output is cut into blocks of 512 elements with 64 counters each: counter g of a
// block serves elements 4g .. 4g+3 of its first half and the same of its second half, 16 bits for
// each. So a thread that holds four neighbours from either half needs one Philox for eight elements,
// whatever the size of its vectors. The same seed and offset give the same bits on a CPU.

namespace fusionrt {

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
