// Depthwise convolution as depthwise.cu describes it, for 16-bit images on matrix units.
//
// A row of taps makes COLUMNS neighbouring results of a strip from DEPTH neighbouring pixels: a product with a band
// matrix. A product is of 16 rows, two rows of taps by 8 results, with 8 strips; a warp does it for each of VEC
// channels and goes down the rows as depthwise.cu does: a turn takes rows of pixels of every strip, adds them to all
// the rows of results that they count for, and finishes the oldest. Less than half of what is multiplied are taps,
// yet it takes a fraction of the instructions.
//
// A block has CHANNELS channels of the same 8 strips: 2^strips of them side by side in a band, the other bands are
// chunks of rows and images of their own. Its rows come through a ring of STAGES in shared memory, zeros
// for what is beside the image; results leave through shared memory as well, in whole sectors.
//
// In a band matrix zeros meet pixels that do not belong to a result. Where these are infinite or NaN it is
// computed again, tap by tap.
//
// The prologue defines what it does for depthwise.cu, VEC being 4, but for COLUMNS and LANES; and
//   DEPTH       pixels of a strip that results depend on, 8 or 16
//   ROWS        of results that a turn finishes, unless TRANSPOSED
//   STAGES      turns whose rows there is memory for
//   BLOCKS      that share a multiprocessor

#include "prelude.cuh"
#include "depthwise.cuh"
#include "copies.cuh"
#include "mma.cuh"

constexpr int ROWS_OUT = TRANSPOSED ? STRIDE_H : ROWS, ROWS_IN = TRANSPOSED ? 1 : ROWS * STRIDE_H;  // of a turn
// Turns until the first row is finished.
constexpr int BEFORE = TRANSPOSED ? (KH - 1) / STRIDE_H : ((KH - 1) / STRIDE_H + ROWS - 1) / ROWS;
constexpr int HELD = TRANSPOSED ? (KH > STRIDE_H ? KH : STRIDE_H) : (BEFORE + 1) * ROWS;
constexpr int LEFT = TRANSPOSED ? (KW - 1) / STRIDE_W : 0;
constexpr int PAIRS = (HELD + 1) / 2;        // of held rows: h and h + PAIRS share a product
constexpr int STRIPS = 8, RESULTS = 8;       // strips of a product; results of a strip that it has room for
constexpr int CHANNELS = BLOCK / 32 * VEC, UNITS = CHANNELS / 8, UNIT = 16;  // 16-byte units of a pixel
constexpr int LOADS = 2;                     // units of a row that a thread copies
constexpr bool CROWDED = BLOCKS > 2;         // sums and products leave an epilogue few registers
constexpr int PIXEL = CHANNELS * 2, TILE = STRIPS * RESULTS * PIXEL, TILES = ROWS_OUT * TILE;  // bytes
static_assert(BLOCK == STRIPS * RESULTS * UNITS, "a thread stores a unit of a row");

using Held = acc_t[2 * PAIRS][VEC][2];

// Row and column of the tap by which a turn's row `s` counts for a held row, a pixel for a result.
__device__ constexpr int tap_row(int s, int held) { return TRANSPOSED ? held : s + STRIDE_H * (BEFORE * ROWS - held); }
__device__ constexpr int tap_column(int result, int pixel) {
    return TRANSPOSED ? result + (LEFT - pixel) * STRIDE_W : pixel - result * STRIDE_W;
}
__device__ constexpr bool is_tap_row(int i) { return i >= 0 && i < KH; }
__device__ constexpr bool is_tap_column(int j) { return j >= 0 && j < KW; }
__device__ constexpr bool counts(int s, int pair) {
    return is_tap_row(tap_row(s, pair)) || (pair + PAIRS < HELD && is_tap_row(tap_row(s, pair + PAIRS)));
}
__device__ __forceinline__ int tap_of(int i, int j) { return FLIPPED ? TAPS - 1 - i * KW - j : i * KW + j; }

