// Rolling windows along one dimension: sum, mean, extremes, variance; O(n) work whatever the window.
//
// x is (outer, n, inner); window i covers x[i - left .. i - left + window - 1], as far as that is in the row.
// A block has TILE neighbouring windows of LANES columns, and all their elements in shared memory; a thread ITEMS of
// these windows. They begin in the thread's own ITEMS elements, its chunk, and have in common what lies between:
//
//     |--tail-->| chunks | rest |-head->|       tail: reversed scan of the chunk, in registers
//                                               head: scan of the elements `window` further on
//
// (van Herk 1992, Gil & Werman 1993, with segments that do not depend on the window.) `chunks` are joined from the
// threads' totals, `rest` is window % ITEMS elements. Windows shorter than a chunk are a constant, WINDOW: their
// tails and heads restart at multiples of it. Of windows too long for shared memory the TILE elements at either end
// are there, and earlier stages have joined what lies `p.gap` elements wide between them: CHUNKS reduces every tile
// of x, and its first p.head elements; FOLDS joins RADIX of those, then RADIX of these; MIDDLES puts them together
// for each tile of windows. All but the first is on n / TILE values.
//
// Before this file: window_ranges.cuh, scalar_t, STAGE, FAMILY, MEAN, LARGEST, INDEXED, ROOT, LANES, ITEMS, TILES (of
// a block, one after the other), RESIDENT (blocks), WINDOW (0: any from ITEMS on).

#include "prelude.cuh"
#include "copies.cuh"

constexpr int WINDOWS = 0, CHUNKS = 1, FOLDS = 2, MIDDLES = 3;       // STAGE
constexpr int SCAN = BLOCK / LANES, TILE = SCAN * ITEMS;
static_assert(TILES <= 4, "as many groups of copies are waited for one by one");
constexpr int VECTOR = 16 / static_cast<int>(sizeof(scalar_t));
constexpr bool PAIRS = LANES == 1 && sizeof(scalar_t) == 2;          // of neighbours, a word of shared memory each
static_assert(PAIRS ? ITEMS % 4 == 2 : ITEMS % 2 == 1, "threads lie an odd number of words apart: no bank conflicts");

extern __shared__ uint4 shared[];

// ---------------------------------------------------------------------------------------------
// A tile of LANES columns in shared memory, column by column within a position. Indices count elements.

struct Tile {
    int64_t outer, column;   // the first of LANES
    int number, first;       // window
    int own, beyond;         // indices of its first element, and of what follows its last one
};
__device__ __forceinline__ scalar_t* memory() { return reinterpret_cast<scalar_t*>(shared); }
__device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }

__device__ __forceinline__ Tile tile_of(const Params& p) {
    const unsigned row = p.by_groups.divide(blockIdx.x), outer = p.by_tiles.divide(row);
    Tile tile;
    tile.outer = outer, tile.number = row - outer * p.by_tiles.value;
    tile.column = static_cast<int64_t>(blockIdx.x - row * p.by_groups.value) * LANES;
    tile.first = tile.number * TILE * TILES;
    // So that results lie at multiples of 16 bytes.
    if (LANES == 1 && p.stride == 1) tile.first -= (outer * static_cast<unsigned>(p.results)) % VECTOR;
    return tile;
}

// Of a thread's first element, within a tile.
__device__ __forceinline__ int own_index() { return thread() / LANES * ITEMS * LANES + thread() % LANES; }

__device__ __forceinline__ const scalar_t* row_of(const Params& p, const Tile& tile) {
    return p.x + tile.outer * p.outer_step + tile.column;
}

// Past the registers, where that is possible.
template <typename T, int W> __device__ __forceinline__ void copy(Pack<T, W>* to, const T* from) {
    if constexpr (COPIES_PASS_BY && Pack<T, W>::BYTES >= 4) copy_pack(*to, from);
    else *to = load_pack<W>(from);
}

// A pack that may reach past x: what else lies there is not asked for.
__device__ __forceinline__ void copy_before(Pack<scalar_t, VECTOR>* to, const scalar_t* from, const scalar_t* stop) {
    if (from + VECTOR <= stop) return copy(to, from);
#pragma unroll
    for (int k = 0; k < VECTOR - 1; ++k) {
        if (from + k < stop) to->data[k] = from[k];
    }
}

