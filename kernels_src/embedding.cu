// Rows of tables, added up, normalised and dropped from: what stands before the first layer of a transformer.
//
//     out[n] = dropout(norm(tokens_table[tokens[n]] scale + positions_table[...] + types_table[...]))
//
// THREADS threads, a team, share a row; each of its warps has PACKS neighbouring packs a lane, LANES packs apart. The
// team goes over p.each rows, p.apart from each other, and each lane knows the ids of one of them. The next row's
// loads are under way while it works on this one; without a norm those of all rows are. blockIdx.y then says which
// part of the columns it is: parts come one after the other, so that of rows that are needed again more stay in the L2.
//
// The prologue defines scalar_t, token_t, position_t, type_t and
//   VEC, PACKS, THREADS   elements of a pack, packs a thread has, threads of a row; BLOCK / THREADS rows a block
//   FULL                  rows have no columns but those of their threads
//   EACH                  rows of a team without a norm
//   POSITIONS, TYPES      NONE; COUNTED: row n modulo a period (of types the first row); GIVEN
//   ONE_POSITION          all rows of a team have the same position
//   KINDS                 of a norm, where they have: in how many ways that is added to a type; 0 otherwise
//   SCALED                rows of tokens are multiplied
//   NORM, NORM_WEIGHT, NORM_BIAS, DROPOUT
//   MIN_BLOCKS            of a multiprocessor; COMMON_BLOCKS where COMMON is not 0
//   ROUNDED               moments are of what scalar_t has of the sums: as the gradient, elsewhere, reads them
//   GRADIENT              of a norm, instead

#include "prelude.cuh"
#include "indices.cuh"

// Where a multiprocessor has shared memory for them without fewer blocks: 164 KB and more.
constexpr int COMMON = __CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200) ? KINDS : 0;
constexpr int NONE = 0, COUNTED = 1, GIVEN = 2;
constexpr int ROWS = BLOCK / THREADS, LANES = THREADS < 32 ? THREADS : 32, WARPS = THREADS / LANES;
constexpr bool HAS_POSITIONS = POSITIONS != NONE, HAS_TYPES = TYPES != NONE;
constexpr bool ONE_TYPE = TYPES == COUNTED;
using Row = Pack<scalar_t, VEC>[PACKS];
using Values = acc_t[PACKS][VEC];

__device__ __forceinline__ unsigned lane_of_team() { return threadIdx.x % LANES; }
__device__ __forceinline__ unsigned first_column() {
    const unsigned warp = blockIdx.y * WARPS + threadIdx.x % THREADS / LANES;
    return (warp * PACKS * LANES + lane_of_team()) * VEC;
}
__device__ __forceinline__ unsigned column_of(int pack) { return first_column() + pack * LANES * VEC; }
__device__ __forceinline__ bool inside(const Params& p, int pack) {
    return FULL || column_of(pack) < p.columns;
}

// Where the rows of tables begin that make one row; of a type in COMMON its number. `token` is negative where any id
// is out of range, `position` where its own is.
struct Places { int64_t token, position, type; };

__device__ __forceinline__ bool in_range(const Params& p, unsigned argument, int64_t index, int64_t rows, bool tells) {
    const bool fits = index >= 0 && index < rows;
    if (!fits && tells && p.fault != nullptr) report_index(p.fault, argument, index);
    return fits;
}

// Of row n. `tells`: one thread of a row reports what is wrong with it.
__device__ __forceinline__ Places places_of(const Params& p, unsigned n, bool tells) {
    int64_t position = 0, type = 0;
    const int64_t token = p.tokens[n];
    if constexpr (POSITIONS == COUNTED) position = n % p.position_period;
    if constexpr (POSITIONS == GIVEN) position = p.positions[n % p.position_period];
    if constexpr (TYPES == GIVEN) type = p.types[n % p.type_period];
    bool valid = in_range(p, 1, token, p.token_rows, tells), valid_position = true;
    if constexpr (POSITIONS == GIVEN) valid_position = in_range(p, 2, position, p.position_rows, tells);
    if constexpr (TYPES == GIVEN) valid &= in_range(p, 3, type, p.type_rows, tells);
    return {valid && valid_position ? token * p.token_stride : -1, valid_position ? position * p.position_stride : -1,
            COMMON > 0 ? (valid ? type : 0) : type * p.type_stride};
}

