// Rolling windows along one dimension: sum, mean, extremes, variance; O(n) work whatever the window.
//
// x is (outer, n, inner); window i covers x[i - left .. i - left + window - 1], as far as that is in the row.
// A block has TILE neighbouring windows of LANES columns. With L = min(window - 1, TILE), window k of the
// tile is cut at the multiples of L into the tail of a segment of A (the tile's first elements), what lies
// between (nothing, if the window fits the tile), and the head of a segment of B (its last elements):
//
//     A: |--S(k)-->|          S: reversed scan of A, P: scan of B, both restarting at multiples of L
//     B:            |P(k)->   (van Herk 1992, Gil & Werman 1993)
//
// Nothing is ever subtracted, so that an infinity or NaN that leaves the window leaves nothing behind, and
// nothing cancels. Both scans run in registers, over the ITEMS elements of a thread, then over the threads.
// For windows longer than a tile, stage CHUNKS first reduces every tile of x; FOLDS doubles these sixteenfold,
// MIDDLES puts them together to what lies between A and B: all of that is on n / TILE values.
//
// Before this file: scalar_t, STAGE, FAMILY, MEAN, LARGEST, INDEXED, ROOT, LANES, ITEMS, RESIDENT (blocks).

constexpr int WINDOWS = 0, CHUNKS = 1, FOLDS = 2, MIDDLES = 3;       // STAGE
constexpr int TOTAL = 0, EXTREME = 1, MOMENTS = 2;                   // FAMILY
constexpr int SCAN = BLOCK / LANES, TILE = SCAN * ITEMS, WARPS = BLOCK / 32;
constexpr int LANE_STEP = LANES, SCAN_OF_WARP = 32 / LANES;
constexpr int RADIX = 16;

// ---------------------------------------------------------------------------------------------
// What is known of a range of elements, and how two neighbouring ranges become one. `State()` is of none.

struct Total {
    acc_t sum;
    __device__ __forceinline__ static Total none() { return {acc_t(0)}; }
    __device__ __forceinline__ static Total one(acc_t x, int64_t) { return {x}; }
};
__device__ __forceinline__ Total merge(Total a, Total b) { return {a.sum + b.sum}; }

// With INDEXED, the first place where the extreme is; NaN is more extreme than any number.
struct Extreme {
    acc_t value;
    int index;
    __device__ __forceinline__ static Extreme none() { return {acc_t(LARGEST ? -inf : inf), -1}; }
    __device__ __forceinline__ static Extreme one(acc_t x, int64_t at) { return {x, static_cast<int>(at)}; }
};
__device__ __forceinline__ Extreme merge(Extreme a, Extreme b) {
    if constexpr (INDEXED) {
        const bool beyond = LARGEST ? b.value > a.value : b.value < a.value;
        const bool second = b.index >= 0 && (a.index < 0 || beyond || (b.value != b.value && a.value == a.value));
        return second ? b : a;
    } else {
        return {LARGEST ? maximum(a.value, b.value) : minimum(a.value, b.value), 0};
    }
}

// Number, mean, sum of squares about the mean (Chan, Golub & LeVeque 1983).
struct Moments {
    acc_t n, mean, squares;
    __device__ __forceinline__ static Moments none() { return {acc_t(0), acc_t(0), acc_t(0)}; }
    __device__ __forceinline__ static Moments one(acc_t x, int64_t) { return {acc_t(1), x, (x - x)}; }
};
__device__ __forceinline__ acc_t inverse_of(acc_t n) {
    if constexpr (sizeof(scalar_t) == 8) return acc_t(1) / n;
    const acc_t near = rcp(static_cast<float>(n));  // one step of Newton: 1e-14 of it in double
    return near * (acc_t(2) - n * near);
}
__device__ __forceinline__ Moments merge(Moments a, Moments b) {
    const acc_t n = a.n + b.n, d = b.mean - a.mean, part = b.n * inverse_of(n);
    const Moments both = {n, a.mean + d * part, a.squares + b.squares + d * d * (a.n * part)};
    return a.n == acc_t(0) ? b : b.n == acc_t(0) ? a : both;
}
__device__ __forceinline__ Moments merge(Moments a, Moments b, Moments c) {
    // About the middle one, which usually is by far the largest: no division but that by the number of all.
    const acc_t pivot = b.n != acc_t(0) ? b.mean : a.n != acc_t(0) ? a.mean : c.mean;
    const acc_t n = a.n + b.n + c.n, da = a.mean - pivot, dc = c.mean - pivot;
    const acc_t sum = a.n * da + c.n * dc;
    const acc_t squares = a.squares + b.squares + c.squares + a.n * da * da + c.n * dc * dc;
    const acc_t least = squares - sum * sum * inverse_of(n);
    return {n, pivot, least < acc_t(0) ? acc_t(0) : least};  // its mean is not asked for
}
template <typename S> __device__ __forceinline__ S merge(S a, S b, S c) { return merge(merge(a, b), c); }