template <int W>
__device__ __forceinline__ void load_rows(const Params& p, const Tile& tile, int index, int first, int begin, int end) {
    constexpr int UNITS = LANES / W, ROWS = BLOCK / UNITS;
    const int unit = thread() % UNITS * W;
    if (tile.column + unit >= p.inner) return;
    const int skipped = max(begin + first, 0) - first, last = min(end, p.n - first);
    int row = skipped + thread() / UNITS;
    const scalar_t* from = row_of(p, tile) + (first + row) * p.step + unit;
    scalar_t* to = memory() + index + row * LANES + unit;
#pragma unroll 1
    for (; row < last; row += ROWS, from += ROWS * p.step, to += ROWS * LANES)
        copy(reinterpret_cast<Pack<scalar_t, W>*>(to), from);
}

// Positions first + begin ... first + end - 1, as far as the row has them, into shared memory, where position `first`
// lies at the index that is returned, the lowest possible from `to` on, a multiple of VECTOR.
__device__ __forceinline__ int load(const Params& p, const Tile& tile, int to, int first, int begin, int end) {
    if constexpr (LANES == 1) {
        const scalar_t *from = row_of(p, tile) + first, *stop = p.x + (p.outer - 1) * p.outer_step + p.n;
        const int shift = static_cast<int>(reinterpret_cast<unsigned long long>(from) % 16 / sizeof(scalar_t));
        const int last = (shift + min(end, p.n - first) + VECTOR - 1) / VECTOR;
        int k = max(begin ? shift + begin + VECTOR - 1 : 0, first < 0 ? shift - first : 0) / VECTOR + thread();
        from += VECTOR * k - shift;
        Pack<scalar_t, VECTOR>* into = reinterpret_cast<Pack<scalar_t, VECTOR>*>(memory() + to) + k;
#pragma unroll 1
        for (; k < last; k += BLOCK, from += BLOCK * VECTOR, into += BLOCK) copy_before(into, from, stop);
        return to + shift;
    } else {
        constexpr int W = LANES % VECTOR == 0 ? VECTOR : 1;
        if (p.wide) load_rows<W>(p, tile, to, first, begin, end);
        else load_rows<1>(p, tile, to, first, begin, end);
        return to;
    }
}

// What changes nothing in the place of positions that the row does not have; the nearest element for MOMENTS, which
// has to leave them out, as a pivot.
__device__ __forceinline__ void fill(const Params& p, const Tile& tile, int index, int first, int count) {
    for (int k = thread(); k < count * LANES; k += BLOCK) {
        const int position = first + k / LANES, column = k % LANES;
        if ((position >= 0 && position < p.n) || tile.column + column >= p.inner) continue;
        scalar_t filling = from_acc<scalar_t>(FAMILY == TOTAL ? acc_t(0) : acc_t(LARGEST ? -inf : inf));
        if (FAMILY == MOMENTS) filling = row_of(p, tile)[(position < 0 ? 0 : p.n - 1) * p.step + column];
        memory()[index + k] = filling;
    }
}

// One that the row does not have is replaced by the pivot, which adds nothing; others are filled in.
template <bool FULL> __device__ __forceinline__ bool present(int n, int at) {
    return FULL || FAMILY != MOMENTS || static_cast<unsigned>(at) < static_cast<unsigned>(n);
}