// Of the team whose first row is `first`, the k-th.
__device__ __forceinline__ bool has_row(const Params& p, unsigned first, unsigned k) {
    return first < p.apart && first + k * p.apart < p.rows;
}

// `tells` where the thread reports of it.
__device__ __forceinline__ Places places_of_row(const Params& p, unsigned first, unsigned k, bool tells) {
    if (k >= p.each || !has_row(p, first, k)) return {-1, -1, 0};
    return places_of(p, first + k * p.apart, tells && blockIdx.y == 0);
}

__device__ __forceinline__ Places places_at(const Places& of_lane, int k) {
    Places found = {__shfl_sync(0xffffffffu, of_lane.token, k, LANES), 0, 0};
    if constexpr (HAS_POSITIONS) found.position = __shfl_sync(0xffffffffu, of_lane.position, k, LANES);
    if constexpr (TYPES == GIVEN) found.type = __shfl_sync(0xffffffffu, of_lane.type, k, LANES);
    return found;
}

__device__ __forceinline__ void load_row(const Params& p, const scalar_t* from, Row& row) {
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
        if (inside(p, k)) row[k] = load_pack<VEC>(from + column_of(k));
}

// What the tables have for a row; NaN where an id is out of range. TOGETHER: loads of several rows are under way.
constexpr bool TOGETHER = GRADIENT || THREADS <= 256;  // with more there are too few registers
struct Terms { Row token, position, type; };

// A thread's own columns of a row in shared memory, UNIT at a time beside those of its neighbours.
constexpr int UNIT = VEC < 16 / static_cast<int>(sizeof(acc_t)) ? VEC : 16 / static_cast<int>(sizeof(acc_t));
template <bool USED> using Shared = acc_t[USED ? PACKS * VEC / UNIT : 1][USED ? THREADS : 1][UNIT];

template <typename Shared> __device__ __forceinline__ void put(Shared& shared, int k, const acc_t (&values)[VEC]) {
#pragma unroll
    for (int v = 0; v < VEC; ++v) shared[(k * VEC + v) / UNIT][threadIdx.x % THREADS][v % UNIT] = values[v];
}
template <typename Shared> __device__ __forceinline__ void take(const Shared& shared, int k, acc_t (&values)[VEC]) {
#pragma unroll
    for (int v = 0; v < VEC; v += UNIT) {
        const auto unit = shared_pack<UNIT>(shared[(k * VEC + v) / UNIT][threadIdx.x % THREADS]);
#pragma unroll
        for (int u = 0; u < UNIT; ++u) values[v + u] = unit.data[u];
    }
}

// What all rows of the team have in common: added up, by types, or for the first of them to keep.
using Common = Shared<(COMMON > 0)>[COMMON > 0 ? COMMON : 1];

__device__ __forceinline__ void add_common(const Params& p, const Places& places, Common& common) {
    if (places.position < 0) return;
    Row position, type;
    if constexpr (HAS_POSITIONS) load_row(p, p.position_table + places.position, position);
#pragma unroll
    for (int t = 0; t < COMMON; ++t) {
        if constexpr (HAS_TYPES) load_row(p, p.type_table + t * p.type_stride, type);
#pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            acc_t values[VEC];
#pragma unroll
            for (int v = 0; v < VEC; ++v)
                values[v] = (HAS_POSITIONS ? at(position[k], v) : acc_t(0)) + (HAS_TYPES ? at(type[k], v) : acc_t(0));
            put(common[t], k, values);
        }
    }
}

