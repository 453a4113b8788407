// Join the rows of partial values that pointwise_reduce left, and compute from them what was asked for:
// a mean of a sum, a norm of a sum of squares, the logarithm of a sum of exponentials.
//
// A few megabytes at most, so latency decides: a block takes COLUMNS neighbouring columns, its remaining
// threads share the rows, and a fixed tree in shared memory keeps the order.
//
// The prologue defines BLOCK, COLUMNS, VALUES, GROUPS, start and join as for pointwise_reduce,
// store(p, n, values), and Params: partials[k][chunk][n], chunks, kept, the outputs and numbers.

template <int G = 0>
__device__ __forceinline__ void join_all(acc_t (&mine)[VALUES], const acc_t (&other)[VALUES]) {
    join<G>(mine, other);
    if constexpr (G + 1 < GROUPS) join_all<G + 1>(mine, other);
}

extern "C" __global__ void __launch_bounds__(BLOCK) join_partials(const __grid_constant__ Params p) {
    constexpr int DEPTH = BLOCK / COLUMNS;
    const int lane = threadIdx.x % COLUMNS, depth = threadIdx.x / COLUMNS;
    const index_t n = static_cast<index_t>(blockIdx.x) * COLUMNS + lane;

    acc_t none[VALUES][1], values[VALUES];
    start<1>(none);
#pragma unroll
    for (int k = 0; k < VALUES; ++k) values[k] = none[k][0];
    const index_t chunks = n < p.kept ? p.chunks : 0;
#pragma unroll 4
    for (index_t c = depth; c < chunks; c += DEPTH) {
        acc_t other[VALUES];
#pragma unroll
        for (int k = 0; k < VALUES; ++k) other[k] = p.partials[(k * p.chunks + c) * p.kept + n];
        join_all(values, other);
    }

    __shared__ acc_t shared[DEPTH][COLUMNS][VALUES];
#pragma unroll
    for (int k = 0; k < VALUES; ++k) shared[depth][lane][k] = values[k];
#pragma unroll
    for (int half = DEPTH / 2; half > 0; half /= 2) {
        __syncthreads();
        if (depth < half) {
            join_all(values, shared[depth + half][lane]);
#pragma unroll
            for (int k = 0; k < VALUES; ++k) shared[depth][lane][k] = values[k];
        }
    }
    if (depth == 0 && n < p.kept) store(p, n, values);
}