// COUNT neighbours along the dimension, from an index on; FULL: the row has them all.
template <bool FULL, int COUNT> struct Neighbours {
    Pack<scalar_t, PAIRS ? (COUNT + 1) / 2 * 2 : COUNT> pack;
    int first, n;
    __device__ __forceinline__ Neighbours(int index, int position, int n) : first(position), n(n) {
        if constexpr (PAIRS) {
            constexpr int WORDS = (COUNT + 1) / 2;
            const unsigned* from = reinterpret_cast<const unsigned*>(shared) + static_cast<unsigned>(index) / 2;
            unsigned words[WORDS + 1];
#pragma unroll
            for (int k = 0; k < WORDS; ++k) words[k] = from[k];
            words[WORDS] = from[((index & 1) + COUNT - 1) / 2];  // what follows may still be on its way
#pragma unroll
            for (int k = 0; k < WORDS; ++k)
                reinterpret_cast<unsigned*>(pack.data)[k] = __funnelshift_r(words[k], words[k + 1], (index & 1) * 16);
        } else {
#pragma unroll
            for (int k = 0; k < COUNT; ++k) pack.data[k] = memory()[index + k * LANES];
        }
    }
    __device__ __forceinline__ acc_t any(int k) const {
        if constexpr (PAIRS) return fusionrt::at(pack, k);
        else return to_acc(pack.data[k]);
    }
    __device__ __forceinline__ Sum one(int k, acc_t pivot) const {
        return Sum::one(present<FULL>(n, first + k) ? any(k) : pivot, pivot, first + k);
    }
};

// Elements that the row has of [first, stop).
__device__ __forceinline__ int within(const Params& p, int first, int stop) {
    return max(min(stop, p.n) - max(first, 0), 0);
}
template <bool FULL> __device__ __forceinline__ acc_t number(const Params& p, int first, int stop) {
    return static_cast<acc_t>(FULL ? stop - first : within(p, first, stop));
}

// Of the ITEMS elements from an index on.
template <bool FULL> __device__ __forceinline__ Value chunk(const Params& p, int index, int position) {
    const Neighbours<FULL, ITEMS> x(index, position, p.n);
    const acc_t pivot = x.any(0);
    Sum sum = x.one(0, pivot);
#pragma unroll
    for (int k = 1; k < ITEMS; ++k) sum = join(sum, x.one(k, pivot));
    return kept(sum, pivot, number<FULL>(p, position, position + ITEMS));
}

// 1 / n, by Newton's steps: divisions in double, one for each of a thread's windows, do not fit the registers.
__device__ __forceinline__ acc_t inverse_of(acc_t n) {
    if (!(n > acc_t(0))) return inf;
    acc_t y = rcp(static_cast<float>(n));
#pragma unroll
    for (int step = 0; step < (sizeof(acc_t) == 8 ? 2 : 1); ++step) y = y * (acc_t(2) - n * y);
    return y;
}

__device__ __forceinline__ acc_t finished(const Params& p, Total all, int count) {
    return !MEAN ? all.sum : all.sum * (count == p.window ? p.inverse : inverse_of(count));
}
__device__ __forceinline__ acc_t finished(const Params&, Extreme all, int) { return all.value; }
__device__ __forceinline__ acc_t finished(const Params&, Placed all, int) { return all.value; }
__device__ __forceinline__ acc_t finished(const Params& p, Shifted all, int count) {
    const bool whole = count == p.window;
    const acc_t by = whole ? p.inverse : inverse_of(count);
    const acc_t share = whole ? p.share : inverse_of(static_cast<acc_t>(count) - p.correction);
    const acc_t squares = all.squares - all.sum * (all.sum * by);
    const acc_t variance = (squares < acc_t(0) ? acc_t(0) : squares) * share;
    if constexpr (!ROOT) return variance;
    if constexpr (sizeof(acc_t) == 8 && sizeof(scalar_t) == 4) {  // a root in double costs more than all the rest
        const float near = static_cast<float>(variance);
        if (near > 1e-30f && near < 1e30f) {
            const float inverse = ::rsqrtf(near), root = near * inverse;
            return ::fmaf(::fmaf(-root, root, near), 0.5f * inverse, root);  // one step of Newton
        }
    }
    return sqrt(variance);
}

template <typename S> __device__ __forceinline__ int place_of(S) { return 0; }
__device__ __forceinline__ int place_of(Placed all) { return max(all.index, 0); }  // before the row is filled in

// ---------------------------------------------------------------------------------------------
// Between tail and rest