template <int F> struct Of { using type = Total; };
template <> struct Of<EXTREME> { using type = Extreme; };
template <> struct Of<MOMENTS> { using type = Moments; };
struct State : Of<FAMILY>::type {};
using Value = Of<FAMILY>::type;

// With one more element after it, or before it; a thread's own scan, of at most 16 elements.
template <bool AFTER, typename S> __device__ __forceinline__ S with(S a, acc_t x, int64_t at) {
    const S one = S::one(x, at);
    return AFTER ? merge(a, one) : merge(one, a);
}
__constant__ const double INVERSES[17] = {
    0, 1, 1. / 2, 1. / 3, 1. / 4, 1. / 5, 1. / 6, 1. / 7, 1. / 8, 1. / 9, 1. / 10, 1. / 11, 1. / 12, 1. / 13,
    1. / 14, 1. / 15, 1. / 16};
template <bool AFTER> __device__ __forceinline__ Moments with(Moments a, acc_t x, int64_t) {
    const acc_t n = a.n + acc_t(1), d = x - a.mean;
    const acc_t mean = a.mean + d * acc_t(INVERSES[static_cast<int>(n)]);
    return {n, mean, a.squares + d * (x - mean)};
}

__device__ __forceinline__ acc_t finished(const Params& p, Total all, acc_t count) {
    return !MEAN ? all.sum : count == acc_t(p.window) ? all.sum * acc_t(p.inverse) : all.sum / count;
}
__device__ __forceinline__ acc_t finished(const Params&, Extreme all, acc_t) { return all.value; }
__device__ __forceinline__ acc_t finished(const Params& p, Moments all, acc_t count) {
    const acc_t freedom = count - acc_t(p.correction);
    const acc_t variance = all.squares / (freedom > acc_t(0) ? freedom : acc_t(0));
    return ROOT ? sqrt(variance) : variance;
}

template <typename S> __device__ __forceinline__ int place_of(S) { return 0; }
__device__ __forceinline__ int place_of(Extreme all) { return all.index; }

// ---------------------------------------------------------------------------------------------
// Between threads

template <typename T> __device__ __forceinline__ T from_lane(T value, int lane) {
    static_assert(sizeof(T) % 4 == 0, "whole words");
    union { T value; unsigned words[sizeof(T) / 4]; } v = {value};
#pragma unroll
    for (int k = 0; k < static_cast<int>(sizeof(T) / 4); ++k)
        v.words[k] = __shfl_sync(0xffffffffu, v.words[k], lane);
    return v.value;
}

struct Ends { Value value[WARPS][LANES]; bool closed[WARPS][LANES]; };

// What precedes a thread's elements (FORWARD) or follows them, back to where a segment begins or ends.
// `mine` is of the thread's elements up to there, `closed` that this is within the thread.
template <bool FORWARD> __device__ __forceinline__ Value beside(Value mine, bool closed, Ends& ends) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, scan = lane / LANES, column = lane % LANES;
    const int place = FORWARD ? scan : SCAN_OF_WARP - 1 - scan;      // along the direction of the scan
#pragma unroll
    for (int step = 1; step < SCAN_OF_WARP; step *= 2) {
        const int from = lane + (FORWARD ? -step : step) * LANE_STEP;
        const Value other = from_lane(mine, from & 31);
        const bool other_closed = __shfl_sync(0xffffffffu, static_cast<int>(closed), from & 31);
        if (place >= step && !closed) {
            mine = FORWARD ? merge(other, mine) : merge(mine, other);
            closed = other_closed;
        }
    }
    if (place == SCAN_OF_WARP - 1) ends.value[warp][column] = mine, ends.closed[warp][column] = closed;
    const int from = lane + (FORWARD ? -1 : 1) * LANE_STEP;
    Value carry = from_lane(mine, from & 31);
    closed = __shfl_sync(0xffffffffu, static_cast<int>(closed), from & 31);
    if (place == 0) carry = Value::none(), closed = false;
    __syncthreads();
    for (int w = FORWARD ? warp - 1 : warp + 1; w >= 0 && w < WARPS && !closed; w += FORWARD ? -1 : 1) {
        carry = FORWARD ? merge(ends.value[w][column], carry) : merge(carry, ends.value[w][column]);
        closed = ends.closed[w][column];
    }
    return carry;
}

