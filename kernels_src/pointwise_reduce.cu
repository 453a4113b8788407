// A pointwise expression some of whose outputs are summed: the gradients of broadcast operands.
//
// Every operand is read once; full-size gradients are written and partial sums of the reduced ones
// kept in registers in the same pass, so a bias gradient costs no extra traffic. Each block writes
// one row of partial sums, `sum_partials` adds the rows. No atomics: two runs give the same bits.
//
// The domain is seen as groups (kept) x rows (summed) x columns (the innermost dimension).
// The prologue defines, beside what pointwise.cu needs,
//   COLUMNS_KEPT                  a bias over the last dimension: a thread owns VEC columns and walks
//                                 down the rows; else (channels, scalars) columns are summed as well
//   LANES                         threads side by side along the columns of a block (COLUMNS_KEPT),
//                                 or threads that share a group (32, or BLOCK)
//   MIN_BLOCKS                    blocks that must fit on an SM: the limit on registers
//   SUMS                          number of reduced outputs
//   load_fixed<W>(p, i)           the operands that do not change along a thread's walk; load<W>(p, i,
//                                 fixed) reads the others
//   group_base(p, g), row_base(p, r)      first element of a group, of a row within it
//   finish<W>(p, i, tile, draws, sums)    as before, and add to sums[k][v]
//   p.columns, p.rows, p.groups, p.chunks, p.partials      partials[k][chunk][group][column]

template <int W> using Sums = acc_t[SUMS][W];

template <int W> __device__ __forceinline__ void finish_at(const Params& p, index_t i, const Tile<W>& tile,
                                                           Sums<W>& sums) {
    finish<W>(p, i, tile, draws<W>(p, i), sums);
}

__device__ __forceinline__ index_t chunk_begin(index_t total, index_t chunk, index_t chunks) {
    return static_cast<index_t>(static_cast<unsigned long long>(total) * chunk / chunks);
}

__device__ __forceinline__ void sum_columns(const Params& p) {
    constexpr int DEPTH = BLOCK / LANES;
    const int lane = threadIdx.x % LANES, depth = threadIdx.x / LANES;
    const index_t width = LANES * VEC, tiles = (p.columns + width - 1) / width;
    const index_t tile = blockIdx.x % tiles, chunk = blockIdx.x / tiles % p.chunks;
    const index_t group = blockIdx.x / tiles / p.chunks;
    const index_t column = tile * width + lane * VEC;

    acc_t sums[SUMS][VEC] = {};
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
            for (int u = 0; u < UNROLL; ++u)
                finish_at<VEC>(p, base + row_base(p, row + u * DEPTH), tiles_[u], sums);
        }
        for (; row < end; row += DEPTH) {
            const index_t i = base + row_base(p, row);
            finish_at<VEC>(p, i, load<VEC>(p, i, fixed), sums);
        }
    }

    __shared__ acc_t shared[DEPTH][LANES * VEC];
    for (int k = 0; k < SUMS; ++k) {
        __syncthreads();
#pragma unroll
        for (int v = 0; v < VEC; ++v) shared[depth][lane * VEC + v] = sums[k][v];
        __syncthreads();
        for (int c = threadIdx.x; c < LANES * VEC && tile * width + c < p.columns; c += BLOCK) {
            acc_t total = 0;
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) total += shared[d][c];
            p.partials[((k * p.chunks + chunk) * p.groups + group) * p.columns + tile * width + c] = total;
        }
    }
}

__device__ __forceinline__ acc_t warp_sum(acc_t x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// First element of the j-th vector of a group, rows after one another.
__device__ __forceinline__ index_t vector_base(const Params& p, index_t j) {
    if (p.rows == 1) return j * VEC;
    const index_t row = p.vectors.divide(j);
    return row_base(p, row) + (j - row * (p.columns / VEC)) * VEC;
}

__device__ __forceinline__ void sum_everything(const Params& p) {
    constexpr int TEAMS = BLOCK / LANES;
    const int lane = threadIdx.x % LANES, team = threadIdx.x / LANES;
    const index_t chunk = blockIdx.x % p.chunks;
    const index_t group = blockIdx.x / p.chunks * TEAMS + team;

    acc_t sums[SUMS][1] = {};
    if (group < p.groups) {
        const index_t base = group_base(p, group);
        const Tile<VEC> fixed = load_fixed<VEC>(p, base);
        const index_t vectors = p.columns / VEC, total = p.rows * vectors;
        const index_t end = chunk_begin(total, chunk + 1, p.chunks);
        acc_t wide[SUMS][VEC] = {};
        index_t j = chunk_begin(total, chunk, p.chunks) + lane;
        for (; j + (UNROLL - 1) * LANES < end; j += UNROLL * LANES) {
            Tile<VEC> tiles[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) tiles[u] = load<VEC>(p, base + vector_base(p, j + u * LANES), fixed);
#pragma unroll
            for (int u = 0; u < UNROLL; ++u)
                finish_at<VEC>(p, base + vector_base(p, j + u * LANES), tiles[u], wide);
        }
        for (; j < end; j += LANES) {
            const index_t i = base + vector_base(p, j);
            finish_at<VEC>(p, i, load<VEC>(p, i, fixed), wide);
        }
#pragma unroll
        for (int k = 0; k < SUMS; ++k)
#pragma unroll
            for (int v = 0; v < VEC; ++v) sums[k][0] += wide[k][v];
        // Only a single row may be ragged: with several, VEC divides the columns.
        if (VEC > 1 && chunk == p.chunks - 1)
            for (index_t c = vectors * VEC + lane; c < p.columns; c += LANES)
                finish_at<1>(p, base + c, load<1>(p, base + c, load_fixed<1>(p, base + c)), sums);
    }

    __shared__ acc_t shared[BLOCK / 32];
    for (int k = 0; k < SUMS; ++k) {
        acc_t total = warp_sum(sums[k][0]);
        if constexpr (LANES > 32) {
            __syncthreads();
            if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = total;
            __syncthreads();
            total = 0;
            for (int w = 0; w < BLOCK / 32; ++w) total += shared[w];
        }
        if (lane == 0 && group < p.groups)
            p.partials[(k * p.chunks + chunk) * p.groups + group] = total;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, MIN_BLOCKS) pointwise_reduce(const __grid_constant__ Params p) {
    if constexpr (COLUMNS_KEPT) sum_columns(p);
    else sum_everything(p);
}
