// What a linear layer made for attention, (position, head, column) of all heads of q, then of k, then of v, to three
// tensors of heads, and their gradients back. On the way there a bias is added and q and k are rotated; on the way
// back they are rotated by the negative angle, and the gradient of the bias is summed.
//
// A thread has a unit of columns (rotary.cuh) of HEADS heads, `groups` apart, and walks over positions: its bias, its
// frequencies and its sums stay with it, angles are those of all of its heads. Blocks of the same columns begin
// `chunk_step` positions apart. Those that come and go have `rows` positions each, DEPTH at a time; those that stay take
// turns, `step` apart, so that what all read at a time lies together.
// Sums of a block's positions are joined in shared memory and leave as one row of partial sums, to be added up by
// another kernel: no atomics, two runs give the same bits.
//
// The prologue defines scalar_t, table_t, position_t, VEC, INTERLEAVED, TABLES, TABLE_PACKS, POSITIONS as for
// rotary.cu, and
//   FORWARD       from p.packed to p.q, p.k, p.v; otherwise back
//   BIAS          there is one: to add, or whose gradient to sum
//   ROTATES       whether q and k are rotated
//   HEADS, LANES  heads of a thread; threads side by side, DEPTH times as many in a block

#include "prelude.cuh"
#include "indices.cuh"
#include "rotary.cuh"

constexpr int PACKS = INTERLEAVED && VEC > 1 ? 1 : 2;
constexpr int PAIRS = VEC * PACKS / 2;
constexpr int DEPTH = BLOCK / LANES;
using Unit = Pack<scalar_t, VEC>[PACKS];
using Values = acc_t[HEADS][PACKS][VEC];

// Where a head's first columns at a position are, in the tensor that it belongs to. Steps are read from the
// parameters each time: kept for each head they would take more registers than there are.
__device__ __forceinline__ scalar_t* in_heads(const Params& p, unsigned head, unsigned batch, unsigned s) {
    if (head < p.q_heads) return p.q + batch * p.q_batch + s * p.q_row + head * p.q_head;
    head -= p.q_heads;
    if (head < p.kv_heads) return p.k + batch * p.k_batch + s * p.k_row + head * p.k_head;
    head -= p.kv_heads;
    return p.v + batch * p.v_batch + s * p.v_row + head * p.v_head;
}

__device__ __forceinline__ void load_unit(Unit& to, const scalar_t* from, const Columns& c) {
    to[0] = load_pack<VEC>(from);
    if (PACKS > 1 && c.whole) to[PACKS - 1] = load_pack<VEC>(from + c.apart);
}

__device__ __forceinline__ void store_unit(scalar_t* to, const acc_t (&x)[PACKS][VEC], const Columns& c) {
    store_pack<scalar_t, VEC>(to, x[0]);
    if (PACKS > 1 && c.whole) store_pack<scalar_t, VEC>(to + c.apart, x[PACKS - 1]);
}

__device__ __forceinline__ void find_angles(const Params& p, const unsigned long long (&frequencies)[PAIRS],
                                            unsigned batch, unsigned s, int pair, Angles<PAIRS>& angles) {
    int64_t position = p.offset + s;
    if constexpr (POSITIONS) position = p.positions[batch * p.positions_batch + s * p.positions_row];
    if constexpr (TABLES) {
        look_up_row<POSITIONS, TABLE_PACKS>(p, batch, position, pair, angles);
    } else {
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) turn(frequencies[j], position, angles.sin[j], angles.cos[j]);
    }
    if constexpr (!FORWARD)
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) angles.sin[j] = -angles.sin[j];
}

