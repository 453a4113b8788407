// Depthwise convolution as depthwise.cu describes it, of small images (depthwise_images.cuh).
//
// A block's warps share its units, whose sums and channels' weights are a thread's registers. A result's additions have
// the order of the rows, then of the columns.
//
// The prologue also defines RESIDUAL, Channels, know, finish as for depthwise.cu, and
//   BLOCKS      that share a multiprocessor

#include "prelude.cuh"
#include "depthwise.cuh"
#include "copies.cuh"
#include "depthwise_images.cuh"

using Sums = acc_t[ROWS][COLUMNS][VEC];

struct Products {
    const acc_t (&weights)[TAPS][VEC];
    Sums& sums;

    template <int N> __device__ __forceinline__ void take(const acc_t (&x)[WIDTH][VEC]) const {
        each_product<N>([&](int r, int tap, int s, int q) {
#pragma unroll
            for (int v = 0; v < VEC; ++v) sums[r][q][v] += x[s][v] * weights[tap][v];
        });
    }
};

__device__ __forceinline__ void store_rows(const Params& p, const Channels& channels, long long at, int rows,
                                           const Sums& sums) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (r >= rows) return;
        Pack<scalar_t, VEC> out[COLUMNS] = {};
        if (RESIDUAL)
#pragma unroll
            for (int q = 0; q < COLUMNS; ++q) out[q] = load_pack<VEC>(p.residual + (at + q * p.out_column));
#pragma unroll
        for (int q = 0; q < COLUMNS; ++q) {
#pragma unroll
            for (int v = 0; v < VEC; ++v)
                out[q].data[v] = from_acc<scalar_t>(finish(channels, v, sums[r][q][v], to_acc(out[q].data[v])));
            store_bytes<VEC * int(sizeof(scalar_t))>(p.out + (at + q * p.out_column), &out[q]);
        }
        at += p.out_row;
    }
}

// `count` numbers, a multiple of what is copied at a time; a weight may begin anywhere.
__device__ __forceinline__ void copy_taps(const scalar_t* from, int count, scalar_t* taps) {
    if (reinterpret_cast<unsigned long long>(from) % COPIED == 0)
        for (int k = threadIdx.x * COPIED_CHANNELS; k < count; k += BLOCK * COPIED_CHANNELS)
            copy_or_clear<true>(shared_address(taps + k), from + k, true);
    else
        for (int k = threadIdx.x; k < count; k += BLOCK) taps[k] = from[k];
}

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS) depthwise_images(const __grid_constant__ Params p) {
    wait_for_kernel_before();
#if __CUDA_ARCH__ >= 800
    extern __shared__ uint4 shared[];
    scalar_t* taps = reinterpret_cast<scalar_t*>(shared);
    scalar_t* source = taps + CHANNELS * TAPS;
    unsigned rest = blockIdx.x;
    const int first = digit(rest, p.slices) * CHANNELS, count = p.channels - first, own = threadIdx.x % 32 * VEC;
    const int begin = rest * p.chunk, end = min(begin + p.chunk, p.all);
    const Lines lines = source_lines(p, begin, end);
    copy_lines<WIDTH>(p.x + first, lines, p.x_column, count, source);
    copy_taps(p.weight + first * TAPS, min(CHANNELS, count) * TAPS, taps);
    commit_copies();
    const Channels channels = know(p, own < count ? first + own : 0);
    wait_for_copies<0>();
    __syncthreads();
    if (own >= count) return;

    acc_t weights[TAPS][VEC];
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap)
#pragma unroll
        for (int v = 0; v < VEC; ++v)
            weights[FLIPPED ? TAPS - 1 - tap : tap][v] = to_acc(taps[(own + v) * TAPS + tap]);
#pragma unroll 1
    for (int k = begin + threadIdx.x / 32; k < end; k += WARPS) {
        const Unit unit(p, k);
        const int line = unit.image * p.source_rows + unit.source - lines.begin;
        const scalar_t* from = source + (line * (WIDTH * CHANNELS) + own);
        Sums sums = {};
        take_rows(from, unit.source, p.source_rows, Products{weights, sums});
        store_rows(p, channels, unit.image * p.out_batch + unit.row * p.out_row + first + own,
                   p.result_rows - unit.row, sums);
    }
#endif
}