template <typename T> __device__ __forceinline__ T from_lane(T value, int lane) {
    static_assert(sizeof(T) % 4 == 0, "whole words");
    union { T value; unsigned words[sizeof(T) / 4]; } v = {value};
#pragma unroll
    for (int k = 0; k < static_cast<int>(sizeof(T) / 4); ++k)
        v.words[k] = __shfl_sync(0xffffffffu, v.words[k], lane & 31);
    return v.value;
}

// Of the `count` chunks after this thread's, where a warp's 32 threads have chunks in common: a scan of those before
// these, one of those after, and these once for all.
template <bool FULL>
__device__ __forceinline__ Sum scanned(const Params& p, const Value* chunks, int count, Value middle, acc_t pivot,
                                       int position) {
    const int lane = threadIdx.x % 32, mine = threadIdx.x, base = mine - lane;
    const acc_t own = pivot_of(number_of(middle) > acc_t(0) ? middle : chunks[base + 32]);
    const auto sum_of = [&](int k) {
        const Value v = chunks[k];
        return about(v, own, FULL ? acc_t(ITEMS) : number_of(v));
    };
    Sum before = lane < 31 ? sum_of(mine + 1) : Sum::none();
    Sum after = lane > 0 ? sum_of(mine + count) : Sum::none(position + (count + 1) * ITEMS + p.gap);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const Sum next = from_lane(before, lane + step), last = from_lane(after, lane - step);
        if (lane + step < 32) before = join(before, next);
        if (lane >= step) after = join(last, after);
    }
    Sum common = Sum::none();
    for (int k = base + 32 + lane; k <= base + count; k += 32) common = join_any(common, sum_of(k));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) common = join_any(common, from_lane(common, lane ^ step));
    if (p.middles != nullptr) common = join_any(common, about(middle, own, number_of(middle)));
    const int first = position + ITEMS, stop = first + count * ITEMS + p.gap;
    return moved(join(join(before, common), after), own - pivot, number<FULL>(p, first, stop));
}

template <bool FULL>
__device__ __forceinline__ Sum joined(const Value* chunks, int count, Value middle, acc_t pivot, int position) {
    Sum all = Sum::none(position + ITEMS);
    for (int k = 1; k <= count; ++k) {
        const Value v = chunks[threadIdx.x + k * LANES];
        all = join(all, about(v, pivot, FULL ? acc_t(ITEMS) : number_of(v)));
    }
    return join_any(all, about(middle, pivot, number_of(middle)));
}

// ---------------------------------------------------------------------------------------------
// Windows

template <bool WIDE> struct Rounded { using type = scalar_t; };
template <> struct Rounded<false> { using type = acc_t; };   // 16 bits later, in pairs

struct Results {
    using result_t = Rounded<sizeof(scalar_t) >= 4>::type;
    result_t values[ITEMS];
    int places[ITEMS];
    // Of the window k of a thread's that begins at `first`.
    template <bool FULL> __device__ __forceinline__ void set(const Params& p, int k, int first, Sum all) {
        const int count = FULL ? p.window : within(p, first, first + p.window);
        const acc_t value = finished(p, all, count);
        values[k] = static_cast<result_t>(FULL || count >= p.min_periods ? value : acc_t(nan));
        if constexpr (INDEXED) places[k] = FULL || count >= p.min_periods ? place_of(all) : -1;
    }
};

