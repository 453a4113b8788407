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

constexpr int PACKS = INTERLEAVED && VEC > 1 ? 1 : 2;   // of a unit
constexpr int PAIRS = VEC * PACKS / 2;
constexpr int AHEAD = 4 / PACKS;                        // heads whose loads are under way at a time
using Unit = Pack<scalar_t, VEC>[PACKS];

// One of q and k: where a thread's columns are in its first head.
struct Place {
    const scalar_t* from;
    scalar_t* to;
};

struct Angles { acc_t cos[PAIRS], sin[PAIRS]; };

__device__ __forceinline__ void sincos_of_half_turns(float x, float& sin, float& cos) { ::sincospif(x, &sin, &cos); }
__device__ __forceinline__ void sincos_of_half_turns(double x, double& sin, double& cos) { ::sincospi(x, &sin, &cos); }

// The fraction of a turn is the low 64 bits of a product of integers, which wrap around as angles do: far
// positions lose no more than the 53 bits of their frequency do.
__device__ __forceinline__ void compute(const Params& p, int64_t position, int pair, Angles& angles) {
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
        const double turns = ::exp2(-p.octaves * (pair + j)) * p.turns;
        const unsigned long long turn = __double2ull_rn((turns - ::floor(turns)) * 18446744073709551616.0);
        const int64_t fraction = static_cast<int64_t>(turn * static_cast<unsigned long long>(position));
        sincos_of_half_turns(static_cast<acc_t>(fraction) * acc_t(0x1p-63), angles.sin[j], angles.cos[j]);
    }
}

__device__ __forceinline__ void look_up(const Params& p, unsigned batch, int64_t row, int pair, Angles& angles) {
    const int64_t at = batch * p.table_batch + row * p.table_row + pair * p.table_column;
    if constexpr (TABLE_PACKS) {
        const auto cos = load_pack<PAIRS>(p.cos + at), sin = load_pack<PAIRS>(p.sin + at);
#pragma unroll
        for (int j = 0; j < PAIRS; ++j)
            angles.cos[j] = to_acc(cos.data[j]), angles.sin[j] = to_acc(sin.data[j]);
    } else {
#pragma unroll
        for (int j = 0; j < PAIRS; ++j)
            angles.cos[j] = to_acc(p.cos[at + j * p.table_column]),
            angles.sin[j] = to_acc(p.sin[at + j * p.table_column]);
    }
}

__device__ __forceinline__ Angles angles_at(const Params& p, unsigned batch, unsigned s, int pair) {
    Angles angles;
    int64_t position = p.offset + s;
    if constexpr (POSITIONS) position = p.offset + p.positions[batch * p.positions_batch + s * p.positions_row];
    if constexpr (!TABLES) {
        compute(p, position, pair, angles);
    } else if (POSITIONS && (position < 0 || position >= p.table_rows)) {
        report_index(p.fault, 1, position - p.offset);
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) angles.cos[j] = angles.sin[j] = nan;
    } else {
        look_up(p, batch, position, pair, angles);
    }
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) angles.sin[j] *= p.direction;
    return angles;
}

__device__ __forceinline__ void rotate(const Unit& in, const Angles& angles, acc_t (&out)[PACKS][VEC]) {
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
        const int second = PACKS == 2 ? j : 2 * j + 1, first = PACKS == 2 ? j : 2 * j;
        const acc_t a = at(in[0], first), b = at(in[PACKS - 1], second);
        // Rounded products, so that which one becomes part of the addition is the same in every specialisation.
        out[0][first] = mul_rn(a, angles.cos[j]) - mul_rn(b, angles.sin[j]);
        out[PACKS - 1][second] = mul_rn(b, angles.cos[j]) + mul_rn(a, angles.sin[j]);
    }
}

// The columns of a unit: PACKS packs `apart` elements from each other, the last one perhaps beyond the head.
struct Columns {
    int first, apart, pair;
    bool rotated, whole;
};

__device__ __forceinline__ Columns columns_of(const Params& p, int unit) {
    Columns c;
    c.pair = unit * PAIRS, c.rotated = unit < p.rotated_units, c.whole = true;
    if (c.rotated) {
        c.first = INTERLEAVED ? 2 * c.pair : c.pair;
        c.apart = INTERLEAVED ? 1 : p.half;
    } else {
        c.first = 2 * p.half + (unit - p.rotated_units) * VEC * PACKS;
        c.apart = VEC, c.whole = c.first + VEC * (PACKS - 1) < p.head_dim;
    }
    return c;
}

__device__ __forceinline__ void heads(const Params& p, const Place& q, const Place& k, const Columns& c,
                                      unsigned group, const Angles& angles) {
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
                rotate(in[a], angles, out);
                store_pack<scalar_t, VEC>(to, out[0]);
                if constexpr (PACKS > 1) store_pack<scalar_t, VEC>(to + apart, out[1]);
            } else {
                store_bytes<sizeof(in[a][0])>(to, &in[a][0]);
                if (PACKS > 1 && c.whole) store_bytes<sizeof(in[a][0])>(to + apart, &in[a][PACKS - 1]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) rotary(const __grid_constant__ Params p) {
    Index rest = static_cast<Index>(blockIdx.x) * BLOCK + threadIdx.x;
    if (rest >= p.threads) return;
    // Of groups of heads and positions, the one that is nearer in memory varies faster.
    const Index slot = p.of_units.divide(rest), slow = p.of_fast.divide(slot);
    const int unit = static_cast<int>(rest - slot * p.of_units.value);
    const Index fast = slot - slow * p.of_fast.value, position = p.positions_first ? fast : slow;
    const unsigned group = static_cast<unsigned>(p.positions_first ? slow : fast);
    const unsigned batch = static_cast<unsigned>(p.of_length.divide(position));
    const unsigned s = static_cast<unsigned>(position - batch * p.of_length.value);

    const Columns c = columns_of(p, unit);
    Angles angles;
    if (c.rotated) angles = angles_at(p, batch, s, c.pair);
    const Place q = {p.q + batch * p.q_batch + s * p.q_row + c.first * (VEC > 1 ? 1 : p.q_column),
                     p.q_out + batch * p.q_out_batch + s * p.q_out_row + c.first * (VEC > 1 ? 1 : p.q_out_column)};
    const Place k = {p.k + batch * p.k_batch + s * p.k_row + c.first * (VEC > 1 ? 1 : p.k_column),
                     p.k_out + batch * p.k_out_batch + s * p.k_out_row + c.first * (VEC > 1 ? 1 : p.k_out_column)};
    heads(p, q, k, c, group, angles);
}
