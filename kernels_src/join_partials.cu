// Join the rows of partial values that pointwise_reduce left, and compute from them what was asked for:
// a mean of a sum, a norm of a sum of squares, the logarithm of a sum of exponentials.
//
// A few megabytes at most, so latency decides: a block takes 2^side neighbouring columns, its remaining
// threads share the rows, and a fixed tree in shared memory keeps the order.
//
// The prologue defines BLOCK, VALUES, GROUPS, start and join as for pointwise_reduce, INNER neighbours that are
// joined as well, store(p, n, values), and Params: partials[k][chunk][n][inner], chunks, kept, side, the outputs and
// numbers.

#include "prelude.cuh"
#include "reductions.cuh"

template <int G = 0>
__device__ __forceinline__ void join_all(acc_t (&mine)[VALUES], const acc_t (&other)[VALUES]) {
    join<G>(mine, other);
    if constexpr (G + 1 < GROUPS) join_all<G + 1>(mine, other);
}

extern "C" __global__ void __launch_bounds__(BLOCK) join_partials(const __grid_constant__ Params p) {
    const int columns = 1 << p.side, depth = threadIdx.x >> p.side;
    const index_t n = (static_cast<index_t>(blockIdx.x) << p.side) + (threadIdx.x & (columns - 1));

    acc_t none[VALUES][1], values[VALUES];
    start<1>(none);
#pragma unroll
    for (int k = 0; k < VALUES; ++k) values[k] = none[k][0];
    wait_for_kernel_before();
    const index_t chunks = n < p.kept ? p.chunks * INNER : 0;
#pragma unroll 4
    for (index_t c = depth; c < chunks; c += BLOCK >> p.side) {
        acc_t other[VALUES];
#pragma unroll
        for (int k = 0; k < VALUES; ++k) {
            if constexpr (INNER == 1) other[k] = p.partials[(k * p.chunks + c) * p.kept + n];
            else other[k] = p.partials[((k * p.chunks + c / INNER) * p.kept + n) * INNER + c % INNER];
        }
        join_all(values, other);
    }

    __shared__ acc_t shared[BLOCK][VALUES];
#pragma unroll
    for (int k = 0; k < VALUES; ++k) shared[threadIdx.x][k] = values[k];
    for (int half = BLOCK / 2; half >= columns; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            join_all(values, shared[threadIdx.x + half]);
#pragma unroll
            for (int k = 0; k < VALUES; ++k) shared[threadIdx.x][k] = values[k];
        }
    }
    if (depth == 0 && n < p.kept) store(p, n, values);
}