__device__ __forceinline__ void load_common(const Params& p, const Places& places, Terms& terms, Common& common) {
    if constexpr (COMMON > 0) return add_common(p, places, common);
    if constexpr (TOGETHER && HAS_POSITIONS && ONE_POSITION)
        if (places.position >= 0) load_row(p, p.position_table + places.position, terms.position);
    if constexpr (TOGETHER && ONE_TYPE) load_row(p, p.type_table, terms.type);
}

__device__ __forceinline__ void round_row(Values& values) {
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        Pack<scalar_t, VEC> pack;
#pragma unroll
        for (int v = 0; v < VEC; ++v) pack.data[v] = from_acc<scalar_t>(values[k][v]);
#pragma unroll
        for (int v = 0; v < VEC; ++v) values[k][v] = at(pack, v);
    }
}

// The token's row, and those that are not added up yet; if not TOGETHER, add_up asks for these where it adds them.
__device__ __forceinline__ void load_terms(const Params& p, const Places& places, Terms& terms) {
    if (places.token < 0) {
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int v = 0; v < VEC; ++v) terms.token[k].data[v] = from_acc<scalar_t>(nan);
        return;
    }
    load_row(p, p.token_table + places.token, terms.token);
    if (!TOGETHER || COMMON > 0) return;
    if constexpr (HAS_POSITIONS && !ONE_POSITION) load_row(p, p.position_table + places.position, terms.position);
    if constexpr (HAS_TYPES && !ONE_TYPE) load_row(p, p.type_table + places.type, terms.type);
}

__device__ __forceinline__ void add(const Row& row, Values& values) {
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v) values[k][v] += at(row[k], v);
}

__device__ __forceinline__ void add(const Params& p, const scalar_t* from, Values& values) {
    Row row;
    load_row(p, from, row);
    add(row, values);
}

// What the others make, then the token's row: in the forward and in the backward pass, and with no other rounding than
// is written here, as moments must fit.
__device__ __forceinline__ void add_up(const Params& p, const Places& places, Terms& terms, const Common& common,
                                       Values& values) {
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
        if constexpr (COMMON > 0) take(common[places.type], k, values[k]);
        else
#pragma unroll
            for (int v = 0; v < VEC; ++v) values[k][v] = 0;
    if constexpr (!TOGETHER) {
        if (HAS_POSITIONS && places.token >= 0) add(p, p.position_table + places.position, values);
        if (HAS_TYPES && places.token >= 0) add(p, p.type_table + places.type, values);
        load_terms(p, places, terms);
    } else if constexpr (COMMON == 0) {
        if constexpr (HAS_POSITIONS) add(terms.position, values);
        if constexpr (HAS_TYPES) add(terms.type, values);
    }
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            const acc_t token = at(terms.token[k], v);
            values[k][v] += SCALED ? mul_rn(token, static_cast<acc_t>(p.scale)) : token;
        }
    if constexpr (ROUNDED) round_row(values);
}

// Of what the threads of a row have; in the same order every time.
__device__ __forceinline__ acc_t row_sum(acc_t x, acc_t (&shared)[ROWS][WARPS]) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    if constexpr (WARPS > 1) {
        const int team = threadIdx.x / THREADS;
        if (lane_of_team() == 0) shared[team][threadIdx.x % THREADS / LANES] = x;
        __syncthreads();
        x = shared[team][0];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) x += shared[team][w];
    }
    return x;
}

// The random bits of a thread's part of a row, whose first element is number `first`. A counter serves elements
// that are HALF_BLOCK apart: packs of one thread, where a warp's packs are a part of that.
constexpr int APART = HALF_BLOCK / (LANES * VEC);  // packs
constexpr bool PAIRED = TOGETHER && VEC >= 4 && LANES == 32 && APART > 0 && APART < PACKS;

