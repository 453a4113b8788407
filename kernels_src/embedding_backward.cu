// The gradients of tables: rows of an incoming gradient, summed by their index. In a fixed order, without atomics on
// floating-point numbers.
//
// STAGE 0, one launch, whose blocks go through the columns part by part, so that of what groups read of the incoming
// gradient chunks find some in the L2, which is told to keep that and nothing else (5 to 7 % less time):
//   groups   Rows p.period apart have the same position: their sum is the position's row. Of each of TYPES token
//            types the sum of a group's rows is a partial one.
//   chunks   Token indices come sorted (sort_indices.cu), with where they stood, and are cut into chunks of
//            32 p.windows, whatever their values: one may have them all. A warp goes through a chunk. Up to 32 rows of
//            one index are added up where they begin; of more, at the ends of a chunk partial sums are left: `before`
//            of an index that goes on from the chunk before, `after` of one that begins here and goes on. Where it
//            begins is put on a list.
//   zeros    Rows of indices that do not occur.
// STAGE 1 adds up partial sums: of indices on the list, and of types.
//
// The prologue defines scalar_t, type_t, VEC (elements of a pack), TYPES and STAGE.

#include "prelude.cuh"
#include "retention.cuh"

constexpr int WARPS = BLOCK / 32, AHEAD = 8;  // rows whose loads are under way at a time
constexpr unsigned ALL = 0xffffffffu, NOTHING = 0xffffffffu;
using Sum = acc_t[VEC];

__device__ __forceinline__ unsigned lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ unsigned warp_id() { return threadIdx.x / 32; }

template <typename T> __device__ __forceinline__ T* row_of(const Params& p, T* rows, unsigned long long row, unsigned column) {
    return rows + row * p.columns + column;
}
__device__ __forceinline__ void clear(Sum& sum) {
#pragma unroll
    for (int v = 0; v < VEC; ++v) sum[v] = 0;
}
template <typename T> __device__ __forceinline__ void add(const Pack<T, VEC>& row, Sum& sum) {
#pragma unroll
    for (int v = 0; v < VEC; ++v) sum[v] += at(row, v);
}

// What the block's warps have, in their order: of `share` neighbours, for the first of them.
__device__ __forceinline__ void join_warps(Sum& sum, unsigned share) {
    __shared__ acc_t shared[WARPS][32][VEC];
    __syncthreads();
#pragma unroll
    for (int v = 0; v < VEC; ++v) shared[warp_id()][lane_id()][v] = sum[v];
    __syncthreads();
    if (warp_id() % share == 0)
        for (unsigned w = warp_id() + 1; w < warp_id() + share; ++w)
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[v] += shared[w][lane_id()][v];
}

// ---------------------------------------------------------------------------------------------
// Groups: p.share warps each

constexpr int MOST_TYPES = TYPES ? TYPES : 1;

__device__ __forceinline__ void add_group(const Params& p, unsigned long long group, unsigned column, unsigned member,
                                          Sum& sum, Sum (&of_types)[MOST_TYPES]) {
    const unsigned long long apart = static_cast<unsigned long long>(p.share) * p.period, end = p.count;
    for (unsigned long long n = group + static_cast<unsigned long long>(member) * p.period; n < end; n += AHEAD * apart) {
        int64_t types[AHEAD];
        Pack<scalar_t, VEC> rows[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const unsigned long long mine = n + a * apart;
            if (mine >= end) continue;
            if constexpr (TYPES > 0) types[a] = p.types ? static_cast<int64_t>(p.types[mine % p.type_period]) : 0;
            rows[a] = load_pack_as<Retention::KEPT, VEC>(row_of(p, p.grad, mine, column));
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            if (n + a * apart >= end) continue;
            add(rows[a], sum);
#pragma unroll
            for (int t = 0; t < TYPES; ++t)
                if (types[a] == t) add(rows[a], of_types[t]);
        }
    }
}

