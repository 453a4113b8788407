// Rotary position embedding: pairs of columns of every head of q and k, turned by an angle that belongs to the
// position and the pair.
//
//     (a, b) -> (a cos - b sin, b cos + a sin)      half-split: columns i and i + half; INTERLEAVED: 2i and 2i + 1
//
// A thread has a unit of columns at one position, for every `groups`-th head: cosines and sines are loaded or
// computed once for all of them, and at any time neighbouring threads work on neighbouring heads or positions.
// Columns beyond the rotated ones are copied; where the result takes the place of its operand, they are no unit.
//
// The prologue defines scalar_t, table_t, position_t and
//   VEC           elements of a pack; 1: any strides
//   INTERLEAVED   which columns are a pair
//   TABLES        cosines and sines are given; otherwise they are computed
//   TABLE_PACKS   those of a unit are read by packs
//   POSITIONS     the positions are given; otherwise they count from p.offset
//   Index, Division   of the number of threads

#include "prelude.cuh"
#include "indices.cuh"
#include "rotary.cuh"

constexpr int PACKS = INTERLEAVED && VEC > 1 ? 1 : 2;   // of a unit
constexpr int PAIRS = VEC * PACKS / 2;
constexpr int AHEAD = 4 / PACKS;                        // heads whose loads are under way at a time
using Unit = Pack<scalar_t, VEC>[PACKS];

// One of q and k: where a thread's columns are in its first head.
struct Place {
    const scalar_t* from;
    scalar_t* to;
};

__device__ __forceinline__ void find_angles(const Params& p, unsigned batch, unsigned s, int pair,
                                            Angles<PAIRS>& angles) {
    int64_t position = p.offset + s;
    if constexpr (POSITIONS) position = p.offset + p.positions[batch * p.positions_batch + s * p.positions_row];
    if constexpr (TABLES) {
        look_up_row<POSITIONS, TABLE_PACKS>(p, batch, position, pair, angles);
    } else {
#pragma unroll
        for (int j = 0; j < PAIRS; ++j)
            turn(frequency(p.octaves, p.turns, pair + j), position, angles.sin[j], angles.cos[j]);
    }
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) angles.sin[j] *= p.direction;
}

__device__ __forceinline__ void heads(const Params& p, const Place& q, const Place& k, const Columns& c,
                                      unsigned group, const Angles<PAIRS>& angles) {
    for (unsigned h = group; h < p.heads; h += AHEAD * p.groups) {
        Unit in[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const unsigned head = h + a * p.groups;
            if (head >= p.heads) break;
            const bool is_q = head < p.q_heads;
            const scalar_t* from = is_q ? q.from + head * p.q_head : k.from + (head - p.q_heads) * p.k_head;
            const int64_t apart = VEC > 1 ? c.apart : c.apart * (is_q ? p.q_column : p.k_column);
            in[a][0] = load_pack<VEC>(from);
            if (PACKS > 1 && c.whole) in[a][PACKS - 1] = load_pack<VEC>(from + apart);
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const unsigned head = h + a * p.groups;
            if (head >= p.heads) break;
            const bool is_q = head < p.q_heads;
            scalar_t* to = is_q ? q.to + head * p.q_out_head : k.to + (head - p.q_heads) * p.k_out_head;
            const int64_t apart = VEC > 1 ? c.apart : c.apart * (is_q ? p.q_out_column : p.k_out_column);
            if (c.rotated) {
                acc_t out[PACKS][VEC];
#pragma unroll
                for (int k = 0; k < PACKS; ++k)
#pragma unroll
                    for (int v = 0; v < VEC; ++v) out[k][v] = at(in[a][k], v);
                rotate(out, angles);
                store_pack<scalar_t, VEC>(to, out[0]);
                if constexpr (PACKS > 1) store_pack<scalar_t, VEC>(to + apart, out[1]);
            } else {
                store_bytes<sizeof(in[a][0])>(to, &in[a][0]);
                if (PACKS > 1 && c.whole) store_bytes<sizeof(in[a][0])>(to + apart, &in[a][PACKS - 1]);
            }
        }
    }
}

// Without a limit ptxas spills doubles to have a few registers less.
extern "C" __global__ void __launch_bounds__(BLOCK, sizeof(scalar_t) == 8 ? 3 : 0) rotary(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    Index rest = static_cast<Index>(blockIdx.x) * BLOCK + threadIdx.x;
    if (rest >= p.threads) return;
    // Of groups of heads and positions, the one that is nearer in memory varies faster.
    const Index slot = p.of_units.divide(rest), slow = p.of_fast.divide(slot);
    const int unit = static_cast<int>(rest - slot * p.of_units.value);
    const Index fast = slot - slow * p.of_fast.value, position = p.positions_first ? fast : slow;
    const unsigned group = static_cast<unsigned>(p.positions_first ? slow : fast);
    const unsigned batch = static_cast<unsigned>(p.of_length.divide(position));
    const unsigned s = static_cast<unsigned>(position - batch * p.of_length.value);

    const Columns c = columns_of<PACKS, VEC, INTERLEAVED>(p, unit);
    Angles<PAIRS> angles;
    if (c.rotated) find_angles(p, batch, s, c.pair, angles);
    const Place q = {p.q + batch * p.q_batch + s * p.q_row + c.first * (VEC > 1 ? 1 : p.q_column),
                     p.q_out + batch * p.q_out_batch + s * p.q_out_row + c.first * (VEC > 1 ? 1 : p.q_out_column)};
    const Place k = {p.k + batch * p.k_batch + s * p.k_row + c.first * (VEC > 1 ? 1 : p.k_column),
                     p.k_out + batch * p.k_out_batch + s * p.k_out_row + c.first * (VEC > 1 ? 1 : p.k_out_column)};
    heads(p, q, k, c, group, angles);
}