template <typename T> __device__ __forceinline__ void store(const Params& p, const Tile& tile, T* to, const T* staged) {
    constexpr int W = 16 / static_cast<int>(sizeof(T) > sizeof(scalar_t) ? sizeof(T) : sizeof(scalar_t));
    const int64_t row = tile.outer * p.results;
    if constexpr (LANES == 1) {
        T* at = to + row + tile.first;
        for (int k = threadIdx.x * W; k < TILE && p.stride == 1; k += BLOCK * W) {
            const int window = tile.first + k;
            if (window >= 0 && window + W <= p.results) {
                store_bytes<Pack<T, W>::BYTES>(at + k, staged + k);
            } else {
                for (int v = 0; v < W; ++v)
                    if (window + v >= 0 && window + v < p.results) at[k + v] = staged[k + v];
            }
        }
        if (p.stride == 1) return;
    } else if constexpr (LANES % W == 0) {
        if (p.stride == 1 && p.inner % VECTOR == 0) {
            constexpr int UNITS = LANES / W, ROWS = BLOCK / UNITS;
            const int unit = thread() % UNITS * W, last = min(TILE, p.results - tile.first);
            int k = thread() / UNITS;
            T* at = to + (row + tile.first + k) * p.inner + tile.column + unit;
            if (tile.column + unit >= p.inner) return;
            for (; k < last; k += ROWS, at += ROWS * p.inner)
                store_bytes<Pack<T, W>::BYTES>(at, staged + k * LANES + unit);
            return;
        }
    }
    const int64_t column = tile.column + thread() % LANES;
    const int stride = p.stride;
    const int low = (max(tile.first, 0) + stride - 1) / stride;
    for (int result = low + thread() / LANES; result < p.results && column < p.inner; result += SCAN) {
        const int k = result * stride - tile.first;
        if (k >= TILE) break;
        to[(row + result) * p.inner + column] = staged[k * LANES + thread() % LANES];
    }
}

// By way of the shared memory of the tile's own elements.
__device__ __forceinline__ void store_results(const Params& p, const Tile& tile, const Results& results) {
    const int at = own_index();
    scalar_t* staged = memory() + tile.own / VECTOR * VECTOR;
    __syncthreads();
    if constexpr (PAIRS) {
#pragma unroll
        for (int k = 0; k < ITEMS; k += 2) {
            Pack<scalar_t, 2> pair;
            pair.data[0] = from_acc<scalar_t>(results.values[k]);
            pair.data[1] = from_acc<scalar_t>(results.values[k + 1]);
            *reinterpret_cast<Pack<scalar_t, 2>*>(staged + at + k) = pair;
        }
    } else {
#pragma unroll
        for (int k = 0; k < ITEMS; ++k) staged[at + k * LANES] = from_acc<scalar_t>(results.values[k]);
    }
    __syncthreads();
    store(p, tile, p.out, staged);
    if constexpr (INDEXED) {
        int* places = reinterpret_cast<int*>(shared);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < ITEMS; ++k) places[at + k * LANES] = results.places[k];
        __syncthreads();
        store(p, tile, p.index, places);
    }
}

// Shorter than a chunk: WINDOW > 0.
template <bool FULL>
__device__ __forceinline__ void short_windows(const Params& p, const Tile& tile, int position, Results& results) {
    constexpr int SEGMENT = WINDOW > 0 ? WINDOW : 1;
    const Neighbours<FULL, ITEMS + SEGMENT - 1> x(tile.own + own_index(), position, p.n);
#pragma unroll
    for (int begin = 0; begin < ITEMS; begin += SEGMENT) {
        const int end = begin + SEGMENT;
        const acc_t pivot = x.any(end - 1);
        Sum tail[SEGMENT];
        tail[SEGMENT - 1] = x.one(end - 1, pivot);
#pragma unroll
        for (int k = SEGMENT - 2; k >= 0; --k) tail[k] = join(x.one(begin + k, pivot), tail[k + 1]);
        results.set<FULL>(p, begin, position + begin, tail[0]);
        Sum head;
#pragma unroll
        for (int k = 1; k < SEGMENT; ++k) {
            if (begin + k >= ITEMS) break;
            const Sum next = x.one(end + k - 1, pivot);
            head = k == 1 ? next : join(head, next);
            results.set<FULL>(p, begin + k, position + begin + k, join(tail[k], head));
        }
    }
}