__device__ __forceinline__ void groups(const Params& p, unsigned block, unsigned column) {
    const unsigned member = warp_id() % p.share;
    const unsigned long long group = static_cast<unsigned long long>(block) * (WARPS / p.share) + warp_id() / p.share;
    const bool exists = column < p.columns;
    Sum sum, of_types[MOST_TYPES];
    clear(sum);
#pragma unroll
    for (int t = 0; t < MOST_TYPES; ++t) clear(of_types[t]);
    if (group < p.period && exists) add_group(p, group, column, member, sum, of_types);
    join_warps(sum, p.share);
    if (member == 0 && exists && group < p.position_rows)
        store_pack<scalar_t, VEC>(row_of(p, p.position_out, group, column), sum);
#pragma unroll
    for (int t = 0; t < TYPES; ++t) {
        join_warps(of_types[t], p.share);
        if (member == 0 && exists && group < p.period)
            store_pack<acc_t, VEC>(row_of(p, p.of_types, static_cast<unsigned long long>(t) * p.period + group, column),
                                   of_types[t]);
    }
}

// ---------------------------------------------------------------------------------------------
// Chunks

__device__ __forceinline__ acc_t* before(const Params& p, unsigned chunk, unsigned column) {
    return row_of(p, p.partials, 2ull * chunk, column);
}
__device__ __forceinline__ acc_t* after(const Params& p, unsigned chunk, unsigned column) {
    return row_of(p, p.partials, 2ull * chunk + 1, column);
}
__device__ __forceinline__ void write(const Params& p, unsigned key, unsigned column, Sum& sum) {
#pragma unroll
    for (int v = 0; v < VEC; ++v) sum[v] *= static_cast<acc_t>(p.scale);
    store_pack_as<Retention::DROPPED>(row_of(p, p.out, key, column), sum);
}

// 32 sorted indices, one a lane, or NOTHING.
struct Window { unsigned key, row; };

__device__ __forceinline__ Window window_at(const Params& p, int64_t begin) {
    const int64_t i = begin + lane_id();
    Window window = {NOTHING, 0};
    if (i < 0 || i >= p.count) return window;
    window.key = p.keys[i], window.row = p.order[i];
    if (window.key >= p.rows) window.key = NOTHING;
    return window;
}

__device__ __forceinline__ int number_of(unsigned key, unsigned that) { return __popc(__ballot_sync(ALL, key == that)); }

// An index that the last of one window and the first of the next have in common has more than 32 rows.
__device__ __forceinline__ bool is_long(const Window& one, const Window& next, unsigned key) {
    return __ballot_sync(ALL, one.key == key && next.key == key) != 0;
}

// The index that the warp is at, and the sum of its rows so far.
struct Running {
    unsigned key;
    bool goes_on_before;
    Sum sum;
};

__device__ __forceinline__ void flush(const Params& p, unsigned chunk, unsigned column, Running& running) {
    if (column < p.columns) {
        if (running.goes_on_before) store_pack<acc_t, VEC>(before(p, chunk, column), running.sum);
        else write(p, running.key, column, running.sum);
    }
    running.goes_on_before = false;
    clear(running.sum);
}

__device__ __forceinline__ void take(const Params& p, unsigned chunk, unsigned column, const Window& window, int from,
                                     int to, Running& running) {
    for (int j = from; j < to; j += AHEAD) {
        Pack<scalar_t, VEC> rows[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const unsigned row = __shfl_sync(ALL, window.row, j + a);
            if (j + a < to && column < p.columns)
                rows[a] = load_pack_as<Retention::DROPPED, VEC>(row_of(p, p.grad, row, column));
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const unsigned key = __shfl_sync(ALL, window.key, j + a);
            if (j + a >= to) continue;
            if (key != running.key) {
                flush(p, chunk, column, running);
                running.key = key;
            }
            add(rows[a], running.sum);
        }
    }
}

__device__ __forceinline__ void sum_chunk(const Params& p, unsigned chunk, unsigned column, bool lists) {
    int64_t i = 32ll * p.windows * chunk;
    if (i >= p.count) return;
    const Window past = window_at(p, i - 32);
    Window here = window_at(p, i), next;
    const unsigned first = __shfl_sync(ALL, here.key, 0);
    Running running = {first, false, {}};
    int from = 0, to = 0;
    if (first != NOTHING && __shfl_sync(ALL, past.key, 31) == first) {
        running.goes_on_before = is_long(past, here, first);
        if (!running.goes_on_before) from = number_of(here.key, first);  // that warp has added them up
        running.key = __shfl_sync(ALL, here.key, from);
    }
    if (running.key == NOTHING) return;
    for (unsigned w = 0;; here = next, from = 0) {
        i += 32;
        next = window_at(p, i);
        to = 32 - number_of(here.key, NOTHING);
        take(p, chunk, column, here, from, to, running);
        if (to < 32 || ++w == p.windows) break;
    }
    if (to == 32 && __shfl_sync(ALL, next.key, 0) == running.key) {
        if (!is_long(here, next, running.key)) {
            take(p, chunk, column, next, 0, number_of(next.key, running.key), running);
        } else if (!running.goes_on_before) {
            if (column < p.columns) store_pack<acc_t, VEC>(after(p, chunk, column), running.sum);
            if (lists && lane_id() == 0) p.list[atomicAdd(p.listed, 1u)] = chunk;
            return;
        }
    }
    flush(p, chunk, column, running);
}

