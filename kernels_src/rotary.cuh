// Rotary embedding of what a thread has of one head: angles from tables or computed, and the rotation.
//
//     (a, b) -> (a cos - b sin, b cos + a sin)      half-split: columns i and i + half; interleaved: 2i and 2i + 1
//
// A thread has PACKS packs of VEC columns: of half-split pairs two, each with one column of a pair; of interleaved
// ones one pack of whole pairs, or two of one column.

namespace fusionrt {

template <int PAIRS> struct Angles { acc_t cos[PAIRS], sin[PAIRS]; };

__device__ __forceinline__ void sincos_of_half_turns(float x, float& sin, float& cos) { ::sincospif(x, &sin, &cos); }
__device__ __forceinline__ void sincos_of_half_turns(double x, double& sin, double& cos) { ::sincospi(x, &sin, &cos); }

// Of a pair: turns 2^(-octaves pair) a position, of which the fraction is the low 64 bits of a product of integers,
// which wrap around as angles do: far positions lose no more than the 53 bits of the frequency do.
__device__ __forceinline__ unsigned long long frequency(double octaves, double turns, int pair) {
    const double each = ::exp2(-octaves * pair) * turns;
    return __double2ull_rn((each - ::floor(each)) * 18446744073709551616.0);
}

__device__ __forceinline__ void turn(unsigned long long frequency, int64_t position, acc_t& sin, acc_t& cos) {
    const int64_t fraction = static_cast<int64_t>(frequency * static_cast<unsigned long long>(position));
    sincos_of_half_turns(static_cast<acc_t>(fraction) * acc_t(0x1p-63), sin, cos);
}

// From the first pair's places in the tables; TABLE_PACKS: pairs are neighbours, aligned for packs.
template <bool TABLE_PACKS, int PAIRS, typename T>
__device__ __forceinline__ void look_up(const T* cos, const T* sin, int64_t step, Angles<PAIRS>& angles) {
    if constexpr (TABLE_PACKS) {
        const auto of_cos = load_pack<PAIRS>(cos), of_sin = load_pack<PAIRS>(sin);
#pragma unroll
        for (int j = 0; j < PAIRS; ++j)
            angles.cos[j] = to_acc(of_cos.data[j]), angles.sin[j] = to_acc(of_sin.data[j]);
    } else {
#pragma unroll
        for (int j = 0; j < PAIRS; ++j)
            angles.cos[j] = to_acc(cos[j * step]), angles.sin[j] = to_acc(sin[j * step]);
    }
}

// A row of the tables that is none is reported, `p.offset` less than it is, and NaN.
template <bool CHECKED, bool TABLE_PACKS, int PAIRS, typename P>
__device__ __forceinline__ void look_up_row(const P& p, unsigned batch, int64_t row, int pair,
                                            Angles<PAIRS>& angles) {
    if (CHECKED && (row < 0 || row >= p.table_rows)) {
        report_index(p.fault, 1, row - p.offset);
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) angles.cos[j] = angles.sin[j] = nan;
    } else {
        const int64_t at = batch * p.table_batch + row * p.table_row + pair * p.table_column;
        look_up<TABLE_PACKS>(p.cos + at, p.sin + at, p.table_column, angles);
    }
}

template <int PACKS, int VEC, int PAIRS>
__device__ __forceinline__ void rotate(acc_t (&x)[PACKS][VEC], const Angles<PAIRS>& angles) {
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
        const int second = PACKS == 2 ? j : 2 * j + 1, first = PACKS == 2 ? j : 2 * j;
        const acc_t a = x[0][first], b = x[PACKS - 1][second];
        // Rounded products, so that which one becomes part of the addition is the same in every specialisation.
        x[0][first] = mul_rn(a, angles.cos[j]) - mul_rn(b, angles.sin[j]);
        x[PACKS - 1][second] = mul_rn(b, angles.cos[j]) + mul_rn(a, angles.sin[j]);
    }
}

// The columns of a unit: PACKS packs `apart` elements from each other, the last one perhaps beyond the head. Units
// before `rotated_units` are pairs; the others have what is left behind 2 `half` columns, in halves as well, so that
// neighbours' packs are neighbours.
struct Columns {
    int first, apart, pair;
    bool rotated, whole;
};

template <int PACKS, int VEC, bool INTERLEAVED, typename P>
__device__ __forceinline__ Columns columns_of(const P& p, int unit) {
    Columns c;
    c.pair = unit * (VEC * PACKS / 2), c.rotated = unit < p.rotated_units, c.whole = true;
    if (c.rotated) {
        c.first = INTERLEAVED ? 2 * c.pair : c.pair;
        c.apart = INTERLEAVED ? 1 : p.half;
    } else {
        const int units = (p.head_dim - 2 * p.half + VEC * PACKS - 1) / (VEC * PACKS);
        c.first = 2 * p.half + (unit - p.rotated_units) * VEC;
        c.apart = units * VEC, c.whole = c.first + c.apart * (PACKS - 1) < p.head_dim;
    }
    return c;
}

}  // namespace fusionrt
