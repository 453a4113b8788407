// Sums of all taps of a thread of a block, for the gradient of depthwise weights.

using Sums = acc_t[TAPS][VEC];

// What a block's threads have for the same channels, added in their order; a row of taps at a time.
__device__ __forceinline__ void write_partials(const Sums& sums, int slots, int lanes, int count, acc_t* to) {
    __shared__ acc_t shared[KW][VEC][BLOCK];
#pragma unroll
    for (int i = 0; i < KH; ++i) {
#pragma unroll
        for (int j = 0; j < KW; ++j)
#pragma unroll
            for (int v = 0; v < VEC; ++v) shared[j][v][threadIdx.x] = sums[i * KW + j][v];
        __syncthreads();
        for (int k = threadIdx.x; k < count * KW; k += BLOCK) {
            const int c = k / KW, j = k - c * KW;
            acc_t total = 0;
            for (int slot = 0; slot < slots; ++slot) total += shared[j][c % VEC][slot * lanes + c / VEC];
            to[c * TAPS + i * KW + j] = total;
        }
        __syncthreads();
    }
}