// The band matrices: of neighbouring rows and pairs the same.
constexpr int PRODUCTS = TRANSPOSED ? PAIRS : ROWS_IN + STRIDE_H * (PAIRS - 1);
using Products = unsigned[PRODUCTS][VEC][DEPTH / 4];
__device__ constexpr int product(int s, int pair) { return TRANSPOSED ? pair : s + STRIDE_H * (PAIRS - 1 - pair); }

// Where a unit of a pixel lies in shared memory: units of neighbours in different banks.
__device__ __forceinline__ int place(unsigned pixel, unsigned unit) {
    return pixel * PIXEL + ((unit ^ (pixel * UNITS / 8) ^ (pixel / 8)) & (UNITS - 1)) * UNIT;
}

// Rows of an image: the first ones of source and result, and turns.
struct Lines {
    int row, result_row, turns;
    unsigned image;
};

__device__ __forceinline__ Lines lines_of(const Params& p, unsigned lines) {
    const bool any = lines < p.lines;
    const int unit = digit(lines, p.chunks) * p.chunk, residue = digit(lines, p.residues_h);
    return {unit * ROWS_IN * p.dilation_h + p.source_top + residue,
            (unit - BEFORE) * ROWS_OUT * p.dilation_h + p.result_top + residue,
            any ? min(p.chunk, p.units - unit) + BEFORE : 0, lines};
}

// What a block does: its channels from `first` on, columns of its first strip, the first of its bands' lines.
struct Task {
    int first, source_column, result_column;
    unsigned lines;
};

__device__ __forceinline__ Task task_of(const Params& p) {
    unsigned rest = blockIdx.x;
    Task task;
    task.first = digit(rest, p.slices) * CHANNELS;
    const int strip = digit(rest, p.tiles) << p.strips, residue = digit(rest, p.residues_w);
    task.source_column = strip * p.pitch * p.dilation_w + p.source_left + residue;
    task.result_column = strip * p.columns * p.dilation_w + p.result_left + residue;
    task.lines = rest << (3 - p.strips);
    return task;
}

// A unit of a pixel that a thread copies of every row of the source: zeros, if there are no `rows`; none, if `to` is
// negative.
struct Source {
    const scalar_t* next;
    int row, rows, to;
};

__device__ __forceinline__ Source source_of(const Params& p, const Task& task, int index) {
    const int pixel = index / UNITS, unit = index % UNITS, band = p.band.divide(pixel);
    const int column = task.source_column + (pixel - band * p.band.value) * p.dilation_w, channel = task.first + unit * 8;
    const Lines lines = lines_of(p, task.lines + band);
    Source s;
    s.row = lines.row + p.skipped * ROWS_IN * p.dilation_h;
    s.next = p.x + (lines.image * p.x_batch + s.row * p.x_row + column * p.x_column + channel);
    s.rows = in_image(column, p.source_columns) && lines.turns > 0 && channel < p.channels ? p.source_rows : 0;
    keep(s.to = index < p.pixels * UNITS ? place(pixel, unit) : -1);
    return s;
}

__device__ __forceinline__ void fetch(const Params& p, Source (&source)[LOADS], unsigned stage) {
#pragma unroll
    for (int s = 0; s < ROWS_IN; ++s, stage += p.row_bytes)
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
            if (source[k].to >= 0)
                copy_or_clear(stage + source[k].to, source[k].next, in_image(source[k].row, source[k].rows));
            source[k].next += p.x_step;
            source[k].row += p.dilation_h;
        }
}

// A unit that a thread stores of the next row of the result, `row` of `rows` in all.
struct Drain {
    scalar_t* next;
    int row, rows;
};

__device__ __forceinline__ Drain drain_of(const Params& p, const Task& task) {
    const int slot = threadIdx.x / UNITS, unit = threadIdx.x % UNITS, strip = slot / RESULTS, result = slot % RESULTS;
    const int beside = strip & ((1 << p.strips) - 1), channel = task.first + unit * 8;
    const int column = task.result_column + (beside * p.columns + result) * p.dilation_w;
    const Lines lines = lines_of(p, task.lines + (strip >> p.strips));
    const int turn = ROWS_OUT * p.dilation_h, top = max(0, lines.result_row + BEFORE * turn);
    const int end = min(p.result_rows, lines.result_row + lines.turns * turn);
    const int row = lines.result_row + (p.skipped - 1) * turn;
    const bool inside = result < p.columns && in_image(column, p.result_columns) && channel < p.channels;
    return {p.out + (lines.image * p.out_batch + row * p.out_row + column * p.out_column + channel), row - top,
            inside ? max(0, end - top) : 0};
}

