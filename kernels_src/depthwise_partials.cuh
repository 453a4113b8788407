// Sums of all taps of a thread of a block, for the gradient of depthwise weights.

using Sums = acc_t[TAPS][VEC];

// Taps of a row for which there is memory at a time: 48 KB.
constexpr int TOGETHER = 48 * 1024 / (VEC * BLOCK * int(sizeof(acc_t))) < KW
    ? 48 * 1024 / (VEC * BLOCK * int(sizeof(acc_t))) : KW;

// What a block's threads have for the same channels, added in their order; a row of taps, or a part, at a time.
__device__ __forceinline__ void write_partials(const Sums& sums, int slots, int lanes, int count, acc_t* to) {
    __shared__ acc_t shared[TOGETHER][VEC][BLOCK];
#pragma unroll
    for (int i = 0; i < KH; ++i)
#pragma unroll
        for (int first = 0; first < KW; first += TOGETHER) {
            const int taps = KW - first < TOGETHER ? KW - first : TOGETHER;
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j)
#pragma unroll
                for (int v = 0; v < VEC; ++v)
                    if (first + j < KW) shared[j][v][threadIdx.x] = sums[i * KW + first + j][v];
            __syncthreads();
            for (int k = threadIdx.x; k < count * taps; k += BLOCK) {
                const int c = k / taps, j = k - c * taps;
                acc_t total = 0;
                for (int slot = 0; slot < slots; ++slot) total += shared[j][c % VEC][slot * lanes + c / VEC];
                to[c * TAPS + i * KW + first + j] = total;
            }
            __syncthreads();
        }
}
