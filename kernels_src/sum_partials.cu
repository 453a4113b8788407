// Add the rows of partial sums that pointwise_reduce left: out[n] = sum over c of partials[c][n].
//
// A few megabytes at most, so latency decides: a block takes COLUMNS neighbouring columns, its
// remaining threads share the rows, and a fixed tree in shared memory keeps the order of additions.
//
// The prologue defines BLOCK, COLUMNS, out_t, and Params: partials, out, chunks, kept.

extern "C" __global__ void __launch_bounds__(BLOCK) sum_partials(const __grid_constant__ Params p) {
    constexpr int DEPTH = BLOCK / COLUMNS;
    const int lane = threadIdx.x % COLUMNS, depth = threadIdx.x / COLUMNS;
    const index_t n = static_cast<index_t>(blockIdx.x) * COLUMNS + lane;

    acc_t total = 0;
    const index_t chunks = n < p.kept ? p.chunks : 0;
#pragma unroll 4
    for (index_t c = depth; c < chunks; c += DEPTH) total += p.partials[c * p.kept + n];

    __shared__ acc_t shared[DEPTH][COLUMNS];
    shared[depth][lane] = total;
#pragma unroll
    for (int half = DEPTH / 2; half > 0; half /= 2) {
        __syncthreads();
        if (depth < half) shared[depth][lane] += shared[depth + half][lane];
    }
    if (depth == 0 && n < p.kept) p.out[n] = from_acc<out_t>(shared[0][lane]);
}