__device__ __forceinline__ void store(const Params& p, Drain& drain, const char* tile) {
#pragma unroll
    for (int r = 0; r < ROWS_OUT; ++r) {
        const auto unit = shared_pack<8>(reinterpret_cast<const scalar_t*>(tile + r * TILE));
        if (in_image(drain.row, drain.rows)) store_bytes<UNIT>(drain.next, &unit);
        drain.next += p.out_step;
        drain.row += p.dilation_h;
    }
}

// Lane 4 g + t holds result g of strips 2 t and 2 t + 1, and reads pixels t, t + 4, ... of strip g.
__device__ __forceinline__ int group() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int member() { return threadIdx.x % 4; }
__device__ __forceinline__ int warp_channel() { return threadIdx.x / 32 * VEC; }
__device__ __forceinline__ int channel_place(int pixel) {
    return place(pixel, warp_channel() / 8) + warp_channel() % 8 * 2;
}

__device__ __forceinline__ void share_weights(const Params& p, const Task& task, unsigned short* shared) {
    const int count = min(CHANNELS, p.channels - task.first) * TAPS;
    for (int k = threadIdx.x; k < count; k += BLOCK) shared[k] = p.weight[task.first * TAPS + k].bits;
    if (threadIdx.x < 2) shared[CHANNELS * TAPS + threadIdx.x] = 0;
    __syncthreads();
}

__device__ __forceinline__ void read_weights(const unsigned short* shared, Products& a) {
    const unsigned short* taps = shared + warp_channel() * TAPS;
#pragma unroll
    for (int s = 0; s < ROWS_IN; ++s)
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            if (!TRANSPOSED && s >= STRIDE_H && pair > 0) continue;  // that of (s - STRIDE_H, pair - 1)
            unsigned(&to)[VEC][DEPTH / 4] = a[product(s, pair)];
#pragma unroll
            for (int k = 0; k < DEPTH / 4; ++k) {
                const int held = pair + k % 2 * PAIRS, i = held < HELD ? tap_row(s, held) : -1;
#pragma unroll
                for (int c = 0; c < VEC; ++c) to[c][k] = is_tap_row(i) ? 0 : unknown(shared + CHANNELS * TAPS);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int j = tap_column(group(), member() + 4 * e + k / 2 * 8);
                    if (is_tap_row(i) && is_tap_column(j))
#pragma unroll
                        for (int c = 0; c < VEC; ++c)
                            to[c][k] |= static_cast<unsigned>(taps[c * TAPS + tap_of(i, j)]) << 16 * e;
                }
            }
        }
}

// The finished rows go, new ones come: nothing was added to what is beyond HELD.
__device__ __forceinline__ void move_on(Held& held) {
#pragma unroll
    for (int h = 0; h < 2 * PAIRS; ++h)
#pragma unroll
        for (int c = 0; c < VEC; ++c)
#pragma unroll
            for (int n = 0; n < 2; ++n)
                held[h][c][n] = h + ROWS_OUT < 2 * PAIRS ? held[(h + ROWS_OUT) % (2 * PAIRS)][c][n] : acc_t(0);
}

template <int S> __device__ __forceinline__ void take_row(const char* row, const int (&at)[DEPTH / 4],
                                                          const Products& a, Held& held) {
    unsigned x[DEPTH / 4][VEC / 2], b[VEC][DEPTH / 8];
#pragma unroll
    for (int k = 0; k < DEPTH / 4; ++k) {
        const auto pack = shared_pack<VEC / 2>(reinterpret_cast<const unsigned*>(row + at[k]));
#pragma unroll
        for (int w = 0; w < VEC / 2; ++w) x[k][w] = pack.data[w];
    }
#pragma unroll
    for (int c = 0; c < VEC; ++c)
#pragma unroll
        for (int k = 0; k < DEPTH / 8; ++k)
            b[c][k] = __byte_perm(x[2 * k][c / 2], x[2 * k + 1][c / 2], c % 2 ? 0x7632 : 0x5410);
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair)
        if (counts(S, pair))