// Of all threads' values, to all of them.
__device__ __forceinline__ Value of_block(Value mine, Ends& ends) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = lane % LANES;
#pragma unroll
    for (int step = 1; step < SCAN_OF_WARP; step *= 2) {
        const Value next = from_lane(mine, (lane + step * LANE_STEP) & 31);
        if ((lane / LANES) % (2 * step) == 0) mine = merge(mine, next);
    }
    __syncthreads();  // `ends` may still be read
    if (lane < LANES) ends.value[warp][column] = mine;
    __syncthreads();
    Value all = ends.value[0][column];
    for (int w = 1; w < WARPS; ++w) all = merge(all, ends.value[w][column]);
    return all;
}

// ---------------------------------------------------------------------------------------------
// Memory

struct Tile {
    int64_t outer, number, column;
    int64_t first;     // window
    bool has_column;
};

__device__ __forceinline__ Tile tile_of(const Params& p) {
    Tile tile;
    int64_t block = blockIdx.x;
    const int64_t group = block % p.groups;
    block /= p.groups;
    tile.number = block % p.tiles, tile.outer = block / p.tiles;
    tile.column = group * LANES + threadIdx.x % LANES;
    tile.has_column = tile.column < p.inner;
    if (!tile.has_column) tile.column = p.inner - 1;
    tile.first = tile.number * TILE;
    // So that results lie at multiples of 16 bytes.
    if constexpr (LANES == 1) tile.first -= p.stride == 1 ? (tile.outer * p.results) % (16 / sizeof(scalar_t)) : 0;
    return tile;
}

// row[first .. first + ITEMS), at any alignment, by aligned words of 16 bytes; those outside of [0, n) are undefined.
// FULL: none is.
template <bool FULL> __device__ __forceinline__ void load_run(const scalar_t* row, int64_t first, int64_t n, scalar_t (&to)[ITEMS]) {
    constexpr int WORDS = ITEMS * static_cast<int>(sizeof(scalar_t)) / 4;
    static_assert(WORDS % 4 == 0, "neighbours in the same place of a word");
    using address_t = unsigned long long;
    const address_t begin = reinterpret_cast<address_t>(row), end = begin + n * sizeof(scalar_t);
    const address_t from = begin + first * static_cast<int64_t>(sizeof(scalar_t)), shift = from & 15;
    union { unsigned words[WORDS + 4]; scalar_t values[ITEMS]; } run;
#pragma unroll
    for (int k = 0; k < WORDS + 4; k += 4) {
        const address_t at = from - shift + 4 * k;
        run.words[k] = run.words[k + 1] = run.words[k + 2] = run.words[k + 3] = 0;
        if ((FULL || (at + 16 > begin && at < end)) && (k < WORDS || shift != 0))
            load_bytes<16>(reinterpret_cast<const void*>(at), run.words + k);
    }
    if (shift & 8)
#pragma unroll
        for (int k = 0; k < WORDS + 2; ++k) run.words[k] = run.words[k + 2];
    if (shift & 4)
#pragma unroll
        for (int k = 0; k < WORDS + 1; ++k) run.words[k] = run.words[k + 1];
    if constexpr (sizeof(scalar_t) == 2)
        if (shift & 2)
#pragma unroll
            for (int k = 0; k < WORDS; ++k) run.words[k] = run.words[k] >> 16 | run.words[k + 1] << 16;
#pragma unroll
    for (int v = 0; v < ITEMS; ++v) to[v] = run.values[v];
}

