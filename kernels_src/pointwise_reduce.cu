// A pointwise expression, reduced over some dimensions: gradients of broadcast operands, sums and maxima
// of rows that lie across memory.
//
// Every operand is read once; full-size outputs are written and what the reduced ones need is kept in
// registers in the same pass, so a bias gradient costs no extra traffic. Each block writes one row of
// partial values; `sum_partials` or `join_partials` joins the rows. Where a block has all of its sums, it computes
// from them at once what was asked for (FINAL); where there is one of each, the block that ends last joins what all
// have left (JOINED). No atomics on values: two runs give the same bits.
//
// The domain is seen as groups (kept) x rows (reduced) x columns (the innermost dimension).
// The prologue defines, beside what pointwise.cu needs,
//   COLUMNS_KEPT                  a bias over the last dimension: a thread owns VEC columns and walks
//                                 down the rows; else (channels, scalars) columns are reduced as well
//   LANES                         threads side by side along the columns of a block (COLUMNS_KEPT),
//                                 or threads that share a group (32, or BLOCK)
//   ALONE                         of these, a thread has all rows of its columns, of whatever group
//   ACROSS                        nothing is written but what is reduced
//   ONE_ROW                       a group is one row: all of its elements are neighbours
//   TWINS                         columns are kept, and lanes 16 apart draw from the same counters; not ALONE
//   MIN_BLOCKS                    blocks that must fit on an SM: the limit on registers
//   VALUES, GROUPS, MOST          values in all; those found together form a group, of at most MOST
//   Group<G>::FIRST, COUNT        which of the values those are
//   start<W>, join<G>             values before the first element; of two threads
//   load_fixed<W>(p, i)           the operands that do not change along a thread's walk; load<W>(p, i,
//                                 fixed) reads the others; so do
//   Ring, fetch(p, i, ring, stage), fetched(ring, stage, fixed)    in two steps, of which AHEAD are under way
//   group_base(p, g), row_base(p, r)      first element of a group, of a row within it
//   finish<W>(p, i, tile, draws, found)   as before; found[g][v]: what group g reduces
//   take<N, W>(values, found, order)      take N elements of each column into values[k][v]
//   p.columns, p.rows, p.groups, p.chunks
//   p.partials[k][chunk][group][column], or, if FINAL, store(p, group * columns + column, values); if JOINED both, and
//   p.arrived, where blocks are counted: see arrivals.cuh

#include "prelude.cuh"
#include "reductions.cuh"
#include "copies.cuh"
#include "arrivals.cuh"

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

// A thread's steps, `apart` from each other, from `at` on up to `end`, of EACH elements of a row: `first_of` says where
// those of one begin. While some are taken in, the next ones are on their way: into registers, or into shared memory
// where accumulators leave none (left to itself the compiler would load what it then waits for).
template <int EACH, typename FirstOf>
__device__ __forceinline__ void go(const Params& p, Walk<VEC>& walk, const Tile<VEC>& fixed, index_t at, index_t apart,
                                   index_t end, const FirstOf& first_of) {
    if constexpr (AHEAD > 0 && COPIES_PASS_BY) {
        __shared__ Ring ring;
#pragma unroll
        for (int s = 0; s < AHEAD; ++s) {
            if (at + s * apart < end) fetch(p, first_of(at + s * apart), ring, s);
            commit_copies();
        }
        for (int stage = 0; at < end; at += apart, stage = stage + 1 < AHEAD ? stage + 1 : 0) {
            wait_for_copies<AHEAD - 1>();
            const index_t i[1] = {first_of(at)};
            const Tile<VEC> one[1] = {fetched(ring, stage, fixed)};
            walk.take_in(p, i, one, at * EACH, apart * EACH);
            if (at + AHEAD * apart < end) fetch(p, first_of(at + AHEAD * apart), ring, stage);
            commit_copies();
        }
    } else {
        for (; at + (UNROLL - 1) * apart < end; at += UNROLL * apart) {
            index_t i[UNROLL];
            Tile<VEC> tiles[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                i[u] = first_of(at + u * apart);
                tiles[u] = load<VEC>(p, i[u], fixed);
            }
            walk.take_in(p, i, tiles, at * EACH, apart * EACH);
        }
        for (; at < end; at += apart) {
            const index_t i[1] = {first_of(at)};
            const Tile<VEC> one[1] = {load<VEC>(p, i[0], fixed)};
            walk.take_in(p, i, one, at * EACH, apart * EACH);
        }
    }
}

// That at one place of a tile. Of twins' tiles one half lies HALF_BLOCK columns after the other.
__device__ __forceinline__ index_t column_of(index_t tile, int place) {
    if constexpr (!TWINS) return tile * WIDTH + place;
    constexpr int SIDE = WIDTH / 2, TILES = HALF_BLOCK / SIDE;
    return tile / TILES * (2 * HALF_BLOCK) + tile % TILES * SIDE + place / SIDE * HALF_BLOCK + place % SIDE;
}

// Blocks that share a column's sum take turns at the rows, so that what all read at a time lies together: up to 6 %
// faster. Where a ring is ahead it is 1 % slower. (Sums alone were not measured.)
constexpr bool TURNS = !ACROSS && AHEAD == 0;

__device__ __forceinline__ index_t chunk_begin(index_t total, index_t chunk, index_t chunks) {
    return static_cast<index_t>(static_cast<unsigned long long>(total) * chunk / chunks);
}