constexpr bool EVEN = FULL && PACKS * LANES * VEC % HALF_BLOCK == 0;  // all lanes begin in the same half
constexpr bool FIRST = EVEN && PACKS * LANES * VEC % (2 * HALF_BLOCK) == 0;

// Packs k, k + APART, ...; of each block one counter. Packs of odd number are the second halves, or the even ones,
// if the first of them is.
template <int W>
__device__ __forceinline__ void draw_every(RandomState state, unsigned long long first, bool second, int k,
                                           Lanes<W> (&lanes)[PACKS]) {
    const unsigned long long begin = second ? first - HALF_BLOCK : first;
    constexpr int MOST = (PACKS + APART - 1) / APART;
#pragma unroll
    for (int m = 0; m <= MOST; m += 2) {
        const int here = k + m * APART;
        if (here - APART >= PACKS || (here >= PACKS && !second)) continue;
        Lanes<W> low, high;
        draw_pair<W>(state, begin + m * HALF_BLOCK, low, high);
#pragma unroll
        for (int w = 0; w < Lanes<W>::WORDS; ++w) {
            if (m > 0 && second) lanes[here - APART].words[w] = low.words[w];
            if (here < PACKS) lanes[here].words[w] = second ? high.words[w] : low.words[w];
            if (here + APART < PACKS) lanes[here + APART].words[w] = high.words[w];
        }
    }
}

template <int W>
__device__ __forceinline__ void draw_row(RandomState state, unsigned long long first, Lanes<W> (&lanes)[PACKS]) {
    if constexpr (PAIRED) {
        const auto from = [&](bool second) {
#pragma unroll
            for (int k = 0; k < APART; ++k) {
                const unsigned long long begin = first + k * LANES * VEC;
                draw_every(state, begin, EVEN ? second : static_cast<bool>(begin & HALF_BLOCK), k, lanes);
            }
        };
        if (!EVEN || FIRST || !(first & HALF_BLOCK)) from(false);
        else from(true);
    } else {
#pragma unroll
        for (int k = 0; k < PACKS; ++k) lanes[k] = draw<W>(state, first + k * LANES * VEC);
    }
}

// With probability 1 - p, as `kept` of philox.cuh, but a comparison of whole words: `most` is the largest that is
// dropped, 2^32 - 1 of all and of none.
struct Dropped {
    unsigned most;
    bool none;
    __device__ __forceinline__ explicit Dropped(acc_t p) {
        const unsigned threshold = static_cast<unsigned>(p * acc_t(65536) + acc_t(0.5));
        most = (threshold << 16) - 1, none = threshold == 0;
    }
    __device__ __forceinline__ bool keeps(Lane lane) const {
        return (lane.high ? lane.word : lane.word << 16) > most || none;
    }
};

__device__ __forceinline__ RandomState state_of(const unsigned long long* known, unsigned long long seed,
                                                unsigned long long offset) {
    return known ? RandomState{known[0], known[1] + offset} : RandomState{seed, offset};
}

struct Moments { acc_t mean, rstd; };

// Leaves in `values` what is left of them without their mean.
__device__ __forceinline__ Moments moments(const Params& p, Values& values) {
    __shared__ acc_t shared[2][ROWS][WARPS];
    acc_t sum = 0, squares = 0;
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v)
            if (inside(p, k)) sum += values[k][v];
    const acc_t mean = row_sum(sum, shared[0]) / p.columns;
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            values[k][v] -= mean;
            if (inside(p, k)) squares += values[k][v] * values[k][v];
        }
    return {mean, rsqrt(row_sum(squares, shared[1]) / p.columns + static_cast<acc_t>(p.eps))};
}

// The norm's weight and bias, multiplied with what dropout multiplies, wait in shared memory where they fit.
constexpr bool AFFINE = NORM_WEIGHT || NORM_BIAS;
constexpr bool STAGED = AFFINE && 2 * THREADS * PACKS * VEC * sizeof(acc_t) <= 32768;
using Staged = Shared<STAGED>[2];