// 32 rows a warp.
__device__ __forceinline__ void zero_rows(const Params& p, unsigned long long first, unsigned column) {
    const unsigned long long mine = first + lane_id();
    unsigned absent = __ballot_sync(ALL, mine < p.rows && !p.present[mine < p.rows ? mine : 0]);
    if (column >= p.columns) return;
    Sum zeros;
    clear(zeros);
    for (; absent; absent &= absent - 1)
        store_pack_as<Retention::DROPPED>(row_of(p, p.out, first + __ffs(absent) - 1, column), zeros);
}

// ---------------------------------------------------------------------------------------------
// Partial sums

// `count` rows that are `step` rows apart, each warp a share of them; for the first one the sum of all.
__device__ __forceinline__ void add_rows(const Params& p, const acc_t* rows, unsigned step, unsigned count,
                                         unsigned column, Sum& sum) {
    const unsigned share = (count + WARPS - 1) / WARPS, end = min(count, (warp_id() + 1) * share);
    clear(sum);
    if (column < p.columns)
#pragma unroll 8
        for (unsigned k = warp_id() * share; k < end; ++k)
            add(load_pack<VEC>(row_of(p, rows, static_cast<unsigned long long>(k) * step, column)), sum);
    join_warps(sum, WARPS);
}

// How many chunks after this one begin with the index that begins in it.
__device__ __forceinline__ unsigned chunks_after(const Params& p, unsigned chunk, unsigned key) {
    unsigned found = 0;
    for (;;) {
        const unsigned long long i = 32ull * p.windows * (chunk + 1ull + found + threadIdx.x);
        const int more = __syncthreads_count(i < p.count && p.keys[i] == key);
        found += more;
        if (more < BLOCK) return found;
    }
}

__device__ __forceinline__ void join(const Params& p, unsigned column) {
    Sum sum;
    const bool writes = warp_id() == 0 && column < p.columns;
    if (blockIdx.x >= p.joins) {
        const unsigned type = blockIdx.x - p.joins;
        add_rows(p, row_of(p, p.of_types, static_cast<unsigned long long>(type) * p.period, 0), 1, p.period, column, sum);
        if (writes) store_pack<scalar_t, VEC>(row_of(p, p.type_out, type, column), sum);
        return;
    }
    const unsigned listed = *p.listed;
    for (unsigned k = blockIdx.x; k < listed; k += p.joins) {
        const unsigned chunk = p.list[k], key = p.keys[32ull * p.windows * (chunk + 1ull)];
        add_rows(p, before(p, chunk + 1, 0), 2, chunks_after(p, chunk, key), column, sum);
        if (!writes) continue;
        add(load_pack<VEC>(static_cast<const acc_t*>(after(p, chunk, column))), sum);
        write(p, key, column, sum);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, STAGE > 0 ? 1 : TYPES > 0 ? 4 : 5)
embedding_backward(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    if constexpr (STAGE == 0) {
        const unsigned blocks = p.group_blocks + p.chunk_blocks + p.zero_blocks, part = blockIdx.x / blocks;
        const unsigned block = blockIdx.x - part * blocks, column = (part * 32 + lane_id()) * VEC;
        if (block < p.group_blocks) groups(p, block, column);
        else if (block < p.group_blocks + p.chunk_blocks)
            sum_chunk(p, (block - p.group_blocks) * WARPS + warp_id(), column, part == 0);
        else zero_rows(p, 32ull * ((block - p.group_blocks - p.chunk_blocks) * WARPS + warp_id()), column);
    } else {
        join(p, (blockIdx.y * 32 + lane_id()) * VEC);
    }
}
