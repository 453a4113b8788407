// out = softmax(score(q k^T)) v and the logarithms of the sums, by blocks of 64 GROUPS queries of a head.
//
// Flash attention (Dao et al. 2022, 2023) on Hopper (Shah et al. 2024): one thread fills rings of keys and
// values; each of the other warpgroups has 64 queries. While the matrix units have the next scores and the last
// weights' product with values, a warpgroup makes weights of the scores before; warpgroups take turns to order
// products, so that one's exponentials fall into the other's products.
//
// The prologue defines
//   D, BN, GROUPS, STAGES     columns of a head (64 or 128); keys of a tile; warpgroups; depth of the rings
//   SOFTCAP, ALIBI            whether scores are capped; which bias they get
//   value_t                   float16_t or bfloat16_t
//   Params                    maps of q, k, v, out (boxes of 64 columns; rows of q: 64 GROUPS, of k and v: BN, of
//                             out: 16); slopes; logarithms; heads, group: queries' heads, and of a key's head;
//                             tiles: of queries; padded: rows of logarithms; slopes_batch: their stride;
//                             left, right, offset, queries, keys: see Band; scale, inner, cap, near: see
//                             Scoring
//   Tiles, Across             as attention_sm90.cuh says, of BN and of D columns

#include "prelude.cuh"
#include "hopper.cuh"
#include "sm90.cuh"
#include "attention_sm90.cuh"

constexpr int BM = 64 * GROUPS;
constexpr unsigned Q_BYTES = BM * D * 2, TILE_BYTES = BN * D * 2;
using KeyRing = Ring<STAGES, TILE_BYTES>;
using Scores = float[BN / 2];
using Out = float[D / 2];
using Weights = unsigned[BN / 4];

extern __shared__ __align__(1024) unsigned char memory[];  // q, keys, values, barriers
__device__ __forceinline__ Barrier* barriers() {
    return reinterpret_cast<Barrier*>(memory + Q_BYTES + 2 * STAGES * TILE_BYTES);
}
__device__ __forceinline__ KeyRing ring_of_keys() { return {memory + Q_BYTES, barriers() + 1}; }
__device__ __forceinline__ KeyRing ring_of_values() {
    return {memory + Q_BYTES + STAGES * TILE_BYTES, barriers() + 1 + 2 * STAGES};
}

__device__ __forceinline__ void load(const Params& p, const Place& at) {
    load_tile<D, BM>(memory, &p.q, at.row, at.query, barriers());
    KeyRing keys = ring_of_keys(), values = ring_of_values();
    for (int tile = at.tiles.last - 1; tile >= at.tiles.first; --tile, keys.next(), values.next()) {
        await(keys.empty(), keys.parity ^ 1);
        load_tile<D, BN>(keys.tile(), &p.k, tile * BN, at.key, keys.full());
        await(values.empty(), values.parity ^ 1);
        load_tile<D, BN>(values.tile(), &p.v, tile * BN, at.key, values.full());
    }
}

// ---------------------------------------------------------------------------------------------
// A warpgroup's 64 queries; a thread has parts of two rows, 8 apart

struct Rows {
    float most[2], sum[2];   // of scores, and of exponentials: of this thread's columns
    float slope;             // log2(e) times that of ALiBi
    int position;            // of the first row
    int column;              // first of this thread's in a tile
};

// Products to scores: without a bias all but their factor, which the exponential multiplies by. With LEFT those
// of the second row are off by a constant, which a softmax does not see: `finish` puts its logarithm right.
template <bool NEAR> __device__ __forceinline__ void score(const Scoring& scoring, const Rows& rows, int key,
                                                           Scores& s) {
    const float distance = static_cast<float>(key + rows.column - rows.position), base = rows.slope * distance;
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) {
        const int column = i / 4 * 8 + i % 2, down = i / 2 % 2 * 8;
        if constexpr (SOFTCAP) s[i] = tanh_of<NEAR>(scoring, s[i]).value;
        if constexpr (ALIBI == LEFT) s[i] = fmaf(s[i], factor<SOFTCAP>(scoring), fmaf(rows.slope, column, base));
        if constexpr (ALIBI == BOTH)
            s[i] = fmaf(-rows.slope, fabsf(distance + (column - down)), s[i] * factor<SOFTCAP>(scoring));
    }
}

__device__ __forceinline__ Scoring scoring_of(const Params& p) { return {p.scale, p.inner, p.cap, p.near}; }
__device__ __forceinline__ float scale_of(const Params& p) {  // of what `score` makes
    return ALIBI == NONE ? factor<SOFTCAP>(scoring_of(p)) : 1.0f;
}

__device__ __forceinline__ float over_quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float over_quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Scores to exponentials; `factors`: what sums of the tiles before are multiplied by.
__device__ __forceinline__ void exponentials(const Params& p, Rows& rows, Scores& s, float (&factors)[2]) {
    const float scale = scale_of(p);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float most[2] = {rows.most[r], -infinite()};
#pragma unroll
        for (int i = 0; i < BN / 8; ++i)
#pragma unroll
            for (int c = 0; c < 2; ++c) most[c] = fmaxf(most[c], s[4 * i + 2 * r + c]);
        const float found = over_quad_max(fmaxf(most[0], most[1])), used = found == -infinite() ? 0.0f : found;
        factors[r] = ex2((rows.most[r] - used) * scale);
        rows.most[r] = found;
        const float offset = -used * scale;
        float sum[2] = {rows.sum[r] * factors[r], 0};
#pragma unroll
        for (int i = 0; i < BN / 8; ++i)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = s[4 * i + 2 * r + c];
                x = ex2(fmaf(x, scale, offset));
                sum[c] += x;
            }
        rows.sum[r] = sum[0] + sum[1];
    }
}

