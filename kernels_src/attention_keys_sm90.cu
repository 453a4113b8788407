// The gradients of k and v, by blocks of 128 keys of a head: grad_v = w^T grad, and
// grad_k = scale (w (grad v^T - total) score')^T q.
//
// Either of two warpgroups has 64 keys and goes over the tiles of all queries that attend to them, those of every
// head that shares the keys. Products are transposed, keys by queries, so that they are the first factors of the
// next ones as they are. Weights w come from the logarithms that attention_sm90.cu left.
//
// The prologue defines
//   D, BN, STAGES             columns of a head (64 or 128); queries of a tile; depth of the ring
//   SOFTCAP, ALIBI, value_t   as in attention_sm90.cu
//   Params                    maps of k, v, q, grad, grad_k, grad_v (boxes of 64 columns; rows of k and v: 128, of q
//                             and grad: BN, of gradients: 16); slopes, logarithms, totals: sums of grad out;
//                             heads, group, tiles: of keys, padded, slopes_batch, left, right, offset, queries,
//                             keys, scale, inner, cap, near; plain_scale: of scores
//   Tiles, Across             as attention_sm90.cuh says, of BN and of D columns

#include "prelude.cuh"
#include "hopper.cuh"
#include "sm90.cuh"
#include "attention_sm90.cuh"

constexpr int GROUPS = 2, BM = 64 * GROUPS;
constexpr unsigned K_BYTES = BM * D * 2, TILE_BYTES = BN * D * 2, NUMBERS_BYTES = BN * 4;
constexpr unsigned STAGE_BYTES = 2 * TILE_BYTES + 1024;  // q, grad, logarithms, totals
static_assert(2 * NUMBERS_BYTES <= 1024, "tiles begin at multiples of that");
using QueryRing = Ring<STAGES, STAGE_BYTES>;
using Scores = float[BN / 2];
using Pairs = unsigned[BN / 4];
using Sums = float[D / 2];

extern __shared__ __align__(1024) unsigned char memory[];  // keys, values, queries and what is of them, barriers
__device__ __forceinline__ unsigned char* values_memory() { return memory + K_BYTES; }
__device__ __forceinline__ Barrier* barriers() {
    return reinterpret_cast<Barrier*>(memory + 2 * K_BYTES + STAGES * STAGE_BYTES);
}
__device__ __forceinline__ QueryRing ring() { return {memory + 2 * K_BYTES, barriers() + 1}; }
__device__ __forceinline__ const float* numbers_of(const QueryRing& queries) {
    return reinterpret_cast<const float*>(queries.tile() + 2 * TILE_BYTES);
}

struct KeyPlace { int row; Head key; Range tiles; };  // of queries

__device__ __forceinline__ KeyPlace place_of(const Params& p) {
    const int kv_heads = p.heads / p.group, number = blockIdx.x / p.tiles, row = blockIdx.x % p.tiles * BM;
    return {row, {number % kv_heads, number / kv_heads}, tiles_of_queries<BM, BN>(band_of(p), row)};
}
// The n-th step of a block's walk.
struct Step { Head query; int row; };
__device__ __forceinline__ Step step_of(const Params& p, const KeyPlace& at, int n) {
    const int count = at.tiles.last - at.tiles.first;
    return {{at.key.head * p.group + n / count, at.key.batch}, (at.tiles.first + n % count) * BN};
}

__device__ __forceinline__ void load(const Params& p, const KeyPlace& at) {
    expect(barriers(), 2 * K_BYTES);
    load_panels<D, BM>(memory, &p.k, at.row, at.key, barriers());
    load_panels<D, BM>(values_memory(), &p.v, at.row, at.key, barriers());
    QueryRing queries = ring();
    for (int n = 0; n < (at.tiles.last - at.tiles.first) * p.group; ++n, queries.next()) {
        const Step step = step_of(p, at, n);
        const size_t first = static_cast<size_t>(step.query.batch * p.heads + step.query.head) * p.padded + step.row;
        await(queries.empty(), queries.parity ^ 1);
        expect(queries.full(), 2 * TILE_BYTES + 2 * NUMBERS_BYTES);
        load_panels<D, BN>(queries.tile(), &p.q, step.row, step.query, queries.full());
        load_panels<D, BN>(queries.tile() + TILE_BYTES, &p.grad, step.row, step.query, queries.full());
        unsigned char* numbers = queries.tile() + 2 * TILE_BYTES;
        copy_bulk(numbers, p.logarithms + first, NUMBERS_BYTES, queries.full());
        copy_bulk(numbers + NUMBERS_BYTES, p.totals + first, NUMBERS_BYTES, queries.full());
    }
}

// ---------------------------------------------------------------------------------------------
// A warpgroup's 64 keys; a thread has parts of two rows, 8 apart

struct Rows { int first, key, column; };  // of the warpgroup, of this thread; first of its columns in a tile

__device__ __forceinline__ bool has_edge(const Params& p, int first, int position) {
    return first + 63 > position + p.right || first < position + BN - 1 - p.left;
}