template <bool FULL>
__device__ __forceinline__ void long_windows(const Params& p, const Tile& tile, int position, Results& results) {
    Value* chunks = reinterpret_cast<Value*>(reinterpret_cast<char*>(shared) + p.chunks_at);
    const int scan = thread() / LANES, column = thread() % LANES;
    const int length = p.gap ? TILE : p.window;   // of a window, in shared memory
    const int count = length / ITEMS - 1, rest = length % ITEMS;

    Sum tail[ITEMS];
    acc_t pivot;
    {
        const Neighbours<FULL, ITEMS> x(tile.own + own_index(), position, p.n);
        pivot = x.any(ITEMS - 1);
        tail[ITEMS - 1] = x.one(ITEMS - 1, pivot);
#pragma unroll
        for (int k = ITEMS - 2; k >= 0; --k) tail[k] = join(x.one(k, pivot), tail[k + 1]);
    }
    chunks[threadIdx.x] = kept(tail[0], pivot, number<FULL>(p, position, position + ITEMS));
    const int after = position + TILE + p.gap;    // of the chunk SCAN later
    for (int k = scan; k < count; k += SCAN) {
        const int index = tile.beyond + k * ITEMS * LANES + column;
        chunks[(SCAN + k) * LANES + column] = chunk<FULL>(p, index, after + (k - scan) * ITEMS);
    }
    __syncthreads();

    Value middle = Value::none();
    if (p.middles != nullptr) {
        middle = p.middles[(tile.outer * p.tiles + tile.number) * p.inner + min(tile.column + column, p.inner - 1)];
        if (sizeof(acc_t) == 4 && number_of(middle) > acc_t(0)) {  // a long window's pivot has to be near its mean
#pragma unroll
            for (int k = 0; k < ITEMS; ++k)
                tail[k] = moved(tail[k], pivot - pivot_of(middle), number<FULL>(p, position + k, position + ITEMS));
            pivot = pivot_of(middle);
        }
    }
    Sum head = LANES == 1 && count >= 32 ? scanned<FULL>(p, chunks, count, middle, pivot, position)
                                         : joined<FULL>(chunks, count, middle, pivot, position);
    const int place = tile.beyond + (scan + 1 + count - SCAN) * ITEMS * LANES + column;
    const int end = position + length + p.gap;
    for (int k = 0; k < rest; ++k) {
        const acc_t x = to_acc(memory()[place + k * LANES]);
        const int at = end - rest + k;
        head = join(head, Sum::one(present<FULL>(p.n, at) ? x : pivot, pivot, at));
    }
    const Neighbours<FULL, ITEMS - 1> y(place + rest * LANES, end, p.n);
    results.set<FULL>(p, 0, position, join(tail[0], head));
#pragma unroll
    for (int k = 1; k < ITEMS; ++k) {
        head = join(head, y.one(k - 1, pivot));
        results.set<FULL>(p, k, position + k, join(tail[k], head));
    }
}

// Whether windows first ... stop - 1 of the row have all their elements.
__device__ __forceinline__ bool whole(const Params& p, int first, int stop) {
    return max(first, 0) >= p.left && min(stop, p.dense) + p.window - 1 - p.left <= p.n;
}

__device__ __forceinline__ void wait_for_tile(int later) {
    if (TILES == 1 || later == 0) wait_for_copies<0>();
    else if (later == 1) wait_for_copies<1>();
    else if (later == 2) wait_for_copies<2>();
    else wait_for_copies<3>();
    __syncthreads();
}

__device__ __forceinline__ void windows(const Params& p) {
    Tile tile = tile_of(p);
    const int from = tile.first - p.left, more = p.gap ? 0 : p.window - 1;
    tile.own = load(p, tile, 0, from, 0, TILE + more);
    tile.beyond = p.gap ? load(p, tile, p.beyond_at, from + TILE + p.gap, 0, TILE) : tile.own + TILE * LANES;
    commit_copies();
#pragma unroll 1
    for (int k = 1; k < TILES; ++k) {
        load(p, tile, 0, from, k * TILE + more, (k + 1) * TILE + more);
        commit_copies();
    }
    if (!whole(p, tile.first, tile.first + TILES * TILE)) {
        wait_for_tile(0);
        fill(p, tile, tile.own, from, TILES * TILE + more);
        if (p.gap) fill(p, tile, tile.beyond, from + TILE + p.gap, TILE);
    }
#pragma unroll 1
    for (int k = 0; k < TILES && tile.first < p.dense; ++k) {
        wait_for_tile(TILES - 1 - k);
        Results results;
        const int position = tile.first - p.left + thread() / LANES * ITEMS;
        const bool full = whole(p, tile.first, tile.first + TILE);
        if constexpr (WINDOW > 0) {
            if (full) short_windows<true>(p, tile, position, results);
            else short_windows<false>(p, tile, position, results);
        } else {
            if (full) long_windows<true>(p, tile, position, results);
            else long_windows<false>(p, tile, position, results);
        }
        store_results(p, tile, results);
        tile.first += TILE, tile.own += TILE * LANES, tile.beyond += TILE * LANES;
    }
    wait_for_copies<0>();
}

