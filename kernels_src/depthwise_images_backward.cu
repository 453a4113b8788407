// The gradient of the weights of a depthwise convolution as depthwise_backward.cu describes it, of small images
// (depthwise_images.cuh).
//
// A thread has the sums of all taps of its channels. A block brings what some units depend on, its warps share these,
// and each row of x is read once for all rows of a unit. Then the next units. At last the warps add up what they have,
// and the block writes a row of partial sums, which `sum_partials` adds.
//
// The prologue also defines BLOCKS as for depthwise_images.cu; COLUMNS are the gradient's.

#include "prelude.cuh"
#include "depthwise.cuh"
#include "copies.cuh"
#include "depthwise_images.cuh"

static_assert(!TRANSPOSED, "rows of x are the source's");

using Sums = acc_t[TAPS][VEC];

struct Products {
    const acc_t (&grad)[ROWS][COLUMNS][VEC];
    Sums& sums;

    template <int N> __device__ __forceinline__ void take(const acc_t (&x)[WIDTH][VEC]) const {
        each_product<N>([&](int r, int tap, int s, int q) {
#pragma unroll
            for (int v = 0; v < VEC; ++v) sums[tap][v] += x[s][v] * grad[r][q][v];
        });
    }
};

__device__ __forceinline__ void take_units(const Params& p, int begin, int end, const scalar_t* x, int first_line,
                                           const scalar_t* grads, int first_grad, Sums& sums) {
#pragma unroll 1
    for (int k = begin + threadIdx.x / 32; k < end; k += WARPS) {
        const Unit unit(p, k);
        acc_t grad[ROWS][COLUMNS][VEC] = {};
        const scalar_t* from = grads + (unit.image * p.result_rows + unit.row - first_grad) * (COLUMNS * CHANNELS);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            if (unit.row + r < p.result_rows) read_row(from + r * (COLUMNS * CHANNELS), grad[r]);
        from = x + (unit.image * p.source_rows + unit.source - first_line) * (WIDTH * CHANNELS);
        take_rows(from, unit.source, p.source_rows, Products{grad, sums});
    }
}

// What the warps have, in their order.
__device__ __forceinline__ void write_partials(const Sums& sums, acc_t* shared, int count, acc_t* to) {
    constexpr int PITCH = CHANNELS + 1;
    __syncthreads();
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap)
#pragma unroll
        for (int v = 0; v < VEC; ++v)
            shared[(threadIdx.x / 32 * TAPS + tap) * PITCH + threadIdx.x % 32 * VEC + v] = sums[tap][v];
    __syncthreads();
    for (int k = threadIdx.x; k < count * TAPS; k += BLOCK) {
        const int c = k / TAPS, tap = k % TAPS;
        acc_t total = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) total += shared[(warp * TAPS + tap) * PITCH + c];
        to[k] = total;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS) depthwise_images_backward(const __grid_constant__ Params p) {
    wait_for_kernel_before();
#if __CUDA_ARCH__ >= 800
    extern __shared__ uint4 shared[];
    unsigned group = blockIdx.x;
    const int first = digit(group, p.slices) * CHANNELS, count = p.channels - first, own = threadIdx.x % 32 * VEC;
    scalar_t* x = reinterpret_cast<scalar_t*>(shared);
    scalar_t* grads = x + p.most_lines * (WIDTH * CHANNELS);
    const int last = min(static_cast<int>(group + 1) * p.chunk, p.all);
    Sums sums = {};
#pragma unroll 1
    for (int begin = group * p.chunk; begin < last; begin += p.together) {
        const int end = min(begin + p.together, last);
        const Lines lines = source_lines(p, begin, end);
        const Unit low(p, begin), high(p, end - 1);
        const Lines grad_lines = {low.image * p.result_rows + low.row,
                                  high.image * p.result_rows + min(p.result_rows, high.row + ROWS)};
        copy_lines<WIDTH>(p.x + first, lines, p.x_column, count, x);
        copy_lines<COLUMNS>(p.grad + first, grad_lines, p.grad_column, count, grads);
        commit_copies();
        wait_for_copies<0>();
        __syncthreads();
        take_units(p, begin, end, x + own, lines.begin, grads + own, grad_lines.begin, sums);
        if (end < last) __syncthreads();
    }
    write_partials(sums, reinterpret_cast<acc_t*>(shared), min(CHANNELS, count),
                   p.partials + (static_cast<long long>(group) * p.channels + first) * TAPS);
#endif
}
