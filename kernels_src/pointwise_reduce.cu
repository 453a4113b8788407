// A pointwise expression, reduced over some dimensions: gradients of broadcast operands, sums and maxima
// of rows that lie across memory.
//
// Every operand is read once; full-size outputs are written and what the reduced ones need is kept in
// registers in the same pass, so a bias gradient costs no extra traffic. Each block writes one row of
// partial values; `sum_partials` or `join_partials` joins the rows. No atomics: two runs give the same bits.
//
// The domain is seen as groups (kept) x rows (reduced) x columns (the innermost dimension).
// The prologue defines, beside what pointwise.cu needs,
//   COLUMNS_KEPT                  a bias over the last dimension: a thread owns VEC columns and walks
//                                 down the rows; else (channels, scalars) columns are reduced as well
//   LANES                         threads side by side along the columns of a block (COLUMNS_KEPT),
//                                 or threads that share a group (32, or BLOCK)
//   MIN_BLOCKS                    blocks that must fit on an SM: the limit on registers
//   VALUES, GROUPS, MOST          values in all; those found together form a group, of at most MOST
//   Group<G>::FIRST, COUNT        which of the values those are
//   start<W>, join<G>             values before the first element; of two threads
//   load_fixed<W>(p, i)           the operands that do not change along a thread's walk; load<W>(p, i,
//                                 fixed) reads the others
//   group_base(p, g), row_base(p, r)      first element of a group, of a row within it
//   finish<W>(p, i, tile, draws, values, order)  as before, and take elements into values[k][v]
//   p.columns, p.rows, p.groups, p.chunks, p.partials      partials[k][chunk][group][column]

constexpr int DEPTH = BLOCK / LANES;
template <int W> using Values = acc_t[VALUES][W];

// What a thread has seen of its columns.
template <int W> struct Walk {
    Values<W> values;
    unsigned seen = 0;
    __device__ __forceinline__ Walk() { start<W>(values); }
    __device__ __forceinline__ void take(const Params& p, index_t i, const Tile<W>& tile) {
        const acc_t nth = static_cast<acc_t>(++seen);
        finish<W>(p, i, tile, draws<W>(p, i), values, Order{nth, near_reciprocal(nth)});
    }
};

template <int G = 0>
__device__ __forceinline__ void join_all(acc_t (&mine)[VALUES], const acc_t (&other)[VALUES]) {
    join<G>(mine, other);
    if constexpr (G + 1 < GROUPS) join_all<G + 1>(mine, other);
}

__device__ __forceinline__ index_t chunk_begin(index_t total, index_t chunk, index_t chunks) {
    return static_cast<index_t>(static_cast<unsigned long long>(total) * chunk / chunks);
}

// Join the threads that own the same columns, as a tree; `at` is where the first column goes.
constexpr int HALF_DEPTH = DEPTH > 1 ? DEPTH / 2 : 1;
template <int G>
__device__ __forceinline__ void store_columns(const Params& p, Values<VEC>& values, index_t at, index_t step,
                                              index_t limit, acc_t (&shared)[MOST][HALF_DEPTH][LANES * VEC]) {
    constexpr int FIRST = Group<G>::FIRST, COUNT = Group<G>::COUNT;
    const int first = threadIdx.x % LANES * VEC, depth = threadIdx.x / LANES;
#pragma unroll
    for (int half = DEPTH / 2; half > 0; half /= 2) {
        __syncthreads();
        if (depth >= half && depth < 2 * half)
#pragma unroll
            for (int k = 0; k < COUNT; ++k)
#pragma unroll
                for (int v = 0; v < VEC; ++v) shared[k][depth - half][first + v] = values[FIRST + k][v];
        __syncthreads();
        if (depth >= half) continue;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            acc_t mine[VALUES], other[VALUES];
#pragma unroll
            for (int k = 0; k < COUNT; ++k)
                mine[FIRST + k] = values[FIRST + k][v], other[FIRST + k] = shared[k][depth][first + v];
            join<G>(mine, other);
#pragma unroll
            for (int k = 0; k < COUNT; ++k) values[FIRST + k][v] = mine[FIRST + k];
        }
    }
    if (depth == 0)
#pragma unroll
        for (int k = 0; k < COUNT; ++k)
#pragma unroll
            for (int v = 0; v < VEC; ++v)
                if (first + v < limit) p.partials[(FIRST + k) * step + at + first + v] = values[FIRST + k][v];
    if constexpr (G + 1 < GROUPS) store_columns<G + 1>(p, values, at, step, limit, shared);
}

