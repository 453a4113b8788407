// Rows of tables, added up, normalised and dropped from: what stands before the first layer of a transformer.
//
//     out[n] = dropout(norm(tokens_table[tokens[n]] scale + positions_table[...] + types_table[...]))
//
// THREADS threads share a row, each with up to PACKS packs of it in registers. Without a norm a row may be longer:
// blockIdx.y then says which part of it.
//
// The prologue defines scalar_t, token_t, position_t, type_t and
//   VEC, PACKS, THREADS   elements of a pack, packs a thread has, threads of a row; BLOCK / THREADS rows a block
//   POSITIONS, TYPES      NONE; COUNTED: row n modulo a period (of types the first row); GIVEN
//   NORM, NORM_WEIGHT, NORM_BIAS, DROPOUT

constexpr int NONE = 0, COUNTED = 1, GIVEN = 2;
constexpr int ROWS = BLOCK / THREADS, WARPS = (THREADS + 31) / 32;
constexpr bool HAS_POSITIONS = POSITIONS != NONE, HAS_TYPES = TYPES != NONE;
using Row = Pack<scalar_t, VEC>[PACKS];

struct Rows { const scalar_t *token, *position, *type; bool valid; };

__device__ __forceinline__ bool in_range(const Params& p, unsigned argument, int64_t index, int64_t rows, bool tells) {
    const bool fits = index >= 0 && index < rows;
    if (!fits && tells) report_index(p.fault, argument, index);
    return fits;
}

// `tells`: one thread of a row reports what is wrong with it.
__device__ __forceinline__ Rows rows_of(const Params& p, unsigned n, bool tells) {
    int64_t position = 0, type = 0;
    const int64_t token = p.tokens[n];
    if constexpr (POSITIONS == COUNTED) position = n % p.position_period;
    if constexpr (POSITIONS == GIVEN) position = p.positions[n % p.position_period];
    if constexpr (TYPES == GIVEN) type = p.types[n % p.type_period];
    Rows rows;
    rows.valid = in_range(p, 1, token, p.token_rows, tells);
    if constexpr (POSITIONS == GIVEN) rows.valid &= in_range(p, 2, position, p.position_rows, tells);
    if constexpr (TYPES == GIVEN) rows.valid &= in_range(p, 3, type, p.type_rows, tells);
    rows.token = p.token_table + token * p.token_stride;
    rows.position = p.position_table + position * p.position_stride;
    rows.type = p.type_table + type * p.type_stride;
    return rows;
}

__device__ __forceinline__ unsigned column_of(int pack) {
    return ((blockIdx.y * PACKS + pack) * THREADS + threadIdx.x % THREADS) * VEC;
}

__device__ __forceinline__ void load_row(const Params& p, const scalar_t* from, Row& row) {
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
        if (column_of(k) < p.columns) row[k] = load_pack<VEC>(from + column_of(k));
}

__device__ __forceinline__ void add(const Params& p, const scalar_t* from, acc_t (&values)[PACKS][VEC]) {
    Row row;
    load_row(p, from, row);
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v)
            if (column_of(k) < p.columns) values[k][v] += at(row[k], v);
}

__device__ __forceinline__ void add_up(const Params& p, const Rows& rows, acc_t (&values)[PACKS][VEC]) {
    const acc_t nothing = rows.valid ? acc_t(0) : acc_t(nan);
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v) values[k][v] = nothing;
    if (!rows.valid) return;
    constexpr bool TOGETHER = HAS_POSITIONS && THREADS <= 512;  // else there are too few registers
    Row token, position;  // on their way together; types are few rows, which are in a cache
    load_row(p, rows.token, token);
    if constexpr (TOGETHER) load_row(p, rows.position, position);
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v)
            if (column_of(k) < p.columns) {
                values[k][v] = at(token[k], v) * static_cast<acc_t>(p.scale);
                if constexpr (TOGETHER) values[k][v] += at(position[k], v);
            }
    if constexpr (HAS_POSITIONS && !TOGETHER) add(p, rows.position, values);
    if constexpr (HAS_TYPES) add(p, rows.type, values);
    if constexpr (NORM)  // as the backward pass will have them, which gathers them again: moments must fit
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
#pragma unroll
            for (int v = 0; v < VEC; ++v) values[k][v] = rounded<scalar_t>(values[k][v]);
}

