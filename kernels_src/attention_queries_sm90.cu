// The gradient of q: grad_q = scale (w (grad v^T - total) score') k, by blocks of 64 GROUPS queries of a head.
//
// As attention_sm90.cu goes over keys and values; weights w come from the logarithms that it left.
//
// The prologue defines
//   D, BN, GROUPS, STAGES, SOFTCAP, ALIBI, value_t    as in attention_sm90.cu
//   Params                    maps of q, grad, k, v, grad_q (boxes of 64 columns; rows of q and grad: 64 GROUPS,
//                             of k and v: BN, of grad_q: 16); slopes, logarithms, totals: sums of grad out;
//                             heads, group, tiles, padded, slopes_batch, left, right, offset, queries, keys,
//                             scale, inner, cap, near; plain_scale: of scores
//   Tiles, Across             as attention_sm90.cuh says, of BN and of D columns

#include "prelude.cuh"
#include "hopper.cuh"
#include "sm90.cuh"
#include "attention_sm90.cuh"

constexpr int BM = 64 * GROUPS;
constexpr unsigned Q_BYTES = BM * D * 2, TILE_BYTES = BN * D * 2;
using KeyRing = Ring<STAGES, 2 * TILE_BYTES>;  // keys, and their values
using Scores = float[BN / 2];
using Pairs = unsigned[BN / 4];
using Sums = float[D / 2];

extern __shared__ __align__(1024) unsigned char memory[];  // q, grad, keys and values, barriers
__device__ __forceinline__ unsigned char* grad_memory() { return memory + Q_BYTES; }
__device__ __forceinline__ Barrier* barriers() {
    return reinterpret_cast<Barrier*>(memory + 2 * Q_BYTES + 2 * STAGES * TILE_BYTES);
}
__device__ __forceinline__ KeyRing ring() { return {memory + 2 * Q_BYTES, barriers() + 2}; }

__device__ __forceinline__ void load(const Params& p, const Place& at) {
    load_tile<D, BM>(memory, &p.q, at.row, at.query, barriers());
    load_tile<D, BM>(grad_memory(), &p.grad, at.row, at.query, barriers() + 1);
    KeyRing keys = ring();
    for (int tile = at.tiles.last - 1; tile >= at.tiles.first; --tile, keys.next()) {
        await(keys.empty(), keys.parity ^ 1);
        expect(keys.full(), 2 * TILE_BYTES);
        load_panels<D, BN>(keys.tile(), &p.k, tile * BN, at.key, keys.full());
        load_panels<D, BN>(keys.tile() + TILE_BYTES, &p.v, tile * BN, at.key, keys.full());
    }
}

// ---------------------------------------------------------------------------------------------
// A warpgroup's 64 queries; a thread has parts of two rows, 8 apart

struct Rows {
    float logarithm[2], total[2];   // of base 2
    float slope;
    int position, column;           // of the first row; first of this thread's columns in a tile
};

__device__ __forceinline__ Rows rows_of(const Params& p, const Place& at, int row, unsigned lane) {
    Rows rows = {{}, {}, 0, row + p.offset, static_cast<int>(lane % 4 * 2)};
    if constexpr (ALIBI != NONE)
        rows.slope = p.slopes[at.query.batch * p.slopes_batch + at.query.head] * LOG2_E;
    const size_t first = static_cast<size_t>(at.query.batch * p.heads + at.query.head) * p.padded;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const bool inside = row + 8 * r < p.queries;
        const float bias = ALIBI == LEFT ? 8 * r * rows.slope : 0.0f;  // as if both rows were the first one
        rows.logarithm[r] = inside ? p.logarithms[first + row + 8 * r] * LOG2_E + bias : infinite();
        rows.total[r] = inside ? p.totals[first + row + 8 * r] : 0.0f;
    }
    return rows;
}

