// Add the rows of partial sums that other kernels left: out[k][n] = sum over c of partials[k][c][n].
//
// A few megabytes at most, so latency decides: a block takes 2^side neighbouring columns, its
// remaining threads share the rows, and a fixed tree in shared memory keeps the order of additions.
//
// The prologue defines BLOCK, out_t, and Params: partials, out, chunks, kept, side. blockIdx.y is k.

#include "prelude.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK) sum_partials(const __grid_constant__ Params p) {
    const int columns = 1 << p.side, lane = threadIdx.x & (columns - 1), depth = threadIdx.x >> p.side;
    const index_t n = (static_cast<index_t>(blockIdx.x) << p.side) + lane;

    const acc_t* partials = p.partials + blockIdx.y * p.chunks * p.kept;
    acc_t total = 0;
    wait_for_kernel_before();
    const index_t chunks = n < p.kept ? p.chunks : 0;
#pragma unroll 4
    for (index_t c = depth; c < chunks; c += BLOCK >> p.side) total += partials[c * p.kept + n];

    __shared__ acc_t shared[BLOCK];
    shared[threadIdx.x] = total;
    for (int half = BLOCK / 2; half >= columns; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    }
    if (depth == 0 && n < p.kept) p.out[blockIdx.y][n] = from_acc<out_t>(shared[lane]);
}