// Products k q^T to weights, and in their place to these times the derivatives of scores. Queries beyond the last
// have an infinite logarithm.
template <bool NEAR> __device__ __forceinline__ void weigh(const Scoring& scoring, float slope, float distance,
                                                           const float* logarithms, Scores& s, Pairs& weights) {
    const float by = factor<SOFTCAP>(scoring), bases[2] = {slope * distance, slope * (distance + 8)};
#pragma unroll
    for (int i = 0; i < BN / 4; ++i) {
        const int column = i / 2 * 8, r = i % 2;
        const Pack<float, 2> pair = shared_pack<2>(logarithms + column);
        float w[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            Tanh found = {s[2 * i + c], 1};
            if constexpr (SOFTCAP) found = tanh_of<NEAR>(scoring, found.value);
            float x = found.value, less = LOG2_E * pair.data[c];
            if constexpr (ALIBI == LEFT) x = fmaf(x, by, bases[r]), less = fmaf(slope, column + c, less);
            if constexpr (ALIBI == BOTH) x = fmaf(-slope, fabsf(distance + (8 * r - column - c)), x * by);
            w[c] = ex2(fmaf(x, ALIBI == NONE ? by : 1.0f, -less));
            s[2 * i + c] = SOFTCAP ? w[c] * found.derivative : w[c];
        }
        weights[i] = pair_of(value_t{}, w[0], w[1]);
    }
}

__device__ __forceinline__ void weigh(const Params& p, const Rows& rows, float slope, int query,
                                      const float* logarithms, Scores& s, Pairs& weights) {
    const Scoring scoring = {p.scale, p.inner, p.cap, p.near};
    const int position = query + p.offset, distance = rows.key - position - rows.column;
    logarithms += rows.column;
    if (SOFTCAP && are_near(scoring, s))
        weigh<true>(scoring, slope, static_cast<float>(distance), logarithms, s, weights);
    else
        weigh<false>(scoring, slope, static_cast<float>(distance), logarithms, s, weights);
    if (has_edge(p, rows.first, position)) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int low = distance + 8 * r - p.right, high = distance + 8 * r + p.left;
            exclude(s, r, low, high, 0);
            exclude(weights, r, low, high);
        }
    }
}

// Gradients of weights to those of scores.
__device__ __forceinline__ void differentiate(const Rows& rows, const float* totals, const Scores& weights,
                                              Scores& grads) {
#pragma unroll
    for (int i = 0; i < BN / 8; ++i) {
        const Pack<float, 2> total = shared_pack<2>(totals + rows.column + 8 * i);
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int k = 4 * i + 2 * r + c;
                grads[k] = weights[k] * (grads[k] - total.data[c]);
            }
    }
}

__device__ __forceinline__ void walk(const Params& p, const KeyPlace& at, unsigned group, unsigned lane, const Rows& rows,
                                     Sums& grad_k, Sums& grad_v) {
    const unsigned char *k = memory + group * 64 * 128, *v = values_memory() + group * 64 * 128;
    const int steps = (at.tiles.last - at.tiles.first) * p.group;
    QueryRing queries = ring();
    Scores s, grads;
    Pairs weights, of_scores;
    await(barriers(), 0);
    for (int n = 0; n < steps; ++n, queries.next()) {
        const Step step = step_of(p, at, n);
        const float slope = ALIBI == NONE ? 0.0f
                                          : p.slopes[step.query.batch * p.slopes_batch + step.query.head] * LOG2_E;
        const float* numbers = numbers_of(queries);
        await(queries.full(), queries.parity);
        order_tiles<value_t, D, BM, BN>(k, queries.tile(), s);
        order_tiles<value_t, D, BM, BN>(v, queries.tile() + TILE_BYTES, grads);
        wait_for_products<1>();
        hold(s);
        weigh(p, rows, slope, step.row, numbers, s, weights);
        order_across<value_t, D, BN>(weights, queries.tile() + TILE_BYTES, grad_v);
        wait_for_products<1>();
        hold(grads);
        differentiate(rows, numbers + BN, s, grads);
        pack<value_t>(grads, of_scores);
        order_across<value_t, D, BN>(of_scores, queries.tile(), grad_k);
        wait_for_products<0>();
        hold(grad_k), hold(grad_v);
        __syncwarp();  // all lanes have read their numbers
        release(queries.empty(), lane);
    }
}

__device__ __forceinline__ void compute(const Params& p, const KeyPlace& at, unsigned group) {
    const unsigned lane = threadIdx.x % 32, row = group * 64 + threadIdx.x % 128 / 32 * 16;
    const int first = at.row + group * 64;
    const Rows rows = {first, at.row + static_cast<int>(row + lane / 4), static_cast<int>(lane % 4 * 2)};
    Sums grad_k, grad_v;
#pragma unroll
    for (int i = 0; i < D / 2; ++i) grad_k[i] = grad_v[i] = 0;
    if (at.tiles.first < at.tiles.last) walk(p, at, group, lane, rows, grad_k, grad_v);
    else await(barriers(), 0);  // its memory is written to
    sync_group(1 + group);      // none of its products reads k or v any more
    const float factors[2] = {p.plain_scale, p.plain_scale}, ones[2] = {1, 1};
    store_product<value_t, D, BM>(grad_k, factors, memory, row, &p.grad_k, at.row + row, at.key, lane);
    store_product<value_t, D, BM>(grad_v, ones, values_memory(), row, &p.grad_v, at.row + row, at.key, lane);
    if (lane == 0) wait_for_stores<0>();
}

extern "C" __global__ void __launch_bounds__(BLOCK, 1) attention_keys_sm90(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    if (threadIdx.x == 0) {
        make_barrier(barriers(), 1);
        for (int i = 0; i < 2 * STAGES; ++i) make_barrier(barriers() + 1 + i, i / STAGES ? 4 * GROUPS : 1);
        barriers_are_made();
    }
    __syncthreads();
    const KeyPlace at = place_of(p);
    divide_block<GROUPS>([&] { load(p, at); }, [&](unsigned group) { compute(p, at, group); });
}