struct Affine { acc_t weight[VEC], bias[VEC]; };

__device__ __forceinline__ Affine load_affine(const Params& p, int k) {
    const acc_t scale = DROPOUT ? static_cast<acc_t>(p.scale_of_kept) : acc_t(1);
    Pack<scalar_t, VEC> weight, bias;
    if constexpr (NORM_WEIGHT) weight = load_pack<VEC>(p.norm_weight + column_of(k));
    if constexpr (NORM_BIAS) bias = load_pack<VEC>(p.norm_bias + column_of(k));
    Affine affine;
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        affine.weight[v] = NORM_WEIGHT ? at(weight, v) * scale : scale;
        affine.bias[v] = NORM_BIAS ? at(bias, v) * scale : acc_t(0);
    }
    return affine;
}

__device__ __forceinline__ void stage_affine(const Params& p, Staged& staged) {
    if (!STAGED) return;
    if (threadIdx.x < THREADS)
#pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            if (!inside(p, k)) continue;
            const Affine affine = load_affine(p, k);
            put(staged[0], k, affine.weight), put(staged[1], k, affine.bias);
        }
    __syncthreads();
}

__device__ __forceinline__ Affine affine_of(const Params& p, const Staged& staged, int k) {
    if (!STAGED) return load_affine(p, k);
    Affine affine;
    take(staged[0], k, affine.weight), take(staged[1], k, affine.bias);
    return affine;
}

__device__ __forceinline__ void normalise(const Params& p, const Staged& staged, Values& values, acc_t rstd) {
    if constexpr (!AFFINE && DROPOUT) rstd *= static_cast<acc_t>(p.scale_of_kept);
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        if (!inside(p, k)) continue;
        Affine affine;
        if constexpr (AFFINE) affine = affine_of(p, staged, k);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            values[k][v] *= rstd;
            if constexpr (AFFINE) values[k][v] = values[k][v] * affine.weight[v] + affine.bias[v];
        }
    }
}

__device__ __forceinline__ void drop_and_store(const Params& p, RandomState state, const Dropped& dropped, unsigned n,
                                               Values& values) {
    const unsigned long long first = static_cast<unsigned long long>(n) * p.columns + first_column();
    if constexpr (DROPOUT) {
        const acc_t scale = NORM ? acc_t(1) : static_cast<acc_t>(p.scale_of_kept);  // of a norm's, it is known there
        Lanes<VEC> lanes[PACKS];
        draw_row(state, first, lanes);
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int v = 0; v < VEC; ++v)
                values[k][v] = dropped.keeps(lanes[k][v]) ? values[k][v] * scale : acc_t(0);
    }
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
        if (inside(p, k)) store_pack<scalar_t, VEC>(p.out + first + k * LANES * VEC, values[k]);
}

__device__ __forceinline__ void all_at_once(const Params& p, unsigned first, const Places& of_lane, RandomState state,
                                            const Dropped& dropped) {
    Terms terms[EACH];
    Common no_common = {};
    load_common(p, places_at(of_lane, 0), terms[0], no_common);
#pragma unroll
    for (int k = 0; k < EACH; ++k) load_terms(p, places_at(of_lane, k), terms[k]);
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        if (!has_row(p, first, k)) continue;
        Terms mine = terms[k];
#pragma unroll
        for (int j = 0; j < PACKS; ++j) {
            if constexpr (HAS_POSITIONS && ONE_POSITION) mine.position[j] = terms[0].position[j];
            if constexpr (ONE_TYPE) mine.type[j] = terms[0].type[j];
        }
        Values values;
        add_up(p, {}, mine, no_common, values);
        drop_and_store(p, state, dropped, first + k * p.apart, values);
    }
}