__device__ __forceinline__ void reduce_rows(const Params& p) {
    const int lane = threadIdx.x % LANES, depth = threadIdx.x / LANES;
    const index_t width = LANES * VEC, tiles = (p.columns + width - 1) / width;
    const index_t tile = blockIdx.x % tiles, chunk = blockIdx.x / tiles % p.chunks;
    const index_t group = blockIdx.x / tiles / p.chunks;
    const index_t column = tile * width + lane * VEC;

    Walk<VEC> walk;
    if (column < p.columns) {
        const index_t base = group_base(p, group) + column;
        const Tile<VEC> fixed = load_fixed<VEC>(p, base);
        const index_t end = chunk_begin(p.rows, chunk + 1, p.chunks);
        index_t row = chunk_begin(p.rows, chunk, p.chunks) + depth;
        for (; row + (UNROLL - 1) * DEPTH < end; row += UNROLL * DEPTH) {
            Tile<VEC> tiles_[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) tiles_[u] = load<VEC>(p, base + row_base(p, row + u * DEPTH), fixed);
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) walk.take(p, base + row_base(p, row + u * DEPTH), tiles_[u]);
        }
        for (; row < end; row += DEPTH) {
            const index_t i = base + row_base(p, row);
            walk.take(p, i, load<VEC>(p, i, fixed));
        }
    }

    __shared__ acc_t shared[MOST][HALF_DEPTH][LANES * VEC];
    store_columns<0>(p, walk.values, (chunk * p.groups + group) * p.columns + tile * width,
                     p.chunks * p.groups * p.columns, p.columns - tile * width, shared);
}

// First element of the j-th vector of a group, rows after one another.
__device__ __forceinline__ index_t vector_base(const Params& p, index_t j) {
    if (p.rows == 1) return j * VEC;
    const index_t row = p.vectors.divide(j);
    return row_base(p, row) + (j - row * (p.columns / VEC)) * VEC;
}

template <int W> __device__ __forceinline__ void join_lanes(acc_t (&mine)[VALUES], const Values<W>& values) {
#pragma unroll
    for (int v = 0; v < W; ++v) {
        acc_t other[VALUES];
#pragma unroll
        for (int k = 0; k < VALUES; ++k) other[k] = values[k][v];
        join_all(mine, other);
    }
}

__device__ __forceinline__ void reduce_everything(const Params& p) {
    const int lane = threadIdx.x % LANES, team = threadIdx.x / LANES;
    const index_t chunk = blockIdx.x % p.chunks;
    const index_t group = blockIdx.x / p.chunks * DEPTH + team;

    Values<1> none;
    acc_t values[VALUES];
    start<1>(none);
#pragma unroll
    for (int k = 0; k < VALUES; ++k) values[k] = none[k][0];
    if (group < p.groups) {
        const index_t base = group_base(p, group);
        const Tile<VEC> fixed = load_fixed<VEC>(p, base);
        const index_t vectors = p.columns / VEC, total = p.rows * vectors;
        const index_t end = chunk_begin(total, chunk + 1, p.chunks);
        Walk<VEC> walk;
        index_t j = chunk_begin(total, chunk, p.chunks) + lane;
        for (; j + (UNROLL - 1) * LANES < end; j += UNROLL * LANES) {
            Tile<VEC> tiles[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) tiles[u] = load<VEC>(p, base + vector_base(p, j + u * LANES), fixed);
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) walk.take(p, base + vector_base(p, j + u * LANES), tiles[u]);
        }
        for (; j < end; j += LANES) {
            const index_t i = base + vector_base(p, j);
            walk.take(p, i, load<VEC>(p, i, fixed));
        }
        join_lanes<VEC>(values, walk.values);
        // Only a single row may be ragged: with several, VEC divides the columns.
        if (VEC > 1 && chunk == p.chunks - 1) {
            Walk<1> tail;
            for (index_t c = vectors * VEC + lane; c < p.columns; c += LANES)
                tail.take(p, base + c, load<1>(p, base + c, load_fixed<1>(p, base + c)));
            join_lanes<1>(values, tail.values);
        }
    }

#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        acc_t other[VALUES];
#pragma unroll
        for (int k = 0; k < VALUES; ++k) other[k] = __shfl_xor_sync(0xffffffffu, values[k], offset);
        join_all(values, other);
    }
    if constexpr (LANES > 32) {
        __shared__ acc_t shared[BLOCK / 32][VALUES];
        if (threadIdx.x % 32 == 0)
#pragma unroll
            for (int k = 0; k < VALUES; ++k) shared[threadIdx.x / 32][k] = values[k];
        __syncthreads();
#pragma unroll
        for (int k = 0; k < VALUES; ++k) values[k] = shared[0][k];
        for (int w = 1; w < BLOCK / 32; ++w) join_all(values, shared[w]);
    }
    if (lane == 0 && group < p.groups)
#pragma unroll
        for (int k = 0; k < VALUES; ++k) p.partials[(k * p.chunks + chunk) * p.groups + group] = values[k];
}

extern "C" __global__ void __launch_bounds__(BLOCK, MIN_BLOCKS) pointwise_reduce(const __grid_constant__ Params p) {
    if constexpr (COLUMNS_KEPT) reduce_rows(p);
    else reduce_everything(p);
}
