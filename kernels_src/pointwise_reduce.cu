// A pointwise expression, reduced over some dimensions: gradients of broadcast operands, sums and maxima
// of rows that lie across memory.
//
// Every operand is read once; full-size outputs are written and what the reduced ones need is kept in
// registers in the same pass, so a bias gradient costs no extra traffic. Each block writes one row of
// partial values; `sum_partials` or `join_partials` joins the rows. Where a block has all of its sums, it computes
// from them at once what was asked for (FINAL). No atomics: two runs give the same bits.
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
//   finish<W>(p, i, tile, draws, found)   as before; found[g][v]: what group g reduces
//   take<N, W>(values, found, order)      take N elements of each column into values[k][v]
//   p.columns, p.rows, p.groups, p.chunks
//   p.partials[k][chunk][group][column], or, if FINAL, store(p, group * columns + column, values)

constexpr int DEPTH = BLOCK / LANES;
template <int W> using Values = acc_t[VALUES][W];

// What a thread has seen of its columns.
template <int W> struct Walk {
    Values<W> values;
    unsigned seen = 0;
    __device__ __forceinline__ Walk() { start<W>(values); }
    // N tiles, the elements before which are `apart`; the first one's stand at position `at` of their row.
    template <int N>
    __device__ __forceinline__ void take_in(const Params& p, const index_t (&i)[N], const Tile<W> (&tiles)[N],
                                            index_t at, index_t apart) {
        acc_t found[N][GROUPS][W];
#pragma unroll
        for (int n = 0; n < N; ++n) finish<W>(p, i[n], tiles[n], draws<W>(p, i[n]), found[n]);
        take<N, W>(values, found, Order{static_cast<acc_t>(seen), at, apart});
        seen += N;
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

// The threads of a block that own the same columns leave what they found in shared memory, where every thread
// joins its share of one column (or of some); the shares are joined as a tree.
constexpr int WIDTH = LANES * VEC, OWN = WIDTH > BLOCK ? WIDTH / BLOCK : 1, SHARES = WIDTH < BLOCK ? BLOCK / WIDTH : 1;
template <int G = 0>
__device__ __forceinline__ void join_columns(const Values<VEC>& values, acc_t (&joined)[OWN][VALUES],
                                             acc_t (&shared)[MOST][DEPTH][WIDTH]) {
    constexpr int FIRST = Group<G>::FIRST, COUNT = Group<G>::COUNT;
    const int first = threadIdx.x % LANES * VEC, depth = threadIdx.x / LANES;
    const int column = threadIdx.x % WIDTH, share = threadIdx.x / WIDTH;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < COUNT; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v) shared[k][depth][first + v] = values[FIRST + k][v];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < OWN; ++n) {
#pragma unroll
        for (int k = 0; k < COUNT; ++k) joined[n][FIRST + k] = shared[k][share][column + n * BLOCK];
#pragma unroll
        for (int d = SHARES; d < DEPTH; d += SHARES) {
            acc_t other[VALUES];
#pragma unroll
            for (int k = 0; k < COUNT; ++k) other[FIRST + k] = shared[k][share + d][column + n * BLOCK];
            join<G>(joined[n], other);
        }
    }
#pragma unroll
    for (int half = SHARES / 2; half > 0; half /= 2) {
        __syncthreads();
        if (share >= half)
#pragma unroll
            for (int k = 0; k < COUNT; ++k) shared[k][share][column] = joined[0][FIRST + k];
        __syncthreads();
        if (share < half) {
            acc_t other[VALUES];
#pragma unroll
            for (int k = 0; k < COUNT; ++k) other[FIRST + k] = shared[k][share + half][column];
            join<G>(joined[0], other);
        }
    }
    if constexpr (G + 1 < GROUPS) join_columns<G + 1>(values, joined, shared);
}

// Of value `at` of p.chunks rows of `step`.
template <typename P>  // which has only one or the other
__device__ __forceinline__ void leave(const P& p, const acc_t (&values)[VALUES], index_t chunk, index_t at, index_t step) {
    if constexpr (FINAL) {
        store(p, at, values);
    } else {
#pragma unroll
        for (int k = 0; k < VALUES; ++k) p.partials[(k * p.chunks + chunk) * step + at] = values[k];
    }
}

__device__ __forceinline__ void reduce_rows(const Params& p) {
    const int lane = threadIdx.x % LANES, depth = threadIdx.x / LANES;
    const index_t tiles = (p.columns + WIDTH - 1) / WIDTH;
    const index_t tile = blockIdx.x % tiles, chunk = blockIdx.x / tiles % p.chunks;
    const index_t group = blockIdx.x / tiles / p.chunks;
    const index_t column = tile * WIDTH + lane * VEC;

    Walk<VEC> walk;
    if (column < p.columns) {
        const index_t base = group_base(p, group) + column;
        const Tile<VEC> fixed = load_fixed<VEC>(p, base);
        const index_t end = chunk_begin(p.rows, chunk + 1, p.chunks);
        index_t row = chunk_begin(p.rows, chunk, p.chunks) + depth;
        for (; row + (UNROLL - 1) * DEPTH < end; row += UNROLL * DEPTH) {
            index_t i[UNROLL];
            Tile<VEC> tiles_[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                i[u] = base + row_base(p, row + u * DEPTH);
                tiles_[u] = load<VEC>(p, i[u], fixed);
            }
            walk.take_in(p, i, tiles_, row, DEPTH);
        }
        for (; row < end; row += DEPTH) {
            const index_t i[1] = {base + row_base(p, row)};
            const Tile<VEC> one[1] = {load<VEC>(p, i[0], fixed)};
            walk.take_in(p, i, one, row, DEPTH);
        }
    }

    __shared__ acc_t shared[MOST][DEPTH][WIDTH];
    acc_t joined[OWN][VALUES];
    join_columns(walk.values, joined, shared);
    const index_t first = tile * WIDTH + threadIdx.x % WIDTH;
    if (threadIdx.x / WIDTH == 0)
#pragma unroll
        for (int n = 0; n < OWN; ++n)
            if (first + n * BLOCK < p.columns)
                leave(p, joined[n], chunk, group * p.columns + first + n * BLOCK, p.groups * p.columns);
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
            index_t i[UNROLL];
            Tile<VEC> tiles[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                i[u] = base + vector_base(p, j + u * LANES);
                tiles[u] = load<VEC>(p, i[u], fixed);
            }
            walk.take_in(p, i, tiles, j * VEC, LANES * VEC);
        }
        for (; j < end; j += LANES) {
            const index_t i[1] = {base + vector_base(p, j)};
            const Tile<VEC> one[1] = {load<VEC>(p, i[0], fixed)};
            walk.take_in(p, i, one, j * VEC, LANES * VEC);
        }
        join_lanes<VEC>(values, walk.values);
        // Only a single row may be ragged: with several, VEC divides the columns.
        if (VEC > 1 && chunk == p.chunks - 1) {
            Walk<1> tail;
            for (index_t c = vectors * VEC + lane; c < p.columns; c += LANES) {
                const index_t i[1] = {base + c};
                const Tile<1> one[1] = {load<1>(p, i[0], load_fixed<1>(p, i[0]))};
                tail.take_in(p, i, one, c, LANES);
            }
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
    if (lane == 0 && group < p.groups) leave(p, values, chunk, group, p.groups);
}

extern "C" __global__ void __launch_bounds__(BLOCK, MIN_BLOCKS) pointwise_reduce(const __grid_constant__ Params p) {
    if constexpr (COLUMNS_KEPT) reduce_rows(p);
    else reduce_everything(p);
}