#pragma unroll
            for (int c = 0; c < VEC; ++c)
                multiply<DEPTH>(scalar_t{}, held[pair][c][0], held[pair][c][1], held[pair + PAIRS][c][0],
                                held[pair + PAIRS][c][1], a[product(S, pair)][c], b[c]);
}

template <int S = 0>
__device__ __forceinline__ void take_rows(const Params& p, const char* rows, const int (&at)[DEPTH / 4],
                                          const Products& a, Held& held) {
    take_row<S>(rows, at, a, held);
    if constexpr (S + 1 < ROWS_IN) take_rows<S + 1>(p, rows + p.row_bytes, at, a, held);
}

// One finished value, tap by tap: the r-th row of a turn, of result g.
__device__ __noinline__ acc_t exact(const Params& p, int strip, int channel, int turn, int r) {
    const Task task = task_of(p);
    const Lines lines = lines_of(p, task.lines + (strip >> p.strips));
    const int column = task.source_column + (strip & ((1 << p.strips) - 1)) * p.pitch * p.dilation_w;
    const int rows = lines.turns > 0 ? p.source_rows : 0;  // a strip may be of no image
    const scalar_t* x = p.x + (lines.image * p.x_batch + channel);
    acc_t sum = 0;
#pragma unroll 1
    for (int held = r + (HELD - 1 - r) / ROWS_OUT * ROWS_OUT; held >= r; held -= ROWS_OUT)
#pragma unroll 1
        for (int s = 0; s < ROWS_IN; ++s) {
            const int i = tap_row(s, held);
            const int row = lines.row + ((turn - held / ROWS_OUT) * ROWS_IN + s) * p.dilation_h;
            if (!is_tap_row(i) || !in_image(row, rows)) continue;
#pragma unroll 1
            for (int k = 0; k < DEPTH; ++k) {
                const int j = tap_column(group(), k), at = column + k * p.dilation_w;
                if (is_tap_column(j) && in_image(at, p.source_columns))
                    sum += to_acc(x[row * p.x_row + at * p.x_column]) * to_acc(p.weight[channel * TAPS + tap_of(i, j)]);
            }
        }
    return sum;
}

// What of a strip pair's values has to be computed again is; `r` as above.
__device__ __forceinline__ void mend(const Params& p, int channel, int turn, int r, acc_t (&values)[VEC][2]) {
    acc_t sick = 0;
#pragma unroll
    for (int k = 0; k < 2 * VEC; ++k) sick += values[k / 2][k % 2] * acc_t(0);
    if (sick == acc_t(0)) return;
#pragma unroll 1
    for (int k = 0; k < 2 * VEC; ++k) {
        const acc_t value = exact(p, 2 * member() + k % 2, channel + k / 2, turn, r);
#pragma unroll
        for (int m = 0; m < 2 * VEC; ++m)
            if (m == k) values[m / 2][m % 2] = value;
    }
}

__device__ __forceinline__ Pack<scalar_t, VEC> residual_at(const Params& p, int strip, int channel, int turn, int r) {
    Pack<scalar_t, VEC> pack = {};
    if (!RESIDUAL) return pack;
    const Task task = task_of(p);
    const Lines lines = lines_of(p, task.lines + (strip >> p.strips));
    const int beside = strip & ((1 << p.strips) - 1), row = lines.result_row + (turn * ROWS_OUT + r) * p.dilation_h;
    const int column = task.result_column + (beside * p.columns + group()) * p.dilation_w;
    if (group() < p.columns && turn < lines.turns && in_image(row, p.result_rows) && in_image(column, p.result_columns))
        pack = load_pack<VEC>(p.residual + (lines.image * p.out_batch + row * p.out_row + column * p.out_column + channel));
    return pack;
}