// ---------------------------------------------------------------------------------------------

__device__ __forceinline__ void weigh(const Params& p, Rows& rows, int first, int key, Scores& s, float (&factors)[2]) {
    const Scoring scoring = scoring_of(p);
    if (SOFTCAP && are_near(scoring, s)) score<true>(scoring, rows, key, s);
    else score<false>(scoring, rows, key, s);
    if (has_edge<BN>(p, first, key)) mask(p, rows.position, key + rows.column, -infinite(), s);
    exponentials(p, rows, s, factors);
}

__device__ __forceinline__ void attend(const Params& p, const Place& at, unsigned group, unsigned lane, Rows& rows,
                                       Out& out) {
    KeyRing keys = ring_of_keys(), values = ring_of_values();
    Scores s;
    Weights weights;
    float factors[2];
    const int first = at.row + group * 64 + p.offset;
    const unsigned char* q = memory + group * 64 * 128;
    await(barriers(), 0);
    await(keys.full(), 0);
    order_tiles<value_t, D, BM, BN>(q, keys.tile(), s);
    wait_for_products<0>();
    hold(s);
    release(keys.empty(), lane);
    keys.next();
    weigh(p, rows, first, (at.tiles.last - 1) * BN, s, factors);
    pack<value_t>(s, weights);
    for (int tile = at.tiles.last - 2; tile >= at.tiles.first; --tile) {
        await(keys.full(), keys.parity);
        if (group > 0 || tile < at.tiles.last - 2) await_turn(group);
        order_tiles<value_t, D, BM, BN>(q, keys.tile(), s);
        await(values.full(), values.parity);
        order_across<value_t, D, BN>(weights, values.tile(), out);
        if (group + 1 < GROUPS || tile > at.tiles.first) give_turn(group + 1 < GROUPS ? group + 1 : 0);
        wait_for_products<1>();
        hold(s);
        release(keys.empty(), lane);
        keys.next();
        weigh(p, rows, first, tile * BN, s, factors);
        // A branch: else the compiler would wait first, and take exponentials while the matrix units are idle.
        if (__any_sync(~0u, factors[0] != 1 || factors[1] != 1)) {
            wait_for_products<0>();
            hold(out);
#pragma unroll
            for (int i = 0; i < D / 2; ++i) out[i] *= factors[i / 2 % 2];
        }
        wait_for_products<0>();
        hold(out);
        release(values.empty(), lane);
        values.next();
        pack<value_t>(s, weights);
    }
    await(values.full(), values.parity);
    order_across<value_t, D, BN>(weights, values.tile(), out);
    wait_for_products<0>();
    hold(out);
}

// Through the memory of this warpgroup's queries.
__device__ __forceinline__ void finish(const Params& p, const Place& at, unsigned group, unsigned lane, Rows& rows,
                                       Out& out) {
    const unsigned warp = threadIdx.x % 128 / 32, row = group * 64 + warp * 16;
    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum = over_quad_sum(rows.sum[r]);
        factors[r] = sum == 0 ? 0.0f : 1 / sum;
        const int of_tile = row + lane / 4 + 8 * r, query = at.row + of_tile;
        if (lane % 4 == 0 && query < p.padded) {
            const float bias = ALIBI == LEFT ? -8 * r * rows.slope : 0.0f;
            const float most = rows.most[r] * scale_of(p) + bias;
            const bool some = sum != 0 && query < p.queries;
            p.logarithms[static_cast<size_t>(at.query.batch * p.heads + at.query.head) * p.padded + query] =
                some ? (most + lg2(sum)) * LN_2 : infinite();
        }
    }
    sync_group(1 + GROUPS + group);  // none of its products reads q any more
    store_product<value_t, D, BM>(out, factors, memory, row, &p.out, at.row + row, at.query, lane);
    if (lane == 0) wait_for_stores<0>();
}

__device__ __forceinline__ void compute(const Params& p, const Place& at, unsigned group) {
    const unsigned lane = threadIdx.x % 32;
    const int row = at.row + group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    Rows rows = {{-infinite(), -infinite()}, {0, 0}, 0, row + p.offset, static_cast<int>(lane % 4 * 2)};
    if constexpr (ALIBI != NONE)
        rows.slope = p.slopes[at.query.batch * p.slopes_batch + at.query.head] * LOG2_E;
    Out out;
#pragma unroll
    for (int i = 0; i < D / 2; ++i) out[i] = 0;
    if (at.tiles.first < at.tiles.last) attend(p, at, group, lane, rows, out);
    else await(barriers(), 0);  // its memory is written to
    finish(p, at, group, lane, rows, out);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 1) attention_sm90(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    if (threadIdx.x == 0) {
        make_barrier(barriers(), 1);
        for (int i = 0; i < 4 * STAGES; ++i)  // of keys: full, empty; of values
            make_barrier(barriers() + 1 + i, i / STAGES % 2 ? 4 * GROUPS : 1);
        barriers_are_made();
    }
    __syncthreads();
    const Place at = place_of<BM, BN>(p);
    divide_block<GROUPS>(
        [&] {
            prefetch_map(&p.q), prefetch_map(&p.k), prefetch_map(&p.v), prefetch_map(&p.out);
            load(p, at);
        },
        [&](unsigned group) { compute(p, at, group); });
}