// Of the threads that have the same columns, as a tree.
__device__ __forceinline__ void store_sums(const Params& p, Values& sums, unsigned group, const Columns& c,
                                           unsigned chunk) {
    __shared__ acc_t shared[DEPTH / 2][HEADS][PACKS][VEC][LANES];
    const int lane = threadIdx.x % LANES, depth = threadIdx.x / LANES;
    for (int half = DEPTH / 2; half > 0; half /= 2) {
        __syncthreads();
#pragma unroll
        for (int h = 0; h < HEADS; ++h)
#pragma unroll
            for (int k = 0; k < PACKS; ++k)
#pragma unroll
                for (int v = 0; v < VEC; ++v)
                    if (depth >= half && depth < 2 * half) shared[depth - half][h][k][v][lane] = sums[h][k][v];
        __syncthreads();
#pragma unroll
        for (int h = 0; h < HEADS; ++h)
#pragma unroll
            for (int k = 0; k < PACKS; ++k)
#pragma unroll
                for (int v = 0; v < VEC; ++v)
                    if (depth < half) sums[h][k][v] += shared[depth][h][k][v][lane];
    }
    acc_t* to = p.partials + static_cast<int64_t>(chunk) * p.width + c.first;
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        const unsigned head = group + h * p.groups;
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int v = 0; v < VEC; ++v)
                if (depth == 0 && group < p.groups && head < p.heads && (k == 0 || c.whole))
                    to[head * p.head_dim + k * c.apart + v] = sums[h][k][v];
    }
}

// Two blocks on a multiprocessor at least: unasked, the compiler spills a few registers for the sake of four.
extern "C" __global__ void __launch_bounds__(BLOCK, 2) qkv_heads(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    const unsigned chunk = blockIdx.x / p.column_blocks;
    const unsigned lane = blockIdx.x % p.column_blocks * LANES + threadIdx.x % LANES;
    const unsigned group = p.of_units.divide(lane);
    const Columns c = columns_of<PACKS, VEC, INTERLEAVED>(p, lane - group * p.of_units.value);

    Unit bias[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        const unsigned head = group + h * p.groups;
        if (BIAS && FORWARD && group < p.groups && head < p.heads)
            load_unit(bias[h], p.bias + head * p.head_dim + c.first, c);
    }
    unsigned long long frequencies[PAIRS];
    if constexpr (ROTATES && !TABLES)
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) frequencies[j] = frequency(p.octaves, p.turns, c.pair + j);
    Values sums = {};

    const unsigned rotated_heads = ROTATES && c.rotated ? p.q_heads + p.kv_heads : 0;
    const unsigned begin = chunk * p.chunk_step, end = group < p.groups ? min(p.count, begin + p.rows) : 0;
    for (unsigned n = begin + threadIdx.x / LANES; n < end; n += p.step) {
        const unsigned batch = p.of_length.divide(n), s = n - batch * p.of_length.value;
        scalar_t* packed = p.packed + batch * p.packed_batch + s * p.packed_row + c.first;
        Unit in[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            const unsigned head = group + h * p.groups;
            if (head >= p.heads) break;
            load_unit(in[h], FORWARD ? packed + head * p.head_dim : in_heads(p, head, batch, s) + c.first, c);
        }
        Angles<PAIRS> angles;
        if (ROTATES && group < rotated_heads) find_angles(p, frequencies, batch, s, c.pair, angles);
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            const unsigned head = group + h * p.groups;
            if (head >= p.heads) break;
            acc_t x[PACKS][VEC];
#pragma unroll
            for (int k = 0; k < PACKS; ++k)
#pragma unroll
                for (int v = 0; v < VEC; ++v) {
                    x[k][v] = at(in[h][k], v);
                    if (BIAS && FORWARD) x[k][v] += at(bias[h][k], v);
                }
            if (ROTATES && head < rotated_heads) rotate(x, angles);
            store_unit(FORWARD ? in_heads(p, head, batch, s) + c.first : packed + head * p.head_dim, x, c);
            if constexpr (BIAS && !FORWARD)
#pragma unroll
                for (int k = 0; k < PACKS; ++k)
#pragma unroll
                    for (int v = 0; v < VEC; ++v) sums[h][k][v] += x[k][v];
        }
    }
    if constexpr (BIAS && !FORWARD) store_sums(p, sums, group, c, chunk);
}