// The finished rows into a tile, `to` being where either strip's result goes.
__device__ __forceinline__ void put(const Params& p, const Channels& channels, int channel, int turn, Held& held,
                                    char* tile, const int (&to)[2]) {
#pragma unroll
    for (int r = 0; r < ROWS_OUT; ++r) {
        mend(p, channel, turn, r, held[r]);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const auto added = residual_at(p, 2 * member() + n, channel, turn, r);
            Pack<scalar_t, VEC> out;
#pragma unroll
            for (int c = 0; c < VEC; ++c)
                out.data[c] = from_acc<scalar_t>(finish(channels, c, held[r][c][n], at(added, c)));
            *reinterpret_cast<Pack<scalar_t, VEC>*>(tile + r * TILE + to[n]) = out;
        }
        if constexpr (CROWDED) asm volatile("" ::: "memory");  // one row's epilogue after the other
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS) depthwise_mma(const __grid_constant__ Params p) {
    wait_for_kernel_before();
#if __CUDA_ARCH__ >= 800
    extern __shared__ uint4 shared[];
    char* tiles = reinterpret_cast<char*>(shared);
    char* stages = tiles + 2 * TILES;
    const Task task = task_of(p);
    int end = 0;
    for (int band = 0; band < STRIPS >> p.strips; ++band) end = max(end, lines_of(p, task.lines + band).turns);

    Source source[LOADS];
#pragma unroll
    for (int k = 0; k < LOADS; ++k) source[k] = source_of(p, task, threadIdx.x + k * BLOCK);
    const int stage = ROWS_IN * p.row_bytes;
    unsigned ring = shared_address(stages);
    keep(ring);
#pragma unroll
    for (int k = 0; k < STAGES - 1; ++k) {
        if (p.skipped + k < end) fetch(p, source, ring + k * stage);
        commit_copies();
    }
    // What a strip reads behind the last pixel meets zeros, but must be a number.
    for (int k = threadIdx.x; k < STAGES * ROWS_IN * DEPTH * UNITS; k += BLOCK) {
        char* row = stages + k / (DEPTH * UNITS) * p.row_bytes;
        *reinterpret_cast<uint4*>(row + place(p.pixels + k / UNITS % DEPTH, k % UNITS)) = uint4{0, 0, 0, 0};
    }

    Products a;
    share_weights(p, task, reinterpret_cast<unsigned short*>(tiles));
    read_weights(reinterpret_cast<const unsigned short*>(tiles), a);
    const int channel = task.first + warp_channel(), strip = group(), band = strip >> p.strips;
    const int pixel = band * p.band.value + (strip & ((1 << p.strips) - 1)) * p.pitch + member();
    int at[DEPTH / 4], to[2];
#pragma unroll
    for (int k = 0; k < DEPTH / 4; ++k) keep(at[k] = channel_place(pixel + 4 * k));
#pragma unroll
    for (int n = 0; n < 2; ++n) keep(to[n] = channel_place((2 * member() + n) * RESULTS + group()));
    const bool active = channel < p.channels;
    __shared__ Channels shared_channels[CROWDED ? BLOCK / 32 : 1];
    Channels own_channels;
    Channels& channels = CROWDED ? shared_channels[threadIdx.x / 32] : own_channels;
    channels = know(p, active ? channel : 0);
    Drain drain = drain_of(p, task);
    int unit = place(threadIdx.x / UNITS, threadIdx.x % UNITS);
    if (__CUDA_ARCH__ < 1000) keep(unit);  // sm_100 would spill it

    Held held = {};
    int read = 0, fill = (STAGES - 1) * stage, tile = 0;
#pragma unroll 1
    for (int turn = p.skipped; turn < end; ++turn) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        store(p, drain, tiles + (TILES - tile) + unit);  // of the turn before
        if (turn + STAGES - 1 < end) fetch(p, source, ring + fill);
        commit_copies();
        if (active) {
            move_on(held);
            take_rows(p, stages + read, at, a, held);
            put(p, channels, channel, turn, held, tiles + tile, to);  // of no use before the first is finished
        }
        tile = TILES - tile;
        fill = read;
        read = read + stage == STAGES * stage ? 0 : read + stage;
    }
    __syncthreads();
    store(p, drain, tiles + (TILES - tile) + unit);
#endif
}
