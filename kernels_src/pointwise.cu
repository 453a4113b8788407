// Any pointwise expression: every operand is read once, every output written once.
//
// The floor is bytes / bandwidth; what is left to tune is bytes in flight and instructions per
// element. A grid that covers the tensor once measured best: with 2048 resident threads an SM keeps
// 32 KB in flight per vector of a thread. A second vector pays where there is one operand only, or
// where it shares work (the random numbers).
//
// The prologue defines
//   BLOCK, UNROLL, VEC            threads, vectors a thread (1, or a number of pairs), elements a vector
//   MIN_BLOCKS                    blocks that must fit on an SM: the limit on registers
//   EACH_OF_FEW, BLOCK_OF_FEW     elements of a thread, and threads, of the second kernel, if there is one: of a
//                                 tensor that does not fill the GPU, where what a thread does one after the other
//                                 is the time
//   DRAWS                         whether there are random bits
//   index_t                       unsigned below 2^31 elements, else unsigned long long
//   Params                        pointers, sizes, strides, scalars; `count` elements in all
//   Tile<W>, load<W>(p, i)        the operands' values at W neighbouring elements
//   Draws<W>, draws<W>(p, i)      their random bits; draw_both(p, i, a, b) for i and i + HALF_BLOCK
//   finish<W>(p, i, tile, draws)  compute and store the outputs

#include "prelude.cuh"

// Vectors of a pair that share random numbers are HALF_BLOCK elements apart: threads side by side fill the first
// half, their second vectors the other one. Of fewer than four elements, none shares what it draws.
template <int VEC, int UNROLL, int THREADS> struct Layout {
    static constexpr int PAIRS = UNROLL / 2;
    static constexpr bool SHARED = PAIRS && DRAWS && VEC >= 4;
    static constexpr int SIDE = SHARED ? HALF_BLOCK / VEC : THREADS;
    static constexpr index_t STEP = SIDE * VEC, PAIR_STEP = THREADS * VEC * 2;
    static constexpr index_t LAST = PAIRS ? (PAIRS - 1) * PAIR_STEP + STEP : 0;

    __device__ __forceinline__ static index_t first_element() {
        const index_t of_block = static_cast<index_t>(blockIdx.x) * (THREADS * UNROLL * VEC);
        if constexpr (SIDE == THREADS) return of_block + threadIdx.x * VEC;
        return of_block + threadIdx.x / SIDE * (2 * STEP) + threadIdx.x % SIDE * VEC;
    }
};

template <int VEC, typename At> __device__ __forceinline__ void whole_vectors(const Params& p, index_t i) {
    if constexpr (At::PAIRS == 0) {
        finish<VEC>(p, i, load<VEC>(p, i), draws<VEC>(p, i));
    } else {
        Tile<VEC> tiles[At::PAIRS][2];
#pragma unroll
        for (int k = 0; k < At::PAIRS; ++k) {
            tiles[k][0] = load<VEC>(p, i + k * At::PAIR_STEP);
            tiles[k][1] = load<VEC>(p, i + k * At::PAIR_STEP + At::STEP);
        }
#pragma unroll
        for (int k = 0; k < At::PAIRS; ++k) {
            const index_t at = i + k * At::PAIR_STEP;
            Draws<VEC> first, second;
            if constexpr (At::SHARED) draw_both(p, at, first, second);
            else first = draws<VEC>(p, at), second = draws<VEC>(p, at + At::STEP);
            finish<VEC>(p, at, tiles[k][0], first);
            finish<VEC>(p, at + At::STEP, tiles[k][1], second);
        }
    }
}

template <int VEC, int UNROLL, int THREADS> __device__ __forceinline__ void elements(const Params& p) {
    using At = Layout<VEC, UNROLL, THREADS>;
    const index_t i = At::first_element();

    if (i + At::LAST + VEC <= p.count) {
        whole_vectors<VEC, At>(p, i);
    } else if (VEC * UNROLL > 1) {  // the ragged end: single vectors, and single elements
#pragma unroll 1
        for (int u = 0; u < UNROLL; ++u) {
            const index_t first = i + u / 2 * At::PAIR_STEP + u % 2 * At::STEP;
            if (UNROLL > 1 && first + VEC <= p.count) {
                finish<VEC>(p, first, load<VEC>(p, first), draws<VEC>(p, first));
                continue;
            }
#pragma unroll 1
            for (index_t j = first; j < p.count && j < first + VEC; ++j)
                finish<1>(p, j, load<1>(p, j), draws<1>(p, j));
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, MIN_BLOCKS) pointwise(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    elements<VEC, UNROLL, BLOCK>(p);
}

#ifdef EACH_OF_FEW
extern "C" __global__ void __launch_bounds__(BLOCK_OF_FEW) pointwise_of_few(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    elements<EACH_OF_FEW, 1, BLOCK_OF_FEW>(p);
}
#endif