// ITEMS elements from position `first` of the row; `low` <= v < `high` are in it, all if it is FULL.
template <bool FULL> struct Items {
    scalar_t data[ITEMS];
    int low, high;
    int64_t first;
    __device__ __forceinline__ Items(const Params& p, const Tile& tile, int64_t from) : first(from) {
        low = static_cast<int>(min(max(-first, 0ll), static_cast<int64_t>(ITEMS)));
        high = static_cast<int>(max(min(p.n - first, static_cast<int64_t>(ITEMS)), 0ll));
        const scalar_t* row = p.x + tile.outer * p.outer_step;
        if constexpr (LANES == 1) {
            load_run<FULL>(row, first, p.n, data);
        } else {
            row += tile.column + first * p.step;
#pragma unroll
            for (int v = 0; v < ITEMS; ++v)
                if (FULL || (v >= low && v < high)) load_bytes<sizeof(scalar_t)>(row + v * p.step, &data[v]);
        }
    }
    template <bool AFTER> __device__ __forceinline__ Value join(Value a, int v) const {
        return FULL || (v >= low && v < high) ? with<AFTER>(a, to_acc(data[v]), first + v) : a;
    }
};

// ---------------------------------------------------------------------------------------------
// Stages

__device__ __forceinline__ void store_results(const Params& p, const Tile& tile, int64_t first,
                                              const acc_t (&values)[ITEMS], const int (&indices)[ITEMS]) {
    if constexpr (LANES == 1) {
        if (p.stride == 1 && first >= 0 && first + ITEMS <= p.results) {
            const int64_t at = tile.outer * p.results + first;
            store_pack<scalar_t, ITEMS>(p.out + at, values);
            if constexpr (INDEXED)
#pragma unroll
                for (int v = 0; v < ITEMS; ++v) p.index[at + v] = indices[v];
            return;
        }
    }
    if (!tile.has_column) return;
#pragma unroll
    for (int v = 0; v < ITEMS; ++v) {
        const int64_t window = first + v;
        int64_t result = window;
        if (p.stride != 1) {
            result = static_cast<unsigned>(window) / p.stride;
            if (result * p.stride != window) continue;
        }
        if (window < 0 || result >= p.results) continue;
        const int64_t at = (tile.outer * p.results + result) * p.inner + tile.column;
        p.out[at] = from_acc<scalar_t>(values[v]);
        if constexpr (INDEXED) p.index[at] = indices[v];
    }
}

// From index TILE - L on to the tile's last segment, which is shorter than L: part of all windows that begin
// in that segment, between their ends.
template <bool FULL>
__device__ __forceinline__ Value gap_of(const Items<FULL>& b, int first, int low, int high, Ends& ends) {
    Value mine = Value::none();
#pragma unroll
    for (int v = 0; v < ITEMS; ++v)
        if (first + v >= low && first + v < high) mine = b.template join<true>(mine, v);
    return of_block(mine, ends);
}

// FULL: all windows of the tile lie within the row.
template <bool FULL> __device__ __forceinline__ void windows(const Params& p, const Tile& tile) {
    __shared__ Ends ends[3];
    const int first = threadIdx.x / LANES * ITEMS, segment = p.segment;
    const int64_t from = tile.first - p.left + first;
    // A segment begins before elements first_cut, ..., last_cut of this thread, not counting element 0.
    const int phase = first % segment;
    const int first_cut = min(segment - phase, ITEMS);
    int last_cut = first_cut == ITEMS ? 0 : first_cut;
    bool ends_here = phase + ITEMS == segment;
    if (segment < ITEMS) {
        last_cut = first_cut == ITEMS ? 0 : (phase + ITEMS - 1) / segment * segment - phase;
        ends_here = (phase + ITEMS) % segment == 0;
    }

    Value tail[ITEMS], head[ITEMS];
    const Items<FULL> a(p, tile, from), b(p, tile, from + p.window - 1);
    {
        Value s = Value::none();
        int left_of_segment = ITEMS - 1 - last_cut;
#pragma unroll
        for (int v = ITEMS - 1; v >= 0; --v) {
            if (left_of_segment < 0) s = Value::none(), left_of_segment = segment - 1;
            tail[v] = s = a.template join<false>(s, v);
            --left_of_segment;
        }
    }
    const Value after = beside<false>(tail[0], ends_here || first_cut < ITEMS, ends[0]);
    {
        Value s = Value::none();
        int left_of_segment = segment - phase;
#pragma unroll
        for (int v = 0; v < ITEMS; ++v) {
            if (left_of_segment == 0) s = Value::none(), left_of_segment = segment;
            head[v] = s = b.template join<true>(s, v);
            --left_of_segment;
        }
    }
    const Value before = beside<true>(head[ITEMS - 1], phase == 0 || first_cut < ITEMS, ends[1]);

    Value middle = Value::none();
    int has_middle = TILE;  // from this index on
    if (p.middles != nullptr) {
        middle = p.middles[(tile.outer * p.tiles + tile.number) * p.inner + tile.column], has_middle = 0;
    } else if (TILE % segment != 0) {
        has_middle = TILE / segment * segment;
        middle = gap_of(b, first, TILE - segment, has_middle, ends[2]);
    }
    const Value carry_front = phase == 0 ? Value::none() : before;
    Value back = ends_here ? Value::none() : after;
    if (first + last_cut >= has_middle) back = merge(back, middle);
    if (first_cut == ITEMS) back = merge(back, carry_front);
    const Value front = first_cut == ITEMS ? back : carry_front;

    acc_t values[ITEMS];
    int indices[ITEMS];
#pragma unroll
    for (int v = 0; v < ITEMS; ++v) {
        const Value between = v < first_cut ? front : v >= last_cut ? back : Value::none();
        const Value all = merge(tail[v], between, head[v]);
        const int64_t begin = from + v, end = begin + p.window;
        const int64_t count = FULL ? p.window : min(end, p.n) - max(begin, 0ll);
        const acc_t result = finished(p, all, static_cast<acc_t>(static_cast<int>(count)));
        values[v] = count < p.min_periods ? acc_t(nan) : result;
        indices[v] = count < p.min_periods ? -1 : place_of(all);
    }
    store_results(p, tile, tile.first + first, values, indices);
}