__device__ __forceinline__ void reduce_rows_alone(const Params& p) {
    const index_t n = static_cast<index_t>(blockIdx.x) * BLOCK + threadIdx.x, group = p.vectors.divide(n);
    if (group >= p.groups) return;
    const index_t column = (n - group * p.vectors.value) * VEC, base = group_base(p, group) + column;
    Walk<VEC> walk(p);
    go<1>(p, walk, load_fixed<VEC>(p, base), 0, 1, p.rows, [&](index_t row) { return base + row_base(p, row); });
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        acc_t values[VALUES];
#pragma unroll
        for (int k = 0; k < VALUES; ++k) values[k] = walk.values[k][v];
        leave(p, values, 0, group * p.columns + column + v, p.groups * p.columns);
    }
}

__device__ __forceinline__ void reduce_rows(const Params& p) {
    const int lane = threadIdx.x % LANES, depth = threadIdx.x / LANES;
    const index_t tiles = (p.columns + WIDTH - 1) / WIDTH;
    const index_t tile = blockIdx.x % tiles, chunk = blockIdx.x / tiles % p.chunks;
    const index_t group = blockIdx.x / tiles / p.chunks;
    const index_t column = column_of(tile, lane * VEC);

    Walk<VEC> walk(p);
    if (column < p.columns) {
        const index_t base = group_base(p, group) + column;
        const Tile<VEC> fixed = load_fixed<VEC>(p, base);
        const auto first_of = [&](index_t row) { return base + row_base(p, row); };
        if constexpr (TURNS) {
            go<1>(p, walk, fixed, chunk * DEPTH + depth, p.chunks * DEPTH, p.rows, first_of);
        } else {
            go<1>(p, walk, fixed, chunk_begin(p.rows, chunk, p.chunks) + depth, DEPTH,
                  chunk_begin(p.rows, chunk + 1, p.chunks), first_of);
        }
    }

    if constexpr (!FINAL) next_may_begin();
    __shared__ acc_t shared[MOST][DEPTH][WIDTH];
    acc_t joined[OWN][VALUES];
    join_columns(walk.values, joined, shared);
    if (threadIdx.x / WIDTH == 0)
#pragma unroll
        for (int n = 0; n < OWN; ++n) {
            const index_t own = column_of(tile, threadIdx.x % WIDTH + n * BLOCK);
            if (own < p.columns) leave(p, joined[n], chunk, group * p.columns + own, p.groups * p.columns);
        }
}

// First element of the j-th vector of a group, rows after one another.
__device__ __forceinline__ index_t vector_base(const Params& p, index_t j) {
    if constexpr (ONE_ROW) return j * VEC;
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

// Of N neighbouring threads, in the first of them; of more than a warp, of the whole block.
template <int N> __device__ __forceinline__ void join_threads(acc_t (&values)[VALUES]) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        acc_t other[VALUES];
#pragma unroll
        for (int k = 0; k < VALUES; ++k) other[k] = __shfl_xor_sync(0xffffffffu, values[k], offset);
        join_all(values, other);
    }
    if constexpr (N > 32) {
        __shared__ acc_t shared[BLOCK / 32][VALUES];
        if (threadIdx.x % 32 == 0)
#pragma unroll
            for (int k = 0; k < VALUES; ++k) shared[threadIdx.x / 32][k] = values[k];
        __syncthreads();
#pragma unroll
        for (int k = 0; k < VALUES; ++k) values[k] = shared[0][k];
        for (int w = 1; w < BLOCK / 32; ++w) join_all(values, shared[w]);
    }
}

template <typename P>  // whose members exist only where parts are joined here
__device__ __noinline__ void join_parts(const P& p) {
    if (gridDim.x == 1) __syncthreads();
    else if (!is_last(p.arrived)) return;
    Values<1> none;
    acc_t values[VALUES];
    start<1>(none);
#pragma unroll
    for (int k = 0; k < VALUES; ++k) values[k] = none[k][0];
#pragma unroll 2
    for (int c = threadIdx.x; c < gridDim.x; c += BLOCK) {
        acc_t other[VALUES];
#pragma unroll
        for (int k = 0; k < VALUES; ++k) other[k] = fresh_pack<1>(p.partials + (k * gridDim.x + c)).data[0];
        join_all(values, other);
    }
    join_threads<BLOCK>(values);
    if (threadIdx.x == 0) store(p, 0, values);
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
        Walk<VEC> walk(p);
        go<VEC>(p, walk, fixed, chunk * LANES + lane, p.chunks * LANES, total,
                [&](index_t j) { return base + vector_base(p, j); });
        join_lanes<VEC>(values, walk.values);
        // Only a single row may be ragged: with several, VEC divides the columns.
        if (VEC > 1 && chunk == p.chunks - 1) {
            Walk<1> tail(p);
            for (index_t c = vectors * VEC + lane; c < p.columns; c += LANES) {
                const index_t i[1] = {base + c};
                const Tile<1> one[1] = {load<1>(p, i[0], load_fixed<1>(p, i[0]))};
                tail.take_in(p, i, one, c, LANES);
            }
            join_lanes<1>(values, tail.values);
        }
    }

    if constexpr (!FINAL && !JOINED) next_may_begin();
    join_threads<LANES>(values);
    if (lane == 0 && group < p.groups) leave(p, values, chunk, group, p.groups);
    if constexpr (JOINED) join_parts(p);
}

extern "C" __global__ void __launch_bounds__(BLOCK, MIN_BLOCKS) pointwise_reduce(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    if constexpr (ALONE) reduce_rows_alone(p);
    else if constexpr (COLUMNS_KEPT) reduce_rows(p);
    else reduce_everything(p);
}