// Products q k^T to weights times the derivatives of scores; see `score` in attention_sm90.cu.
template <bool NEAR> __device__ __forceinline__ void weigh(const Scoring& scoring, const Rows& rows, int key,
                                                           Scores& s) {
    const float distance = static_cast<float>(key + rows.column - rows.position), base = rows.slope * distance;
    const float by = factor<SOFTCAP>(scoring);
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) {
        const int column = i / 4 * 8 + i % 2, r = i / 2 % 2;
        Tanh found = {s[i], 1};
        if constexpr (SOFTCAP) found = tanh_of<NEAR>(scoring, s[i]);
        float x = found.value;
        if constexpr (ALIBI == LEFT) x = fmaf(x, by, fmaf(rows.slope, column, base));
        if constexpr (ALIBI == BOTH) x = fmaf(-rows.slope, fabsf(distance + (column - 8 * r)), x * by);
        x = ex2(fmaf(x, ALIBI == NONE ? by : 1.0f, -rows.logarithm[r]));
        s[i] = SOFTCAP ? x * found.derivative : x;
    }
}

__device__ __forceinline__ void weigh(const Params& p, const Rows& rows, int first, int key, Scores& s) {
    const Scoring scoring = {p.scale, p.inner, p.cap, p.near};
    if (SOFTCAP && are_near(scoring, s)) weigh<true>(scoring, rows, key, s);
    else weigh<false>(scoring, rows, key, s);
    if (has_edge<BN>(p, first, key)) mask(p, rows.position, key + rows.column, 0, s);
}

__device__ __forceinline__ void compute(const Params& p, const Place& at, unsigned group) {
    const unsigned lane = threadIdx.x % 32, row = group * 64 + threadIdx.x % 128 / 32 * 16;
    const int first = at.row + group * 64 + p.offset;
    const Rows rows = rows_of(p, at, at.row + row + lane / 4, lane);
    const unsigned char *q = memory + group * 64 * 128, *grad = grad_memory() + group * 64 * 128;
    KeyRing keys = ring();
    Sums sums;
    Scores s, of_scores;
    Pairs pairs;
#pragma unroll
    for (int i = 0; i < D / 2; ++i) sums[i] = 0;
    await(barriers(), 0);
    await(barriers() + 1, 0);
    for (int tile = at.tiles.last - 1; tile >= at.tiles.first; --tile) {
        await(keys.full(), keys.parity);
        order_tiles<value_t, D, BM, BN>(q, keys.tile(), s);
        order_tiles<value_t, D, BM, BN>(grad, keys.tile() + TILE_BYTES, of_scores);
        wait_for_products<1>();
        hold(s);
        weigh(p, rows, first, tile * BN, s);
        wait_for_products<0>();
        hold(of_scores);
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) of_scores[i] = s[i] * (of_scores[i] - rows.total[i / 2 % 2]);
        pack<value_t>(of_scores, pairs);
        order_across<value_t, D, BN>(pairs, keys.tile(), sums);
        wait_for_products<0>();
        hold(sums);
        release(keys.empty(), lane);
        keys.next();
    }
    sync_group(1 + group);  // none of its products reads q any more
    const float factors[2] = {p.plain_scale, p.plain_scale};
    store_product<value_t, D, BM>(sums, factors, memory, row, &p.grad_q, at.row + row, at.query, lane);
    if (lane == 0) wait_for_stores<0>();
}

extern "C" __global__ void __launch_bounds__(BLOCK, 1) attention_queries_sm90(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    if (threadIdx.x == 0) {
        make_barrier(barriers(), 1), make_barrier(barriers() + 1, 1);
        for (int i = 0; i < 2 * STAGES; ++i) make_barrier(barriers() + 2 + i, i / STAGES ? 4 * GROUPS : 1);
        barriers_are_made();
    }
    __syncthreads();
    const Place at = place_of<BM, BN>(p);
    divide_block<GROUPS>([&] { load(p, at); }, [&](unsigned group) { compute(p, at, group); });
}