// Every tile of x, and its first p.segment elements.
__device__ __forceinline__ void chunks(const Params& p) {
    __shared__ Ends ends;
    const Tile tile = tile_of(p);
    const int first = threadIdx.x / LANES * ITEMS;
    const Items<false> a(p, tile, tile.first - p.left + first);
    Value whole = Value::none(), head = Value::none();
#pragma unroll
    for (int v = 0; v < ITEMS; ++v) {
        whole = a.join<true>(whole, v);
        if (first + v == p.segment - 1) head = whole;
    }
    if (first + ITEMS <= p.segment) head = whole;
    whole = of_block(whole, ends), head = of_block(head, ends);
    if (first == 0 && tile.has_column) {
        const int64_t at = (tile.outer * p.tiles + tile.number) * p.inner + tile.column;
        static_cast<Value&>(p.chunks[at]) = whole, static_cast<Value&>(p.heads[at]) = head;
    }
}

__device__ __forceinline__ Value joined(const State* chunks, Value all, int64_t outer, int64_t first, int64_t column,
                                        const Params& p, int count, int64_t step) {
    for (int k = 0; k < count && first + k * step < p.chunk_tiles; ++k)
        all = merge(all, static_cast<Value>(chunks[(outer * p.chunk_tiles + first + k * step) * p.inner + column]));
    return all;
}

// Of RADIX times as many tiles.
__device__ __forceinline__ void folds(const Params& p) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * BLOCK + threadIdx.x;
    const int64_t column = at % p.inner, number = at / p.inner % p.chunk_tiles;
    const int64_t outer = at / p.inner / p.chunk_tiles;
    if (outer < p.outer)
        static_cast<Value&>(p.folded[at]) = joined(p.chunks, Value::none(), outer, number, column, p, RADIX, p.span);
}

// The p.span tiles after each tile, and the head of the next one.
__device__ __forceinline__ void middles(const Params& p) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * BLOCK + threadIdx.x;
    const int64_t column = at % p.inner, number = at / p.inner % p.tiles, outer = at / p.inner / p.tiles;
    if (outer >= p.outer) return;
    Value all = Value::none();
    int64_t first = number + 1, rest = p.span;
    for (int level = p.levels - 1; level >= 0; --level) {
        const int64_t size = 1ll << (4 * level);
        const int count = static_cast<int>(rest / size);
        all = joined(p.folds[level], all, outer, first, column, p, count, size);
        first += count * size, rest -= count * size;
    }
    all = joined(p.heads, all, outer, first, column, p, 1, 1);
    static_cast<Value&>(p.middles[at]) = all;
}

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT) window(const __grid_constant__ Params p) {
    if constexpr (STAGE == WINDOWS) {
        const Tile tile = tile_of(p);
        const int64_t from = tile.first - p.left;
        if (from >= 0 && from + TILE + p.window - 1 <= p.n) windows<true>(p, tile);
        else windows<false>(p, tile);
    }
    else if constexpr (STAGE == CHUNKS) chunks(p);
    else if constexpr (STAGE == FOLDS) folds(p);
    else middles(p);
}