__device__ __forceinline__ void one_by_one(const Params& p, unsigned first, const Places& of_lane, RandomState state,
                                           const Dropped& dropped) {
    __shared__ __align__(16) Staged staged;
    __shared__ __align__(16) Common all_common[ROWS];
    Common& common = all_common[threadIdx.x / THREADS];
    Terms terms;
    Places places = places_at(of_lane, 0);
    if constexpr (TOGETHER) load_terms(p, places, terms);
    load_common(p, places, terms, common);
    stage_affine(p, staged);
#pragma unroll 1
    for (unsigned k = 0; k < p.each; ++k) {
        if constexpr (!TOGETHER) places = places_of_row(p, first, k, threadIdx.x % THREADS == 0);
        Values values;
        add_up(p, places, terms, common, values);
        if constexpr (TOGETHER) {
            places = places_at(of_lane, min(k + 1, p.each - 1));
            load_terms(p, places, terms);
        }
        const Moments m = moments(p, values);
        if (!has_row(p, first, k)) continue;
        const unsigned n = first + k * p.apart;
        if (threadIdx.x % THREADS == 0) p.mean[n] = m.mean, p.rstd[n] = m.rstd;
        normalise(p, staged, values, m.rstd);
        drop_and_store(p, state, dropped, n, values);
    }
}

// ---------------------------------------------------------------------------------------------
// The gradient of a norm and what follows it, of the sums that it had: they are added up again, the mask is drawn
// again. Of the norm's weight and bias a block leaves partial sums.

__device__ __forceinline__ void row_sums(acc_t (&x)[2], acc_t (&shared)[2][ROWS][WARPS]) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2)
#pragma unroll
        for (int i = 0; i < 2; ++i) x[i] += __shfl_xor_sync(0xffffffffu, x[i], offset);
    if constexpr (WARPS > 1) {
        const int team = threadIdx.x / THREADS;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (lane_of_team() == 0) shared[i][team][threadIdx.x % THREADS / LANES] = x[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            x[i] = shared[i][team][0];
#pragma unroll
            for (int w = 1; w < WARPS; ++w) x[i] += shared[i][team][w];
        }
    }
}

// What the block's teams have, for the first of them.
__device__ __forceinline__ void leave_partial(const Params& p, int which, Values& sum) {
    __shared__ acc_t shared[ROWS][THREADS][VEC];
    const int team = threadIdx.x / THREADS, thread = threadIdx.x % THREADS;
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        __syncthreads();
#pragma unroll
        for (int v = 0; v < VEC; ++v) shared[team][thread][v] = sum[k][v];
        __syncthreads();
        if (team > 0 || !inside(p, k)) continue;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            for (int other = 1; other < ROWS; ++other) sum[k][v] += shared[other][thread][v];
            if constexpr (DROPOUT) sum[k][v] *= static_cast<acc_t>(p.scale_of_kept);
        }
        const unsigned long long row = static_cast<unsigned long long>(which) * gridDim.x + blockIdx.x;
        store_pack<acc_t, VEC>(p.partials + row * p.columns + column_of(k), sum[k]);
    }
}

struct Sums { Values of_weight, of_bias; };

// Of row n: x are the sums without their mean, times rstd, when this is done; g the incoming gradient, masked.
__device__ __forceinline__ void differentiate(const Params& p, const Staged& staged, unsigned n, bool exists, acc_t mean,
                                              acc_t rstd, Values& x, Values& g, Sums& sums, int turn) {
    __shared__ acc_t shared[2][2][ROWS][WARPS];
    const acc_t scale = DROPOUT ? static_cast<acc_t>(p.scale_of_kept) : acc_t(1);
    acc_t totals[2] = {};
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        if (!inside(p, k) || !exists) continue;
        Affine affine;
        if constexpr (AFFINE) affine = affine_of(p, staged, k);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            x[k][v] = (x[k][v] - mean) * rstd;
            sums.of_weight[k][v] += g[k][v] * x[k][v], sums.of_bias[k][v] += g[k][v];
            g[k][v] *= AFFINE ? affine.weight[v] : scale;
            totals[0] += g[k][v], totals[1] += g[k][v] * x[k][v];
        }
    }
    row_sums(totals, shared[turn]);
    if (!exists) return;
    const acc_t a = totals[0] / p.columns, b = totals[1] / p.columns;
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v) g[k][v] = (g[k][v] - a - x[k][v] * b) * rstd;
    const unsigned long long first = static_cast<unsigned long long>(n) * p.columns + first_column();
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
        if (inside(p, k)) store_pack<scalar_t, VEC>(p.out + first + k * LANES * VEC, g[k]);
}