// Of what the threads of a row have; in the same order every time.
__device__ __forceinline__ acc_t row_sum(acc_t x, acc_t (&shared)[ROWS][WARPS]) {
#pragma unroll
    for (int offset = (THREADS < 32 ? THREADS : 32) / 2; offset > 0; offset /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, offset);
    if constexpr (WARPS > 1) {
        const int team = threadIdx.x / THREADS, lane = threadIdx.x % THREADS;
        if (lane % 32 == 0) shared[team][lane / 32] = x;
        __syncthreads();
        x = shared[team][0];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) x += shared[team][w];
    }
    return x;
}

struct Moments { acc_t mean, rstd; };

__device__ __forceinline__ Moments moments(const Params& p, const acc_t (&values)[PACKS][VEC]) {
    __shared__ acc_t shared[2][ROWS][WARPS];
    acc_t sum = 0, squares = 0;
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v)
            if (column_of(k) < p.columns) sum += values[k][v];
    const acc_t mean = row_sum(sum, shared[0]) / p.columns;
#pragma unroll
    for (int k = 0; k < PACKS; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v)
            if (column_of(k) < p.columns) squares += (values[k][v] - mean) * (values[k][v] - mean);
    return {mean, rsqrt(row_sum(squares, shared[1]) / p.columns + static_cast<acc_t>(p.eps))};
}

__device__ __forceinline__ void normalise(const Params& p, const Moments& m, unsigned column, acc_t (&values)[VEC]) {
    Pack<scalar_t, VEC> weight, bias;
    if constexpr (NORM_WEIGHT) weight = load_pack<VEC>(p.norm_weight + column);
    if constexpr (NORM_BIAS) bias = load_pack<VEC>(p.norm_bias + column);
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        values[v] = (values[v] - m.mean) * m.rstd;
        if constexpr (NORM_WEIGHT) values[v] *= at(weight, v);
        if constexpr (NORM_BIAS) values[v] += at(bias, v);
    }
}

__device__ __forceinline__ void drop(const Params& p, RandomState state, unsigned long long first,
                                     acc_t (&values)[VEC]) {
    const Lanes<VEC> lanes = draw<VEC>(state, first);
#pragma unroll
    for (int v = 0; v < VEC; ++v)
        values[v] = kept(lanes[v], p.p) ? values[v] * static_cast<acc_t>(p.scale_of_kept) : acc_t(0);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 1) embedding(const __grid_constant__ Params p) {
    const unsigned n = blockIdx.x * ROWS + threadIdx.x / THREADS;
    const bool exists = n < p.rows, is_first = threadIdx.x % THREADS == 0 && blockIdx.y == 0;
    acc_t values[PACKS][VEC];
    add_up(p, rows_of(p, exists ? n : p.rows - 1, exists && is_first), values);
    Moments m;
    if constexpr (NORM) m = moments(p, values);
    if (!exists) return;
    if (NORM && is_first) p.mean[n] = m.mean, p.rstd[n] = m.rstd;
    RandomState state = {p.seed, p.random_offset};
    if (DROPOUT && p.random_state) state = {p.random_state[0], p.random_state[1]};
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        const unsigned column = column_of(k);
        if (column >= p.columns) continue;
        const unsigned long long at = static_cast<unsigned long long>(n) * p.columns + column;
        if constexpr (NORM) normalise(p, m, column, values[k]);
        if constexpr (DROPOUT) drop(p, state, at, values[k]);
        store_pack<scalar_t, VEC>(p.out + at, values[k]);
    }
}