// ---------------------------------------------------------------------------------------------
// Between the ends of long windows

constexpr int RADIX = 16, WARPS = BLOCK / 32, STEPS = 32 / LANES;

struct Ends { Sum sum[WARPS][LANES]; };

// Of all threads' sums, to those of the first chunk.
__device__ __forceinline__ Sum of_block(Sum mine, Ends& ends) {
    const int lane = thread() % 32, warp = thread() / 32, column = lane % LANES;
#pragma unroll
    for (int step = 1; step < STEPS; step *= 2) {
        const Sum next = from_lane(mine, lane + step * LANES);
        if ((lane / LANES) % (2 * step) == 0) mine = join(mine, next);
    }
    if (lane < LANES) ends.sum[warp][column] = mine;
    __syncthreads();
    if (thread() < LANES)
        for (int w = 1; w < WARPS; ++w) mine = join(mine, ends.sum[w][column]);
    return mine;
}

// About the first element that the row has.
__device__ __forceinline__ void chunks(const Params& p) {
    __shared__ Ends ends[2];
    const Tile tile = tile_of(p);
    const int scan = thread() / LANES, column = thread() % LANES, from = tile.first - p.left;
    const int index = load(p, tile, 0, from, 0, TILE), position = from + scan * ITEMS;
    commit_copies();
    wait_for_tile(0);
    if (from < 0 || from + TILE > p.n) {
        fill(p, tile, index, from, TILE);
        __syncthreads();
    }
    const acc_t pivot = to_acc(memory()[index + min(max(-from, 0), TILE - 1) * LANES + column]);
    const Neighbours<false, ITEMS> x(index + own_index(), position, p.n);
    Sum whole = Sum::none(position), head = Sum::none(position);
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
        const Sum one = x.one(k, pivot);
        whole = join(whole, one);
        if (scan * ITEMS + k < p.head) head = join(head, one);
    }
    whole = of_block(whole, ends[0]), head = of_block(head, ends[1]);
    if (scan == 0 && tile.column + column < p.inner) {
        const int64_t at = (tile.outer * p.tiles + tile.number) * p.inner + tile.column + column;
        static_cast<Value&>(p.chunks[at]) = kept(whole, pivot, number<false>(p, from, from + TILE));
        static_cast<Value&>(p.heads[at]) = kept(head, pivot, number<false>(p, from, from + p.head));
    }
}

__device__ __forceinline__ Value gathered(const State* chunks, Value all, int64_t outer, int64_t first, int64_t column,
                                          const Params& p, int count, int64_t step) {
    for (int k = 0; k < count && first + k * step < p.chunk_tiles; ++k)
        all = join_any(all, static_cast<Value>(chunks[(outer * p.chunk_tiles + first + k * step) * p.inner + column]));
    return all;
}

// Of RADIX times as many tiles.
__device__ __forceinline__ void folds(const Params& p) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * BLOCK + threadIdx.x;
    const int64_t column = at % p.inner, number = at / p.inner % p.chunk_tiles;
    const int64_t outer = at / p.inner / p.chunk_tiles;
    if (outer < p.outer)
        static_cast<Value&>(p.folded[at]) = gathered(p.chunks, Value::none(), outer, number, column, p, RADIX, p.span);
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
        all = gathered(p.folds[level], all, outer, first, column, p, count, size);
        first += count * size, rest -= count * size;
    }
    static_cast<Value&>(p.middles[at]) = gathered(p.heads, all, outer, first, column, p, 1, 1);
}

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT) window(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    if constexpr (STAGE == WINDOWS) windows(p);
    else if constexpr (STAGE == CHUNKS) chunks(p);
    else if constexpr (STAGE == FOLDS) folds(p);
    else middles(p);
}