__device__ __forceinline__ void mask(const Params& p, RandomState state, const Dropped& dropped, unsigned n, Values& g) {
    Lanes<VEC> lanes[PACKS];
    draw_row(state, static_cast<unsigned long long>(n) * p.columns + first_column(), lanes);
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v) g[k][v] = dropped.keeps(lanes[k][v]) ? g[k][v] : acc_t(0);
}

__device__ __forceinline__ void load_gradient(const Params& p, unsigned first, int k, Row& grads) {
    if (has_row(p, first, k))
        load_row(p, p.grad + static_cast<unsigned long long>(first + k * p.apart) * p.columns, grads);
}

__device__ __forceinline__ void backward(const Params& p, unsigned first, const Places& of_lane, RandomState state,
                                         const Dropped& dropped) {
    __shared__ __align__(16) Staged staged;
    __shared__ __align__(16) Common all_common[ROWS];
    Common& common = all_common[threadIdx.x / THREADS];
    Terms terms;
    Row grads;
    Sums sums = {};
    acc_t means = 0, rstds = 0;  // of the row that the lane knows
    if (lane_of_team() < p.each && has_row(p, first, lane_of_team())) {
        const unsigned n = first + lane_of_team() * p.apart;
        means = p.mean[n], rstds = p.rstd[n];
    }
    Places places = places_at(of_lane, 0);
    load_terms(p, places, terms);
    load_gradient(p, first, 0, grads);
    load_common(p, places, terms, common);
    stage_affine(p, staged);
#pragma unroll 1
    for (unsigned k = 0; k < p.each; ++k) {
        Values x, g;
        if constexpr (HAS_POSITIONS && COMMON == 0)
#pragma unroll
            for (int j = 0; j < PACKS; ++j) hide_pack(terms.position[j]);  // else it waits in full width
        add_up(p, places, terms, common, x);
#pragma unroll
        for (int j = 0; j < PACKS; ++j)
#pragma unroll
            for (int v = 0; v < VEC; ++v) g[j][v] = at(grads[j], v);
        const unsigned next = min(k + 1, p.each - 1), n = first + k * p.apart;
        places = places_at(of_lane, next);
        load_terms(p, places, terms);
        load_gradient(p, first, next, grads);
        if constexpr (DROPOUT) mask(p, state, dropped, n, g);
        differentiate(p, staged, n, has_row(p, first, k), __shfl_sync(0xffffffffu, means, k, LANES),
                      __shfl_sync(0xffffffffu, rstds, k, LANES), x, g, sums, k & 1);
    }
    leave_partial(p, 0, sums.of_weight);
    leave_partial(p, 1, sums.of_bias);
}

extern "C" __global__ void __launch_bounds__(BLOCK, COMMON > 0 ? COMMON_BLOCKS : MIN_BLOCKS)
embedding(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    const unsigned first = blockIdx.x * ROWS + threadIdx.x / THREADS;
    const Places of_lane = places_of_row(p, first, lane_of_team(), threadIdx.x % THREADS < LANES);
    const RandomState state = state_of(DROPOUT ? p.random_state : nullptr, p.seed, p.random_offset);
    const Dropped dropped(static_cast<acc_t>(p.p));
    if constexpr (GRADIENT) backward(p, first, of_lane, state, dropped);
    else if constexpr (NORM) one_by_one(p, first, of_lane, state, dropped);
    else all_at_once(p, first, of_lane, state, dropped);
}
