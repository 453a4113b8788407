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
//   index_t                       unsigned below 2^31 elements, else unsigned long long
//   Params                        pointers, sizes, strides, scalars; `count` elements in all
//   Tile<W>, load<W>(p, i)        the operands' values at W neighbouring elements
//   Draws<W>, draws<W>(p, i)      their random bits; draw_both(p, i, a, b) for i and i + HALF_BLOCK
//   finish<W>(p, i, tile, draws)  compute and store the outputs

// Threads side by side fill half a block of elements, the second vectors of pairs the other half.
constexpr int PAIRS = UNROLL / 2, SIDE = PAIRS ? HALF_BLOCK / VEC : BLOCK;
constexpr index_t STEP = SIDE * VEC, PAIR_STEP = BLOCK * VEC * 2;

template <int N> __device__ __forceinline__ void whole_vectors(const Params& p, index_t i) {
    if constexpr (N == 0) {
        finish<VEC>(p, i, load<VEC>(p, i), draws<VEC>(p, i));
    } else {
        Tile<VEC> tiles[N][2];
#pragma unroll
        for (int k = 0; k < N; ++k) {
            tiles[k][0] = load<VEC>(p, i + k * PAIR_STEP);
            tiles[k][1] = load<VEC>(p, i + k * PAIR_STEP + STEP);
        }
#pragma unroll
        for (int k = 0; k < N; ++k) {
            Draws<VEC> first, second;
            draw_both(p, i + k * PAIR_STEP, first, second);
            finish<VEC>(p, i + k * PAIR_STEP, tiles[k][0], first);
            finish<VEC>(p, i + k * PAIR_STEP + STEP, tiles[k][1], second);
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, MIN_BLOCKS) pointwise(const __grid_constant__ Params p) {
    const index_t i = static_cast<index_t>(blockIdx.x) * (BLOCK * UNROLL * VEC)
                      + (threadIdx.x / SIDE) * (PAIRS ? 2 * STEP : STEP) + (threadIdx.x % SIDE) * VEC;
    constexpr index_t LAST = PAIRS ? (PAIRS - 1) * PAIR_STEP + STEP : 0;

    if (i + LAST + VEC <= p.count) {
        whole_vectors<PAIRS>(p, i);
    } else if (VEC * UNROLL > 1) {  // the ragged end: single elements
#pragma unroll 1
        for (int u = 0; u < UNROLL; ++u) {
            const index_t first = i + u / 2 * PAIR_STEP + u % 2 * STEP;
#pragma unroll 1
            for (index_t j = first; j < p.count && j < first + VEC; ++j)
                finish<1>(p, j, load<1>(p, j), draws<1>(p, j));
        }
    }
}
